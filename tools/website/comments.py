# SPDX-License-Identifier: Apache-2.0
"""Comments of headers and docstrings as reStructuredText, which Sphinx reads them as."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["literal_code", "readable"]

_CODE: Final = re.compile(r"(?<![`:\\])`([^`\n]+(?:\n[^`\n]+)?)`(?![`_])")
_MARKED: Final = re.compile(r"(``.+?``|:\w+:`[^`]+`)", re.DOTALL)
_ITEM: Final = re.compile(r"\s*([-*]|\d+\.) ")


def literal_code(lines: list[str]) -> list[str]:
    """Text whose code is literal: comments write it in single backticks, which would be a role.

    A name that ends in an underscore, and a star behind a quote, would be marks, too.
    """
    text = _CODE.sub(lambda match: f"``{' '.join(match.group(1).split())}``", "\n".join(lines))
    parts = _MARKED.split(text)
    parts[::2] = [re.sub(r'(?<=")\*', r"\\*", part) for part in parts[::2]]
    parts[::2] = [re.sub(r"(?<=\w)_(?![\w`])", r"\\_", part) for part in parts[::2]]
    return "".join(parts).split("\n")


def readable(lines: list[str]) -> list[str]:
    """A comment of a header: pictures are literal, lists and parts stand apart, `@code` stays as it is."""
    out: list[str] = []
    literal = code = False
    for line in lines:
        if line.strip() in ("@code", "@endcode"):
            code = line.strip() == "@code"
        elif not code:
            literal = _literal_after(out, line, literal)
        out.append(line)
    return out


def _literal_after(out: list[str], line: str, literal: bool) -> bool:
    """Puts in front of a line what it needs; whether it is part of a picture."""
    indent = len(line) - len(line.lstrip())
    before = out[-1] if out else ""
    is_item = _ITEM.match(line) is not None
    if literal:
        if line.strip() and indent < 4:
            out += [""] if before.strip() else []
            return False
        return True
    if indent >= 4 and not is_item and not before.strip():
        out += ["::", ""]
        return True
    if line.strip() and before.strip():
        begins_list = is_item and _ITEM.match(before) is None
        ends_list = indent < len(before) - len(before.lstrip())
        if begins_list or ends_list or line.startswith("Errors:"):
            out.append("")
    return False
