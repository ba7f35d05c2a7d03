# SPDX-License-Identifier: Apache-2.0
"""One step of a group whose state is offloaded, piece by piece.

    PyTorch's state   the step of the optimizer's own class, on views of a part of the parameter, of its
                      gradient, and on the piece (`alone`); on the whole parameter where it cannot be cut
    ours              the C core, on the same part: its threads, or its kernels on a card; its threads for a
                      card's parameters, too, where the state is to be stepped on the host (`host_parts`)

Every piece begins with the counters and other small values that there were, and the last one's are kept: a
step counts once. A parameter is marked from its first piece to its last, so that a step that ended in between
is known.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memscale.optim import master_residuals
from memscale.optim.alone import Alone, lists_are_alike
from memscale.optim.arrays import FORM, STEP, Form, core_on, form_of
from memscale.optim.kinds import GRADIENTS, gradient_refusal, group_refusal, parameter_refusal, rule_of
from memscale.optim.offload.host_parts import HostGradient, HostWeight
from memscale.optim.offload.pieces import OFFLOADED, Offloaded, Own, Slot, Slots, Where, flat, slots_of
from memscale.optim.offload.state import (
    Entry,
    brought_back,
    depart,
    is_cut,
    is_worth_it,
    layout_of,
    refuse_torn,
)
from memscale.optim.offload.store import Job, StateStore
from memscale.optim.offload.weights import Passage, WeightParts
from memscale.optim.release.gradient import ReleasedGradient, put, start
from memscale.optim.steps import entry_of
from memscale.weights.placed_gradients import on_its_device
from memscale.weights.stream import borrow

Base = type[torch.optim.Optimizer]


class HostCall:
    """A step on the host that is put off: beside backward, on another thread (`step_queue`).

    Args:
        store: of the optimizer.
        work: whose jobs they are.
        jobs: of one parameter.
        parameter: that is stepped.
    """

    def __init__(self, store: StateStore, work: _Own, jobs: Sequence[Job], parameter: Tensor) -> None:
        self.parameters = [parameter]
        self.gradient_bytes = sum(source.gradient.nbytes for source in work.sources)
        self._store, self._work, self._jobs = store, work, jobs

    def run(self, core: object = None) -> None:
        """Does it. What goes up to the card is awaited by nobody yet."""
        _run(self._store, self._work, self._jobs)


Later = Callable[[HostCall], None]
"""What a step on the host is handed to: has it run before anybody looks at weights and state."""


def step_group(
    optimizer: Any, base: Base, group: Entry, store: StateStore, later: Later | None = None
) -> list[Tensor]:
    """Steps the parameters of a group whose state is offloaded, or is to be. Returns the others.

    Args:
        optimizer: whose group it is.
        base: its own class.
        group: settings and parameters; one, where steps are put off.
        store: where the state is.
        later: gets steps on the host.

    Raises:
        OSError: a piece could not be read. What comes before it has been stepped.
        RuntimeError: as `refuse_torn`; or a compiler is tracing.
    """
    if torch._guards.TracingContext.try_get() is not None:
        raise RuntimeError("an optimizer whose state is offloaded cannot be stepped by compiled code")
    if base.__module__.startswith("torch.optim.") and not lists_are_alike(optimizer, group):
        return _all_here(optimizer, group["params"])
    work: _Own | _Standard = _Standard(optimizer, base, group, store)
    if getattr(optimizer, "_memscale_kind", None) is not None:
        master_residuals.leave_to_pytorch(optimizer, group)
        work = _Own(optimizer, group, store)
    jobs: list[Job] = []
    left = []
    for parameter in group["params"]:
        found = work.jobs(parameter) if parameter.grad is not None else []
        if found is None:
            left.append(parameter)
        else:
            jobs += found
    on_host = bool(jobs) and all(job.offloaded.where is Where.HOST for job in jobs)
    if later is not None and on_host and isinstance(work, _Own):
        later(HostCall(store, work, jobs, group["params"][0]))
    else:
        try:
            _run(store, work, jobs)
        finally:
            work.end()
    return _all_here(optimizer, left)


def _run(store: StateStore, work: _Own | _Standard, jobs: Sequence[Job]) -> None:
    try:
        store.run(jobs)
    except BaseException:
        for parts in (*work.sources, *work.weights):
            parts.drain()
        raise


def _all_here(optimizer: Any, parameters: list[Tensor]) -> list[Tensor]:
    """Parameters that are stepped elsewhere, with their state here, and where they are used."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        borrow(parameter)
        entry = optimizer.state.get(parameter)
        if entry and OFFLOADED in entry:
            optimizer.state[parameter] = brought_back(entry)
    return parameters


