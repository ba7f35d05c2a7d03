# SPDX-License-Identifier: Apache-2.0
"""Checks for what must not stand in the sources.

- In src/: calls that allocate, print, end the process or read the environment (base/context.c, which owns
  the default allocator, may allocate; base/invariant.h asserts for all), and headers of Python, PyTorch,
  databases and JSON.
- In every source file: a missing SPDX line, and marks of unfinished work.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from source_tree import Finding, blank_c, files, includes, line_of, main

SPDX = "SPDX-License-Identifier: Apache-2.0"

#: Files that may call what the others may not: the one that meets the C library's allocator and, one day, the
#: environment; and the one that invariants are stated with.
DOORKEEPERS = {
    "src/base/context.c": frozenset({"realloc", "free", "getenv"}),
    "src/base/invariant.h": frozenset({"assert", "assert.h"}),
}

SOURCE_SUFFIXES = (".c", ".h", ".cu", ".py", ".pyi", "meson.build")

_CALL = re.compile(
    r"(?<![\w.>])(malloc|calloc|realloc|reallocarray|aligned_alloc|posix_memalign|strdup|strndup|alloca|free"
    r"|printf|fprintf|vprintf|vfprintf|dprintf|puts|fputs|putchar|perror|abort|exit|_exit|_Exit|quick_exit"
    r"|getenv|secure_getenv|setenv|system|assert)\s*\("
)
_STREAM = re.compile(r"(?<!\w)(stdout|stderr)(?!\w)")
_HEADER = re.compile(r"Python\.h$|^(torch|ATen|c10|jansson|sqlite3|cmocka|pybind11)\b|^assert\.h$")
_MARK = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")


def check(root: Path) -> list[Finding]:
    """Returns everything in the tree at ``root`` that must not be there."""
    findings: list[Finding] = []
    for path in files(root, *SOURCE_SUFFIXES):
        where = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        findings += _check_any(where, text)
        if where.startswith("src/") and path.suffix in (".c", ".h"):
            findings += _check_src(where, text)
    return findings


def _check_any(where: str, text: str) -> Iterator[Finding]:
    lines = text.splitlines() or [""]
    first = lines[1] if lines[0].startswith("#!") and len(lines) > 1 else lines[0]
    if SPDX not in first:
        yield Finding(where, 1, f"the first line does not say {SPDX}")
    for number, line in enumerate(lines, 1):
        for match in _MARK.finditer(line):
            yield Finding(where, number, f"{match.group()}: finish it, or record it as an issue")


def _check_src(where: str, text: str) -> Iterator[Finding]:
    allowed = DOORKEEPERS.get(where, frozenset())
    for line, name, _ in includes(text):
        if _HEADER.search(name) and name not in allowed:
            yield Finding(where, line, f"includes {name}; the core knows only the C library")
    code = blank_c(text)
    for match in _CALL.finditer(code):
        line, name = line_of(code, match.start()), match.group(1)
        if name not in allowed:
            instead = "memory: base/alloc.h, failures: base/error.h, invariants: base/invariant.h"
            yield Finding(where, line, f"calls {name}; {instead}")
    for match in _STREAM.finditer(code):
        yield Finding(where, line_of(code, match.start()), f"uses {match.group()}; the library never prints")


if __name__ == "__main__":
    sys.exit(main(check, __doc__))
