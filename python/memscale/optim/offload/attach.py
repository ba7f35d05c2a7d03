# SPDX-License-Identifier: Apache-2.0
"""Offloads the state of the caller's optimizer between steps, in place.

As in `optim/patched`: the optimizer becomes one of a subclass of its own class, and PyTorch's `step` goes on
running. It asks `_init_group` which parameters to step; those whose state is offloaded are stepped piece by
piece here (`offload/step`), and the others are left to it. One without `_init_group`, or whose step is its
own, gets another `step`. An optimizer that has our state is patched likewise: its bytes leave as they are.

`optimizer.state[parameter]` has what is small, step counters among it, and a record of where the rest is.
`state_dict` has everything, in tensors over files (`mapped`). So have `copy.deepcopy` and `pickle`; copies
are optimizers as they were before.

Checkpoints are written beside training: a thread that saves has the state to itself, and so has a step from
its first group to its last; others wait (`StateStore.held`). Only the thread that saves sees the saved state.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from memscale.offload.engine import Offload
from memscale.optim.alone import step_around, why_not_alone
from memscale.optim.arrays import Empty
from memscale.optim.kinds import inner_of
from memscale.optim.mapped import mapped_in
from memscale.optim.master_residuals import wait_elsewhere
from memscale.optim.offload.load import passing
from memscale.optim.offload.pieces import OFFLOADED, PIECE_ELEMENTS
from memscale.optim.offload.state import bring_back, brought_back, copied, move, offload_entry
from memscale.optim.offload.step import Later, step_group
from memscale.optim.offload.store import MOVE, SAVE, STEP, StateStore
from memscale.optim.patched_base import around_step, can_rewrap, is_patched, rewrap
from memscale.optim.twins import apart
from memscale.uninterrupted import uninterrupted

_stores: weakref.WeakKeyDictionary[torch.optim.Optimizer, StateStore] = weakref.WeakKeyDictionary()
_led: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, Any]] = weakref.WeakKeyDictionary()
"""Optimizers that had a scheduler's wrapper: their `step` on the object now, and before."""


class _Seen(threading.local):
    """What this thread sees in place of an optimizer's state, by the optimizer's id."""

    def __init__(self) -> None:
        self.states: dict[int, defaultdict[Any, Any]] = {}


_seen = _Seen()

# ---- the classes -------------------------------------------------------------------------------------


class _Offloaded(torch.optim.Optimizer):
    """What an optimizer has more while its state is offloaded."""

    _memscale_offload_base: ClassVar[type[torch.optim.Optimizer]]

    @property
    def state(self) -> defaultdict[Any, Any]:
        """As the attribute; while this thread saves it, what is saved."""
        seen = _seen.states.get(id(self))
        return self.__dict__["state"] if seen is None else seen

    @state.setter
    def state(self, value: defaultdict[Any, Any]) -> None:
        self.__dict__["state"] = value

    def _memscale_empty(self) -> Empty:
        """Makes tensors for a state dict, beside the state: of a card's, on the host."""
        settings = _stores[self].offload.settings
        if settings.device.type != "cpu" and not settings.file_bytes:
            return partial(torch.empty_strided, device="cpu")
        return mapped_in(settings.directory)

    def state_dict(self) -> dict[str, Any]:
        """All of the state: a copy, which later steps leave as it is, in files rather than in memory.

        Of parameters on a card it lies in host memory, unless a file was asked for; loading takes it from
        there. Hooks find the copy in `optimizer.state`, too.

        Raises:
            OSError: there is no room for it, or a piece could not be read.
            RuntimeError: a step has ended in the middle; or one runs in this thread, and was interrupted.
        """
        with _with_state(self, copied):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as the optimizer did before, and offloads it: from the host in pieces."""
        store = _stores[self]
        passes = store.device.type != "cpu" and not is_patched(self)
        base = self._memscale_offload_base
        with passing(self, base, store) if passes else nullcontext():
            super().load_state_dict(state_dict)
        offload_entry(self, base, store)

    def __getstate__(self) -> dict[str, Any]:
        with _with_state(self, _whole):
            found = dict(super().__getstate__())
            found["state"] = defaultdict(dict, self.state)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        base = self._memscale_offload_base
        if is_patched(self):
            return super().__reduce_ex__(protocol)
        return _anew, (base,), self.__getstate__()


class _OffloadedGroups(_Offloaded):
    """Of an optimizer whose step asks `_init_group`."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        store = _stores[self]
        store.begin_step()
        with store.held(STEP):  # all that is held if the step of the class was called, and not this one's
            left = step_offloaded(self, group)
            return super()._init_group({**group, "params": left}, *lists)  # type: ignore[misc]

    def _optimizer_step_code(self) -> None:  # PyTorch calls it between the step and hooks after it
        _stores[self].end_step()
        super()._optimizer_step_code()


