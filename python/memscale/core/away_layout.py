# SPDX-License-Identifier: Apache-2.0
"""What an optimizer takes whose state is away between steps (`optim/away.py`), as a trace is told.

    between steps    the state of small parameters, and step counters
    in the step      the piece that is computed, that before it and that behind it; what the optimizer's
                     operations take for themselves on one
    on the link      all of the state, back and out again

A bound, which fast copies may not reach. In the first step a piece is there twice, as PyTorch makes it and
as it leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memscale.core.optimizer_path import OptimizerPath
from memscale.optim.alone import CUTTABLE, can_cut
from memscale.optim.arrays import form_of, places
from memscale.optim.kinds import Kind, group_refusal, parameter_refusal
from memscale.optim.pieces import LEAST_BYTES, PIECE_ELEMENTS, bounds_of, is_dense

_COUNTER_BYTES = 4
_NUMBERS_BYTES = 64


class _Told(NamedTuple):
    tensor: Tensor
    is_ours: bool


@dataclass(frozen=True)
class AwayLayout:
    """The layout, as in `eight_bit_layout.Layout`.

    Attributes:
        optimizer: whose it is.
        base: its class when it is not taken over.
        kind: of our state, where it has that; None: PyTorch's.
        moments: their form.
        path: what the step is told.
        as_told: a parameter as it is in the step.
    """

    optimizer: Any
    base: type[torch.optim.Optimizer]
    kind: Kind | None
    moments: str
    path: OptimizerPath
    as_told: Callable[[Tensor], Tensor]

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
        counter = [] if parameter.is_ours or self.base is torch.optim.SGD else [_COUNTER_BYTES]
        return counter if self._leaves(group, parameter) else [self._bytes(group, parameter), *counter]

    def scratch(self, group: int, index: int, on_card: bool) -> list[int]:
        """What the step takes."""
        parameter = self._parameter(group, index)
        settings = self.optimizer.param_groups[group]
        size = parameter.tensor.nbytes
        if not self._leaves(group, parameter):
            return [] if parameter.is_ours else [size] * self._temporaries(settings)
        # Of gradients that are cut, too, `ReleasedGradients` tells.
        released = self.path.gradient_window_bytes > 0 and not self._is_cut(group, parameter)
        return [self._around(group, index), *[size] * released, _NUMBERS_BYTES]

    def _part(self, group: int, parameter: _Told) -> int:
        """Elements of a parameter that are stepped at once."""
        elements = parameter.tensor.numel()
        return min(elements, PIECE_ELEMENTS) if self._is_cut(group, parameter) else elements

    def _around(self, group: int, index: int) -> int:
        """Bytes of a piece of a parameter, its neighbours, and what its step takes, where they are most."""
        pieces, mine = self._pieces[group]
        before, after = [(0, 0), *pieces], [*pieces[1:], (0, 0)]
        return max(
            before[i][0] + pieces[i][0] + max(after[i][0] + pieces[i][1], pieces[i][0]) for i in mine[index]
        )

    @functools.cached_property
    def _pieces(self) -> list[tuple[list[tuple[int, int]], dict[int, range]]]:
        """For each group the bytes of all pieces and of what their steps take; and which are whose."""
        found = []
        for group, settings in enumerate(self.optimizer.param_groups):
            sizes: list[tuple[int, int]] = []
            mine: dict[int, range] = {}
            for index, real in enumerate(settings["params"]):
                parameter = self._parameter(group, index)
                first = len(sizes)
                if real.requires_grad and self._leaves(group, parameter):
                    part, elements = self._part(group, parameter), parameter.tensor.numel()
                    copies = 0 if parameter.is_ours else self._temporaries(settings)
                    copies *= parameter.tensor.element_size()
                    counts = [behind - begin for begin, behind in bounds_of(elements, part)]
                    sizes += [(self._bytes(group, parameter, count), copies * count) for count in counts]
                mine[index] = range(first, len(sizes))
            found.append((sizes, mine))
        return found

    def moved(self, group: int, index: int) -> tuple[int, int]:
        """Bytes that the step moves in memory; and in the time that the link takes."""
        parameter = self._parameter(group, index)
        state = self._bytes(group, parameter)
        out, back = self.path.link_moves
        on_link = state * (out + back) // 1024 if self._leaves(group, parameter) else 0
        return 3 * parameter.tensor.nbytes + 2 * state, on_link

    def _parameter(self, group: int, index: int) -> _Told:
        """A parameter as it is in the step, and whether it has our state."""
        settings = self.optimizer.param_groups[group]
        real: Tensor = settings["params"][index]
        ours = self.kind is not None and not (group_refusal(self.kind, settings) or parameter_refusal(real))
        return _Told(self.as_told(real), ours)

    def _bytes(self, group: int, parameter: _Told, count: int | None = None) -> int:
        """Bytes of the state of so many elements; None: of all."""
        count = parameter.tensor.numel() if count is None else count
        if parameter.is_ours and self.kind is not None:
            form = form_of(self.kind, self.moments, parameter.tensor)
            return places(form.kind, form.weights, form.moments, count).total_bytes
        settings, size = self.optimizer.param_groups[group], count * parameter.tensor.element_size()
        if issubclass(self.base, torch.optim.SGD):
            return size * bool(settings["momentum"])
        return size * (3 if settings.get("amsgrad") else 2)

    def _leaves(self, group: int, parameter: _Told) -> bool:
        settings = self.optimizer.param_groups[group]
        return (
            parameter.tensor.nbytes >= LEAST_BYTES
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
            and can_cut(self.base, settings, parameter.tensor)
            and is_dense(parameter.tensor)
        )

    def _temporaries(self, settings: dict[str, Any]) -> int:
        """Tensors as large as a part that PyTorch's operations hold at once."""
        if settings.get("fused"):
            return 0
        own_gradient = bool(settings.get("maximize"))
        decoupled = settings.get("decoupled_weight_decay", self.base is torch.optim.AdamW)
        own_gradient |= bool(settings["weight_decay"]) and not decoupled
        if self.base is torch.optim.SGD:
            return own_gradient + bool(settings.get("nesterov"))
        return own_gradient + (1 if settings.get("foreach") else 2)


def can_tell(base: type[torch.optim.Optimizer]) -> bool:
    """Whether what PyTorch's state of a class takes is known here."""
    return base in CUTTABLE
