# SPDX-License-Identifier: Apache-2.0
"""What survives when memory runs out: every operation fails in turn, and what `on_oom="survive"` costs.

    python survival.py [--points N] [--rotation N] [--cost] [--many] [NAME ...]

Without either: a training step runs with one operation refused memory, for N operations of forward and
backward, evenly spread, and for N of the optimizer's step. Loss, weights, gradients, buffers, optimizer state
and random state are then compared with those of an undisturbed run: plain, or with the same optimizer. All of
it takes hours; with a rotation of N each model has every N-th combination, others than the model before.

    operations   that can fail
    tried        that did
    equal        survived, with every bit
    outside      raised by the loop's own code, outside of the model: nothing to repeat; or such steps were
                 refused beforehand
    loud         the optimizer's step failed half-way, and the next forward says so
    wrong        anything else; must be 0

With `--many`: a thousand recoveries of one model, one in eight steps.

    bits        the last weights equal those of an undisturbed plain run
    tensors     bytes of all tensors that are alive, after 100 recoveries and after the last
    objects     of the garbage collector, the same
    resident    bytes of the process, the same

With `--cost`: processor time of a step under `on_oom="survive"` over one under "report", medians of steps in
turn, with nothing failing.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from architectures import bert, call, gpt2, text
from common import ROOT, Table, median, parser

import memscale
from memscale.hardware.host import process_bytes

sys.path.insert(0, str(Path(ROOT) / "tests/python"))

from oom_samples import LIBRARY, SAMPLES, STEPPERS, FailingAt, Sample, library_sample, run

COLUMNS = (
    "model",
    "accumulate",
    "precision",
    "optimizer",
    "part",
    "operations",
    "tried",
    "equal",
    "outside",
    "loud",
    "wrong",
)
MANY_COLUMNS = (
    "steps",
    "recoveries",
    "bits",
    "tensors_100",
    "objects_100",
    "resident_100",
    "tensors",
    "objects",
    "resident",
)
TENSORS = (torch.Tensor, torch.nn.Parameter)
COST_COLUMNS = ("model", "report_ms", "survive_ms", "share")

ACCUMULATE = (1, 2, 4)
PRECISIONS = ("fp32", "bf16", "scaler")

REAL: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "gpt2 4 layers 384": (gpt2(4, 384, 6), text(4, 128)),
    "bert 4 layers 256": (bert(4, 256, 4), text(4, 128)),
}


def failures(table: Table, names: list[str], points: int, rotation: int) -> None:
    """Some operations of each kind of step in turn."""
    logging.disable(logging.CRITICAL)
    every = [how for how in itertools.product(ACCUMULATE, PRECISIONS, STEPPERS) if is_a_step(*how)]
    for place, name in enumerate(names or [*SAMPLES, *LIBRARY]):
        sample = SAMPLES[name] if name in SAMPLES else library_sample(name)
        for how in every[place % rotation :: rotation]:
            for part in ("passes", "step"):
                row(table, name, sample, how, part, points)


STEPS = 4
"""The third one fails: some models set up hooks in the first, and the second is watched."""


def is_a_step(accumulate: int, precision: str, optimizer: str) -> bool:
    """Whether there is such a step."""
    return optimizer != "step in backward" or (accumulate == 1 and precision != "scaler")


def row(table: Table, name: str, sample: Sample, how: tuple[int, str, str], part: str, points: int) -> None:
    """One kind of step."""
    plain = {"on_oom": "report"} if STEPPERS[how[2]].fields else {}
    reference = run(sample, None, *how, steps=STEPS, **plain)
    quiet = run(sample, FailingAt(), *how, steps=STEPS, part=part, on_oom="survive")
    tried = equal = outside = loud = 0
    for at in sorted({round(1 + (quiet.count - 1) * place / max(points - 1, 1)) for place in range(points)}):
        if at > quiet.count:
            continue
        tried += 1
        try:
            ran = run(sample, FailingAt(at), *how, steps=STEPS, part=part, on_oom="survive")
        except RuntimeError as error:
            outside += "DefaultCPUAllocator" in str(error)
            continue
        loud += ran.is_loud
        equal += not ran.is_loud and ran.equals(reference)
    wrong = tried - equal - outside - loud + (not quiet.equals(reference))
    table.add(name, *how, part, quiet.count, tried, equal, outside, loud, wrong)


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


def many(table: Table, recoveries: int = 1_000) -> None:
    """As often as no run has it."""
    logging.disable(logging.CRITICAL)
    model, optimizer = trained_model()
    plain, plain_optimizer = trained_model()
    memscale.wrap(model, optimizer=optimizer, on_oom="survive", enable_logging=False)
    watch: Any = memscale.executor_of(model).oom
    marks, step = [], 0
    while watch.recoveries < recoveries:
        step += 1
        at = (5, 12, 45, 55)[step // 8 % 4]  # in forward, and in backward
        one_step(model, optimizer, step, FailingAt(at) if step % 8 == 0 else FailingAt())
        one_step(plain, plain_optimizer, step, FailingAt())
        if watch.recoveries in (100, recoveries) and len(marks) < 3 * (1 + (watch.recoveries == recoveries)):
            marks += [*alive(), process_bytes()]
    same = all(map(torch.equal, model.parameters(), plain.parameters()))
    table.add(step, watch.recoveries, same, *marks)


def trained_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same each time."""
    torch.manual_seed(0)
    model = SAMPLES["dense"].make()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, failing: FailingAt) -> None:
    """On the batch of this step."""
    torch.manual_seed(step)
    batch = SAMPLES["dense"].batch()
    with failing:
        model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def alive() -> tuple[int, int]:
    """Bytes of tensors, and objects."""
    gc.collect()
    found = gc.get_objects()
    storages = {item.untyped_storage()._cdata: item.nbytes for item in found if type(item) in TENSORS}
    return sum(storages.values()), len(found)


def main() -> None:
    """Runs what the command line asks for."""
    arguments = parser(__doc__)
    arguments.add_argument("--points", type=int, default=4)
    arguments.add_argument("--rotation", type=int, default=1)
    arguments.add_argument("--cost", action="store_true")
    arguments.add_argument("--many", action="store_true")
    arguments.add_argument("names", nargs="*")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    if given.many:
        many(Table("survival_many", MANY_COLUMNS, given.dry))
    elif given.cost:
        cost(Table("survival_cost", COST_COLUMNS, given.dry), given.names)
    else:
        failures(Table("survival", COLUMNS, given.dry), given.names, given.points, given.rotation)


if __name__ == "__main__":
    main()
