# SPDX-License-Identifier: Apache-2.0
"""What the code of a model can reach in the process: globals, classes, functions with caches.

The names that functions use lead from the classes of the modules, and from hooks, to globals, and from these
to other functions, classes and objects. A method counts if code that is reached uses its name, or if Python
calls it by itself. Code of installed packages is followed where classes of the model's modules come from
them; code of PyTorch and of the standard library never is.

The walk from classes is remembered, in weak references: it takes longer than what is done with its result.
"""

from __future__ import annotations

import builtins
import functools
import sys
import sysconfig
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextvars import ContextVar
from dis import get_instructions, opmap
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from memscale.state.value_images import (
    ABSENT,
    attributes_of,
    content_of,
    content_of_variable,
    is_plain,
    slots_of,
)

_LIBRARIES: Final = sys.stdlib_module_names | {
    "functorch",
    "lightning",
    "memscale",
    "numpy",
    "pytorch_lightning",
    "torch",
    "torchgen",
    "triton",
}
_MANY: Final = 10_000  # items of a container: above, it holds data
_MOST: Final = 50_000  # values that are reached
_REMEMBERED: Final = 16  # walks

CACHE: Final = type(functools.lru_cache(len))
"""Type of the functions that `functools.lru_cache` makes."""

INERT: Final = (
    type(None), bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device, BuiltinFunctionType,
    weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType,
)  # fmt: skip
"""Types whose objects lead nowhere and are not changed inside, but for tensors' elements."""

_CONTAINERS: Final = (dict, list, tuple, set, frozenset, deque)
_BY_NAME: Final = frozenset({"globals", "vars", "getattr", "setattr", "delattr", "import_module", "modules"})
"""Code that names one of these may have the names that it means in strings."""
ON_CREATION: Final = frozenset({"__init__", "__new__", "__init_subclass__", "__class_getitem__"})
_DIRECT: Final = frozenset({FunctionType, CACHE, type, ModuleType})


def is_of_library(module: object) -> bool:
    """Whether a Python module, by its name, was installed or belongs to Python or PyTorch."""
    return is_library(module) or _is_installed(_package(module))


def may_name(code: CodeType) -> frozenset[str]:
    """The names that a function and those inside it use, also those in strings where it looks names up."""
    names = names_of(code)
    return names if _BY_NAME.isdisjoint(names) else names | strings_of(code)


class Place(NamedTuple):
    """A name in a Python module's globals; it need not be bound."""

    globals: dict[str, Any]
    name: str


@functools.lru_cache(maxsize=1 << 14)
def is_library(module: object) -> bool:
    """Whether a Python module, by its name, is one whose code is not followed, whatever the model."""
    return _package(module) in ("", *_LIBRARIES)


def _package(module: object) -> str:
    return module.partition(".")[0] if type(module) is str else ""


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether a package lies where package managers put them."""
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None) or "", *map(str, getattr(module, "__path__", ()))]
    installed = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    return any(place.startswith(installed) for place in places)


@functools.lru_cache(maxsize=1 << 14)
def _names(code: CodeType) -> tuple[frozenset[str], bool, bool]:
    """The names that a function and those inside it use; whether it binds globals, and whether attributes."""
    names = set(code.co_names)
    operations = code.co_code[::2]
    binds, sets = opmap["STORE_GLOBAL"] in operations, opmap["STORE_ATTR"] in operations
    for constant in code.co_consts:
        if type(constant) is CodeType:
            inner, *found = _names(constant)
            names |= inner
            binds, sets = binds or found[0], sets or found[1]
    return frozenset(names), binds, sets


def names_of(code: CodeType) -> frozenset[str]:
    """The names that a function and those inside it use."""
    return _names(code)[0]


@functools.lru_cache(maxsize=1 << 14)
def strings_of(code: CodeType) -> frozenset[str]:
    """The constants of a function and those inside it that may be names."""
    found = {item for item in code.co_consts if type(item) is str and item.isidentifier()}
    inner = (strings_of(item) for item in code.co_consts if type(item) is CodeType)
    return frozenset(found.union(*inner))


class Writes(NamedTuple):
    """What the code of a function, or of one inside it, may change.

    Attributes:
        globals: names that it binds in its Python module.
        attributes: names of attributes that it sets or deletes, of whatever.
        cells: names that it has closed over and binds.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    cells: frozenset[str]


_NO_WRITES: Final = Writes(frozenset(), frozenset(), frozenset())

