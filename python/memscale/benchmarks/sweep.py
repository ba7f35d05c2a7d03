# SPDX-License-Identifier: Apache-2.0
"""Points of a Latin hypercube over model, batch, sequence and dtype.

In each dimension the unit interval is cut into as many parts as there are points, and each part has one.
The generator is Python's own, so that a seed means the same points everywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from memscale.benchmarks.registry import BenchmarkModel, Shape

__all__ = ["POINTS", "SEED", "Point", "hypercube", "points"]

POINTS: Final = 25
SEED: Final = 20

_BATCHES: Final = {"full": (1, 2, 4, 8, 16), "reduced": (1, 2, 4, 8), "tiny": (1, 2)}
_LENGTHS: Final = {"full": (64, 128, 256, 512), "reduced": (64, 128, 256), "tiny": (16, 32)}
_PRECISIONS: Final = ("fp32", "bf16-amp")

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """A point of the sweep: a model, a shape of it, and the precision of the plain run."""

    model: BenchmarkModel
    shape: Shape
    precision: str


def hypercube(count: int, dimensions: int, seed: int) -> list[tuple[float, ...]]:
    """So many points in [0, 1) of each dimension."""
    source = random.Random(seed)
    columns = []
    for _ in range(dimensions):
        parts = list(range(count))
        source.shuffle(parts)
        columns.append([(part + source.random()) / count for part in parts])
    return list(zip(*columns, strict=True))


def points(
    models: Sequence[BenchmarkModel], scale: str, count: int = POINTS, seed: int = SEED
) -> list[Point]:
    """The points of a sweep over some models: so many different ones, or all that there are."""
    most = len(models) * len(_BATCHES[scale]) * len(_LENGTHS[scale]) * len(_PRECISIONS)
    made: dict[Point, None] = {}  # in order
    for again in itertools.count():
        # Parts are narrower than the choices, so that two places may be one point: a further cube fills up.
        for place in hypercube(count, 4, seed + again):
            if len(made) < min(count, most):
                made[_point(models, scale, place)] = None
        if len(made) == min(count, most):
            break
    return list(made)


def _point(models: Sequence[BenchmarkModel], scale: str, place: Sequence[float]) -> Point:
    model, batch, length, precision = place
    chosen = _at(models, model)
    shape = dataclasses.replace(
        chosen.shape(scale), batch=_at(_BATCHES[scale], batch), length=_at(_LENGTHS[scale], length)
    )
    return Point(chosen, shape, _at(_PRECISIONS, precision))


def _at(values: Sequence[T], place: float) -> T:
    return values[int(place * len(values))]
