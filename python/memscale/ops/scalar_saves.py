# SPDX-License-Identifier: Apache-2.0
"""Numbers that the autograd graph keeps: of `x * 0.5`, a tensor of eight bytes.

PyTorch wraps a Python number that it multiplies or divides by into a tensor without dimensions on the host,
and the node of the operation keeps that for backward. Operators below autograd get the number itself, and
hooks on saved tensors are not told of it, so a trace sees neither its memory nor its end. But it is known
which operations keep one, and a node can be given an object that dies with it:

    x * 0.5      operation ends     next operation                        its node has run, or died
    recorder     wrapped: buffer    settle: the result's node is known    gone: the buffer ends

As no hook sees it, no technique moves or drops it: a checkpointed module's numbers stay, and its recompute
makes them again. That is what the graph's rules say of a buffer without a save.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

_KEEPERS: Final = frozenset(
    ("mul.Tensor", "mul_.Tensor", "div.Tensor", "div_.Tensor", "div.Tensor_mode", "div_.Tensor_mode")
)
"""Operators whose node keeps the other operand as a tensor. Others keep a number as such, or need none."""

_WRAPPERS: Final = frozenset(
    (
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "floor_divide",
        "remainder",
        "fmod",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    )
)
"""Operators that work on a number as on a tensor."""

_next_node_number: Final = torch._C._autograd._get_sequence_nr

_PLACE: Final = "memscale: wrapped number"


class _Mark:
    """Lies in a node, and tells when it is gone."""

    __slots__ = ("gone", "node")

    def __init__(self, node: int, gone: Callable[[int], None]) -> None:
        self.node = node
        self.gone = gone

    def __del__(self) -> None:
        self.gone(self.node)


def _operands(args: Sequence[Any]) -> tuple[Tensor, Any] | None:
    """The tensor and the number of an operation on two operands that are such."""
    if len(args) < 2 or isinstance(args[0], Tensor) == isinstance(args[1], Tensor):
        return None
    tensor, number = args[:2] if isinstance(args[0], Tensor) else (args[1], args[0])
    return tensor, number


def _dtype_of(number: Any) -> torch.dtype:
    """That of the tensor which a number becomes."""
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, complex):
        return torch.complex128
    return torch.int64 if isinstance(number, int) else torch.float64


def kept_bytes(name: str, args: Sequence[Any]) -> int:
    """Size of the number that the node of an operation keeps; 0 without one.

    Args:
        name: of the operator and its overload, such as "mul.Tensor".
        args: positional arguments, as a dispatch mode below autograd gets them.
    """
    if name not in _KEEPERS or not torch.is_grad_enabled():
        return 0
    found = _operands(args)
    return 0 if found is None or not found[0].requires_grad else _dtype_of(found[1]).itemsize


def scratch_bytes(name: str, args: Sequence[Any]) -> int:
    """What an operation takes for a number while it runs: the tensor, if it is not kept, and its cast.

    Args:
        name: as for `kept_bytes`.
        args: as for `kept_bytes`.
    """
    if name.split(".")[0].removesuffix("_") not in _WRAPPERS:
        return 0
    found = _operands(args)
    if found is None or found[0].dim() == 0:  # with a tensor of one number the two may change roles
        return 0
    tensor, number = found
    own = _dtype_of(number)
    common = tensor.dtype
    if own.is_complex and not common.is_complex:
        common = torch.promote_types(common, torch.complex64)
    elif own.is_floating_point and not (common.is_floating_point or common.is_complex):
        common = torch.get_default_dtype()
    elif common is torch.bool:
        common = own
    return (0 if kept_bytes(name, args) else own.itemsize) + (0 if own == common else common.itemsize)


class WrappedNumbers:
    """Lives of the numbers that nodes keep.

    Args:
        end: called with the buffer of each number whose life is over.
    """

    def __init__(self, end: Callable[[int], None]) -> None:
        self._end = end
        # The node is not known yet: result, least number that it can have, buffer.
        self._fresh: list[tuple[weakref.ref[Tensor], int, int]] = []
        self._buffers: dict[int, int] = {}  # number of a node → buffer

    def wrapped(self, result: Tensor, buffer: int) -> None:
        """The operation that just ran keeps a number.

        Args:
            result: what it returned; autograd gives it its node afterwards.
            buffer: stands for the number.
        """
        self._fresh.append((weakref.ref(result), _next_node_number() - 1, buffer))

    def settle(self) -> None:
        """Before whatever else may use a result: what nobody has used and nobody holds has no node."""
        fresh, self._fresh = self._fresh, []
        for reference, least, buffer in fresh:
            result = reference()
            if result is None:
                self._end(buffer)
                continue
            # Of what was changed through a view, the base has the node that runs.
            node = (result if result._base is None else result._base).grad_fn
            if node is None or node._sequence_nr() < least:  # autograd is still asking for a device, say
                self._fresh.append((reference, least, buffer))
                continue
            number = node._sequence_nr()
            self._buffers[number] = buffer
            node.metadata[_PLACE] = _Mark(number, self.gone)  # type: ignore[index]  # it is a property

    def gone(self, node: int) -> None:
        """A node has run, or died: it keeps nothing more."""
        buffer = self._buffers.pop(node, None)
        if buffer is not None:
            self._end(buffer)