_STORES: Final = frozenset({
    opmap["STORE_GLOBAL"], opmap["DELETE_GLOBAL"], opmap["STORE_ATTR"], opmap["DELETE_ATTR"],
    opmap["STORE_DEREF"],
})  # fmt: skip


@functools.lru_cache(maxsize=1 << 14)
def writes_of(code: CodeType) -> Writes:
    """What a function may change, by its byte code."""
    found = _NO_WRITES
    if not _STORES.isdisjoint(code.co_code[::2]):
        items = [(item.opname, item.argval) for item in get_instructions(code)]
        found = Writes(
            frozenset(name for op, name in items if op.endswith("_GLOBAL") and op[:4] != "LOAD"),
            frozenset(name for op, name in items if op in ("STORE_ATTR", "DELETE_ATTR")),
            frozenset(name for op, name in items if op == "STORE_DEREF").intersection(code.co_freevars),
        )
    for constant in code.co_consts:
        if type(constant) is CodeType:
            inner = writes_of(constant)
            found = Writes(
                found.globals | inner.globals,
                found.attributes | inner.attributes,
                found.cells | inner.cells.intersection(code.co_freevars),
            )
    return found


_CALLED: Final = ("forward", "training_step", "validation_step", "test_step", "predict_step")
"""Methods of modules that PyTorch and Lightning call, and no code of the program's own."""

SETTERS: Final = frozenset({"setattr", "delattr"})


def set_by(code: CodeType) -> frozenset[str]:
    """Names of attributes that a function sets, as far as its code tells."""
    found = writes_of(code).attributes
    return found if SETTERS.isdisjoint(names_of(code)) else found | strings_of(code)


