# SPDX-License-Identifier: Apache-2.0
"""Images of ordinary Python values, to see whether running code changed them and to put them back.

Containers are compared by the identity of their items, objects by their `__dict__` and slots, random
generators by their state, tensors by their version, functions by what they have closed over; arrays of NumPy
and what else holds bytes by its contents (`flat_contents`). Eight levels deep is enough for what hangs on
modules; what lies deeper, is not one of these kinds, or comes after a hundred thousand others behind the same
value, is not looked at, nor are bytes above 128 MiB in all.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memscale.state.flat_contents import flat_contents, is_flat, size_of, viewed_by
from memscale.state.iterators import copy_of, is_taken_from
from memscale.state.key_order import items_of, refill
from memscale.state.process_tables import bits_of, is_numpy_generator
from memscale.state.tensor_versions import Versions
from memscale.torchkit.leaves import parts_of

DEPTH = 8
_MOST = 100_000  # values behind one: a module that holds a data set is not to make planning slow
_MOST_BYTES = 128 << 20  # of copies of arrays and the like: a data set is not to be there twice
_OPAQUE = (
    type,
    BuiltinFunctionType,
    ModuleType,
    str,
    bytes,
    int,
    float,
    complex,
    weakref.ReferenceType,
    weakref.ProxyType,
    weakref.CallableProxyType,
)
"""What is not looked into. The object behind a weak reference belongs to somebody else."""

ABSENT: Final = object()
"""Stands for a value that is not there."""


_PLAIN: Final = frozenset({int, float, bool, str, bytes})


def same_as(value: Any) -> Any:
    """What is equal for values that are the same: plain ones by value, all others by identity."""
    return (type(value), value) if type(value) in _PLAIN else id(value)


def only_filled(before: Any, now: Any) -> bool:
    """Whether a place is as it was, or has something where nothing was: no value, zero, an empty text.

    So a cache is filled. A flag that is set says that the next run will go another way.
    """
    if before is now:
        return True
    if type(before) is bool or type(now) is bool or now is ABSENT:
        return False
    is_empty = issubclass(type(before), (int, float, complex, str, bytes, tuple)) and not before
    return before is ABSENT or before is None or is_empty


def _never() -> bool:
    return False


class _Image:
    """One value: what it looked like, and how to make it so again.

    Attributes:
        filled: whether every place in it is `only_filled`.
    """

    __slots__ = ("children", "filled", "look", "now", "put_back", "value")

    def __init__(
        self,
        value: Any,
        look: Callable[[], Any],
        put_back: Callable[[], None],
        children: list[Any],
        filled: Callable[[], bool] = _never,
    ) -> None:
        self.value = value  # keeps it alive, so that its id stays its own
        self.look = look
        self.now = look()
        self.put_back = put_back
        self.children = children
        self.filled = filled

    def changed(self) -> bool:
        return bool(self.look() != self.now)


class Images:
    """Images of many values, each taken once.

    Args:
        contents: keep copies of tensors, for blocks that compute for real.
        modules: that are looked at elsewhere. Others, in lists where PyTorch does not find them, are objects.
        bindings: what parameters of these have for data is put back, for the same blocks. What is written
            into it is undone elsewhere (`undone_writes`).
    """

    def __init__(
        self, contents: bool, modules: Iterable[nn.Module] = (), bindings: bool | None = None
    ) -> None:
        self.contents = contents
        self.bindings = contents if bindings is None else bindings
        self.modules = {id(module): module for module in modules}
        self.images: dict[int, _Image | None] = {}
        self._bytes_left = _MOST_BYTES
        self._longest = _MOST
        self._versions = Versions()

    def take(self, value: Any, depth: int = DEPTH, longest: int = _MOST) -> None:
        """Takes the image of a value and of what it holds; not what is in containers of more entries."""
        self._longest = longest
        self._take(value, depth, len(self.images) + _MOST)

    def _take(self, value: Any, depth: int, most: int) -> None:
        # By `type`: a proxy lends its object's class to `isinstance`, and may have no hash.
        if value is None or issubclass(type(value), _OPAQUE) or id(value) in self.images or depth == 0:
            return
        if id(value) in self.modules or len(self.images) >= most:
            return
        image = self._image(value)
        self.images[id(value)] = image
        if image is not None and any(map(is_taken_from, image.children)):
            _lend(value)
        if self.bindings and issubclass(type(value), nn.Module):  # however deep
            for parameter in nn.Module.parameters(value):
                self._take(parameter, 1, most)
        children = () if image is None or len(image.children) > self._longest else image.children
        for child in children:
            self._take(child, depth - 1, most)

    def changed(self, value: Any, depth: int = DEPTH) -> bool:
        """Whether a value, or something that it held, has changed since."""
        image = self.images.get(id(value))
        if image is None or depth == 0:
            return False
        return image.changed() or any(self.changed(child, depth - 1) for child in image.children)

    def flipped(self, value: Any, depth: int = DEPTH) -> bool:
        """Whether a value, or something that it held, has changed otherwise than a cache that is filled."""
        image = self.images.get(id(value))
        if image is None or depth == 0:
            return False
        flipped = image.changed() and not image.filled()
        return flipped or any(self.flipped(child, depth - 1) for child in image.children)

    def restore(self) -> None:
        """Puts every changed value back, the last one first: functions share what they have closed over."""
        for image in reversed(self.images.values()):
            if image is not None and image.changed():
                image.put_back()
        self._versions.restore()

    def _image(self, value: Any) -> _Image | None:
        kind = type(value)
        if issubclass(kind, Tensor):
            return self._tensor(value)
        if issubclass(kind, torch.Generator):
            before = value.get_state()
            return _Image(value, lambda: value.get_state().tolist(), lambda: _set_state(value, before), [])
        if issubclass(kind, random.SystemRandom):  # it has no state
            return None
        if issubclass(kind, random.Random):
            state = value.getstate()
            return _Image(value, value.getstate, lambda: value.setstate(state), [])
        if is_numpy_generator(value):
            bits = bits_of(value)
            held = copy.deepcopy(bits.state)
            return _Image(value, lambda: str(bits.state), lambda: setattr(bits, "state", held), [])
        if issubclass(kind, (dict, list, set, deque)):
            if is_plain(kind):
                return _container(value)
            return _own_reading(value) if issubclass(kind, dict) else None
        if is_flat(value):
            return self._flat(value)
        if kind is memoryview:
            return _Image(value, lambda: None, lambda: None, [viewed_by(value)])
        if kind is ContextVar:
            return _Image(value, lambda: None, lambda: None, [content_of_variable(value)])
        if _is_ours(value):
            return None
        if kind is FunctionType:
            return _function(value)
        if issubclass(kind, (MethodType, functools.partial)):
            return _Image(value, lambda: None, lambda: None, _parts_of(value))
        attributes, names = attributes_of(value), slots_of(kind)
        if names:
            return _slotted(value, names, attributes)
        if attributes is not None:
            return _container(attributes)
        if issubclass(kind, tuple):
            return _Image(value, lambda: None, lambda: None, list(value))
        return None

    def _flat(self, value: Any) -> _Image | None:
        contents = flat_contents(value, self._bytes_left)
        if contents is None:
            return None
        self._bytes_left -= size_of(contents)
        attributes = attributes_of(value)  # of a subclass
        children = [*contents.parts(), *([attributes] if attributes else ())]
        return _Image(value, contents.differs, lambda: contents.write(contents.held), children)

    def _tensor(self, value: Tensor) -> _Image | None:
        if isinstance(value, nn.Parameter):
            return _bound_data(value) if self.bindings else None
        if not self.contents:
            return None
        if value.layout is not torch.strided:
            return _Image(value, lambda: None, lambda: None, parts_of(value))
        held = value.detach().clone()
        self._versions.note(value)

        def put_back() -> None:
            value.data.copy_(held)

        return _Image(value, lambda: torch.equal(value.detach(), held), put_back, [])


def _bound_data(value: nn.Parameter) -> _Image | None:
    """Which memory a parameter has."""
    if value.layout is not torch.strided or isinstance(value, FakeTensor):
        return None
    held = value.data

    def look() -> Any:
        return value.dtype, value.shape, value.stride(), value.data_ptr()

    def put_back() -> None:
        value.data = held

    return _Image(value, look, put_back, [])


def _lend(value: Any) -> None:
    """Puts copies of iterators into a container, an object or a closure. Its image puts these back."""
    if type(value) is FunctionType:
        for cell in value.__closure__ or ():
            if is_taken_from(content_of(cell)):
                cell.cell_contents = copy_of(content_of(cell))
        return
    if issubclass(type(value), (list, deque)):
        for place, item in enumerate(value):
            if is_taken_from(item):
                value[place] = copy_of(item)
        return
    attributes: dict[Any, Any] | None = value if issubclass(type(value), dict) else attributes_of(value)
    if attributes is not None:
        for name, item in list(dict.items(attributes)):
            if is_taken_from(item):
                dict.__setitem__(attributes, name, copy_of(item))
    for name in slots_of(type(value)):
        if is_taken_from(getattr(value, name, None)):
            object.__setattr__(value, name, copy_of(getattr(value, name)))


_READS: Final = ("__iter__", "__len__", "__getitem__", "keys", "values", "items")


@functools.lru_cache(maxsize=1 << 12)
def is_plain(kind: type) -> bool:
    """Whether a container's class leaves its reading to Python, so that looking runs no code of its own."""
    base = next(base for base in (dict, list, set, frozenset, tuple, deque) if issubclass(kind, base))
    ways: Any = OrderedDict if issubclass(kind, OrderedDict) else base
    return all(getattr(kind, name, None) is getattr(ways, name, None) for name in _READS)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's own dictionary of attributes, whatever its class makes of `__getattr__` or `__class__`."""
    try:
        if issubclass(type(value), threading.local):
            attributes = value.__dict__  # this thread's
        else:
            attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none, or its class forbids the look
        return None
    return attributes if issubclass(type(attributes), dict) else None


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _is_ours(value: Any) -> bool:
    """Whether MemScale has put it there: what is attached to a model counts what it does itself."""
    owner = value.__self__ if type(value) is MethodType else value
    places = [type(owner).__module__]
    if type(owner) is FunctionType:
        places.append(owner.__module__)
    return any(str(place).partition(".")[0] == "memscale" for place in places)


