# SPDX-License-Identifier: Apache-2.0
"""What a calibration measures: a few operators of each class of work, at sizes typical of training.

An operator is run a few times on operands that take turns, and its results are held for a while, so that
what is measured is not a small working set in the innermost cache: in a training step an operation's
operands were made some operations ago. Of the times, the shortest counts: what disturbs a measurement only
ever adds to it. How far the others lie above it says how much the machine was disturbed.

Nothing here changes a state that a program could notice, once the caller has put the random state aside.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from memscale.hardware.cost_rates import PRODUCTS

aten = torch.ops.aten

_ENOUGH_S: Final = 0.007
_QUEUED: Final = 4
_HEAD_START_CYCLES: Final = 1_000_000
"""For so long a card waits before what is timed, half a millisecond: the host queues all of it meanwhile.
Otherwise a fast card waits for the host between two operators, and that would be measured."""
_AT_LEAST: Final = 3
_HELD: Final = 6
_FRESH_BYTES: Final = 34 << 20  # above every threshold of the C library

_MOVERS: Final = frozenset(
    ("move", "math", "slow_math", "reduce", "channel", "select", "window", "random", "gather")
)
"""Classes that are limited by bytes."""

_WIDTH: Final = 1024
_CHAIN: Final = 24


@dataclass(frozen=True)
class Sample:
    """One operator at one size.

    Attributes:
        run: runs it, on the operands of a turn.
        flops: floating-point operations of a run; 0 where bytes limit it.
        moved: bytes that it reads and writes, counted as a trace does.
    """

    run: Callable[[int], object]
    flops: int
    moved: int


class Clock:
    """Times calls on a device. On a host with one thread its processor time counts, which nothing lengthens.

    Args:
        device: where they run.
        repeats: of one of them, at most.

    Attributes:
        spreads: of every measurement, how many times its shortest time the middle one was.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.cuda, self.repeats = device.type == "cuda", repeats
        self.held: deque[object] = deque(maxlen=_HELD)
        self.spreads: list[float] = []

    def hold(self, results: Sequence[Tensor]) -> None:
        """Fills the place of held results, so that those of the first runs find memory that is there.

        Three times: the C library keeps blocks of a size only after it has seen some of them freed.
        """
        for _ in range(3):
            self.held.extend(result.clone() for result in results)

    def seconds(self, run: Callable[[int], object]) -> float:
        """The shortest time of a few runs, after one that does not count."""
        self.held.append(run(0))  # results held from before stay, or their memory would have to be made again
        times: list[float] = []
        while len(times) < self.repeats and (len(times) < _AT_LEAST or sum(times) < _ENOUGH_S):
            times.append(self._once(run, len(times) + 1))
            if times[-1] > 8 * _ENOUGH_S:
                break
        times.sort()
        self.spreads.append(times[len(times) // 2] / max(times[0], 1e-9))
        return times[0]

    def _once(self, run: Callable[[int], object], turn: int) -> float:
        if not self.cuda:
            now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
            begin = now()
            self.held.append(run(turn))
            return now() - begin
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START_CYCLES)
        first.record()
        for more in range(_QUEUED):
            self.held.append(run(turn + more))
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000 / _QUEUED


class Samples:
    """Operators by class, for one precision.

    Args:
        device: where they run.
        dtype: of their operands.
        scale: how many times larger than on a host all tensors are.
        fill: how many times more images, heads and matrices there are beyond that, to fill a card.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, scale: int, fill: int) -> None:
        self.device, self.dtype, self.scale, self.fill = device, dtype, scale, fill
        self.generator = torch.Generator(device).manual_seed(0)
        self.size = dtype.itemsize
        rows = scale * (8 << 20) // (_WIDTH * self.size)
        self.pool = [self.random(rows, _WIDTH) for _ in range(6)]
        # A card's last cache holds several parts of that size.
        self.parts = self.pool if fill > 1 else [tensor[: rows // 4] for tensor in self.pool]

    def random(self, *shape: int) -> Tensor:
        """Numbers around 0 that no operator finds difficult."""
        made = torch.empty(shape, device=self.device)
        return made.uniform_(-1.0, 1.0, generator=self.generator).to(self.dtype)

    def by_class(self) -> Iterator[tuple[str, Callable[[], list[Sample]]]]:
        """(class, what makes its samples); those that are given twice count at their best."""
        # Their results are the largest, and `Clock.hold` has made room.
        first = ("move", "reduce", "gather", "math")
        for name in (*first, *first, *sorted((PRODUCTS | _MOVERS).difference(first))):
            yield name, getattr(self, "_" + name)

    def _each(self, some: Sequence[Tensor], *runs: Callable[[Tensor], object]) -> list[Sample]:
        """Samples of operators that read one tensor and write one."""
        moved = 2 * some[0].numel() * self.size
        return [Sample(_in_turn(run, some), 0, moved) for run in runs]

    def _pairs(self, some: Sequence[Tensor], run: Callable[[Tensor, Tensor], object]) -> Sample:
        """A sample of an operator that reads two tensors and writes one."""
        count = len(some)
        return Sample(
            lambda i: run(some[i % count], some[(i + 2) % count]), 0, 3 * some[0].numel() * self.size
        )

    def _move(self) -> list[Sample]:
        return [self._pairs(self.pool, torch.add), *self._each(self.pool, torch.clone, lambda x: x * 0.5)]

    def _math(self) -> list[Sample]:
        gradient = self._pairs(self.pool, aten.gelu_backward)
        return [gradient, *self._each(self.pool, nn.functional.gelu, torch.exp)]

    def _slow_math(self) -> list[Sample]:
        return self._each(self.parts, torch.tanh)

    def _reduce(self) -> list[Sample]:
        scale, shift = self.random(_WIDTH), self.random(_WIDTH)
        shape = [_WIDTH]
        _, mean, deviation = aten.native_layer_norm(self.pool[0], shape, scale, shift, 1e-5)

        def gradient(grad: Tensor, x: Tensor) -> object:
            return aten.native_layer_norm_backward(grad, x, shape, mean, deviation, scale, shift, [True] * 3)

        return [
            self._pairs(self.pool, gradient),
            *self._each(
                self.pool,
                lambda x: aten._softmax(x, -1, False),
                lambda x: aten.native_layer_norm(x, shape, scale, shift, 1e-5),
            ),
        ]

    def _image(self, channels: int, side: int, count: int = 4) -> Tensor:
        return self.random(count * self.scale * self.fill, channels, side, side)

    def _channel(self) -> list[Sample]:
        images = [self._image(64, 32) for _ in range(3)]
        ones = torch.ones(64, dtype=self.dtype, device=self.device)
        zeros = torch.zeros_like(ones)
        moved = images[0].numel() * self.size
        made = aten.native_batch_norm(images[0], ones, zeros, zeros, ones, True, 0.0, 1e-5)

        def forward(turn: int) -> object:
            return aten.native_batch_norm(images[turn % 3], ones, zeros, zeros, ones, True, 0.0, 1e-5)

        def gradient(turn: int) -> object:
            return aten.native_batch_norm_backward(
                images[turn % 3], images[0], ones, zeros, ones, made[1], made[2], True, 1e-5, [True] * 3
            )

        return [Sample(forward, 0, 2 * moved), Sample(gradient, 0, 3 * moved)]

    def _select(self) -> list[Sample]:
        mask = self.parts[0] > 0
        size = mask.numel() * self.size
        matrices = [part.view(-1, 64, _WIDTH).transpose(1, 2) for part in self.parts]
        return [
            Sample(_in_turn(lambda x: x.masked_fill(mask, 0.0), self.parts), 0, 2 * size + mask.numel()),
            Sample(_in_turn(torch.Tensor.contiguous, matrices), 0, 2 * size),
        ]

    def _window(self) -> list[Sample]:
        image = self._image(16, 48)
        moved = image.numel() * self.size
        pooled = moved + moved // 4 + image.numel() * 2  # indices of 8 bytes for a quarter of the elements
        return [
            Sample(lambda i: aten.max_pool2d_with_indices(image, [2, 2]), 0, pooled),
            Sample(lambda i: aten.upsample_nearest2d(image, [96, 96]), 0, 5 * moved),
        ]

    def _random(self) -> list[Sample]:
        if self.device.type == "cuda":  # its kernel draws and applies the mask in one
            moved = (2 * self.size + 1) * self.pool[0].numel()
            return [Sample(_in_turn(lambda x: aten.native_dropout(x, 0.1, True), self.pool), 0, moved)]
        part = torch.empty(self.parts[0].numel() // 8, dtype=self.dtype)
        draw = Sample(lambda i: part.bernoulli_(0.9, generator=self.generator), 0, part.numel() * self.size)
        return [draw]

    def _gather(self) -> list[Sample]:
        rows = self.pool[0].shape[0]
        index = torch.randint(0, rows, (rows,), device=self.device, generator=self.generator)
        return self._each(
            self.pool,
            lambda x: aten.embedding(x, index),
            lambda x: aten.embedding_dense_backward(x, index, rows, -1, False),
        )

    def _matrix(self) -> list[Sample]:
        side = 512 * self.scale
        some = [self.random(side, side) for _ in range(3)]
        tall, wide = self.random(side // 2, 2 * side), self.random(2 * side, side)
        rows, thin = self.random(4 * side, side // 8), self.random(side // 8, side)
        return [
            Sample(lambda i: some[i % 3] @ some[(i + 1) % 3], 2 * side**3, 0),
            Sample(lambda i: tall @ wide, 2 * side**3, 0),
            Sample(lambda i: rows @ thin, side**3, 0),
        ]

    def _batch(self) -> list[Sample]:
        count = 16 * self.scale * self.fill
        a, b = self.random(count, 256, 64), self.random(count, 64, 256)
        scores = self.random(count, 256, 256)
        flops = 2 * count * 256 * 256 * 64
        return [Sample(lambda i: a @ b, flops, 0), Sample(lambda i: scores @ a, flops, 0)]

    def _attention(self) -> list[Sample]:
        count = self.scale * self.fill
        q, k, v = (self.random(count, 8, 256, 64) for _ in range(3))
        flops = 4 * count * 8 * 256 * 256 * 64
        attend = nn.functional.scaled_dot_product_attention
        return [Sample(lambda i: attend(q, k, v), flops, 0)]

    def _convolved(self, image: Tensor, weight: Tensor, groups: int) -> tuple[Sample, Sample]:
        """A convolution that keeps the size, and its gradients."""
        side = int(weight.shape[2])
        common = [1, 1], [side // 2] * 2, [1, 1], False, [0, 0], groups
        made = aten.convolution(image, weight, None, *common)
        flops = 2 * made.numel() * weight[0].numel()
        return (
            Sample(lambda i: aten.convolution(image, weight, None, *common), flops, 0),
            Sample(
                lambda i: aten.convolution_backward(made, image, weight, [0], *common, [True, True, False]),
                2 * flops,
                0,
            ),
        )

    def _convolution(self) -> list[Sample]:
        return list(self._convolved(self._image(64, 28, 2), self.random(64, 64, 3, 3), 1))

    def _grouped_pair(self) -> tuple[Sample, Sample]:
        return self._convolved(self._image(64, 28, 2), self.random(64, 1, 7, 7), 64)

    def _grouped(self) -> list[Sample]:
        return [self._grouped_pair()[0]]

    def _grouped_gradient(self) -> list[Sample]:
        return [self._grouped_pair()[1]]

    def _recurrent(self) -> list[Sample]:
        steps, batch, width = 16, 16 * self.scale, 256
        layer = nn.LSTM(width, width, device=self.device, dtype=self.dtype)
        source = self.random(steps, batch, width)
        return [Sample(lambda i: layer(source), 2 * steps * batch * 8 * width * width, 0)]


def _in_turn(run: Callable[[Tensor], object], some: Sequence[Tensor]) -> Callable[[int], object]:
    """Runs an operator on one tensor after another."""
    return lambda turn: run(some[turn % len(some)])


def rates_of(samples: Sequence[Sample], clock: Clock) -> float:
    """Amount per microsecond of some operators that run equally often per amount."""
    total = sum(clock.seconds(sample.run) / max(sample.flops or sample.moved, 1) for sample in samples)
    return len(samples) / total / 1e6


def fresh_bytes_per_us(device: torch.device, clock: Clock) -> float:
    """Rate at which pages of large buffers appear: a copy into new memory against one into the same."""
    source = torch.zeros(_FRESH_BYTES, dtype=torch.uint8, device=device)
    there = source.clone()
    again = clock.seconds(lambda turn: there.copy_(source).numel())
    new = clock.seconds(lambda turn: source.clone().numel())
    return _FRESH_BYTES / max(new - again, 1e-6) / 1e6


# ---- fixed costs ---------------------------------------------------------------------------------------


class _Link(nn.Module):
    """One operation and two views, which is about how many views a model has per operation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x.view(4, 4)).view(16)


