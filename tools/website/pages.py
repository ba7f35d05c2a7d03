# SPDX-License-Identifier: Apache-2.0
"""The pages of the site: their order and groups, and what a page says of itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["GROUPS", "INDEX", "Group", "Page", "index_page", "page_of", "pages_of", "staged_names"]

INDEX: Final = "docs/index"
"""The root page of the documentation. The landing page stands above it, at the root of the site."""


@dataclass(frozen=True)
class Group:
    """Pages that stand together in the navigation.

    Attributes:
        title: heading of the group.
        names: paths from the root of the tree, without the ending; `*` matches what is not named before.
    """

    title: str
    names: tuple[str, ...]


def _below(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names.split())


GROUPS: Final = (
    Group("Start", ("README", "docs/guide/faq", "docs/guide/troubleshooting")),
    Group("Predict and plan", _below("docs/guide", "cli predict planning config trainers autotuning")),
    Group("Techniques", _below("docs/guide", "techniques offload optimizer gradients weights")),
    Group("Watch a run", _below("docs/guide", "observability recording server operate survival telemetry")),
    Group("Exactness and limits", _below("docs/guide", "exactness equality coverage limits-and-refusals")),
    Group(
        "Measured",
        ("docs/guide/measured", "docs/reference/numbers", *_below("docs/guide", "benchmarks published")),
    ),
    Group(
        "Reference",
        (*_below("docs/reference", "python config errors cli server-api c"), "docs/guide/c-library"),
    ),
    Group("File formats", _below("docs/formats", "graph plan snapshot optimizer-state")),
    Group(
        "How it works",
        ("ARCHITECTURE", *_below("docs/design", "tracing decision recompute server telemetry")),
    ),
    Group(
        "Project", ("docs/adr/README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "tests/standin_cuda/README")
    ),
)
"""The navigation, in its order. A page that no group names fails the build, by Sphinx's own check."""

BELOW: Final = {"docs/adr/README": "docs/adr/[0-9]*", "docs/reference/c": "docs/reference/c/*"}
"""Pages that lie below another in the navigation, as a pattern."""


@dataclass(frozen=True)
class Page:
    """A page that is written in Markdown.

    Attributes:
        name: path from the root, without the ending.
        title: its first heading.
        summary: its first sentence, as plain text; "" where it begins otherwise.
        text: all of it.
    """

    name: str
    title: str
    summary: str
    text: str


_HEADING: Final = re.compile(r"^# (.+)$", re.MULTILINE)
_LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def _plain(text: str) -> str:
    return _LINK.sub(r"\1", " ".join(text.split())).replace("**", "")


def page_of(root: Path, name: str) -> Page:
    """Reads a page.

    Raises:
        ValueError: it has no heading.
    """
    text = (root / f"{name}.md").read_text(encoding="utf-8")
    heading = _HEADING.search(text)
    if heading is None:
        raise ValueError(f"{name}.md has no heading")
    summary = ""
    for part in re.split(r"\n\s*\n", text[heading.end() :]):
        block = part.strip()
        if (block and block[0].isalnum()) or block.startswith(("`", "*", "[")):
            summary = re.split(r"(?<=[.!?])\s|:$", _plain(block), maxsplit=1)[0]
            break
        if block.startswith(("#", "|", "```")):
            break
    return Page(name, _plain(heading.group(1)).replace("`", ""), summary, text)


def staged_names(tree: Path) -> list[str]:
    """Names of all pages in a staged tree that the navigation knows, in its order."""
    names: list[str] = []
    for group in GROUPS:
        for name in group.names:
            names.append(name)
            if name in BELOW:
                found = sorted(path.relative_to(tree) for path in tree.glob(f"{BELOW[name]}.*"))
                names.extend(path.with_suffix("").as_posix() for path in found)
    return names


def pages_of(tree: Path) -> list[Page]:
    """The Markdown pages of a staged tree, in the order of the navigation."""
    return [page_of(tree, name) for name in staged_names(tree) if (tree / f"{name}.md").is_file()]


def index_page(tree: Path) -> str:
    """The root page: the groups, each page with its first sentence, and the navigation."""
    parts = [
        "# MemScale documentation\n",
        "A memory optimizer for PyTorch training: it predicts what a step takes before it runs, and makes it "
        'fit a budget in bytes. <a href="../index.html">Front page</a>.\n',
    ]
    for group in GROUPS:
        parts.append(f"## {group.title}\n")
        parts.extend(_entry(tree, name) for name in group.names)
        listed = "\n".join(f"/{name}" for name in group.names)
        parts.append(f"\n```{{toctree}}\n:hidden:\n:caption: {group.title}\n\n{listed}\n```\n")
    return "\n".join(parts)


def _entry(tree: Path, name: str) -> str:
    link = f"/{name}.md"
    if not (tree / f"{name}.md").is_file():
        return f"- {{doc}}`/{name}`"
    page = page_of(tree, name)
    return f"- [{page.title}]({link})" + (f": {page.summary}" if page.summary else "")
