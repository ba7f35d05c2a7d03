# SPDX-License-Identifier: Apache-2.0
"""Makes Python's and NumPy's global generators draw the highest or lowest numbers in a block.

A model may drop blocks by `random.random() < share`. What a trace happens to draw must not decide what a plan
is for: with the highest and the lowest numbers all blocks run, or none, whichever side of the comparison
they stand on. Both generators are Mersenne twisters, whose state is the next 624 numbers, before tempering.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_WORDS: Final = 624

_FIXED: Final = 600
"""Words that are extreme, two for each `random()`. After the rest, which is the generator's own, numbers are
as good as random again: code that draws until it likes the number comes to an end."""

_HIGHEST: Final = 0xFFFFFFFF


def _untempered(number: int) -> int:
    """The word of a Mersenne twister's state that comes out as `number`."""
    word = number ^ (number >> 18)
    word ^= (word << 15) & 0xEFC60000
    step = word
    for _ in range(4):
        step = word ^ ((step << 7) & 0x9D2C5680)
    word = step
    for _ in range(2):
        step = word ^ (step >> 11)
    return step & _HIGHEST


@contextmanager
def extreme_draws(highest: bool) -> Iterator[None]:
    """Python's and NumPy's global generators draw one extreme inside the block, and go on afterwards.

    Args:
        highest: numbers next to 1; otherwise 0.
    """
    word = _untempered(_HIGHEST) if highest else 0
    python: Any = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpys: Any = None if numpy is None else numpy.random.get_state()
    try:
        random.setstate((python[0], (*[word] * _FIXED, *python[1][_FIXED:_WORDS], 0), None))
        if numpys is not None and numpys[0] == "MT19937":
            words = numpys[1].copy()
            words[:_FIXED] = word
            numpy.random.set_state((numpys[0], words, 0, 0, 0.0))
        yield
    finally:
        random.setstate(python)
        if numpys is not None:
            numpy.random.set_state(numpys)
