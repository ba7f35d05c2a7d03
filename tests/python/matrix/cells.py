# SPDX-License-Identifier: Apache-2.0
"""One cell of the matrix: an architecture trained with techniques in a mode, compared with plain PyTorch."""

from __future__ import annotations

import functools
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from matrix.architectures import Architecture
from matrix.modes import STEPS, Around, Mode, model_for, one_step
from matrix.techniques import Columns, Forced, Refused, facts_of, forced
from memscale.techniques.checkpoint.use_cache import CacheSwitch
from zoo.training import call, same_bits

EQUAL, WITHIN, REFUSED, FAILED = "equal", "within", "refused", "FAILED"


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    Attributes:
        status: `EQUAL`: every bit; `WITHIN`: inexact, and within the bound; `REFUSED`; `FAILED`.
        note: why it was refused, what failed, how large the error is, which technique stood aside.
        compared: tensors compared.
        regions: modules that ran twice.
    """

    status: str
    note: str = ""
    compared: int = 0
    regions: int = 0


Values = dict[tuple[int, str], Tensor]
"""(step, name) → tensor."""


def _gradients(model: nn.Module, step: int, values: Values) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            values[step, f"gradient {name}"] = parameter.grad.clone()


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    """What the matrix trains with."""
    return torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-3)


def trained(
    model: nn.Module,
    architecture: Architecture,
    mode: Mode,
    optimizer: torch.optim.Optimizer,
    run: Around = call,
) -> Values:
    """Trains for five steps. Every loss, gradient, and at the end parameters, buffers, random numbers."""
    values: Values = {}
    for step in range(STEPS):
        made = one_step(model, architecture, mode, step, run)
        values.update({(step, name): value for name, value in made.items()})
        _gradients(model, step, values)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        values[STEPS, f"parameter {name}"] = parameter.detach().clone()
    for name, buffer in model.named_buffers():
        values[STEPS, f"buffer {name}"] = buffer.detach().clone()
    values[STEPS, "random numbers"] = torch.get_rng_state()
    return values


def _under_autocast(model: nn.Module, batch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call(model, batch)


@functools.lru_cache(maxsize=3)
def reference(architecture: Architecture, mode: Mode, lower_precision: bool = False) -> Values:
    """The plain run. The key/value cache is off, as MemScale switches it off.

    Raises:
        Refused: PyTorch has no kernel for it on this processor.
    """
    model = model_for(architecture, mode)
    CacheSwitch(model).attach()
    run = _under_autocast if lower_precision else call
    try:
        values = trained(model, architecture, mode, optimizer_for(model), run)
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        raise Refused(f"plain PyTorch on this processor: {error}") from None
    attempts = [value for (_, name), value in values.items() if name == "failed attempts"]
    assert not attempts or any(bool(value) for value in attempts), "no attempt at a step failed"
    return values


def differences(plain: Values, treated: Values) -> list[str]:
    """What is not equal, bit for bit; in order."""
    names = [*plain, *(key for key in treated if key not in plain)]
    return [
        f"{name} after step {step}"
        for step, name in names
        if (step, name) not in plain
        or (step, name) not in treated
        or not same_bits(plain[step, name], treated[step, name])
    ]


def _bit_by_bit(architecture: Architecture, columns: Columns, mode: Mode) -> Outcome:
    lower = any(technique.changes_precision for technique in columns)
    plain = reference(architecture, mode, lower)
    facts_of(architecture)
    model = model_for(architecture, mode)  # last: it leaves every generator at its start
    optimizer = optimizer_for(model)
    with forced(model, architecture, columns, optimizer) as techniques:
        treated = trained(model, architecture, mode, optimizer)
    wrong = differences(plain, treated)
    if wrong:
        return Outcome(FAILED, f"{len(wrong)} of {len(plain)} differ, first {wrong[0]}", len(plain))
    return Outcome(EQUAL, aside(techniques), len(plain), techniques.regions)


def aside(techniques: Forced) -> str:
    """Where the blocks could not be treated, and which step techniques stood aside, and why."""
    notes = dict.fromkeys(techniques.notes)
    working = {item.name for item in techniques.steps if item.used}
    for item in techniques.steps:
        if item.name not in working:
            notes.setdefault(f"{item.name} stood aside: {item.reason or 'nothing ran that it treats'}")
    return "; ".join(notes)


def random_state() -> Any:
    """Where PyTorch's, Python's and NumPy's generators stand."""
    import numpy

    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def set_random(state: Any) -> None:
    """Puts them there."""
    import numpy

    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])


def outcome(architecture: Architecture, columns: Columns, mode: Mode) -> Outcome:
    """Runs one cell."""
    check: Callable[[Architecture, Columns, Mode], Outcome] = _bit_by_bit
    if not all(technique.exact for technique in columns):
        from matrix.inexact import within_bound as check
    try:
        return check(architecture, columns, mode)
    except Refused as refused:
        return Outcome(REFUSED, str(refused))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
        return Outcome(FAILED, f"{type(error).__name__}: {error} ({where})")