def _is_like(gradient: Tensor, parameter: Tensor) -> bool:
    """Whether the k-th element of a gradient in memory is that of the k-th of its parameter."""
    return (
        type(gradient) in (Tensor, ReleasedGradient)
        and gradient.shape == parameter.shape
        and gradient.stride() == parameter.stride()
        and not (gradient.is_neg() or gradient.is_conj())
    )


class _Gradient:
    """A gradient whose parts are needed in turn; an offloaded one is fetched a piece ahead."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient
        self._asked: dict[int, tuple[Tensor, Callable[[], None]]] = {}

    def begin(self, first: int, last: int) -> None:
        """Asks for a part."""
        if isinstance(self.gradient, ReleasedGradient):
            part = torch.empty(last - first, dtype=self.gradient.dtype, device=self.gradient.device)
            self._asked[first] = part, start(self.gradient, first, last, part)

    def part(self, first: int, last: int) -> Tensor:
        """A part, as a flat tensor."""
        if not isinstance(self.gradient, ReleasedGradient):
            return flat(self.gradient)[first:last]
        part, wait = self._asked.pop(first)
        wait()
        return part

    def stepped(self) -> None:
        """The part that was asked for last has been used: it goes when nobody holds it."""

    def put_back(self, first: int, part: Tensor) -> None:
        """Takes a part that a step has written: a fused one that unscales, Nesterov's momentum in lists."""
        if isinstance(self.gradient, ReleasedGradient):
            put(self.gradient, first, part)

    def drain(self) -> None:
        """Waits for what was asked for and is not needed any more."""
        for _, wait in self._asked.values():
            with contextlib.suppress(Exception):  # there is one already, which is raised
                wait()


# ---- PyTorch's state ---------------------------------------------------------------------------------


class _Standard:
    """Parameters whose steps the optimizer's own class computes."""

    def __init__(self, optimizer: Any, base: Base, group: Entry, store: StateStore) -> None:
        self.optimizer, self.base, self.group, self.store = optimizer, base, group, store
        self.alone = Alone(optimizer, base, group)
        # A fused step writes gradients when it unscales them, which no version shows.
        self.unscales = bool(group.get("fused")) and getattr(optimizer, "grad_scale", None) is not None
        self.sources: list[_Gradient] = []
        self.weights: list[WeightParts] = []
        self.passage = Passage()
        self.end = self.passage.end

    def jobs(self, parameter: Tensor) -> list[Job] | None:
        """What the step of a parameter consists of; None: it is stepped elsewhere."""
        gradient = on_its_device(parameter)
        assert gradient is not None
        group = self.group
        if (
            group.get("differentiable")
            or gradient.layout is not torch.strided
            or not is_worth_it(parameter, self.store.device)
            or (self.base is torch.optim.SGD and not group["momentum"])
        ):
            return None
        cut = (
            is_cut(self.base, group, parameter)
            and _is_like(gradient, parameter)
            and gradient.dtype is parameter.dtype
        )
        if not cut:
            borrow(parameter)
        offloaded, small = self._entry(parameter, cut)
        source = _Gradient(gradient)
        weights = WeightParts(parameter, self.passage, offloaded.bounds)
        self.sources.append(source)
        self.weights.append(weights)
        return [
            self._job(parameter, weights, source, offloaded, small, i) for i in range(len(offloaded.bounds))
        ]

    def _entry(self, parameter: Tensor, cut: bool) -> tuple[Offloaded, Entry]:
        """Where the state is, and what of it is here. State that is here leaves."""
        entry: Entry = self.optimizer.state.get(parameter, {})
        if OFFLOADED in entry:
            refuse_torn(entry[OFFLOADED])
            if entry[OFFLOADED].layout.cut and not cut:
                entry = self.optimizer.state[parameter] = brought_back(entry)
        if OFFLOADED not in entry:
            layout = layout_of(entry, parameter, cut)
            assert isinstance(layout, Slots)
            if layout.slots:
                entry, jobs = depart(entry, layout, parameter, self.store)
                self.store.run(jobs)
                self.optimizer.state[parameter] = entry
            else:
                entry = {**entry, OFFLOADED: self.store.place_for(parameter, layout)}
        return entry[OFFLOADED], {name: value for name, value in entry.items() if name != OFFLOADED}

    def _job(
        self,
        parameter: Tensor,
        weights: WeightParts,
        gradient: _Gradient,
        offloaded: Offloaded,
        small: Entry,
        index: int,
    ) -> Job:
        first, last = offloaded.bounds[index]
        is_last = index + 1 == len(offloaded.bounds)

        def work(piece: Tensor | None) -> Tensor | None:
            layout = _slots_of(offloaded)
            views = {} if piece is None else layout.views(piece, first, last)
            counters = dict(small)
            if is_last:
                small.clear()  # which may lie on a card, and is not to stay until all parameters are stepped
            before = {**copy.deepcopy(counters), **views}
            part = parameter
            if layout.cut:
                part = weights.part(first, last)
                part.grad = gradient.part(first, last)
            version = -1 if part.grad is None else part.grad._version
            after = self.alone.step(part, before)
            offloaded.torn = True
            if piece is None and first == 0:  # or nobody would know that the parameter has been begun
                self.optimizer.state[parameter] = {**counters, OFFLOADED: offloaded}
            if layout.cut and part.grad is not None and (self.unscales or part.grad._version != version):
                gradient.put_back(first, part.grad)
            if layout.cut:
                weights.stepped(first, last, is_last)
            kept = _kept(offloaded, parameter, (first, last), piece, after)
            if is_last:
                self._end(parameter, offloaded, after)
            return kept

        def begin() -> None:
            weights.begin(first, last)
            gradient.begin(first, last)

        return Job(offloaded, index, work, begin if offloaded.layout.cut else None)

    def _end(self, parameter: Tensor, offloaded: Offloaded, after: Entry) -> None:
        names = {slot.name for slot in _slots_of(offloaded).slots}
        rest = {name: value for name, value in after.items() if name not in names}
        self.optimizer.state[parameter] = {**rest, OFFLOADED: offloaded} if names else after
        offloaded.torn = False


