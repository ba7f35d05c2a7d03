# SPDX-License-Identifier: Apache-2.0
"""`memscale serve`: becomes a `memscale-server` with the folder of this user.

The program is found, tried, and takes this one's place: signals, output and exit status are its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from memscale.cli.arguments import Options
from memscale.cli.problems import UsageError
from memscale.recording.places import server_folder

__all__ = ["PROGRAM", "command_of", "find_program", "run"]

PROGRAM: Final = "MEMSCALE_SERVER"
"""The environment variable with the path of the program, which goes before all other places."""

_NAME: Final = "memscale-server"
_BUILT: Final = Path("build", "gcc", "server", _NAME)
_LIBRARIES: Final = "libmicrohttpd, jansson, libsodium and SQLite"
_TO_BUILD: Final = (
    "in a checkout of MemScale: sudo apt install libmicrohttpd-dev libjansson-dev libsodium-dev "
    f"libsqlite3-dev, then make library; or set {PROGRAM} to its path"
)
_TRY_SECONDS: Final = 30.0


def run(options: Options) -> int:
    """Becomes the server; returns only by an exception.

    Raises:
        UsageError: the program is not there or cannot run here, or its folder cannot be made.
    """
    program = find_program()
    _try(program)
    folder = Path(options.data).expanduser() if options.data else server_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {str(folder)!r}: {error.strerror or error}") from error
    words = command_of(program, folder, options.listen, options.rest)
    print(f"data is kept in {folder}", flush=True)
    try:
        os.execv(words[0], words)
    except OSError as error:
        raise UsageError(f"cannot start {words[0]}: {error.strerror or error}") from error


def command_of(program: Path, folder: Path, listen: str | None, rest: tuple[str, ...] = ()) -> list[str]:
    """The command line of a server.

    Args:
        program: of it.
        folder: of its data.
        listen: "ADDRESS:PORT"; None: what the server does without, 127.0.0.1:8300.
        rest: further options, as the server has them.
    """
    words = [str(program), "--data", str(folder)]
    if listen is not None:
        words += ["--listen", listen]
    page = _page_of(program)
    if page is not None and "--page" not in rest:
        words += ["--page", str(page)]
    return [*words, *rest]


def find_program() -> Path:
    """The server's program: named by the environment, beside Python, on PATH, or built in the checkout.

    Raises:
        UsageError: there is none; the message says how to come by it.
    """
    named = os.environ.get(PROGRAM, "")
    if named:
        if not _is_program(Path(named)):
            raise UsageError(f"{PROGRAM} is {named!r}, which is no program")
        return Path(named).absolute()
    beside = Path(sys.executable).parent / _NAME
    on_path = shutil.which(_NAME)
    places = [beside, *([Path(on_path)] if on_path else []), *(tree / _BUILT for tree in _checkouts())]
    found = next(filter(_is_program, places), None)
    if found is None:
        where = f"beside {sys.executable}, on PATH, or in a checkout"
        raise UsageError(f"{_NAME} is not installed: not {where}. To build it, {_TO_BUILD}")
    return found.absolute()


def _checkouts() -> list[Path]:
    """Folders that this package may have come from: its own, and the one that the environment lies in."""
    folders = (Path(__file__).resolve().parents[4], Path(sys.prefix).parent)
    return [folder for folder in folders if (folder / "server" / "openapi.yaml").is_file()]


def _page_of(program: Path) -> Path | None:
    """The page's files of a program that was moved or not installed; None: it knows its own."""
    places = [program.parent.parent / "share" / _NAME / "page"]
    places += [tree / "server" / "page" for tree in _checkouts() if program == tree / _BUILT]
    return next((place for place in places if (place / "index.html").is_file()), None)


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _try(program: Path) -> None:
    """Whether it runs here: what a missing library is called, the loader says best."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_TRY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"cannot start {program}: {error}") from error
    if done.returncode != 0 or not done.stdout.startswith(_NAME):
        said = " ".join(done.stderr.split())[:300] or f"exit status {done.returncode}"
        raise UsageError(f"{program} does not run here: {said}; it needs {_LIBRARIES}")
