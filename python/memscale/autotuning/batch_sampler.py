# SPDX-License-Identifier: Apache-2.0
"""Batches of samples of many lengths: each as large as the prediction says that its lengths allow.

Samples of about the same length share a bucket, so that little is padded, and a bucket's batch is as large as
fits when every sample is as long as the bucket's longest: many short ones, few long ones.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import Sampler

from memscale.api import predict
from memscale.autotuning.checked import whole_number
from memscale.autotuning.samples import generators_kept, samples_of
from memscale.config.checks import show
from memscale.config.config import Config

_BUCKETS: Final = 16
_GROUP: Final = 50
"""Batches whose samples are sorted by length: enough to pad little, few enough to mix well."""

_MOST_SAMPLES: Final = 4096
"""Nobody trains with larger batches, and a bucket of very short samples would allow them."""

Groups = list[list[int]]


class BudgetBatchSampler(Sampler[list[int]]):
    """Batches for `DataLoader(dataset, batch_sampler=…)`, none beyond the budget.

    Every sample comes once per epoch. The order depends on `seed` and the epoch alone. With several processes
    each has batches of its own, all have equally many, and those of one step are of about the same length.

    Args:
        lengths: of the samples, in the dataset's order.
        model: the module; not needed where `sizes` are given.
        sample: a function of `batch` and `sequence` that makes a training batch, as for `AutoTuner`.
        optimizer: trains the model; None: an AdamW is assumed.
        planned: the batches are those that fit under the smallest plan, as after `memscale.wrap`; False:
            those that fit without one.
        config: has the budget; None for the defaults.
        device: for a card that is not here, as for `memscale.predict`.
        buckets: number of them, at most. Their lengths grow by equal ratios.
        sizes: longest length → batch, as `sizes` of another sampler has it, so that nothing is predicted.
        shuffle: samples within their buckets, and batches.
        seed: of the order.
        rank: of this process; None: of `torch.distributed`, else 0.
        world_size: number of processes; None: of `torch.distributed`, else 1.
        **fields: fields of `Config`, as keywords.

    Attributes:
        sizes: longest length of each bucket → samples of its batches, rising.

    Raises:
        TypeError: an argument is of a wrong type or missing.
        ValueError: a value is not allowed, or a single sample of some length does not fit.

    Example:
        >>> sampler = BudgetBatchSampler(lengths, model, sample, optimizer, memory_budget="8GiB")
        >>> loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)
        >>> for epoch in range(3):
        ...     sampler.set_epoch(epoch)
        ...     train(loader)
    """

    def __init__(
        self,
        lengths: Any,
        model: nn.Module | None = None,
        sample: Callable[..., Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        planned: bool = False,
        config: Config | None = None,
        device: str | torch.device | None = None,
        buckets: int = _BUCKETS,
        sizes: Mapping[int, int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        **fields: Any,
    ) -> None:
        self._lengths = _checked_lengths(lengths)
        self.rank, self.world_size = _place(rank, world_size)
        if len(self._lengths) < self.world_size:
            count = len(self._lengths)
            raise ValueError(f"lengths are of {count} samples; allowed: one per process, {self.world_size}")
        self.shuffle, self.seed, self.epoch = bool(shuffle), whole_number("seed", seed, least=0), 0
        edges = _edges(self._lengths, whole_number("buckets", buckets))
        if sizes is not None:
            self.sizes = _checked_sizes(sizes, max(self._lengths))
        else:
            if model is None or sample is None:
                raise TypeError("model and sample are needed to predict sizes; allowed: both, or sizes=…")
            largest = functools.partial(
                _largest, model, sample, optimizer, planned, {"config": config, "device": device, **fields}
            )
            with generators_kept():
                self.sizes = _predicted_sizes(edges, largest)
        self._members = self._by_bucket()
        self._count = len(self._batches(None)) // self.world_size

    def set_epoch(self, epoch: int) -> None:
        """The order of the next iteration: the same for the same epoch."""
        self.epoch = whole_number("epoch", epoch, least=0)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch) if self.shuffle else None
        return iter(self._batches(generator)[self.rank :: self.world_size])

    # ---- batches -----------------------------------------------------------------------------------

    def _by_bucket(self) -> list[list[int]]:
        """Samples of each bucket, in the dataset's order."""
        longest = list(self.sizes)
        members: list[list[int]] = [[] for _ in longest]
        where = torch.bucketize(torch.tensor(self._lengths), torch.tensor(longest))
        for index, bucket in enumerate(where.tolist()):
            members[bucket].append(index)
        return members

    def _batches(self, generator: torch.Generator | None) -> Groups:
        """All batches of all processes: those of one step side by side, as many for each process."""
        made: Groups = []
        left: list[int] = []
        for members, size in zip(self._members, self.sizes.values(), strict=True):
            members = left + _shuffled(members, generator)  # what filled no batch joins those just longer
            members = self._sorted(members, _GROUP * size)
            full = len(members) - len(members) % size
            made += [members[begin : begin + size] for begin in range(0, full, size)]
            left = members[full:]
        if left:
            made.append(left)
        made = _for_all(made, self.world_size)
        steps = [made[begin : begin + self.world_size] for begin in range(0, len(made), self.world_size)]
        return [batch for step in _shuffled(steps, generator) for batch in step]

    def _sorted(self, members: list[int], group: int) -> list[int]:
        """Samples sorted by length within groups of so many, so that a batch's are alike."""
        return [
            index
            for begin in range(0, len(members), group)
            for index in sorted(members[begin : begin + group], key=self._lengths.__getitem__)
        ]


