# SPDX-License-Identifier: Apache-2.0
"""Contexts, hooks and attributes that are there for a forward, and no longer when its backward comes."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from sweeping.libraries.around_loop import STEPS, Loop, linears, sgd, situation

_SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
_LOCAL = threading.local()
_TABLE: dict[str, float] = {}


@situation("transformer", "gpt2", "llama")
def attention_backend(loop: Loop) -> None:
    any_of_them = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    loop.train(loop.built(), lambda number: sdpa_kernel(any_of_them if number == 1 else SDPBackend.MATH))


@situation("transformer", "convnet", "gpt2", "llama")
def autocast(loop: Loop) -> None:
    loop.train(loop.built(), lambda number: torch.autocast("cpu", torch.bfloat16, enabled=number != 1))


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@situation("transformer", "convnet")
def deterministic_algorithms(loop: Loop) -> None:
    loop.train(loop.built(), lambda number: _deterministic())


@situation("convnet", "transformer")
def onednn_off(loop: Loop) -> None:
    loop.train(loop.built(), lambda number: torch.backends.mkldnn.flags(enabled=False))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _MakesTensors(nn.Module):
    """Adds a tensor of the default type and device."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.linspace(0, 1, x.shape[-1])
        out: Tensor = self.inner((x.to(steps.dtype) * torch.sigmoid(steps)).to(x.dtype))
        return out


def _making_tensors(model: nn.Module) -> None:
    blocks: Any = model.get_submodule("blocks")
    for index, block in enumerate(list(blocks)):
        blocks[index] = _MakesTensors(block)


@situation("transformer", "mlp")
def default_dtype(loop: Loop) -> None:
    loop.train(loop.built(_making_tensors), lambda number: _default_dtype(torch.float64))


@situation("mlp", "transformer")
def default_device(loop: Loop) -> None:
    loop.train(loop.built(_making_tensors), lambda number: torch.device("cpu"))


class _Softer(TorchFunctionMode):
    """Replaces a function for as long as it is active."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.gelu or func is torch.tanh:
            return torch.sigmoid(args[0]) * args[0]
        return func(*args, **(kwargs or {}))


@situation("transformer", "mlp")
def function_mode(loop: Loop) -> None:
    loop.train(loop.built(), lambda number: _Softer())


class _Reads(nn.Module):
    """Multiplies by what `source` says while it computes."""

    source: Callable[[], Any]

    def __init__(self, inner: nn.Module, source: Any) -> None:
        super().__init__()
        self.inner = inner
        object.__setattr__(self, "source", source)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(torch.tanh(x * self.source()))
        return out


def _reading(source: Any) -> Any:
    def prepare(model: nn.Module) -> None:
        blocks: Any = model.get_submodule("blocks")
        for index, block in enumerate(list(blocks)):
            blocks[index] = _Reads(block, source)

    return prepare


@contextlib.contextmanager
def _scaled(value: float) -> Iterator[None]:
    token = _SCALE.set(value)
    try:
        yield
    finally:
        _SCALE.reset(token)


@situation("transformer", "mlp")
def context_variable(loop: Loop) -> None:
    loop.train(loop.built(_reading(_SCALE.get)), lambda number: _scaled(0.5 + number))


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@situation("transformer", "convnet")
def attribute_of_blocks(loop: Loop) -> None:
    """A probability or another number of each block is another for the time of a forward."""

    def around(number: int) -> Any:
        stack = contextlib.ExitStack()
        for module in model.modules():
            if isinstance(module, nn.Dropout2d):
                stack.enter_context(_attribute(module, "p", 0.2 + 0.1 * number))
            elif isinstance(getattr(module, "dropout", None), float):
                stack.enter_context(_attribute(module, "dropout", 0.2 + 0.1 * number))
        return stack

    model = loop.built()
    loop.train(model, around)


@situation("transformer", "convnet", "gpt2")
def hooks_for_one_forward(loop: Loop) -> None:
    @contextlib.contextmanager
    def hooked(number: int) -> Iterator[None]:
        handles = [
            module.register_forward_hook(lambda module, args, out: out * (1.5 + number))
            for block in loop.blocks(model)
            for module in block.modules()
            if isinstance(module, (nn.LayerNorm, nn.ReLU))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    model = loop.built()
    loop.train(model, hooked)


@situation("transformer", "llama")
def pre_hooks_for_one_forward(loop: Loop) -> None:
    @contextlib.contextmanager
    def hooked(number: int) -> Iterator[None]:
        handles = [
            module.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
            for _, module in linears(model)
            if number != 1
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    model = loop.built()
    loop.train(model, hooked)


@situation("transformer", "llama", "convnet")
def hooks_that_stay(loop: Loop) -> None:
    """Activations are watched by hooks that count and keep, as probes do."""
    model, seen = loop.built(), []
    for block in loop.blocks(model):
        block.register_forward_hook(lambda module, args, out: seen.append(_first(out).detach().mean()))
    for number in range(STEPS):
        value = loop.loss(model, number)
        value.backward()
        loop.keep(model, loss=value, seen=torch.stack(seen))
        model.zero_grad()


@situation("transformer", "convnet", "llama")
def backward_hooks(loop: Loop) -> None:
    """Full backward hooks see gradients and change them."""
    model, seen = loop.built(), []

    def doubled(module: nn.Module, inside: Any, outside: Any) -> Any:
        seen.append(_first(outside).mean())
        return tuple(2 * item for item in inside)

    for block in loop.blocks(model):
        block.register_full_backward_hook(doubled)
    for number in range(STEPS):
        value = loop.loss(model, number)
        value.backward()
        loop.keep(model, loss=value, seen=torch.stack(seen))
        model.zero_grad()


@situation("transformer", "convnet")
def hooks_on_outputs(loop: Loop) -> None:
    """Tensor hooks that a forward hook puts on activations, as Grad-CAM does."""
    model, seen = loop.built(), []
    for block in loop.blocks(model):
        block.register_forward_hook(
            lambda module, args, out: out.register_hook(lambda grad: seen.append(grad.clone())) and None
        )
    for number in range(STEPS):
        value = loop.loss(model, number)
        value.backward()
        loop.keep(model, loss=value, **{f"seen{index}": item for index, item in enumerate(seen)})
        seen.clear()
        model.zero_grad()


@situation("transformer", "gpt2")
def train_and_evaluate(loop: Loop) -> None:
    """Evaluation between forward and backward."""
    model = loop.built()
    optimizer = sgd(model)
    for number in range(STEPS):
        value = loop.loss(model, number)
        model.eval()
        with torch.no_grad():
            other = loop.loss(model, 50 + number)
        model.train()
        value.backward()
        loop.keep(model, loss=value, other=other)
        optimizer.step()
        optimizer.zero_grad()


@situation("transformer", "llama")
def saved_tensors_offloaded(loop: Loop) -> None:
    loop.train(loop.built(), lambda number: torch.autograd.graph.save_on_cpu())


@situation("mlp", "convnet")
def anomaly_detection(loop: Loop) -> None:
    loop.train(loop.built(), lambda number: torch.autograd.set_detect_anomaly(True))


def _first(out: Any) -> Tensor:
    found = out[0] if isinstance(out, tuple) else out
    assert isinstance(found, Tensor)
    return found
