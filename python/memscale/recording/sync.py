# SPDX-License-Identifier: Apache-2.0
"""Sends what waits in a folder: runs that a server has not got, whole or in part.

Runs that another process sends at the moment are left to it. Two at the same time share the runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memscale.recording.delivery import Delivery, Sent
from memscale.recording.run_folder import RunFolder, RunInfo, run_folders
from memscale.recording.server import Server
from memscale.recording.tokens import token_for

__all__ = ["Synced", "sync"]


@dataclass(frozen=True)
class Synced:
    """What has become of one run.

    Attributes:
        id: of the run; "" where the folder does not say.
        name: of the run.
        server: it was sent to; "": none is known.
        is_busy: another process sends it, or it still runs.
        is_there: the server has all of it.
        sent: in numbers.
    """

    id: str
    name: str
    server: str
    is_busy: bool = False
    is_there: bool = False
    sent: Sent = field(default_factory=Sent)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "id": self.id, "name": self.name, "server": self.server, "is_busy": self.is_busy,
            "is_there": self.is_there, "batches": self.sent.batches, "duplicates": self.sent.duplicates,
            "refused": self.sent.refused, "values": self.sent.values, "problem": self.sent.problem,
        }  # fmt: skip


def sync(
    root: Path, url: str = "", patience: float = 30.0, say: Callable[[str], None] = lambda text: None
) -> Iterator[Synced]:
    """Sends the runs of a folder, one after another.

    Args:
        root: a folder of runs, or that of one run.
        url: where to; "": each to the server that it is for.
        patience: seconds to wait for a server that does not answer, in all.
        say: is given a line about what is being done.
    """
    patience_of: dict[str, float] = {}
    for folder in run_folders(root):
        try:
            info = folder.info()
        except (OSError, ValueError) as error:
            yield Synced("", folder.path.name, "", sent=Sent(problem=str(error)))
            continue
        target = url or info.url
        if not target:
            problem = "the run is for no server: name one with --server"
            yield Synced(info.id, info.name, "", sent=Sent(problem=problem))
            continue
        say(f"sending {info.name}")
        left = patience_of.get(target, patience)
        found, patience_of[target] = _send(folder, info, target, left)
        yield found


def _send(folder: RunFolder, info: RunInfo, url: str, patience: float) -> tuple[Synced, float]:
    """One run. Also what is left of the patience with its server."""
    with folder.sending() as may:
        if not may:
            return Synced(info.id, info.name, url, is_busy=True), patience
        server = Server(url, token_for(url))
        delivery = Delivery(folder, server)
        try:
            patience = _deliver(delivery, patience)
            is_busy = any(folder.is_live(client) for client in folder.clients())
            is_there = not delivery.sent.problem and not delivery.sent.refused and not is_busy
            if is_there:
                delivery.clean_up()
        finally:
            server.close()
        return Synced(info.id, info.name, url, is_busy, is_there, delivery.sent), patience


def _deliver(delivery: Delivery, patience: float) -> float:
    while True:
        while delivery.advance():
            pass
        if not delivery.wait or delivery.wait > patience:
            return 0.0 if delivery.wait else patience
        patience -= delivery.wait
        time.sleep(delivery.wait)
