# SPDX-License-Identifier: Apache-2.0
"""Where recordings go: what `Config.record` names, and the folders of the user that they are kept in."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = [
    "RECORD",
    "Target",
    "config_folder",
    "record_setting",
    "script_name",
    "server_folder",
    "spool_folder",
    "target_of",
]

RECORD: Final = "MEMSCALE_RECORD"
"""The environment variable that overrides `Config.record`."""

_OFF: Final = ("", "0", "off", "no", "false", "none")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_MOST_NAME_BYTES: Final = 128


@dataclass(frozen=True)
class Target:
    """Where a run is recorded.

    Attributes:
        url: of the server, without a path; "": a folder.
        root: folder of runs: the user's own, or the one in which they wait for the server.
        project: that the runs belong to.
    """

    url: str
    root: Path
    project: str


def record_setting(configured: str | None) -> str | None:
    """What is in force: the environment's word, else the configuration's."""
    word = os.environ.get(RECORD)
    if word is None:
        return configured
    return None if word.strip().lower() in _OFF else word.strip()


def target_of(record: str) -> Target:
    """What a value of `Config.record` names: "http://host:port/project", or a folder.

    The folder's project is named after the script, and so is that of a URL without a path.
    """
    if not record.startswith(("http://", "https://")):
        return Target("", Path(record).expanduser(), script_name())
    parts = urlsplit(record)
    project = name_of(unquote(parts.path.strip("/"))) if parts.path.strip("/") else script_name()
    return Target(f"{parts.scheme}://{parts.netloc}", spool_folder(), project)


def script_name() -> str:
    """Name of the program that runs, without its folder."""
    return name_of(Path(sys.argv[0] if sys.argv else "").stem.strip("-")) or "python"


def name_of(text: str) -> str:
    """A text as the server takes names: no control characters, at most 128 bytes of UTF-8."""
    clean = _CONTROL.sub(" ", text.encode("utf-8", "replace").decode()).strip()
    return clean.encode()[:_MOST_NAME_BYTES].decode("utf-8", "ignore").strip()


def spool_folder() -> Path:
    """Where runs wait for their server."""
    return _home("XDG_STATE_HOME", ".local/state") / "spool"


def server_folder() -> Path:
    """Where a server that the user starts keeps its data."""
    return _home("XDG_STATE_HOME", ".local/state") / "server"


def config_folder() -> Path:
    """Where tokens are kept."""
    return _home("XDG_CONFIG_HOME", ".config")


def _home(variable: str, otherwise: str) -> Path:
    base = os.environ.get(variable, "")
    return (Path(base) if base.startswith("/") else Path.home() / otherwise) / "memscale"
