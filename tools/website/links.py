# SPDX-License-Identifier: Apache-2.0
"""Links of the finished site: each leads to something, and nothing is loaded from elsewhere."""

from __future__ import annotations

import posixpath
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = ["broken_links"]

LOADED: Final = {
    "img": "src",
    "script": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
}
"""Elements whose content a browser fetches by itself."""


class _Page(HTMLParser):
    """Anchors, links and loaded files of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors.update(filter(None, (values.get("id"), values.get("name") if tag == "a" else None)))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _is_outside(link: str) -> bool:
    parts = urlsplit(link)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def broken_links(site: Path) -> list[str]:
    """What is wrong, a line each."""
    pages = {path.relative_to(site).as_posix(): _read(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for name, page in pages.items():
        outside = [
            link for link in page.loaded if urlsplit(link).netloc or urlsplit(link).scheme not in ("", "data")
        ]
        found += [f"{name} loads {link} from elsewhere" for link in outside]
        for link in dict.fromkeys([*page.links, *(link for link in page.loaded if link not in outside)]):
            why = _broken(site, pages, name, link)
            if why:
                found.append(f"{name} links to {link}: {why}")
    return found


def _broken(site: Path, pages: dict[str, _Page], name: str, link: str) -> str:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    target = name
    if parts.path:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path)))
    if not (site / target).is_file():
        return "no such file"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "no such anchor"
    return ""