class Reached:
    """All that has been reached, each once.

    Args:
        roots: classes whose packages are followed, wherever these lie.

    Attributes:
        packages: those of `roots`.
        places: names in globals that code reads or binds.
        functions: Python functions.
        caches: functions with a cache.
        classes: classes.
        borrowed: names that the program has in a library's module, class or function, by the id of that
            and the name: `torch.calls = 0`.
        used: Python modules of libraries, by id, with the names in them that the program's code uses.
    """

    def __init__(self, roots: Iterable[type] = ()) -> None:
        self.packages = {_package(kind.__module__) for kind in roots}
        self.places: dict[tuple[int, str], Place] = {}
        self.functions: list[FunctionType] = []
        self.caches: list[Any] = []
        self.classes: dict[int, type] = {}
        self.borrowed: dict[tuple[int, str], Any] = {}
        self.used: dict[int, tuple[ModuleType, set[str]]] = {}
        self.names: set[str] = set(_CALLED)
        self.unnamed: dict[str, list[type]] = {}  # methods that no code has named so far, and their classes
        self._created: set[int] = set()
        self._seen: dict[int, Any] = {}  # with the values, so that their ids stay their own
        self._todo: deque[Any] = deque()

    def own_functions(self) -> list[FunctionType]:
        """Those that are the program's own, and no library's."""
        return [item for item in self.functions if not is_of_library(item.__globals__.get("__name__"))]

    def _is_foreign(self, module: object) -> bool:
        package = _package(module)
        return package not in self.packages and (is_library(module) or _is_installed(package))

    def leave_out(self, values: Iterable[Any]) -> None:
        """Takes values for reached."""
        self._seen.update((id(value), value) for value in values)

    def reach(self, *values: Any) -> None:
        """Adds values and all that is reached from them."""
        self._todo += values
        while self._todo and len(self._seen) < _MOST:
            value = self._todo.popleft()
            kind = type(value)
            if id(value) not in self._seen and not issubclass(kind, INERT):
                self._seen[id(value)] = value
                self._visit(value, kind)

    def _visit(self, value: Any, kind: type) -> None:
        if kind is FunctionType:
            self._function(value)
        elif kind is CACHE:
            self.caches.append(value)
            self._todo += vars(value).values()  # the function, too
        elif issubclass(kind, (staticmethod, classmethod, MethodType)):
            self._todo += (value.__func__, getattr(value, "__self__", None))
        elif issubclass(kind, functools.partial):
            self._todo += (value.func, *value.args, *value.keywords.values())
        elif issubclass(kind, property):
            self._todo += (value.fget, value.fset, value.fdel)
        elif kind is functools.cached_property:
            self._todo.append(value.func)
        elif kind is ContextVar:
            self._todo.append(content_of_variable(value))
        elif issubclass(kind, type):
            self._class(value, is_created=True)
        elif issubclass(kind, _CONTAINERS):
            if is_plain(kind) and len(value) <= _MANY:
                self._todo += value.values() if issubclass(kind, dict) else value
        elif not issubclass(kind, ModuleType) and not self._is_foreign(kind.__module__):
            self._object(value, kind)

    def _object(self, value: Any, kind: type) -> None:
        self._class(kind, is_created=False)
        attributes = attributes_of(value)
        if attributes is None:
            self._todo += (getattr(value, name, None) for name in slots_of(kind))
        elif len(attributes) <= _MANY:
            self._todo += attributes.values()

    def _function(self, function: FunctionType) -> None:
        self.functions.append(function)
        self._todo += function.__dict__.values()  # what it wraps, too
        self._todo += function.__defaults__ or ()
        self._todo += (function.__kwdefaults__ or {}).values()
        self._todo += map(content_of, function.__closure__ or ())
        if self._is_foreign(function.__globals__.get("__name__")):
            return
        names, binds, sets = may_name(function.__code__), *_names(function.__code__)[1:]
        imported = [sys.modules[name] for name in names if name in sys.modules]  # inside of the function
        imported += [value for value in map(content_of, function.__closure__ or ()) if _is_module(value)]
        self._globals(function.__globals__, names, binds, sets, imported)
        if not is_of_library(function.__globals__.get("__name__")):
            self._borrow(function, names, imported)
        for name in names - self.names:
            self.names.add(name)
            self._todo += (vars(kind).get(name) for kind in self.unnamed.pop(name, ()))

    def _globals(
        self,
        own: dict[str, Any],
        names: frozenset[str],
        binds: bool,
        sets: bool,
        imported: Iterable[ModuleType],
    ) -> None:
        """Adds names of a function's globals, and of the Python modules among these or imported elsewhere."""
        visited = {id(own)}
        pending = [(own, binds)]
        for module in imported:
            if not self._is_foreign(module.__name__) and id(vars(module)) not in visited:
                visited.add(id(vars(module)))
                pending.append((vars(module), sets))
        while pending:
            namespace, may_bind = pending.pop()
            for name in names:
                value = namespace.get(name, ABSENT)
                if value is ABSENT and not may_bind:
                    continue
                if _is_module(value):
                    attributes = vars(value)
                    if not self._is_foreign(value.__name__) and id(attributes) not in visited:
                        visited.add(id(attributes))
                        pending.append((attributes, sets))
                elif (id(namespace), name) not in self.places:
                    self.places[id(namespace), name] = Place(namespace, name)
                    self._todo.append(value)

    def _borrow(self, function: FunctionType, names: frozenset[str], imported: Iterable[ModuleType]) -> None:
        """Adds names of the program's in libraries' modules, classes and functions that it names."""
        sets = set_by(function.__code__)
        pending: list[Any] = [*map(function.__globals__.get, names), *imported, builtins]
        seen: set[int] = set()
        while pending:
            holder = pending.pop()
            if id(holder) in seen or not self._is_owner(holder):
                continue
            seen.add(id(holder))
            attributes = vars(holder)
            for name in names:
                value = attributes.get(name, ABSENT)
                pending.append(value)
                if _is_module(holder) and value is not ABSENT and not (_is_module(value) or name[:2] == "__"):
                    self.used.setdefault(id(holder), (holder, set()))[1].add(name)
                is_own = name in sets or (value is not ABSENT and self._is_state(value))
                if is_own and not name.startswith("__"):
                    self.borrowed[id(holder), name] = holder
                    self._todo.append(value)

    def _is_owner(self, value: Any) -> bool:
        """Whether a value is a library's, and can have attributes of the program's."""
        if issubclass(type(value), ModuleType):
            return self._is_foreign(value.__name__)
        return issubclass(type(value), (FunctionType, type)) and self._is_foreign(value.__module__)

    def _is_state(self, value: Any) -> bool:
        """Whether a value can change, and is no library's object."""
        kind = type(value)
        if issubclass(kind, (dict, list, set, deque)):
            return value is not sys.modules and is_plain(kind)
        is_code = issubclass(kind, (*INERT, FunctionType, type, ModuleType))
        return not (is_code or self._is_foreign(kind.__module__))

    def of_class(self, kind: type) -> None:
        """Adds what the methods of objects of a class reach."""
        self._class(kind, is_created=False)
        self.reach()

    def _class(self, kind: type, is_created: bool) -> None:
        """Adds the methods that some code names or that Python calls by itself."""
        for base in kind.__mro__:
            is_known = id(base) in self.classes
            if self._is_foreign(base.__module__) or (
                is_known and (not is_created or id(base) in self._created)
            ):
                continue
            self.classes[id(base)] = base
            if type(base) is not type:
                self._class(type(base), is_created=False)
            if is_created:
                self._created.add(id(base))
            for name, value in list(vars(base).items()):
                if name in self.names or (name.startswith("__") and (is_created or name not in ON_CREATION)):
                    self._todo.append(value)
                elif not is_known and not issubclass(type(value), INERT):
                    self.unnamed.setdefault(name, []).append(base)


