# SPDX-License-Identifier: Apache-2.0
"""Copies of iterators: a dry run or a recompute takes from the copy, and the original stays where it is."""

from __future__ import annotations

import copy
import functools
import io
import warnings
import weakref
from collections.abc import Callable
from types import GeneratorType
from typing import Any, Final

from memscale.errors import ProfileError

_TAKING: Final = ("send", "throw", "close")
"""Methods of generators beside `__next__`."""


def is_iterator(value: Any) -> bool:
    """Whether taking from it uses it up."""
    kind = type(value)  # a weak proxy lends its object's class to `isinstance`
    return hasattr(kind, "__next__") and not issubclass(kind, (io.IOBase, *weakref.ProxyTypes))


def is_taken_from(value: Any) -> bool:
    """Whether it is an iterator of Python's own: nothing in it tells where it is."""
    kind = type(value)
    return kind is Recorded or (kind.__module__ in ("builtins", "itertools") and is_iterator(value))


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
        if name in _TAKING:
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


class Recorded:
    """In place of a generator for the time of a forward: notes what is taken from it.

    Args:
        generator: this.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.taken: list[tuple[Any, BaseException | None]] = []

    def __iter__(self) -> Recorded:
        return self

    def __next__(self) -> Any:
        """Takes from the generator."""
        return self._noted(self.generator.__next__)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.generator, name)
        return functools.partial(self._noted, found) if name in _TAKING else found

    def _noted(self, take: Callable[..., Any], *args: Any) -> Any:
        try:
            value = take(*args)
        except BaseException as error:
            self.taken.append((None, error))
            raise
        self.taken.append((value, None))
        return value


class Replayed(Untouched):
    """In place of a generator for the time of a recompute: gives what its forward has taken.

    Args:
        recorded: by the forward.
        refused: the error to raise where more is taken, by the name of the generator's type.
    """

    def __init__(self, recorded: Recorded, refused: Callable[[str], Exception]) -> None:
        super().__init__(recorded.generator, refused)
        self._left = iter(list(recorded.taken))

    def __next__(self) -> Any:
        """Gives the next, or raises what the generator has raised."""
        for value, error in self._left:
            if error is not None:
                raise error
            return value
        return super().__next__()


class IteratorCopy:
    """Where an iterator was when this was made.

    Args:
        iterator: this. It is held, so that its id stays its own.

    Attributes:
        recorded: what notes, in its place, what the forward takes from a generator, which has no copy.
    """

    __slots__ = ("_before", "iterator", "recorded")

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        is_generator = isinstance(iterator, (GeneratorType, Recorded))
        self.recorded = Recorded(iterator) if is_generator else None
        self._before = None if is_generator else copy_of(iterator)

    def again(self, refused: Callable[[str], Exception]) -> Any:
        """One that goes on from there; of a generator one that gives what the forward has taken.

        Args:
            refused: what to raise where more is taken, by the name of its type.
        """
        return copy_of(self._before) if self.recorded is None else Replayed(self.recorded, refused)
