# SPDX-License-Identifier: Apache-2.0
"""Public headers in the form that hawkmoth documents: it knows comments before declarations only.

A comment behind a declaration (`int a; /**< text */`) would be taken for the next one's. It is moved in
front, and what has no comment gets an empty one, so that no member of a struct is missing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

__all__ = ["documentable", "write_headers"]

_BEHIND: Final = re.compile(
    r"^([ \t]*)(\S.*?)[ \t]*/\*\*<[ \t]*(.*?)[ \t]*\*/[ \t]*$", re.MULTILINE | re.DOTALL
)
_BEGIN: Final = re.compile(r"^typedef (?:struct|enum|union)\b.*\{$")
_TOP: Final = re.compile(r"^(?:MSC_API|typedef) .*|^#define MSC_(?!API|NODISCARD)\w+ ")
_MACRO: Final = re.compile(r"^#define .*[^\\]$")
_EMPTY: Final = "/** */"


def _in_front(match: re.Match[str]) -> str:
    indent, declaration, words = match.groups()
    if "\n" in declaration:  # the comment is of the last line alone
        head, _, declaration = declaration.rpartition("\n")
        lead = declaration[: len(declaration) - len(declaration.lstrip())]
        return f"{indent}{head}\n{lead}/** {' '.join(words.split())} */\n{declaration}"
    return f"{indent}/** {' '.join(words.split())} */\n{indent}{declaration}"


def documentable(text: str) -> str:
    """A header with each comment in front of what it is about."""
    lines: list[str] = []
    inside = False
    commented = True
    for line in _BEHIND.sub(_in_front, text).splitlines():
        bare = line.strip()
        begins = _BEGIN.match(line) is not None
        is_member = inside and bool(bare) and not bare.startswith(("/*", "*", "}"))
        if line.startswith("#ifndef MEMSCALE_"):
            lines.append("/* The comment above is the file's, not the guard's. */")
        if begins or is_member or _TOP.match(line):
            if not commented and not (inside and bare.startswith("#")):
                lines.append(line[: len(line) - len(line.lstrip())] + _EMPTY)
            # What a macro makes stands in the macro; a declaration may go on in the next line.
            commented = (inside and bare.startswith("#")) or (
                not bare.endswith((";", ",", "{")) and not _MACRO.match(line)
            )
        else:
            commented = bare.endswith("*/")
        inside = begins or (inside and not line.startswith("}"))
        lines.append(line)
    return "\n".join(lines) + "\n"


def write_headers(root: Path, folder: Path) -> None:
    """Puts all public headers, in that form, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((root / "include/memscale").glob("*.h")):
        (folder / path.name).write_text(documentable(path.read_text(encoding="utf-8")), encoding="utf-8")
