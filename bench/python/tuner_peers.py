# SPDX-License-Identifier: Apache-2.0
"""How others look for a batch size, on a card that `tuner.py` plays. `accelerate` is the package itself.

The others are their procedures, with their own constants. Sources: Lightning 2.6,
lightning/pytorch/tuner/batch_size_scaling.py; Ultralytics 8.3, ultralytics/utils/autobatch.py. Lightning's
is without its checkpoints and loaders, so its seconds are those of the steps alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

Step = Callable[[int], int]
"""Trains one step of a batch and returns its peak; RuntimeError("CUDA out of memory. …")."""

_LIGHTNING_STEPS, _LIGHTNING_MARGIN = 3, 0.05
_ULTRALYTICS_SHARE, _ULTRALYTICS_DEFAULT = 0.60, 16


def lightning(step: Step, budget: int, most: int) -> int:
    """`BatchSizeFinder(mode="binsearch")`: doubles from 2 to the first OOM, then bisects, then 5 % less."""
    size, low, high = 2, 1, None
    while True:
        try:
            for _ in range(_LIGHTNING_STEPS):
                step(size)
        except RuntimeError:
            high = size
            size = (high + low) // 2
            if high - low <= 1:
                break
            continue
        low = size
        if size >= most or (high is not None and high - low <= 1):  # the dataset's end
            break
        size = min((high + low) // 2 if high is not None else 2 * size, most)
    return max(1, int(size * (1 - _LIGHTNING_MARGIN)))


def accelerate(step: Step, budget: int, most: int) -> int:
    """`find_executable_batch_size`: restarts with 0.9 of the batch after each OOM."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=most)
    def train(batch_size: int) -> int:
        for _ in range(_LIGHTNING_STEPS):
            step(batch_size)
        return batch_size

    return int(train())


def ultralytics(step: Step, budget: int, most: int) -> int:
    """`AutoBatch`: profiles 1 to 16, fits a line, and takes what it says for 60 % of the card."""
    sizes, peaks = [], []
    failed = None
    for size in (1, 2, 4, 8, 16):
        try:
            peaks.append(step(size))
            sizes.append(size)
        except RuntimeError:
            failed = failed or size
    if len(sizes) < 2:
        return _ULTRALYTICS_DEFAULT
    count = len(sizes)
    mean_x, mean_y = sum(sizes) / count, sum(peaks) / count
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(sizes, peaks, strict=True))
    slope /= sum((x - mean_x) ** 2 for x in sizes)
    found = int((budget * _ULTRALYTICS_SHARE - (mean_y - slope * mean_x)) / slope)
    if failed is not None and found >= failed:  # as autobatch.py: the point before the one that failed
        found = sizes[-1]
    return found if 1 <= found <= 1024 else _ULTRALYTICS_DEFAULT


PEERS: Final[dict[str, Callable[[Step, int, int], int]]] = {
    "lightning": lightning,
    "accelerate": accelerate,
    "ultralytics": ultralytics,
}
