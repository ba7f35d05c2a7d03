# SPDX-License-Identifier: Apache-2.0
"""`AutoTuner` beside how others look for a batch size, and beside an exhaustive search.

    python tuner.py [--quick] [--rounds N] [MODEL ...]        about 25 minutes on two quiet cores, --quick 4

Each model has a global batch of 32 and budgets between what its smallest and its plain step of that batch
take. A budget is a card: a step whose measured tensor bytes exceed it counts as an OOM, for all tuners.

    truth         every divisor of 32, wrapped under the budget, is measured: peak, and samples per second in
                  turns with all others. The largest that stays within the budget is the true largest
    memscale      `AutoTuner.tune`; its answer's throughput is the truth's row of that size
    others        `tuner_peers.py`; they train plain PyTorch with the size that they end at

    micro         the size that was found, 0: none
    oom           OOMs while it was looked for
    holds         two steps of the answer stay within the budget
    seconds       of the search
    share         of the best samples per second of the truth

    load          of the machine: above its number of cores, times say little

It is an error if MemScale runs out of memory, if its answer does not hold, or if it finds less than 95 % of
the true largest where the largest is the fastest.
"""

from __future__ import annotations

import copy
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import truth_models as models
from architectures import ConvNet, RecurrentLM, bert, gpt2, hugging_face
from common import Table, calibrate, parser, print_rows, rows_of
from torch import Tensor, nn
from tuner_peers import PEERS

import memscale
from memscale.autotuning import AutoTuner
from memscale.autotuning.candidates import divisors
from memscale.observability.tensor_peak import TensorPeak
from memscale.trace.loss import loss_of

COLUMNS = (
    "model", "budget_bytes", "method", "micro", "accumulation", "oom", "holds", "peak_bytes", "seconds",
    "samples_per_s", "share", "largest", "fastest", "load",
)  # fmt: skip

GLOBAL_BATCH = 32
SHARES = (0.25, 0.5, 0.8)
"""Of the way from the smallest peak of one sample to the plain peak of the global batch."""
QUICK = ("gpt2", "mixer")


def _text(length: int) -> Callable[[int], Any]:
    def sample(batch: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 1000, (batch, length))
        return {"input_ids": ids, "labels": ids}

    return sample


def _pictures(size: int) -> Callable[[int], Any]:
    return lambda batch: torch.randn(batch, 3, size, size)


def _words(length: int) -> Callable[[int], Any]:
    return lambda batch: torch.randint(0, 1000, (batch, length))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], bool | None]] = {
    "gpt2": (gpt2(4, 256, 4), _text(128), None),
    "bert": (bert(4, 256, 4), _text(128), None),
    "llama": (
        hugging_face("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=4, hidden_size=256,
                     num_attention_heads=4, num_key_value_heads=2, intermediate_size=688, vocab_size=1000,
                     use_cache=False),
        _text(128), None,
    ),
    "mixer": (lambda: models.Mixer(128, 4, 64), _pictures(64), None),
    "convnet": (ConvNet, _pictures(64), True),
    "recurrent": (lambda: RecurrentLM(nn.LSTM), _words(64), None),
}  # fmt: skip


class OutOfMemory(RuntimeError):
    """What a card of that size would have raised."""

    def __init__(self) -> None:
        super().__init__("CUDA out of memory. Tried to allocate more than the budget.")


@dataclass
class Work:
    """One model on one card.

    Attributes:
        model, sample, splittable: of `MODELS`.
        budget: bytes of the card.
        out_of_memory: steps that exceeded it.
    """

    model: nn.Module
    sample: Callable[[int], Any]
    splittable: bool | None
    budget: int
    out_of_memory: int = 0

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model as it was, and its optimizer."""
        model = copy.deepcopy(self.model)
        return model, torch.optim.AdamW(model.parameters())

    def plain_step(self, size: int) -> int:
        """What a peer's trial does: a step of plain PyTorch; its peak."""
        model, optimizer = self.fresh()
        peak = measured(model, optimizer, self.sample, size, 1)
        if peak > self.budget:
            self.out_of_memory += 1
            raise OutOfMemory
        return peak


def _call(model: nn.Module, batch: Any) -> Tensor:
    loss = loss_of(model(**batch) if isinstance(batch, dict) else model(batch))
    assert loss is not None
    return loss


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, sample: Callable[[int], Any], micro: int, times: int
) -> float:
    """One step of the optimizer with `times` micro-batches; seconds."""
    batch = sample(micro)
    began = time.perf_counter()
    for _ in range(times):
        (_call(model, batch) / times).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began


def measured(
    model: nn.Module, optimizer: torch.optim.Optimizer, sample: Callable[[int], Any], micro: int, times: int
) -> int:
    """Peak of two steps, of at most two micro-batches each."""
    with TensorPeak([*model.parameters(), *model.buffers()]) as peak:
        for _ in range(2):
            peak.mark()
            train(model, optimizer, sample, micro, min(times, 2))
        return peak.end()[0]


