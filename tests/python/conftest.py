# SPDX-License-Identifier: Apache-2.0
"""Fixtures that all Python tests share."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples every time, on a slow machine too.
settings.register_profile(
    "memscale", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("memscale")

os.environ["MEMSCALE_CALIBRATION"] = (
    "off"  # the same plans on every machine; processes that tests start inherit it
)
torch.set_num_threads(1)  # the models are tiny: a second thread would only wait for the first
os.environ["OMP_NUM_THREADS"] = "1"  # in processes that tests start, too: tests run on every core already


def pytest_collection_finish() -> None:
    """Garbage collections look at what tests make, and not at all that has been imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Every test finds PyTorch's switches, MemScale's logger and accelerate as a new process has them."""
    torch.manual_seed(0)
    logger = logging.getLogger("memscale")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    leaked = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    assert torch.is_grad_enabled() and not leaked
    logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate
    if (accelerate := sys.modules.get("accelerate.state")) is not None:  # its precision is a singleton's
        accelerate.AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """Garbage collections look at what the tests of a module make, and not at what others have left."""
    gc.collect()
    gc.freeze()
    yield
