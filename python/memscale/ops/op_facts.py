# SPDX-License-Identifier: Apache-2.0
"""Facts about an operator: name, costs, and where its fake kernel or its schema is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memscale.cuda import recurrent
from memscale.cuda.scratch import folded_view, mended
from memscale.ops import fake_results, scalar_saves
from memscale.ops.scratch import RULES, Scratch, nbytes, scratch_bytes
from memscale.ops.scratch_probe import Measure, measure_of, measured_scratch
from memscale.ops.work import FLOPS, refinement, static_class
from memscale.torchkit.leaves import coordinate_bytes, is_sparse, tensors_of

_UNDECLARED_WRITES = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
}
"""Arguments that an operator changes although its schema does not say so: running mean and variance."""

_UNREPEATABLE: Final = frozenset(
    {
        *("index_add", "index_add_", "index_reduce", "index_reduce_", "scatter_add", "scatter_add_"),
        *("scatter_reduce", "scatter_reduce_", "cumsum", "cumsum_", "bincount", "histc"),
    }
)
"""Operators of a forward that a card's threads may add up in another order each time, by PyTorch's note on
`torch.use_deterministic_algorithms`. With whole numbers no order shows."""


class OpFacts:
    """What does not depend on the arguments: one per operator overload, looked up once.

    Attributes:
        random: it may draw random numbers; `draws` says of one call whether it does.
        work: its class, where the arguments do not decide; `work_of` says it of one call.
    """

    __slots__ = (
        "_quiet",
        "_refine",
        "flops",
        "foreign",
        "is_view",
        "measure",
        "name",
        "pointwise",
        "random",
        "schema",
        "scratch",
        "unrepeatable",
        "work",
        "writes",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.schema: str = schema.name
        self.name: str = schema.name.split("::")[-1] + (
            "" if not schema.overload_name else f".{schema.overload_name}"
        )
        tags = getattr(func, "tags", ())
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.unrepeatable = self.name.split(".")[0] in _UNREPEATABLE
        self._quiet = _quiet_arguments(schema) if self.random else ()
        self.work = static_class(schema.name, tags)
        self._refine = refinement(schema.name)
        self.pointwise = torch.Tag.pointwise in tags
        self.scratch: Scratch | None = RULES.get(schema.name)
        self.measure: Measure | None = measure_of(func)
        self.flops = _flop_formula(func)
        self.writes = [
            index
            for index, arg in enumerate(schema.arguments)
            if arg.alias_info is not None and arg.alias_info.is_write
        ]
        self.writes += _UNDECLARED_WRITES.get(schema.name, ())
        self.foreign = not schema.name.startswith(("aten::", "prims::", "prim::"))
        returns = schema.returns
        self.is_view = (
            bool(returns) and not self.writes and all(item.alias_info is not None for item in returns)
        )

    def draws(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call draws random numbers: with dropout at 0, or switched off, it does not."""
        if not self.random:
            return False
        return not any(
            (args[index] if index < len(args) else kwargs.get(name, default)) in (0, False)
            for index, name, default in self._quiet
        )

    def work_of(self, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> int:
        """Class of work of a call."""
        if self._refine is None:
            return self.work
        refine, index = self._refine
        return refine(args, kwargs, outputs, index)


_SWITCHES = frozenset(("dropout_p", "dropout", "train", "training"))
"""Arguments that, when 0 or False, keep an operator from drawing random numbers.

Not among them: the probability of `native_dropout`. At 0 it advances the generator all the same, on the CPU
and, by the source of Dropout.cu, on a card. Attention asks a card's generator only where its `dropout_p` is
above 0.
"""


def _quiet_arguments(schema: Any) -> tuple[tuple[int, str, Any], ...]:
    """(index, name, default) of the arguments of a schema that may keep it from drawing random numbers."""
    found = enumerate(schema.arguments)
    return tuple((index, arg.name, arg.default_value) for index, arg in found if arg.name in _SWITCHES)


@cache
def facts(func: Any) -> OpFacts:
    """Facts of an operator overload."""
    return OpFacts(func)


_AS_IT_LIES: Final = frozenset({"add_.Tensor", "clone"})
"""Operators that take a sparse tensor in whatever order its elements lie."""


def scratch(
    func: Any,
    info: OpFacts,
    call: tuple[Sequence[Any], dict[str, Any]],
    outputs: Sequence[Tensor],
    fresh_bytes: int,
) -> int:
    """What an operation's CPU kernel allocates and frees inside, bytes: measured where quick, else a bound.

    Args:
        func: the operator overload.
        info: its facts.
        call: positional and keyword arguments.
        outputs: the tensors that it returned, in order.
        fresh_bytes: storages among them that the operation made.
    """
    sparse = [value for value in call[0] if isinstance(value, Tensor) and is_sparse(value)]
    if sparse and info.name in _AS_IT_LIES:
        return 0
    if sparse:
        return fresh_bytes + sum(map(_converted_bytes, sparse))
    if info.measure is not None:
        measured = measured_scratch(info.measure, func, *call, fresh_bytes)
        if measured is not None:
            return measured
    inside = scratch_bytes(info.name, info.scratch, info.pointwise, call[0], outputs)
    return inside + scalar_saves.scratch_bytes(info.name, call[0])


def _converted_bytes(sparse: Tensor) -> int:
    """What a product with a sparse matrix takes beside a second result: it is sorted, or converted for that.

    Measured with 1,000 to 4,000 rows of 4 to 32 elements, transposed and not: at most 1.2 and 2.73 times the
    bytes of its coordinates.
    """
    quarters = 5 if sparse.layout is torch.sparse_coo else 11
    return quarters * coordinate_bytes([sparse]) // 4


def arguments_at(func: Any, places: Iterable[int], args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors among the arguments at some places of an operation's schema."""
    values = [
        args[index] if index < len(args) else kwargs.get(func._schema.arguments[index].name)
        for index in places
    ]
    return tensors_of(values)


def run(func: Any, info: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], on_cpu: bool = True) -> Any:
    """Runs an operation, and mends fake results that differ from what the real kernel returns."""
    if is_fused_step(func, args):
        return None
    made = _MADE.get(info.schema)
    if made is not None and isinstance(args[0], FakeTensor):
        result = made(func, args, kwargs)
    else:
        result = fake_results.run(func, args, kwargs)
    if not on_cpu:
        return mended(info.schema, args, result)
    mend = MENDS.get(info.name)
    return result if mend is None else mend(args, result)


def is_fused_step(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call is an optimizer's fused step on fakes, which is not to be run.

    It writes to lists and returns nothing. Few of these operators have a kernel for fakes (none for SGD, none
    with `lr` as a tensor, none for AdamW before PyTorch 2.6). Without one, PyTorch makes real tensors of all
    sizes and steps them.
    """
    schema = func._schema
    if schema.returns or not schema.name.startswith("aten::_fused_"):
        return False
    return any(isinstance(tensor, FakeTensor) for tensor in args[0])


def _grouped_product(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The products of a mixture of experts: their fake kernel takes BF16 alone, the real ones take more."""
    dtype = args[0].dtype
    if dtype is torch.bfloat16:
        return func(*args, **kwargs)
    low = [
        arg.to(torch.bfloat16) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args
    ]
    result = func(*low, **{**kwargs, "out_dtype": None})
    return torch.empty_like(result, dtype=kwargs.get("out_dtype") or dtype)


def _ctc_loss(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A loss per sample, and what backward needs, by the longest target, which no fake knows."""
    scores, targets, lengths = args[0], args[1], args[3]
    if isinstance(lengths, FakeTensor):
        longest = targets.shape[-1]
    else:
        with _disable_current_modes():
            longest = max(torch.as_tensor(lengths).flatten().tolist(), default=0)
    steps, batch = scores.shape[0], scores.shape[1] if scores.dim() == 3 else 1
    return scores.new_empty(batch), scores.new_empty(batch, steps, 2 * longest + 1)


def _ctc_gradient(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of the scores, contiguous whatever they are."""
    return torch.empty_like(args[1], memory_format=torch.contiguous_format)


_MADE: dict[str, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    **recurrent.MADE,
    "aten::_grouped_mm": _grouped_product,
    "aten::_ctc_loss": _ctc_loss,
    "aten::_ctc_loss_backward": _ctc_gradient,
}
"""Operators that fakes refuse, or have no kernel for."""


def _lstm_workspace(args: Sequence[Any], result: Any) -> Any:
    """The fake layer returns an empty workspace, which is right without gradients."""
    if result[3] is None or result[3].numel() > 0 or not torch.is_grad_enabled():
        return result
    source, hidden, biased = args[0], int(args[10]), bool(args[12])
    size = rnn_workspace_bytes(tuple(map(int, source.shape)), hidden, biased, source.dtype, bool(args[7]))
    return (*result[:3], torch.empty(size, dtype=torch.uint8, device=source.device))


def _full_statistics(args: Sequence[Any], result: Any) -> Any:
    """Saved mean and deviation have the weight's dtype, the fake ones the input's."""
    weight = next((arg for arg in args[1:4] if isinstance(arg, Tensor)), None)
    if weight is None or weight.dtype == result[1].dtype or result[1].numel() == 0:
        return result
    return (result[0], *(torch.empty_like(part, dtype=weight.dtype) for part in result[1:3]))


def _normalised_rows(args: Sequence[Any], result: Any) -> Any:
    """What is normalised is contiguous."""
    made, *statistics = _full_statistics(args, result)
    return (_laid_out(made, torch.contiguous_format), *statistics)


def _own_dtype(args: Sequence[Any], result: Any) -> Any:
    """The input's gradient has the input's dtype, the fake one the weight's where that is wider."""
    source, made = args[1], result[0]
    return (
        result
        if made is None or made.dtype == source.dtype
        else (torch.empty_like(made, dtype=source.dtype), *result[1:])
    )


def _row_major(args: Sequence[Any], result: Any) -> Any:
    """The input's gradient is contiguous, the fake one lies as the output's gradient does."""
    made = result[0]
    return result if made is None or made.is_contiguous() else (made.contiguous(), *result[1:])


def _laid_out(made: Tensor, format: torch.memory_format) -> Tensor:
    """With the strides of a memory format, those of dimensions of one element included."""
    like = torch.empty(made.shape, dtype=made.dtype, device=made.device, memory_format=format)
    return made if made.stride() == like.stride() else like


def _normalised(args: Sequence[Any], result: Any) -> Any:
    """What is normalised is contiguous or channels_last; where the input is both, it is the former."""
    made, *statistics = _full_statistics(args, result)
    format = torch.contiguous_format if args[0].is_contiguous() else suggest_memory_format(args[0])
    return (_laid_out(made, format), *statistics)


def _as_normalised(args: Sequence[Any], result: Any) -> Any:
    """The input's gradient is contiguous or channels_last; where the input is both, it is the latter."""
    made = result[0]
    return result if made is None else (_laid_out(made, suggest_memory_format(args[1])), *result[1:])


def _all_row_major(args: Sequence[Any], result: Any) -> Any:
    """Every result is contiguous, the fake ones lie as the input does."""
    if isinstance(result, Tensor):
        return _laid_out(result, torch.contiguous_format)
    return tuple(_laid_out(made, torch.contiguous_format) for made in result)


def _as_images(args: Sequence[Any], result: Any) -> Any:
    """The result is contiguous or channels_last, as the first operand counts; the fake one is contiguous."""
    return _laid_out(result, suggest_memory_format(args[0])) if args[0].dim() == 4 else result


def _as_padded(args: Sequence[Any], result: Any) -> Any:
    """The padded input's gradient is contiguous or channels_last, as the input counts."""
    return _laid_out(result, suggest_memory_format(args[1])) if args[1].dim() == 4 else result


def _as_gradient(args: Sequence[Any], result: Any) -> Any:
    """The input's gradient lies as the output's gradient does, the fake one as the input."""
    gradient = args[0]
    if result.stride() == gradient.stride() or result.shape != gradient.shape:
        return result
    return torch.empty_like(gradient, dtype=result.dtype)


def _whole_loss(args: Sequence[Any], result: Any) -> Any:
    """The kernel writes every element into the loss's storage and then shrinks its shape, not its storage."""
    reduction = next((arg for arg in args[2:] if isinstance(arg, int)), 1)
    if reduction == 0 or result.dim() > 0 or args[0].numel() == 0:
        return result
    return torch.empty(args[0].numel(), dtype=result.dtype, device=result.device)[0]


MENDS: dict[str, Callable[[Sequence[Any], Any], Any]] = {
    "mkldnn_rnn_layer": _lstm_workspace,
    "native_layer_norm": _normalised_rows,
    "replication_pad2d": _as_images,
    "replication_pad2d_backward": _as_padded,
    "reflection_pad2d_backward": _as_padded,
    "upsample_nearest2d": _as_images,
    "upsample_bilinear2d": _as_images,
    "upsample_bicubic2d": _as_images,
    "native_layer_norm_backward": _row_major,
    "native_batch_norm": _normalised,
    "native_batch_norm_backward": _as_normalised,
    "native_group_norm": _full_statistics,
    "native_group_norm_backward": _own_dtype,
    "mse_loss": _whole_loss,
    "smooth_l1_loss": _whole_loss,
    "binary_cross_entropy": _whole_loss,
    "col2im": folded_view,
    "_log_softmax": _all_row_major,
    "log_sigmoid_forward": _all_row_major,
    "rrelu_with_noise": _all_row_major,
    "glu_backward": _all_row_major,
    "mse_loss_backward": _all_row_major,
    "smooth_l1_loss_backward": _all_row_major,
    "huber_loss_backward": _all_row_major,
    "elu_backward": _as_gradient,
    "softplus_backward": _as_gradient,
    "hardtanh_backward": _as_gradient,
    "hardswish_backward": _as_gradient,
    "hardsigmoid_backward": _as_gradient,
}
"""Operators whose fake result has another size or layout than the CPU kernel's.

A layout counts where later operations copy what is not contiguous.
"""


def _flop_formula(func: Any) -> Callable[..., int] | None:
    from torch.utils.flop_counter import flop_registry

    formula: Callable[..., int] | None = flop_registry.get(getattr(func, "overloadpacket", None))
    return FLOPS.get(func._schema.name, formula)


def flops(info: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations by the formulas of PyTorch's own counter and ours; 0 where there is none."""
    if info.flops is None:
        return 0
    try:
        return int(info.flops(*args, **kwargs, out_val=result))
    except Exception:  # a formula that does not know this call form must not end a trace
        return 0


@lru_cache(maxsize=256)
def rnn_workspace_bytes(
    shape: tuple[int, ...], hidden: int, bias: bool, dtype: torch.dtype, bidirectional_layer: bool
) -> int:
    """Bytes of the workspace that oneDNN's LSTM layer returns in training.

    Its size depends on the processor, and the fake kernel reports none. So the layer is run once, for real,
    on zeros of the given shape.

    Args:
        shape: (time, batch, features) of the input.
        hidden: hidden size.
        bias: whether the layer has biases.
        dtype: of input and weights.
        bidirectional_layer: whether this is the backward direction of a bidirectional layer.
    """
    with _disable_current_modes(), torch.enable_grad():  # without grad mode the layer makes no workspace
        steps, batch, width = shape
        source = torch.zeros(steps, batch, width, dtype=dtype)
        state = torch.zeros(batch, hidden, dtype=dtype)
        weights = [torch.zeros(4 * hidden, width, dtype=dtype), torch.zeros(4 * hidden, hidden, dtype=dtype)]
        biases = [torch.zeros(4 * hidden, dtype=dtype)] * 2
        result = torch.ops.aten.mkldnn_rnn_layer(
            source,
            *weights,
            *biases,
            state,
            state,
            bidirectional_layer,
            [],
            2,
            hidden,
            1,
            bias,
            False,
            False,
            True,
        )
    return nbytes(result[3])
