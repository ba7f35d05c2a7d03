# SPDX-License-Identifier: Apache-2.0
"""Looking at a model without leaving a trace: what a forward may touch, saved before and put back after.

A profile runs the model's own Python code. That code may store things on modules (a counter, a cache, a
statistic). `preserved` puts every module's attributes back and says which modules had changed; those must
not run twice, so they are not checkpointed.
"""

from __future__ import annotations

import copy
import hashlib
import io
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from memscale.core.value_images import DEPTH, Images
from memscale.optim.released import set_gradient

_TORCH_DICTS = frozenset(
    {"_parameters", "_buffers", "_modules", "forward", "_memscale_executor", "__reduce_ex__", "__deepcopy__"}
)
"""Registries, which are handled by name, and what MemScale itself puts on a model."""

_WITHOUT_STATE: Final = frozenset({"builtins", "typing", "abc"})
"""Python modules whose classes keep nothing that a forward changes, beside PyTorch's own."""

_HOOKS: Final = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)
"""Registries of hooks. What those keep is theirs: on a module that runs twice they run once."""

_ABSENT: Final = object()

_OWN_INDEX = frozenset({"_flat_weights", "_flat_weight_refs"})
"""An LSTM's own index of its parameters, which follows them: put back, but no change that a forward made."""


