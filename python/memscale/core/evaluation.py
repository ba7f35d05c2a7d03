# SPDX-License-Identifier: Apache-2.0
"""Forwards without gradients of a wrapped model: warns before one that does not fit the budget.

    new kind of batch ──► traced ──► fits ──────────► silent; kept as a known size
                            │ └────► does not fit ──► one warning for this kind of batch
                            └ fails ─► silent
    known kind ──► bound from what is known ──► within the budget ──► runs, nothing is traced
                                          └───► beyond it ──► traced

The bound takes what varies with the batch to grow with the square of the batch, as attention's scores do at
most. So a text that grows token by token is traced a few times, and one that is small not again.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memscale import log
from memscale.core import plan_log
from memscale.core.advice import FIXED
from memscale.core.planner import Planner, device_of
from memscale.core.step_signature import output_storages
from memscale.hardware.detect import detect
from memscale.optim.kinds import inner_of
from memscale.optim.offload.attach import is_offloaded
from memscale.optim.release.gradient import bytes_here
from memscale.plans.budget import reserve_bytes
from memscale.torchkit.leaves import storage_bytes, tensors_of
from memscale.torchkit.torch_settings import PresentModes, has_modes, without_modes
from memscale.trace.static import has_data

if TYPE_CHECKING:
    from memscale.core.wrapped import Wrapped
    from memscale.plans.plan import Plan
    from memscale.techniques.step_facts import StepFacts

_MOST_LOOKS: Final = 32
"""Traces in the life of a wrapped model; afterwards nothing is said any more."""

_MOST_FAILURES: Final = 4
"""Traces that failed, likewise."""

_MOST_KINDS: Final = 8
"""Kinds of batches beyond which numbers and words among the arguments tell no more of them apart."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Known:
    """A batch that was traced, and fits.

    Attributes:
        shapes: see `_shapes_of`.
        used_bytes: device-used peak.
        varying_bytes: of these, what depends on the batch.
        held_bytes: what was held beside model and batch, see `Evaluations`.
    """

    shapes: Shapes
    used_bytes: int
    varying_bytes: int
    held_bytes: int

    def bound(self, shapes: Shapes, held_bytes: int) -> float:
        """What another batch of this kind takes at most."""
        growth = max(map(_growth, self.shapes, shapes), default=1.0)
        more = max(held_bytes - self.held_bytes, 0)
        return self.used_bytes + more + self.varying_bytes * (growth * growth - 1.0)


def _shapes_of(tensors: list[Tensor]) -> tuple[Shapes, tuple[tuple[torch.dtype, int], ...]]:
    """The shapes that there are, each behind the number of its tensors; their dtypes and dimensions."""
    counts: dict[Any, int] = {}
    for tensor in tensors:
        form = tensor.shape, tensor.dtype
        counts[form] = counts.get(form, 0) + 1
    shapes = tuple((count, *shape) for (shape, _), count in counts.items())
    return shapes, tuple((dtype, len(shape)) for shape, dtype in counts)


def _growth(known: tuple[int, ...], shape: tuple[int, ...]) -> float:
    growth = 1.0
    for before, now in zip(known, shape, strict=True):
        if now > before:
            growth *= now / max(before, 1)
    return growth


@dataclass
class _Kind:
    """Batches that differ in sizes alone.

    Attributes:
        known: those that were traced.
        is_closed: one did not fit, which was said, or could not be traced.
    """

    known: list[_Known] = field(default_factory=list)
    is_closed: bool = False


