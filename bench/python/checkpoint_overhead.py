# SPDX-License-Identifier: Apache-2.0
"""What a checkpointed block costs beyond running its forward twice, beside `torch.utils.checkpoint`.

    python checkpoint_overhead.py [--rounds N] [NAME ...]

A model is a row of equal blocks, each of them checkpointed. A round times forward and backward of it,
plain and in every variant, one after another, so that what disturbs the machine disturbs all alike;
processor time of one thread. The overhead of a variant is its time less that of the plain step and of one
more forward, per block; the columns are medians over the rounds. `ratio` is MemScale's over that of
`torch.utils.checkpoint` where that does what the block needs: of its default where the block has random
numbers, of `preserve_rng_state=False` where it has none. `ratio_to_default` is to the default always,
which is what people write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from common import Table, median, parser
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment

DEPTH = 8


class MLP(nn.Module):
    """Two projections and a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    """Causal attention and MLP, each behind a normalisation and beside a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.drop = MLP(width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.second(x)))


class Convolution(nn.Module):
    """Two convolutions with batch normalisation around a shortcut: buffers that the forward updates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


@dataclass(frozen=True)
class Case:
    """One kind of block.

    Attributes:
        build: makes a block.
        shape: of its input.
        random: it draws random numbers.
        steps: forward and backward that often, per variant and round.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    random: bool = False
    steps: int = 10


CASES = {
    "mlp-64": Case(lambda: MLP(64), (8, 64)),
    "transformer-64": Case(lambda: Transformer(64, 4), (2, 16, 64)),
    "transformer-64-dropout": Case(lambda: Transformer(64, 4, 0.1), (2, 16, 64), random=True),
    "convolution-8": Case(lambda: Convolution(8), (2, 8, 8, 8)),
    "transformer-512": Case(lambda: Transformer(512, 8), (2, 128, 512), steps=1),
    "transformer-512-dropout": Case(lambda: Transformer(512, 8, 0.1), (2, 128, 512), random=True, steps=1),
    "convolution-64": Case(lambda: Convolution(64), (4, 64, 28, 28), steps=1),
}

Step = Callable[[], object]


class Blocks:
    """A row of blocks and the ways to run it."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(case.build() for _ in range(DEPTH)).train()
        self.x = torch.randn(case.shape, requires_grad=True)
        self.gradient = torch.randn(case.shape)

    def forward(self) -> Tensor:
        """The blocks as they are, or as a technique is attached to them."""
        x = self.x
        for block in self.blocks:
            x = block(x)
        return x

    def with_torch(self, preserve_rng_state: bool) -> Tensor:
        """Each block under PyTorch's checkpoint."""
        x = self.x
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        return x

    def variants(self) -> dict[str, Step]:
        """Name → one step."""
        named = [(str(number), block) for number, block in enumerate(self.blocks)]
        attachments = [CheckpointAttachment(block, path, _buffers(block)) for path, block in named]

        def ours() -> None:
            for attachment in attachments:
                attachment.attach()
            try:
                output = self.forward()
            finally:
                for attachment in attachments:
                    attachment.undo()
            output.backward(self.gradient)

        return {
            "plain": lambda: self.forward().backward(self.gradient),
            "forward": self.forward,
            "ours": ours,
            "attaching": lambda: [(one.attach(), one.undo()) for one in attachments],
            "torch": lambda: self.with_torch(True).backward(self.gradient),
            "torch-no-rng": lambda: self.with_torch(False).backward(self.gradient),
        }


def _buffers(block: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(owner, name) for owner in block.modules() for name in owner._buffers]


def _timed(step: Step, steps: int) -> float:
    begin = time.process_time_ns()
    for _ in range(steps):
        step()
    return (time.process_time_ns() - begin) / steps / DEPTH


def measured(case: Case, rounds: int) -> dict[str, list[float]]:
    """Nanoseconds per block, of every variant and round."""
    variants = Blocks(case).variants()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for step in variants.values():
        _timed(step, 2 + case.steps)
    for number in range(rounds):
        # In turn, so that no variant always follows the same one.
        names = list(variants)[number % len(variants) :] + list(variants)[: number % len(variants)]
        for name in names:
            times[name].append(_timed(variants[name], case.steps))
    return times


COLUMNS = (
    "block", "plain_us", "forward_us", "ours_us", "torch_us", "torch_no_rng_us", "ours_overhead_us",
    "torch_overhead_us", "torch_no_rng_overhead_us", "ratio", "ratio_to_default", "quicker_rounds",
)  # fmt: skip


def row(name: str, case: Case, times: dict[str, list[float]]) -> tuple[object, ...]:
    """What the table shows: microseconds per block."""

    def paired(variant: str) -> list[float]:
        least = [a + b for a, b in zip(times["plain"], times["forward"], strict=True)]
        extra = times["attaching"] if variant == "ours" else [0.0] * len(least)
        return [took - more - base for took, base, more in zip(times[variant], least, extra, strict=True)]

    fair = "torch" if case.random else "torch-no-rng"
    ours, theirs = paired("ours"), paired(fair)
    overheads = {variant: median(paired(variant)) for variant in ("ours", "torch", "torch-no-rng")}
    quicker = sum(a <= b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    shown = ("plain", "forward", "ours", "torch", "torch-no-rng")
    us: Sequence[float] = [median(times[variant]) / 1e3 for variant in shown]
    return (
        name, *us, *(value / 1e3 for value in overheads.values()),
        overheads["ours"] / overheads[fair], overheads["ours"] / overheads["torch"], quicker,
    )  # fmt: skip


def main() -> None:
    """Measures the blocks that are named, or all."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=200)
    arguments.add_argument("names", nargs="*", default=list(CASES))
    given = arguments.parse_args()
    torch.set_num_threads(1)
    table = Table("checkpoint_overhead", COLUMNS, given.dry)
    for name in given.names:
        rounds = given.rounds if CASES[name].steps > 1 else max(given.rounds // 4, 3)
        table.add(*row(name, CASES[name], measured(CASES[name], rounds)))


if __name__ == "__main__":
    main()
