# SPDX-License-Identifier: Apache-2.0
"""Measures what a convolution allocates on the CPU, on a part of it where all of it would take long.

What oneDNN and unfolding take is linear in the batch, and in each side of an image, from some size on. So a
large convolution runs on two smaller batches or on three shorter images, and the line through these is
followed, allocation by allocation: a peak alone is no line, since with the size the moment of the peak moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from memscale.ops.scratch_run import (
    OPERAND_BYTES,
    SLOW_FLOPS,
    Events,
    alike,
    flop_limit,
    highest,
    line,
    peak,
    run,
)
from memscale.torchkit.described_calls import Call, Shape


class Limits(NamedTuple):
    """What runs may compute, in operations.

    Attributes:
        part: one run of a convolution: some ten milliseconds.
        image: the largest parts of images.
        whole: whole images: parts take about as long together.
        slow: each of these, in a low precision for which the processor has no instructions.
    """

    part: int = 2_000_000_000
    image: int = 6_000_000_000
    whole: int = 24_000_000_000
    slow: int = SLOW_FLOPS

    def of(self, dtype: torch.dtype, usual: int) -> int:
        """A limit in a precision."""
        return flop_limit(dtype, usual, self.slow)


_USUAL = Limits()

_OFF_LINE = 0.01
"""How far three parts of an image may be off a line, as a share of the peak."""


def _along_batch(
    call: Call, operands: Sequence[int], flops: int, image: _Image, limits: Limits
) -> int | None:
    """Runs a convolution, or two parts of its batch; where one image is too large, parts of that.

    Args:
        call: whole.
        operands: positions of those that have a batch.
        flops: of the whole.
        image: how one image is cut.
        limits: of runs.
    """
    source: Shape = call.args[operands[0]]
    batch = source.size[0]
    limit = limits.of(source.dtype, limits.part)
    parts = max(-(-flops // limit), -(-call.room // OPERAND_BYTES), 1)
    share = batch // parts
    if share >= 1:
        share = max(share, min(2 * torch.get_num_threads(), OPERAND_BYTES * batch // call.room, batch))
        whole = 2 * share >= batch
    else:
        whole = flops <= limits.of(source.dtype, limits.whole) and call.room <= OPERAND_BYTES
    if whole:
        return peak(call)
    places = [(index, 0) for index in operands]
    if share:
        events = line(call, places, batch, share)
    else:
        events = _along_side(call, places, flops // batch, image, limits)
    if events is None:
        return None
    sums = min((torch.get_num_threads() - 1) * image.summed, sum(call.args[at].bytes for at in operands))
    return max(highest(events), _summing(events, sums, image.summed))


class _Image(NamedTuple):
    """How a side of an image is made shorter.

    Attributes:
        source: position of the input among the arguments.
        gradient: position of the output's gradient; None in forward.
        strides: of the convolution, one per side or one for all.
        transposed: whether the output is the larger one.
        summed: bytes of the weight, if its gradient is computed, and by oneDNN.
    """

    source: int
    gradient: int | None
    strides: Sequence[int]
    transposed: bool
    summed: int = 0

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


def _along_side(
    call: Call, places: Sequence[tuple[int, int]], flops: int, image: _Image, limits: Limits
) -> Events | None:
    """Where one image is too large to be run: its longest side is made shorter.

    What oneDNN takes, and what unfolding takes, is linear in each side from some length on. Three lengths are
    run. Where these are not on one line they were too short: then the whole image is run, if that is not for
    long, or nothing is known. A run of more shortened images shows what grows with the batch.

    Args:
        call: whole.
        places: (position of the argument, dimension) pairs of the batch.
        flops: of one image.
        image: how it is cut.
        limits: of runs.
    """
    source: Shape = call.args[image.source]
    batch = source.size[0]
    single = call.cut(places, 1)._replace(outputs=call.outputs // batch)
    for usual in (limits.image, limits.whole):
        limit = limits.of(source.dtype, usual)
        shorter, cuts = _shortened(call, min(limit / flops, OPERAND_BYTES / single.room, 1.0), image)
        whole = _on_line([run(part.cut(places, 1)) for part in shorter], cuts)
        if whole is None and flops <= limit and single.room <= OPERAND_BYTES:
            whole = run(single)
        if whole is not None:
            return whole if batch == 1 else _of_batch(whole, batch, shorter, places)
    return None


def _shortened(call: Call, share: float, image: _Image) -> tuple[list[Call], list[int]]:
    """The call with a share of the longest side, with three quarters and half of that, and what was cut."""
    source: Shape = call.args[image.source]
    sides = source.size[2:]
    side = max(range(len(sides)), key=sides.__getitem__)
    step = 1 if image.transposed else image.strides[side % len(image.strides)]
    cuts = [-(-int(sides[side] * (1 - share * part)) // step) for part in (1.0, 0.75, 0.5)]
    parts = [image.shorter(call, side, steps) for steps in cuts] if len(set(cuts)) == len(cuts) else []
    return [part for part in parts if part is not None], cuts


def _on_line(runs: Sequence[Events | None], cuts: Sequence[int]) -> Events | None:
    """What nothing cut would show, from three runs with so much cut; None where they are on no line."""
    if len(runs) < len(cuts) or None in runs or not alike(*runs):  # type: ignore[arg-type]
        return None
    low, high = [], []
    for large, middle, small in zip(*runs, strict=True):
        first, second = (large - middle) / (cuts[1] - cuts[0]), (middle - small) / (cuts[2] - cuts[1])
        least, most = sorted((large + first * cuts[0], large + second * cuts[0]), key=abs)
        low.append(least)
        high.append(most)
    whole = highest(high)
    return tuple(map(round, high)) if whole - highest(low) <= _OFF_LINE * whole else None


def _of_batch(events: Events, batch: int, parts: Iterable[Call], places: Sequence[tuple[int, int]]) -> Events:
    """What a batch shows, from one whole image, and one and more of one of the shortened ones.

    Where none of these allocates as the whole image does, all is taken to grow with the batch.
    """
    growth, more = [1.0] * len(events), min(max(torch.get_num_threads(), 2), batch)
    for part in parts:
        one, several = run(part.cut(places, 1)), run(part.cut(places, more))
        if one is not None and several is not None and alike(events, one, several):
            growth = [(large / small - 1) / (more - 1) for small, large in zip(one, several, strict=True)]
            break
    return tuple(round(size * (1 + (batch - 1) * by)) for size, by in zip(events, growth, strict=True))


def _summing(events: Events, sums: int, weight: int) -> int:
    """The peak where threads sum a gradient of the weight, so many bytes, each for itself.

    oneDNN does that for large images. The sums are there until the result is copied to its place, the last
    allocation of its size.
    """
    last = max((place for place, size in enumerate(events) if size >= weight), default=0)
    return highest(events[:last]) + sums


def _convolution_flops(pivot: int, weight: Shape) -> int:
    """Of one pass, from the elements of the output (where transposed: of the input)."""
    return 2 * pivot * math.prod(weight.size[1:])


def forward(call: Call, limits: Limits = _USUAL) -> int | None:
    """The peak of `aten::convolution`, outputs included; None where nothing is known."""
    source, weight, transposed = call.args[0], call.args[1], bool(call.args[6])
    pivot = math.prod(source.size) if transposed else call.outputs // source.dtype.itemsize
    image = _Image(0, None, call.args[3], transposed)
    return _along_batch(call, (0,), _convolution_flops(pivot, weight), image, limits)


def backward(call: Call, limits: Limits = _USUAL) -> int | None:
    """The peak of `aten::convolution_backward`."""
    grad, source, weight, transposed = call.args[0], call.args[1], call.args[2], bool(call.args[7])
    pivot = math.prod((source if transposed else grad).size)
    summed = weight.bytes if call.args[10][1] and weight.dtype is not torch.float64 else 0
    image = _Image(1, 0, call.args[4], transposed, summed)
    return _along_batch(call, (0, 1), 2 * _convolution_flops(pivot, weight), image, limits)
