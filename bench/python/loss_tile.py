# SPDX-License-Identifier: Apache-2.0
"""The loss of a language model's head in tiles: memory and time against plain PyTorch.

    python bench/python/loss_tile.py [--tokens N] [--classes N] [--width N] [--runs N] [--dry]

Three ways to the same loss and gradients, taken in turn in one process:

* plain: `cross_entropy(head(hidden).float(), labels)`, as transformers computes it, and its backward;
* tile: the same lines with MemScale's loss tile attached to the head;
* linear_cross_entropy: PyTorch's own (2.13), with the options it chooses itself.

"extra_mib" is the highest number of tensor bytes at once beyond hidden states, weight and their two
gradients. Errors are relative to FP64, those of gradients in the Euclidean norm. The exit status is 1 if the
tile takes more than 5 % of plain PyTorch's extra memory or more than 1.15 of its time, or if an error of a
gradient is more than 1.5 times plain PyTorch's.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import Table, measure_peak, median, parser
from torch import Tensor, nn

from memscale.techniques.tiles.loss_tiles import LossTileAttachment

COLUMNS = (
    "dtype", "way", "tokens", "classes", "width", "threads", "extra_mib", "extra_share", "time_ms",
    "time_share", "loss_error", "rows_error", "weight_error",
)  # fmt: skip

_MIB = 1 << 20


class Case:
    """One head with its input.

    Args:
        tokens: rows.
        classes: outputs of the head.
        width: inputs of the head.
        dtype: of weight and rows.
    """

    def __init__(self, tokens: int, classes: int, width: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.head = nn.Linear(width, classes, bias=False).to(dtype)
        nn.init.normal_(self.head.weight, std=0.02)
        self.rows = torch.randn(1, tokens, width).to(dtype).requires_grad_()
        self.labels = torch.randint(classes, (tokens,))
        self.holder = nn.ModuleDict({"head": self.head})
        self.tile = LossTileAttachment(self.head, "head")

    def plain(self) -> Tensor:
        """The loss as transformers computes it."""
        return F.cross_entropy(self.head(self.rows).float().view(-1, self.head.out_features), self.labels)

    def tiled(self) -> Tensor:
        """The same lines with the technique attached."""
        self.tile.attach()
        try:
            loss = self.plain()
        finally:
            used = self.tile.used
            self.tile.undo()
        if not used:
            raise SystemExit("the loss tile stood aside")
        return loss

    def pytorch(self) -> Tensor:
        """PyTorch's own."""
        return F.linear_cross_entropy(
            self.rows[0], self.head.weight, self.labels, options=nn.LinearCrossEntropyOptions()
        )

    def step(self, way: Callable[[], Tensor]) -> float:
        """One loss and its backward. Returns the loss."""
        self.rows.grad = self.head.weight.grad = None
        loss = way()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def extra_bytes(self, way: Callable[[], Tensor]) -> int:
        """Highest number of bytes at once beyond inputs, weight and gradients."""
        self.rows.grad = self.head.weight.grad = None
        gradients = self.rows.nbytes + self.head.weight.nbytes
        return measure_peak(lambda: self.step(way)) - gradients

    def exact(self) -> tuple[float, Tensor, Tensor]:
        """Loss and gradients of rows and weight in FP64, in tiles, for memory's sake."""
        weight, rows = self.head.weight.detach().double(), self.rows.detach()[0].double()
        loss, of_rows, of_weight = 0.0, [], torch.zeros_like(weight)
        for part, labels in zip(rows.split(256), self.labels.split(256), strict=True):
            logits = part @ weight.t()
            loss += float(F.cross_entropy(logits, labels, reduction="sum")) / len(rows)
            grad = logits.softmax(-1)
            grad[torch.arange(len(labels)), labels] -= 1
            grad /= len(rows)
            of_rows.append(grad @ weight)
            of_weight.addmm_(grad.t(), part)
        return loss, torch.cat(of_rows), of_weight

    def errors(
        self, way: Callable[[], Tensor], exact: tuple[float, Tensor, Tensor]
    ) -> tuple[float, float, float]:
        """Relative errors of loss, gradient of the rows and gradient of the weight."""
        loss = self.step(way)
        rows, weight = self.rows.grad, self.head.weight.grad
        assert rows is not None and weight is not None
        return abs(loss - exact[0]) / exact[0], _error(rows[0], exact[1]), _error(weight, exact[2])


def _error(value: Tensor, exact: Tensor) -> float:
    difference = sum(
        float((a.double() - b).square().sum())
        for a, b in zip(value.split(4096), exact.split(4096), strict=True)
    )
    return float((difference / float(exact.square().sum())) ** 0.5)


def compare(given: argparse.Namespace, name: str, table: Table) -> list[str]:
    """Measures all ways at one dtype. Returns what the tile fails at."""
    case = Case(given.tokens, given.classes, given.width, getattr(torch, name))
    ways: dict[str, Callable[[], Tensor]] = {"plain": case.plain, "tile": case.tiled}
    if hasattr(F, "linear_cross_entropy"):
        ways["linear_cross_entropy"] = case.pytorch
    exact = case.exact()
    errors = {way: case.errors(run, exact) for way, run in ways.items()}
    del exact
    gc.collect()
    extra = {way: case.extra_bytes(run) for way, run in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(given.runs):
        for way, run in ways.items():
            start = time.perf_counter()
            case.step(run)
            seconds[way].append(time.perf_counter() - start)
    middle = {way: median(times) for way, times in seconds.items()}
    for way in ways:
        table.add(
            name, way, given.tokens, given.classes, given.width, torch.get_num_threads(),
            extra[way] / _MIB, extra[way] / extra["plain"],
            middle[way] * 1e3, middle[way] / middle["plain"], *errors[way],
        )  # fmt: skip
    worst = max(mine / theirs for mine, theirs in zip(errors["tile"][1:], errors["plain"][1:], strict=True))
    figures = (
        ("memory", extra["tile"] / extra["plain"], 0.05),
        ("time", middle["tile"] / middle["plain"], 1.15),
        ("error", worst, 1.5),
    )
    return [f"{name} {what}: {share:.3f} > {limit}" for what, share, limit in figures if share > limit]


def main() -> None:
    """Compares at FP32 and BF16."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=4096, help="rows (4096)")
    options.add_argument("--classes", type=int, default=50_257, help="outputs of the head (50257)")
    options.add_argument("--width", type=int, default=768, help="inputs of the head (768)")
    options.add_argument("--runs", type=int, default=5, help="steps of each way that count (5)")
    options.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    given = options.parse_args()
    table = Table("loss_tile", COLUMNS, given.dry)
    failures = [failure for name in given.dtypes for failure in compare(given, name, table)]
    for failure in failures:
        print(f"# FAILED: {failure}")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
