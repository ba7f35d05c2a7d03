# SPDX-License-Identifier: Apache-2.0
"""Plain text that lines up."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["printable", "safe", "table"]


def printable(text: str) -> str:
    """A text from outside without what moves a terminal's cursor or changes its colours."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def safe(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ") -> str:
    """Rows as aligned columns, two blanks between them.

    Args:
        rows: cells, as many in each row.
        right: columns that are aligned to the right.
        indent: before every row.
    """
    clean = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    lines = []
    for row in clean:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)
