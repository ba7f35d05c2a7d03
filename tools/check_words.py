# SPDX-License-Identifier: Apache-2.0
"""Checks that sources and pages use the project's vocabulary: CONTRIBUTING.md has the table.

It reads the names, comments and messages of the product, and its pages. History (docs/adr, CHANGELOG.md) and
the tests stay as they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from source_tree import Finding, files, line_of, main

#: What is retired, and what to say instead.
RETIRED: dict[str, str] = {
    r"page-locked": "pinned",
    r"(second|another) run of the (forward|module)|(run|runs|ran) (it )?again|second run": "recompute",
    r"plan(s|ned|ning)? (it )?anew": "re-plan",
    r"shelf|shelves": "state store",
    r"(take|takes|taken|took) over (an|the) optimizer": "patch",
    r"whoever": "who, or the name of the caller",
    r"of which": "whose, or two sentences",
    r"(is|are|was|were|be|been) told( apart)?": "is given, reads, is logged; is distinguished",
    r"path techniques?": "optimizer-side technique",
    r"getting along": "interoperability",
    r"(is|are|was|were|be|stays?|lies?|sends?|sent|state|weights|gradients) away": "offloaded",
    r"(is|are|was|were|be|lies?|stays?|weights?) at home": "offloaded, in its backing store",
    r"lent|spared": "resident, borrowed",
    r"birth|hurry|on purpose": "create, flush, fault injection",
}
_SPACE = r"[\s*#/]+"  # a phrase may go on in the next line, behind the mark of a comment


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-])(?:{pattern.replace(' ', _SPACE)})(?![\w-])", re.IGNORECASE)


_RETIRED = {_compiled(pattern): say for pattern, say in RETIRED.items()}

FOLDERS = ("src", "include", "python", "cli", "server", "docs/guide", "docs/design", "docs/formats")
PAGES = ("README.md", "ARCHITECTURE.md")
SUFFIXES = (".c", ".h", ".cu", ".py", ".pyi", ".md")


def check(root: Path) -> list[Finding]:
    """Returns every retired word in the product and on its pages."""
    paths = [path for folder in FOLDERS for path in files(root, *SUFFIXES, under=folder)]
    paths += [root / name for name in PAGES if (root / name).is_file()]
    return [finding for path in paths for finding in _in_file(path.relative_to(root).as_posix(), path)]


def _in_file(where: str, path: Path) -> Iterator[Finding]:
    text = path.read_text(encoding="utf-8")
    for pattern, say in _RETIRED.items():
        for match in pattern.finditer(text):
            yield Finding(
                where, line_of(text, match.start()), f"{' '.join(match.group().split())!r}: say {say}"
            )


if __name__ == "__main__":
    sys.exit(main(check, __doc__))
