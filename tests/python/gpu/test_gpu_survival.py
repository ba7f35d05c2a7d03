# SPDX-License-Identifier: Apache-2.0
"""On CUDA a step that does not fit is repeated under a tighter plan, with every bit."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale

_ROWS, _WIDTH = 20_000, 128


@pytest.fixture(autouse=True)
def whole_card() -> Iterator[None]:
    """Limits of a test end with it."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def trained(on_oom: str | None, limit: int | None, begin: int = 0, **fields: Any) -> tuple[list[Tensor], int]:
    """Four steps, and the peak of allocated bytes from the limit on.

    Args:
        on_oom: how the model is wrapped; None: it is plain.
        limit: bytes that this process may have of the card.
        begin: the step from which on it has no more.
        fields: more of `memscale.Config`.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(_WIDTH, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(_ROWS, _WIDTH).cuda()
    if on_oom is not None:
        fields = {"on_oom": on_oom, "enable_logging": False, **fields}
        memscale.wrap(model, optimizer=optimizer, sample_input=batch, **fields)
    torch.cuda.manual_seed(1)
    for step in range(4):
        if limit is not None and step == begin:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(limit / total)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    recoveries = 0 if on_oom is None else memscale.executor_of(model).oom.recoveries
    assert (begin > 0) == (recoveries > 0)  # from the start on the plan is tighter before the first step runs
    return [value.detach().cpu() for value in model.parameters()], peak


@pytest.mark.parametrize("begin", [0, 2])
def test_a_step_that_plain_cannot_finish(begin: int, tmp_path: Path) -> None:
    free, peak = trained(None, None)
    limit = peak * 85 // 100
    with pytest.raises(torch.OutOfMemoryError):
        trained(None, limit)
    torch.cuda.set_per_process_memory_fraction(1.0)
    with pytest.raises(torch.OutOfMemoryError):
        trained("report", limit)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert not [*tmp_path.glob("*")]
    torch.cuda.set_per_process_memory_fraction(1.0)
    with pytest.raises(torch.OutOfMemoryError):
        trained("report", limit, oom_snapshot=str(tmp_path))
    (snapshot,) = tmp_path.glob("oom-*.pickle")
    assert pickle.loads(snapshot.read_bytes())["device_traces"]
    torch.cuda.set_per_process_memory_fraction(1.0)
    survived, lower = trained("survive", limit, begin)
    assert lower < limit and all(map(torch.equal, free, survived))
