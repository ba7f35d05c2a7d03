# SPDX-License-Identifier: Apache-2.0
"""What happens to a run, for those who listen: plans, memory that has run out, steps that were repeated.

Rooms tell, whether or not anybody listens. A listener that fails is no trouble of the one who tells.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

__all__ = ["LISTENERS", "tell"]

Listener = Callable[..., None]
"""Given the kind, the text, and what else there is by name."""

LISTENERS: Final[list[Listener]] = []
"""Those of this process."""


def tell(kind: str, text: str, **data: Any) -> None:
    """Tells everybody who listens.

    Args:
        kind: one word: "plan", "replan", "oom", "recovery", "refused".
        text: what has happened, for people.
        **data: plain values.
    """
    for listener in tuple(LISTENERS):
        with contextlib.suppress(Exception):
            listener(kind, text, **data)