def _kept(
    offloaded: Offloaded, parameter: Tensor, bounds: tuple[int, int], piece: Tensor | None, after: Entry
) -> Tensor | None:
    """The bytes of a piece after its step; None: there are none. Says what pieces are, when they are new."""
    layout = _slots_of(offloaded)
    if piece is None or not layout.cut:
        slots = _slots(offloaded, parameter, bounds, after)
        if slots != layout.slots:
            layout = offloaded.layout = Slots(slots, layout.cut)
            piece = None
    if not layout.slots:
        return None
    if piece is None:
        piece = torch.empty(layout.size(*bounds), dtype=torch.uint8, device=offloaded.device)
    for name, view in layout.views(piece, *bounds).items():
        if after[name].data_ptr() != view.data_ptr():
            view.copy_(after[name])
    return piece


def _slots_of(offloaded: Offloaded) -> Slots:
    assert isinstance(offloaded.layout, Slots)
    return offloaded.layout


def _slots(
    offloaded: Offloaded, parameter: Tensor, bounds: tuple[int, int], after: Entry
) -> tuple[Slot, ...]:
    if not offloaded.layout.cut:
        return slots_of(after, None, offloaded.device)
    if bounds[0] > 0:
        return _slots_of(offloaded).slots
    shape, stride = tuple(parameter.shape), parameter.stride()
    parts = slots_of(after, (bounds[1] - bounds[0],), offloaded.device)
    return tuple(Slot(part.name, part.dtype, shape, stride) for part in parts)


# ---- ours --------------------------------------------------------------------------------------------


