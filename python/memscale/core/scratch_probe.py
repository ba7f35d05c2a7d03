# SPDX-License-Identifier: Apache-2.0
"""Measures what a CPU kernel allocates, by running it once on zeros.

How oneDNN lays out the operands of a convolution, or blocks a low-precision product, depends on shapes,
processor and version, and no formula follows it closely. But a kernel allocates the same for the same
signature, whatever the numbers are. So the first time that a trace meets a signature, the operator itself
runs on zeros of that shape, and PyTorch's operator-level profiler tells each allocation and release in order:

    live bytes           ┌─┐ scratch
                      ┌──┘ └──┐                  peak: what the graph has to hold while the operation runs,
    ──────────────────┘output └────              outputs included

The run happens on a thread of its own. A fresh thread has no dispatch mode, no autocast, no saved-tensor hook
and no profiler of the caller's, and what happens there is invisible to all of these. Nothing random is drawn,
so no generator moves.

An operator that would compute for long is run on a part instead. What a kernel makes of a batched operand is
linear in the batch from some size on, so a convolution runs on two smaller batches and the line through both
points is followed. The blocks of a matrix product stop growing with rows and columns early, so a large
product runs with fewer of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_OPERAND_BYTES = 256 << 20
"""The most that operands and outputs of one run may take. The step itself will take as much."""

_FLOPS = 2_000_000_000
"""The most that one run of a convolution may compute: some ten milliseconds."""

_IMAGE_FLOPS = 6_000_000_000
"""The same for the largest part of one image."""

_MOST_FLOPS = 12_000_000_000
"""The same for a whole image, where nothing less will do."""

_PARTS_MARGIN = 1.06
"""For backward, whose threads share a long side in other parts than a short one: measured up to 1.054."""

_OFF_LINE = 0.01
"""How far three parts of an image may be off a line, as a share of the peak."""

_PRODUCT_FLOPS = 4_000_000_000
"""The same for recurrent layers, and for low-precision products where the processor has them."""

_SLOW_FLOPS = 100_000_000
"""The same where it has none."""

_LIGHT_BYTES = 16 << 20
"""The most that operands and outputs of an operator may take that is only measured when it is quick."""

_SHRUNK_MARGIN_BYTES = 512 * 1024
"""Added per thread to what a product with fewer rows and columns took."""

_KNOWN_LIMIT = 4096
"""Signatures remembered by a process; beyond that, all are forgotten."""

_LEAST_BATCH = 4
"""Matrices that are left of a batched product; fewer may go to the threads in another way."""

_HALF = (torch.bfloat16, torch.float16)
_known: dict[Any, int | None] = {}


class Shape(NamedTuple):
    """Stands for a tensor argument: all of it that decides what a kernel allocates.

    Attributes:
        size: elements per dimension.
        stride: elements.
        dtype: of the elements.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def reach(self) -> int:
        """Elements of the smallest storage that holds the tensor."""
        if 0 in self.size:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.size, self.stride, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of that storage."""
        return self.reach * self.dtype.itemsize

    def zeros(self) -> Tensor:
        """A real tensor of zeros."""
        return torch.zeros(self.reach, dtype=self.dtype).as_strided(self.size, self.stride)

    def cut(self, dimension: int, size: int) -> Shape:
        """The same with fewer elements along a dimension, and no gaps where there were none."""
        step = self.stride[dimension]
        extent = step * self.size[dimension]
        stride = tuple(
            other // extent * step * size if extent and other >= extent and other % extent == 0 else other
            for other in self.stride
        )
        return self._replace(size=(*self.size[:dimension], size, *self.size[dimension + 1 :]), stride=stride)


class Call(NamedTuple):
    """An operation, described.

    Attributes:
        func: the operator overload.
        args: positional arguments; shapes stand for tensors.
        kwargs: keyword arguments, by name.
        outputs: bytes of the storages that the graph counts as made by it.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: int

    @property
    def room(self) -> int:
        """Bytes that a run needs, beside the scratch."""
        return sum(value.bytes for value in self.args if isinstance(value, Shape)) + self.outputs

    def cut(self, places: Sequence[tuple[int, int]], size: int) -> Call:
        """The same with `size` elements along a dimension of some arguments.

        Args:
            places: (position of the argument, dimension) pairs.
            size: new number of elements there.
        """
        args = list(self.args)
        for index, dimension in places:
            args[index] = args[index].cut(dimension, size)
        return self._replace(args=tuple(args))


def describe(func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: int) -> Call:
    """A call as the measurement reads it; tensors may be fake."""
    shaped = tree_map_only(Tensor, _shape_of, (tuple(args), tuple(sorted(kwargs.items()))))
    return Call(func, _frozen(shaped[0]), _frozen(shaped[1]), outputs)


def _shape_of(tensor: Tensor) -> Shape:
    return Shape(tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype)


