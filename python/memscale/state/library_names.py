# SPDX-License-Identifier: Apache-2.0
"""Names that the code of a model's library modules uses: `nn.Linear` calls `torch.nn.functional.linear`.

A loop can bind these to something else for a forward, or change a library's registry
(`ALL_ATTENTION_FUNCTIONS["sdpa"] = …`). They are read off the code, from the methods of the modules' classes
on, through functions of the same package.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from memscale.state.process_tables import LARGE
from memscale.state.reached_code import is_library, names_of
from memscale.state.value_images import content_of

_MOST = 1_000
"""Functions that are read."""

Used = dict[int, tuple[ModuleType, set[str]]]
"""Python modules, by id, with names in them."""


def names_used_by(kinds: Iterable[type]) -> Used:
    """What the methods of some classes of libraries use, by its names; of PyTorch functions and classes only.

    Args:
        kinds: the classes.
    """
    used: Used = {}
    methods: dict[str, list[Any]] = {}
    for kind in kinds:
        for name, value in vars(kind).items():
            methods.setdefault(name, []).append(value)
    seen: set[int] = set()
    pending = methods.pop("forward", [])
    while pending and len(seen) < _MOST:
        function = _function_of(pending.pop())
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        package = _package_of(function)
        for module, name, value in _named_in(function):
            used.setdefault(id(module), (module, set()))[1].add(name)
            found = _function_of(value)
            if found is not None and _package_of(found) == package:
                pending.append(found)
        pending += map(content_of, function.__closure__ or ())  # what it decorates, say
        for name in names_of(function.__code__) & methods.keys():
            pending += methods.pop(name)
    return used


def _named_in(function: FunctionType) -> Iterable[tuple[ModuleType, str, Any]]:
    """Names in Python modules that its code uses, and what they are bound to."""
    names = names_of(function.__code__)
    namespace = function.__globals__
    own = _module_of(namespace)
    values = [(name, namespace[name]) for name in names if name in namespace]
    if own is not None:
        yield from ((own, name, value) for name, value in values if _counts(own, value))
    for _, module in values:
        if issubclass(type(module), ModuleType):
            attributes = vars(module)
            inner = ((name, attributes[name]) for name in names if name in attributes)
            yield from ((module, name, value) for name, value in inner if _counts(module, value))


def _counts(module: ModuleType, value: Any) -> bool:
    """Whether a name counts: settings of PyTorch are looked at elsewhere, other libraries' are not."""
    is_wanted = callable(value) or not is_library(module.__name__)
    return is_wanted and not issubclass(type(value), ModuleType)


def registries_of(values: Iterable[Any]) -> list[dict[Any, Any]]:
    """Dictionaries of a library's that a loop may enter something in for a forward.

    Args:
        values: of its names: dictionaries, or objects, whose attributes count, and dictionaries that they or
            their classes have.
    """
    found: dict[int, dict[Any, Any]] = {}
    for value in values:
        kind = type(value)
        inside = [value]
        if not (issubclass(kind, (type, FunctionType, ModuleType)) or is_library(kind.__module__)):
            classes = (vars(base) for base in kind.__mro__ if not is_library(base.__module__))
            attributes = getattr(value, "__dict__", {})
            inside = [
                attributes,
                *attributes.values(),
                *(item for names in classes for item in names.values()),
            ]
        found.update((id(item), item) for item in inside if type(item) is dict and _is_registry(item))
    return list(found.values())


def _is_registry(entries: dict[Any, Any]) -> bool:
    """Whether it is no store of data."""
    return len(entries) <= LARGE and not any(isinstance(item, Tensor) for item in entries.values())


def _function_of(value: Any) -> FunctionType | None:
    """The Python function behind a method or a decorated function."""
    value = getattr(value, "__func__", value) if type(value) in (staticmethod, classmethod) else value
    if issubclass(type(value), functools.partial):
        value = value.func
    return value if type(value) is FunctionType else None


def _package_of(function: FunctionType) -> str:
    """Such as "torch.nn", below which all counts as one."""
    return ".".join(str(function.__globals__.get("__name__")).split(".")[:2])


def _module_of(namespace: dict[str, Any]) -> ModuleType | None:
    module = sys.modules.get(str(namespace.get("__name__")))
    return module if module is not None and vars(module) is namespace else None
