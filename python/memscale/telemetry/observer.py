# SPDX-License-Identifier: Apache-2.0
"""Sees plans that are attached. While telemetry is off, it looks at the environment and one file."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from memscale.telemetry.consent import decide

if TYPE_CHECKING:
    from memscale.core.wrapped import Wrapped

__all__ = ["plan_attached"]


def plan_attached(executor: Wrapped) -> None:
    """A plan is in force. Whatever goes wrong here is nobody's concern."""
    with contextlib.suppress(Exception):
        if decide().enabled:
            from memscale.telemetry.sending import send_once

            send_once(executor)
