# SPDX-License-Identifier: Apache-2.0
"""On CUDA too, loss, gradients, weights and random state after five steps are those of plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from gpu_training import assert_equal, call, cases, config_for, context_bytes, make, train
from torch.nn.attention import SDPBackend, sdpa_kernel

import memscale

CASES = cases()


def budget(share_pct: int, plain_bytes: int) -> int:
    """A budget that asks for a share of the plain peak; the process's context comes on top."""
    return context_bytes() + plain_bytes * share_pct // 100


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_equality_over_five_steps(name: str, bf16: bool) -> None:
    plain = train(CASES[name], bf16=bf16)
    wrapped = train(CASES[name], budget(40, plain.allocated_peak), bf16=bf16)
    assert wrapped.plan.active, "nothing was checkpointed: the test compares nothing"
    assert_equal(plain, wrapped)


@pytest.mark.parametrize(
    "backend",
    [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    ids=lambda b: b.name,
)
def test_attention_kernels_replay_their_dropout(backend: SDPBackend) -> None:
    """Fused kernels keep their own seed and offset; a recompute must draw the same mask."""
    with sdpa_kernel(backend):
        plain = train(CASES["gpt2"], bf16=True)
        wrapped = train(CASES["gpt2"], budget(40, plain.allocated_peak), bf16=True)
    assert wrapped.plan.active
    assert_equal(plain, wrapped)


def test_dropout_is_really_on() -> None:
    """Guards the tests above: with another seed the losses differ."""
    model, batch = make(CASES["gpt2"])
    torch.manual_seed(1)
    first = model(**batch).loss
    torch.manual_seed(2)
    assert not torch.equal(first, model(**batch).loss)


def test_device_generator_is_untouched_by_planning() -> None:
    model, batch = make(CASES["gpt2"])
    before = torch.cuda.get_rng_state()
    memscale.wrap(model, config_for(context_bytes() + (64 << 20)), sample_input=batch)
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_side_stream() -> None:
    """The whole loop on a stream of the caller's."""
    plain = train(CASES["gpt2"])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wrapped = train(CASES["gpt2"], budget(40, plain.allocated_peak))
    stream.synchronize()
    assert wrapped.plan.active
    assert_equal(plain, wrapped)


def test_detach_restores_the_plain_run() -> None:
    model, batch = make(CASES["gpt2"])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    own = dict(model.__dict__)
    memscale.wrap(model, config_for(context_bytes() + (32 << 20)))
    call(model, batch).loss.backward()
    memscale.detach(model)
    assert model.__dict__.keys() == own.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.zero_grad()
    torch.manual_seed(3)
    loss = call(model, batch).loss
    loss.backward()
    other, _ = make(CASES["gpt2"])
    torch.manual_seed(3)
    expected = call(other, batch).loss
    expected.backward()
    assert torch.equal(loss, expected)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_verify_reports_equality() -> None:
    model, batch = make(CASES["bert"])
    report = memscale.verify(model, batch)
    assert report.equal, report.first_difference
