# SPDX-License-Identifier: Apache-2.0
"""Takes ordering edges out of the C core, one at a time, and shows that the tests fail without each.

A test suite that passes says little about an engine whose bugs are races: it has to be seen failing. Each
entry of `tests/mutants/*.yaml` names a piece of source and what to put in its place. The tree is copied,
built once, and rebuilt for each entry; the named test programs then have to fail or hang. A line for each
says which test has seen it first.

    python tools/mutants.py                 all
    python tools/mutants.py --only buffer   those whose name contains a word
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("include", "src", "cli", "server", "tests", "tools", "meson.build", "meson.options")

#: Programs that judge the mutants of a file of tests/mutants, with their arguments; the quickest first.
JUDGES = {
    "offload": (
        ("tests/unit/offload/test_offload_ahead",),
        ("tests/unit/offload/test_offload_disk",),
        ("tests/unit/offload/test_offload",),
        ("tests/unit/offload/test_offload_card", "build/tests/fake_cuda/libfake_cuda.so"),
        ("tests/unit/offload/test_offload_threads",),
        ("tests/unit/offload/test_offload_soak", "150", "1"),
    ),
}
LIBRARY = "tests/fake_cuda/libfake_cuda.so"
SLOW_CARD = {
    "FAKE_CUDA_SEED": "7",
    "FAKE_CUDA_DELAY_MOST_NS": "300000",
    "FAKE_CUDA_BYTES_PER_SECOND": "200000000",
    "FAKE_CUDA_SPLIT_PPM": "500000",
}
SECONDS = 30
"""A judge that takes longer hangs; unchanged, each takes a few seconds."""
_RUN = re.compile(r"\[ RUN +\] (\w+)")
_FAILED = re.compile(r"\[ +FAILED +\] (\w+)")


@dataclass(frozen=True)
class Mutant:
    """One edge taken away."""

    suite: str
    name: str
    file: str
    old: str
    new: str


def read() -> list[Mutant]:
    """All entries, in order."""
    mutants = []
    for path in sorted((ROOT / "tests" / "mutants").glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text()):
            mutants.append(
                Mutant(path.stem, entry["name"], entry["file"], entry["old"].strip(), entry["new"])
            )
    return mutants


@contextmanager
def changed(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Has the source changed inside the block.

    Raises:
        ValueError: `old` is not in the file exactly once.
    """
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name!r}: {mutant.file} has `old` {text.count(mutant.old)} times, not once")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(text)


def build(tree: Path) -> None:
    """Builds the judges of the copied tree.

    Raises:
        CalledProcessError: it does not compile; the compiler's words are on standard output.
    """
    programs = [LIBRARY, *(program for judges in JUDGES.values() for program, *_ in judges)]
    run = subprocess.run(["ninja", "-C", str(tree / "build"), *programs], stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        print(run.stdout)
        run.check_returncode()


def test_in(output: bytes | None) -> str:
    """The first test that failed, or the one that ran last."""
    text = (output or b"").decode(errors="replace")
    names = _FAILED.findall(text) or _RUN.findall(text)[-1:]
    return names[0] if names else "?"


def verdict(tree: Path, suite: str) -> str:
    """What the judges say: "" if all pass, else which test failed and how."""
    for program, *arguments in JUDGES[suite]:
        name = Path(program).name
        try:
            run = subprocess.run(
                [str(tree / "build" / program), *arguments],
                cwd=tree,
                env=os.environ | SLOW_CARD,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired as stopped:
            return f"{name}: {test_in(stopped.stdout)} hangs"
        if run.returncode != 0:
            how = "fails" if run.returncode > 0 else f"ends by signal {-run.returncode}"
            return f"{name}: {test_in(run.stdout)} {how}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="words in the names of the mutants to try")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, tree / name)
        without = ["-Dcli=false", "-Dserver=disabled", "-Dwerror=false"]
        setup = ["meson", "setup", str(tree / "build"), str(tree), *without]
        subprocess.run(setup, check=True, stdout=subprocess.DEVNULL)
        build(tree)
        for suite in JUDGES:
            if words := verdict(tree, suite):
                print(f"unchanged, {words}")
                return 1
        alive = [mutant for mutant in read() if only in mutant.name and not try_one(tree, mutant)]
    return 1 if alive else 0


def try_one(tree: Path, mutant: Mutant) -> bool:
    """Whether the tests see that the edge is gone."""
    with changed(tree, mutant):
        build(tree)
        words = verdict(tree, mutant.suite)
    print(f"{mutant.suite}: {mutant.name:70} {words or 'NOT SEEN'}", flush=True)
    return bool(words)


if __name__ == "__main__":
    sys.exit(main())