def _frozen(value: Any) -> Any:
    """The value with tuples for lists, so that it can be a key."""
    if isinstance(value, Shape) or not isinstance(value, (list, tuple)):
        return value
    return tuple(map(_frozen, value))


# ---- one run ---------------------------------------------------------------------------------------------


def _peak_of(run: Callable[[], object]) -> int:
    """Highest number of bytes that `run` has allocated at once, on this thread."""
    profiler: Any = torch._C._profiler
    autograd: Any = torch._C._autograd
    experimental = profiler._ExperimentalConfig()
    autograd._enable_profiler_legacy(
        profiler.ProfilerConfig(profiler.ProfilerState.CPU, False, True, False, False, False, experimental)
    )
    result = None
    try:
        result = run()  # held until the record ends: its release is not part of the operator
    finally:
        threads = autograd._disable_profiler_legacy()
    del result
    live = peak = 0
    for events in threads:
        for event in events:
            if event.kind() == "memory_alloc":
                live += event.cpu_memory_usage()
                peak = max(peak, live)
    return peak


def _real(value: Any) -> Any:
    if isinstance(value, Shape):
        return value.zeros()
    return tuple(map(_real, value)) if isinstance(value, tuple) else value


def _run_aside(call: Call, gradients: bool) -> int | None:
    """The peak of one run on zeros, or None where the operator or the profiler refuses."""
    found: list[int] = []
    threads = torch.get_num_threads()

    def work() -> None:
        torch.set_num_threads(threads)  # OpenMP gives a new thread the number of the environment
        try:
            args, kwargs = _real(call.args), {name: _real(value) for name, value in call.kwargs}
            torch.set_grad_enabled(gradients)
            found.append(_peak_of(lambda: call.func(*args, **kwargs)))
        except Exception:  # zeros may be invalid for an operator, and the profiler's interface is not public
            return

    thread = threading.Thread(target=work, name="memscale-scratch")
    thread.start()
    thread.join()
    return found[0] if found else None


def _peak(call: Call, gradients: bool = True) -> int | None:
    """The same, remembered. Few operators ask whether gradients are enabled."""
    key = (
        call[:3],
        gradients,
        torch.get_num_threads(),
        torch._C._get_mkldnn_enabled(),
        torch.get_deterministic_debug_mode(),
        torch.get_float32_matmul_precision(),
    )
    if key not in _known:
        if len(_known) >= _KNOWN_LIMIT:
            _known.clear()
        _known[key] = _run_aside(call, gradients)
    return _known[key]


# ---- what is run for which operator ----------------------------------------------------------------------

Measure = Callable[[Call], "int | None"]
"""The peak of a call, outputs included, bytes; None: not measured."""


def _flop_limit(dtype: torch.dtype, usual: int) -> int:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return _SLOW_FLOPS
    if dtype is torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return _SLOW_FLOPS
    return usual


