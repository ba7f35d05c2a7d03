# SPDX-License-Identifier: Apache-2.0
"""Counting the objects that `gc.freeze` took from the collector, without a walk over them each time."""

from __future__ import annotations

import gc
from collections.abc import Callable


def count_once() -> None:
    """`gc.get_freeze_count` walks all that is frozen, 40 ms for what the tests import, and each trace asks.

    Only two functions change what is frozen, so the count is kept between them.
    """
    freeze, unfreeze, count = gc.freeze, gc.unfreeze, gc.get_freeze_count
    known: list[int] = []

    def forgets(change: Callable[[], None]) -> Callable[[], None]:
        def changed() -> None:
            known.clear()
            change()

        return changed

    def counted() -> int:
        if not known:
            known.append(count())
        return known[0]

    gc.freeze, gc.unfreeze, gc.get_freeze_count = forgets(freeze), forgets(unfreeze), counted
