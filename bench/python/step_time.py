# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured step time: plain and under budgets, with measured rates and a table's.

    python step_time.py [--threads N] [NAME ...]

Each workload runs in a process of its own, on the CPU. A step is forward, backward and optimizer. Errors are
(predicted - measured) / measured. The slowdown is the planned step's time over the plain step's. With one
thread the processor time of the process counts, which other programs do not lengthen; with more, the clock.
The budgets are shares of the plain step's predicted peak; the plans are those of the measured rates.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from architectures import Entry, call, gpt2, text
from common import Table, median, parser, print_rows, rows_of
from truth_workloads import WORKLOADS, Workload

import memscale
from memscale import _core
from memscale.core.decision_engine import DecisionEngine
from memscale.core.planner import Planned
from memscale.hardware.detect import budget_bytes, detect

SHARES = (60, 30)
NAMES = (
    *("gpt2", "gpt2-autocast", "gpt2-vocab-kept", "llama-sgd", "llama-bf16", "bert-frozen", "vit", "swin"),
    *("t5-adafactor", "whisper", "convnext-autocast", "convnet-sgd", "unet", "wavenet", "lstm", "mixer"),
    *("mlp-dropped", "recommender", LARGE := "gpt2-large-vocabulary"),
)
_LARGE = Workload(
    Entry(gpt2(4, 512, 8, vocabulary=50257), text(2, 512, 50257)),
    False,
)
_AMPLE = 1 << 44
_WARM, _STEPS, _ENOUGH_S = 2, 7, 6.0


@dataclass
class Row:
    """One workload under one budget; times in nanoseconds.

    Attributes:
        workload: name.
        threads: that PyTorch computes with.
        share: budget in percent of the plain peak; 100: plain.
        measured_ns: median.
        calibrated_ns: predicted with measured rates.
        table_ns: predicted with rates of the table, for the same plan.
        spread: of the measured times, the middle half's width over the median.
        checkpointed: modules that the plan treats.
        source: where the first prediction's rates come from.
    """

    workload: str
    threads: int
    share: int
    measured_ns: int
    calibrated_ns: int
    table_ns: int
    spread: float
    checkpointed: int
    source: str


