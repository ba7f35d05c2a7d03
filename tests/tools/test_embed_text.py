# SPDX-License-Identifier: Apache-2.0
"""Text that is compiled at run time has all that it includes, once, and nothing that only readers need."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import embed_text  # noqa: E402

ROOT = TOOLS.parent


def test_includes_stand_in_their_place_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.h").write_text('#include <string.h>\n#include "b.h"\nint a; /* a comment */\n')
    (tmp_path / "deep/b.h").write_text('#include "deep/a.h"\nint b; // another\n')
    (tmp_path / "top.cu").write_text(
        '#include <stdint.h>\n#include "deep/b.h"\n#include "deep/a.h"\nchar *c = "/* none */";\n'
    )
    text = embed_text.flatten(tmp_path / "top.cu", [tmp_path])
    assert text.split() == [
        *("#include", "<stdint.h>", "int", "a;", "int", "b;"),
        *("char", "*c", "=", '"/*', "none", '*/";'),
    ]


def test_a_missing_include_is_named(tmp_path: Path) -> None:
    (tmp_path / "top.cu").write_text('#include "nowhere.h"\n')
    with pytest.raises(FileNotFoundError, match=r"top\.cu includes nowhere\.h"):
        embed_text.flatten(tmp_path / "top.cu", [tmp_path])


def test_the_array_is_the_text() -> None:
    made = embed_text.as_array('x = "1";\n', "text", "a.h")
    assert '#include "a.h"' in made and "const char text[] = {" in made
    numbers = re.findall(r"\b(\d+),", made)
    assert bytes(map(int, numbers)) == b'x = "1";\n\0'


@pytest.mark.parametrize("room", ["optim", "fingerprint"])
def test_every_file_of_the_kernels_is_watched(room: str) -> None:
    """What the kernels include is named in the build, so that a change of it makes the text anew."""
    build = (ROOT / f"src/{room}/meson.build").read_text()
    folders = [ROOT / "include", ROOT / "include/memscale", ROOT / "src"]
    pending, seen = [ROOT / f"src/{room}/cuda/kernels.cu"], set()
    while pending:
        file = pending.pop()
        for name in re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE):
            found = next(place / name for place in [file.parent, *folders] if (place / name).is_file())
            if found.resolve() not in seen:
                seen.add(found.resolve())
                pending.append(found)
    assert seen
    for file in seen:
        assert f"'{os.path.relpath(file, ROOT / 'src' / room)}'" in build
