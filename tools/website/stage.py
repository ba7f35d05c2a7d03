# SPDX-License-Identifier: Apache-2.0
"""The tree that the site is built from: the pages and what they link to, in the repository's layout.

So a relative link means the same on the site, in a checkout and on a host of repositories.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["ROOT_PAGES", "anchors_of", "links_of", "source_pages", "stage"]

ROOT_PAGES: Final = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "tests/standin_cuda/README.md",
)
"""Pages of the site that lie outside of docs/."""

_FENCE: Final = re.compile(r"^(```+|~~~+).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE: Final = re.compile(r"`[^`\n]*`")
_LINK: Final = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING: Final = re.compile(r"^#{1,6} (.+?)\s*#*$", re.MULTILINE)


def source_pages(root: Path) -> list[str]:
    """The pages that are written by hand, as paths from the root."""
    pages = [path.relative_to(root).as_posix() for path in sorted((root / "docs").rglob("*.md"))]
    return [*ROOT_PAGES, *(page for page in pages if not page.startswith("docs/_"))]


def _prose(text: str) -> str:
    return _CODE.sub("", _FENCE.sub("", text))


def links_of(text: str, page: str) -> Iterator[tuple[str, str]]:
    """The links of a page that stay within the tree: path from the root, and anchor ("": none)."""
    for match in _LINK.finditer(_prose(text)):
        target, _, anchor = match.group(1).partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        yield (
            (posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page),
            anchor,
        )


def anchors_of(text: str) -> set[str]:
    """The anchors that hosts of repositories and the site give to the headings of a page."""
    seen: dict[str, int] = {}
    anchors = set()
    for match in _HEADING.finditer(_FENCE.sub("", text)):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", match.group(1)).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        anchors.add(f"{slug}-{count}" if count else slug)
    return anchors


def stage(root: Path, tree: Path) -> None:
    """Copies all pages, and the files that they link to. What the tree had before goes.

    Raises:
        FileNotFoundError: a page links to what is not there.
    """
    shutil.rmtree(tree, ignore_errors=True)
    pages = source_pages(root)
    wanted = set(pages)
    for page in pages:
        for target, _ in links_of((root / page).read_text(encoding="utf-8"), page):
            if not (root / target).is_file():
                raise FileNotFoundError(f"{page} links to {target}, which is no file")
            wanted.add(target)
    for path in sorted(wanted):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, tree / path)
