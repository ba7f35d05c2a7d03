# SPDX-License-Identifier: Apache-2.0
"""Recomputes on a card, compared with their forwards there. The host waits once, at the end of backward.

    forward      saved tensor ──► kernel ──► a slot on the card             `keep`
    recompute    what comes in its place ──► kernel, which compares         `compare`
    end of the backward               the host reads what has differed      `settle`: `RecomputeError`

All of it is submitted to PyTorch's current stream, behind what makes a tensor and before what frees it. A
card has one table of 65536 slots, 512 KiB beside PyTorch's allocator; a slot is free when its save is gone.

A difference is known when backward is over, so a gradient that follows from it has been computed: the error
comes out of `backward()` all the same, before any optimizer's step. An optimizer that steps inside of
backward settles before each step that comes behind a recompute, and so waits for the card more than once; so
do backwards that run at the same time, or within each other, where they take turns on a card.

Not compared: modules with operators that a card does not repeat (`OpFacts.unrepeatable`); what is captured
into a CUDA graph, where no host can read; saves beyond the slots; cards without kernels (`optim/cards.py`).
Of a backward that fails by itself, a difference only keeps the module from being recomputed again. Nothing
is recomputed once more to find a likely cause: what that needs is gone.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from memscale import _core
from memscale.errors import MemScaleError, RecomputeError
from memscale.optim import cards
from memscale.torchkit.compiled import never_compiled

_LOGGER = logging.getLogger("memscale")
SLOTS: Final = 65536
_REASON_CHARACTERS: Final = 300


Failed = Callable[[], RecomputeError]
"""Makes the error of a save that differs, when it does, and has its module kept from then on."""


class _Table:
    """Fingerprints on one card. All but `keep` with the lock.

    Attributes:
        waiting: what makes the errors of comparisons that were submitted and not read, by tag.
        task: the backward that all of these are of.
    """

    def __init__(self, table: _core.FingerprintTable) -> None:
        self._table = table
        self._has_warned = False
        self.waiting: list[Failed] = []
        self.task = -1

    def keep(self, tensor: Tensor, sampled: bool) -> _core.KeptFingerprint | None:
        kept = self._table.keep(tensor, sampled, cards.current_stream(tensor.device))
        if kept is None and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "more than %d saved tensors wait for their recompute on %s: the others are not compared",
                SLOTS,
                tensor.device,
            )
        return kept

    def compare(self, kept: _core.KeptFingerprint, tensor: Tensor, task: int, failed: Failed) -> None:
        if task != self.task:
            self.read()  # a card tells the first difference only: it must be known whose that is
            self.task = task
        tag = len(self.waiting)
        self.waiting.append(failed)  # first: an interrupt must not leave a tag to two of them
        kept.compare(tensor, tag, cards.current_stream(tensor.device))

    def read(self) -> None:
        """Notes the first difference since the last call. Waits for the card, where anything waits."""
        if not self.waiting:
            return
        found = self._table.read()
        waited, self.waiting = self.waiting, []
        if found is not None:
            _due.setdefault(self.task, waited[found[1]])


_tables: dict[int, _Table | None] = {}
"""By ordinal; None: the card has none."""
_warned: set[int] = set()
"""Ordinals of cards without a table that the log has named."""


class _Pass:
    """A backward with comparisons. Autograd holds it and calls it at the end; one that fails is dropped."""

    __slots__ = ("__weakref__", "_task")

    def __init__(self, task: int) -> None:
        self._task = task

    def __call__(self) -> None:
        try:
            _settle(self._task)
        finally:
            _passes.pop(self._task, None)  # the traceback of an error may hold this for long


_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
"""By graph task: those that run."""
_due: dict[int, Failed] = {}
"""By graph task: what is to be raised at its end."""
_lock = threading.Lock()


def keep(tensor: Tensor, sampled: bool) -> _core.KeptFingerprint | None:
    """The fingerprint of a tensor on a card; None: it is not compared.

    Args:
        tensor: strided, of no subclass.
        sampled: a sample of it will do.
    """
    table = _table_of(tensor.device)
    if table is None or torch.cuda.is_current_stream_capturing():
        return None
    try:
        return table.keep(tensor, sampled)
    except ValueError:  # no memory of its own: inside a functorch transform, say
        return None


def compare(kept: _core.KeptFingerprint, tensor: Tensor, failed: Failed) -> bool:
    """Compares what a recompute has made. In a backward the result comes at its end.

    Returns:
        Whether it is known to differ already; then `failed` is not called.
    """
    table = _tables.get(tensor.device.index)
    if table is None:
        return True  # the forward's was on a card that can
    if torch.cuda.is_current_stream_capturing():
        return False
    task = torch._C._current_graph_task_id()
    if task >= 0:
        _settle_after(task)
    try:
        with _lock:
            table.compare(kept, tensor, task, failed)
    except ValueError:  # on another card than the forward's
        return True
    return task < 0 and _take(task) is not None


def settle() -> None:
    """Waits for the comparisons submitted so far, if there are any. In a backward.

    Raises:
        RecomputeError: a recompute of this backward has made something else than its forward.
    """
    _settle(torch._C._current_graph_task_id())


def _settle(task: int) -> None:
    found = _take(task)
    if found is not None:
        raise found()


def _take(task: int) -> Failed | None:
    """What differs of a backward. Those of others stay for them; where they have failed, a module is kept."""
    with _lock:
        for table in _tables.values():
            if table is not None:
                table.read()
        found = _due.pop(task, None)
        left = [_due.pop(each) for each in [*_due] if each not in _passes]
    for failed in left:
        failed()
    return found


def _settle_after(task: int) -> None:
    """Sees to it that a backward settles at its end."""
    if task in _passes:
        return
    with _lock:
        if task in _passes:
            return
        passing = _passes[task] = _Pass(task)
    torch.autograd.Variable._execution_engine.queue_callback(passing)


def _table_of(device: torch.device) -> _Table | None:
    try:
        return _tables[device.index]
    except KeyError:
        return _open(device)


def _open(device: torch.device) -> _Table | None:
    with _lock:
        if device.index in _tables:
            return _tables[device.index]
        try:
            made = _tables[device.index] = _Table(cards.fingerprint_table(device, SLOTS))
            return made
        except (MemoryError, MemScaleError, RuntimeError) as error:  # no driver, no compiler, no memory, …
            if device.index not in _warned:
                _warned.add(device.index)
                reason = " ".join(str(error).split())[:_REASON_CHARACTERS]
                _LOGGER.warning("recomputes on %s are not compared with their forwards: %s", device, reason)
            if not isinstance(error, MemoryError) and getattr(error, "status", "") != "EDEVMEM":
                _tables[device.index] = None
        return None  # another time there may be memory


never_compiled(_Table, _Pass, keep, compare, settle, _settle, _take, _settle_after, _table_of, _open)
