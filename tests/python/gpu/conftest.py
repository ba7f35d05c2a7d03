# SPDX-License-Identifier: Apache-2.0
"""Everything in this folder needs a CUDA device; without one it is skipped, and the run succeeds.

Bit-equality between two training runs holds on CUDA only with deterministic kernels: atomic additions
(embedding and attention backward, cuDNN's weight gradients) differ from run to run in plain PyTorch too. So
the suite runs with `torch.use_deterministic_algorithms(True)`, which needs cuBLAS's fixed workspace; both
are set here, the latter before CUDA is initialised.
"""

from __future__ import annotations

import csv
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_training import clean_device

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the folder's tests, and skips them where there is no device."""
    missing = (
        None
        if torch.cuda.is_available()
        else pytest.mark.skip(reason="torch.cuda.is_available() is False: no CUDA device")
    )
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing is not None:
                item.add_marker(missing)


@pytest.fixture(autouse=True)
def device_state() -> Iterator[None]:
    """Deterministic kernels, and an empty device before each test."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    clean_device()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def record(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Appends rows to a CSV file in the folder that `MEMSCALE_GPU_RESULTS` names (else a temporary one)."""
    folder = Path(os.environ.get("MEMSCALE_GPU_RESULTS") or tmp_path)

    def write(name: str, **values: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.csv"
        row = {
            "test": request.node.name,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            **values,
        }
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)

    return write