def _chain() -> nn.Sequential:
    return nn.Sequential(*[_Link() for _ in range(_CHAIN)])


def _step_seconds(run: Callable[[Tensor], Tensor], device: torch.device, repeats: int) -> float:
    """Forward and backward of something small. The host's own time, whatever the device."""
    small = torch.ones(16, device=device, requires_grad=True)

    def step(turn: int) -> None:
        run(small).sum().backward()

    seconds = Clock(torch.device("cpu"), repeats).seconds(step)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds


def fixed_costs_ns(device: torch.device, repeats: int) -> tuple[float, float, float]:
    """Nanoseconds of one operation, one checkpointed call, and one operation inside a selective one.

    An operation is one of a chain of the smallest modules, forward and backward alike, so that calling
    modules, views and keeping autograd's books count.
    """
    from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment

    plain = _chain()
    launch = _step_seconds(plain, device, repeats) / (2 * _CHAIN)

    def attached(modules: Sequence[nn.Module], **settings: Any) -> None:
        for module in modules:
            CheckpointAttachment(module, "calibration", **settings).attach()

    calls = _chain()
    attached(list(calls))
    recompute = _step_seconds(calls, device, repeats) / _CHAIN - 3 * launch
    whole, selective = _chain(), _chain()
    attached([whole])
    attached([selective], kept=frozenset({("relu", 0)}))
    looked = _step_seconds(selective, device, repeats) - _step_seconds(whole, device, repeats)
    return launch * 1e9, recompute * 1e9, looked / (2 * _CHAIN) * 1e9
