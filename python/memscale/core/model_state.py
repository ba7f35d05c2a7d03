# SPDX-License-Identifier: Apache-2.0
"""Looking at a model without leaving a trace: what a forward may touch, saved before and put back after.

A profile runs the model's own Python code. That code may store things on modules (a counter, a cache, a
statistic). `preserved` puts every module's attributes back and says which modules had changed; those must
not run twice, so they are not checkpointed.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_TORCH_DICTS = frozenset({"_parameters", "_buffers", "_modules", "forward", "_flat_weights", "_flat_weight_refs"})
"""Not a forward's doing: registries, which are handled by name, and an LSTM's own index of its parameters."""


@dataclass
class Changes:
    """What a forward changed beside tensors' contents.

    Attributes:
        attributes: module path → names of Python attributes that had changed.
        buffers: (module path, buffer name) whose binding had changed.
        python_random: whether Python's or NumPy's global generator had moved.
    """

    attributes: dict[str, list[str]] = field(default_factory=dict)
    buffers: list[tuple[str, str]] = field(default_factory=list)
    python_random: bool = False


def _shallow(value: Any) -> Any:
    """A value to compare later: containers by the identity of their items."""
    if isinstance(value, dict):
        return {key: id(item) for key, item in value.items()}
    if isinstance(value, (list, set)):
        return [id(item) for item in value]
    return None


def _copy_container(value: Any) -> Any:
    return value.copy() if type(value) in (dict, list, set) else value


class _ModuleImage:
    """Attributes of one module: references, and shallow copies of plain containers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = {k: (v, _shallow(v), _copy_container(v)) for k, v in module.__dict__.items() if k not in _TORCH_DICTS}
        self.buffers = dict(module._buffers)

    def changed(self) -> list[str]:
        now = {key: value for key, value in self.module.__dict__.items() if key not in _TORCH_DICTS}
        names = [key for key in now if key not in self.own or now[key] is not self.own[key][0]]
        names += [key for key in self.own if key not in now]
        names += [key for key, (value, shape, _) in self.own.items() if shape is not None and _shallow(value) != shape]
        return sorted(set(names))

    def changed_buffers(self) -> list[str]:
        return [name for name, value in self.module._buffers.items() if self.buffers.get(name) is not value]

    def restore(self) -> None:
        for key in [key for key in self.module.__dict__ if key not in _TORCH_DICTS and key not in self.own]:
            del self.module.__dict__[key]
        for key, (value, shape, copied) in self.own.items():
            if shape is not None and _shallow(value) != shape:
                _refill(value, copied)
            self.module.__dict__[key] = value
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)


def _refill(value: Any, copied: Any) -> None:
    value.clear()
    if isinstance(value, list):
        value.extend(copied)
    else:
        value.update(copied)


@contextmanager
def preserved(model: nn.Module) -> Iterator[Changes]:
    """Puts attributes, buffer bindings, gradients and random generators back at the end.

    Yields:
        The changes, complete once `note_changes` was called or the block has ended.
    """
    images = {path: _ModuleImage(module) for path, module in model.named_modules()}
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    cpu_rng = torch.get_rng_state()
    cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    python_rng = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_rng = numpy.random.get_state() if numpy is not None else None
    changes = Changes()
    try:
        yield changes
    finally:
        changes.python_random = random.getstate() != python_rng
        if numpy is not None:
            changes.python_random |= str(numpy.random.get_state()) != str(numpy_rng)
            numpy.random.set_state(numpy_rng)
        for path, image in images.items():
            changed = image.changed()
            if changed:
                changes.attributes[path] = changed
            changes.buffers += [(path, name) for name in image.changed_buffers()]
            image.restore()
        for parameter, grad in grads:
            parameter.grad = grad
        torch.set_rng_state(cpu_rng)
        if cuda_rng:
            torch.cuda.set_rng_state_all(cuda_rng)
        random.setstate(python_rng)


def structure_of(model: nn.Module) -> dict[nn.Module, int]:
    """A 64-bit number per module, equal for modules built alike.

    Class, own parameters and buffers by name, shape, dtype and trainability, and the structure of the
    children count. Names of the children count too, positions in a list do not matter between siblings.
    """
    numbers: dict[nn.Module, int] = {}

    def visit(module: nn.Module) -> int:
        known = numbers.get(module)
        if known is not None:
            return known
        tensors = [
            (name, tuple(value.shape), str(value.dtype), value.requires_grad)
            for group in (module._parameters, module._buffers)
            for name, value in group.items()
            if value is not None
        ]
        children = [(name, visit(child)) for name, child in module._modules.items() if child is not None]
        kind = type(module)
        text = repr((kind.__module__, kind.__qualname__, module.training, tensors, children))
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1
        numbers[module] = number
        return number

    for module in reversed(list(model.modules())):
        visit(module)
    return numbers


def parent_path(path: str, known: dict[str, int]) -> int:
    """Graph id of the nearest enclosing module, or −1 for the root."""
    while path:
        path = path.rpartition(".")[0]
        if path in known:
            return known[path]
    return -1


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())
