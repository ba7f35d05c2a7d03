# SPDX-License-Identifier: Apache-2.0
"""Hooks that a module, or the code around a model, registers on inner modules for the time of one forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from amounts import also

Register = Callable[["Block", Counter[str]], Any]
"""Puts one hook on something inside of a block, and gives its handle."""


class Block(nn.Module):
    """A branch around three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Listed(Block):
    """Its layers lie in a list, which is not called itself."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList([nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)])
        self.up, self.act, self.down = self.layers


class Around(nn.Module):
    """A block one deeper."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.inner = kind()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(x)).sin()


class Net(nn.Module):
    def __init__(self, kind: type[Block], register: Register, fired: Counter[str], inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Around(kind) for _ in range(4))
        self.register, self.fired, self.inside = register, fired, inside

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [self.register(block.inner, self.fired) for block in self.blocks]
        yield
        for handle in handles:
            handle.remove()

    def forward(self, x: Tensor) -> Tensor:
        if not self.inside:
            return self.through(x)
        with self.hooked():
            return self.through(x)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def forward(block: Block, fired: Counter[str]) -> Any:
    return block.up.register_forward_hook(lambda module, args, out: fired.update(["forward"]) or out * 1.5)


def forward_with_kwargs(block: Block, fired: Counter[str]) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        fired.update(["forward"])
        return out + len(kwargs) + 0.5

    return block.act.register_forward_hook(hook, with_kwargs=True, always_call=True)


def pre(block: Block, fired: Counter[str]) -> Any:
    return block.down.register_forward_pre_hook(lambda module, args: fired.update(["pre"]) or (args[0] * 2,))


def pre_with_kwargs(block: Block, fired: Counter[str]) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        fired.update(["pre"])
        return (args[0] - 1,), kwargs

    return block.down.register_forward_pre_hook(hook, with_kwargs=True)


def once(block: Block, fired: Counter[str]) -> Any:
    """Removes itself as soon as it has fired."""

    def hook(module: nn.Module, args: Any) -> Any:
        fired.update(["once"])
        handle.remove()
        return (args[0] * 3,)

    handle = block.up.register_forward_pre_hook(hook)
    return handle


def observer(block: Block, fired: Counter[str]) -> Any:
    return block.up.register_forward_hook(lambda *args: fired.update(["observer"]))


def backward(block: Block, fired: Counter[str]) -> Any:
    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        fired.update(["backward"])
        return tuple(None if grad is None else grad * 0.5 for grad in grad_input)

    return block.down.register_full_backward_hook(hook)


def backward_pre(block: Block, fired: Counter[str]) -> Any:
    def hook(module: nn.Module, grad_output: Any) -> Any:
        fired.update(["backward pre"])
        return tuple(grad * 0.25 for grad in grad_output)

    return block.up.register_full_backward_pre_hook(hook)


KINDS = [forward, forward_with_kwargs, pre, pre_with_kwargs, once, observer, backward, backward_pre]


def train(
    register: Register, kind: type[Block], inside: bool, wrapped: bool, sample: bool
) -> tuple[list[Tensor], Counter[str]]:
    torch.manual_seed(0)
    fired, seen = Counter[str](), []
    model, x = Net(kind, register, fired, inside), torch.linspace(-1, 1, 4096).view(256, 16)
    if wrapped:
        config = memscale.Config(memory_budget=1, enable_logging=False)
        memscale.wrap(model, config, sample_input=(x,) if sample else None)
        assert not fired
    for _ in range(2):
        if inside:
            loss = model(x).square().mean()
        else:
            with model.hooked():
                loss = model(x).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return seen, fired


@pytest.mark.parametrize("kind", [Block, Listed])
@pytest.mark.parametrize(("inside", "sample"), [(True, True), (False, False), *also((True, False))])
@pytest.mark.parametrize("register", KINDS, ids=lambda register: register.__name__)
def test_every_bit_is_kept(register: Register, inside: bool, sample: bool, kind: type[Block]) -> None:
    plain, fired = train(register, kind, inside, False, sample)
    planned, fired_too = train(register, kind, inside, True, sample)
    assert all(map(torch.equal, plain, planned))
    assert fired == fired_too
