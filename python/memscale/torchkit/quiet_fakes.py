# SPDX-License-Identifier: Apache-2.0
"""Keeps PyTorch quiet in a trace on fakes: no warnings, and no reads of values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def _no_search_for_nans() -> Iterator[None]:
    """Anomaly mode asks every gradient for values, which fakes have not."""
    if not torch.is_anomaly_enabled():
        yield
        return
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """PyTorch logs a traceback for an operator without a fake kernel; the caller reports that in a line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with _no_search_for_nans():
            yield
    finally:
        logger.setLevel(level)
