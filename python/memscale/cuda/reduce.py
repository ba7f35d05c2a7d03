# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of CUDA reductions (sum, mean, max, norms, all, any).

A reduction with few outputs and many inputs is spread over several thread blocks per output. Each block
leaves a partial result in a buffer, and a counter per output tells which block is the last and has to add
them up:

    inputs ──► block 0 ┐
               block 1 ├─► partial results ──► the last block ──► output
               block n ┘   (buffer)            (told by a semaphore)

Both come from the caching allocator. How the work is spread follows aten/src/ATen/native/cuda/Reduce.cuh
(`setReduceConfig`) step by step; TensorIterator's ordering and merging of dimensions comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memscale.cuda.card import CardFacts

_MOST_THREADS = 512
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256


def _up(value: int, step: int) -> int:
    return -(-value // step)


def _power_below(value: int) -> int:
    return 1 << (max(value, 1).bit_length() - 1)


@dataclass
class _Dimensions:
    """An operand's dimensions as the iterator walks them: fastest first, merged where memory allows.

    Attributes:
        reduced: (size, stride in elements) of the dimensions that disappear.
        kept: those of the others.
    """

    reduced: list[tuple[int, int]]
    kept: list[tuple[int, int]]


def _merge(dims: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Merges neighbours that are one run of memory, in the input and in the output."""
    merged: list[tuple[int, int, int]] = []
    for size, stride, out in dims:
        if merged:
            last, step, out_step = merged[-1]
            if last * step == stride and last * out_step == out:
                merged[-1] = (last * size, step, out_step)
                continue
        merged.append((size, stride, out))
    return [(size, stride) for size, stride, _ in merged]


def _dimensions(shape: Sequence[int], strides: Sequence[int], reduced: Sequence[int]) -> _Dimensions:
    inner = [(shape[dim], strides[dim], 0) for dim in reduced if shape[dim] != 1]
    inner.sort(key=lambda item: item[1])
    kept: list[tuple[int, int, int]] = []
    out_stride = 1
    for dim in reversed(range(len(shape))):
        if dim not in reduced and shape[dim] != 1:
            kept.append((shape[dim], strides[dim], out_stride))
            out_stride *= shape[dim]
    return _Dimensions(_merge(inner), _merge(kept))


def _output_vector(dims: _Dimensions) -> int:
    """How many neighbouring outputs one thread makes at once (`get_output_vec_size`)."""
    width = 4
    first, *others = dims.kept
    for value in (first[0], *(stride for _, stride in (*dims.reduced, *others))):
        while value % width:
            width //= 2
    return width


@dataclass
class _Config:
    """`ReduceConfig`: how inputs and outputs are dealt to threads, warps and blocks."""

    outputs: int
    inputs: int
    vector: int = 1
    width: int = 1
    height: int = 1
    step_input: int = 1
    step_output: int = 1
    across_block_x: bool = False
    across_block_y: bool = False
    blocks_per_output: int = field(default=1)

    def set_block(self, dim0: int, dim1: int) -> None:
        most = _MOST_THREADS // self.vector
        x = _power_below(dim0) if dim0 < most else most
        y = _power_below(dim1) if dim1 < most else most
        self.width = min(x, _WARP)
        self.height = min(y, most // self.width)
        self.width = min(x, most // self.height)

    @property
    def values_per_thread(self) -> int:
        return _up(self.inputs, self.step_input)

    @property
    def grid(self) -> int:
        return _up(_up(self.outputs, self.vector), self.step_output)


def _configure(dims: _Dimensions, outputs: int, inputs: int, card: CardFacts) -> _Config:
    config = _Config(outputs, inputs)
    fastest = not dims.kept or bool(dims.reduced and dims.reduced[0][1] < dims.kept[0][1])
    dim0, dim1 = (inputs, outputs) if fastest else (outputs, inputs)
    if dims.reduced or dims.kept:
        stride = dims.reduced[0][1] if fastest and dims.reduced else dims.kept[0][1] if dims.kept else 1
        if stride == 1:
            if fastest and dim0 > 128 and len(dims.reduced) + len(dims.kept) == 1:
                dim0 //= 4
            elif not fastest:
                config.vector = _output_vector(dims)
                dim0 //= config.vector
    config.set_block(dim0, dim1)
    if fastest:
        config.across_block_x = True
        config.step_input *= config.width
    else:
        config.step_output *= config.width
    if config.values_per_thread >= min(config.height * _LEAST_VALUES, _MOST_VALUES):
        config.across_block_y = True
        config.step_input *= config.height
    else:
        config.step_output *= config.height
    wanted = card.units * (card.threads_per_unit // (config.width * config.height))
    if config.across_block_y and config.values_per_thread >= _MOST_VALUES and config.grid <= wanted:
        config.blocks_per_output = max(
            min(_up(wanted, config.grid), _up(config.values_per_thread, _LEAST_VALUES)),
            _up(config.values_per_thread, _MOST_VALUES),
        )
    return config


def reduction(
    shape: Sequence[int], strides: Sequence[int], reduced: Sequence[int], partial_bytes: int, card: CardFacts
) -> list[int]:
    """Bytes of the buffer and of the semaphores that a reduction takes, or nothing.

    Args:
        shape: of the input.
        strides: of the input, in elements.
        reduced: dimensions that disappear; empty: all of them.
        partial_bytes: size of one partial result, 4 for sums of floating-point numbers.
        card: where it runs.
    """
    rank = len(shape)
    gone = sorted({dim % rank for dim in reduced} if reduced else range(rank)) if rank else []
    inputs = outputs = 1
    for dim, size in enumerate(shape):
        if dim in gone:
            inputs *= size
        else:
            outputs *= size
    if inputs * outputs == 0:
        return []
    config = _configure(_dimensions(shape, strides, gone), outputs, inputs, card)
    if config.blocks_per_output <= 1:
        return []
    size = partial_bytes * outputs * config.blocks_per_output
    if not config.across_block_x:
        size *= config.width * config.vector
    return [size, 4 * config.grid]
