# SPDX-License-Identifier: Apache-2.0
"""What optimizers with 8-bit state take: bytes of state per parameter, and while they step.

They are declared, not traced. Our own works on addresses, which fake tensors do not have; and on these the
packages' code would fill its own tables of constants with made-up numbers, and keep them.

Our own state, of blocks of 128, is one tensor: n + 1 per block for each moment, and n for parameters in BF16.
With moments in FP32, as optimizer-side techniques have it, it is 4 n for each moment, and 2 n for parameters
in BF16. A step takes nothing beside it.

    n elements of a parameter, in blocks of 256     state                     beside it
    bitsandbytes, from 4096 elements                n + 4 per block, each     two tables of 1 KiB for all
                  below                             4 n, each
    torchao       from 4096, a multiple of 256      n + 4 per block, each     a table of 1 KiB, each
                  otherwise                         as the parameter, each

A step of bitsandbytes on a card works in place. On a CPU it is made of PyTorch's operators on FP32 copies:
both moments, the gradient, and a root and its quotient at the same time. torchao's step is compiled; what the
compiled code holds between finding a block's largest value and using it is one FP32 copy of each moment, and
for kernels of convolutions one more of the weights.
Measured with bitsandbytes 0.50 and torchao 0.18 on the CPU; `tests/python/unit/test_eight_bit.py` measures
again where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from memscale.optim.arrays import form_of
from memscale.optim.eight_bit import package_of
from memscale.optim.kinds import Kind, group_refusal, inner_of, kind_of, parameter_refusal
from memscale.optim.patched import is_held
from memscale.optim.patched_base import base_of, is_patched, moments_of
from memscale.techniques.optimizer.offload_layout import OffloadLayout
from memscale.techniques.optimizer.path import AS_IT_IS, OptimizerPath

_BLOCK: Final = 256
_TABLE_BYTES: Final = 4 * 256
_SMALLEST_IN_8BIT: Final = 4096
_COUNTER_BYTES: Final = 4
_NUMBERS_BYTES: Final = 64
"""The few numbers that a step works with: norms, the learning rate, corrections of the bias."""


def _blocks(elements: int) -> int:
    return -(-elements // _BLOCK)


class Layout(Protocol):
    """What one optimizer takes."""

    @property
    def name(self) -> str:
        """Of its step, in reports."""

    def shared(self) -> list[int]:
        """Sizes of what it keeps once for all parameters, bytes."""

    def state(self, group: int, index: int) -> list[int]:
        """Sizes of the tensors that one parameter's state consists of, bytes.

        Args:
            group: position of the parameter's group.
            index: of the parameter in it.
        """

    def scratch(self, group: int, index: int, on_card: bool) -> list[int]:
        """Sizes of what the step of one parameter has at its peak, beside state and gradient, bytes."""


@dataclass(frozen=True)
class _BitsAndBytes:
    optimizer: Any
    moments: int

    @property
    def name(self) -> str:
        return f"bitsandbytes::{self.optimizer.optimizer_name}"

    def shared(self) -> list[int]:
        in_8bit = any(
            self._is_8bit(group, index)
            for group, settings in enumerate(self.optimizer.param_groups)
            for index in range(len(settings["params"]))
        )
        return [_TABLE_BYTES] * 2 if in_8bit else []

    def state(self, group: int, index: int) -> list[int]:
        elements = self._parameter(group, index).numel()
        norm = [4] if self._config(group, index)["max_unorm"] > 0 else []
        if not self._is_8bit(group, index):
            return [4 * elements] * self.moments + norm
        return [elements, 4 * _blocks(elements)] * self.moments + norm

    def scratch(self, group: int, index: int, on_card: bool) -> list[int]:
        if on_card:
            return []
        parameter = self._parameter(group, index)
        elements = parameter.numel()
        copies = 0 if parameter.dtype is torch.float32 else 1  # of the weights; the gradient's is always made
        has_root = self.optimizer.optimizer_name not in ("momentum", "lars")
        if not self._is_8bit(group, index):
            decayed = self.optimizer.optimizer_name in ("rmsprop", "adagrad")  # a gradient of its own
            return [4 * elements] * (2 + has_root + decayed + copies) + [_NUMBERS_BYTES]
        if has_root:
            return [4 * elements] * (5 + copies) + [_NUMBERS_BYTES]
        return [4 * elements] * (2 + copies) + [elements, 4 * _blocks(elements), _NUMBERS_BYTES]

    def _parameter(self, group: int, index: int) -> Tensor:
        parameter: Tensor = self.optimizer.param_groups[group]["params"][index]
        return parameter

    def _config(self, group: int, index: int) -> dict[str, Any]:
        config: dict[str, Any] = self.optimizer.get_config(group, index, self.optimizer.param_groups[group])
        return config

    def _is_8bit(self, group: int, index: int) -> bool:
        config = self._config(group, index)
        large = self._parameter(group, index).numel() >= config["min_8bit_size"]
        return bool(config["optim_bits"] == 8 and large)


@dataclass(frozen=True)
class _TorchAO:
    optimizer: Any

    name = "torchao::adam8bit"

    def shared(self) -> list[int]:
        return []

    def state(self, group: int, index: int) -> list[int]:
        parameter = self._parameter(group, index)
        elements = parameter.numel()
        moments = self._moments(group)
        if not self._is_8bit(elements):
            return [elements * parameter.element_size()] * moments
        return [elements, 4 * (elements // _BLOCK), _TABLE_BYTES] * moments

    def scratch(self, group: int, index: int, on_card: bool) -> list[int]:
        parameter = self._parameter(group, index)
        elements = parameter.numel()
        if not self._is_8bit(elements):
            return [_NUMBERS_BYTES]
        copy = [elements * parameter.element_size()] if parameter.dim() > 3 else []
        return [4 * elements, 4 * (elements // _BLOCK)] * self._moments(group) + copy + [_NUMBERS_BYTES]

    def _parameter(self, group: int, index: int) -> Tensor:
        parameter: Tensor = self.optimizer.param_groups[group]["params"][index]
        to_local = getattr(parameter, "to_local", None)  # of a distributed tensor, its part here
        return parameter if to_local is None else to_local()

    def _moments(self, group: int) -> int:
        return 3 if self.optimizer.param_groups[group].get("amsgrad") else 2

    @staticmethod
    def _is_8bit(elements: int) -> bool:
        return elements >= _SMALLEST_IN_8BIT and elements % _BLOCK == 0


@dataclass(frozen=True)
class OwnLayout:
    """Our own, which an optimizer has or is going to have.

    Attributes:
        optimizer: whose it is.
        kind: of the optimizer.
        moments: their form.
        as_planned: a parameter as it is in the step.
    """

    optimizer: Any
    kind: Kind
    moments: str
    as_planned: Callable[[Tensor], Tensor]

    @property
    def name(self) -> str:
        """Of its step."""
        return f"memscale::{self.kind.name}"

    def shared(self) -> list[int]:
        """See `Layout`."""
        return []

    def state(self, group: int, index: int) -> list[int]:
        """See `Layout`."""
        parameter, kind = self._parameter(group, index), self.kind
        if self.is_ours(group, index):
            return [form_of(kind, self.moments, parameter).places.total_bytes]
        moments = len(kind.moments) + bool(self.optimizer.param_groups[group].get("amsgrad"))
        return [parameter.numel() * parameter.element_size()] * moments + [_COUNTER_BYTES] * kind.counts

    def scratch(self, group: int, index: int, on_card: bool) -> list[int]:
        """See `Layout`."""
        if self.is_ours(group, index):
            return []
        settings = self.optimizer.param_groups[group]
        parameter = self._parameter(group, index)
        # At most: a root and a quotient, and a gradient of its own that is decayed or negated.
        copies = 2 + bool(settings["weight_decay"] or settings.get("maximize"))
        return [parameter.numel() * parameter.element_size()] * copies + [_NUMBERS_BYTES]

    def _parameter(self, group: int, index: int) -> Tensor:
        return self.as_planned(self.optimizer.param_groups[group]["params"][index])

    def is_ours(self, group: int, index: int) -> bool:
        """Whether a parameter has our state; else PyTorch's."""
        settings = self.optimizer.param_groups[group]
        return not (group_refusal(self.kind, settings) or parameter_refusal(settings["params"][index]))


