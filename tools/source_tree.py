# SPDX-License-Identifier: Apache-2.0
"""What the checkers share: finding source files, reading C without its comments, reporting findings.

Every checker is a function from the root of a source tree to a list of findings, so that it can be run on
the project and, in its tests, on a tree with one planted violation.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: Folders that hold no sources of ours, wherever they are. Hidden folders are skipped too.
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist", "subprojects", "node_modules"})

_C_TOKEN = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'""", re.DOTALL | re.VERBOSE
)
_DIRECTIVE = re.compile(r"^[ \t]*#.*(?:\\\n.*)*", re.MULTILINE)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)


@dataclass(frozen=True, order=True)
class Finding:
    """One violation of a rule.

    Attributes:
        path: File, relative to the root of the tree.
        line: 1-based line.
        message: What is wrong and what to do instead.
    """

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def files(root: Path, *suffixes: str, under: str = "") -> Iterator[Path]:
    """Yields the files below a folder that end in one of the suffixes, in a fixed order.

    Args:
        root: Root of the source tree.
        *suffixes: Ends of file names, such as ``.c`` or ``meson.build``.
        under: Folder relative to the root; a missing one yields nothing.
    """
    for folder, folders, names in os.walk(root / under):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if not _is_skipped(name, here == root))
        for name in sorted(names):
            if name.endswith(suffixes) and (here / name).is_file():
                yield here / name


def _is_skipped(folder: str, at_root: bool) -> bool:
    return folder in SKIPPED_FOLDERS or folder.startswith(".") or (at_root and folder.startswith("build"))


def blank(match: re.Match[str]) -> str:
    """Blanks for what a pattern matched; lines and columns of the rest stay."""
    return re.sub(r"[^\n]", " ", match.group())


def blank_c(text: str) -> str:
    """Blanks comments, strings, character constants and directives of C text: what is left is code."""
    return _DIRECTIVE.sub(blank, _C_TOKEN.sub(blank, text))


def includes(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yields line, name and whether it is quoted, for each include directive of C text."""
    code = _C_TOKEN.sub(lambda match: blank(match) if match.group().startswith("/") else match.group(), text)
    for match in _INCLUDE.finditer(code):
        yield line_of(text, match.start(2)), match.group(2), match.group(1) == '"'


def parse_python(text: str) -> ast.Module:
    """Syntax tree of Python text; an empty one for text that is none, which ruff reports."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def line_of(text: str, offset: int) -> int:
    """Line of an offset, 1-based."""
    return text.count("\n", 0, offset) + 1


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach each other: Tarjan's strongly connected components of more than one."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for target in sorted(arrows.get(module, ())):
            if target not in number:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], number[target])
        if low[module] == number[module]:
            at = stack.index(module)
            part, stack[at:] = stack[at:], []
            if len(part) > 1:
                found.append(sorted(part))

    for module in sorted(arrows):
        if module not in number:
            visit(module)
    return found


def main(check: Callable[[Path], list[Finding]], description: str | None) -> int:
    """Runs a checker from the command line: prints its findings, returns the exit status.

    Args:
        check: The checker.
        description: Text of ``--help``.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    findings = check(parser.parse_args().root.resolve())
    for finding in sorted(findings):
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit("source_tree.py is a module of the checkers and does nothing by itself")
