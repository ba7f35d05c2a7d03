# SPDX-License-Identifier: Apache-2.0
"""A recompute runs in the world of its forward: what modules read while they compute, and PyTorch's settings.

Each case is a model whose blocks read something that holds around the forward only. Backward comes later.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import memscale

WIDTH = 16


def differing(
    build: Callable[[], nn.Module],
    batch: Callable[[int], tuple[Any, ...]],
    steps: int = 3,
    planned: bool = True,
) -> list[int]:
    """Numbers of the tensors (losses, gradients) in which training under a plan differs from plain training.

    Args:
        build: makes the model.
        batch: of a step.
        steps: of training.
        planned: modules must be recomputed; False: a plan may leave all as they are.
    """

    def train(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, seen = build(), []
        if wrapped:
            memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False))
        for step in range(steps):
            torch.manual_seed(step)
            loss = model(*batch(step)).square().mean()
            loss.backward()
            seen += [loss.detach()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        if wrapped:
            plan = memscale.executor_of(model).plan
            assert plan is not None
            assert plan.active or not planned
        return seen

    plain, other = train(False), train(True)
    assert len(plain) == len(other) > 0
    return [i for i, (a, b) in enumerate(zip(plain, other, strict=True)) if not torch.equal(a, b)]


# ---- what hangs on modules -----------------------------------------------------------------------


class Knobs:
    """A configuration that blocks share."""

    def __init__(self) -> None:
        self.scale, self.inner = 1.0, {"list": [1.0]}


class Slotted:
    """One without a dictionary: its values are looked at through what holds it."""

    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Block(nn.Module):
    """Reads a scale from wherever `read` finds it."""

    def __init__(self, knobs: Knobs) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale, self.settings, self.shift = 1.0, {"scale": 1.0, "nested": {"scale": 1.0}}, None
        self.steps, self.knobs, self.active, self.queue = [1.0], knobs, {"base"}, deque([1.0])
        self.root: Any = None
        self.pair = ([1.0], "name")
        scale = 1.0

        def closed_over(x: Tensor) -> Tensor:
            return x * scale

        def set_closed_over(value: float) -> None:
            nonlocal scale
            scale = value

        self.function, self.set_function = closed_over, set_closed_over
        self.partial = functools.partial(torch.mul, other=torch.ones(()))
        self.late = "late" in vars(self)

    def factor(self) -> float:
        """The product of all numbers that it reads."""
        factor = self.scale * self.settings["scale"] * self.settings["nested"]["scale"] * self.steps[-1]
        factor *= self.knobs.scale * self.knobs.inner["list"][0] * self.queue[0] * self.pair[0][0]
        factor *= 0.5 if "adapter" in self.active else 1.0
        factor *= vars(self).get("late_scale", 1.0) * self.settings.get("late", 1.0)
        owner = self.root() if isinstance(self.root, weakref.ref) else self.root
        return factor if owner is None else factor * owner.scale

    def mix(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = self.function(torch.tanh(self.up(x)) * self.factor())
        if self.shift is not None:
            h = h + self.shift
        return x + self.down(nn.functional.gelu(self.mix(h)))


Change = Callable[[Block, "Net", float], None]


def set_attribute(name: str) -> Change:
    return lambda block, net, value: setattr(block, name, value)


def patch_method(block: Block, net: Net, value: float) -> None:
    block.mix = (
        types.MethodType(lambda self, x: x * value, block) if value != 1.0 else type(block).mix.__get__(block)
    )


def patch_forward(block: Block, net: Net, value: float) -> None:
    if value == 1.0:
        vars(block.up).pop("forward", None)
    else:
        block.up.forward = lambda x: nn.Linear.forward(block.up, x) * value


def set_late(block: Block, net: Net, value: float) -> None:
    vars(block).pop("late_scale", None)
    if value != 1.0:
        block.late_scale = value


def set_late_entry(block: Block, net: Net, value: float) -> None:
    block.settings.pop("late", None)
    if value != 1.0:
        block.settings["late"] = value


CHANGES: dict[str, Change] = {
    "number": set_attribute("scale"),
    "tensor": lambda block, net, value: setattr(
        block, "shift", torch.full((1,), value) if value != 1.0 else None
    ),
    "entry": lambda block, net, value: block.settings.__setitem__("scale", value),
    "nested entry": lambda block, net, value: block.settings["nested"].__setitem__("scale", value),
    "new attribute": set_late,
    "new entry": set_late_entry,
    "list appended": lambda block, net, value: (
        block.steps.append(value) if value != 1.0 else block.steps.pop()
    ),
    "list in a tuple": lambda block, net, value: block.pair[0].__setitem__(0, value),
    "queue": lambda block, net, value: block.queue.__setitem__(0, value),
    "set": lambda block, net, value: (
        block.active.add("adapter") if value != 1.0 else block.active.discard("adapter")
    ),
    "dictionary exchanged": lambda block, net, value: setattr(
        block, "settings", {"scale": value, "nested": {"scale": 1.0}}
    ),
    "configuration": lambda block, net, value: setattr(block.knobs, "scale", value),
    "in a configuration": lambda block, net, value: block.knobs.inner["list"].__setitem__(0, value),
    "closed over": lambda block, net, value: block.set_function(value),
    "method": patch_method,
    "inner forward": patch_forward,
    "root": lambda block, net, value: setattr(net, "scale", value),
}


class Net(nn.Module):
    """Sets something on its blocks for the time of its forward."""

    def __init__(self, change: Change, back: Callable[[Net], Any] | None = None) -> None:
        super().__init__()
        knobs = Knobs()
        self.blocks, self.scale = nn.ModuleList(Block(knobs) for _ in range(4)), 1.0
        self.change = [change]
        for block in self.blocks if back is not None else ():
            vars(block)["root"] = back(self)

    def forward(self, x: Tensor, value: float) -> Tensor:
        for block in self.blocks:
            self.change[0](block, self, value)
        for block in self.blocks:
            x = block(x)
        for block in self.blocks:
            self.change[0](block, self, 1.0)
        return x


def numbers_and_value(step: int) -> tuple[Tensor, float]:
    return torch.randn(8, 4, WIDTH), 0.5 + step / 3


@pytest.mark.parametrize("kind", CHANGES)
def test_what_hangs_on_modules(kind: str) -> None:
    backs = {"root": weakref.ref}
    # What is bound to another object at the end of forward may be a state that a recompute would change.
    planned = kind not in ("dictionary exchanged", "method")
    assert not differing(lambda: Net(CHANGES[kind], backs.get(kind)), numbers_and_value, planned=planned)


@pytest.mark.parametrize(
    "back", [weakref.proxy, weakref.ref, lambda net: net.scale_holder], ids=["proxy", "ref", "object"]
)
def test_a_root_that_its_blocks_refer_to(back: Callable[[Net], Any]) -> None:
    class WithHolder(Net):
        def __init__(self) -> None:
            holder = Knobs()

            def self_change(block: Block, net: Net, value: float) -> None:
                net.scale = holder.scale = value

            object.__setattr__(self, "scale_holder", holder)
            super().__init__(self_change)
            object.__setattr__(self, "scale_holder", holder)
            for block in self.blocks:
                vars(block)["root"] = back(self)

    assert not differing(WithHolder, numbers_and_value)


def test_set_used_and_reset_inside_of_a_call() -> None:
    """Before and after the whole forward, and before and after the block, nothing differs."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lines, self.mode = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), "idle"

        def forward(self, x: Tensor) -> Tensor:
            for i, line in enumerate(self.lines):
                self.mode = f"line {i}"
                x = torch.tanh(line(x)) * (2.0 if self.mode == "line 1" else 0.5)
            self.mode = "idle"
            return x

    assert not differing(
        lambda: nn.Sequential(*(Inner() for _ in range(4))), lambda step: (torch.randn(64, WIDTH),)
    )


