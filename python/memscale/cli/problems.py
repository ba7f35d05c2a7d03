# SPDX-License-Identifier: Apache-2.0
"""Exit codes of `memscale`, and the error that ends it with a message."""

from __future__ import annotations

import errno
import importlib.util
import os
import traceback
from pathlib import Path
from typing import Final

FITS: Final = 0
BAD_ARGUMENTS: Final = 2
DOES_NOT_FIT: Final = 3

_MOST_LINES, _WIDEST, _PLACES = 24, 300, 3


class UsageError(Exception):
    """What was asked for cannot be done as it was written; the message says why.

    It is one line, and indented ones below it where another program's error is quoted.
    """


def require_writable(*paths: str | None) -> None:
    """Refuses files that cannot be written, before anything is: so that a failure leaves nothing behind.

    Raises:
        UsageError: one of them is a folder, lies in none, or may not be written.
    """
    for path in filter(None, paths):
        file = Path(path)
        if file.is_dir():
            code = errno.EISDIR
        elif not file.parent.is_dir():
            code = errno.ENOENT
        elif not os.access(file if file.exists() else file.parent, os.W_OK):
            code = errno.EACCES
        else:
            continue
        raise UsageError(f"cannot write {path!r}: {os.strerror(code)}")


class NoTraceError(UsageError):
    """The step cannot be traced without data."""


def one_line(error: BaseException, most: int = 300) -> str:
    """An exception's own words without line breaks and control characters, shortened.

    Args:
        error: the exception; one without words gives its class.
        most: longest result, in characters.
    """
    words = _printable(" ".join(str(error).split())) or type(error).__name__
    return words if len(words) <= most else words[: most - 1] + "…"


def quoted(error: BaseException) -> str:
    """An error of somebody else's code: its class, all its words, and the lines of code that it came through.

    Long ones lose their middle. Lines after the first are indented.
    """
    words = [line for line in str(error).splitlines() if line.strip()] or [""]
    words = [_printable(line.rstrip())[:_WIDEST] for line in words]
    if len(words) > _MOST_LINES:
        half = _MOST_LINES // 2
        words = [*words[:half], "…", *words[-half:]]
    first = f"{type(error).__name__}: {words[0].strip()}".removesuffix(": ")
    return "\n  ".join([first, *words[1:], *_places(error)])


def _places(error: BaseException) -> list[str]:
    """The innermost lines that are neither Python's nor PyTorch's nor this package's."""
    spec = importlib.util.find_spec("torch")
    packages = [Path(path) for path in (spec.submodule_search_locations or () if spec is not None else ())]
    packages.append(Path(__file__).parents[1])

    def is_theirs(path: Path) -> bool:
        return path.parent != Path(traceback.__file__).parent and not any(map(path.is_relative_to, packages))

    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and is_theirs(Path(frame.filename))
    ]
    return [
        _printable(f"at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}")[:_WIDEST]
        for frame in reversed(frames[-_PLACES:])
    ]


def _printable(words: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in words)
