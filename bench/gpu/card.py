# SPDX-License-Identifier: Apache-2.0
"""What the card of this machine is: its memory outside PyTorch's allocator, its rates, its link.

    context     bytes outside the allocator after each kind of work, as the card says; needs the card alone
    rate        measured by calibration, beside the table's; their ratio is the table's error
    link        pinned and pageable copies, each way and both at once, bytes per second

A row per figure: `gpu_card.csv`. The measured rates stay in the calibration's file, where later programs of
this machine find them.

Usage: python bench/gpu/card.py [--out bench/results] [--dry]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from common import RESULTS, Table, median, parser

from memscale.core.calibration import calibrated
from memscale.hardware.cost_rates import KINDS, PRODUCTS
from memscale.hardware.detect import detect

LINK_BYTES = 256 << 20


def outside() -> int:
    """Bytes of the card that PyTorch's allocator does not have."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


_EAGER = """
import torch
x = torch.ones(8, device="cuda")
free, total = torch.cuda.mem_get_info()
print(total - free - torch.cuda.memory_reserved())
"""


def work() -> Iterator[tuple[str, Callable[[], object]]]:
    """Kinds of work, each of which may load libraries and kernels."""
    half = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    full = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    images = torch.randn(8, 16, 64, 64, device="cuda", requires_grad=True)
    filters = torch.randn(32, 16, 3, 3, device="cuda", requires_grad=True)
    heads = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    yield "first tensors", lambda: None
    yield "elementwise", lambda: F.gelu(full).sum().backward()
    yield "product fp32", lambda: (full @ full).sum().backward()
    yield "product bf16", lambda: (half @ half).sum().backward()
    yield "convolution fp32", lambda: F.conv2d(images, filters).sum().backward()
    yield (
        "convolution bf16",
        lambda: F.conv2d(images.bfloat16(), filters.bfloat16()).float().sum().backward(),
    )
    yield "attention bf16", lambda: F.scaled_dot_product_attention(heads, heads, heads).sum().backward()
    yield "lstm", lambda: torch.nn.LSTM(64, 64, device="cuda")(torch.randn(8, 4, 64, device="cuda"))
    optimizer = torch.optim.AdamW([full, half], fused=True)
    yield "AdamW fused", optimizer.step
    optimizer = torch.optim.AdamW([full, half])
    yield "AdamW", optimizer.step


def copies() -> Iterator[tuple[str, float]]:
    """Ways to copy, and bytes per second of each."""
    pinned = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pageable = torch.ones(LINK_BYTES, dtype=torch.uint8)
    card = [torch.ones(LINK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(stream: int, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(streams[stream]):
            to.copy_(source, non_blocking=True)

    def both() -> None:
        copy(0, card[0], pinned[0])
        copy(1, pinned[1], card[1])

    yield "pinned to card", rate(lambda: copy(0, card[0], pinned[0]), LINK_BYTES)
    yield "card to pinned", rate(lambda: copy(1, pinned[1], card[1]), LINK_BYTES)
    yield "pinned both ways at once", rate(both, 2 * LINK_BYTES)
    yield "pageable to card", rate(lambda: copy(0, card[0], pageable), LINK_BYTES)
    yield "card to pageable", rate(lambda: copy(1, pageable, card[1]), LINK_BYTES)
    yield "card to card, read and written", rate(lambda: copy(0, card[0], card[1]), 2 * LINK_BYTES)


def rate(run: Callable[[], object], count: int, rounds: int = 7) -> float:
    """Bytes per second, the median of some runs."""
    run()
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return count / median(seconds)


def main() -> int:
    """Measures, and writes the rows."""
    arguments = parser(__doc__)
    arguments.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA card: nothing is measured")
        return 0
    table = Table("gpu_card", ("kind", "name", "measured", "assumed", "ratio"), options.dry, options.out)

    def add(kind: str, name: str, measured: float, assumed: float | None = None) -> None:
        ratio = "" if not assumed else f"{measured / assumed:.3f}"
        table.add(kind, name, round(measured), "" if assumed is None else round(assumed), ratio)

    torch.cuda.init()
    assumed = detect(torch.device("cuda")).context_bytes
    add("context", "none yet", outside(), assumed)
    for name, run in work():
        run()
        add("context", name, outside(), assumed)
    eager = [sys.executable, "-c", _EAGER]
    done = subprocess.run(
        eager, capture_output=True, text=True, env={**os.environ, "CUDA_MODULE_LOADING": "EAGER"}
    )
    if done.returncode == 0:
        add("context", "first tensors, with this process's, all kernels loaded", int(done.stdout))
    for name, found in copies():
        add("link", name, found, 1e6 * detect(torch.device("cuda")).link_bytes_per_us)
    before = detect(torch.device("cuda"))
    after = calibrated(before)
    if after.cost is before.cost:
        print("this machine could not be calibrated: plans rest on the table's rates")
        return 1
    for kind in KINDS:
        of = "operations" if kind.removesuffix("_half") in PRODUCTS else "bytes"
        get = "flops_of" if of == "operations" else "bytes_of"
        add("rate", f"{kind}, {of} per us", getattr(after.cost, get)(kind), getattr(before.cost, get)(kind))
    for name in ("launch_ns", "recompute_ns", "intercept_ns"):
        add("rate", name, getattr(after.cost, name), getattr(before.cost, name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