def wrapped(work: Work, micro: int, config: memscale.Config) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under the plan for a size."""
    model, optimizer = work.fresh()
    memscale.wrap(model, config, work.sample(micro), optimizer=optimizer)
    return model, optimizer


def truth(work: Work, rounds: int) -> dict[int, tuple[int, float]]:
    """Micro-batch → measured peak, samples per second, of those that stay within the budget."""
    config = memscale.Config(memory_budget=work.budget, enable_logging=False)
    runs: dict[int, tuple[Any, Any, int]] = {}
    for micro in divisors(GLOBAL_BATCH):
        times = GLOBAL_BATCH // micro
        with suppress(ValueError):  # batch normalisation over one value
            model, optimizer = work.fresh()
            with TensorPeak([*model.parameters(), *model.buffers()]) as peak:
                memscale.wrap(model, config, work.sample(micro), optimizer=optimizer)
                for _ in range(2):
                    peak.mark()
                    train(model, optimizer, work.sample, micro, min(times, 2))
                found = peak.end()[0]
            if found <= work.budget:
                runs[micro] = model, optimizer, found
    seconds: dict[int, list[float]] = {micro: [] for micro in runs}
    for _ in range(rounds):
        for micro, (model, optimizer, _) in runs.items():
            seconds[micro].append(train(model, optimizer, work.sample, micro, GLOBAL_BATCH // micro))
    return {
        micro: (peak, GLOBAL_BATCH / statistics.median(seconds[micro]))
        for micro, (_, _, peak) in runs.items()
    }


def ours(work: Work) -> tuple[int, int, float]:
    """Micro-batch, OOMs and seconds of the tuner."""
    model, optimizer = work.fresh()
    began = time.perf_counter()
    result = AutoTuner(
        model, optimizer, work.sample, GLOBAL_BATCH, memory_budget=work.budget, enable_logging=False,
        splittable=work.splittable,
    ).tune()  # fmt: skip
    seconds = time.perf_counter() - began
    run = [one.confirmed for one in result.candidates if one.confirmed is not None]
    exceeded = sum(one.out_of_memory or one.peak_bytes > work.budget for one in run)
    return result.micro_batch, exceeded, seconds


def theirs(work: Work, name: str) -> tuple[int, int, float]:
    """The same of a peer."""
    work.out_of_memory = 0
    began = time.perf_counter()
    try:
        size = PEERS[name](work.plain_step, work.budget, GLOBAL_BATCH)
    except RuntimeError:  # accelerate's: "No executable batch size found, reached zero."
        size = 0
    return size, work.out_of_memory, time.perf_counter() - began


def plain(work: Work, size: int, rounds: int) -> tuple[int, float]:
    """Peak and samples per second of plain PyTorch with that batch; 0 samples where it exceeds the card."""
    model, optimizer = work.fresh()
    peak = measured(model, optimizer, work.sample, size, 1)
    if peak > work.budget:
        return peak, 0.0
    return peak, size / statistics.median(
        train(model, optimizer, work.sample, size, 1) for _ in range(rounds)
    )


def cells(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    """All rows of a model."""
    build, sample, splittable = MODELS[name]
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters())
    least = memscale.predict(model, optimizer, sample_input=sample(2)).smallest_peak_bytes
    most = memscale.predict(model, optimizer, sample_input=sample(GLOBAL_BATCH)).plain.device_used_peak_bytes
    for share in SHARES:
        work = Work(model, sample, splittable, int(least + share * (most - least)))
        yield from rows(name, work, rounds)
        gc.collect()


def rows(name: str, work: Work, rounds: int) -> Iterator[dict[str, Any]]:
    """The rows of a budget."""
    there = truth(work, rounds)
    largest = max(there, default=0)
    fastest = max(there, key=lambda micro: there[micro][1], default=0)
    best = there[fastest][1] if there else 1.0
    for method in ("memscale", *PEERS):
        micro, oom, seconds = ours(work) if method == "memscale" else theirs(work, method)
        peak, rate, times = 0, 0.0, 1 if micro else 0
        if micro and method == "memscale":
            times = GLOBAL_BATCH // micro
            peak, rate = there.get(micro, (work.budget + 1, 0.0))
        elif micro:
            peak, rate = plain(work, micro, rounds)
        found = (
            name, work.budget, method, micro, times, oom, peak <= work.budget, peak, seconds, rate,
            rate / best, largest, fastest, round(os.getloadavg()[0], 1),
        )  # fmt: skip
        yield dict(zip(COLUMNS, found, strict=True))


def broken(row: dict[str, Any]) -> str:
    """What must hold of a row of MemScale and does not."""
    if row["oom"] or not row["holds"]:
        return "ran out of memory"
    if row["largest"] == row["fastest"] and row["micro"] < 0.95 * row["largest"]:
        return f"found {row['micro']}, and {row['largest']} is the largest and fastest"
    return ""


def main() -> int:
    """Measures the models that are named, or all."""
    if sys.argv[1:2] == ["--child"]:
        print_rows(lambda: list(cells(sys.argv[2], int(sys.argv[3]))))
        return 0
    options = parser(__doc__)
    options.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    options.add_argument("--rounds", type=int, default=5, help="steps that are timed, in turns (5)")
    options.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)}, 2 rounds")
    given = options.parse_args()
    calibrate()
    table = Table("tuner", COLUMNS, given.dry)
    wrong = []
    for name in given.models or (QUICK if given.quick else MODELS):
        rounds = 2 if given.quick else given.rounds
        for row in rows_of("tuner.py", "--child", name, str(rounds), timeout_s=3600):
            if "failed" in row:
                print(f"{name}: {row['failed']}\n{row.get('trace', '')}")
                wrong.append(name)
                continue
            table.add(*(row[column] for column in COLUMNS))
            reason = broken(row) if row["method"] == "memscale" else ""
            if reason:
                wrong.append(f"{name} at {row['budget_bytes']}: {reason}")
    for line in wrong:
        print(f"NOT AS IT MUST BE: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