def layout_of(
    optimizer: torch.optim.Optimizer | None,
    path: OptimizerPath = AS_IT_IS,
    as_planned: Callable[[Tensor], Tensor] = lambda parameter: parameter,
    name_of: Callable[[Tensor], str] = lambda parameter: "",
) -> Layout | None:
    """The layout of an optimizer with our state or of one of the two packages; None for all others.

    Args:
        optimizer: as it is now.
        path: what optimizer-side techniques change; with those of weights and state it has our state.
        as_planned: a parameter as it is in the step, which may be another dtype than at present.
        name_of: the model's name for a parameter.
    """
    if optimizer is not None:
        inner = optimizer = inner_of(optimizer)
        kind = inner._memscale_kind if is_patched(inner) else kind_of(inner)
        has_ours = is_patched(optimizer) and not is_held(optimizer)
        has_ours = isinstance(kind, Kind) and (has_ours or bool(path.half))
        if path.state_chunk_bytes:
            ours = kind if has_ours and isinstance(kind, Kind) else None
            moments = moments_of(optimizer) or "fp32"
            return OffloadLayout(optimizer, base_of(optimizer), ours, moments, path, as_planned, name_of)
        if has_ours and isinstance(kind, Kind):
            return OwnLayout(optimizer, kind, moments_of(optimizer) or "fp32", as_planned)
    package = None if optimizer is None else package_of(optimizer)
    bases = {kind.__name__: kind for kind in type(optimizer).__mro__}
    if package == "bitsandbytes":
        for name, count in (("Optimizer1State", 1), ("Optimizer2State", 2)):
            own = bases.get(name)
            if own is not None and type(optimizer).init_state is own.init_state:  # type: ignore[attr-defined, union-attr]
                return _BitsAndBytes(optimizer, count)
    if package == "torchao" and type(optimizer).__name__ in ("Adam8bit", "AdamW8bit"):
        return _TorchAO(optimizer) if getattr(optimizer, "block_size", 0) == _BLOCK else None
    return None
