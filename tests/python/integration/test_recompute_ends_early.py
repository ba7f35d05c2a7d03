# SPDX-License-Identifier: Apache-2.0
"""A recompute ends with the last tensor that is wanted, in the middle of the module's code.

What that code has set until then and would have set back, and what it does to tensors that are in use (hooks,
gradients), is undone.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.errors import RecomputeError
from memscale.torchkit import python_generators

WIDTH, BLOCKS, STEPS = 16, 5, 3
STEP = 0
FLAG = 1.0
TABLE: dict[str, float] = {}
STACK: list[float] = []
LOCAL = threading.local()
SEEN: list[Any] = []


class Settings:
    """A class of no module."""

    scale = 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))).sin())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def set_and_reset(set_it: Callable[[Block], object], reset: Callable[[Block, Any], object]) -> type[Block]:
    """A block that sets something, uses it, and sets it back without `finally`."""

    class Sets(Block):
        def forward(self, x: Tensor) -> Tensor:
            before = set_it(self)
            y = self.body(x)
            reset(self, before)
            return y

    return Sets


def set_default_dtype(block: Block) -> object:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    return before


def enter_autocast(block: Block) -> object:
    context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=False)
    context.__enter__()
    return context


def set_filters(block: Block) -> object:
    context = warnings.catch_warnings()
    context.__enter__()
    warnings.simplefilter("error")
    return context


def set_flag(value: float) -> float:
    global FLAG
    before, FLAG = FLAG, value
    return before


def swap(place: Any, name: str, value: Any) -> Any:
    before = getattr(place, name, None)
    setattr(place, name, value)
    return before


def set_class_attribute(block: Block) -> object:
    before, Settings.scale = Settings.scale, 2.0
    return before


def reset_class_attribute(block: Block, before: Any) -> None:
    Settings.scale = before


def set_local(block: Block) -> None:
    LOCAL.depth = getattr(LOCAL, "depth", 0) + 1


def reset_local(block: Block, before: Any) -> None:
    LOCAL.depth -= 1


def seed(block: Block) -> object:
    before = torch.get_rng_state()
    torch.manual_seed(3)
    torch.rand(())
    return before


SETS: dict[str, tuple[type[Block], Callable[[nn.Module], object]]] = {
    "dtype": (
        set_and_reset(set_default_dtype, lambda block, before: torch.set_default_dtype(before)),
        lambda model: torch.get_default_dtype(),
    ),
    "autocast": (
        set_and_reset(enter_autocast, lambda block, context: context.__exit__(None, None, None)),
        lambda model: (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
    ),
    "anomaly": (
        set_and_reset(
            lambda block: torch.set_anomaly_enabled(True), lambda block, _: torch.set_anomaly_enabled(False)
        ),
        lambda model: torch.is_anomaly_enabled(),
    ),
    "warnings": (
        set_and_reset(set_filters, lambda block, context: context.__exit__(None, None, None)),
        lambda model: len(warnings.filters),
    ),
    "training": (
        set_and_reset(lambda block: block.norm.eval(), lambda block, _: block.norm.train()),
        lambda model: [module.training for module in model.modules()],
    ),
    "requires_grad": (
        set_and_reset(
            lambda block: block.up.weight.requires_grad_(False),
            lambda block, _: block.up.weight.requires_grad_(True),
        ),
        lambda model: [parameter.requires_grad for parameter in model.parameters()],
    ),
    "global": (
        set_and_reset(lambda block: set_flag(2.0), lambda block, before: set_flag(before)),
        lambda model: FLAG,
    ),
    "dictionary": (
        set_and_reset(lambda block: TABLE.update(scale=1.0), lambda block, _: TABLE.pop("scale")),
        lambda model: dict(TABLE),
    ),
    "stack": (
        set_and_reset(lambda block: STACK.append(1.0), lambda block, _: STACK.pop()),
        lambda model: list(STACK),
    ),
    "class": (set_and_reset(set_class_attribute, reset_class_attribute), lambda model: Settings.scale),
    "setattr": (
        set_and_reset(
            lambda block: swap(Settings, "scale", 2.0), lambda block, before: swap(Settings, "scale", before)
        ),
        lambda model: Settings.scale,
    ),
    "thread": (set_and_reset(set_local, reset_local), lambda model: vars(LOCAL).get("depth")),
    "seed": (set_and_reset(seed, lambda block, before: torch.set_rng_state(before)), lambda model: 0),
}  # fmt: skip


class Scales(Block):
    """A hook on the input, which a second registration would apply again."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return self.body(x)


class ScalesOnNode(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda gradients: tuple(item * 0.5 for item in gradients))
        return self.body(x)


class CountsOnWeight(Block):
    """Registers once, by a mark on the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.up.weight, "mark"):
            hook = lambda gradient: SEEN.append(1) or gradient * 0.5  # type: ignore[func-returns-value]  # noqa: E731
            self.up.weight.mark = self.up.weight.register_hook(hook)  # type: ignore[attr-defined]
        return self.body(x)


class Accumulated(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.register_post_accumulate_grad_hook(lambda weight: SEEN.append(1))
        return self.body(x)


class Decays(Block):
    """Changes a gradient that is there when it runs."""

    def forward(self, x: Tensor) -> Tensor:
        if self.up.weight.grad is not None:
            self.up.weight.grad.mul_(0.5)
        return self.body(x)


class Learns(Block):
    """A backward of its own, for a local loss, from the second step on."""

    def forward(self, x: Tensor) -> Tensor:
        if STEP > 0:
            self.up(x.detach()).square().mean().backward()
        return self.body(x)


class Drops(Block):
    """Stochastic depth by Python's and NumPy's generators, after a warm-up without."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0
        if STEP > 0:
            scale = random.random() + np.random.rand() + random.gauss(0, 1)
        return self.body(x * scale)