class _OffloadedStep(_Offloaded):
    """Of an optimizer whose step is all its own."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        store = _stores[self]

        def step_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
            store.begin_step()
            with uninterrupted():
                return [{**group, "params": step_offloaded(self, group)} for group in groups]

        with store.whole_step():
            return step_around(self, self._memscale_offload_base, closure, step_groups)


def held_for_step(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """What a step holds of an optimizer's state, for one that is made of several calls."""
    return _stores[optimizer].held(STEP)


def step_offloaded(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], later: Later | None = None
) -> list[Tensor]:
    """Steps the parameters of a group whose state is offloaded, or is to be. Returns the others.

    Args:
        optimizer: whose state is offloaded.
        group: as in `step.step_group`.
        later: likewise.

    Raises:
        OSError, RuntimeError: as `step.step_group`.
        RuntimeError: this thread is saving the state.
    """
    assert isinstance(optimizer, _Offloaded)
    store = _stores[optimizer]
    with store.held(STEP), uninterrupted():  # between two pieces Ctrl-C would leave half a step
        return step_group(optimizer, optimizer._memscale_offload_base, group, store, later)


def steps_on_host(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the host steps parameters of a card, those whose state is offloaded."""
    store = _stores.get(inner_of(optimizer))
    return store is not None and store.on_host


def await_host_steps(optimizer: torch.optim.Optimizer) -> None:
    """The card's present stream goes on behind all that steps on the host have sent up so far."""
    store = _stores.get(inner_of(optimizer))
    if store is not None:
        store.await_host_steps()


def _class_for(base: type[torch.optim.Optimizer], own: type[_Offloaded]) -> type[_Offloaded]:
    """The subclass for a class of optimizers: the one that there is, or a new one."""
    for known in base.__subclasses__():
        if issubclass(known, _Offloaded) and known._memscale_offload_base is base:
            return known
    more: dict[str, Any] = {"_memscale_offload_base": base}
    if own is _OffloadedStep:
        more["step"] = torch.optim.Optimizer.profile_hook_step(_OffloadedStep.step)
        more["step"].hooked = True
    else:
        more["step"] = _in_one(base)
    about = {"__module__": __name__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (own, base), {**about, **more})


def _in_one(base: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The step of a class that asks `_init_group`, as one that others wait for."""

    @functools.wraps(base.step)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        store = _stores.get(self)  # None: somebody has kept this step, and the state is back
        with nullcontext() if store is None else store.whole_step():
            return base.step(self, *args, **kwargs)

    return step


def _anew(base: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """For `copy` and `pickle`: an optimizer that is to be given its attributes."""
    return base.__new__(base)


@contextmanager
def _with_state(
    optimizer: _Offloaded, form: Callable[[dict[str, Any], Empty], dict[str, Any]]
) -> Iterator[None]:
    """This thread sees all state in another form for the time of a block. The state stays as it is."""
    with _stores[optimizer].held(SAVE):
        made, make = defaultdict[Any, Any](dict), optimizer._memscale_empty()
        for key, entry in dict(optimizer.state).items():
            made[key] = form(entry, make) if isinstance(entry, dict) else entry
        states, before = _seen.states, _seen.states.get(id(optimizer))
        states[id(optimizer)] = made
        try:
            yield
        finally:
            if before is None:
                del states[id(optimizer)]
            else:
                states[id(optimizer)] = before


def _whole(entry: dict[str, Any], make: Empty) -> dict[str, Any]:
    if OFFLOADED not in entry:  # copied now: the caller goes on while steps may run
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
    return brought_back(entry, make if entry[OFFLOADED].device.type == "cpu" else None)


# ---- taking over and giving back ---------------------------------------------------------------------


def is_offloaded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer, or the one in a wrapper, has its state elsewhere."""
    return isinstance(inner_of(optimizer), _Offloaded)


def plain_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As `copy.copy` of an optimizer whose state is offloaded, without that state, which is not read."""
    assert isinstance(optimizer, _Offloaded)
    base = optimizer._memscale_offload_base
    made = base.__new__(base)
    facts = {"defaults": optimizer.defaults, "param_groups": optimizer.param_groups}
    made.__setstate__({**apart(facts), "state": defaultdict(dict)})
    return made


@contextmanager
def resident_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """All state of an optimizer resident, and its class as before, for a block; then offloaded again."""
    optimizer = inner_of(optimizer)
    store = _stores.get(optimizer)
    if store is None:
        yield
        return
    take_back(optimizer)
    try:
        yield
    finally:
        values = (value for group in optimizer.param_groups for value in group["params"])
        resident = [value for value in values if id(value) in store.resident]
        send(optimizer, store.offload, store.piece_elements, resident, store.on_host)


def offloaded_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that are elsewhere now."""
    state = inner_of(optimizer).state.values()
    return sum(entry[OFFLOADED].nbytes for entry in state if OFFLOADED in entry)


def why_not_offloaded(optimizer: torch.optim.Optimizer) -> str:
    """Why the state of an optimizer cannot be offloaded; "" if it can."""
    optimizer = inner_of(optimizer)
    if isinstance(optimizer, _Offloaded):
        return "its state is elsewhere already"
    if is_patched(optimizer):
        return ""
    base = type(optimizer)
    if reason := why_not_alone(optimizer, base):
        return reason
    devices = {value.device.type for group in optimizer.param_groups for value in group["params"]}
    if devices.isdisjoint(("cpu", "cuda")):
        return "none of its parameters are on the CPU or a card"
    return (
        ""
        if _form_of(base) is _OffloadedGroups and "_init_group" not in vars(optimizer)
        else _reason(optimizer)
    )


def _form_of(base: type[torch.optim.Optimizer]) -> type[_Offloaded]:
    """How the step of a class is led here: by `_init_group` where it is known to be asked."""
    known = getattr(base, "_memscale_base", base)
    asks = known.__module__.startswith("torch.optim.") and hasattr(base, "_init_group")
    return _OffloadedGroups if asks else _OffloadedStep


def _reason(optimizer: torch.optim.Optimizer) -> str:
    if not can_rewrap(optimizer) or ("step" in vars(optimizer) and hasattr(optimizer, "_init_group")):
        return "its step has been replaced"
    return ""


def send(
    optimizer: torch.optim.Optimizer,
    offload: Offload,
    piece_elements: int = PIECE_ELEMENTS,
    resident: Iterable[Tensor] = (),
    on_host: bool = False,
) -> str:
    """Offloads the state of an optimizer, in place. It may have stepped, and others may hold it.

    Args:
        optimizer: PyTorch's, one with our state, or another whose step treats parameters independently; or a
            wrapper of one.
        offload: where to: the optimizer's alone. State of parameters on another device than its own stays.
        piece_elements: of a parameter that pass at once.
        resident: parameters whose state stays.
        on_host: our own state of a card's parameters goes to memory of the host, which steps them: their
            gradients and weights come down, and weights go up. The bits are the card's.

    Returns:
        "" or why it stays as it is.

    Raises:
        OSError: the engine cannot be opened.
    """
    if reason := why_not_offloaded(optimizer):
        return reason
    optimizer = inner_of(optimizer)
    base = type(optimizer)
    offload.engine.step()  # opens it
    store = StateStore(
        offload, piece_elements, frozenset(map(id, resident)), on_host and is_patched(optimizer)
    )
    _stores[optimizer] = store
    optimizer.__class__ = _class_for(base, _form_of(base))
    _lead_step(optimizer)
    try:
        wait_elsewhere(optimizer)
    except OSError as error:
        store.say(str(error))
    offload_entry(optimizer, base, store)
    return ""


def keep_resident(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], on_host: bool | None = None
) -> None:
    """Keeps the state of these resident from now on, and that of all others offloaded.

    Args:
        optimizer: one whose state is offloaded.
        parameters: of the optimizer.
        on_host: as for `send`; None: as it is.

    Raises:
        OSError: a piece could not be read. It, and those that come after it, come in the next step.
        RuntimeError: there is no room for one, and the same; or a step, or a save, runs in this thread.
    """
    optimizer = inner_of(optimizer)
    store = _stores[optimizer]
    with store.held(MOVE), uninterrupted():
        store.resident = frozenset(map(id, parameters))
        if on_host is not None:
            store.on_host = on_host and is_patched(optimizer)
        move(optimizer, store)


def take_back(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer what it was; does nothing if its state is not offloaded.

    Raises:
        OSError: a piece could not be read. What was not read is offloaded still.
        RuntimeError: a step ended in the middle; or one, or a save, runs in this thread.
    """
    optimizer = inner_of(optimizer)
    if not isinstance(optimizer, _Offloaded):
        return
    with _stores[optimizer].held(MOVE):
        bring_back(optimizer)
        optimizer.__class__ = optimizer._memscale_offload_base  # type: ignore[assignment]
        _leave_step(optimizer)
        _stores.pop(optimizer)


def _lead_step(optimizer: torch.optim.Optimizer) -> None:
    """Leads a scheduler's wrapper, which holds the step that it found, to that of the class as it is now."""
    wrapper = vars(optimizer).get("step")
    if hasattr(wrapper, "_wrapped_by_lr_sched"):
        _led[optimizer] = around_step(optimizer, wrapper), wrapper
        optimizer.step = _led[optimizer][0]  # type: ignore[method-assign]


def _leave_step(optimizer: torch.optim.Optimizer) -> None:
    """Undoes `_lead_step`. A wrapper that has come since is led from the step that is no more."""
    step, before = _led.pop(optimizer, (None, None))
    if step is not None and vars(optimizer).get("step") is step:
        optimizer.step = before  # type: ignore[method-assign]
    else:
        rewrap(optimizer)
