# SPDX-License-Identifier: Apache-2.0
"""Puts C text into a C file, as an array of characters: for text that is compiled where the program runs.

What the text includes by a quoted name stands in its place, once. Comments are left out, and so is what the
included files want of the system: text that is compiled at run time has neither our folders nor its headers.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

_TOKEN = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<[^>\n]+>)[^\n]*\n', re.MULTILINE)
_EMPTY_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_BYTES_A_LINE = 20


def flatten(path: Path, folders: list[Path]) -> str:
    """Returns the text of a file with its quoted includes in place.

    Args:
        path: The file.
        folders: Where quoted includes are looked for, after the folder of the file that has them.

    Raises:
        FileNotFoundError: An include is nowhere.
    """
    seen = {path.resolve()}

    def text_of(file: Path, outermost: bool) -> str:
        text = _TOKEN.sub(_uncommented, file.read_text(encoding="utf-8"))
        return _INCLUDE.sub(lambda match: included(match, file, outermost), text)

    def included(match: re.Match[str], file: Path, outermost: bool) -> str:
        name = match.group(1)
        if name is None:
            return match.group() if outermost else ""
        found = next((there for place in [file.parent, *folders] if (there := place / name).is_file()), None)
        if found is None:
            raise FileNotFoundError(f"{file} includes {name}, which is in none of {[*map(str, folders)]}")
        if found.resolve() in seen:
            return ""
        seen.add(found.resolve())
        return text_of(found, outermost=False)

    return _EMPTY_LINES.sub("\n", text_of(path, outermost=True))


def _uncommented(match: re.Match[str]) -> str:
    return " " if match.group().startswith(("//", "/*")) else match.group()


def as_array(text: str, symbol: str, header: str) -> str:
    """Returns C text that defines ``const char symbol[]``, which ``header`` declares: ``text`` and a zero."""
    numbers = [f"{byte}," for byte in [*text.encode("ascii"), 0]]
    lines = [
        "    " + " ".join(numbers[at : at + _BYTES_A_LINE]) for at in range(0, len(numbers), _BYTES_A_LINE)
    ]
    body = "\n".join(lines)
    top = f'/* Made by tools/embed_text.py. */\n#include "{header}"\n'
    return f"{top}\nconst char {symbol}[] = {{\n{body}\n}};\n"


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-I", dest="folders", type=Path, action="append", default=[])
    parser.add_argument("--symbol", help="name of the array; without it, the text itself is written")
    parser.add_argument("--header", help="declares the array")
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    text = flatten(args.text, args.folders)
    out = as_array(text, args.symbol, args.header) if args.symbol else text
    args.out.write_text(out, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
