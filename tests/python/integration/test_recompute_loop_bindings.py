# SPDX-License-Identifier: Apache-2.0
"""What the loop binds for a forward alone: the recompute finds it, and what is bound since stays."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale

WIDTH = 16
SCALE = 1.0
MASK: Any = None
SETTINGS = ModuleType("settings_of_a_test")
sys.modules["settings_of_a_test"] = SETTINGS
torch.test_scale = 1.0


def closed() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    scale = 1.0

    def scaled(h: Tensor) -> Tensor:
        return h * scale

    def put(value: float) -> None:
        nonlocal scale
        scale = value

    return scaled, put


scaled, put_closed = closed()


def shape(h: Tensor) -> Tensor:
    return h * shape.scale  # type: ignore[attr-defined, no-any-return]


def other_shape(h: Tensor) -> Tensor:
    return h.square()


shape.scale = 1.0  # type: ignore[attr-defined]


def raised(h: Tensor, to: float = 1.0, *, by: float = 1.0) -> Tensor:
    return h * to * by


def other_raised(h: Tensor, to: float = 1.0, *, by: float = 1.0) -> Tensor:
    return h.square()


class Block(nn.Module):
    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def inner(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        import settings_of_a_test  # type: ignore[import-not-found]

        h = self.inner(scaled(shape(raised(self.up(x) * SCALE * self.of_class))))
        h = h * settings_of_a_test.scale * torch.test_scale
        return x + self.down(nn.functional.gelu(h.tanh() if MASK is None else torch.tanh(h * MASK)))


@contextmanager
def bound(place: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(place, name)
    is_own = name in vars(place) or isinstance(place, FunctionType)
    setattr(place, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(place, name, before)
        else:
            delattr(place, name)


@contextmanager
def bound_in_closure() -> Iterator[None]:
    put_closed(2.0)
    try:
        yield
    finally:
        put_closed(1.0)


def other_linear(self: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, self.weight * 2.0, self.bias)


def linear_of_half(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight.t() * 0.5)


def half_call(self: nn.Module, *args: Any) -> Any:
    return 0.5 * nn.Module._call_impl(self, *args)


HERE = sys.modules[__name__]
BINDINGS: dict[str, Callable[[], Any]] = {
    "global": lambda: bound(HERE, "SCALE", 2.0),
    "large tensor": lambda: bound(HERE, "MASK", torch.rand(256, 4 * WIDTH)),
    "function": lambda: bound(HERE, "shape", other_shape),
    "attribute of a function": lambda: bound(shape, "scale", 2.0),
    "class": lambda: bound(Block, "of_class", 2.0),
    "method": lambda: bound(Block, "inner", lambda self, h: h.sigmoid()),
    "closure": bound_in_closure,
    "another Python module": lambda: bound(SETTINGS, "scale", 2.0),
    "name in torch": lambda: bound(torch, "test_scale", 2.0),
    "function of torch": lambda: bound(nn.functional, "gelu", torch.relu),
    "method of tensors": lambda: bound(Tensor, "tanh", lambda h: h.sigmoid()),
    "operator of tensors": lambda: bound(Tensor, "__add__", lambda self, other: torch.sub(self, other)),
    "function that a library uses": lambda: bound(nn.functional, "linear", linear_of_half),
    "call of modules": lambda: bound(nn.Module, "__call__", half_call),
    "default": lambda: bound(raised, "__defaults__", (2.0,)),
    "default of a keyword": lambda: bound(raised, "__kwdefaults__", {"by": 2.0}),
    "code": lambda: bound(raised, "__code__", other_raised.__code__),
    "class of torch": lambda: bound(nn.Linear, "forward", other_linear),
}


def trained(binding: Callable[[], Any], is_wrapped: bool) -> list[Any]:
    SETTINGS.scale = 1.0  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(256, WIDTH)
    if is_wrapped:
        memscale.wrap(model, memory_budget=1, sample_input=x, force_optimize=True, enable_logging=False)
    found: list[Any] = []
    for step in range(3):
        torch.manual_seed(step)
        with binding():
            loss = model(x).square().mean()
        present = [dict(vars(place)) for place in (Block, nn.Linear, SETTINGS)], SCALE, nn.functional.gelu
        loss.backward()
        after = [dict(vars(place)) for place in (Block, nn.Linear, SETTINGS)], SCALE, nn.functional.gelu
        assert after == present
        found.append(loss.item())
    if is_wrapped:
        assert memscale.executor_of(model).plan.active
        memscale.detach(model)
    return found + [parameter.grad.tolist() for parameter in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", BINDINGS)
def test_what_holds_for_a_forward(kind: str) -> None:
    assert trained(BINDINGS[kind], is_wrapped=True) == trained(BINDINGS[kind], is_wrapped=False)


@pytest.mark.parametrize("is_new", [False, True], ids=["another", "one more"])
def test_an_entry_in_a_registry_of_a_library(is_new: bool) -> None:
    """transformers asks one for the function that computes attention."""
    transformers = pytest.importorskip("transformers")
    registry = transformers.AttentionInterface
    plain, name = registry._global_mapping["sdpa"], "test" if is_new else "sdpa"

    def halved(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return plain(*args, **kwargs)[0] * 0.5, None

    def train(is_wrapped: bool) -> list[Any]:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=31, **sizes))
        ids, found = torch.arange(60).view(2, 30) % 31, []
        if is_wrapped:
            batch = {"input_ids": ids, "labels": ids}
            memscale.wrap(
                model, memory_budget=1, sample_input=batch, force_optimize=True, enable_logging=False
            )
        for _ in range(2):
            registry.register(name, halved)
            model.config._attn_implementation = name
            try:
                loss = model(input_ids=ids, labels=ids).loss
            finally:
                registry._global_mapping.pop(name)
                registry.register("sdpa", plain)
            model.config._attn_implementation = "sdpa"
            before = dict(registry._global_mapping)
            loss.backward()
            assert registry._global_mapping == before
            found.append(loss.item())
        if is_wrapped:
            assert any("attn" in choice.module for choice in memscale.executor_of(model).plan.active)
        return found + [parameter.grad.tolist() for parameter in model.parameters()]

    assert train(is_wrapped=True) == train(is_wrapped=False)


OF_A_LIBRARY = """
import torch

