# SPDX-License-Identifier: Apache-2.0
"""The landing page: a template with figures and a picture of the rows, and the table of README.md.

docs/_site/landing.html   the page, with {{name}} in the place of a figure of tools/measured.py;
                          {{name.machine}}, {{name.day}} and {{name.commit}}: where its rows come from
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Final

from figures import Figure, FigureError, Results
from measured import figures_of

from website.markdown import inline_html, section_table
from website.picture import bars_of, caption, picture

__all__ = ["MOST_BYTES", "landing_page", "version_of"]

MOST_BYTES: Final = 100_000
"""Size of the page, everything that it shows included."""

_PLACE: Final = re.compile(r"\{\{(\w+)(?:\.(\w+))?\}\}")
_COLUMNS: Final = {"machine": "machine", "torch": "torch"}


def version_of(root: Path) -> str:
    """The version in meson.build.

    Raises:
        ValueError: it has none.
    """
    match = re.search(
        r"^  version: '(.*)',$", (root / "meson.build").read_text(encoding="utf-8"), re.MULTILINE
    )
    if match is None:
        raise ValueError("meson.build has no version")
    return match.group(1)


def _said(figure: Figure, what: str | None) -> str:
    if what not in _COLUMNS:
        return figure.said(what)
    return ", ".join(figure.rows.values(_COLUMNS[what]))


def _works_with(root: Path) -> str:
    rows = section_table((root / "README.md").read_text(encoding="utf-8"), "What works with what")
    cells = (
        f'<tr><th scope="row">{inline_html(what)}</th><td>{inline_html(how)}</td></tr>' for what, how in rows
    )
    return "\n".join(cells)


def landing_page(root: Path) -> str:
    """The page.

    Raises:
        figures.FigureError: a figure of the template is not known, or has no row.
        ValueError: the page is larger than it may be.
    """
    results = Results(root / "bench/results")
    figures = figures_of(results)
    run = bars_of(results)
    parts = {
        "version": version_of(root),
        "picture": picture(run),
        "caption": html.escape(caption(run)),
        "works_with": _works_with(root),
    }

    def filled(match: re.Match[str]) -> str:
        name, what = match.groups()
        if name in parts and what is None:
            return parts[name]
        if name not in figures:
            raise FigureError(f"landing.html: {match.group(0)} is no figure")
        return html.escape(_said(figures[name], what))

    text = _PLACE.sub(filled, (root / "docs/_site/landing.html").read_text(encoding="utf-8"))
    size = len(text.encode())
    if size > MOST_BYTES:
        raise ValueError(f"the landing page has {size} bytes, more than {MOST_BYTES}")
    return text
