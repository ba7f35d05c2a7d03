# SPDX-License-Identifier: Apache-2.0
"""What a step takes in all: tensors, and what offload engines take for themselves."""

from __future__ import annotations

import gc
from collections.abc import Callable

from memscale.benchmarks.memory import engine_bytes
from zoo import training


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that tensors and engines held during `work`, beyond what they held before.

    Engines that `work` opens have to be open when it ends: what they have then counts for all of it.
    """
    gc.collect()
    before = engine_bytes()
    peak = training.peak_bytes(work)
    return peak + engine_bytes() - before
