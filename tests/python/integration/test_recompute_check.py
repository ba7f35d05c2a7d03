# SPDX-License-Identifier: Apache-2.0
"""Recomputes are compared with their forwards by value: planted defects are found, and equal ones are not."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
import tallies
from memscale import _core
from memscale.errors import RecomputeError
from memscale.techniques.checkpoint import recompute_check

WIDTH = 16


WORLD = tallies.World()
"""What defective blocks read, where no code looks."""

THREAD: Any = threading.main_thread
"""What the thread has for attributes no recompute puts back."""


class Block(nn.Module):
    """A residual MLP, with a place for a defect between its products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.defect(torch.tanh(self.up(x)))))

    def defect(self, h: Tensor) -> Tensor:
        return h


def model_of(kind: type[Block], depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(depth)))


def wrapped(model: nn.Module, check: str = "always") -> nn.Module:
    # One mode: blocks are recomputed each by itself, so that an error names one of them.
    config = memscale.Config(
        memory_budget=1, enable_logging=False, check_recompute=check, enable_offloading=False
    )
    return memscale.wrap(model, config, sample_input=(batch(),))


def batch() -> Tensor:
    return torch.randn(8, 4, WIDTH, generator=torch.Generator().manual_seed(1))


def backward_in_another_world(model: nn.Module) -> None:
    """Forward in one world, backward in another."""
    WORLD.clear()
    THREAD().scale = 1.0
    loss = model(batch()).square().mean()
    WORLD["now"] = True
    THREAD().scale = 1.5
    try:
        loss.backward()
    finally:
        WORLD.clear()
        del THREAD().scale


# ---- planted defects -------------------------------------------------------------------------------


class ReadsGlobal(Block):
    def defect(self, h: Tensor) -> Tensor:
        return h * (2.0 if "now" in WORLD else 1.0)


class ReadsThread(Block):
    def defect(self, h: Tensor) -> Tensor:
        return h * getattr(THREAD(), "scale", 1.0)  # type: ignore[no-any-return]


class DropsMask(Block):
    def defect(self, h: Tensor) -> Tensor:
        mask = torch.ones_like(h)
        if "now" not in WORLD:
            mask[..., ::7] = 0
        return h * mask


class TakesAnotherKernel(Block):
    """The same sum in another order: other last bits."""

    def defect(self, h: Tensor) -> Tensor:
        parts = h.split(WIDTH, -1)
        order = parts if "now" in WORLD else parts[::-1]
        total = order[0] * 0.3
        for part in order[1:]:
            total = total + part * 0.7
        return h + total.repeat(1, 1, 4)


class FlipsOneBit(Block):
    def defect(self, h: Tensor) -> Tensor:
        if "now" not in WORLD:
            return h
        flipped = h.detach().clone()
        flipped.view(torch.int32)[3, 1, 5] ^= 1
        return (
            h + (flipped - h.detach())
            if torch.equal(h + (flipped - h.detach()), flipped)
            else flipped + 0 * h
        )


OWN = random.SystemRandom()


class DrawsFromItsOwn(Block):
    """Random numbers that nobody can draw again: they are the system's."""

    def defect(self, h: Tensor) -> Tensor:
        return h * (1.0 + OWN.random())


class Shuffles(Block):
    """The same rows in another order."""

    def defect(self, h: Tensor) -> Tensor:
        return h[torch.arange(len(h)).flip(0)] if "now" in WORLD else h[torch.arange(len(h))]


class SavesMore(Block):
    def defect(self, h: Tensor) -> Tensor:
        return torch.sin(h) if "now" in WORLD else h


class SavesFewer(Block):
    def defect(self, h: Tensor) -> Tensor:
        return h if "now" in WORLD else torch.sin(h)