class Evaluations:
    """What is known of one wrapped model's forwards without gradients.

    Held beside model and batch are gradients, optimizer state, and the output of the forward before where a
    loop still has it.

    Attributes:
        traced: forwards that were traced.
    """

    def __init__(self) -> None:
        self.traced = 0
        self._failures = 0
        self._kinds: dict[Any, _Kind] = {}
        self._limit = 0
        self._held: int | None = None  # gradients and state; None: to be counted
        self._output: list[weakref.ref[Any]] = []  # of the latest traced forward
        self._carried = 0

    def trained(self) -> None:
        """A training forward is about to run: afterwards gradients and optimizer state may be others."""
        self._held = None

    def before(
        self, executor: Wrapped, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Looks at a forward without gradients that is about to run. Raises nothing of its own.

        Args:
            executor: of the model.
            forward: the model's own.
            args: positional part of the batch.
            kwargs: keyword part.

        Returns:
            Whether its output is to be given to `after`.
        """
        if self.traced >= _MOST_LOOKS or self._failures >= _MOST_FAILURES:
            return False
        try:
            with without_modes() if has_modes() else nullcontext():
                return self._before(executor, forward, args, kwargs)
        except Exception as error:
            self._failures += 1
            log.LOGGER.debug(
                "cannot look at a forward without gradients: %s: %s", type(error).__name__, error
            )
            return False

    def after(self, output: Any) -> None:
        """Remembers the output, to see before the next forward whether the loop still holds it."""
        self._output = [weakref.ref(storage) for storage in output_storages(output)]

    def _before(
        self, executor: Wrapped, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        leaves = tree_leaves((args, kwargs))
        tensors = tensors_of(leaves)
        shapes, dtypes = _shapes_of(tensors)
        kind = self._kinds.setdefault((dtypes, tuple(kwargs), self._kind_of(executor.model, leaves)), _Kind())
        if kind.is_closed:
            return False
        if self._output:
            self._carried = _still_held(self._output, tensors)
            self._output = []
        if self._held is None:
            self._held = _held_bytes(executor)
        held = self._held + self._carried
        if any(item.bound(shapes, held) <= self._limit for item in kind.known):
            return False
        if not (executor.config.use_static_profiling and all(map(has_data, tensors))):
            kind.is_closed = True
            return False
        with executor.callers.planning() as alone:
            # What graphs hold that wait for their backward, and a forward around this one, is not known.
            unknown = executor.open.are_there or executor.callers.is_nested
            if not alone or unknown or _is_captured(executor.model):
                return False
            self._look(executor, kind, shapes, held, self._planner(executor, forward), (args, kwargs))
        return not kind.is_closed

    def _kind_of(self, model: nn.Module, leaves: list[Any]) -> Any:
        """What tells kinds of batches apart beside their tensors."""
        kinds = (int, str) if len(self._kinds) < _MOST_KINDS else bool
        flags = tuple(leaf for leaf in leaves if isinstance(leaf, kinds))
        return flags, model.training, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")

    def _planner(self, executor: Wrapped, forward: Callable[..., Any]) -> Planner:
        facts = executor.facts_of_evaluation(forward)
        if self._carried:
            facts.carried_bytes = (*facts.carried_bytes, self._carried)
        planned = executor.planned
        hardware = detect(device_of(executor.model)) if planned is None else planned.hardware
        return Planner(executor.model, executor.config, facts, hardware, may_run=False)

    def _look(
        self, executor: Wrapped, kind: _Kind, shapes: Shapes, held: int, planner: Planner, batch: Any
    ) -> None:
        """Traces the forward and says so if it does not fit."""
        self.traced += 1
        kind.is_closed = True  # unless all of it succeeds
        began, modes = time.perf_counter(), PresentModes()
        try:
            with torch.inference_mode(False), executor.bare(), modes.on():
                plan = planner.plan_and_plain(*batch).plan
        finally:
            executor.planning_seconds += time.perf_counter() - began
        self._limit = plan.budget_bytes - reserve_bytes(plan.budget_bytes)
        if not plan.fits:
            plan_log.warn_of_evaluation(plan, [shape[1:] for shape in shapes])
            return
        kind.is_closed = False
        kind.known.append(_Known(shapes, plan.predicted.device_used_peak_bytes, _varying(plan), held))


def _varying(plan: Plan) -> int:
    predicted = plan.predicted
    fixed = sum(predicted.by_category.get(name, 0) for name in FIXED)
    return max(predicted.device_used_peak_bytes - predicted.context_bytes - fixed, 0)


def _still_held(output: Iterable[weakref.ref[Any]], tensors: list[Tensor]) -> int:
    """Bytes of an earlier output that somebody has, but for what is an argument again, such as a cache."""
    given = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
    alive = [storage for storage in (ref() for ref in output) if storage is not None]
    return sum(storage.nbytes() for storage in alive if storage._cdata not in given)


def _is_captured(model: nn.Module) -> bool:
    """Whether this goes into a CUDA graph, which a trace must not."""
    return device_of(model).type == "cuda" and torch.cuda.is_current_stream_capturing()


def _held_bytes(executor: Wrapped) -> int:
    """Gradients and optimizer state that there are."""
    gradients = sum(bytes_here(parameter.grad) for parameter in executor.model.parameters())
    here = [inner_of(optimizer) for optimizer in executor.optimizers if not is_offloaded(inner_of(optimizer))]
    states = [state for optimizer in here for state in optimizer.state.values()]
    return gradients + storage_bytes(leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor))


def evaluation_of(step: StepFacts, forward: Callable[..., Any] | None = None) -> StepFacts:
    """A forward without gradients between such steps, beside the optimizer state that there is."""

    def with_state(optimizer: torch.optim.Optimizer | None) -> bool:
        return optimizer is not None and any(inner_of(optimizer).state.values())

    return replace(
        step,
        optimizer=step.optimizer if with_state(step.optimizer) else None,
        others=tuple(filter(with_state, step.others)),
        forward=forward,
        forwards=1,
        use=None,
        gradients=False,
    )