class Training:
    """One workload, ready to run step by step."""

    def __init__(self, work: Workload) -> None:
        torch.manual_seed(0)
        self.work, self.model, self.batch = work, work.build(), work.batch()
        self.optimizer = work.optimizer(work.trainable(self.model))

    def step(self) -> None:
        """Forward, backward and optimizer."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.work.precision == "autocast"):
            output = call(self.model, self.batch)
            loss = self.work.loss(output)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measured(self) -> list[int]:
        """Times of some steps, after others that do not count."""
        clock: Callable[[], int] = time.perf_counter_ns
        if torch.get_num_threads() == 1:
            clock = time.process_time_ns
        for _ in range(_WARM):
            self.step()
        times: list[int] = []
        while len(times) < 3 or (len(times) < _STEPS and sum(times) < _ENOUGH_S * 1e9):
            begin = clock()
            self.step()
            times.append(clock() - begin)
        return times

    def under(self, budget: int) -> tuple[list[int], Planned]:
        """Times under a budget, and what was planned."""
        config = memscale.Config(memory_budget=budget, enable_logging=False)
        with memscale.optimize(self.model, self.optimizer, config) as executor:
            times = self.measured()
            assert executor.planned is not None
            return times, executor.planned


def predicted_ns(planned: Planned, budget: int, rates: dict[str, Any]) -> int:
    """Duration of the planned step under some rates, operation by operation as it is replayed."""
    config = memscale.Config(memory_budget=budget)
    engine = DecisionEngine(config.effective(), planned.hardware, budget_bytes(config, planned.hardware))
    graph = planned.trace.graph
    plan = engine._decided(planned.trace, engine._allowed)
    replay = _core.replay(graph, plan, sim=engine.sim)
    ops, took = array("I"), array("q")
    ops.frombytes(replay["ops"])
    took.frombytes(_core.op_times_ns(graph, rates))
    again = bytes(replay["recompute"])
    regions = sum(now and not before for before, now in zip(b"\0" + again, again, strict=False))
    return sum(took[op] for op in ops) + regions * int(rates["recompute_ns"])


def rows(name: str) -> list[Row]:
    """Measures one workload."""
    training = Training(_LARGE if name == LARGE else WORKLOADS[name])
    training.step()
    table = detect(torch.device("cpu")).cost.for_core
    times, planned = training.under(_AMPLE)
    peak = planned.plan.plain.allocated_peak_bytes
    made = [_row(name, 100, times, planned, _AMPLE, table)]
    for share in SHARES:
        budget = peak * share // 100
        times, planned = training.under(budget)
        made.append(_row(name, share, times, planned, budget, table))
    return made


def _row(
    name: str, share: int, times: list[int], planned: Planned, budget: int, table: dict[str, Any]
) -> Row:
    times.sort()
    middle = int(median(times))
    return Row(
        workload=name,
        threads=torch.get_num_threads(),
        share=share,
        measured_ns=middle,
        calibrated_ns=planned.plan.predicted.step_time_ns,
        table_ns=predicted_ns(planned, budget, table),
        spread=(times[-1 - len(times) // 4] - times[len(times) // 4]) / middle,
        checkpointed=len(planned.plan.active),
        source=planned.hardware.cost.source,
    )


COLUMNS = (
    "workload", "threads", "share_percent", "measured_ms", "spread", "checkpointed", "rates",
    "calibrated_error", "table_error", "slowdown", "calibrated_slowdown", "table_slowdown",
)  # fmt: skip


def _errors(made: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Columns of the rows of one workload; the first is the plain one."""
    plain = made[0]
    return [
        (
            row["workload"],
            row["threads"],
            row["share"],
            row["measured_ns"] / 1e6,
            row["spread"],
            row["checkpointed"],
            row["source"],
            row["calibrated_ns"] / row["measured_ns"] - 1,
            row["table_ns"] / row["measured_ns"] - 1,
            row["measured_ns"] / plain["measured_ns"],
            row["calibrated_ns"] / plain["calibrated_ns"],
            row["table_ns"] / plain["table_ns"],
        )
        for row in made
    ]


def _summary(name: str, errors: list[float]) -> None:
    if errors:
        worst = max(errors, key=abs)
        size = median([abs(error) for error in errors])
        print(f"{name:32s} median {median(errors):+7.1%}   median size {size:6.1%}   worst {worst:+7.1%}")


def main() -> None:
    """Measures the workloads that are named, or all; with --child, one of them and as JSON."""
    if "--child" in sys.argv:
        _, _, name, threads = sys.argv
        torch.set_num_threads(int(threads))
        print_rows(lambda: [asdict(row) for row in rows(name)])
        return
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("names", nargs="*", default=list(NAMES))
    given = arguments.parse_args()
    table = Table("step_time", COLUMNS, given.dry)
    every: list[tuple[Any, ...]] = []
    for name in given.names:
        made = rows_of("step_time.py", "--child", name, str(given.threads))
        if "failed" in made[0]:
            print(f"{name}: {made[0]['failed']}")
            continue
        for row in _errors(made):
            table.add(*row)
            every.append(row)
    for what, rates in ((7, "measured rates"), (8, "rates of the table")):
        for share in (100, *SHARES):
            label = "plain" if share == 100 else f"at {share} %"
            _summary(f"{rates}, {label}", [row[what] for row in every if row[2] == share])
            if share != 100:
                ratios = [row[what + 3] / row[9] - 1 for row in every if row[2] == share]
                _summary(f"{rates}, slowdown {label}", ratios)


if __name__ == "__main__":
    main()