class Forks(Block):
    """Draws inside `fork_rng`, and puts Python's generator back itself."""

    def forward(self, x: Tensor) -> Tensor:
        before = random.getstate()
        scale = random.random()
        random.setstate(before)
        with torch.random.fork_rng():
            x = nn.functional.dropout(x * scale, 0.5)
        return self.body(x)


class InferenceBuffer(Block):
    """Reads a tensor from inference mode, which has no version counter."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + self.table.clone())


class Twins(Block):
    """One buffer under two names; the one is updated, the other read."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.seen: Tensor
        self.register_buffer("mean", torch.zeros(2 * 1024))
        self.register_buffer("seen", self.mean)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean[:WIDTH].mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.body(x - self.seen[:WIDTH])


ALTER = (
    Scales, ScalesOnNode, CountsOnWeight, Accumulated, Decays, Learns, Drops, Forks, InferenceBuffer, Twins,
)  # fmt: skip


def trained(kind: type[Block], wraps: bool, with_sample: bool = True, forwards: int = 1) -> list[Any]:
    """Losses, gradients, buffers and generators of some steps of a model of such blocks."""
    global STEP
    STEP = 0
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(0)
    SEEN.clear()
    model = nn.Sequential(*(kind() for _ in range(BLOCKS))).train()
    batch = torch.randn(256, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if wraps:
        config = memscale.Config(memory_budget=1, enable_logging=False)
        memscale.wrap(model, config, sample_input=batch if with_sample else None, optimizer=optimizer)
    found: list[Any] = []
    for number in range(STEPS):
        STEP = number
        losses = [model(batch * scale).square().mean() for scale in range(1, forwards + 1)]
        for loss in losses:
            loss.backward()
        found += [*losses, *(parameter.grad for parameter in model.parameters()), *model.buffers()]
        found += [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes(), len(SEEN)]
        optimizer.step()
        optimizer.zero_grad()
    if wraps:
        executor = memscale.executor_of(model)
        assert executor.plan is not None and executor.plan.active
        memscale.detach(model)
    return found


def assert_equal(got: list[Any], expected: list[Any]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        if isinstance(other, Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("name", SETS)
def test_what_a_recompute_has_set_is_set_back(name: str) -> None:
    kind, state = SETS[name]
    expected = trained(kind, wraps=False)
    probe = nn.Sequential(kind()).train()
    before = state(probe)
    got = trained(kind, wraps=True)
    assert state(probe) == before
    assert_equal(got, expected)


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("kind", ALTER)
def test_what_is_done_once_in_plain_pytorch_is_done_once(kind: type[Block], forwards: int) -> None:
    with_sample = kind is not Learns
    if kind is Learns and forwards > 1:
        pytest.skip("its backward is seen by the plan for two forwards, and it is not checkpointed")
    expected = trained(kind, wraps=False, forwards=forwards)
    assert_equal(trained(kind, True, with_sample, forwards), expected)


def test_a_backward_in_forward_for_which_hooks_fire_is_refused() -> None:
    class Watched(Learns):
        def __init__(self) -> None:
            super().__init__()
            self.up.weight.register_hook(lambda gradient: gradient)

    with pytest.raises(RecomputeError, match="changes gradients of parameters"):
        trained(Watched, wraps=True)


def test_derivatives_in_forward_direction_run_as_they_are() -> None:
    from torch.autograd import forward_ad

    losses = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(BLOCKS))).train()
        batch = torch.randn(64, WIDTH)
        if wraps:
            config = memscale.Config(memory_budget=1, enable_logging=False)
            memscale.wrap(model, config, sample_input=batch)
        with forward_ad.dual_level():
            loss = model(forward_ad.make_dual(batch, torch.ones_like(batch))).square().mean()
        loss.backward()
        losses += [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    half = len(losses) // 2
    assert_equal(losses[half:], losses[:half])


def test_states_of_generators_are_shared_while_nobody_draws() -> None:
    states = python_generators.present()
    assert python_generators.present() is states
    drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    moved = python_generators.present()
    assert moved is not states and not states.are_present()
    second = [random.gauss(0, 1), np.random.randn()]  # both were left over, and no word moves
    assert not moved.are_present()
    states.put_back()
    assert [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()] == drawn
    assert [random.gauss(0, 1), np.random.randn()] == second


def test_numpy_with_another_generator_is_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_generators, "_numpy_is_known", lambda: False)
    monkeypatch.setattr(python_generators, "_PYTHON_IS_KNOWN", False)
    states = python_generators.States()
    assert states.are_present()
    np.random.rand()
    assert not states.are_present()
    states.put_back()
    assert states.are_present()
    random.random()
    assert not states.are_present()
