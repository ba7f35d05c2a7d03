# SPDX-License-Identifier: Apache-2.0
"""Cells with techniques that round differently: measured against float64, beside plain PyTorch's own error.

Two trainings that round differently part for good within a few optimizer steps, above all under AdamW. So
each step is computed three times from the plain training's state before it: plain, treated and in float64.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from matrix.architectures import Architecture
from matrix.cells import EQUAL, FAILED, WITHIN, Outcome, aside, optimizer_for, random_state, set_random
from matrix.modes import STEPS, Around, Mode, model_for, one_step
from matrix.techniques import Columns, facts_of, forced
from memscale.core.double_run import BOUND, double_batch, errors_of, in_double
from memscale.optim.masters import is_half
from memscale.techniques.checkpoint.use_cache import CacheSwitch
from zoo.training import call, same_bits

Group = dict[tuple[int, str], Tensor]


@dataclass
class Trajectory:
    """A plain training.

    Attributes:
        starts: state of the model and of the generators before every step.
        losses: (step, name) → loss.
        gradients: (step, parameter) → gradient.
    """

    starts: list[tuple[dict[str, Tensor], Any]]
    losses: Group
    gradients: Group


def _state(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach().clone() for name, value in named}


def _load(model: nn.Module, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            value.copy_(state[name])


def _computed(
    model: nn.Module, architecture: Architecture, mode: Mode, step: int, run: Around
) -> tuple[Group, Group]:
    made = one_step(model, architecture, mode, step, run)
    losses = {(step, name): value for name, value in made.items() if name.startswith("loss")}
    gradients = {
        (step, name): value.grad.detach().clone()
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    return losses, gradients


def _under_autocast(model: nn.Module, batch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call(model, batch)


def _in_float64(model: nn.Module, batch: Any) -> Any:
    return call(model, double_batch(batch))


@functools.lru_cache(maxsize=3)
def trajectory(
    architecture: Architecture, mode: Mode, lower_precision: bool, half: frozenset[str] = frozenset()
) -> Trajectory:
    """The plain training, with everything that its steps can be repeated from.

    Args:
        architecture: what is trained.
        mode: how.
        lower_precision: under autocast.
        half: names of weights that are BF16.
    """
    run = _under_autocast if lower_precision else call
    model = model_for(architecture, mode)
    CacheSwitch(model).attach()
    for name, value in model.named_parameters():
        if name in half:
            value.data = value.data.bfloat16()
    made = Trajectory([], {}, {})
    optimizer = optimizer_for(model)
    for step in range(STEPS):
        made.starts.append((_state(model), random_state()))
        losses, gradients = _computed(model, architecture, mode, step, run)
        made.losses.update(losses)
        made.gradients.update(gradients)
        optimizer.step()
        optimizer.zero_grad()
    return made


def _repeated(
    model: nn.Module, architecture: Architecture, mode: Mode, plain: Trajectory, run: Around = call,
    double: bool = False,
) -> tuple[Group, Group]:  # fmt: skip
    """The same steps on a model, each from the plain training's state."""
    losses: Group = {}
    gradients: Group = {}
    for step in range(STEPS):
        state, generators = plain.starts[step]
        _load(model, state)
        for parameter in model.parameters():
            parameter.grad = None
        set_random(generators)
        with in_double(model) if double else nullcontext():
            more, grads = _computed(model, architecture, mode, step, run)
        losses.update(more)
        gradients.update(grads)
    return losses, gradients


@functools.lru_cache(maxsize=3)
def truth(
    architecture: Architecture, mode: Mode, lower_precision: bool, half: frozenset[str] = frozenset()
) -> tuple[Group, Group]:
    """The same steps in float64, without autocast."""
    plain = trajectory(architecture, mode, lower_precision, half)
    model = model_for(architecture, mode)
    CacheSwitch(model).attach()
    whole = replace(mode, autocast=False)
    return _repeated(model, architecture, whole, plain, _in_float64, double=True)


def within_bound(architecture: Architecture, columns: Columns, mode: Mode) -> Outcome:
    """Runs one cell."""
    facts_of(architecture)
    lower = any(technique.changes_precision for technique in columns)
    model = model_for(architecture, mode)
    with forced(model, architecture, columns, optimizer_for(model)) as techniques:
        half = frozenset(name for name, value in model.named_parameters() if is_half(value))
        plain = trajectory(architecture, mode, lower, half)
        treated = _repeated(model, architecture, mode, plain)
    groups = list(zip(("loss", "gradients"), (plain.losses, plain.gradients), treated, strict=True))
    compared = sum(len(own) for _, own, _ in groups)
    for kind, own, theirs in groups:
        if own.keys() != theirs.keys():
            return Outcome(FAILED, f"other {kind} than plain PyTorch's", compared)
    note = aside(techniques)
    if all(same_bits(own[key], theirs[key]) for _, own, theirs in groups for key in own):
        return Outcome(EQUAL, note, compared, techniques.regions)
    if techniques.steps and not any(item.used for item in techniques.steps):
        return Outcome(FAILED, f"differs although {note}", compared)
    doubled = truth(architecture, mode, lower, half)
    errors = [
        errors_of(kind, right, own, theirs)
        for (kind, own, theirs), right in zip(groups, doubled, strict=True)
    ]
    ratio = max(item.planned / max(item.plain, item.unit) for item in errors)
    text = f"{ratio:.2f} × plain's error"
    if any(item.is_other_step for item in errors):
        return Outcome(FAILED, f"float64 computes another step: {errors}", compared)
    passed = all(item.within for item in errors)
    status = WITHIN if passed else FAILED
    note = "; ".join(filter(None, (text if passed else f"{text}, more than {BOUND}", note)))
    return Outcome(status, note, compared, techniques.regions)