@dataclass
class Changes:
    """What a forward changed beside tensors' contents.

    Attributes:
        now: the attributes that have changed so far.
        attributes: module path → names of Python attributes that had changed.
        buffers: (module path, buffer name) whose binding had changed.
        python_random: whether Python's or NumPy's global generator had moved.
        settled: after `settle`: attributes that changed again in a second forward; others are caches that the
            first one filled, and a second run finds them filled.
    """

    now: Callable[[], dict[str, list[str]]] = dict
    attributes: dict[str, list[str]] = field(default_factory=dict)
    buffers: list[tuple[str, str]] = field(default_factory=list)
    python_random: bool = False
    settled: dict[str, list[str]] | None = None


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _copy_of(iterator: Any) -> Any:
    """What can be taken from in place of an iterator; a generator cannot be copied, and is itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on those of itertools
            return copy.copy(iterator)
    except Exception:
        return iterator


def _may_have_state(kind: type) -> bool:
    name = kind.__module__
    return name not in _WITHOUT_STATE and not name.startswith("torch.nn.")


class _ClassImage:
    """What classes of modules hold themselves, but for methods and the like."""

    def __init__(self, kind: type[nn.Module], images: Images) -> None:
        self.images = images
        self.own = {base: self._of(base) for base in kind.__mro__ if _may_have_state(base)}
        for values in self.own.values():
            for value in values.values():
                images.take(value)

    @staticmethod
    def _of(base: type) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(base).items()
            if not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__")
        }

    def changed(self) -> list[str]:
        """Names of attributes that are bound to something else, or whose value changed inside."""
        names = []
        for base, own in self.own.items():
            now = self._of(base)
            for name in own.keys() | now.keys():
                value = own.get(name, _ABSENT)
                if now.get(name, _ABSENT) is not value or self.images.changed(value):
                    names.append(f"{base.__name__}.{name}")
        return sorted(names)

    def restore(self) -> None:
        """Binds everything as before."""
        for base, own in self.own.items():
            now = self._of(base)
            for name in now.keys() - own.keys():
                delattr(base, name)
            for name, value in own.items():
                if now.get(name, _ABSENT) is not value:
                    setattr(base, name, value)


class _ModuleImage:
    """Attributes and buffer bindings of one module, and its class."""

    def __init__(self, module: nn.Module, kind: _ClassImage, images: Images) -> None:
        self.module = module
        self.kind = kind
        self.images = images
        self.own = {key: value for key, value in module.__dict__.items() if key not in _TORCH_DICTS}
        self.iterators = {key for key, value in self.own.items() if _is_iterator(value)}
        for key in self.iterators:
            module.__dict__[key] = _copy_of(self.own[key])
        for key, value in self.own.items():
            images.take(value, 1 if key in _HOOKS else DEPTH)
        self.buffers = dict(module._buffers)

    def changed(self) -> list[str]:
        """Names of attributes that are bound to something else, or whose value changed inside."""
        now = {key: value for key, value in self.module.__dict__.items() if key not in _TORCH_DICTS}
        names = {key for key in now if key not in self.own or now[key] is not self.own[key]}
        names |= {key for key in self.own if key not in now} | self.iterators
        names |= {key for key, value in self.own.items() if self.images.changed(value)}
        return sorted(names - _OWN_INDEX) + self.kind.changed()

    def changed_buffers(self) -> list[str]:
        """Names of buffers that are bound to another tensor."""
        return [name for name, value in self.module._buffers.items() if self.buffers.get(name) is not value]

    def restore(self) -> None:
        """Binds everything as before."""
        self.kind.restore()
        for key in [key for key in self.module.__dict__ if key not in _TORCH_DICTS and key not in self.own]:
            del self.module.__dict__[key]
        self.module.__dict__.update(self.own)
        registry = self.module._buffers
        if isinstance(registry, dict):
            registry.clear()
            registry.update(self.buffers)
            return
        for name in self.changed_buffers():  # a scripted module's registry, whose names are fixed
            registry[name] = self.buffers[name]


def _changed(images: dict[str, _ModuleImage]) -> dict[str, list[str]]:
    found = {path: image.changed() for path, image in images.items()}
    return {path: names for path, names in found.items() if names}


def _images_of(model: nn.Module, values: Images) -> dict[str, _ModuleImage]:
    modules = dict(model.named_modules())
    kinds = {kind: _ClassImage(kind, values) for kind in dict.fromkeys(map(type, modules.values()))}
    return {path: _ModuleImage(module, kinds[type(module)], values) for path, module in modules.items()}


def settle(model: nn.Module, changes: Changes, forward: Callable[[], object]) -> None:
    """Runs a forward once more, inside `preserved`, if the first changed anything: what keeps changing?

    Args:
        model: the module.
        changes: of the enclosing `preserved` block.
        forward: runs the model's forward again.
    """
    if not changes.now():
        return
    again = _images_of(model, Images(contents=False))
    try:
        forward()
    except Exception:  # then nothing is known of a second run, and every change counts
        return
    changes.settled = _changed(again)


@contextmanager
def preserved(model: nn.Module, contents: bool = False) -> Iterator[Changes]:
    """Puts attributes, buffer bindings, gradients and random generators back at the end.

    Args:
        model: whatever hangs on its modules is looked at, eight levels deep. Where a module holds an
            iterator, the block takes from a copy, and it counts as changed.
        contents: the block computes for real: keep copies of plain tensor attributes too.

    Yields:
        The changes, complete when the block has ended.
    """
    values = Images(contents)
    images = _images_of(model, values)
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    cpu_rng = torch.get_rng_state()
    cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    python_rng = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_rng = numpy.random.get_state() if numpy is not None else None
    changes = Changes(now=lambda: _changed(images))
    try:
        yield changes
    finally:
        changes.python_random = random.getstate() != python_rng
        if numpy is not None:
            changes.python_random |= str(numpy.random.get_state()) != str(numpy_rng)
            numpy.random.set_state(numpy_rng)
        changes.attributes = _changed(images)
        if changes.settled is not None:
            again = changes.settled
            changes.attributes = {path: names for path, names in again.items() if path in changes.attributes}
        for path, image in images.items():
            changes.buffers += [(path, name) for name in image.changed_buffers()]
        for image in images.values():
            image.restore()
        values.restore()
        changes.now = dict  # the images hold the modules, and the changes outlive them
        for parameter, grad in grads:
            set_gradient(parameter, grad)
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
    _number(model, numbers)
    return numbers


def _number(module: nn.Module, numbers: dict[nn.Module, int]) -> int:
    known = numbers.get(module)
    if known is not None:
        return known
    tensors = [
        (name, tuple(value.shape), str(value.dtype), value.requires_grad)
        for group in (module._parameters, module._buffers)
        for name, value in group.items()
        if value is not None
    ]
    children = [
        (name, _number(child, numbers)) for name, child in module._modules.items() if child is not None
    ]
    kind = type(module)
    text = repr((kind.__module__, kind.__qualname__, module.training, tensors, children))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1
    numbers[module] = number
    return number


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