class _Remembered:
    """A finished walk in weak references."""

    def __init__(self, reached: Reached, roots: Iterable[type]) -> None:
        self._roots = [weakref.ref(kind) for kind in roots]
        self._places = [
            (_module_of(place.globals), place.name, _ref_if_code(place.globals.get(place.name)))
            for place in reached.places.values()
        ]
        self._functions = [weakref.ref(function) for function in reached.functions]
        self._caches = [weakref.ref(cache) for cache in reached.caches]
        self._classes = [weakref.ref(kind) for kind in reached.classes.values()]
        self._borrowed = [(weakref.ref(holder), name) for (_, name), holder in reached.borrowed.items()]
        self._used = [(weakref.ref(module), names) for module, names in reached.used.values()]
        self._names = frozenset(reached.names)
        self._unnamed = [
            (name, weakref.ref(kind)) for name, kinds in reached.unnamed.items() for kind in kinds
        ]

    def again(self, roots: Iterable[type]) -> Reached | None:
        """What was reached. None if a class or a global function is another by now."""
        roots = list(roots)
        if [ref() for ref in self._roots] != roots:
            return None
        reached = Reached(roots)
        for module_ref, name, code_ref in self._places:
            module = module_ref()
            if module is None:
                return None
            value, known = vars(module).get(name), None if code_ref is None else code_ref()
            if value is not known and (code_ref is not None or _is_code(value)):
                return None
            reached.places[id(vars(module)), name] = Place(vars(module), name)
        reached.functions = [value for value in (ref() for ref in self._functions) if value is not None]
        reached.caches = [value for value in (ref() for ref in self._caches) if value is not None]
        classes = [value for value in (ref() for ref in self._classes) if value is not None]
        reached.classes = {id(kind): kind for kind in classes}
        reached.leave_out((*reached.functions, *reached.caches, *classes))
        reached.names = set(self._names)
        for module_ref, names in self._used:
            module = module_ref()
            if module is not None:
                reached.used[id(module)] = module, names
        for ref, name in self._borrowed:
            holder = ref()
            if holder is not None:
                reached.borrowed[id(holder), name] = holder
        for name, ref in self._unnamed:
            kind = ref()
            if kind is not None:
                reached.unnamed.setdefault(name, []).append(kind)
        return reached


def _is_module(value: Any) -> bool:
    return issubclass(type(value), ModuleType)


def _module_of(namespace: dict[str, Any]) -> Any:
    """A weak reference to the Python module that has these globals; one that is dead, if none is known."""
    module = sys.modules.get(str(namespace.get("__name__")))
    if module is None or vars(module) is not namespace:
        return _nothing
    return weakref.ref(module)


def _nothing() -> None:
    return None


def _ref_if_code(value: Any) -> Any:
    return weakref.ref(value) if _is_code(value) else None


def _is_code(value: Any) -> bool:
    return type(value) in _DIRECT or issubclass(type(value), type)


_remembered: OrderedDict[tuple[int, ...], _Remembered] = OrderedDict()


def reached_from(kinds: Iterable[type]) -> Reached:
    """What the methods of objects of some classes reach.

    Args:
        kinds: the classes.
    """
    roots = list(kinds)
    key = tuple(map(id, roots))
    remembered = _remembered.get(key)
    reached = None if remembered is None else remembered.again(roots)
    if reached is None:
        reached = Reached(roots)
        for kind in roots:
            reached.of_class(kind)
        _remembered[key] = _Remembered(reached, roots)
        while len(_remembered) > _REMEMBERED:
            _remembered.popitem(last=False)
    return reached
