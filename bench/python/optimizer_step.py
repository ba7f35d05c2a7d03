# SPDX-License-Identifier: Apache-2.0
"""Parameters per second of one optimizer step: PyTorch's AdamW and ours, with the state of each.

The parameters are those of a GPT-2 of 8 layers and width 512, 34 million in 100 tensors. All ways step in
turn, round by round, so that a busy machine slows all of them; a ratio is the median over rounds of what
PyTorch's fused AdamW on FP32 took in the same round, over what this way took.

PyTorch's threads wait awake for some milliseconds after each of its parallel operations. In front of every
step there is one, as a backward pass is in training, so each way finds the same, whichever stepped before
it. Ours are PyTorch's threads, too, where that is built with OpenMP; elsewhere they share cores with those.

    best        the same of the shortest times that each has had
    master      what a loop does by itself with BF16 weights: gradients to FP32, a fused step, weights back
    share       bytes that a step reads and writes, per second, over those of a copy of 256 MiB

Usage: python bench/python/optimizer_step.py [--threads 1 2] [--rounds 15] [--dry]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import Table, median, parser
from torch import Tensor, nn

from memscale.optim import take_over

WIDTH, LAYERS, WORDS = 512, 8, 16384
REFERENCE = "torch fused"


def shapes() -> list[tuple[int, ...]]:
    """Of a GPT-2."""
    block: list[tuple[int, ...]] = [(WIDTH,)] * 4 + [
        (3 * WIDTH, WIDTH),
        (3 * WIDTH,),
        (WIDTH, WIDTH),
        (WIDTH,),
    ]
    block += [(4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)]
    return [(WORDS, WIDTH), *block * LAYERS]


@dataclass
class Way:
    """One way to step.

    Attributes:
        name: for the table.
        step: does it.
        state_bytes: per parameter, beside weight and gradient.
        moved_bytes: per parameter, read and written in a step.
    """

    name: str
    step: Callable[[], object]
    state_bytes: float
    moved_bytes: float


def parameters_of(dtype: torch.dtype) -> list[nn.Parameter]:
    """Random weights with random gradients."""
    torch.manual_seed(0)
    made = [nn.Parameter((torch.randn(shape) * 0.02).to(dtype)) for shape in shapes()]
    for parameter in made:
        parameter.grad = (torch.randn(parameter.shape) * 1e-3).to(dtype)
    return made


def torch_way(name: str, **switches: bool) -> Way:
    """PyTorch's on FP32."""
    optimizer = torch.optim.AdamW(parameters_of(torch.float32), lr=1e-4, **switches)
    return Way(f"torch {name}", optimizer.step, 8, 28)


def master_way() -> Way:
    """BF16 weights with an FP32 master, by PyTorch's operations."""
    weights = parameters_of(torch.bfloat16)
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    @torch.no_grad()
    def step() -> None:
        for weight, master in zip(weights, masters, strict=True):
            gradient = weight.grad
            assert gradient is not None
            master.grad = gradient.float()
        optimizer.step()
        torch._foreach_copy_([weight.data for weight in weights], [master.data for master in masters])
        optimizer.zero_grad()

    return Way("torch master", step, 12, 46)


def our_way(name: str, dtype: torch.dtype, moments: str, moved: float) -> Way:
    """Ours; `moved` counts bytes of a step per parameter."""
    weights = parameters_of(dtype)
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    reason = take_over(optimizer, moments)
    assert not reason, reason
    optimizer.step()
    state = sum(entry["memscale_state"].nbytes for entry in optimizer.state.values())
    return Way(f"ours {name}", optimizer.step, state / sum(weight.numel() for weight in weights), moved)


def ways() -> list[Way]:
    """All of them, each with parameters of its own."""
    scales = 4 / 128  # both moments' scales, read and written
    return [
        torch_way("single", foreach=False),
        torch_way("foreach", foreach=True),
        torch_way("fused", fused=True),
        master_way(),
        our_way("fp32", torch.float32, "fp32", 28),
        our_way("fp32 + 8-bit", torch.float32, "code8", 16 + scales),
        our_way("bf16 + fp32", torch.bfloat16, "fp32", 26),
        our_way("bf16 + 8-bit", torch.bfloat16, "code8", 12 + scales),
    ]


def seconds(work: Callable[[], object]) -> float:
    """Time of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def copy_bandwidth() -> float:
    """Bytes per second that a copy reads and writes."""
    source: Tensor = torch.ones(64 << 20)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source)) for _ in range(9)]
    return 2 * 4 * source.numel() / min(times[1:])


def main() -> None:
    """Measures, and writes a row per way and number of threads."""
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--rounds", type=int, default=15)
    options = arguments.parse_args()
    columns = ("threads", "way", "state_bytes", "seconds", "mparam_per_s", "ratio", "best", "share")
    table = Table("optimizer_step", columns, options.dry)
    every = ways()
    count = sum(torch.Size(shape).numel() for shape in shapes())
    other = torch.zeros(1 << 20)
    for threads in options.threads:
        torch.set_num_threads(threads)
        bandwidth = copy_bandwidth()
        times: dict[str, list[float]] = {way.name: [] for way in every}
        for index in range(options.rounds + 1):
            for way in every:
                other.add_(1.0)  # in all of PyTorch's threads
                taken = seconds(way.step)
                if index:  # the first round makes state and warms up
                    times[way.name].append(taken)
        for way in every:
            mine, theirs = times[way.name], times[REFERENCE]
            ratio = median([b / a for a, b in zip(mine, theirs, strict=True)])
            middle = median(mine)
            best = min(theirs) / min(mine)
            share = way.moved_bytes * count / middle / bandwidth
            table.add(threads, way.name, way.state_bytes, middle, count / middle / 1e6, ratio, best, share)


if __name__ == "__main__":
    main()
