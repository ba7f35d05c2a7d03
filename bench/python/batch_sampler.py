# SPDX-License-Identifier: Apache-2.0
"""`BudgetBatchSampler` beside a fixed batch and beside length grouping, on the same samples and budget.

    python batch_sampler.py [--rounds N] [--samples N]        about 5 minutes on two quiet cores

A GPT-2 of 4 layers, 256 wide, trains one epoch of texts whose lengths follow a log-normal distribution up to
512, padded to the longest of each batch, without a plan. The budget is that of 4 texts of 512.

    fixed         the largest batch that is predicted to fit when all of its texts are the longest; any order
    grouped       the same batch, of texts of about the same length, as transformers' LengthGroupedSampler: in
                  groups of 50 batches, each sorted by length
    budget        `BudgetBatchSampler`

    samples_per_s over an epoch, optimizer steps included; epochs take turns
    padded        share of the positions that are padding
    oom           batches whose measured tensor bytes exceed the budget
    peak_bytes    highest of them

It is an error if a batch exceeds the budget.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from architectures import gpt2
from common import Table, calibrate, median, parser, print_rows, rows_of
from torch import Tensor, nn

import memscale
from memscale.autotuning import BudgetBatchSampler
from memscale.observability.tensor_peak import TensorPeak
from memscale.plans.budget import budget_for

COLUMNS = (
    "method", "samples", "budget_bytes", "batches", "largest_batch", "padded", "samples_per_s", "epochs",
    "peak_bytes", "oom", "load",
)  # fmt: skip

LONGEST, GROUP = 512, 50


def sample(batch: int, sequence: int) -> dict[str, Tensor]:
    """A batch of texts of one length."""
    ids = torch.randint(0, 1000, (batch, sequence))
    return {"input_ids": ids, "labels": ids}


def lengths_of(count: int) -> list[int]:
    """Lengths of texts, as in collections of them: most short, few long."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(count).log_normal_(4.6, 0.7, generator=generator)
    return [int(value) for value in drawn.clamp(8, LONGEST)]


def fixed(lengths: list[int], size: int) -> list[list[int]]:
    """Batches of any texts."""
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1)).tolist()
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def grouped(lengths: list[int], size: int) -> list[list[int]]:
    """Batches of texts of about the same length."""
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1)).tolist()
    step = GROUP * size
    groups = [
        sorted(order[begin : begin + step], key=lambda index: -lengths[index])
        for begin in range(0, len(order), step)
    ]
    flat = [index for group in groups for index in group]
    return [flat[begin : begin + size] for begin in range(0, len(flat), size)]


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[list[int]], lengths: list[int]
) -> Iterator[None]:
    """Trains the batches."""
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        model(**sample(len(batch), longest)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def peaks(make: Callable[[], Any], batches: list[list[int]], lengths: list[int]) -> list[int]:
    """Measured peak of each of the batches, but of those that are smaller than another in both sizes."""
    shapes = {(len(batch), max(lengths[index] for index in batch)): batch for batch in batches}
    worst = [
        batch for (size, length), batch in shapes.items()
        if not any((a >= size and b >= length and (a, b) != (size, length)) for a, b in shapes)
    ]  # fmt: skip
    found = []
    for batch in worst:
        model, optimizer = make()
        with TensorPeak([*model.parameters(), *model.buffers()]) as peak:
            peak.mark()
            for _ in steps(model, optimizer, [batch, batch], lengths):
                pass
            found.append(peak.end()[0])
    return found


def measured(count: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A row per method."""

    def make() -> Any:
        torch.manual_seed(0)
        model = gpt2(4, 256, 4)().train()
        return model, torch.optim.AdamW(model.parameters(), 1e-4)

    model, optimizer = make()
    lengths = lengths_of(count)
    alone = memscale.predict(model, optimizer, sample_input=sample(4, LONGEST)).plain
    budget = budget_for(alone.device_used_peak_bytes)
    config = memscale.Config(memory_budget=budget, enable_logging=False)
    sampler = BudgetBatchSampler(lengths, model, sample, optimizer, config=config)
    size = memscale.predict(model, optimizer, config, sample_input=sample(1, max(lengths))).largest_batch(
        with_plan=False
    )
    methods = {"fixed": fixed(lengths, size), "grouped": grouped(lengths, size), "budget": list(sampler)}
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method, batches in methods.items():
            began = time.perf_counter()
            for _ in steps(model, optimizer, batches, lengths):
                pass
            seconds[method].append(time.perf_counter() - began)
    for method, batches in methods.items():
        assert sorted(index for batch in batches for index in batch) == list(range(count))
        positions = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
        found = peaks(make, batches, lengths)
        row = (
            method, count, budget, len(batches), max(map(len, batches)), 1 - sum(lengths) / positions,
            count / median(seconds[method]), rounds, max(found), sum(peak > budget for peak in found),
            round(os.getloadavg()[0], 1),
        )  # fmt: skip
        yield dict(zip(COLUMNS, row, strict=True))


def main() -> int:
    """Measures the three."""
    if sys.argv[1:2] == ["--child"]:
        print_rows(lambda: list(measured(int(sys.argv[2]), int(sys.argv[3]))))
        return 0
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3, help="epochs of each that are timed (3)")
    options.add_argument("--samples", type=int, default=400, help="texts (400)")
    given = options.parse_args()
    calibrate()
    table = Table("batch_sampler", COLUMNS, given.dry)
    failed = False
    for row in rows_of("batch_sampler.py", "--child", str(given.samples), str(given.rounds), timeout_s=3600):
        if "failed" in row:
            print(f"{row['failed']}\n{row.get('trace', '')}")
            return 1
        table.add(*(row[column] for column in COLUMNS))
        failed |= row["oom"] > 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
