# SPDX-License-Identifier: Apache-2.0
"""Fixtures that all Python tests share."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from frozen import count_once
from processors import with_bf16

# The same examples every time, on a slow machine too.
settings.register_profile(
    "memscale", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("memscale")

os.environ.pop("COLUMNS", None)  # tests in several processes have it, and text would fit it

os.environ["MEMSCALE_CALIBRATION"] = (
    "off"  # the same plans on every machine; processes that tests start inherit it
)
os.environ["DO_NOT_TRACK"] = "1"  # also where the user has switched it on
count_once()
torch.set_num_threads(1)  # the models are tiny: a second thread would only wait for the first
os.environ["OMP_NUM_THREADS"] = "1"  # in processes that tests start, too: tests run on every core already


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

MANY_OBJECTS = 20_000
"""A test makes fewer that outlive it; an import of transformers' models makes hundreds of thousands."""


def few_objects() -> None:
    """Garbage collections look at what a test makes, and not at what was imported before it.

    Tests collect thousands of times: that took longer than all else that some of them do.
    """
    if len(gc.get_objects(generation=2)) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


def pytest_collection_finish() -> None:
    """What has been imported to find the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def bf16_host() -> Iterator[None]:
    """See `processors.with_bf16`."""
    with with_bf16():
        yield


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Every test finds PyTorch's switches, MemScale's logger and accelerate as a new process has them."""
    few_objects()
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
