# SPDX-License-Identifier: Apache-2.0
"""The variants that are always measured: plain PyTorch, and MemScale.

    plain-fp32   FP32, torch.optim.AdamW
    plain-bf16   the same under BF16 autocast
    resident     `apply_all_optimizations` with the weights on the device
    smallest     `apply_all_optimizations` with a budget that nothing meets: the smallest plan there is
    wrap         `memscale.wrap` in exact mode, FP32: every bit of the plain run

MemScale gets the offload engine. On a card it uses host memory, on a CPU host a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from memscale.api import apply_all_optimizations, wrap
from memscale.benchmarks.job import Job
from memscale.benchmarks.loops import LEARNING_RATE, Batch, Loop
from memscale.config.config import AsyncOffloadConfig, Config, OptimizationMode
from memscale.hardware.detect import detect

__all__ = ["at_peer", "is_ours", "prepare", "settings"]

_OURS: Final = ("wrap", "resident", "smallest", "budget", "at")


def at_peer(peer: str) -> str:
    """Name of the way "MemScale, with the peak of a peer as its budget"."""
    return f"at {peer}"


def is_ours(way: str) -> bool:
    """Whether a way is one of MemScale's."""
    return way.split()[0] in _OURS


def settings(job: Job) -> Config:
    """The configuration of one of our ways."""
    engine = AsyncOffloadConfig(tiers=("file",), directory=job.directory)
    budget = job.budget_bytes
    if job.device == "cuda":
        engine = AsyncOffloadConfig()
        if budget:  # there a budget covers the context as well
            budget += detect(torch.device("cuda")).context_bytes
    mode = OptimizationMode.BALANCED if job.way == "wrap" else OptimizationMode.AGGRESSIVE
    return Config(
        mode,
        memory_budget=None if budget is None else max(1, budget),
        async_config=engine,
        enable_logging=False,
    )


def prepare(job: Job, model: nn.Module, sample: Batch) -> Loop:
    """A model in one of the ways of this module.

    Raises:
        KeyError: it is none of them.
    """
    return _MAKERS[job.way.split()[0]](job, model, sample)


def _plain(job: Job, model: nn.Module, sample: Batch) -> Loop:
    return Loop(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))


def _wrap(job: Job, model: nn.Module, sample: Batch) -> Loop:
    loop = _plain(job, model, sample)
    wrap(model, settings(job), sample_input=sample, optimizer=loop.optimizer)
    return loop


def _all(job: Job, model: nn.Module, sample: Batch) -> Loop:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return Loop(*apply_all_optimizations(model, optimizer, settings(job), sample_input=sample))


_MAKERS: Final[dict[str, Callable[[Job, nn.Module, Batch], Loop]]] = {
    "plain-fp32": _plain,
    "plain-bf16": _plain,
    "wrap": _wrap,
    "resident": _all,
    "smallest": _all,
    "at": _all,
    "budget": _all,
}
