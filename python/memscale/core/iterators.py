# SPDX-License-Identifier: Apache-2.0
"""Copies of iterators: a dry run takes from the copy, and the original stays where it is."""

from __future__ import annotations

import copy
import io
import warnings
import weakref
from types import GeneratorType
from typing import Any

from memscale.errors import ProfileError


def is_iterator(value: Any) -> bool:
    """Whether taking from it uses it up."""
    kind = type(value)  # a weak proxy lends its object's class to `isinstance`
    return hasattr(kind, "__next__") and not issubclass(kind, (io.IOBase, *weakref.ProxyTypes))


class Untouched:
    """In place of an iterator that cannot be copied: a dry run must not take from it."""

    def __init__(self, iterator: Any) -> None:
        self._name = type(iterator).__name__

    def __iter__(self) -> Untouched:
        return self

    def __next__(self) -> Any:
        """Raises."""
        raise ProfileError(
            f"the model takes from a {self._name} that cannot be copied. To plan would use up what training "
            "is to get: hold an iterator that can be copied, such as one of itertools"
        )

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
            return copy.copy(iterator)
    except Exception:
        return iterator