def _parts_of(value: Any) -> list[Any]:
    """What a method or a partial function holds that may change."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return [value.__self__, value.__func__]


def content_of(cell: CellType) -> Any:
    """What a closure's cell holds; `ABSENT`: nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:  # empty yet
        return ABSENT


def content_of_variable(variable: ContextVar[Any]) -> Any:
    """What a context variable holds; None: nothing."""
    try:
        return variable.get()  # its default, too
    except LookupError:
        return None


def _function(value: FunctionType) -> _Image:
    """What a function has closed over, and the defaults of its arguments."""
    cells = value.__closure__ or ()
    held = [content_of(cell) for cell in cells]

    def look() -> Any:
        return [id(content_of(cell)) for cell in cells]

    def put_back() -> None:
        for cell, content in zip(cells, held, strict=True):
            if content is not ABSENT:
                cell.cell_contents = content
            elif content_of(cell) is not ABSENT:
                del cell.cell_contents

    def filled() -> bool:
        return all(map(only_filled, held, map(content_of, cells)))

    defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return _Image(value, look, put_back, [item for item in held if item is not ABSENT] + defaults, filled)


def slots_of(kind: type) -> list[str]:
    """Names of the slots of a class in Python: what its objects have in place of a dictionary."""
    found = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in found if name not in ("__weakref__", "__dict__")]