SCALE = 1.0
ACTIVATIONS = {"act": torch.tanh}


class Settings:
    table = {"gain": 1.0}

    def __init__(self):
        self.shift, self.flags = 0.0, {"negates": False}


class Helper:
    factor = 1.0

    @classmethod
    def scaled(cls, h):
        return h * cls.factor


settings = Settings()


def act(h):
    return ACTIVATIONS["act"](h)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        h = Helper.scaled(act(self.up(x))) * SCALE * settings.table["gain"] + settings.shift
        return x + self.down(torch.tanh(-h if settings.flags["negates"] else h))
"""

PLACES: dict[str, Callable[[ModuleType], tuple[dict[str, Any] | Any, str, Any]]] = {
    "global": lambda library: (library, "SCALE", 2.0),
    "entry": lambda library: (library.ACTIVATIONS, "act", torch.sigmoid),
    "attribute of an object": lambda library: (library.settings, "shift", 2.0),
    "entry in an object": lambda library: (library.settings.flags, "negates", True),
    "entry in a class": lambda library: (library.Settings.table, "gain", 2.0),
    "class": lambda library: (library.Helper, "factor", 2.0),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_an_installed_library_has(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's own modules read it; it is installed, so its code is not the program's."""
    library = ModuleType("library_of_a_test")
    library.__file__ = f"{sysconfig.get_path('purelib')}/library_of_a_test.py"
    monkeypatch.setitem(sys.modules, library.__name__, library)
    exec(OF_A_LIBRARY, vars(library))
    holder, name, value = PLACES[place](library)
    put = holder.__setitem__ if isinstance(holder, dict) else functools.partial(setattr, holder)
    plain = holder[name] if isinstance(holder, dict) else getattr(holder, name)

    def train(is_wrapped: bool) -> list[Any]:
        torch.manual_seed(0)
        model, x, found = nn.Sequential(*(library.Block() for _ in range(4))), torch.randn(64, WIDTH), []
        if is_wrapped:
            memscale.wrap(model, memory_budget=1, sample_input=x, force_optimize=True, enable_logging=False)
            assert memscale.executor_of(model).plan.active
        for _ in range(2):
            put(name, value)
            loss = model(x).square().mean()
            put(name, plain)
            loss.backward()
            assert (holder[name] if isinstance(holder, dict) else getattr(holder, name)) is plain
            found.append(loss.item())
        return found + [parameter.grad.tolist() for parameter in model.parameters()]  # type: ignore[union-attr]

    assert train(is_wrapped=True) == train(is_wrapped=False)
