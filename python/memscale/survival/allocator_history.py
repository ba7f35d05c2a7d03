# SPDX-License-Identifier: Apache-2.0
"""What a card's allocator did before a step ran out of memory, as PyTorch's own snapshot.

PyTorch records it from the first forward of a wrapped model that asks for it, unless the program records
already, and as long as one does. The file is what `torch.cuda.memory._dump_snapshot` writes: for
https://pytorch.org/memory_viz and `memscale snapshot`.

Cost: recording takes the Python stack of each allocation, which blocks from the allocator's cache feel most.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import Final

import torch

_MOST_EVENTS: Final = 100_000
"""The latest of them are kept: some steps of a large model, and 20 to 50 MiB of a file."""


class AllocatorHistory:
    """The recording of this process, as long as somebody wants it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders = 0
        self._is_ours = False

    def put(self) -> None:
        """One more wants it."""
        with self._lock:
            self._holders += 1
            if self._holders == 1 and not _is_recording():
                torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_EVENTS)
                self._is_ours = True

    def remove(self) -> None:
        """One less does. After the last one it ends, if it was begun here."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._is_ours:
                self._is_ours = False
                torch.cuda.memory._record_memory_history(enabled=None)

    def write(self, folder: str) -> str:
        """Writes it.

        Args:
            folder: is made if it is not there. The file of this process in it has the latest snapshot.

        Returns:
            Where it is, or why it is not written, in words for a report.
        """
        path = os.path.join(folder, f"oom-{socket.gethostname()}-{os.getpid()}.pickle")
        unfinished = f"{path}.unfinished"
        try:
            os.makedirs(folder, exist_ok=True)
            torch.cuda.memory._dump_snapshot(unfinished)
            os.replace(unfinished, path)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                os.remove(unfinished)
            return f"not written: {type(error).__name__}: {error}"
        return path


def _is_recording() -> bool:
    """Whether the program records already; a PyTorch that does not say is taken not to."""
    asked = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(asked()) if asked is not None else False


HISTORY: Final = AllocatorHistory()
"""PyTorch has one recording for all cards of a process."""
