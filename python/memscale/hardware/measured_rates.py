# SPDX-License-Identifier: Apache-2.0
"""Measured rates: the switch `MEMSCALE_CALIBRATION`, and how they are rounded."""

from __future__ import annotations

import math
from typing import Final

from memscale.config.checks import environment_allows

SWITCH: Final = "MEMSCALE_CALIBRATION"


_STEPS_PER_DOUBLING: Final = 8


def is_on() -> bool:
    """Whether measured rates count.

    Raises:
        ConfigError: the environment says neither "auto" nor "off".
    """
    return environment_allows(SWITCH)


def quantised(value: float) -> int:
    """A number above 0, rounded to the nearest eighth of a doubling, 9 %."""
    steps = round(math.log2(max(value, 1.0)) * _STEPS_PER_DOUBLING)
    return max(1, round(math.pow(2.0, steps / _STEPS_PER_DOUBLING)))
