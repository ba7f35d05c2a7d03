# SPDX-License-Identifier: Apache-2.0
"""What share of a run of 200 steps goes into planning, in the loops of practitioners.

    python planning_share.py [--steps N] [LOOP ...]

Each loop trains a GPT-2 of 4 layers, 384 wide, 4 x 192 tokens at most, in a process of its own under a budget
of 60 % of the plain peak of its largest batch. Time on the clock, the plan before the first step included.

    fixed           one shape
    alternating     two shapes in turn
    longest         each batch as long as its longest text, which follows a distribution
    packed          texts one behind the other, with positions that begin anew where one does
    unfreezing      all but the last layer frozen for 50 steps
    accumulation    four forwards a step, every other one of another shape
    evaluation      four forwards without gradients, twice as large, every 20 steps
    generation      24 tokens every 20 steps
    optimizer       the optimizer is another one from step 100 on

    planned         plans that were made for training
    share           planning over the run, that of forwards without gradients included
    median_ms       of a step
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from architectures import gpt2
from common import Table, median, parser, print_rows, rows_of
from torch import Tensor, nn

import memscale
from memscale.core import executor as executor_module

COLUMNS = ("loop", "steps", "planned", "planning_s", "run_s", "share", "median_ms", "fits")

ROWS, LENGTH, VOCABULARY = 4, 192, 1000
_BUDGET_PERCENT = 60


def _text(rows: int, length: int) -> dict[str, Tensor]:
    words = torch.randint(0, VOCABULARY, (rows, length))
    return {"input_ids": words, "labels": words}


def _packed() -> dict[str, Tensor]:
    positions: list[int] = []
    while len(positions) < ROWS * LENGTH:
        positions += range(int(torch.randint(16, LENGTH, ())))
    batch = _text(1, ROWS * LENGTH)
    return {**batch, "position_ids": torch.tensor(positions[: ROWS * LENGTH])[None]}


@dataclass
class Loop:
    """One way to train.

    Attributes:
        batch: of a step and a forward within it.
        forwards: per step.
        before: called before each step with its number, the model and its optimizer; it may return another.
        largest: the batch that the budget is for.
    """

    batch: Callable[[int, int], dict[str, Tensor]] = lambda step, forward: _text(ROWS, LENGTH)
    forwards: int = 1
    before: Callable[[int, nn.Module, torch.optim.Optimizer], Any] = lambda step, model, optimizer: None
    largest: dict[str, Tensor] = field(default_factory=lambda: _text(ROWS, LENGTH))


def _longest(step: int, forward: int) -> dict[str, Tensor]:
    lengths = torch.empty(ROWS).log_normal_(4.5, 0.5)
    return _text(ROWS, int(lengths.max().clamp(16, LENGTH)))


def _unfreeze(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    if step in (0, 50):
        model.transformer.requires_grad_(step == 50)
        model.transformer.h[-1].requires_grad_(True)


def _evaluate(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step % 20 == 19:
        model.eval()
        with torch.no_grad():
            for _ in range(4):
                model(**_text(2 * ROWS, LENGTH))
        model.train()


def _generate(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    if step % 20 == 19:
        model.eval()
        model.generate(_text(1, 16)["input_ids"], max_new_tokens=24, do_sample=False)
        model.train()


def _exchange(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9) if step == 100 else None


LOOPS = {
    "fixed": Loop(),
    "alternating": Loop(lambda step, forward: _text(ROWS, LENGTH if step % 2 else LENGTH // 2)),
    "longest": Loop(_longest),
    "packed": Loop(lambda step, forward: _packed(), largest=_text(1, ROWS * LENGTH)),
    "unfreezing": Loop(before=_unfreeze),
    "accumulation": Loop(lambda step, forward: _text(ROWS // (1 + forward % 2), LENGTH), forwards=4),
    "evaluation": Loop(before=_evaluate),
    "generation": Loop(before=_generate),
    "optimizer": Loop(before=_exchange),
}


class Plans:
    """Counts plans that are made."""

    def __init__(self) -> None:
        self.made = 0
        self._make = executor_module.make_plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.made += 1
        return self._make(*args, **kwargs)


def measured(name: str, steps: int) -> Iterator[dict[str, Any]]:
    """One row."""
    loop, plans = LOOPS[name], Plans()
    executor_module.make_plan = plans
    torch.manual_seed(0)
    model: Any = gpt2(4, 384, 6, VOCABULARY, length=ROWS * LENGTH)().train()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    peak = memscale.predict(model, optimizer, sample_input=loop.largest).plain.allocated_peak_bytes
    config = memscale.Config(memory_budget=peak * _BUDGET_PERCENT // 100, enable_logging=False)
    times = []
    began = time.perf_counter()
    memscale.wrap(model, config, optimizer=optimizer)
    for step in range(steps):
        optimizer = loop.before(step, model, optimizer) or optimizer
        step_began = time.perf_counter()
        for forward in range(loop.forwards):
            (model(**loop.batch(step, forward)).loss / loop.forwards).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - step_began)
    whole, executor = time.perf_counter() - began, memscale.executor_of(model)
    seconds = executor.planning_seconds
    found = (
        name,
        steps,
        plans.made,
        seconds,
        whole,
        seconds / whole,
        median(times) * 1e3,
        executor.plan.fits,
    )
    yield dict(zip(COLUMNS, found, strict=True))


def main() -> None:
    """Measures the loops that are named, or all."""
    if sys.argv[1:2] == ["--child"]:
        print_rows(lambda: list(measured(sys.argv[2], int(sys.argv[3]))))
        return
    options = parser(__doc__)
    options.add_argument("names", nargs="*", metavar="LOOP", help="default: all")
    options.add_argument("--steps", type=int, default=200)
    given = options.parse_args()
    table = Table("planning_share", COLUMNS, given.dry)
    shares = []
    for name in given.names or LOOPS:
        row = rows_of("planning_share.py", "--child", name, str(given.steps), timeout_s=1800)[0]
        if "failed" in row:
            print(f"{name}: {row['failed']}")
            continue
        shares.append(row["share"])
        table.add(*(row[column] for column in COLUMNS))
    if shares:
        print(
            f"share of planning: median {median(shares):.2%}, worst {max(shares):.2%}, of {len(shares)} loops"
        )


if __name__ == "__main__":
    main()
