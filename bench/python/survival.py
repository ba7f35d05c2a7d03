# SPDX-License-Identifier: Apache-2.0
"""What survives when memory runs out: every operation fails in turn, and what `on_oom="survive"` costs.

    python survival.py [--stride N] [--cost] [NAME ...]

Without `--cost`: forward and backward of a training step run with their n-th operation refused memory, for n
from 1 on, in steps of `--stride`; loss, weights, gradients, buffers, optimizer state and random state are
then compared with those of an undisturbed plain run. All of it takes hours with a stride of 1.

    operations   that can fail
    tried        that did
    equal        survived, with every bit
    outside      raised by the loop's own code, outside of the model: nothing to repeat
    wrong        anything else; must be 0

With `--cost`: processor time of a step under `on_oom="survive"` over one under "report", medians of steps in
turn, with nothing failing.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from architectures import bert, call, gpt2, text
from common import ROOT, Table, median, parser

import memscale
from memscale.config import config

sys.path.insert(0, str(Path(ROOT) / "tests/python"))

from oom_samples import OPTIMIZERS, SAMPLES, FailingAt, run

COLUMNS = (
    "model",
    "accumulate",
    "precision",
    "optimizer",
    "operations",
    "tried",
    "equal",
    "outside",
    "wrong",
)
COST_COLUMNS = ("model", "report_ms", "survive_ms", "share")

ACCUMULATE = (1, 2, 4)
PRECISIONS = ("fp32", "bf16", "scaler")

REAL: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "gpt2 4 layers 384": (gpt2(4, 384, 6), text(4, 128)),
    "bert 4 layers 256": (bert(4, 256, 4), text(4, 128)),
}


def failures(table: Table, names: list[str], stride: int) -> None:
    """Every operation in turn."""
    logging.disable(logging.CRITICAL)
    for name, accumulate, precision, optimizer in itertools.product(
        names or SAMPLES, ACCUMULATE, PRECISIONS, OPTIMIZERS
    ):
        how = (accumulate, precision, optimizer)
        plain = run(SAMPLES[name], None, *how)
        quiet = run(SAMPLES[name], FailingAt(), *how, on_oom="survive")
        tried = equal = outside = 0
        for at in range(1, quiet.count + 1, stride):
            tried += 1
            try:
                ran = run(SAMPLES[name], FailingAt(at), *how, on_oom="survive")
            except RuntimeError as error:
                outside += "DefaultCPUAllocator" in str(error)
                continue
            equal += ran.equals(plain) and ran.recoveries == 1
        wrong = tried - equal - outside + (not quiet.equals(plain))
        table.add(name, *how, quiet.count, tried, equal, outside, wrong)


def cost(table: Table, names: list[str], steps: int = 15) -> None:
    """Steps in which nothing fails."""
    for name in names or REAL:
        make, batch = REAL[name]
        models = []
        for mode in ("report", "survive"):
            torch.manual_seed(0)
            model = make()
            memscale.wrap(model, on_oom=mode, enable_logging=False)
            models.append(model)
        times: list[list[float]] = [[], []]
        for _ in range(steps):
            for model, found in zip(models, times, strict=True):
                began = time.process_time()
                call(model, batch()).loss.backward()
                found.append(time.process_time() - began)
                model.zero_grad()
        report, survive = (median(found[3:]) for found in times)
        table.add(name, report * 1e3, survive * 1e3, survive / report - 1)


def main() -> None:
    """Runs what the command line asks for."""
    config.OOM_ACTIONS.append("survive")  # not public yet, see ADR 0039
    arguments = parser(__doc__)
    arguments.add_argument("--stride", type=int, default=1)
    arguments.add_argument("--cost", action="store_true")
    arguments.add_argument("names", nargs="*")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    if given.cost:
        cost(Table("survival_cost", COST_COLUMNS, given.dry), given.names)
    else:
        failures(Table("survival", COLUMNS, given.dry), given.names, given.stride)


if __name__ == "__main__":
    main()