def test_a_counter_counts_forwards() -> None:
    """What a forward changes on its module, a recompute does not change again."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.stats = nn.Linear(WIDTH, WIDTH), {"calls": 0}

        def forward(self, x: Tensor) -> Tensor:
            self.stats["calls"] += 1
            return torch.tanh(self.line(x))

    model = nn.Sequential(*(Counts() for _ in range(4)))
    memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False))
    for _ in range(2):
        model(torch.randn(8, WIDTH)).sum().backward()
    assert [block.stats["calls"] for block in model] == [2, 2, 2, 2]


def test_what_was_set_since_is_there_after_backward() -> None:
    model = Net(CHANGES["number"])
    memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False))
    loss = model(torch.randn(8, 4, WIDTH), 0.5).sum()
    for i, block in enumerate(model.blocks):
        block.scale, block.settings["scale"], block.mark = 10.0 + i, 20.0 + i, i
    loss.backward()
    assert [(b.scale, b.settings["scale"], b.mark) for b in model.blocks] == [
        (10.0 + i, 20.0 + i, i) for i in range(4)
    ]


def test_and_after_a_backward_that_failed() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = Net(CHANGES["number"])
    memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False))
    x = torch.randn(8, 4, WIDTH, requires_grad=True)
    loss = model(Failing.apply(x), 0.5).sum()
    model.blocks[0].scale = 7.0
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert model.blocks[0].scale == 7.0


# ---- hooks for one forward -------------------------------------------------------------------------


class Hooked(nn.Module):
    """Registers hooks inside its blocks for the time of its forward."""

    def __init__(self, register: Callable[[nn.Module, float], Any]) -> None:
        super().__init__()
        self.blocks, self.register = nn.ModuleList(Block(Knobs()) for _ in range(4)), [register]

    def forward(self, x: Tensor, value: float) -> Tensor:
        handles = [self.register[0](block.up, value) for block in self.blocks]
        for block in self.blocks:
            x = block(x)
        for handle in handles:
            handle.remove()
        return x


HOOKS: dict[str, Callable[[nn.Module, float], Any]] = {
    "forward": lambda module, value: module.register_forward_hook(lambda m, args, out: out * value),
    "pre": lambda module, value: module.register_forward_pre_hook(lambda m, args: (args[0] * value,)),
    "kwargs": lambda module, value: module.register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0] * value,), kwargs), with_kwargs=True
    ),
    "backward": lambda module, value: module.register_full_backward_hook(
        lambda m, into, out: tuple(None if g is None else g * value for g in into)
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_for_one_forward(kind: str) -> None:
    torch.manual_seed(0)

    def train(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, seen = Hooked(HOOKS[kind]), []
        if wrapped:
            memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False))
        for step in range(3):
            torch.manual_seed(step)
            model(*numbers_and_value(step)).square().mean().backward()
            seen += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
        return seen

    assert all(map(torch.equal, train(False), train(True)))


# ---- PyTorch's settings ------------------------------------------------------------------------------


@contextlib.contextmanager
def setting(read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


class Doubling(TorchFunctionMode):
    """Doubles what `torch.tanh` returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


