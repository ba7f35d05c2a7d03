# SPDX-License-Identifier: Apache-2.0
"""For language models: `llms.txt`, a list of the pages, and `llms-full.txt`, all of their text."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from website import pages, reference

__all__ = ["full_text", "overview", "write"]

ABOUT = (
    "MemScale is a memory optimizer for PyTorch training on Linux. It predicts the peak memory of a training "
    "step before the step runs, and makes the step fit a budget in bytes; loss and gradients keep every bit."
)


def overview(tree: Path) -> str:
    """The list: a heading for each group, a line for each page."""
    parts = [f"# MemScale\n\n> {ABOUT}\n\nAll pages in one file: [llms-full.txt](llms-full.txt)\n"]
    for group in pages.GROUPS:
        lines = []
        for name in group.names:
            if (tree / f"{name}.md").is_file():
                page = pages.page_of(tree, name)
                lines.append(f"- [{page.title}]({name}.html)" + (f": {page.summary}" if page.summary else ""))
            else:
                title = (tree / f"{name}.rst").read_text(encoding="utf-8").partition("\n")[0]
                lines.append(f"- [{title}]({name}.html)")
        parts.append(f"## {group.title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _python_text() -> str:
    """Signatures and docstrings of the public names."""
    import memscale

    parts = ["# Python\n"]
    names = [(memscale, name) for name in memscale.__all__ if not name.startswith("__")]
    for name in reference.MODULES:
        module = sys.modules[f"memscale.{name}"]
        names += [(module, inner) for inner in module.__all__]
    for owner, name in names:
        thing = getattr(owner, name)
        call = "" if inspect.ismodule(thing) else _signature(thing)
        parts.append(
            f"## {owner.__name__}.{name}\n\n```python\n{name}{call}\n```\n\n{inspect.getdoc(thing) or ''}\n"
        )
    return "\n".join(parts)


def _signature(thing: object) -> str:
    try:
        return str(inspect.signature(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""


def full_text(root: Path, tree: Path) -> str:
    """Every page, docstring and header, one after another."""
    parts = [f"<!-- {page.name}.html -->\n\n{page.text.strip()}\n" for page in pages.pages_of(tree)]
    parts.append(_python_text())
    for header in reference.headers_of(root):
        text = (root / "include/memscale" / header).read_text(encoding="utf-8")
        parts.append(f"# {header}\n\n```c\n{text}```\n")
    return "\n".join(parts)


def write(root: Path, tree: Path, site: Path) -> None:
    """Puts both files at the root of the site."""
    (site / "llms.txt").write_text(overview(tree), encoding="utf-8")
    (site / "llms-full.txt").write_text(full_text(root, tree), encoding="utf-8")
