# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers of a card in a trace on fakes: what cuDNN's operators return and keep.

PyTorch's `lstm`, `gru`, `rnn_tanh` and `rnn_relu` look into the weights' memory, and keep the state of their
dropout for the process, before they reach the operator that works. On fakes the first fails, and the second
would leave a fake behind. So `Layers` calls that operator itself, with what it would get on a card:

    weights      lie in one block, as `flatten_parameters` leaves them: nothing is made
    autocast     weights are copied into one block of halves, in every call
    dropout      its state is made once in a process, and is none of the step's

The reserve, which backward needs, is bytes whose number only cuDNN knows; `reserve_bytes` has what was
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

_functions: Any = torch._C._VariableFunctions
_MODES: Final[dict[Any, int]] = {
    _functions.rnn_relu: 0,
    _functions.rnn_tanh: 1,
    _functions.lstm: 2,
    _functions.gru: 3,
}
"""cuDNN's numbers."""

_LSTM: Final = 2
_KEPT: Final = (2, 2, 5, 6)
"""How many outputs' worth a layer keeps, and each but the last its output."""

_RESERVE_HEAD: Final = 512


def reserve_bytes(mode: int, output: Tensor, layers: int) -> int:
    """Bytes that a layer keeps for its backward; for LSTM and GRU, measured with cuDNN 9.19 on an H100.

    Args:
        mode: cuDNN's number of the kind.
        output: of the last layer.
        layers: how many.
    """
    return (layers * (_KEPT[mode] + 1) - 1) * output.numel() * output.element_size() + _RESERVE_HEAD


# ---- the operators -----------------------------------------------------------------------------------


def forward(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`aten::_cudnn_rnn` on fakes: PyTorch's fake kernel, with a reserve.

    Weights in BF16 never lie in one block, so each call makes one of them, which backward needs.
    """
    source, weights = args[0], args[1]
    given = list(args)
    if given[3] is None:
        count = sum(weight.numel() for weight in weights) if source.dtype is torch.bfloat16 else 0
        given[3] = source.new_empty(count)
    output, hidden, cell, reserve, block = func(*given, **kwargs)
    if args[12]:
        size = reserve_bytes(args[6], output, args[9])
        reserve = torch.empty(size, dtype=torch.uint8, device=output.device)
    return output, hidden, cell, reserve, block


def backward(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`aten::_cudnn_rnn_backward` on fakes: the weights' gradients are parts of one block."""
    source, weights, hidden, cell, is_batch_first, wanted = (args[at] for at in (0, 1, 4, 5, 14, 21))
    made = source.new_empty((source.transpose(0, 1) if is_batch_first else source).shape)
    of_source = made.transpose(0, 1) if is_batch_first else made
    of_cell = None if cell is None else torch.empty_like(cell)
    of_weights = _in_one_block(weights, source.dtype) if wanted[3] else []
    return of_source if wanted[0] else None, torch.empty_like(hidden), of_cell, of_weights


def _in_one_block(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of these shapes, one after another in one block."""
    block = torch.empty(sum(weight.numel() for weight in weights), dtype=dtype, device=weights[0].device)
    parts, at = [], 0
    for weight in weights:
        parts.append(block[at : at + weight.numel()].view(weight.shape))
        at += weight.numel()
    return parts


MADE: Final[dict[str, Callable[[Any, Sequence[Any], dict[str, Any]], Any]]] = {
    "aten::_cudnn_rnn": forward,
    "aten::_cudnn_rnn_backward": backward,
}


# ---- the functions -----------------------------------------------------------------------------------


def layers_of(model: nn.Module) -> AbstractContextManager[Any]:
    """`Layers` for the trace of a model that has such layers."""
    has_some = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return Layers() if has_some else nullcontext()


class Layers(TorchFunctionMode):
    """Runs recurrent layers on fakes of a card through `aten::_cudnn_rnn`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = _MODES.get(func) if getattr(func, "__name__", "") in _NAMES else None
        if (
            mode is None
            or not isinstance(args[0], FakeTensor)
            or not torch.backends.cudnn.is_acceptable(args[0])
        ):
            return func(*args, **(kwargs or {}))
        return _layer(mode, *args)


_NAMES: Final = frozenset(("rnn_relu", "rnn_tanh", "lstm", "gru"))


def _layer(mode: int, source: Tensor, *rest: Any) -> Any:
    """What such a function does, in both of its forms: padded, or packed with the batch sizes second."""
    is_packed = isinstance(rest[0], Tensor) and isinstance(rest[2], (list, tuple))
    sizes: list[int] = []
    if is_packed:
        with _disable_current_modes():
            sizes, rest = rest[0].tolist(), (*rest[1:], False)
    state, weights, has_biases, layers, dropout, training, both, is_batch_first = rest
    hidden, cell = state if mode == _LSTM else (state, None)
    if torch.is_autocast_enabled():
        source, hidden, cell, weights = _halves(source, hidden, cell, weights)
    # A part of a layer's state may be a projection of the hidden size.
    size = hidden.shape[2] if cell is None else cell.shape[2]
    projected = 0 if cell is None or hidden.shape[2] == size else hidden.shape[2]
    per_layer = 2 + 2 * bool(has_biases) + bool(projected)
    with torch.autocast("cuda", enabled=False):
        made = torch.ops.aten._cudnn_rnn(
            source, list(weights), per_layer, None, hidden, cell, mode, size, projected, layers,
            is_batch_first, float(dropout), training, both, sizes, None,
        )  # fmt: skip
    return made[:3] if mode == _LSTM else made[:2]


def _halves(
    source: Tensor, hidden: Tensor, cell: Tensor | None, weights: Sequence[Tensor]
) -> tuple[Any, ...]:
    """Operands under autocast: in half precision, whichever kind autocast has; weights in one block."""
    half = torch.float16
    if weights[0].dtype is half:
        copies = list(weights)
    else:
        copies = [
            part.copy_(weight) for part, weight in zip(_in_one_block(weights, half), weights, strict=True)
        ]
    return source.to(half), hidden.to(half), None if cell is None else cell.to(half), copies