class _Own:
    """Parameters that have our state."""

    def __init__(self, optimizer: Any, group: Entry, store: StateStore) -> None:
        self.optimizer, self.store = optimizer, store
        self.sources: list[_Gradient | HostGradient] = []
        self.weights: list[WeightParts | HostWeight] = []
        self.passage = Passage()
        self.kind = optimizer._memscale_kind
        self.refusal = group_refusal(self.kind, group)
        self.rule = {} if self.refusal else rule_of(self.kind, group)

    def jobs(self, parameter: Tensor) -> list[Job] | None:
        """What the step of a parameter consists of; None: it is stepped elsewhere."""
        gradient = on_its_device(parameter)
        assert gradient is not None
        if (
            self.refusal
            or not is_worth_it(parameter, self.store.device)
            or parameter_refusal(parameter)
            or gradient_refusal(parameter, gradient)
        ):
            return None
        if not _is_like(gradient, parameter):
            like = torch.empty_like(parameter, dtype=gradient.dtype, device=gradient.device)
            gradient = like.copy_(gradient)
        entry = self._entry(parameter)
        source, weights = self._parts(parameter, gradient, entry[OFFLOADED])
        self.sources.append(source)
        self.weights.append(weights)
        return [self._job(parameter, weights, source, entry, i) for i in range(len(entry[OFFLOADED].bounds))]

    def _parts(
        self, parameter: Tensor, gradient: Tensor, offloaded: Offloaded
    ) -> tuple[_Gradient | HostGradient, WeightParts | HostWeight]:
        """Gradient and weight as the step of a piece wants them, where it is computed."""
        if offloaded.where is not Where.HOST:
            return _Gradient(gradient), WeightParts(parameter, self.passage, offloaded.bounds)
        room = self.store.host_room()
        ready = torch.cuda.current_stream(offloaded.device).record_event()
        return HostGradient(gradient, room, ready), HostWeight(parameter, room, ready)

    def end(self) -> None:
        """All have been stepped: the card's stream waits for what is on its way."""
        self.passage.end()
        self.store.await_host_steps()

    def _entry(self, parameter: Tensor) -> Entry:
        """The state, whose bytes are offloaded."""
        optimizer = self.optimizer
        form = form_of(self.kind, optimizer._memscale_moments, parameter)
        entry: Entry = optimizer.state.get(parameter, {})
        if OFFLOADED in entry:
            refuse_torn(entry[OFFLOADED])
            if entry.get(FORM) == form:
                return entry
        if not entry:  # all zeros, made piece by piece
            offloaded = self.store.place_for(parameter, Own(form))
            if (
                offloaded.where is Where.HERE
            ):  # before what comes and goes, or that would leave gaps between them
                offloaded.pieces[:] = [_zeros(offloaded, index) for index in range(len(offloaded.bounds))]
            return {STEP: 0, FORM: form, OFFLOADED: offloaded}
        if OFFLOADED in entry:
            optimizer.state[parameter] = brought_back(entry)
        entry, jobs = depart(entry_of(optimizer, parameter), Own(form), parameter, self.store)
        self.store.run(jobs)
        optimizer.state[parameter] = entry
        return entry

    def _job(
        self,
        parameter: Tensor,
        weights: WeightParts | HostWeight,
        gradient: _Gradient | HostGradient,
        entry: Entry,
        index: int,
    ) -> Job:
        offloaded: Offloaded = entry[OFFLOADED]
        first, last = offloaded.bounds[index]
        is_last = index + 1 == len(offloaded.bounds)
        has_residual = master_residuals.waits(parameter)

        def work(piece: Tensor | None) -> Tensor | None:
            assert isinstance(offloaded.layout, Own)
            if piece is None:  # before the first step
                piece = _zeros(offloaded, index)
            weight = weights.part(first, last)
            if has_residual:
                master_residuals.fill(parameter, weight, piece, offloaded.layout, first, last)
            part = gradient.part(first, last)
            tensor = as_tensor(offloaded.layout, entry[STEP] + 1, weight, part, piece, first, last)
            core_on(offloaded.place).step({**self.rule, **types_of(entry[FORM], part)}, [tensor])
            offloaded.torn = True
            gradient.stepped()
            weights.stepped(first, last, is_last)
            if first == 0:
                self.optimizer.state[parameter] = entry
            if is_last:
                torch.autograd.graph.increment_version(parameter)
                entry[STEP] += 1
                offloaded.torn = False
                if has_residual:
                    master_residuals.settled(parameter)
            return piece

        def begin() -> None:
            weights.begin(first, last)
            gradient.begin(first, last)

        return Job(offloaded, index, work, begin)


def _zeros(offloaded: Offloaded, index: int) -> Tensor:
    """A piece of our state before the first step."""
    return torch.zeros(offloaded.size(index), dtype=torch.uint8, device=offloaded.place)


def types_of(form: Form, gradient: Tensor) -> dict[str, str]:
    """Types of a parameter's arrays as the core names them."""
    return {"weights": form.weights, "moments": form.moments, "gradient": GRADIENTS[gradient.dtype]}


def as_tensor(
    layout: Own, step: int, weight: Tensor, gradient: Tensor, piece: Tensor, first: int, last: int
) -> tuple[int, ...]:
    """A part of a parameter as the core takes it."""
    spans, at = layout.places(first, last), piece.data_ptr()
    arrays = (spans.rest, spans.moment1, spans.moment2, spans.scale1, spans.scale2)
    return (
        *(last - first, first, step),
        *(gradient.data_ptr(), gradient.nbytes),
        *(weight.data_ptr(), weight.nbytes),
        *(number for offset, size in arrays for number in (at + offset, size)),
    )
