# SPDX-License-Identifier: Apache-2.0
"""Are plans true where the loop makes the loss of the model's output?

    python loop_losses.py [NAME ...]

Each loop trains with three ways to tell MemScale of its loss:

    assumed   nothing is told: a usual loss is counted
    given     `loss=`, which also says where the loop drops the output
    learned   `Config(learn_loss=True)`: the second step is measured, after the first has shown the loss

Bytes are the highest sum of tensor memory in a step, parameters and batch included; the prediction is that of
the plan in force. `error_pct`: predicted over measured; a negative one is an under-estimate.

    ample   with a budget that asks for nothing
    tight   with 80 % of the plain peak: `kept` means within it, "over" is a broken promise, "no claim" a plan
            that said that it does not fit
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common import Table, calibrate, measure_peak, parser
from torch import Tensor, nn

import memscale

COLUMNS = ("loop", "way", "plain_bytes", "ample_error_pct", "tight_error_pct", "tight")
ROWS, WIDTH = 256, 64
SHARE = 80
_AMPLE = 1 << 40
WAYS = ("assumed", "given", "learned")


def blocks(depth: int = 4) -> nn.Sequential:
    """MLPs in a row."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(depth)
        )
    )


class Towers(nn.Module):
    """Two encoders of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = blocks(), blocks()

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Both embeddings."""
        return self.image(image), self.text(text)


def contrastive(output: Sequence[Tensor]) -> Tensor:
    """Of two embeddings, as CLIP's."""
    image, text = (F.normalize(part, dim=-1) for part in output)
    scores, places = 10 * image @ text.t(), torch.arange(len(image))
    return F.cross_entropy(scores, places) + F.cross_entropy(scores.t(), places)


def all_pairs(output: Tensor) -> Tensor:
    """Distances of all pairs, written out."""
    distance = (output[:, None] - output[None]).square().sum(-1)
    same = torch.arange(len(output)) % 8
    near = same[:, None] == same[None]
    return (torch.where(near, distance, F.relu(1 - distance))).mean()


def margins(output: Tensor) -> Tensor:
    """Distances of all pairs by `cdist`, chosen by masks."""
    kind = torch.arange(len(output)) % 8
    same, distance = kind[:, None] == kind[None], torch.cdist(output, output)
    return distance[same].square().mean() + F.relu(1 - distance[~same]).square().mean()


def square(output: Tensor) -> Tensor:
    """A mean square, written out."""
    return output.square().mean()


def against_zeros(output: Tensor) -> Tensor:
    """A squared difference to a target that the loss makes."""
    return (output - torch.zeros_like(output)).square().mean()


def cross_entropy(output: Tensor) -> Tensor:
    """Over the last dimension."""
    return F.cross_entropy(output, torch.arange(len(output)) % WIDTH)


@dataclass(frozen=True)
class Loop:
    """What trains.

    Attributes:
        make: the model.
        batch: its arguments.
        loss: of one output; of several forwards, of a list of theirs.
        forwards: before each backward.
        holds: the output, while backward runs.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[Any], Tensor]
    forwards: int = 1
    holds: bool = True

    def given(self, output: Any) -> Any:
        """What is passed as `loss`."""
        return self.loss(output) if self.holds else (self.loss(output), None)


def _rows(count: int = 1) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(ROWS, WIDTH) for _ in range(count))


def _images(*size: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*size),)


LOOPS = {
    "contrastive": Loop(Towers, _rows(2), contrastive),
    "all pairs": Loop(blocks, _rows(), all_pairs),
    "margins": Loop(blocks, _rows(), margins),
    "two views": Loop(blocks, _rows(), contrastive, forwards=2),
    "cross-entropy": Loop(blocks, _rows(), cross_entropy),
    "square, output dropped": Loop(blocks, _rows(), square, holds=False),
    "3-d convolution, output dropped": Loop(
        lambda: nn.Conv3d(8, 16, 3, padding=1), _images(1, 8, 16, 32, 32), against_zeros, holds=False
    ),
    "dilated convolution, output dropped": Loop(
        lambda: nn.Conv2d(32, 32, 3, padding=4, dilation=4), _images(1, 32, 96, 96), square, holds=False
    ),
}


class Trained:
    """One model of a loop, and its step."""

    def __init__(self, loop: Loop) -> None:
        torch.manual_seed(0)
        self.loop, self.model = loop, loop.make().train()
        self.batches = [loop.batch() for _ in range(loop.forwards)]
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)

    def step(self) -> object:
        """Forward, or several, backward, and the optimizer's step."""
        outputs: Any = [self.model(*batch) for batch in self.batches]
        made = outputs if self.loop.forwards > 1 else outputs[0]
        loss = self.loop.loss(made)
        if not self.loop.holds:
            outputs = made = None
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None

    def peak(self) -> int:
        """Of a step, what was there before it included."""
        held = (*self.model.parameters(), *(tensor for batch in self.batches for tensor in batch))
        return sum(tensor.nbytes for tensor in held) + measure_peak(self.step)


def planned(loop: Loop, way: str, budget: int) -> tuple[memscale.Plan, int]:
    """The plan in force after two steps, and what a step takes under it."""
    trained = Trained(loop)
    memscale.wrap(
        trained.model,
        sample_input=trained.batches[0],
        optimizer=trained.optimizer,
        memory_budget=budget,
        enable_logging=False,
        learn_loss=way == "learned",
        loss=loop.given if way == "given" else None,
    )
    for _ in range(2):
        trained.step()
    peak = trained.peak()
    executor = memscale.executor_of(trained.model)
    assert executor is not None and executor.plan is not None
    return executor.plan, peak


def row(table: Table, name: str, loop: Loop, way: str) -> None:
    """One way to tell of one loop's loss."""
    plain = Trained(loop)
    plain.step()
    plain_peak = plain.peak()
    found = [planned(loop, way, budget) for budget in (_AMPLE, plain_peak * SHARE // 100)]
    errors = [100 * (plan.predicted.allocated_peak_bytes - peak) / peak for plan, peak in found]
    plan, peak = found[1]
    promise = ("kept" if peak <= plan.budget_bytes else "over") if plan.fits else "no claim"
    table.add(name, way, plain_peak, *errors, promise)


def main() -> None:
    """Runs what the command line asks for."""
    arguments = parser(__doc__)
    arguments.add_argument("names", nargs="*", metavar="NAME", help="of a loop; without: all")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    calibrate()
    table = Table("loop_losses", COLUMNS, given.dry)
    for name in given.names or LOOPS:
        for way in WAYS:
            if way == "given" and LOOPS[name].forwards > 1:
                continue  # `loss` is of one forward
            row(table, name, LOOPS[name], way)


if __name__ == "__main__":
    main()
