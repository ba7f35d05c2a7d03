# SPDX-License-Identifier: Apache-2.0
"""Cards that have the core's optimizer kernels.

    a card            ──► one `_core.Card` for the process: PyTorch's context, the kernels
    a stream of it    ──► one `_core.Optim`, which submits to it and waits for nothing
    its recomputes    ──► one `_core.FingerprintTable` (`techniques/checkpoint/card_check.py`)

The kernels are compiled by NVRTC when they are first needed, about half a second for each card and process.
NVRTC comes with PyTorch; the environment variable `MEMSCALE_NVRTC` names another one. Where a card cannot
have the optimizer's kernels, parameters on it stay with PyTorch, and the reason is what `why_not` says.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from memscale import _core

_LOGGER = logging.getLogger("memscale")
_COMPILER: Final = "MEMSCALE_NVRTC"
_SLOW_SECONDS: Final = 1.0  # of compiling, from which on a line says where the time went
_REASON_CHARACTERS: Final = 300


class _AssumeData(threading.local):
    on = False


_assumed = _AssumeData()


@contextmanager
def assume_data() -> Iterator[None]:
    """Inside the block parameters without data count as they will where they have some."""
    before, _assumed.on = _assumed.on, True
    try:
        yield
    finally:
        _assumed.on = before


class Cards:
    """The cards of a process.

    Args:
        card: opens one, by its number and the compiler's file.
        optim: the core on a stream of a card.
        table: fingerprints on a card, by the card and their number.
    """

    def __init__(
        self,
        card: Callable[[int, str | None], _core.Card] = _core.Card,
        optim: Callable[..., _core.Optim] = _core.Optim,
        table: Callable[[_core.Card, int], _core.FingerprintTable] = _core.FingerprintTable,
    ) -> None:
        self._make, self._optim, self._table = card, optim, table
        self._lock = threading.Lock()
        self._opened: dict[int, _core.Card | str] = {}  # with the optimizer's kernels, or why it has none
        self._cards: dict[int, _core.Card] = {}  # whose driver is open
        # As many streams as PyTorch has in a pool; one takes no memory of the card.
        self._on_stream = functools.lru_cache(maxsize=64)(self._stream_of)

    def why_not(self, device: torch.device) -> str:
        """Why the core does not work on arrays of a device; "" if it does. Compiles at the first question."""
        if device.type == "cpu" or (device.type == "meta" and _assumed.on):
            return ""
        found = self._opened.get(device.index) if device.type == "cuda" else _refused(device)
        if found is None:
            found = self._open(device)
        return found if isinstance(found, str) else ""

    def has_refused(self) -> bool:
        """Whether a card is known to have no kernels. Asks none."""
        return any(isinstance(found, str) for found in self._opened.values())

    def worker(self, device: torch.device) -> _core.Optim:
        """The core on a card's current stream, as PyTorch has it.

        Raises:
            RuntimeError: the card has no kernels, or its stream is being captured into a CUDA graph.
        """
        reason = self.why_not(device)
        if reason:
            raise RuntimeError(reason)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "an optimizer with MemScale's state cannot be stepped while a CUDA graph is captured: the "
                "graph would repeat the step's number"
            )
        return self._on_stream(device.index, current_stream(device))

    def fingerprint_table(self, device: torch.device, slots: int) -> _core.FingerprintTable:
        """A new table of fingerprints on a card.

        Raises:
            RuntimeError: no card of NVIDIA's.
            MemScaleError: it has no kernels.
            torch.OutOfMemoryError: it has no memory.
        """
        if torch.version.hip is not None or device.type != "cuda":
            raise RuntimeError(f"kernels are for NVIDIA's cards, and not for {device}")
        with self._lock:
            return self._table(self._card(device.index), slots)

    def _stream_of(self, ordinal: int, stream: int) -> _core.Optim:
        card = self._opened[ordinal]
        assert not isinstance(card, str)
        with self._lock:  # a card's programs are one thread's at a time
            return self._optim(card=card, stream=stream)

    def _open(self, device: torch.device) -> _core.Card | str:
        with self._lock:
            found = self._opened.get(device.index)
            if found is None:
                found = self._opened[device.index] = self._compiled(device)
        return found

    def _card(self, ordinal: int) -> _core.Card:
        """With the lock."""
        found = self._cards.get(ordinal)
        if found is None:
            found = self._cards[ordinal] = self._make(ordinal, compiler())
        return found

    def _compiled(self, device: torch.device) -> _core.Card | str:
        if torch.version.hip is not None:
            return f"parameters on {device}: its kernels are for NVIDIA's cards"
        begun = time.perf_counter()
        try:
            card = self._card(device.index)
            self._optim(card=card)
        except (MemoryError, torch.cuda.OutOfMemoryError):  # the name in PyTorch 2.4, too
            raise  # another time there may be room
        except Exception as error:  # no driver, no compiler, a card that is too old, …
            return f"no kernels for {device}: {' '.join(str(error).split())[:_REASON_CHARACTERS]}"
        seconds = time.perf_counter() - begun
        if seconds > _SLOW_SECONDS:
            _LOGGER.info("optimizer state: its kernels for %s were compiled in %.1f s", card.name, seconds)
        return card


def _refused(device: torch.device) -> str:
    return f"parameters on {device.type}: its steps run on the CPU and on NVIDIA's cards"


def current_stream(device: torch.device) -> int:
    """The driver's handle of PyTorch's current stream on a card."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(device).cuda_stream if raw is None else raw(device.index))


CARDS: Final = Cards()
"""Those of this process, whose methods are functions of this module, too."""

why_not, has_refused, worker, fingerprint_table = (
    CARDS.why_not,
    CARDS.has_refused,
    CARDS.worker,
    CARDS.fingerprint_table,
)

# ---- NVRTC -------------------------------------------------------------------------------------------


def compiler() -> str | None:
    """File name of NVIDIA's compiler: the one that is named, else PyTorch's; None: the system's."""
    named = os.environ.get(_COMPILER)
    if named:
        return named
    major = (torch.version.cuda or "").partition(".")[0]
    found = sorted(_beside_pytorch(), key=lambda path: (f".so.{major}" not in path.name, str(path)))
    return str(found[0]) if found else None


def _beside_pytorch() -> Iterator[Path]:
    """Files that PyTorch's packages have of it, in the layouts of CUDA 13, of 12 and 11, and all in one."""
    spec = importlib.util.find_spec("nvidia")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        for place in ("cu*/lib", "cuda_nvrtc/lib"):
            yield from _libraries(Path(folder), place)
    yield from _libraries(Path(torch.__file__).parent, "lib")


def _libraries(folder: Path, place: str) -> Iterator[Path]:
    for path in folder.glob(f"{place}/libnvrtc*.so*"):
        if "builtins" not in path.name and ".alt" not in path.name:
            yield path
