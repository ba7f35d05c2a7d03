# SPDX-License-Identifier: Apache-2.0
"""One model: what plain PyTorch makes of it, and what MemScale does when it comes first in a process.

`plain` and `planned` run in processes of their own. `plain` finds a recipe that works, trains twice and
records bits and peak. `planned` predicts before anything has run, wraps at a share of the plain peak, trains,
detaches and trains on. `problems` compares the two.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import time
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from sweeping import digests, remains
from sweeping.digests import Digests
from sweeping.peaks import peak_bytes
from sweeping.remains import Described
from sweeping.subject import Library, Made, Recipe, Unsupported, seed

STEPS = 3
"""Compared bit by bit; then comes one whose peak is measured, and one after `detach`."""

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and those by name."""

_LEARNING_RATE = 1e-3
_ATTEMPTS = 40


@dataclass
class Plain:
    """What plain PyTorch does with a model.

    Attributes:
        recipe: with which it was built; None if none works.
        reason: why it is not swept; "" if it is.
        steps: bits of each step.
        unrepeatable: names of tensors that plain PyTorch gives other bits the second time.
        peak: measured, in bytes.
        built: the untrained model as `remains.of_model` describes it.
        remains: the trained one.
        finite: whether every loss is a number.
    """

    recipe: Recipe | None = None
    reason: str = ""
    steps: list[Digests] = field(default_factory=list)
    unrepeatable: list[str] = field(default_factory=list)
    peak: int = 0
    built: Described = field(default_factory=dict)
    remains: Described = field(default_factory=dict)
    finite: bool = True


@dataclass
class Planned:
    """What MemScale does with it; `None` and empty where it did not come to that.

    Attributes:
        errors: (stage, one line) of each exception.
        left: (stage, one line) of everything that planning or a wrapped run left behind.
        fakes: (stage, where) of each tensor without data that is alive.
        steps: bits of each step, as of `Plain`.
        built: the untrained model.
        remains: the detached one.
        peak: measured, in bytes.
        budget: in bytes.
        predicted: of the plan.
        predicted_plain: of the step without a plan.
        fits: what the plan says of the budget.
        method: "static" or "empirical".
        active: how many modules the plan checkpoints or offloads.
        log: warnings of MemScale.
        predict_seconds: of the first `predict`.
        plan_seconds: of `wrap`, or of the first step where the plan waits for that.
        deferred: whether it waits.
    """

    errors: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    fakes: list[tuple[str, str]] = field(default_factory=list)
    steps: list[Digests] = field(default_factory=list)
    built: Described = field(default_factory=dict)
    remains: Described = field(default_factory=dict)
    peak: int = 0
    budget: int = 0
    predicted: int | None = None
    predicted_plain: int | None = None
    fits: bool | None = None
    method: str = ""
    active: int = 0
    log: list[str] = field(default_factory=list)
    predict_seconds: float = 0.0
    plan_seconds: float = 0.0
    deferred: bool = False


def one_line(error: BaseException) -> str:
    """Type and message, short."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def train_step(made: Made, optimizer: torch.optim.Optimizer, number: int) -> Digests:
    """One training step from a seed of its own; its bits."""
    seed(1000 + number)
    return _train_on(made, optimizer, made.batch(number), record=True)


def _measured_step(made: Made, optimizer: torch.optim.Optimizer) -> int:
    """Peak bytes of one step whose batch was there before it: a loader's work is not the step's."""
    seed(1000 + STEPS)
    batch = made.batch(STEPS)

    def step() -> None:
        _train_on(made, optimizer, batch, record=False)

    return peak_bytes(step, before=step)


def _train_on(made: Made, optimizer: torch.optim.Optimizer, batch: Batch, record: bool) -> Digests:
    args, kwargs = batch
    output = made.model(*args, **kwargs)
    loss = made.loss(output)
    loss.backward()
    bits = digests.of_step(made.model, output, loss) if record else {}
    bits["loss is finite"] = "True" if type(loss) is torch.Tensor and math.isfinite(loss.item()) else "False"
    optimizer.step()
    optimizer.zero_grad()
    return bits


def built(library: Library, name: str, recipe: Recipe) -> tuple[Made, torch.optim.Optimizer]:
    """Model and optimizer; the latter has no state, so that the peak is that of the model's step."""
    seed(0)
    made = library.make(name, recipe)
    weights = [p for p in made.model.parameters() if p.requires_grad and p.is_floating_point()]
    if not weights:
        raise Unsupported("no trainable weight")
    return made, torch.optim.SGD(weights, lr=_LEARNING_RATE)


def plain(library: Library, name: str) -> dict[str, Any]:
    """Finds a recipe, and runs it without MemScale."""
    found = Plain()
    reasons: list[str] = []
    try:
        attempts = library.attempts(name)
        recipe = next(attempts)
        for _ in range(_ATTEMPTS):
            error = _failure_of(library, name, recipe)
            if not error:
                found.recipe = recipe
                break
            reasons.append(error)
            recipe = attempts.send(error)
    except StopIteration:
        pass
    except Unsupported as error:  # it knows better than what the attempts ended with
        reasons = [str(error)]
    except Exception as error:
        reasons.append(one_line(error))
    if found.recipe is None:
        found.reason = reasons[0] if reasons else "no recipe"  # of the fullest batch
    else:
        _run_plain(found, library, name, found.recipe)
    return asdict(found)


