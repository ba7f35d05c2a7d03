# SPDX-License-Identifier: Apache-2.0
"""What an optimizer with offloaded state (`optim/offload/attach.py`) takes, as a trace counts it.

    between steps    the state of small parameters and of those that stay resident, and step counters
    in the step      the piece that is computed, that before it and that behind it; their parts of gradients
                     that are offloaded, but for that before; buffers for parts of offloaded weights;
                     what the optimizer's operations take on one piece
    on the link      the offloaded state, back and out again. Where the host steps a card's parameters: their
                     gradients, and weights there and back, as far as these are not on the host anyway

In the first step a piece is there twice, as PyTorch makes it and as it stays or leaves, and what stays is not
all there yet.

On a card everything is a block of its own, since the allocator rounds each for itself; step counters lie
there only where fused and capturable steps need it, and operations are those on lists unless the optimizer's
settings say otherwise.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memscale.optim.alone import CUTTABLE, can_cut
from memscale.optim.arrays import form_of, places
from memscale.optim.kinds import Kind, group_refusal, parameter_refusal
from memscale.optim.offload.pieces import LEAST_BYTES, LINE, PIECE_ELEMENTS, bounds_of
from memscale.optim.offload.weights import BUFFERS
from memscale.techniques.optimizer.path import OptimizerPath
from memscale.torchkit.extents import fills_memory

_COUNTER_BYTES = 4
_NUMBERS_BYTES = 64
_CARD_BLOCK = 512  # bytes that a card's allocator hands out at least
_CARD_NUMBERS_BYTES = 8 * _CARD_BLOCK  # that a step there holds at once: copies of counters, bias corrections


class _Told(NamedTuple):
    tensor: Tensor
    is_ours: bool
    name: str


class _Piece(NamedTuple):
    """A part of a parameter that is stepped at once, in bytes.

    Attributes:
        state: of its state.
        made: of PyTorch's state as the first step makes it.
        copy: of a temporary of the step's operations.
        copy_count: how many of these are there at once.
        gradient: of its part of a gradient that is offloaded.
        weight: of its part of an offloaded weight.
        here: its state stays in memory.
        is_new: it has no state yet.
    """

    state: int
    made: int
    copy: int
    copy_count: int
    gradient: int
    weight: int
    here: bool
    is_new: bool


_Numbered = tuple[int, _Piece]
"""A piece, and the number of its parameter in its group."""

_NO_PIECE = _Piece(0, 0, 0, 0, 0, 0, here=True, is_new=False)


class Leaving(NamedTuple):
    """A parameter whose state can leave.

    Attributes:
        group: number of its group.
        parameter: the real one.
        name: in the model; "" if it has none there.
        state_bytes: of its state.
    """

    group: int
    parameter: Tensor
    name: str
    state_bytes: int


@dataclass(frozen=True)
class OffloadLayout:
    """The layout, as in `eight_bit_layout.Layout`.

    Attributes:
        optimizer: whose it is.
        base: its class when it is not patched.
        kind: of our state, where it has that; None: PyTorch's.
        moments: their form.
        path: optimizer-side techniques of the step.
        as_planned: a parameter as it is in the step.
        name_of: the model's name for a parameter; "" if it has none.
    """

    optimizer: Any
    base: type[torch.optim.Optimizer]
    kind: Kind | None
    moments: str
    path: OptimizerPath
    as_planned: Callable[[Tensor], Tensor]
    name_of: Callable[[Tensor], str]

    @property
    def name(self) -> str:
        """Of the operation."""
        return f"memscale::{self.base.__name__.lower()}"

    def shared(self) -> list[int]:
        """Nothing is for all parameters."""
        return []

    def state(self, group: int, index: int) -> list[int]:
        """What stays here."""
        parameter = self._parameter(group, index)
        counter = [] if parameter.is_ours or not self._counts(group) else [_COUNTER_BYTES]
        if not self._leaves(group, parameter):
            tensors = self._tensors(self.optimizer.param_groups[group])
            apart = self.path.on_card and not parameter.is_ours
            return [
                *([parameter.tensor.nbytes] * tensors if apart else [self._bytes(group, parameter)]),
                *counter,
            ]
        if not self._is_here(parameter):
            return counter
        pieces = [
            self._piece_bytes(group, parameter, count) for count in self._piece_counts(group, parameter)
        ]
        return [*(pieces if self.path.on_card else [sum(pieces)]), *counter]

    def scratch(self, group: int, index: int, on_card: bool) -> list[int]:
        """What the step takes."""
        parameter = self._parameter(group, index)
        whole = self._whole_gradients
        whole = whole if self.path.on_card or not whole else [sum(whole)]
        numbers = _CARD_NUMBERS_BYTES if self.path.on_card else _NUMBERS_BYTES
        if self._leaves(group, parameter):
            most = self._most[group][index]
            return [*(most if self.path.on_card else [sum(most)]), *whole, numbers]
        if parameter.is_ours:
            return whole
        settings = self.optimizer.param_groups[group]
        count = self._temporaries(settings)
        if self._in_lists(settings):
            return [*whole, *[self._left_bytes[group]] * count]
        before = self._left_before(group, index) if count else 0
        return [*whole, *[parameter.tensor.nbytes] * count, *([before] if before else [])]

    def _left_before(self, group: int, index: int) -> int:
        """Bytes of the one that PyTorch steps before it, whose last temporary its loop still holds."""
        settings = self.optimizer.param_groups[group]
        for number in range(index - 1, -1, -1):
            parameter = self._parameter(group, number)
            if settings["params"][number].requires_grad and not self._leaves(group, parameter):
                return parameter.tensor.nbytes
        return 0

    def moved(self, group: int, index: int) -> tuple[int, int]:
        """Bytes that the step moves in memory; and in the time that the link takes."""
        parameter = self._parameter(group, index)
        if self.is_on_host(group, index):
            return parameter.tensor.nbytes, self._host_step(parameter)
        state = self._bytes(group, parameter)
        out, back = self.path.link_moves
        passes = self._leaves(group, parameter) and not self._is_here(parameter)
        return 3 * parameter.tensor.nbytes + 2 * state, state * (out + back) // 1024 if passes else 0

    def is_on_host(self, group: int, index: int) -> bool:
        """Whether the host steps a card's parameter."""
        return self._is_on_host(group, self._parameter(group, index))

    def _is_on_host(self, group: int, parameter: _Told) -> bool:
        return (
            self.path.host_step_moves > 0
            and parameter.is_ours
            and self._leaves(group, parameter)
            and not self._is_here(parameter)
        )

    def _host_step(self, parameter: _Told) -> int:
        """Bytes that are moved in the card's memory in the time of a step on the host."""
        path, size = self.path, parameter.tensor.nbytes
        out, back = path.link_moves
        link = 0 if parameter.name in path.released else size * out
        link += 0 if parameter.name in path.streamed.names else size * (out + back)
        return (link + parameter.tensor.numel() * path.host_step_moves) // 1024

    def leaving(self) -> Iterator[Leaving]:
        """Parameters whose state can leave, whether or not they stay resident."""
        for group, settings in enumerate(self.optimizer.param_groups):
            for index, real in enumerate(settings["params"]):
                parameter = self._parameter(group, index)
                if real.requires_grad and self._leaves(group, parameter):
                    yield Leaving(group, real, parameter.name, self._in_pieces(group, parameter))

    # ---- pieces ------------------------------------------------------------------------------------

    @functools.cached_property
    def _most(self) -> list[dict[int, list[int]]]:
        """For each group and parameter the blocks that its pieces take, where these are most.

        As `optim/offload/store.py` runs them: one after the other, in the order of the group.
        """
        groups = [self._pieces(group) for group in range(len(self.optimizer.param_groups))]
        every = [piece for pieces in groups for _, piece in pieces]
        unmade = sum(piece.state for piece in every if piece.is_new and piece.here)
        found: list[dict[int, list[int]]] = [{} for _ in groups]
        for group, pieces in self._runs(groups):
            most, leaving = found[group], 0
            buffers = self._weight_buffers(pieces)
            ahead = [*(piece for _, piece in pieces[1:]), _NO_PIECE]
            for (index, piece), following in zip(pieces, ahead, strict=False):
                own = 0 if piece.here else piece.state
                blocks = [leaving, piece.gradient, following.gradient, own]
                blocks += [0 if following.here else following.state, *[piece.copy] * piece.copy_count]
                if piece.is_new:  # until all that stays is made, there is less of it than is counted
                    then = unmade - piece.state * piece.here
                    copies = piece.copy * piece.copy_count
                    first = max(piece.made + copies - unmade, piece.made + own - then)
                    blocks, unmade = [*blocks, max(0, first - sum(blocks[3:]))], then
                blocks = [*buffers, *(size for size in blocks if size)]
                most[index] = max(most.get(index, []), blocks, key=sum)
                leaving = own or leaving
        return found

    def _runs(self, groups: list[list[_Numbered]]) -> Iterator[tuple[int, list[_Numbered]]]:
        """Pieces that follow each other in one run, with the number of their group."""
        for group, pieces in enumerate(groups):
            if not self.path.stepped:
                yield group, pieces
                continue
            for _, run in itertools.groupby(pieces, lambda piece: piece[0]):  # in backward: each alone
                yield group, list(run)

    @staticmethod
    def _weight_buffers(pieces: list[_Numbered]) -> list[int]:
        """Sizes of the buffers that parts of weights pass through in the step of a group."""
        sizes = [piece.weight for _, piece in pieces if piece.weight]
        return [max(sizes)] * min(BUFFERS, len(sizes)) if sizes else []

    def _pieces(self, group: int) -> list[_Numbered]:
        """All pieces of a group in their order, with the numbers of their parameters."""
        settings = self.optimizer.param_groups[group]
        found = []
        for index, real in enumerate(settings["params"]):
            parameter = self._parameter(group, index)
            if not (real.requires_grad and self._leaves(group, parameter)):
                continue
            width = parameter.tensor.element_size()
            cut, here = self._is_cut(group, parameter), self._is_here(parameter)
            copies = 0 if parameter.is_ours else self._temporaries(settings)
            made = 0 if parameter.is_ours else self._tensors(settings) * width
            released = width if cut and parameter.name in self.path.released else 0
            streamed = self.path.streamed.names if self.path.on_card else ()
            on_host = self._is_on_host(group, parameter)  # parts of gradients may pass the card all the same
            resident_state = width if cut and parameter.name in streamed and not on_host else 0
            is_new = not self.optimizer.state.get(real)
            for count in self._piece_counts(group, parameter):
                state = 0 if on_host else self._piece_bytes(group, parameter, count)
                sizes = state, made * count, width * count, copies, released * count, resident_state * count
                found.append((index, _Piece(*sizes, here=here, is_new=is_new)))
        return found

    def _piece_counts(self, group: int, parameter: _Told) -> list[int]:
        """Elements of each piece."""
        elements = parameter.tensor.numel()
        part = min(elements, PIECE_ELEMENTS) if self._is_cut(group, parameter) else elements
        return [behind - begin for begin, behind in bounds_of(elements, part)]

    @functools.cached_property
    def _whole_gradients(self) -> list[int]:
        """Sizes of gradients that are offloaded and come back whole: they stay until others do."""
        sizes = [
            parameter.tensor.nbytes
            for group, settings in enumerate(self.optimizer.param_groups)
            for parameter in (self._parameter(group, index) for index in range(len(settings["params"])))
            if parameter.name in self.path.released and not self._is_cut(group, parameter)
        ]
        return most_together(sizes, self.path.gradient_window_bytes)

    @functools.cached_property
    def _left_bytes(self) -> list[int]:
        """For each group the bytes of parameters that PyTorch steps together."""
        return [
            sum(
                self._rounded(parameter.tensor.nbytes)
                for parameter in (self._parameter(group, index) for index in range(len(settings["params"])))
                if parameter.tensor.requires_grad and not self._leaves(group, parameter)
            )
            for group, settings in enumerate(self.optimizer.param_groups)
        ]

    # ---- parameters --------------------------------------------------------------------------------

    def _parameter(self, group: int, index: int) -> _Told:
        """A parameter as it is in the step, and whether it has our state."""
        settings = self.optimizer.param_groups[group]
        real: Tensor = settings["params"][index]
        ours = self.kind is not None and not (group_refusal(self.kind, settings) or parameter_refusal(real))
        return _Told(self.as_planned(real), ours, self.name_of(real))

    def _is_here(self, parameter: _Told) -> bool:
        return parameter.name in self.path.state_here

    def _in_pieces(self, group: int, parameter: _Told) -> int:
        """Bytes of the state of a parameter, in pieces."""
        counts = self._piece_counts(group, parameter)
        return sum(self._piece_bytes(group, parameter, count) for count in counts)

    def _piece_bytes(self, group: int, parameter: _Told, count: int) -> int:
        if parameter.is_ours:
            return self._bytes(group, parameter, count)
        size = count * parameter.tensor.element_size()
        return (size + -size % LINE) * self._tensors(self.optimizer.param_groups[group])

    def _bytes(self, group: int, parameter: _Told, count: int | None = None) -> int:
        """Bytes of the state of so many elements; None: of all."""
        count = parameter.tensor.numel() if count is None else count
        if parameter.is_ours and self.kind is not None:
            form = form_of(self.kind, self.moments, parameter.tensor)
            return places(form.kind, form.weights, form.moments, count).total_bytes
        return count * parameter.tensor.element_size() * self._tensors(self.optimizer.param_groups[group])

    def _tensors(self, settings: dict[str, Any]) -> int:
        """Tensors of PyTorch's state."""
        if issubclass(self.base, torch.optim.SGD):
            return int(bool(settings["momentum"]))
        return 3 if settings.get("amsgrad") else 2

    def _leaves(self, group: int, parameter: _Told) -> bool:
        settings = self.optimizer.param_groups[group]
        return (
            parameter.tensor.nbytes >= LEAST_BYTES
            and not parameter.tensor.is_complex()  # see is_worth_it
            and not settings.get("differentiable")
            and (self.kind is None or parameter.is_ours)
            and self._bytes(group, parameter) > 0
        )

    def _is_cut(self, group: int, parameter: _Told) -> bool:
        if parameter.is_ours:
            return self._leaves(group, parameter)
        settings = self.optimizer.param_groups[group]
        return (
            self._leaves(group, parameter)
            and can_cut(self.base, settings, parameter.tensor, self.path.on_card)
            and fills_memory(parameter.tensor)
        )

    def _counts(self, group: int) -> bool:
        """Whether a step counter lies on the device."""
        settings = self.optimizer.param_groups[group]
        on_device = not self.path.on_card or settings.get("fused") or settings.get("capturable")
        return bool(on_device) and self.base is not torch.optim.SGD

    def _in_lists(self, settings: dict[str, Any]) -> bool:
        """Whether PyTorch's step takes all parameters at once."""
        chosen = settings.get("foreach")
        if chosen is not None or not self.path.on_card:
            return bool(chosen)
        by_tensor = isinstance(settings.get("lr"), Tensor) and not settings.get("capturable")
        return not (settings.get("fused") or settings.get("differentiable") or by_tensor)

    def _rounded(self, size: int) -> int:
        """As a card's allocator rounds a block."""
        return size + (-size % _CARD_BLOCK if self.path.on_card else 0)

    def _temporaries(self, settings: dict[str, Any]) -> int:
        """Tensors as large as a part that PyTorch's operations hold at once."""
        if settings.get("fused"):
            return 0
        own_gradient = bool(settings.get("maximize"))
        decoupled = settings.get("decoupled_weight_decay", self.base is torch.optim.AdamW)
        own_gradient |= bool(settings["weight_decay"]) and not decoupled
        if self._in_lists(settings):
            # SGD's second is in place; Adam's root is made when the gradient is gone.
            return own_gradient if self.base is torch.optim.SGD else 1
        return own_gradient + (bool(settings.get("nesterov")) if self.base is torch.optim.SGD else 2)


def has_known_layout(base: type[torch.optim.Optimizer]) -> bool:
    """Whether what PyTorch's state of a class takes is known here."""
    return base in CUTTABLE


def most_together(sizes: Iterable[int], window_bytes: int) -> list[int]:
    """What of gradients that are used in turn is here at most: the one in use, and what is left of others."""
    here = Together(window_bytes)
    return max(map(here.use, sizes), key=sum, default=[])


class Together:
    """Gradients that are used in turn, and of those before as many as a window holds.

    Args:
        window_bytes: of the window.
    """

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self._here: deque[int] = deque()

    def use(self, size: int) -> list[int]:
        """Sizes of those that are here when one of this size is used."""
        while sum(self._here) > self.window_bytes:
            self._here.popleft()
        self._here.append(size)
        return list(self._here)
