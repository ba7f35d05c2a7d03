# SPDX-License-Identifier: Apache-2.0
"""State and gradients of which a part stays: every bit as ever, and in memory what is named and no more."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gradient_samples import is_offloaded, loss_of, net, released
from gradient_samples import technique as gradients_of
from memscale.optim.offload.attach import keep_resident, offloaded_bytes, resident_state, send, take_back
from memscale.optim.offload.pieces import OFFLOADED
from memscale.optim.patched import take_over
from memscale.techniques.optimizer.gradient_offload import names_of
from offloaded_state_samples import CUT, PIECE, equal, opened, pair, parameters, step
from zoo.training import peak_bytes


def here_of(optimizer: torch.optim.Optimizer) -> list[bool]:
    """For each parameter whose state can leave whether all of it is in memory."""
    entries = [entry[OFFLOADED] for entry in optimizer.state.values() if OFFLOADED in entry]
    return [all(isinstance(piece, Tensor) for piece in offloaded.pieces) for offloaded in entries]


@pytest.mark.parametrize("name", CUT)
def test_what_is_spared_can_change_at_any_time(name: str) -> None:
    both, optimizers = pair(CUT[name])
    first, _, third, *_ = both[1]
    for resident, expected in (([third], 1), ([first, third], 2), ([third], 1), ([], 0), (both[1], 4)):
        keep_resident(optimizers[1], resident)
        step(both[0], optimizers[0], 2)
        step(both[1], optimizers[1], 2)
        assert sum(here_of(optimizers[1])) == expected
        assert equal(*both)
    assert offloaded_bytes(optimizers[1]) == 0
    assert equal(*(optimizer.state_dict() for optimizer in optimizers))
    keep_resident(optimizers[1], [first])
    take_back(optimizers[1])
    assert type(optimizers[1]) is type(optimizers[0])
    assert equal(*(optimizer.state_dict() for optimizer in optimizers))


@pytest.mark.parametrize("kind", ["fp32", "code8"])
def test_our_own_state(kind: str) -> None:
    both = parameters(), parameters()
    optimizers = [torch.optim.AdamW(values, lr=1e-2) for values in both]
    for optimizer in optimizers:
        assert take_over(optimizer, kind) == ""
    assert send(optimizers[1], opened(), PIECE, resident=both[1][:1]) == ""
    for resident in (both[1][:1], both[1][2:], []):
        keep_resident(optimizers[1], resident)
        step(both[0], optimizers[0], 2)
        step(both[1], optimizers[1], 2)
        assert equal(*both) and sum(here_of(optimizers[1])) == sum(value.numel() > 77 for value in resident)
    assert equal(*(optimizer.state_dict() for optimizer in optimizers))


def test_it_stays_so_through_load_copies_and_a_visit_at_home() -> None:
    both, optimizers = pair(CUT["adamw"])
    keep_resident(optimizers[1], both[1][:1])
    step(both[1], optimizers[1], 1)
    step(both[0], optimizers[0], 1)
    offloaded = offloaded_bytes(optimizers[1])
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert offloaded_bytes(optimizers[1]) == offloaded and sum(here_of(optimizers[1])) == 1
    with resident_state(optimizers[1]):
        assert type(optimizers[1]) is torch.optim.AdamW
    assert offloaded_bytes(optimizers[1]) == offloaded and sum(here_of(optimizers[1])) == 1
    assert equal(copy.deepcopy(optimizers[1]).state_dict(), optimizers[0].state_dict())


def test_a_step_of_what_stays_is_in_pieces() -> None:
    """It takes no copies of whole parameters, in the first step neither."""
    elements = 1 << 18
    value = nn.Parameter(torch.zeros(elements))
    optimizer = torch.optim.AdamW([value], foreach=False)
    assert send(optimizer, opened(), PIECE, resident=[value]) == ""
    value.grad = torch.ones(elements)
    state = 8 * elements
    assert state <= peak_bytes(optimizer.step) <= state + 5 * 4 * PIECE  # made, copied, and two temporaries
    assert peak_bytes(optimizer.step) <= 3 * 4 * PIECE


def test_what_leaves_goes_first() -> None:
    values = [nn.Parameter(torch.zeros(1 << 18)) for _ in range(2)]
    optimizer = torch.optim.AdamW(values)
    assert send(optimizer, opened(), PIECE) == ""
    step(values, optimizer, 1)

    def change() -> None:
        keep_resident(optimizer, values[:1])
        keep_resident(optimizer, values[1:])

    assert 8 << 18 <= peak_bytes(change) <= (8 << 18) + 2 * 8 * PIECE
    assert here_of(optimizer) == [False, True]


def test_a_full_disk_keeps_what_was_to_leave() -> None:
    both, optimizers = pair(CUT["adamw"], file_bytes=256 << 10)
    keep_resident(optimizers[1], both[1])
    step(both[0], optimizers[0], 2)
    step(both[1], optimizers[1], 2)
    keep_resident(optimizers[1], [])
    step(both[0], optimizers[0], 2)
    step(both[1], optimizers[1], 2)
    assert equal(*both)
    assert equal(*(optimizer.state_dict() for optimizer in optimizers))


def test_gradients_between_backwards() -> None:
    """Those that are there when it changes, too, and are added to afterwards."""
    model, plain = net(), net()
    with released(model) as made:
        names = list(names_of(model, made.link.settings.least_bytes))
        assert len(names) > 2
        for resident in (names[:0], names[:1], names[1:], names, names[:0]):
            other = gradients_of(model)
            other.resident = frozenset(resident)
            made.become(other)
            assert not any(is_offloaded(model.get_parameter(name).grad) for name in resident)
            for item in (model, plain):
                loss_of(item, 0).backward()
            offloaded = [name for name in names if is_offloaded(model.get_parameter(name).grad)]
            used = [name for name in names if model.get_parameter(name).grad is not None]
            assert offloaded == [name for name in used if name not in resident]
        for name in used:
            mine, theirs = (item.get_parameter(name).grad for item in (model, plain))
            assert mine is not None and theirs is not None and torch.equal(mine.clone(), theirs)
    assert not any(value._post_accumulate_grad_hooks for value in model.parameters())