class Halving(TorchDispatchMode):
    """Halves what `aten.gelu` is given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.gelu.default:
            args = (args[0] * 0.5, *args[1:])
        return func(*args, **(kwargs or {}))


SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


@contextlib.contextmanager
def scale_variable() -> Iterator[None]:
    token = SCALE.set(0.25)
    try:
        yield
    finally:
        SCALE.reset(token)


def deterministic() -> contextlib.AbstractContextManager[None]:
    read, write = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    return setting(read, write, True)


AROUND: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "attention backend": lambda: sdpa_kernel(SDPBackend.MATH),
    "attention backends in order": lambda: sdpa_kernel(
        [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True
    ),
    "default dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": lambda: torch.device("cpu"),
    "determinism": deterministic,
    "oneDNN off": lambda: torch.backends.mkldnn.flags(enabled=False),
    "threads": lambda: setting(torch.get_num_threads, torch.set_num_threads, 1),
    "function mode": Doubling,
    "dispatch mode": Halving,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "context variable": scale_variable,
}


class Attention(nn.Module):
    """Reads settings: default dtype and device, whether algorithms are deterministic, a context variable."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        bias = torch.linspace(0, 1, y.shape[-2])[:, None]
        y = torch.tanh((y + bias.to(y.dtype) ** 3).transpose(1, 2).flatten(2))
        if torch.are_deterministic_algorithms_enabled():
            y = y * 0.5
        return x + nn.functional.gelu(self.out(y)) * SCALE.get()


class Around(nn.Module):
    """Its blocks run inside a context."""

    def __init__(self, around: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.blocks, self.around = nn.ModuleList(Attention() for _ in range(3)), [around]

    def forward(self, x: Tensor) -> Tensor:
        with self.around[0]():
            for block in self.blocks:
                x = block(x)
        return x


@pytest.mark.parametrize("kind", AROUND)
def test_settings_around_the_forward(kind: str) -> None:
    def batch(step: int) -> tuple[Tensor]:
        return (torch.randn(2, 40, WIDTH),)

    before = torch.get_default_dtype(), torch.get_num_threads(), torch.backends.mkldnn.enabled
    assert not differing(lambda: Around(AROUND[kind]), batch, steps=2)
    assert before == (torch.get_default_dtype(), torch.get_num_threads(), torch.backends.mkldnn.enabled)
    assert not torch._C._len_torch_function_stack()
    assert not torch._C._len_torch_dispatch_stack()


def test_settings_around_the_backward_do_not_reach_the_recompute() -> None:
    def train(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Around(contextlib.nullcontext)
        if wrapped:
            memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False))
        loss = model(torch.randn(2, 40, WIDTH)).square().mean()
        with AROUND["default dtype"](), AROUND["attention backend"](), Doubling(), scale_variable():
            loss.backward()
            assert torch.get_default_dtype() == torch.float64
            assert torch._C._len_torch_function_stack() == 1
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, train(False), train(True)))


class Cell(nn.Module):
    """Its weights are computed from others, at each use."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.up = orthogonal(nn.Linear(WIDTH, WIDTH)), weight_norm(nn.Linear(WIDTH, 4 * WIDTH))
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x)) + self.down(torch.relu(self.up(x)))
        return x


@pytest.mark.parametrize("where", ["inside", "outside", "shared"])
def test_cached_parametrizations(where: str) -> None:
    def train(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        shared = Cell()
        cells = [shared if where == "shared" else Cell() for _ in range(3)]
        model, seen = nn.Sequential(*cells, nn.Linear(WIDTH, 4)), []
        if wrapped:
            memscale.wrap(model, memscale.Config(memory_budget=1, enable_logging=False))
        for step in range(3):
            torch.manual_seed(step)
            with parametrize.cached():
                loss = model(torch.randn(8, WIDTH)).square().mean()
                if where == "inside":
                    loss.backward()
            if where != "inside":
                loss.backward()
            seen += [loss.detach()] + [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
        assert not parametrize._cache_enabled
        assert not parametrize._cache
        return seen

    assert all(map(torch.equal, train(False), train(True)))