def _shuffled(items: list[Any], generator: torch.Generator | None) -> list[Any]:
    if generator is None:
        return list(items)
    return [items[index] for index in torch.randperm(len(items), generator=generator).tolist()]


def _for_all(batches: Groups, processes: int) -> Groups:
    """As many batches for each process: some are halved, which keeps every sample in one of them."""
    while len(batches) % processes:
        index = max(range(len(batches)), key=lambda at: len(batches[at]))
        whole = batches[index]
        if len(whole) == 1:  # nothing is left to halve
            return batches + batches[: processes - len(batches) % processes]
        batches = [
            *batches[:index],
            whole[: len(whole) // 2],
            whole[len(whole) // 2 :],
            *batches[index + 1 :],
        ]
    return batches


# ---- sizes -----------------------------------------------------------------------------------------


def _edges(lengths: list[int], buckets: int) -> list[int]:
    """The longest length of each bucket, rising by equal ratios, and each of a sample that there is."""
    present = sorted(set(lengths))
    ratio = present[-1] / present[0]
    cuts = [present[0] * ratio ** (part / buckets) for part in range(1, buckets)]
    below = [bisect.bisect_right(present, cut) - 1 for cut in cuts]
    return sorted({present[index] for index in (*below, len(present) - 1)})


def _predicted_sizes(edges: list[int], largest: Callable[[int, int], int]) -> dict[int, int]:
    """The longest first: what fits there says about how much the next may have."""
    found: dict[int, int] = {}
    guess = 1
    for length in reversed(edges):
        size = largest(length, guess)
        if size == 0:
            raise ValueError(
                f"lengths go up to {length}, and not even one such sample fits the budget; allowed: shorter "
                "ones, a larger budget, or planned=True with memscale.wrap"
            )
        found[length] = min(size, _MOST_SAMPLES)
        guess = found[length]
    return dict(sorted(found.items()))


def _largest(
    model: nn.Module,
    sample: Callable[..., Any],
    optimizer: torch.optim.Optimizer | None,
    planned: bool,
    rest: Mapping[str, Any],
    length: int,
    guess: int,
) -> int:
    """The largest batch of samples of this length."""
    maker = samples_of(sample, length).makers[0]

    def batches(batch: int = guess) -> Any:
        return maker(batch)

    return predict(model, optimizer, sample_input=batches, **rest).largest_batch(with_plan=planned)


# ---- arguments -------------------------------------------------------------------------------------


def _checked_lengths(lengths: Any) -> list[int]:
    try:
        found = [int(length) for length in lengths]
    except (TypeError, ValueError):
        raise TypeError(f"lengths is {show(lengths)}; allowed: a whole number for each sample") from None
    if not found or min(found) < 1:
        raise ValueError(f"lengths is {show(lengths)}; allowed: at least one, each 1 or more")
    return found


def _checked_sizes(sizes: Mapping[int, int], longest: int) -> dict[int, int]:
    try:
        found = {
            whole_number("a length in sizes", length): whole_number("a batch in sizes", size)
            for length, size in sorted(sizes.items())
        }
    except (AttributeError, TypeError) as error:
        raise TypeError(f"sizes is {show(sizes)}; allowed: longest length → batch") from error
    if max(found, default=0) < longest:
        raise ValueError(
            f"sizes is {show(sizes)}, and there is a sample of length {longest}; allowed: one for it"
        )
    return found


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    if world_size is None:
        world_size = torch.distributed.get_world_size() if there else 1
    if rank is None:
        rank = torch.distributed.get_rank() if there else 0
    world_size = whole_number("world_size", world_size)
    rank = whole_number("rank", rank, least=0)
    if rank >= world_size:
        raise ValueError(f"rank is {rank}; allowed: below world_size, {world_size}")
    return rank, world_size
