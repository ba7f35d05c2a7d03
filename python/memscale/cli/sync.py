# SPDX-License-Identifier: Apache-2.0
"""`memscale sync`: sends recorded runs to their server; `memscale runs`: what is there to send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from memscale import _core
from memscale.cli.arguments import Options
from memscale.cli.problems import FITS, UsageError
from memscale.cli.progress import Progress
from memscale.cli.text import safe, table
from memscale.config.checks import check_place
from memscale.errors import ConfigError
from memscale.recording.places import spool_folder, target_of
from memscale.recording.run_folder import RunFolder, run_folders
from memscale.recording.sync import Synced, sync
from memscale.units import format_bytes

__all__ = ["RUNS_VERSION", "SYNC_VERSION", "list_runs", "run"]

SYNC_VERSION: Final = 1
RUNS_VERSION: Final = 1

NOT_ALL: Final = 1
"""Exit status: something waits still."""


def run(options: Options) -> int:
    """Sends, and says what has become of each run.

    Raises:
        UsageError: there is no such folder, or the server's address is none.
    """
    root = _root(options)
    url = server_of(options.server) if options.server else ""
    with Progress() as progress:
        found = list(sync(root, url, 30.0 if options.wait is None else options.wait, progress.say))
    if options.as_json:
        rows = [item.to_dict() for item in found]
        print(json.dumps({"format": "memscale-sync", "version": SYNC_VERSION, "runs": rows}, indent=2))
    else:
        print(safe(_text(found)))
    return FITS if all(item.is_there or item.is_busy for item in found) else NOT_ALL


def server_of(text: str) -> str:
    """The address of a server as it was typed, without a path.

    Raises:
        UsageError: it is none.
    """
    try:
        place = check_place("server", text)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    if place is None or not place.startswith(("http://", "https://")):
        raise UsageError(f'{text!r} is no server: give "http://host:port"')
    return target_of(place).url


def list_runs(options: Options) -> int:
    """Lists the runs of a folder.

    Raises:
        UsageError: there is no such folder.
    """
    rows = [_described(folder) for folder in run_folders(_root(options))]
    if options.as_json:
        print(json.dumps({"format": "memscale-runs", "version": RUNS_VERSION, "runs": rows}, indent=2))
    elif rows:
        print(safe(table([_HEADERS, *map(_cells, rows)], right=(3, 4), indent="", fixed=(0,))))
    else:
        print("no runs")
    return FITS


_HEADERS: Final = ("run", "name", "state", "last step", "on disk", "server")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    step = "" if row["last_step"] is None else str(row["last_step"])
    return row["id"], row["name"], row["state"], step, format_bytes(row["bytes"]), row["server"]


def _root(options: Options) -> Path:
    root = Path(options.place).expanduser() if options.place else spool_folder()
    if options.place and not root.is_dir():
        raise UsageError(f"{options.place!r} is no folder")
    return root


def _described(folder: RunFolder) -> dict[str, Any]:
    try:
        info = folder.info()
    except (OSError, ValueError) as error:
        return {"id": "", "name": folder.path.name, "state": "unreadable", "last_step": None, "bytes": 0,
                "server": "", "problem": str(error)}  # fmt: skip
    size, last, ended = 0, -1, 0
    clients = folder.clients()
    for client in clients:
        ended = 0  # the latest has the last word
        for number in folder.segments(client):
            path = folder.segment(client, number)
            size += path.stat().st_size
            spool = _core.Spool(path)
            while (batch := spool.next()) is not None:
                ended = batch["end_state"] or ended
                for points in json.loads(spool.body(client)).get("points", []):
                    last = max(last, *points["steps"])
    lives = any(folder.is_live(client) for client in clients)
    state = "running" if lives else {1: "finished", 2: "failed"}.get(ended, "lost")
    return {
        "id": info.id, "name": info.name, "project": info.project, "state": state,
        "created_ms": info.created_ms, "attempts": info.attempts, "last_step": last if last >= 0 else None,
        "bytes": size, "server": info.url,
    }  # fmt: skip


def _text(found: list[Synced]) -> str:
    if not found:
        return "nothing to send"
    lines = []
    for item in found:
        said = f"{item.sent.batches} batches with {item.sent.values} numbers"
        if item.is_there:
            said += f" are at {item.server}"
        elif item.is_busy:
            said += " sent; the run goes on"
        else:
            said += f" sent; not all of it: {item.sent.problem or 'some was refused'}"
        lines.append(f"{item.id or item.name}  {said}")
    return "\n".join(lines)