def _along_batch(call: Call, operands: Sequence[int], flops: int, image: _Image) -> int | None:
    """Runs a convolution, or two parts of its batch; where one image is too large, parts of that.

    Args:
        call: whole.
        operands: positions of those that have a batch.
        flops: of the whole.
        image: how one image is cut.
    """
    source: Shape = call.args[operands[0]]
    batch = source.size[0]
    limit = _flop_limit(source.dtype, _FLOPS)
    parts = max(-(-flops // limit), -(-call.room // _OPERAND_BYTES), 1)
    share = batch // parts
    places = [(index, 0) for index in operands]
    if share < 1:
        single = call.cut(places, 1)._replace(outputs=call.outputs // batch)
        return _along_side(single, flops // batch, image, batch)
    return _line(call, places, batch, share)


def _line(
    call: Call, places: Sequence[tuple[int, int]], batch: int, share: int, gradients: bool = True
) -> int | None:
    """Runs a part of a batch, and where that is not all of it half of the part: the line through both."""
    large = _peak(call.cut(places, share), gradients)
    if share == batch or large is None:
        return large
    small = _peak(call.cut(places, share // 2), gradients) if share > 1 else 0
    if small is None:
        return None
    return large + (large - small) * (batch - share) // (share - share // 2)


class _Image(NamedTuple):
    """How a side of an image is made shorter.

    Attributes:
        source: position of the input among the arguments.
        gradient: position of the output's gradient; None in forward.
        strides: of the convolution, one per side or one for all.
        transposed: whether the output is the larger one.
    """

    source: int
    gradient: int | None
    strides: Sequence[int]
    transposed: bool

    def shorter(self, call: Call, side: int, steps: int) -> Call | None:
        """The call with a side that is shorter by so many steps; None where nothing would be left."""
        stride = self.strides[side % len(self.strides)]
        of_source, of_gradient = (steps, steps * stride) if self.transposed else (steps * stride, steps)
        less = {self.source: of_source}
        if self.gradient is not None:
            less[self.gradient] = of_gradient
        for position, elements in less.items():
            left = call.args[position].size[2 + side] - elements
            if left < 1:
                return None
            call = call.cut([(position, 2 + side)], left)
        return call


def _along_side(call: Call, flops: int, image: _Image, batch: int) -> int | None:
    """The peak with a batch where one image is too large to be run: its longest side is made shorter.

    What oneDNN takes, and what unfolding takes, is linear in each side from some length on. Three lengths are
    run. Where these are not on one line they were too short: then the whole image is run, if that is not for
    long, or nothing is known.
    """
    source: Shape = call.args[image.source]
    sides = source.size[2:]
    side = max(range(len(sides)), key=sides.__getitem__)
    step = 1 if image.transposed else image.strides[side % len(image.strides)]
    share = min(_flop_limit(source.dtype, _IMAGE_FLOPS) / flops, _OPERAND_BYTES / call.room, 1.0)
    cuts = [-(-int(sides[side] * (1 - share * part)) // step) for part in (1.0, 0.75, 0.5)]
    calls = [image.shorter(call, side, steps) for steps in cuts]
    if None not in calls and len(set(cuts)) == len(cuts):
        large, middle, small = (None if shorter is None else _peak(shorter) for shorter in calls)
        if large is None or middle is None or small is None:
            return None
        first, second = (large - middle) / (cuts[1] - cuts[0]), (middle - small) / (cuts[2] - cuts[1])
        if abs(first - second) * cuts[0] <= _OFF_LINE * large:
            slope = max(first, second)
            whole = large + slope * cuts[0] + (batch - 1) * slope * sides[side] / step
            return math.ceil(whole * (1.0 if image.gradient is None else _PARTS_MARGIN))
    if flops > _MOST_FLOPS or call.room > _OPERAND_BYTES:
        return None
    peak = _peak(call)
    return None if peak is None else peak * batch


def _convolution_flops(pivot: int, weight: Shape) -> int:
    """Of one pass, from the elements of the output (where transposed: of the input)."""
    return 2 * pivot * math.prod(weight.size[1:])


def _convolution(call: Call) -> int | None:
    source, weight, transposed = call.args[0], call.args[1], bool(call.args[6])
    pivot = math.prod(source.size) if transposed else call.outputs // source.dtype.itemsize
    image = _Image(0, None, call.args[3], transposed)
    return _along_batch(call, (0,), _convolution_flops(pivot, weight), image)


def _convolution_backward(call: Call) -> int | None:
    grad, source, weight, transposed = call.args[0], call.args[1], call.args[2], bool(call.args[7])
    pivot = math.prod((source if transposed else grad).size)
    image = _Image(1, 0, call.args[4], transposed)
    return _along_batch(call, (0, 1), 2 * _convolution_flops(pivot, weight), image)


def _product(call: Call) -> int | None:
    """Only low precision takes scratch, unless products in FP32 are told to be less precise."""
    left, right = [value for value in call.args if isinstance(value, Shape)][-2:]
    if left.dtype not in _HALF and torch.get_float32_matmul_precision() == "highest":
        return call.outputs
    whole = (*left.size[:-2], left.size[-2], right.size[-1])
    size = _fitting(whole, left.size[-1], left.dtype)
    if size is None:
        return None
    small = call
    for index, value in enumerate(call.args):
        if isinstance(value, Shape):
            dimensions = _product_dimensions(value is left, value is right, len(value.size))
            small = _cut_product(small, index, dimensions, whole, size)
    peak = _peak(small)
    if peak is None or size == whole:
        return peak
    margin = 0 if size[-2:] == whole[-2:] else _SHRUNK_MARGIN_BYTES * torch.get_num_threads()
    return peak - math.prod(size) * left.dtype.itemsize + call.outputs + margin


def _fitting(whole: Sequence[int], inner: int, dtype: torch.dtype) -> tuple[int, ...] | None:
    """Output dimensions, halved until the product is quick and small; None if that does not help."""
    limit, size = _flop_limit(dtype, _PRODUCT_FLOPS), list(whole)

    def too_large() -> bool:
        *batch, rows, columns = size
        elements = math.prod(batch) * ((rows + columns) * inner + rows * columns)
        return 2 * math.prod(size) * inner > limit or elements * dtype.itemsize > _OPERAND_BYTES

    while too_large():
        if len(size) == 3 and size[0] > _LEAST_BATCH:
            size[0] = max(size[0] // 2, _LEAST_BATCH)
            continue
        longest = -2 if size[-2] >= size[-1] else -1
        if size[longest] < 2:
            return None
        size[longest] //= 2
    return tuple(size)


def _product_dimensions(is_left: bool, is_right: bool, rank: int) -> dict[int, int]:
    """Dimension of an operand → dimension of the output, both counted from the end."""
    dimensions = {-2: -2} if is_left else {-1: -1} if is_right else {-1: -1, -2: -2}
    return {own: output for own, output in {**dimensions, -3: -3}.items() if -own <= rank}


def _cut_product(
    call: Call, index: int, dimensions: dict[int, int], whole: Sequence[int], size: Sequence[int]
) -> Call:
    """Cuts one operand to the output's dimensions; what is broadcast stays as it is."""
    rank = len(call.args[index].size)
    for own, output in dimensions.items():
        if -output <= len(whole) and call.args[index].size[own] == whole[output]:
            call = call.cut([(index, rank + own)], size[output])
    return call


def _recurrent(call: Call) -> int | None:
    """A layer of an LSTM. Not on a part of its steps: the workspace's size is fixed by the forward.

    Without gradients it has no workspace, and another kernel.
    """
    source, of_input, of_hidden = call.args[:3]
    flops = 4 * math.prod(source.size[:2]) * (math.prod(of_input.size) + math.prod(of_hidden.size))
    quick = flops <= _flop_limit(source.dtype, _PRODUCT_FLOPS) and call.room <= _OPERAND_BYTES
    return _peak(call, torch.is_grad_enabled()) if quick else None


def _encoder_layer(call: Call) -> int | None:
    """The fused forward of an encoder layer, or of attention, that PyTorch takes in evaluation."""
    source, shapes = call.args[0], [value for value in call.args if isinstance(value, Shape)]
    if len(source.size) != 3:
        return None
    batch, length, width = source.size
    places = [(index, 0) for index, value in enumerate(call.args) if value == source]
    # A mask, which has another shape, belongs to the whole batch.
    has_mask = any(len(shape.size) > 2 or shape.dtype is torch.bool for shape in shapes[len(places) :])
    weights = sum(math.prod(shape.size) for shape in shapes[len(places) :])
    flops = 2 * batch * length * (weights + 2 * length * width)
    parts = max(-(-flops // _flop_limit(source.dtype, _PRODUCT_FLOPS)), -(-call.room // _OPERAND_BYTES), 1)
    share = batch // parts
    if share < 1 or (has_mask and parts > 1):
        return None
    return _line(call, places, batch, share, gradients=False)


def _light(call: Call) -> int | None:
    """Anything whose time is about that of reading its operands."""
    return _peak(call) if call.room <= _LIGHT_BYTES else None


MEASURES: dict[str, Measure] = {
    "aten::mm": _product,
    "aten::addmm": _product,
    "aten::bmm": _product,
    "aten::baddbmm": _product,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": _recurrent,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::_native_multi_head_attention": _encoder_layer,
    **dict.fromkeys(
        (
            "aten::_embedding_bag",
            "aten::_embedding_bag_backward",
            "aten::_upsample_bicubic2d_aa",
            "aten::_upsample_bicubic2d_aa_backward",
            "aten::_upsample_bilinear2d_aa",
            "aten::_upsample_bilinear2d_aa_backward",
            "aten::_upsample_nearest_exact2d",
            "aten::_upsample_nearest_exact2d_backward",
            "aten::binary_cross_entropy_with_logits",
            "aten::col2im",
            "aten::embedding_dense_backward",
            "aten::huber_loss",
            "aten::im2col",
            "aten::index_add",
            "aten::kthvalue",
            "aten::logsumexp",
            "aten::mean",
            "aten::median",
            "aten::mse_loss",
            "aten::native_batch_norm",
            "aten::native_batch_norm_backward",
            "aten::native_group_norm",
            "aten::native_group_norm_backward",
            "aten::scatter_reduce",
            "aten::smooth_l1_loss",
            "aten::sort",
            "aten::unfold_backward",
            "aten::upsample_bicubic2d",
            "aten::upsample_bicubic2d_backward",
            "aten::upsample_bilinear2d",
            "aten::upsample_bilinear2d_backward",
            "aten::upsample_linear1d",
            "aten::upsample_linear1d_backward",
            "aten::upsample_nearest2d",
            "aten::upsample_nearest2d_backward",
            "aten::upsample_trilinear3d",
            "aten::upsample_trilinear3d_backward",
        ),
        _light,
    ),
}
"""Operators that are measured. One that may take long, or that is not pure, has no place here."""


def measured_scratch(
    measure: Measure, func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: int
) -> int | None:
    """What a call allocates beyond its outputs, bytes; None where it is not measured.

    Args:
        measure: of the operator, from `MEASURES`.
        func: the operator overload.
        args: positional arguments; tensors may be fake.
        kwargs: keyword arguments.
        outputs: bytes of the storages that the graph counts as made by the call.
    """
    peak = measure(describe(func, args, kwargs, outputs))
    return None if peak is None else max(peak - outputs, 0)
