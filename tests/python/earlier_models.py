# SPDX-License-Identifier: Apache-2.0
"""Models that other tests of the process have wrapped and not detached."""

from __future__ import annotations

from memscale.survival import outer_backward


def forget_earlier_models() -> None:
    """Nothing watches backwards for them any more."""
    outer_backward._cut.clear()
    for watch in outer_backward.watches():
        outer_backward.remove(watch)
    outer_backward._tidy()
