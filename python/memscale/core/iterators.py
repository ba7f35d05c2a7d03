# SPDX-License-Identifier: Apache-2.0
"""Copies of iterators: a dry run takes from the copy, and the original stays where it is."""

from __future__ import annotations

import copy
import io
import warnings
import weakref
from typing import Any


def is_iterator(value: Any) -> bool:
    """Whether taking from it uses it up."""
    kind = type(value)  # a weak proxy lends its object's class to `isinstance`
    return hasattr(kind, "__next__") and not issubclass(kind, (io.IOBase, *weakref.ProxyTypes))


def copy_of(iterator: Any) -> Any:
    """What can be taken from in place of an iterator; a generator cannot be copied, and is itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on those of itertools
            return copy.copy(iterator)
    except Exception:
        return iterator
