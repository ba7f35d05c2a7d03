# SPDX-License-Identifier: Apache-2.0
"""`BudgetBatchSampler`: every sample once, equal on all processes, and every batch predicted to fit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import memscale
from memscale.autotuning import BudgetBatchSampler
from memscale.plans.budget import budget_for
from tuning_samples import Words, words

LENGTHS = [int(value) for value in torch.randint(4, 65, (203,), generator=torch.Generator().manual_seed(0))]
SIZES = {16: 9, 32: 5, 64: 2}


def sampler(**more: Any) -> BudgetBatchSampler:
    return BudgetBatchSampler(LENGTHS, sizes=SIZES, **more)


def flat(batches: Any) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_comes_once_and_processes_have_equally_many_batches(
    world_size: int, shuffle: bool
) -> None:
    ranks = [list(sampler(rank=rank, world_size=world_size, shuffle=shuffle)) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {len(sampler(rank=0, world_size=world_size))}
    assert sorted(flat(flat(ranks))) == list(range(len(LENGTHS)))


def test_no_batch_has_more_than_its_longest_sample_allows() -> None:
    for batch in sampler():
        longest = max(LENGTHS[index] for index in batch)
        allowed = next(size for length, size in SIZES.items() if longest <= length)
        assert 1 <= len(batch) <= allowed


def test_batches_of_one_step_are_of_one_bucket_but_where_buckets_meet() -> None:
    steps = list(zip(*(sampler(rank=rank, world_size=4) for rank in range(4)), strict=True))
    edges = sorted(SIZES)

    def bucket(batch: list[int]) -> int:
        return next(index for index, edge in enumerate(edges) if max(LENGTHS[item] for item in batch) <= edge)

    mixed = [step for step in steps if len({bucket(batch) for batch in step}) > 1]
    assert len(mixed) < len(SIZES)


def test_the_order_is_that_of_seed_and_epoch() -> None:
    one, two = sampler(seed=5), sampler(seed=5)
    torch.rand(3)  # and of nothing else
    assert list(one) == list(two) == list(one)
    first = list(one)
    one.set_epoch(1)
    assert list(one) != first and len(one) == len(first)
    one.set_epoch(0)
    assert list(one) == first
    assert list(sampler(seed=6)) != first
    before = torch.get_rng_state()
    list(sampler())
    assert torch.equal(torch.get_rng_state(), before)


def test_without_shuffling_short_samples_come_first() -> None:
    longest = [max(LENGTHS[index] for index in batch) for batch in sampler(shuffle=False)]
    edges = [next(edge for edge in sorted(SIZES) if length <= edge) for length in longest]
    assert edges == sorted(edges)


def test_in_a_loader() -> None:
    loader = torch.utils.data.DataLoader(LENGTHS, batch_sampler=sampler(), collate_fn=list)  # type: ignore[arg-type]
    assert sorted(flat(loader)) == sorted(LENGTHS) and len(loader) == len(sampler())


def test_more_processes_than_can_be_served_evenly_repeat_what_is_one_sample_long() -> None:
    ranks = [list(BudgetBatchSampler([4, 4, 4], sizes={4: 1}, rank=rank, world_size=2)) for rank in range(2)]
    assert [len(batches) for batches in ranks] == [2, 2]
    assert set(flat(flat(ranks))) == {0, 1, 2}


@pytest.mark.long
@pytest.mark.parametrize("planned", [False, True])
def test_each_size_is_the_largest_that_is_predicted_to_fit(planned: bool) -> None:
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters())
    config = memscale.Config(
        memory_budget=budget_for(
            memscale.predict(model, optimizer, sample_input=words(4, 64)).plain.device_used_peak_bytes
        ),
        enable_logging=False,
    )
    before = torch.get_rng_state()
    made = BudgetBatchSampler(LENGTHS, model, words, optimizer, config=config, planned=planned, buckets=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(made.sizes) == sorted(made.sizes) and max(made.sizes) == max(LENGTHS)
    assert list(made.sizes.values()) == sorted(made.sizes.values(), reverse=True)
    for length, size in made.sizes.items():
        for batch, fits in ((size, True), (size + 1, False)):
            found = memscale.predict(model, optimizer, config, words(batch, length))
            peak = found.smallest_peak_bytes if planned else found.plain.device_used_peak_bytes
            assert (budget_for(peak) <= found.budget_bytes) is fits
    again = BudgetBatchSampler(LENGTHS, sizes=made.sizes)
    assert list(again) == list(made)


@pytest.mark.parametrize(
    ("given", "more", "error", "text"),
    [
        ([], {}, ValueError, "lengths is .*; allowed: at least one"),
        ([3, 0], {}, ValueError, "each 1 or more"),
        ("long", {}, TypeError, "lengths is 'long'; allowed: a whole number"),
        (LENGTHS, {"sizes": None}, TypeError, "model and sample are needed"),
        (LENGTHS, {"sizes": {10: 4}}, ValueError, "there is a sample of length 64"),
        (LENGTHS, {"sizes": {64: 0}}, ValueError, "a batch in sizes is 0"),
        (LENGTHS, {"sizes": [64]}, TypeError, "sizes is .*; allowed: longest length"),
        (LENGTHS, {"rank": 2, "world_size": 2}, ValueError, "rank is 2; allowed: below world_size, 2"),
        (
            [5],
            {"world_size": 2, "rank": 0},
            ValueError,
            "lengths are of 1 samples; allowed: one per",
        ),
        (LENGTHS, {"seed": -1}, ValueError, "seed is -1"),
        (LENGTHS, {"buckets": 0}, ValueError, "buckets is 0"),
    ],
)
def test_what_is_wrong_is_named(given: Any, more: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        BudgetBatchSampler(given, **{"sizes": SIZES, **more})


def test_a_length_that_does_not_fit_alone_is_an_error() -> None:
    with pytest.raises(ValueError, match="lengths go up to 64, and not even one such sample fits"):
        BudgetBatchSampler(LENGTHS, Words(), words, memory_budget=400_000)
