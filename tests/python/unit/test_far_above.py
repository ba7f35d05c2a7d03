# SPDX-License-Identifier: Apache-2.0
"""When fewer techniques are not looked at, because all of them together are far above the budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memscale.core.variants import far_above

MIB = 1 << 20


def plan(used: int, context: int, fits: bool = False, staging: int = 0) -> Any:
    predicted = SimpleNamespace(device_used_peak_bytes=used * MIB, context_bytes=context * MIB)
    staged = {"staging_bytes": staging * MIB, "path_staging_bytes": 0}
    return SimpleNamespace(predicted=predicted, fits=fits, **staged)


@pytest.mark.parametrize(
    ("used", "context", "budget", "expected"),
    [
        (1250, 0, 1000, False),  # a quarter above
        (1251, 0, 1000, True),
        (2050, 800, 1800, False),  # the same beside a context
        (2051, 800, 1800, True),
        (1350, 800, 1180, True),  # 550 where 380 are left: the context does not make it near
        (900, 800, 700, True),  # the context alone is more than there is
    ],
)
def test_a_quarter_of_what_a_plan_can_use(used: int, context: int, budget: int, expected: bool) -> None:
    assert far_above(plan(used, context), budget * MIB) == expected


def test_what_the_engine_holds_would_come_back() -> None:
    assert not far_above(plan(1300, 0, staging=100), 1000 * MIB)
    assert not far_above(plan(9000, 0, fits=True), 1000 * MIB)
