# SPDX-License-Identifier: Apache-2.0
"""What cuDNN's operators allocate on the card of this machine: workspaces and reserves, block by block.

The stand-in runtime has no cuDNN, so what a plan assumes of convolutions and recurrent layers comes from
here. A row per call: the bytes of every block that the call took, in order, "+" where it was still there
afterwards (results and reserves), and the highest sum of what was given back.

    convolution     aten.convolution and aten.convolution_backward, FP32 and BF16, both layouts
    recurrent       an LSTM or GRU layer's forward and backward
    norm            batch normalisation's forward and backward

Usage: python bench/gpu/scratch.py [--seconds 60] [--deterministic] [--out bench/results]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from common import RESULTS, Table, parser

COLUMNS = ("capability", "cudnn", "deterministic", "call", "dtype", "layout", "part", "scratch", "blocks")
aten = torch.ops.aten


@dataclass(frozen=True)
class Conv:
    """A convolution: batch, channels, size, channels out, kernel, stride, padding, dilation, groups.

    `size` and `kernel` have one number per dimension.
    """

    batch: int
    channels: int
    size: tuple[int, ...]
    out: int
    kernel: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False

    def __str__(self) -> str:
        size, kernel = "x".join(map(str, self.size)), "x".join(map(str, self.kernel))
        more = f" s{self.stride} p{self.padding} d{self.dilation} g{self.groups}" + " t" * self.transposed
        return f"conv n{self.batch} c{self.channels} {size} o{self.out} k{kernel}{more}"


def _square(
    batch: int, channels: int, side: int, out: int, kernel: int, stride: int = 1, **more: Any
) -> Conv:
    padding = more.pop("padding", kernel // 2)
    return Conv(batch, channels, (side, side), out, (kernel, kernel), stride, padding, **more)


CONVOLUTIONS = (
    _square(32, 3, 224, 64, 7, 2),
    _square(32, 64, 56, 64, 3),
    _square(32, 64, 56, 256, 1),
    _square(32, 256, 56, 128, 1),
    _square(32, 128, 56, 128, 3, 2),
    _square(32, 256, 28, 256, 3, 2),
    _square(32, 512, 14, 512, 3),
    _square(32, 512, 7, 2048, 1),
    _square(32, 1024, 14, 2048, 1, 2),
    _square(32, 3, 224, 128, 3),
    _square(32, 128, 224, 128, 3),
    _square(32, 128, 224, 256, 3, 2),
    _square(32, 256, 112, 256, 3),
    _square(32, 256, 112, 512, 3, 2),
    _square(32, 512, 56, 512, 3),
    _square(8, 3, 56, 32, 3),
    _square(8, 32, 56, 32, 3),
    _square(1, 64, 512, 64, 3),
    _square(2, 128, 256, 128, 3),
    _square(4, 320, 64, 320, 3),
    _square(4, 640, 32, 640, 3),
    _square(4, 1280, 16, 1280, 3),
    _square(4, 2560, 8, 1280, 3),
    _square(64, 96, 56, 96, 7, groups=96),
    _square(64, 768, 7, 768, 7, groups=768),
    _square(64, 144, 56, 144, 3, groups=144),
    _square(32, 256, 28, 256, 3, groups=32),
    _square(16, 3, 224, 768, 16, 16, padding=0),
    _square(64, 3, 224, 96, 4, 4, padding=0),
    _square(8, 256, 64, 256, 3, padding=2, dilation=2),
    _square(8, 256, 64, 256, 3, padding=12, dilation=12),
    _square(2, 64, 128, 64, 31, groups=64),
    _square(16, 64, 64, 64, 5),
    _square(16, 64, 64, 64, 11),
    _square(4, 1, 28, 8, 3),
    _square(128, 16, 32, 16, 3),
    _square(128, 3, 32, 16, 3),
    _square(8, 128, 32, 64, 2, 2, padding=0, transposed=True),
    _square(8, 512, 8, 256, 4, 2, padding=1, transposed=True),
    Conv(8, 80, (3000,), 512, (3,), 1, 1),
    Conv(8, 512, (3000,), 512, (3,), 2, 1),
    Conv(4, 1, (160000,), 512, (10,), 5),
    Conv(4, 512, (15999,), 512, (3,), 2),
    Conv(4, 768, (499,), 768, (128,), 1, 64, groups=16),
    Conv(2, 1, (64, 64, 64), 32, (3, 3, 3), 1, 1),
    Conv(2, 32, (64, 64, 64), 32, (3, 3, 3), 1, 1),
    Conv(2, 64, (32, 32, 32), 128, (3, 3, 3), 2, 1),
    Conv(1, 3, (16, 224, 224), 768, (2, 16, 16), 16),
    Conv(8, 3, (8, 112, 112), 24, (1, 3, 3), 2, 1),
)


def blocks_of(run: Callable[[], Any]) -> tuple[list[str], int]:
    """A call's blocks, and the highest sum of those that it gave back."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=100_000)
    try:
        made = run()
        torch.cuda.synchronize()
    finally:
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
    taken: list[list[Any]] = []  # [bytes, whether it stays]
    there: dict[int, list[Any]] = {}
    live = highest = 0
    for event in trace:
        if event["action"] == "alloc":
            block = [-(-event["size"] // 512) * 512, True]
            there[event["addr"]] = block
            taken.append(block)
            live += block[0]
        elif event["action"] == "free_completed" and event["addr"] in there:
            block = there.pop(event["addr"])
            block[1] = False
            live -= block[0]
        highest = max(highest, live)
    del made
    return [f"{size}{'+' * stays}" for size, stays in taken], highest - live


def nothing() -> None:
    """What a forward needs first."""


def calls() -> Iterator[tuple[str, str, str, str, Callable[[], Any], Callable[[], Any]]]:
    """(call, dtype, layout, part, what goes first, what to run)."""
    for dtype in (torch.float32, torch.bfloat16):
        for recurrent in (nn.LSTM, nn.GRU):
            for layers, batch, steps, width, both in (
                (1, 16, 64, 128, False),
                (1, 64, 256, 512, False),
                (2, 32, 100, 256, False),
                (1, 32, 100, 256, True),
                (3, 8, 50, 1024, True),
            ):
                name = f"{recurrent.__name__} layers{layers} n{batch} t{steps} w{width}" + " both" * both
                yield from _recurrent(name, dtype, recurrent, (layers, batch, steps, width, both))
        for layout in (torch.contiguous_format, torch.channels_last):
            for shape in ((32, 64, 56, 56), (32, 512, 7, 7), (4, 3, 224, 224), (512, 256, 1, 1)):
                yield from _norm(shape, dtype, layout)
    for conv in CONVOLUTIONS:
        for dtype in (torch.float32, torch.bfloat16):
            for layout in (torch.contiguous_format, torch.channels_last):
                if layout is torch.contiguous_format or len(conv.size) == 2:
                    yield from _convolution(conv, dtype, layout)


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _convolution(conv: Conv, dtype: torch.dtype, layout: torch.memory_format) -> Iterator[Any]:
    like = {"device": "cuda", "dtype": dtype}
    x = torch.randn(conv.batch, conv.channels, *conv.size, **like).contiguous(memory_format=layout)
    first, second = (conv.channels, conv.out) if conv.transposed else (conv.out, conv.channels)
    weight = torch.randn(first, second // conv.groups, *conv.kernel, **like).contiguous(memory_format=layout)
    dims = len(conv.size)
    each = [conv.stride] * dims, [conv.padding] * dims, [conv.dilation] * dims
    common = *each, conv.transposed, [0] * dims, conv.groups
    made: list[Any] = []
    names = str(conv), _words(dtype), "channels_last" if layout is torch.channels_last else "contiguous"

    def forward() -> Any:
        made[:] = [aten.convolution(x, weight, None, *common)]
        return made[0]

    def backward(mask: list[bool]) -> Any:
        return aten.convolution_backward(made[0], x, weight, [conv.out], *common, mask)

    yield *names, "forward", nothing, forward
    yield *names, "backward", nothing, lambda: backward([True, True, False])
    yield *names, "of input", nothing, lambda: backward([True, False, False])
    yield *names, "of weight", nothing, lambda: backward([False, True, False])


def _recurrent(name: str, dtype: torch.dtype, kind: type[nn.Module], form: Any) -> Iterator[Any]:
    layers, batch, steps, width, both = form
    layer = kind(width, width, layers, batch_first=True, bidirectional=both, device="cuda", dtype=dtype)
    x = torch.randn(batch, steps, width, device="cuda", dtype=dtype, requires_grad=True)
    made: list[Any] = []

    def forward() -> Any:
        made[:] = [layer(x)[0]]
        return made[0]

    def backward() -> Any:
        return torch.autograd.grad(made[0].sum(), [x, *layer.parameters()])

    yield name, _words(dtype), "contiguous", "forward", nothing, forward
    yield name, _words(dtype), "contiguous", "backward", forward, backward


def _norm(shape: Any, dtype: torch.dtype, layout: torch.memory_format) -> Iterator[Any]:
    layer = nn.BatchNorm2d(shape[1], device="cuda")
    x = torch.randn(*shape, device="cuda", dtype=dtype).contiguous(memory_format=layout).requires_grad_()
    made: list[Any] = []
    name = f"batch norm {'x'.join(map(str, shape))}"
    names = name, _words(dtype), "channels_last" if layout is torch.channels_last else "contiguous"

    def forward() -> Any:
        made[:] = [layer(x)]
        return made[0]

    yield *names, "forward", nothing, forward
    yield *names, "backward", forward, lambda: made[0].backward(torch.ones_like(made[0]))


def main() -> int:
    """Measures until the time is up."""
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=60)
    arguments.add_argument("--deterministic", action="store_true")
    arguments.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA card: nothing is measured")
        return 0
    torch.backends.cudnn.deterministic = options.deterministic
    square = torch.ones(64, 64, device="cuda")
    torch.mm(square, square)  # cuBLAS takes its workspace
    table = Table("gpu_scratch", COLUMNS, options.dry, options.out)
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    end, left_out = time.monotonic() + options.seconds, 0
    for call, dtype, layout, part, first, run in calls():
        if time.monotonic() > end:
            left_out += 1
            continue
        try:
            first()
            run()  # handles and kernels are there from now on
            first()
            blocks, scratch = blocks_of(run)
        except Exception as error:
            blocks, scratch = [f"{type(error).__name__}: {str(error)[:80]}"], -1
        table.add(
            capability, torch.backends.cudnn.version(), options.deterministic, call, dtype, layout, part,
            scratch, " ".join(blocks),
        )  # fmt: skip
    print(f"{left_out} calls left out: the time was up" if left_out else "all calls measured")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
