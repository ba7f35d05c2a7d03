# SPDX-License-Identifier: Apache-2.0
"""The folder of one run: what it is, the spools of its processes, how far each was sent.

<run id>/run.json               what the server is to know first
<client>-00000000.spool …   of one process, see memscale/record.h
<client>.live          locked for as long as that process lives
<client>.sent          {server: the first segment and batch that it has not got}
sender.lock            locked by who sends
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

__all__ = ["Cursor", "RunFolder", "RunInfo", "is_run_id", "run_folders"]

_SPOOL: Final = re.compile(r"([A-Za-z0-9_-]{1,64})-(\d{8})\.spool")
_RUN_ID: Final = re.compile(r"[A-Za-z0-9_-]{8,64}")
_FORMAT: Final = "memscale-run"
_VERSION: Final = 1


def is_run_id(text: str) -> bool:
    """Whether a server takes it as the id of a run."""
    return _RUN_ID.fullmatch(text) is not None


@dataclass(frozen=True)
class RunInfo:
    """What a run is.

    Attributes:
        id: chosen at random by its first process.
        project: name of the project.
        name: of the run.
        created_ms: since 1970.
        url: of the server that it is for; "": none, the folder is the record and stays when it was sent.
        attempts: processes that it has had.
    """

    id: str
    project: str
    name: str
    created_ms: int
    url: str = ""
    attempts: int = 0


@dataclass(frozen=True)
class Cursor:
    """How far a spool was sent: what comes next."""

    segment: int = 0
    sequence: int = 0


class RunFolder:
    """The folder of one run.

    Args:
        path: of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    # ---- what it is ------------------------------------------------------------------------------

    def info(self) -> RunInfo:
        """What the run is.

        Raises:
            ValueError: the folder is none of a run, or of another version.
            OSError: it cannot be read.
        """
        data = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("version") != _VERSION:
            raise ValueError(f"{self.path / 'run.json'} is not one that this version reads")
        try:
            found = RunInfo(**{name: data[name] for name in RunInfo.__dataclass_fields__})
        except KeyError as error:
            raise ValueError(f"{self.path / 'run.json'} lacks {error}") from error
        if not is_run_id(found.id):
            raise ValueError(f"{self.path / 'run.json'} has no id of a run")
        return found

    def begin(self, info: RunInfo) -> RunInfo:
        """Makes the folder, or goes on in it: then what it says of the run stays, with one more attempt.

        Raises:
            OSError: it cannot be made.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(OSError, ValueError):
            before = self.info()
            info = replace(before, url=info.url, attempts=max(before.attempts, info.attempts))
        info = replace(info, attempts=info.attempts + 1)
        self._write("run.json", {"format": _FORMAT, "version": _VERSION, **asdict(info)})
        return info

    # ---- spools ----------------------------------------------------------------------------------

    def clients(self) -> list[str]:
        """Processes that have a spool here, in the order in which they began."""
        found = {match[1] for name in self._names() if (match := _SPOOL.fullmatch(name))}
        return sorted(found, key=_attempt_of)

    def segments(self, client: str) -> list[int]:
        """Numbers of the files of a spool, rising."""
        found = [match for name in self._names() if (match := _SPOOL.fullmatch(name))]
        return sorted(int(match[2]) for match in found if match[1] == client)

    def segment(self, client: str, number: int) -> Path:
        """A file of a spool."""
        return self.path / f"{client}-{number:08d}.spool"

    def live_file(self, client: str) -> Path:
        """The file whose lock says that the process lives."""
        return self.path / f"{client}.live"

    def is_live(self, client: str) -> bool:
        """Whether the process that writes a spool still lives. Not to be asked by that process itself."""
        try:
            descriptor = os.open(self.live_file(client), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EACCES, errno.EAGAIN)
        finally:
            os.close(descriptor)
        return False

    # ---- sending ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def sending(self) -> Iterator[bool]:
        """Whether nobody else sends this run, for the time of a block."""
        descriptor = self.lock_sender()
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def lock_sender(self) -> int | None:
        """A descriptor that holds the right to send until it is closed; None: somebody else has it."""
        descriptor = os.open(self.path / "sender.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        return descriptor

    def cursor(self, client: str, url: str) -> Cursor:
        """How far a spool was sent to a server. What cannot be read is the beginning; the server knows."""
        try:
            found = json.loads((self.path / f"{client}.sent").read_text(encoding="utf-8"))[url]
            return Cursor(int(found["segment"]), int(found["sequence"]))
        except (OSError, ValueError, KeyError, TypeError):
            return Cursor()

    def note_sent(self, client: str, url: str, cursor: Cursor) -> None:
        """Remembers how far a spool was sent."""
        name = f"{client}.sent"
        known: Any = {}
        with contextlib.suppress(OSError, ValueError):
            known = json.loads((self.path / name).read_text(encoding="utf-8"))
        known = known if isinstance(known, dict) else {}
        self._write(name, {**known, url: asdict(cursor)})

    def remove(self) -> None:
        """Removes the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    # ---- files -----------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def _write(self, name: str, data: dict[str, Any]) -> None:
        """A file, whole or not at all."""
        fresh = self.path / f".{name}.{os.getpid()}"
        try:
            fresh.write_text(json.dumps(data), encoding="utf-8")
            os.replace(fresh, self.path / name)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise


def run_folders(root: Path) -> list[RunFolder]:
    """The runs in a folder, or the one that it is, by name."""
    if (root / "run.json").is_file():
        return [RunFolder(root)]
    try:
        found = [entry for entry in sorted(root.iterdir()) if (entry / "run.json").is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [RunFolder(entry) for entry in found]


def _attempt_of(client: str) -> tuple[int, str]:
    """A client's name begins with the number of its attempt."""
    number = client.partition("-")[0]
    return (int(number) if number.isdigit() else 0, client)
