# SPDX-License-Identifier: Apache-2.0
"""The worst batches of a run, in any size: of a function that makes them, or found in a loader.

A plan must hold for the batch that takes the most. That may be the one with the longest sequence, or the one
with the most items, such as boxes in a picture: both are kept, and each is brought to the sizes to look at.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale.autotuning.checked import whole_number
from memscale.config.checks import show
from memscale.core.profiler import normalize_sample
from memscale.core.scaling import size_of

Batch = tuple[tuple[Any, ...], dict[str, Any]]

_SCANNED: Final = 256
"""Batches of a loader that are looked at."""


@dataclass(frozen=True)
class Samples:
    """Worst batches of a wanted size.

    Attributes:
        makers: each makes one batch of so many samples, as `memscale.predict` takes it.
        sequence: what a function was asked for; of a loader, the longest sequence found. None: unknown.
        note: what a user should know; "" if nothing.
    """

    makers: tuple[Callable[[int], Any], ...]
    sequence: int | None = None
    note: str = ""

    def of(self, size: int) -> list[Any]:
        """One batch of so many samples from each maker."""
        return [make(size) for make in self.makers]


def samples_of(sample: Any, sequence: int | None) -> Samples:
    """Batches from a function of `batch` and, if it has it, `sequence`.

    Args:
        sample: the function.
        sequence: the length to ask it for; None: its own default.

    Raises:
        TypeError: it is no function, or takes no such arguments.
        ValueError: it needs a sequence and none is given, or the other way round.
    """
    if isinstance(sample, Tensor) or not callable(sample):
        raise TypeError(
            f"sample is {show(sample)}; allowed: a callable(batch, sequence) that makes a training batch. "
            "Of data that you have, give loader=…"
        )
    try:
        parameters = inspect.signature(sample).parameters
    except (TypeError, ValueError):
        raise TypeError("sample has no signature; allowed: a callable(batch, sequence)") from None
    if "batch" not in parameters:
        raise TypeError(f"sample takes {', '.join(parameters) or 'nothing'}; allowed: batch, and sequence")
    own = parameters.get("sequence")
    if sequence is None:
        if own is not None and own.default is inspect.Parameter.empty:
            raise ValueError("sequence is None; allowed: the longest of the run, which sample takes")
        if own is not None and isinstance(own.default, int):
            sequence = own.default
        return Samples((lambda size: sample(batch=size),), sequence)
    sequence = whole_number("sequence", sequence)
    if own is None:
        raise ValueError(f"sequence is {sequence}, and sample takes none; allowed: None")
    return Samples((lambda size: sample(batch=size, sequence=sequence),), sequence)


def samples_in(loader: Any, scan: int = _SCANNED) -> Samples:
    """The worst batches of a loader, at most two. Samples are repeated or left out for another size.

    Args:
        loader: batches, as `memscale.predict` takes them; read from its beginning.
        scan: so many of them.

    Raises:
        TypeError: it cannot be read twice, so that reading it would take batches from the loop.
        ValueError: it is empty, or the batch is no common dimension of a batch's tensors.
    """
    if isinstance(loader, Iterator):
        raise TypeError(
            f"loader is an iterator ({type(loader).__name__}), and reading it would take batches from your "
            "loop; allowed: what it was made of, such as the DataLoader"
        )
    if not isinstance(loader, Iterable):
        raise TypeError(f"loader is {show(loader)}; allowed: an iterable of training batches")
    longest: tuple[int, int, Any] | None = None
    most: tuple[int, int, Any] | None = None
    seen = 0
    batches = iter(loader)
    for given in islice(batches, scan):
        seen += 1
        batch = normalize_sample(given)
        rows = size_of(None, batch, "batch")
        length, items = _length(batch), -(-_elements(batch) // rows)
        if longest is None or (length, items) > longest[:2]:
            longest = length, items, given
        if most is None or (items, length) > most[:2]:
            most = items, length, given
    ended = next(batches, None) is None
    del batches  # and a loader's workers with it
    if longest is None or most is None:
        raise ValueError("loader is empty; allowed: an iterable of at least one training batch")
    kept = [longest[2]] if longest[2] is most[2] else [longest[2], most[2]]
    note = "" if ended else f"the first {seen} batches of the loader were looked at, not all"
    return Samples(tuple(_maker(batch) for batch in kept), longest[0] or None, note)


@contextmanager
def generators_kept() -> Iterator[None]:
    """A block in which the caller's code may draw random numbers; the generators are left as they were."""
    numpy = sys.modules.get("numpy")
    own, others = random.getstate(), None if numpy is None else numpy.random.get_state()
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=cards):
        try:
            yield
        finally:
            random.setstate(own)
            if numpy is not None:
                numpy.random.set_state(others)


def _maker(given: Any) -> Callable[[int], Any]:
    batch = normalize_sample(given)

    def make(size: int) -> Any:
        args, kwargs = resized(batch, size)
        return args[0] if isinstance(given, Tensor) else args or kwargs

    return make


def resized(batch: Batch, size: int) -> Batch:
    """A batch with so many samples: the first of them, or all repeated. It has memory of its own."""

    def other(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor.clone()
        rows = torch.arange(size, device=tensor.device) % tensor.shape[0]
        return tensor.detach().index_select(0, rows).requires_grad_(tensor.requires_grad)

    result: Batch = tree_map_only(Tensor, other, batch)
    return result


def _tensors(batch: Batch) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _elements(batch: Batch) -> int:
    return sum(tensor.numel() for tensor in _tensors(batch))


def _length(batch: Batch) -> int:
    return max((int(tensor.shape[1]) for tensor in _tensors(batch) if tensor.dim() > 1), default=0)
