# SPDX-License-Identifier: Apache-2.0
"""One deferred call of a language model's head, with the state that it was called with."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memscale.techniques.checkpoint import global_hooks
from memscale.techniques.tiles.tiled_loss import autocast_as, autocast_now
from memscale.torchkit.exchange_lock import lock_of

_STATE = (bool, int, float, str, type(None))
"""Attributes of these types are put back: `training`, scales, the names of adapters."""


class HeadCall:
    """A head as a function of rows, with everything that it read when it was called.

    Args:
        module: the head.
        original: its own forward.
        linear: weight and bias of a head that is nothing but their product; None for any other.
        classes: number of classes.
        dtype: of the logits.
        wants_rows: the gradient of the hidden states is needed.
        tiled: called when a loss has run in tiles.

    Attributes:
        params: distinct parameters that need a gradient.
        hidden_version: of the hidden states, when the head was called.
        watched: somebody wants to see gradients of the logits.
        tiled: a loss on the logits has run in tiles.
        bridged: number of the backward in which gradients of computed logits have come.
    """

    def __init__(
        self,
        module: nn.Module,
        original: Callable[[Tensor], Tensor],
        linear: tuple[Tensor, Tensor | None] | None,
        classes: int,
        dtype: torch.dtype,
        wants_rows: bool,
        tiled: Callable[[], None],
    ) -> None:
        self.original = original
        self.linear = linear
        self.classes = classes
        self.dtype = dtype
        self.wants_rows = wants_rows
        self.has_tiled = tiled
        self.hidden_version = 0
        self.watched = self.tiled = False
        self.bridged = -1
        self.autocast = autocast_now()
        self.tensors: list[tuple[dict[str, Any], str, Tensor, tuple[int, int]]] = []
        self.plain: list[tuple[dict[str, Any], str, Any]] = []
        self.parts = list(module.modules())
        with lock_of(self.parts):
            self._note_parts()
        distinct = {id(tensor): tensor for _, _, tensor, _ in self.tensors}
        self.params: Sequence[Tensor] = [tensor for tensor in distinct.values() if tensor.requires_grad]

    def _note_parts(self) -> None:
        for part in self.parts:
            for registry in (part._parameters, part._buffers):
                place: dict[str, Any] = registry
                self.tensors += [(place, name, t, _stamp(t)) for name, t in place.items() if t is not None]
            own = vars(part)
            self.plain += [(own, name, _copied(value)) for name, value in own.items() if _is_plain(value)]

    def run(self, rows: Tensor, stand_ins: Sequence[Tensor] = ()) -> Tensor:
        """Logits [..., classes] of rows [..., width].

        Args:
            rows: of hidden states.
            stand_ins: tensors to use in place of `params`.

        Raises:
            RuntimeError: a weight or buffer has been changed in place since the call.
        """
        # Hooks that came since the call: with them it would not have been deferred.
        with global_hooks.silenced(), self._as_it_was(stand_ins), autocast_as(self.autocast):
            return self.original(rows)

    @contextmanager
    def _as_it_was(self, stand_ins: Sequence[Tensor]) -> Iterator[None]:
        exchanges = self._has_gone() or any(map(operator.is_not, self.params, stand_ins))
        with (
            lock_of(self.parts) if exchanges else nullcontext(),
            self._restored(),
            self._with_params(stand_ins),
        ):
            yield

    def stand_ins(self) -> list[Tensor]:
        """`params`, for gradients that are computed inside: a caller's hook on one sees the sum, and once."""
        return [param.view_as(param) if param._backward_hooks else param for param in self.params]

    @contextmanager
    def _with_params(self, stand_ins: Sequence[Tensor]) -> Iterator[None]:
        others = {
            id(own): other for own, other in zip(self.params, stand_ins, strict=False) if own is not other
        }
        places = [(place, name, tensor) for place, name, tensor, _ in self.tensors if id(tensor) in others]
        try:
            for place, name, tensor in places:
                place[name] = others[id(tensor)]
            yield
        finally:
            for place, name, tensor in places:
                place[name] = tensor

    def check(self) -> None:
        """Raises RuntimeError if a weight or buffer of the head has been changed in place since the call."""
        for _, name, tensor, stamp in self.tensors:
            if _stamp(tensor) != stamp:
                raise RuntimeError(
                    f"logits are looked at that MemScale's loss tile has not computed, and {name!r} of their "
                    "head has been changed since (by an optimizer's step, for instance). Look at them "
                    "before that, or set enable_tiling=False"
                )

    def _has_gone(self) -> bool:
        """Whether the head has anything else now than when it was called."""
        return any(place.get(name) is not tensor for place, name, tensor, _ in self.tensors) or any(
            place.get(name) != value for place, name, value in self.plain
        )

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """The head as it was."""
        self.check()
        undo: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for place, name, tensor, _ in self.tensors:
                if place.get(name) is not tensor:
                    undo.append((place, name, place.get(name)))
                    place[name] = tensor
            for place, name, value in self.plain:
                present = place.get(name)
                if present is not value and present != value:
                    undo.append((place, name, present))
                    place[name] = value
            yield
        finally:
            for place, name, value in reversed(undo):
                place[name] = value


def _stamp(tensor: Tensor) -> tuple[int, int]:
    return tensor._version, 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()


def _is_plain(value: Any) -> bool:
    return type(value) in _STATE or (type(value) in (list, tuple) and all(type(x) in _STATE for x in value))


def _copied(value: Any) -> Any:
    return list(value) if type(value) is list else value
