# SPDX-License-Identifier: Apache-2.0
"""The one lint entry, for the commit hook, for CI and by hand.

Runs every check, as many at once as there are processors, and prints one line for each, with what it found.
A tool that is not installed is a note on a developer's machine and an error when ``CI=true``. ``--fast``
leaves out two that take more than a few seconds (clang-tidy, cppcheck) and the one that needs a build.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import check_exports
import check_forbidden
import check_layers
import check_rooms
import check_size
import check_tests
import check_words
from source_tree import Finding, files

#: Folders that may hold C code of ours, and Python code.
C_FOLDERS = ("include", "src", "cli", "server", "python/ext", "tests", "bench", "examples")
PYTHON_FOLDERS = ("python", "tools", "tests", "bench", "examples")
#: Sources that clang-tidy and cppcheck read; tests are full of macros that they do not understand.
ANALYSED_FOLDERS = ("src", "cli", "server", "python/ext", "examples/c")
#: Steps of the analyser per function: with its own 225,000 a few functions take most of the time in vain.
ANALYSER_STEPS = 20_000
#: Build folders that are looked at for compile_commands.json and the library, the best first.
BUILD_FOLDERS = ("build/clang", "build/gcc")


class MissingTool(Exception):
    """A program that a check needs is not installed."""


@dataclass(frozen=True)
class Tree:
    """What the checks look at.

    Attributes:
        root: Root of the sources.
        build: Build folder, or None when there is none.
    """

    root: Path
    build: Path | None

    def tool(self, name: str) -> str:
        """Path of a program, from the interpreter's own environment first.

        Raises:
            MissingTool: It is not installed.
        """
        beside = Path(sys.executable).parent / name
        found = str(beside) if beside.is_file() else shutil.which(name)
        if found is None:
            raise MissingTool(f"{name} is not installed; tools/bootstrap test installs it")
        return found

    def folders(self, names: tuple[str, ...]) -> list[str]:
        """Those of the folders that exist."""
        return [name for name in names if (self.root / name).is_dir()]

    def sources(self, suffixes: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
        """Files below the folders, relative to the root."""
        return [
            path.relative_to(self.root).as_posix()
            for name in names
            for path in files(self.root, *suffixes, under=name)
        ]

    def run(self, *command: str) -> str:
        """Runs a program in the root; returns what it said if it failed, otherwise nothing."""
        done = subprocess.run(
            command, cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return done.stdout.strip() or f"exit status {done.returncode}" if done.returncode else ""


def _own(check: Callable[[Path], list[Finding]]) -> Callable[[Tree], str]:
    return lambda tree: "\n".join(str(finding) for finding in sorted(check(tree.root)))


def _exports(tree: Tree) -> str:
    libraries = [] if tree.build is None else sorted((tree.build / "src").glob("libmemscale.so"))
    if not libraries:
        raise MissingTool("libmemscale.so is not built; make test builds it")
    return "\n".join(str(finding) for finding in sorted(check_exports.check(tree.root, libraries[0])))


def _clang_format(tree: Tree) -> str:
    sources = tree.sources((".c", ".h"), C_FOLDERS)
    return tree.run(tree.tool("clang-format"), "--dry-run", "-Werror", *sources) if sources else ""


def _clang_tidy(tree: Tree) -> str:
    tool = tree.tool("clang-tidy")
    if tree.build is None or not (tree.build / "compile_commands.json").is_file():
        raise MissingTool("compile_commands.json is not there; make test makes it")
    commands = json.loads((tree.build / "compile_commands.json").read_text(encoding="utf-8"))
    wanted = set(tree.sources((".c",), ANALYSED_FOLDERS))
    build = str(tree.build)
    known = {os.path.relpath(Path(entry["directory"]) / entry["file"], tree.root) for entry in commands}

    words = ("-Xclang", "-analyzer-config", "-Xclang", f"max-nodes={ANALYSER_STEPS}")
    limit = [f"--extra-arg={word}" for word in words]

    def analyse(source: str) -> str:
        said = tree.run(tool, "--quiet", "-p", build, *limit, source)
        # The analyser tells the whole path that leads to each finding; the findings are enough here.
        lines = [line for line in said.splitlines() if ": error: " in line]
        findings = [os.path.relpath(os.path.join(build, line), tree.root) for line in lines]
        return "\n".join(findings) or said

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = "\n".join(filter(None, pool.map(analyse, sorted(wanted & known))))
    return "\n".join(dict.fromkeys(said.splitlines()))  # what stands in a header is found once per includer


def _cppcheck(tree: Tree) -> str:
    return tree.run(
        tree.tool("cppcheck"),
        "--quiet",
        f"-j{os.cpu_count()}",
        "--std=c11",
        "--enable=warning,performance,portability",
        "--inline-suppr",
        "--suppress=missingIncludeSystem",
        "--suppress=missingReturn",  # the compilers see it, and know macros that return
        "--error-exitcode=1",
        "--template={file}:{line}: {id}: {message}",
        "--library=python",  # what the macros of Python.h stand for
        "-Iinclude",
        "-Isrc",
        *tree.folders(ANALYSED_FOLDERS),
    )


def _ruff_check(tree: Tree) -> str:
    return tree.run(
        tree.tool("ruff"), "check", "--quiet", "--output-format=concise", *tree.folders(PYTHON_FOLDERS)
    )


def _ruff_format(tree: Tree) -> str:
    folders = tree.folders(PYTHON_FOLDERS)
    return tree.run(tree.tool("ruff"), "format", "--check", "--quiet", "--diff", *folders)


def _mypy(tree: Tree) -> str:
    tool = tree.tool("mypy")
    # tools/ is a folder of programs, not a package: its modules import each other by their bare names.
    said = [tree.run(tool, "--strict", "--no-explicit-package-bases", "tools")]
    if (tree.root / "python" / "memscale").is_dir():
        said.append(tree.run(tool, "--strict", "python/memscale"))
    return "\n".join(filter(None, said))


#: Both with what takes longest first, so that the rest runs beside it.
FAST_CHECKS: dict[str, Callable[[Tree], str]] = {
    "mypy": _mypy,
    "layers": _own(check_layers.check),
    "rooms": _own(check_rooms.check),
    "size": _own(check_size.check),
    "words": _own(check_words.check),
    "tests": _own(check_tests.check),
    "forbidden": _own(check_forbidden.check),
    "clang-format": _clang_format,
    "ruff check": _ruff_check,
    "ruff format": _ruff_format,
}

SLOW_CHECKS: dict[str, Callable[[Tree], str]] = {
    "clang-tidy": _clang_tidy,
    "cppcheck": _cppcheck,
    "exports": _exports,
}


def run_check(name: str, check: Callable[[Tree], str], tree: Tree, strict: bool) -> bool:
    """Runs one check and prints its line, then what it said.

    Args:
        name: Shown in the line.
        check: Returns what is wrong, or nothing.
        tree: What it looks at.
        strict: A missing tool is a failure.

    Returns:
        Whether the check passed, or was left out and may be.
    """
    start = time.monotonic()
    try:
        said = check(tree)
        verdict = "failed" if said else "ok"
    except MissingTool as missing:
        said = str(missing)
        verdict = "failed" if strict else "left out"
    line = f"lint {name:<13} {verdict:<8} {time.monotonic() - start:5.1f} s\n"
    print(line + (textwrap.indent(said, "    ") + "\n" if said else ""), end="", flush=True)
    return verdict != "failed"


def main() -> int:
    """Runs the checks that the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="leave out clang-tidy, cppcheck and exports")
    parser.add_argument("--build", type=Path, help="build folder; default: build/clang or build/gcc")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    args = parser.parse_args()
    root = args.root.resolve()
    candidates = [args.build] if args.build else [root / name for name in BUILD_FOLDERS]
    build = next((folder.resolve() for folder in candidates if folder.is_dir()), None)
    checks = FAST_CHECKS if args.fast else SLOW_CHECKS | FAST_CHECKS
    tree = Tree(root, build)
    strict = os.environ.get("CI") == "true"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = [pool.submit(run_check, name, check, tree, strict) for name, check in checks.items()]
    return 0 if all(run.result() for run in running) else 1


if __name__ == "__main__":
    sys.exit(main())
