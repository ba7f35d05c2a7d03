# SPDX-License-Identifier: Apache-2.0
"""Exit codes of `memscale`, and the error that ends it with one line."""

from __future__ import annotations

from typing import Final

FITS: Final = 0
BAD_ARGUMENTS: Final = 2
DOES_NOT_FIT: Final = 3


class UsageError(Exception):
    """What was asked for cannot be done as it was written; the message is one line that says why."""


class NoTraceError(UsageError):
    """The step cannot be traced without data."""


def one_line(error: BaseException, most: int = 300) -> str:
    """An exception's own words without line breaks and control characters, shortened.

    Args:
        error: the exception; one without words gives its class.
        most: longest result, in characters.
    """
    words = " ".join(str(error).split()) or type(error).__name__
    words = "".join(letter if letter.isprintable() else "?" for letter in words)
    return words if len(words) <= most else words[: most - 1] + "…"