def _failure_of(library: Library, name: str, recipe: Recipe) -> str:
    """Why one step with a recipe does not work; "" if it does."""
    try:
        train_step(*built(library, name, recipe), 0)
    except Unsupported as error:
        return str(error)
    except Exception as error:
        return one_line(error)
    return ""


def _run_plain(found: Plain, library: Library, name: str, recipe: Recipe) -> None:
    seen: list[Described] = []
    for run in range(2):
        made, optimizer = built(library, name, recipe)
        found.built = remains.of_model(made.model)
        gc.collect()
        steps = [train_step(made, optimizer, number) for number in range(STEPS)]
        if run == 0:
            found.steps = steps
        for expected, got in zip(found.steps, steps, strict=False):
            found.unrepeatable += digests.different(expected, got)
        seen.append(remains.of_model(made.model))
    found.finite = all(step["loss is finite"] == "True" for step in found.steps)
    optimizer.zero_grad()
    found.peak = _measured_step(made, optimizer)
    found.steps.append(train_step(made, optimizer, STEPS + 1))
    by_chance = {name for name, value in seen[0].items() if seen[1].get(name) != value}  # seeds, say
    found.remains = {
        name: value for name, value in remains.of_model(made.model).items() if name not in by_chance
    }


def planned(
    library: Library, name: str, recipe: Recipe, peak: int, share: float, deferred: bool | None = None
) -> dict[str, Any]:
    """Predicts, wraps, trains, detaches; nothing of this model has run in this process before."""
    import memscale

    found = Planned(budget=max(1, int(peak * share)))
    found.deferred = bool(zlib.crc32(name.encode()) & 1) if deferred is None else deferred
    made, optimizer = built(library, name, recipe)
    found.built = remains.of_model(made.model)
    config = memscale.Config(memory_budget=found.budget, enable_logging=False)
    with _warnings(found.log):
        _predict(found, made, optimizer, config)
        before = _everything(made.model)
        if _wrap(found, made, optimizer, config):
            _steps(found, made, optimizer)
        if _stage(found, "detach", lambda: memscale.detach(made.model)):
            optimizer.zero_grad()
            _after_detach(found, made, optimizer, before)
    return asdict(found)


def _stage(found: Planned, name: str, work: Callable[[], object]) -> bool:
    try:
        work()
    except Exception as error:
        found.errors.append((name, one_line(error)))
        return False
    return True


def _everything(model: nn.Module) -> Described:
    return (
        remains.of_model(model)
        | remains.identities(model)
        | remains.of_classes(model)
        | remains.of_process()
        | digests.of_named("buffer", model.named_buffers())
        | digests.of_named("weight", model.named_parameters())
        | digests.of_generators()
    )


def _predict(found: Planned, made: Made, optimizer: torch.optim.Optimizer, config: Any) -> None:
    import memscale

    sample = _sample(made.batch(0))
    seed(1)
    before = _everything(made.model)
    start = time.perf_counter()

    def predict() -> None:
        prediction = memscale.predict(made.model, optimizer, config, sample_input=sample)
        found.predict_seconds = time.perf_counter() - start
        if prediction.plain is not None:
            found.predicted_plain = prediction.plain.device_used_peak_bytes

    _stage(found, "predict", predict)
    found.left += [("predict", line) for line in remains.changed(before, _everything(made.model))]
    found.fakes += [("predict", where) for where in remains.fakes()]


def _sample(batch: Batch) -> Any:
    args, kwargs = batch
    assert not (args and kwargs), "a sample is positional or by keyword"
    return dict(kwargs) if kwargs else args


def _wrap(found: Planned, made: Made, optimizer: torch.optim.Optimizer, config: Any) -> bool:
    import memscale

    sample = None if found.deferred else _sample(made.batch(0))
    start = time.perf_counter()

    def wrap() -> None:
        memscale.wrap(made.model, config, sample_input=sample, optimizer=optimizer)

    if not _stage(found, "wrap", wrap):
        return False
    found.plan_seconds = time.perf_counter() - start
    return True


def _steps(found: Planned, made: Made, optimizer: torch.optim.Optimizer) -> None:
    import memscale

    for number in range(STEPS):
        start = time.perf_counter()
        step = functools.partial(train_step, made, optimizer, number)
        if not _stage(found, f"step {number}", lambda step=step: found.steps.append(step())):  # type: ignore[misc]
            return
        if number == 0 and found.deferred:
            found.plan_seconds = time.perf_counter() - start
    plan = getattr(memscale.executor_of(made.model), "plan", None)
    if plan is not None:
        found.predicted = plan.predicted.device_used_peak_bytes
        found.fits, found.method, found.active = plan.fits, plan.profile, len(plan.active)

    def measured() -> None:
        found.peak = _measured_step(made, optimizer)

    _stage(found, "measured step", measured)


def _after_detach(found: Planned, made: Made, optimizer: torch.optim.Optimizer, before: Described) -> None:
    """Compares process and classes with what was before `wrap`; the model is compared with plain's later."""
    now = remains.of_process()
    found.left += [("detach", line) for line in remains.changed({name: before[name] for name in now}, now)]
    found.fakes += [("detach", where) for where in remains.fakes()]
    if len(found.steps) == STEPS:
        work = lambda: found.steps.append(train_step(made, optimizer, STEPS + 1))  # noqa: E731
        _stage(found, "step after detach", work)
        found.remains = remains.of_model(made.model)


@contextmanager
def _warnings(lines: list[str]) -> Any:
    """MemScale's warnings, as lines."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(" ".join(record.getMessage().split())[:400])

    logger, handler = logging.getLogger("memscale"), Keep(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
