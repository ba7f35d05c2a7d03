# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown, and as HTML the little of it that the landing page takes from README.md."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Final

__all__ = ["inline_html", "section_table", "table"]

_BAR: Final = re.compile(r"(?<!\\)\|")
_TOKEN: Final = re.compile(
    r"`(?P<code>[^`]+)`|\[(?P<words>[^\]]*)\]\((?P<link>[^)]*)\)|\*\*(?P<strong>[^*]+)\*\*"
)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table. `|` in a cell is escaped."""
    lines = [head, ("---",) * len(head), *rows]
    cells = (" | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in line) for line in lines)
    return "".join(f"| {line} |\n" for line in cells)


def section_table(text: str, heading: str) -> list[tuple[str, ...]]:
    """The rows of the first table under a heading, without its head.

    Raises:
        ValueError: there is no such heading, or no table under it.
    """
    _, found, rest = text.partition(f"\n## {heading}\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    if not found or len(lines) < 3:
        raise ValueError(f"there is no table under {heading!r}")
    return [tuple(cell.strip() for cell in _BAR.split(line)[1:-1]) for line in lines[2:]]


def inline_html(text: str) -> str:
    """Code, links and strong words of a line as HTML. Links to pages lead to the site's."""
    parts, end = [], 0
    for match in _TOKEN.finditer(text):
        parts.append(html.escape(text[end : match.start()]))
        if match["code"] is not None:
            parts.append(f"<code>{html.escape(match['code'])}</code>")
        elif match["strong"] is not None:
            parts.append(f"<strong>{html.escape(match['strong'])}</strong>")
        else:
            link = re.sub(r"\.md(?=#|$)", ".html", match["link"])
            parts.append(f'<a href="{html.escape(link)}">{inline_html(match["words"])}</a>')
        end = match.end()
    return "".join([*parts, html.escape(text[end:])])
