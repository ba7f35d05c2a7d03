# SPDX-License-Identifier: Apache-2.0
"""What Sphinx and the theme leave out of HTML for keyboards and screen readers, put in after the build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

__all__ = ["accessible", "mend"]

_PARAMETERS: Final = re.compile(r"<dl>\n(<dd>.*?)</dl>", re.DOTALL)
"""The parameters of a signature of several lines: a list of definitions that define nothing."""


def accessible(text: str) -> str:
    """A page whose captions have levels, and whose code and tables scroll by keyboard."""

    def plain(match: re.Match[str]) -> str:
        inner = match.group(1).replace("<dd>", '<dd role="presentation">')
        return f'<dl role="presentation">\n{inner}</dl>'

    caption = '<p class="caption" role="heading"'
    text = text.replace(f"{caption}>", f'{caption} aria-level="2">')
    text = text.replace('<div class="highlight"><pre>', '<div class="highlight"><pre tabindex="0">')
    text = text.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')
    return _PARAMETERS.sub(plain, text)


def mend(site: Path) -> None:
    """Rewrites all pages."""
    for path in site.rglob("*.html"):
        path.write_text(accessible(path.read_text(encoding="utf-8")), encoding="utf-8")
