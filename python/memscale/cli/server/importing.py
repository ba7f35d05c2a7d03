# SPDX-License-Identifier: Apache-2.0
"""`memscale import`: brings runs of MLflow or Trackio to a server, or into a folder of runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from memscale.cli.arguments import Options
from memscale.cli.problems import FITS, UsageError
from memscale.cli.progress import Progress
from memscale.cli.sync import NOT_ALL, server_of
from memscale.cli.text import safe
from memscale.recording.foreign import ForeignRun, SourceError
from memscale.recording.foreign_mlflow import mlflow_runs
from memscale.recording.foreign_trackio import trackio_runs
from memscale.recording.importing import Imported, import_into, import_to, importing_alone
from memscale.recording.server import Server
from memscale.recording.tokens import TOKEN, token_for

__all__ = ["IMPORT_VERSION", "run"]

IMPORT_VERSION: Final = 1

_READERS: Final = {"mlflow": mlflow_runs, "trackio": trackio_runs}


def run(options: Options) -> int:
    """Imports, and says what has become of each run.

    Raises:
        UsageError: the source is none, or there is nowhere to bring it.
    """
    runs = _READERS[options.action](Path(options.place).expanduser())
    with Progress() as progress, importing_alone():
        try:
            found = list(_imported(options, runs, progress))
        except SourceError as error:
            raise UsageError(str(error)) from error
    if options.as_json:
        rows = [item.to_dict() for item in found]
        print(json.dumps({"format": "memscale-import", "version": IMPORT_VERSION, "runs": rows}, indent=2))
    else:
        print(safe("\n".join(map(_line, found)) or "no runs"))
    return FITS if not any(item.problem for item in found) else NOT_ALL


def _imported(options: Options, runs: Iterator[ForeignRun], progress: Progress) -> Iterator[Imported]:
    if options.into is not None:
        root = Path(options.into).expanduser()
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {options.into!r}: {error.strerror or error}") from error
        for item in runs:
            progress.say(f"importing {item.name}")
            yield import_into(item, root)
        return
    url = server_of(options.server or "")
    token = token_for(url)
    if not token:
        raise UsageError(f"there is no token for {url}: memscale login {url}, or set {TOKEN}")
    server = Server(url, token)
    try:
        for item in runs:
            progress.say(f"importing {item.name}")
            yield import_to(item, server)
    finally:
        server.close()


def _line(item: Imported) -> str:
    if item.problem:
        return f"{item.id}  {item.name}: {item.points} points; not all of it: {item.problem}"
    if item.was_there:
        return f"{item.id}  {item.name}: is there already"
    return f"{item.id}  {item.name}: {item.points} points"