def _slotted(value: Any, names: list[str], attributes: dict[str, Any] | None) -> _Image:
    """An object with slots, and with a dictionary where one of its classes has no slots."""
    held = {name: getattr(value, name, ABSENT) for name in names}

    def look() -> Any:
        return [id(getattr(value, name, ABSENT)) for name in names]

    def put_back() -> None:
        for name, item in held.items():
            if item is not ABSENT:
                object.__setattr__(value, name, item)
            elif hasattr(value, name):
                object.__delattr__(value, name)

    def filled() -> bool:
        return all(only_filled(item, getattr(value, name, ABSENT)) for name, item in held.items())

    children: list[Any] = [item for item in held.values() if item is not ABSENT]
    return _Image(value, look, put_back, children if attributes is None else [*children, attributes], filled)


def _own_reading(value: dict[Any, Any]) -> _Image:
    """A dictionary whose class reads or writes its own way: what it has as a dictionary, behind that."""
    held = dict(items_of(value))

    def look() -> Any:
        return [(id(key), same_as(item)) for key, item in items_of(value)]

    def put_back() -> None:
        refill(value, held)

    def filled() -> bool:
        now = dict(items_of(value))
        return all(only_filled(item, now.get(key, ABSENT)) for key, item in held.items())

    return _Image(value, look, put_back, list(held.values()), filled)


def _container(value: Any) -> _Image:
    is_dict = issubclass(type(value), dict)
    # Not by `copy.copy`, which leaves `__slotnames__` on classes.
    held: Any = dict(value) if is_dict else set(value) if issubclass(type(value), set) else list(value)
    children = list(held.values()) if is_dict else list(held)

    def look() -> Any:
        return (
            [(id(key), same_as(item)) for key, item in value.items()]  # keys may have any `__eq__`
            if is_dict
            else [same_as(item) for item in value]
        )

    def put_back() -> None:
        value.clear()
        if is_dict or issubclass(type(value), set):
            value.update(held)
        else:
            value.extend(held)

    def filled() -> bool:
        if is_dict:
            return all(only_filled(item, value.get(key, ABSENT)) for key, item in held.items())
        if issubclass(type(value), set):
            return bool(held <= value)
        return len(held) <= len(value) and all(map(only_filled, held, value))

    return _Image(value, look, put_back, children, filled)
