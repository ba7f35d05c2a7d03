# SPDX-License-Identifier: Apache-2.0
"""Copies of iterators: a dry run or a recompute takes from the copy, and the original stays where it is."""

from __future__ import annotations

import copy
import io
import warnings
import weakref
from collections.abc import Callable
from types import GeneratorType
from typing import Any

from memscale.errors import ProfileError


def is_iterator(value: Any) -> bool:
    """Whether taking from it uses it up."""
    kind = type(value)  # a weak proxy lends its object's class to `isinstance`
    return hasattr(kind, "__next__") and not issubclass(kind, (io.IOBase, *weakref.ProxyTypes))


def is_taken_from(value: Any) -> bool:
    """Whether it is an iterator of Python's own: nothing in it tells where it is."""
    return type(value).__module__ in ("builtins", "itertools") and is_iterator(value)


def _not_planned(name: str) -> Exception:
    return ProfileError(
        f"the model takes from a {name} that cannot be copied. To plan would use up what training "
        "is to get: hold an iterator that can be copied, such as one of itertools"
    )


class Untouched:
    """In place of an iterator that cannot be copied: what does not count must not take from it.

    Args:
        iterator: this.
        refused: the error to raise, by the name of its type.
    """

    def __init__(self, iterator: Any, refused: Callable[[str], Exception] = _not_planned) -> None:
        self._name = type(iterator).__name__
        self._refused = refused

    def __iter__(self) -> Untouched:
        return self

    def __next__(self) -> Any:
        """Raises."""
        raise self._refused(self._name)

    def __getattr__(self, name: str) -> Any:
        if name in ("send", "throw", "close"):
            return lambda *args: next(self)
        raise AttributeError(name)


def copy_of(iterator: Any) -> Any:
    """What can be taken from in place of an iterator; `Untouched` for a generator, which cannot be copied."""
    if isinstance(iterator, GeneratorType):
        return Untouched(iterator)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on those of itertools
            own = is_taken_from(iterator) and not hasattr(type(iterator), "__copy__")
            return _made_again(iterator) if own else copy.copy(iterator)
    except Exception:
        return iterator


def _made_again(iterator: Any) -> Any:
    """A copy of an iterator of Python's own with copies of those that it takes from in turn.

    A plain copy of `itertools.cycle` takes from the same one as the original.
    """
    reduced = iterator.__reduce__()
    made = reduced[0](*_inner(reduced[1]))
    if len(reduced) > 2 and reduced[2] is not None:
        made.__setstate__(_inner(reduced[2]))
    return made


def _inner(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_inner, value))
    if type(value) is list:
        return list(value)
    return copy_of(value) if is_iterator(value) else value


class IteratorCopy:
    """Where an iterator was when this was made.

    Args:
        iterator: this. It is held, so that its id stays its own.
    """

    __slots__ = ("_before", "_iterator")

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._before = None if isinstance(iterator, GeneratorType) else copy_of(iterator)

    def again(self, refused: Callable[[str], Exception]) -> Any:
        """One that goes on from there; of a generator one that raises this, by the name of its type."""
        return Untouched(self._iterator, refused) if self._before is None else copy_of(self._before)
