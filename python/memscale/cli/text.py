# SPDX-License-Identifier: Apache-2.0
"""Plain text that lines up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memscale.cli import terminal

__all__ = ["cut", "printable", "safe", "table"]

_NARROWEST: Final = 8  # column of words


def printable(text: str) -> str:
    """A text from outside without what moves a terminal's cursor or changes its colours."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def safe(text: str) -> str:
    """The same for a text of several lines, which are broken where the terminal ends."""
    return terminal.fitted("\n".join(map(printable, text.split("\n"))))


def cut(text: str, most: int) -> str:
    """A text without its middle, if it is too long."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[len(text) - (most - most // 2) :]}"


def table(
    rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ", fixed: Sequence[int] = ()
) -> str:
    """Rows as aligned columns, two blanks between them. Words lose their middle where the terminal is narrow.

    Args:
        rows: cells, as many in each row.
        right: columns that are aligned to the right.
        indent: before every row.
        fixed: columns that are shown whole, as those are that are aligned to the right.
    """
    clean = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    _narrow(widths, (*right, *fixed), len(indent) + 2 * (len(widths) - 1))
    lines = []
    for row in [[cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in clean]:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _narrow(widths: list[int], fixed: Sequence[int], between: int) -> None:
    """Takes from the widest columns of words what the terminal has no room for."""
    most = terminal.width()
    words = [index for index in range(len(widths)) if index not in fixed]
    while most is not None and words and sum(widths) + between > most:
        widest = max(words, key=lambda index: widths[index])
        if widths[widest] <= _NARROWEST:
            return
        widths[widest] -= 1
