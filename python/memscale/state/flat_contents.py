# SPDX-License-Identifier: Apache-2.0
"""Snapshot and restore of values that hold bytes or numbers: arrays, storages, `bytearray`, streams.

They are put back in place, and without PyTorch's operators: who else looks at the memory, such as a buffer
that a NumPy array is a view of, sees what was there, with the version that it had. The copy is taken whole. A
digest would tell of a change at less memory, but not what to put back.
"""

from __future__ import annotations

import array
import ctypes
import io
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

_PLAIN: Final = frozenset({int, float, bool, complex, str, bytes})


class _Bytes:
    """A `bytearray` or an `array.array`.

    Attributes:
        held: what `read` returned when this was made.
    """

    __slots__ = ("held", "place")

    def __init__(self, place: Any) -> None:
        self.place = place
        self.held = self.read()

    def read(self) -> Any:
        """What it holds."""
        return bytes(self.place) if isinstance(self.place, bytearray) else array.array.tobytes(self.place)

    def parts(self) -> Iterable[Any]:
        """The objects in it: none."""
        return ()

    def write(self, values: Any) -> None:
        """Makes it hold these, where it does not."""
        if self.read() == values:
            return
        place = self.place
        with suppress(BufferError):  # somebody's view forbids another length
            if isinstance(place, bytearray):
                bytearray.__setitem__(place, slice(None), values)
            else:
                array.array.__setitem__(place, slice(None), array.array(place.typecode, values))

    def differs(self) -> bool:
        """Whether it holds anything else than it held."""
        return bool(self.read() != self.held)


class _Stream(_Bytes):
    """An `io.StringIO` or `io.BytesIO`: its contents and where it stands."""

    __slots__ = ()

    def _kind(self) -> Any:
        return io.StringIO if isinstance(self.place, io.StringIO) else io.BytesIO

    def read(self) -> Any:
        """What it holds; None: it is closed."""
        try:
            *state, _ = self._kind().__getstate__(self.place)
        except ValueError:
            return None
        return (*state, None)  # without its attributes

    def write(self, values: Any) -> None:
        """Makes it hold these, where it does not."""
        if values is not None and self.read() != values:
            with suppress(ValueError, BufferError):  # closed since, or looked at by somebody
                self._kind().__setstate__(self.place, values)


class _Array(_Bytes):
    """An array of NumPy, of numbers."""

    __slots__ = ()

    def _numbers(self) -> Any:
        return sys.modules["numpy"].asarray(self.place)  # whatever a subclass makes of assignments

    def read(self) -> Any:
        """What it holds."""
        return self._numbers().tobytes()

    def write(self, values: Any) -> None:
        """Makes it hold these, where it does not."""
        numbers = self._numbers()
        if values and numbers.nbytes == len(values) and numbers.tobytes() != values:
            before = sys.modules["numpy"].frombuffer(values, numbers.dtype)
            numbers[...] = before.reshape(numbers.shape)


class _ObjectArray(_Array):
    """An array of NumPy, of references to objects."""

    __slots__ = ()

    def read(self) -> Any:
        """What it holds."""
        return list(self._numbers().flat)

    def parts(self) -> Iterable[Any]:
        """The objects that it held."""
        return self.held  # type: ignore[no-any-return]

    def write(self, values: Any) -> None:
        """Makes it hold these, where it does not."""
        numbers = self._numbers()
        if numbers.size == len(values):
            for place, value in enumerate(values):
                numbers.flat[place] = value

    def differs(self) -> bool:
        """Whether it holds anything else than it held."""
        now = self.read()
        return len(now) != len(self.held) or any(map(_is_other, now, self.held))


def _is_other(now: Any, before: Any) -> bool:
    return now is not before and (
        type(now) is not type(before) or type(now) not in _PLAIN or bool(now != before)
    )


class _Storage(_Bytes):
    """A storage of PyTorch's, in host memory."""

    __slots__ = ()

    def read(self) -> Any:
        """What it holds."""
        return ctypes.string_at(self.place.data_ptr(), self.place.nbytes())

    def write(self, values: Any) -> None:
        """Makes it hold these, where it does not."""
        if self.place.nbytes() == len(values) and self.read() != values:
            ctypes.memmove(self.place.data_ptr(), values, len(values))


FLAT: Final = (_Bytes, _Stream, _Array, _ObjectArray, _Storage)
"""Classes of what `flat_contents` returns."""


_STORAGES: Final = (torch.UntypedStorage, torch.TypedStorage)


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def is_flat(value: Any, streams: bool = True) -> bool:
    """Whether a value is of these kinds."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return False
    return (
        issubclass(kind, (bytearray, array.array, *_STORAGES))
        or (streams and issubclass(kind, (io.StringIO, io.BytesIO)))
        or is_array(value)
    )


def flat_contents(value: Any, most: int, streams: bool = True) -> Any:
    """The contents of a value; None: it is not of these kinds, cannot be written to, or is too large.

    Args:
        value: any.
        most: bytes.
        streams: look at `io.StringIO` and `io.BytesIO`, too.
    """
    if not is_flat(value, streams):
        return None
    kind: Callable[[Any], Any] = _Bytes
    if is_array(value):
        if not value.flags.writeable:
            return None
        size = value.nbytes
        kind = _ObjectArray if value.dtype.hasobject else _Array
    elif isinstance(value, _STORAGES):
        if value.device.type != "cpu":
            return None
        size = value.nbytes()
        kind = _Storage
    elif isinstance(value, (io.StringIO, io.BytesIO)):
        size = 0 if value.closed else len(value.getvalue())
        kind = _Stream
    else:
        size = len(value) * getattr(value, "itemsize", 1)
    return kind(value) if size <= most else None


def viewed_by(value: memoryview) -> Any:
    """What a view looks at; None: it has been released."""
    try:
        return value.obj
    except ValueError:
        return None


def size_of(contents: Any) -> int:
    """Bytes, about, that a snapshot holds."""
    held = contents.held
    if isinstance(contents, _Stream):
        return len(held[0]) if held else 0
    return len(held) * (8 if isinstance(contents, _ObjectArray) else 1)
