# SPDX-License-Identifier: Apache-2.0
"""Checks the caps on the size of files and functions that ARCHITECTURE.md sets.

C functions are found with a brace scanner, not a parser: a function is a brace at the outermost level that
follows a closing parenthesis. That suits code formatted by the project's .clang-format.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from source_tree import Finding, blank, blank_c, files, line_of, main, parse_python

C_FILE_LINES = 800
HEADER_LINES = 400
PYTHON_FILE_LINES = 600
TEST_FILE_LINES = 700
FUNCTION_LINES = 60
CASE_FUNCTION_LINES = 120
"""In tests and benchmarks, where a long function is a list of cases."""
C_PARAMETERS = 7
LIBRARY_SIGNATURES = frozenset({"server/http/http_server.c: handle"})
"""Functions whose parameters a library has chosen."""

_LINKAGE = re.compile(r"\bextern\s*\{")  # what blank_c leaves of: extern "C" {
_SIGNATURE = re.compile(r"([A-Za-z_]\w*)\s*\($")


def check(root: Path) -> list[Finding]:
    """Returns every file and function of the tree at ``root`` that is over its cap."""
    findings = []
    for path in files(root, ".c", ".h", ".py"):
        where = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        cap = _file_cap(where)
        if lines > cap:
            findings.append(Finding(where, cap + 1, f"{lines} lines, the cap is {cap}: split it"))
        functions = _python_functions(text) if path.suffix == ".py" else _c_functions(text)
        for line, name, length, parameters in functions:
            most = CASE_FUNCTION_LINES if where.startswith(("tests/", "bench/")) else FUNCTION_LINES
            if length > most:
                message = f"{name} has {length} lines, the cap is {most}: split it"
                findings.append(Finding(where, line, message))
            if parameters > C_PARAMETERS and f"{where}: {name}" not in LIBRARY_SIGNATURES:
                message = f"{name} has {parameters} parameters, the cap is {C_PARAMETERS}: pass a struct"
                findings.append(Finding(where, line, message))
    return findings


def _file_cap(where: str) -> int:
    if where.startswith("tests/"):
        return TEST_FILE_LINES
    return {".c": C_FILE_LINES, ".h": HEADER_LINES}.get(Path(where).suffix, PYTHON_FILE_LINES)


def _python_functions(text: str) -> Iterator[tuple[int, str, int, int]]:
    """Yields line, name, lines without the docstring, and 0: Python has keywords for many parameters."""
    for node in ast.walk(parse_python(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                docstring = node.body[0]
                length -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
            yield node.lineno, node.name, length, 0


def _c_functions(text: str) -> Iterator[tuple[int, str, int, int]]:
    """Yields line, name, lines from the name to the closing brace, and parameter count."""
    code = _LINKAGE.sub(blank, blank_c(text))
    depth = 0
    opened: tuple[int, str, int] | None = None
    for match in re.finditer(r"[{}]", code):
        if match.group() == "{":
            if depth == 0:
                opened = _signature(code, match.start())
            depth += 1
            continue
        depth = max(depth - 1, 0)
        if depth == 0 and opened is not None:
            start, name, parameters = opened
            first = line_of(code, start)
            yield first, name, line_of(code, match.start()) - first + 1, parameters
            opened = None


def _signature(code: str, brace: int) -> tuple[int, str, int] | None:
    """Offset of the name, name and parameter count of the function whose body opens at ``brace``."""
    head = code[:brace].rstrip()
    if not head.endswith(")"):
        return None
    depth = 0
    for offset in range(len(head) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(head[offset], 0)
        if depth == 0:
            break
    match = _SIGNATURE.search(code[: offset + 1])
    if match is None:
        return None
    return match.start(1), match.group(1), _parameter_count(head[offset + 1 : -1])


def _parameter_count(parameters: str) -> int:
    if parameters.strip() in ("", "void"):
        return 0
    depth = 0
    count = 1
    for char in parameters:
        depth += {"(": 1, ")": -1}.get(char, 0)
        count += char == "," and depth == 0
    return count


if __name__ == "__main__":
    sys.exit(main(check, __doc__))
