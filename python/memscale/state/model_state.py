# SPDX-License-Identifier: Apache-2.0
"""Snapshot and restore of a module around a dry run: everything that a forward may touch.

A profile runs the model's own Python code. That code may store things on modules (a counter, a cache, a
statistic). `preserved` puts every module's attributes back and says which modules had changed; those must
not run twice, so they are not checkpointed.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memscale.state.iterators import copy_of, is_iterator
from memscale.state.process_images import ProcessImages
from memscale.state.process_tables import Kept
from memscale.state.value_images import ABSENT, DEPTH, Images, only_filled, same_as, slots_of
from memscale.state.weight_images import WeightImages
from memscale.torchkit.leaves import LONGEST
from memscale.torchkit.plain_copies import Ours
from memscale.torchkit.tensor_hooks import HookImages
from memscale.uninterrupted import uninterrupted
from memscale.weights.placed_gradients import set_gradient

_TORCH_DICTS = frozenset(
    {"_parameters", "_buffers", "_modules", "forward", "_memscale_executor", "__reduce_ex__", "__deepcopy__"}
)
"""Registries, which are handled by name, and what MemScale itself puts on a model."""

_WITHOUT_STATE: Final = frozenset({"builtins", "typing", "abc"})
"""Python modules whose classes keep nothing that a forward changes, beside PyTorch's own."""

_HOOKS: Final = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)
"""Registries of hooks. What those keep is theirs: on a module that runs twice they run once."""

_OWN_INDEX = frozenset({"_flat_weights", "_flat_weight_refs"})
"""An LSTM's own index of its parameters, which follows them: put back, but no change that a forward made."""


@dataclass
class Changes:
    """What a forward changed beside tensors' contents.

    Attributes:
        now: the attributes that have changed so far.
        attributes: module path → names of Python attributes that had changed.
        buffers: (module path, buffer name) whose binding had changed.
        filled: after `settle`: paths of modules that are not in `attributes`: they have caches, which the
            first forward filled, and a recompute finds them filled.
        python_random: whether Python's or NumPy's global generator had moved, or is put back by the code.
        uses_gradients: the program's code names gradients, or a backward.
        draws_again: a second forward draws random numbers as often as the first.
        in_process: places outside of the modules that had changed, or that code of the forward binds.
        settled: after `settle`: attributes that changed again in a second forward, like `attributes`.
    """

    now: Callable[[], dict[str, list[str]]] = dict
    attributes: dict[str, list[str]] = field(default_factory=dict)
    buffers: list[tuple[str, str]] = field(default_factory=list)
    filled: set[str] = field(default_factory=set)
    python_random: bool = False
    uses_gradients: bool = False
    draws_again: bool = True
    in_process: Sequence[Kept] = ()
    settled: dict[str, list[str]] | None = None


def _may_have_state(kind: type) -> bool:
    name = kind.__module__
    return name not in _WITHOUT_STATE and not name.startswith("torch.nn.")


def _is_not(before: Any, now: Any) -> bool:
    return before is not now and same_as(before) != same_as(now)


def _is_other(before: Any, now: Any) -> bool:
    return not only_filled(before, now)


def _differing(
    before: dict[str, Any],
    now: dict[str, Any],
    differs: Callable[[Any, Any], bool],
    inside: Callable[[Any], bool],
) -> set[str]:
    """Names of values that differ, or that have changed inside."""
    names = before.keys() | now.keys()
    differing = {name for name in names if differs(before.get(name, ABSENT), now.get(name, ABSENT))}
    return differing | {name for name, value in before.items() if inside(value)}


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

    def changed(self) -> set[str]:
        """Names of attributes that are bound to something else, or whose value changed inside."""
        return self._those(_is_not, self.images.changed)

    def flipped(self) -> set[str]:
        """Those of them that are no cache which has been filled."""
        return self._those(_is_other, self.images.flipped)

    def _those(self, differs: Callable[[Any, Any], bool], inside: Callable[[Any], bool]) -> set[str]:
        names: set[str] = set()
        for base, own in self.own.items():
            found = _differing(own, self._of(base), differs, inside)
            names.update(f"{base.__name__}.{name}" for name in found)
        return names

    def restore(self) -> None:
        """Binds everything as before."""
        for base, own in self.own.items():
            now = self._of(base)
            for name in now.keys() - own.keys():
                delattr(base, name)
            for name, value in own.items():
                if now.get(name, ABSENT) is not value:
                    setattr(base, name, value)


