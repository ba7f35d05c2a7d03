# SPDX-License-Identifier: Apache-2.0
"""Capabilities of standard output and error: width, character set, or closed."""

from __future__ import annotations

import codecs
import io
import os
import re
import shutil
import sys
import textwrap
from typing import Final

__all__ = ["complain", "fitted", "prepare", "width"]

_NARROWEST: Final = 20
_PLAIN: Final = dict(zip("×…█▏·–−≤≥→", "x~#|.--<>>", strict=True))
"""One ASCII character for each of ours, so that columns stay where they are."""

_HANGING: Final = re.compile(r"\s*\S+\s{2,}")


def prepare() -> None:
    """Makes standard output write something for every character."""
    codecs.register_error("memscale-plain", _plain)
    if isinstance(sys.stdout, io.TextIOWrapper):
        if _is_ascii_locale():
            sys.stdout.reconfigure(encoding="ascii", errors="memscale-plain")
        else:
            sys.stdout.reconfigure(errors="memscale-plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def _is_ascii_locale() -> bool:
    """Whether the locale asks for ASCII, where Python itself would write UTF-8."""
    if os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8"):
        return False
    names = (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    return next(filter(None, names), "") in ("C", "POSIX")


def complain(text: str) -> None:
    """Writes a line to standard error, if there is one."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)


def width() -> int | None:
    """Characters in a line: those of COLUMNS, else of the terminal; None where nothing limits them."""
    if not os.environ.get("COLUMNS") and not (sys.stdout is not None and sys.stdout.isatty()):
        return None
    columns = shutil.get_terminal_size((0, 0)).columns
    return max(columns, _NARROWEST) if columns > 0 else None


def fitted(text: str) -> str:
    """A text with long lines broken at blanks, continued below their second column."""
    most = width()
    if most is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _broken(line, most))


def _broken(line: str, most: int) -> list[str]:
    if len(line) <= most:
        return [line]
    found = _HANGING.match(line)
    first = len(line) - len(line.lstrip()) + 2
    hanging = first if found is None or found.end() > most // 2 else found.end()
    return textwrap.wrap(
        line, most, subsequent_indent=" " * hanging, break_long_words=False, break_on_hyphens=False
    )
