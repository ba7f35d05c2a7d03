# SPDX-License-Identifier: Apache-2.0
"""What tests exchange in the product, in one place."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

from memscale.core import in_force, variants
from memscale.offload import limits
from memscale.offload.engine import Offload
from memscale.techniques import step_table
from memscale.techniques.step_table import StepTechnique


@contextmanager
def class_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Has calls of `module`, and of no other one, run `forward` in the block, in recomputes, too.

    A recompute finds the class of a module as its forward did, but not `nn.Module`.
    """
    kind: Any = nn.Module
    original = kind.__call__

    def chosen(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self is module else original(self, *args, **kwargs)

    kind.__call__ = chosen
    try:
        yield
    finally:
        kind.__call__ = original


def use_techniques(patch: pytest.MonkeyPatch, rows: Sequence[StepTechnique]) -> None:
    """Plans know these step techniques alone, until the test is over."""
    patch.setattr(variants, "STEP_TECHNIQUES", rows)


def use_only(patch: pytest.MonkeyPatch, *names: str) -> None:
    """The same by their names: others could meet the test's budgets, too."""
    use_techniques(patch, tuple(row for row in step_table.STEP_TECHNIQUES if row.name in names))


def use_disk_of(patch: pytest.MonkeyPatch, rate: int = 50_000) -> None:
    """The file tier copies so many bytes per microsecond, both ways: no checkpoint is as cheap."""
    patch.setattr(limits, "_file_rates", lambda _: (rate, rate))


def use_engines_with(patch: pytest.MonkeyPatch, faults: Mapping[str, int | bool]) -> None:
    """Plans open engines with these faults; see `Offload`."""
    patch.setattr(in_force, "Offload", functools.partial(Offload, faults=faults))


def use_disk_with(patch: pytest.MonkeyPatch, room: int) -> None:
    """A file of the file tier may take so many bytes, a power of two; a part of what is free stays free."""
    usage = shutil.disk_usage("/")._replace(free=room * 3 // 2)
    patch.setattr(shutil, "disk_usage", lambda _: usage)