class SwallowsErrors(Block):
    """Its own `except` must not hide what was found."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return x + self.down(torch.sigmoid(self.defect(torch.tanh(self.up(x)))))
        except Exception:
            return x

    def defect(self, h: Tensor) -> Tensor:
        return h * (2.0 if "now" in WORLD else 1.0)


DEFECTS = [
    ReadsGlobal,
    ReadsThread,
    DropsMask,
    TakesAnotherKernel,
    FlipsOneBit,
    DrawsFromItsOwn,
    Shuffles,
    SavesMore,
    SavesFewer,
    SwallowsErrors,
]


@pytest.mark.parametrize("kind", DEFECTS)
def test_a_planted_defect_is_found(kind: type[Block]) -> None:
    model = wrapped(model_of(kind))
    with pytest.raises(RecomputeError) as caught:
        backward_in_another_world(model)
    error = caught.value
    assert error.module in ("0", "1", "2", "3")
    assert f'Config(exclude=("{error.module}",))' in str(error)
    assert error.cause
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.module, again.tensor, again.cause) == (
        str(error),
        error.module,
        error.tensor,
        error.cause,
    )


def test_the_cause_tells_what_changed_from_what_never_repeats() -> None:
    for kind, cause in (
        (ReadsGlobal, recompute_check.SAME_AGAIN),
        (DrawsFromItsOwn, recompute_check.OTHER_AGAIN),
    ):
        with pytest.raises(RecomputeError) as caught:
            backward_in_another_world(wrapped(model_of(kind)))
        assert caught.value.cause == cause
        assert "float32[8, 4, 64]" in caught.value.what


def test_the_same_world_passes() -> None:
    model, plain = wrapped(model_of(ReadsGlobal)), model_of(ReadsGlobal)
    for each in (model, plain):
        each(batch()).square().mean().backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_the_module_is_kept_for_the_rest_of_the_run() -> None:
    """After the error each later step is right, and a module that failed is not recomputed again."""
    model, failed = wrapped(model_of(ReadsGlobal)), set()
    for _ in range(6):
        model.zero_grad()
        try:
            backward_in_another_world(model)
        except RecomputeError as error:
            assert error.module not in failed
            failed.add(error.module)
            continue
        break
    plan = memscale.executor_of(model).plan
    assert failed == {"0", "1", "2"}  # the last one is in no plan: its backward comes first
    assert not [choice for choice in plan.active if choice.module in failed]
    plain = model_of(ReadsGlobal)
    backward_in_another_world(plain)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_what_the_error_says_to_write_helps() -> None:
    with pytest.raises(RecomputeError) as caught:
        backward_in_another_world(wrapped(model_of(ReadsGlobal)))
    assert caught.value.module == "2"
    config = memscale.Config(memory_budget=1, enable_logging=False, exclude=("0", "1", "2"))
    model = memscale.wrap(model_of(ReadsGlobal), config, sample_input=(batch(),))
    plain = model_of(ReadsGlobal)
    for each in (model, plain):
        backward_in_another_world(each)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


# ---- when it is compared ----------------------------------------------------------------------------


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Elements of the tensors that fingerprints are taken of."""
    seen: list[int] = []

    def fingerprint(tensor: Tensor, *args: Any) -> int:
        seen.append(tensor.numel())
        return int(_core.fingerprint(tensor, *args))

    with monkeypatch.context() as patch:
        patch.setattr(recompute_check, "_fingerprint", fingerprint)
        yield seen


def step(model: nn.Module) -> None:
    model(batch()).square().mean().backward()


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, list[int]] = {}
    for mode in ("always", "first", "off"):
        model = wrapped(model_of(Block), mode)
        step(model)
        model.zero_grad(set_to_none=False)
        step(model)  # another plan: gradients are there
        taken[mode] = []
        for _ in range(2):
            with counted(monkeypatch) as seen:
                step(model)
            taken[mode].append(len(seen))
    assert taken["always"][0] == taken["always"][1] > 0
    assert taken["first"] == [0, 0]
    assert taken["off"] == [0, 0]


def test_first_finds_a_defect_of_the_first_step() -> None:
    with pytest.raises(RecomputeError):
        backward_in_another_world(wrapped(model_of(ReadsGlobal), "first"))


def test_each_save_of_the_forward_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(model_of(Block))
    with counted(monkeypatch) as seen:
        step(model)
    forward, recompute = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert sorted(forward) == sorted(recompute)
    assert forward


def test_a_graph_that_is_kept_is_compared_again() -> None:
    model = wrapped(model_of(ReadsGlobal))
    WORLD.clear()
    loss = model(batch()).square().mean()
    loss.backward(retain_graph=True)
    WORLD["now"] = True
    with pytest.raises(RecomputeError):
        loss.backward()
    WORLD.clear()


NUMBERS: list[Callable[[], Tensor]] = [
    lambda: torch.randn(5, 7).t(),
    lambda: torch.randn(6, 8)[:, 2:5],
    lambda: torch.randn(1, 4).expand(3, 4),
    lambda: torch.randn(3, 4, dtype=torch.bfloat16),
    lambda: torch.randn(3, 4, dtype=torch.complex64),
    lambda: torch.ones(9, dtype=torch.bool),
    lambda: torch.empty(0, 3),
    lambda: torch.tensor(2.0),
]


@pytest.mark.parametrize("number", range(len(NUMBERS)))
def test_any_form_of_tensor(number: int) -> None:
    tensor = NUMBERS[number]()
    first = recompute_check.fingerprint(tensor, False)
    assert first is not None
    if tensor.numel() and 0 not in tensor.stride():
        other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        assert recompute_check.fingerprint(other, False) == first
        other[(-1,) * other.dim()] = 0
        assert recompute_check.fingerprint(other, False) != first
