# SPDX-License-Identifier: Apache-2.0
"""The global random generators of Python, NumPy and the CPU, noted before every call that may be recomputed.

Their states take 12 and 54 microseconds to read, and hardly any forward draws from them. So what is read is
shared by all calls that find the same. Whether it is the same shows in the generators' own memory, where to
look takes a microsecond; where that cannot be trusted they are read and compared.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

_WORDS: Final = 624
"""Of a Mersenne twister."""

_OBJECT: Final = object.__basicsize__
_INT: Final = ctypes.sizeof(ctypes.c_int)


class States:
    """Of both generators at one moment. Equal states are one object, mostly."""

    __slots__ = ("numpy", "numpy_memory", "python", "python_memory")

    def __init__(self) -> None:
        self.python = random.getstate()
        self.python_memory = _python_memory()
        numpy = sys.modules.get("numpy")
        self.numpy = None if numpy is None else numpy.random.get_state(legacy=False)
        self.numpy_memory = _numpy_memory()

    def are_present(self) -> bool:
        """Whether the generators are in these states now."""
        if self.python_memory is None:
            same = random.getstate() == self.python
        else:
            same = _python_memory() == self.python_memory
        if not same or "numpy" not in sys.modules or self.numpy is None:
            return same and (self.numpy is None) == ("numpy" not in sys.modules)
        if self.numpy_memory is None or self.numpy["has_gauss"]:
            return _same(sys.modules["numpy"].random.get_state(legacy=False), self.numpy)
        return _numpy_memory() == self.numpy_memory

    def put_back(self) -> None:
        """Puts the generators into these states."""
        if self.are_present():
            return
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


_last: list[States] = []


def present() -> States:
    """The states as they are."""
    for states in _last:
        if states.are_present():
            return states
    states = States()
    _last[:] = [states]
    return states


class _Window:
    """The memory of a generator, which it has until its end."""

    def __init__(self) -> None:
        self._known: tuple[Any, Any] = (None, None)  # a generator, and a view of its memory

    def of(self, owner: Any, address: Callable[[Any], int]) -> bytes:
        """What lies there.

        Args:
            owner: the generator.
            address: gives its memory, where it is another one than the last time.
        """
        known, memory = self._known
        if known is not owner:
            memory = memoryview((ctypes.c_char * (_INT + 4 * _WORDS)).from_address(address(owner)))
            self._known = owner, memory
        return bytes(memory)


_python_window, _numpy_window = _Window(), _Window()


def _python_memory() -> Any:
    """The words of Python's generator, its place among them, and the normal number that it has left over."""
    if not _PYTHON_IS_KNOWN:
        return None
    generator: Any = random._inst
    return _python_window.of(generator, _address_of_python), generator.gauss_next


def _address_of_python(generator: Any) -> int:
    return id(generator) + _OBJECT


def _numpy_memory() -> bytes | None:
    """The words of NumPy's generator. A normal number that is left over lies elsewhere: none may be."""
    return _numpy_words() if "numpy" in sys.modules and _numpy_is_known() else None


def _numpy_words() -> bytes:
    return _numpy_window.of(sys.modules["numpy"].random.mtrand._rand._bit_generator, _address_of_numpy)


def _address_of_numpy(generator: Any) -> int:
    if type(generator).__name__ != "MT19937":
        raise AttributeError("another generator")
    return int(generator.ctypes.state_address)


@functools.cache
def _numpy_is_known() -> bool:
    """Whether NumPy's generator is a Mersenne twister that lies in memory as it has always lain."""
    try:
        found = (ctypes.c_uint32 * (_WORDS + 1)).from_buffer_copy(_numpy_words())
    except AttributeError:
        return False
    state = sys.modules["numpy"].random.get_state(legacy=False)["state"]
    return list(found) == [*map(int, state["key"]), state["pos"]]


def _same(one: Any, other: Any) -> bool:
    """Whether two states of NumPy's, dictionaries with arrays, are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


def _reads_as_expected() -> bool:
    """Whether Python's generator lies in memory as CPython has it."""
    if sys.implementation.name != "cpython" or type(random._inst) is not random.Random:
        return False
    if random.Random.__base__ is None or random.Random.__base__.__basicsize__ < _OBJECT + _INT + 4 * _WORDS:
        return False
    _, words, _ = random.getstate()
    memory = ctypes.string_at(id(random._inst) + _OBJECT, _INT + 4 * _WORDS)
    found = (ctypes.c_uint32 * (_WORDS + 1)).from_buffer_copy(memory)
    return [*found[1:], found[0]] == list(words)


_PYTHON_IS_KNOWN: bool = _reads_as_expected()


def cpu_state() -> bytes:
    """State of the CPU's generator."""
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def cpu_tensor(state: bytes) -> Tensor:
    """A state on memory that PyTorch's allocator knows nothing of."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def set_cpu(state: bytes | Tensor) -> None:
    """Puts a state of the CPU's generator back."""
    torch.set_rng_state(cpu_tensor(state) if isinstance(state, bytes) else state)
