# SPDX-License-Identifier: Apache-2.0
"""A card's steps have the bits of the host's: the kernels as NVIDIA's compiler and this card make them.

By the C library alone, which ``MEMSCALE_LIBRARY`` names; skipped without it, and without NVRTC.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from optim_steps import UNSUPPORTED, Case, Library, Refused, Worker, card_options, cases, norm_of, run

COUNTS = (1, 129, 100_003)


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Worker, Worker]]:
    """The host's optimizer, and one on the card's current stream."""
    path = os.environ.get("MEMSCALE_LIBRARY")
    if not path:
        pytest.skip("MEMSCALE_LIBRARY does not name libmemscale.so")
    library = Library(path)
    host = Worker(library, lambda size: torch.zeros(size, dtype=torch.uint8))
    try:
        card = Worker(
            library,
            lambda size: torch.zeros(size, dtype=torch.uint8, device="cuda"),
            card_options(library),
            torch.cuda.current_stream().cuda_stream,
        )
    except Refused as error:
        host.close()
        if error.status == UNSUPPORTED:
            pytest.skip(str(error))
        raise
    yield host, card
    card.close()
    host.close()


@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(map(str, case)))
def test_steps_have_the_same_bits(workers: tuple[Worker, Worker], case: Case) -> None:
    for count in COUNTS:
        host, card = (run(worker, case, count) for worker in workers)
        for name, array in host.items():
            assert torch.equal(array, card[name]), f"{name} of {count} elements"


@pytest.mark.parametrize("kind", range(3))
def test_norms_have_the_same_bits(workers: tuple[Worker, Worker], kind: int) -> None:
    host, card = workers
    numbers = torch.randn(3_000_017, generator=torch.Generator().manual_seed(1)) * 100
    numbers[12345] = float("inf")
    numbers[::100_003] = float("nan")
    stored = numbers.to((torch.float32, torch.bfloat16, torch.float16)[kind])
    assert norm_of(host, stored.view(torch.uint8), kind) == norm_of(
        card, stored.cuda().view(torch.uint8), kind
    )
