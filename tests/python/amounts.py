# SPDX-License-Identifier: Apache-2.0
"""How much is tested: with `MEMSCALE_TESTS=all` more cases of the same kind, which take long, too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")

ALL = os.environ.get("MEMSCALE_TESTS") == "all"


def also(*cases: Case) -> Sequence[Case]:
    """Cases that only a run of all tests has."""
    return cases if ALL else ()


def some(few: Sequence[Case], every: Sequence[Case]) -> Sequence[Case]:
    """A few of all cases, or all of them."""
    return every if ALL else few