class _ModuleImage:
    """Attributes and buffer bindings of one module, and its class."""

    def __init__(self, module: nn.Module, kind: _ClassImage, images: Images) -> None:
        self.module = module
        self.kind = kind
        self.images = images
        self.slots = slots_of(type(module))
        self.own = self._attributes()
        self.iterators = {key for key, value in self.own.items() if is_iterator(value)}
        for key in self.iterators:
            self._bind(key, copy_of(self.own[key]))
        for key, value in self.own.items():
            images.take(value, 1 if key in _HOOKS else DEPTH)
        self.buffers = dict(module._buffers)
        # A scripted module's registries are none, and their names are fixed.
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module._modules)
        self.registered = [(place, dict(place)) for place in registries if isinstance(place, dict)]

    def _attributes(self) -> dict[str, Any]:
        """What its dictionary holds, and its class's slots."""
        own = {
            key: value
            for key, value in self.module.__dict__.items()
            if key not in _TORCH_DICTS and not isinstance(value, Ours)
        }
        for name in self.slots:
            value = getattr(self.module, name, ABSENT)
            if value is not ABSENT:
                own[name] = value
        return own

    def _bind(self, name: str, value: Any) -> None:
        if name in self.slots:  # PyTorch would register a module or a parameter
            object.__setattr__(self.module, name, value)
        else:
            self.module.__dict__[name] = value

    def changed(self) -> set[str]:
        """Names of attributes that are bound to something else, or whose value changed inside.

        Parameters and buffers count where they came or went. What they are bound to is looked at elsewhere.
        """
        new_buffers = self.module._buffers.keys() - self.buffers.keys()
        return self._those(_is_not, self.images.changed) | new_buffers | self.kind.changed()

    def flipped(self) -> set[str]:
        """Those of them that are no cache which has been filled."""
        return self._those(_is_other, self.images.flipped) | self.kind.flipped()

    def _those(self, differs: Callable[[Any, Any], bool], inside: Callable[[Any], bool]) -> set[str]:
        now = self._attributes()
        names = _differing(self.own, now, differs, inside) | self.iterators
        names |= self.buffers.keys() - self.module._buffers.keys()
        for place, before in self.registered:
            if place is self.module._parameters:
                names |= place.keys() ^ before.keys()
            elif place is self.module._modules:
                names |= {
                    key for key in before.keys() | place.keys() if place.get(key) is not before.get(key)
                }
        return names - _OWN_INDEX

    def changed_buffers(self) -> list[str]:
        """Names of buffers that are bound to another tensor than before."""
        now = self.module._buffers
        return [name for name, before in self.buffers.items() if name in now and now[name] is not before]

    def restore(self) -> None:
        """Binds everything as before."""
        self.kind.restore()
        for key in self._attributes().keys() - self.own.keys():
            if key in self.slots:
                object.__delattr__(self.module, key)
            else:
                del self.module.__dict__[key]
        for key, value in self.own.items():
            self._bind(key, value)
        for place, before in self.registered:
            place.clear()
            place.update(before)
        for name in self.changed_buffers():  # in a scripted module's registry
            self.module._buffers[name] = self.buffers[name]


def _found(
    images: dict[str, _ModuleImage], those: Callable[[_ModuleImage], set[str]]
) -> dict[str, list[str]]:
    found = {path: sorted(those(image)) for path, image in images.items()}
    return {path: names for path, names in found.items() if names}


def _changed(images: dict[str, _ModuleImage]) -> dict[str, list[str]]:
    return _found(images, _ModuleImage.changed)


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
    again = _images_of(model, Images(contents=False, modules=model.modules()))
    try:
        forward()
    except Exception:  # then nothing is known of a recompute, and every change counts
        return
    changes.settled = _changed(again)


def _keep_lasting(changes: Changes, images: dict[str, _ModuleImage]) -> None:
    """Fills in attributes that changed, but for caches that were filled once."""
    changes.attributes = _changed(images)
    if changes.settled is None:
        return
    lasting = _found(images, _ModuleImage.flipped)
    for path, names in changes.settled.items():
        while path not in images:  # a module that the first forward has made
            path = path.rpartition(".")[0]
        lasting.setdefault(path, []).extend(names)
    changes.filled = changes.attributes.keys() - lasting.keys()
    changes.attributes = {path: names for path, names in lasting.items() if path in changes.attributes}


@contextmanager
def preserved(
    model: nn.Module, contents: bool = False, batch: Any = (), *, weights: bool = True
) -> Iterator[Changes]:
    """Puts attributes, buffer bindings, gradients, hooks and random generators back at the end.

    Args:
        model: whatever hangs on its modules is looked at, eight levels deep. Where a module holds an
            iterator, the block takes from a copy, and it counts as changed.
        contents: the block computes for real: keep copies of plain tensor attributes too.
        batch: arguments of the forward. What objects among them hold is put back, too.
        weights: False: the block may let go of parameters' data, and puts them back itself.

    Yields:
        The changes, complete when the block has ended.
    """
    process = ProcessImages(model, contents)
    values = Images(contents, model.modules())
    images = _images_of(model, values)
    given = Images(False, model.modules())
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor):
            given.take(leaf, longest=LONGEST)
    data = WeightImages(model) if weights else None
    hooks = HookImages((*model.parameters(), *model.buffers()))
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
        # All is put back whatever fails, Ctrl-C included: a user's own object may raise when it is
        # looked at, and another thread may change a list meanwhile.
        with uninterrupted(), ExitStack() as stack:
            stack.callback(random.setstate, python_rng)
            if cuda_rng:
                stack.callback(torch.cuda.set_rng_state_all, cuda_rng)
            stack.callback(torch.set_rng_state, cpu_rng)
            if numpy is not None:
                stack.callback(numpy.random.set_state, numpy_rng)
            for parameter, grad in grads:
                stack.callback(set_gradient, parameter, grad)
            stack.callback(hooks.restore)
            if data is not None:
                stack.callback(data.restore)
            stack.callback(process.restore)
            stack.callback(given.restore)
            stack.callback(values.restore)
            for image in reversed(images.values()):
                stack.callback(image.restore)
            changes.python_random = process.replays_generators or random.getstate() != python_rng
            if numpy is not None:
                changes.python_random |= str(numpy.random.get_state()) != str(numpy_rng)
            changes.uses_gradients = process.uses_gradients
            changes.in_process = process.changed()
            _keep_lasting(changes, images)
            for path, image in images.items():
                changes.buffers += [(path, name) for name in image.changed_buffers()]
            changes.now = dict  # the images hold the modules, and the changes outlive them


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


@contextmanager
def training_flags(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Runs the block with `model.train(training)`, or with the flags as they are."""
    if training is None:
        yield
        return
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        with uninterrupted():
            for module, flag in flags:
                module.training = flag
