# SPDX-License-Identifier: Apache-2.0
"""Checks that the shared library exports its public functions and nothing else.

Public is what a header declares with MSC_API. The library's dynamic symbols are read with ``nm``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from source_tree import Finding, blank_c, files, line_of

_DECLARATION = re.compile(r"\bMSC_API\b[^;{}]*?\b(\w+)\s*\(")


def declared(root: Path) -> dict[str, Finding]:
    """Returns each function that a public header declares with MSC_API, with its place."""
    functions = {}
    for path in files(root, ".h", under="include"):
        where = path.relative_to(root).as_posix()
        code = blank_c(path.read_text(encoding="utf-8"))
        for match in _DECLARATION.finditer(code):
            name = match.group(1)
            functions[name] = Finding(where, line_of(code, match.start(1)), f"{name} is not exported")
    return functions


def exported(library: Path) -> list[str]:
    """Returns the names of the dynamic symbols that a shared library defines.

    Raises:
        subprocess.CalledProcessError: ``nm`` cannot read the file.
    """
    command = ["nm", "--dynamic", "--defined-only", "--extern-only", "--format=posix", str(library)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line.split()[0].split("@")[0] for line in output.splitlines() if line.strip()]


def check(root: Path, library: Path) -> list[Finding]:
    """Compares what the headers declare with what the library exports."""
    functions = declared(root)
    symbols = exported(library)
    findings = [place for name, place in functions.items() if name not in symbols]
    for symbol in sorted(set(symbols) - set(functions)):
        if not symbol.startswith("msc_"):
            problem = "does not start with msc_"
        elif symbol.startswith("msc__"):
            problem = "is private"
        else:
            problem = "is in no public header"
        findings.append(Finding(library.name, 0, f"exports {symbol}, which {problem}"))
    if not functions:
        findings.append(Finding("include", 0, "no function is declared with MSC_API"))
    return findings


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("library", type=Path, help="libmemscale.so")
    args = parser.parse_args()
    findings = check(args.root.resolve(), args.library)
    for finding in sorted(findings):
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(_main())
