# SPDX-License-Identifier: Apache-2.0
"""Backing stores of offloaded weights: ranges of an unnamed file, or host memory, mapped as tensors.

    tensor over the mapping    for code that reads a weight: a norm, a copy, `state_dict`, an optimizer.
                               Its pages are the system's file cache, and it writes them to the disk
    read, write                for the copies of whole blocks: past the mapping, so that a failing disk is an
                               OSError, and with the interpreter's lock released

Both see the same bytes at any time. All stores of a model are ranges of one file, and their
disk space is reserved when they are made. Weights of a card may lie in this process's own memory instead
(`HostStore`), pinned where the driver allows it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PIECE = 1 << 30  # the most that the system copies in one call is a little less than 2 GiB

_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


class BackingStore:
    """The memory of offloaded weights: mapped, of a fixed size, alive as long as a tensor over it.

    Attributes:
        nbytes: its size.
    """

    nbytes: int
    _map: Any

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """A tensor of bytes of it, whose storage has no others."""
        count = _numel(shape)
        with torch._C._DisableTorchDispatch():
            whole = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
            return whole.as_strided(tuple(shape), tuple(stride))

    def read(self, address: int, offset: int, nbytes: int) -> None:
        """Copies bytes of it to an address of the host.

        Raises:
            OSError: they cannot be read.
        """
        raise NotImplementedError

    def let_pages_go(self) -> None:
        """Drops this process's pages that the system's file cache keeps anyway."""

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class HostStore(BackingStore):
    """A backing store in this process's memory, of exactly this size.

    Args:
        nbytes: its size.
        locked: pinned, if the driver does that; a copy to the card then needs no other.

    Attributes:
        is_locked: whether it is.

    Raises:
        OSError: there is none.
    """

    def __init__(self, nbytes: int, locked: bool) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.is_locked = locked and _lock(self._address(), nbytes)
        if self.is_locked:  # runs before the mapping goes
            weakref.finalize(self, _unlock, self._address(), os.getpid()).atexit = False

    def read(self, address: int, offset: int, nbytes: int) -> None:
        """Copies bytes of it to an address of the host."""
        ctypes.memmove(address, self._address() + offset, nbytes)


class File:
    """An unnamed file that stores share. It goes with the last of them, and of the tensors over them.

    Args:
        directory: its folder; "" for the system's folder of temporary files.

    Raises:
        OSError: there can be none.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.number, path = tempfile.mkstemp(prefix="memscale-", dir=directory or None)
        weakref.finalize(self, os.close, self.number)
        os.unlink(path)
        self._end = 0
        self._process = os.getpid()

    @property
    def is_mine(self) -> bool:
        """Whether it is this process's, and not the parent's."""
        return self._process == os.getpid()

    def reserve(self, nbytes: int) -> int:
        """The begin of a range, whose pages have places on the disk: one without would end the process later.

        Raises:
            OSError: there is no room.
        """
        begin = self._end
        try:
            os.posix_fallocate(self.number, begin, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.number, begin)
            where = self.directory or tempfile.gettempdir()
            raise OSError(
                error.errno, f"{error.strerror}: no room for {nbytes} bytes of weights in {where!r}"
            ) from None
        self._end += nbytes
        return begin

    def free(self, begin: int, nbytes: int) -> None:
        """Gives the places of a range back, where the file system does that."""
        if self.is_mine:
            _libc().fallocate(self.number, _PUNCH_HOLE, begin, nbytes)


class FileStore(BackingStore):
    """A backing store in a range of a file.

    Args:
        file: whose.
        nbytes: its size, in whole pages.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, file: File, nbytes: int) -> None:
        self.nbytes = nbytes
        self._file, self._begin, self._is_parted = file, file.reserve(nbytes), False
        try:
            address = _mapped(None, nbytes, mmap.MAP_SHARED, file.number, self._begin)
        except OSError:
            file.free(self._begin, nbytes)
            raise
        # Python's own mapping would have an open file for itself, each.
        self._map = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(self._map, _unmap, address, nbytes, file, self._begin).atexit = False
        _stores.add(self)

    def read(self, address: int, offset: int, nbytes: int) -> None:
        """Copies bytes of the file to an address.

        Raises:
            OSError: they cannot be read.
        """
        self._pass(os.preadv, "read", address, offset, nbytes)

    def write(self, address: int, offset: int, nbytes: int) -> None:
        """Copies bytes at an address into the file.

        Raises:
            OSError: they cannot be written.
        """
        self._pass(os.pwritev, "written", address, offset, nbytes)

    def _pass(self, call: Any, what: str, address: int, offset: int, nbytes: int) -> None:
        if not self._file.is_mine:
            mine = self._address() + offset
            ctypes.memmove(*((mine, address) if call is os.pwritev else (address, mine)), nbytes)
            return
        done = 0
        while done < nbytes:
            size = min(_PIECE, nbytes - done)
            memory = (ctypes.c_char * size).from_address(address + done)
            count = call(self._file.number, [memory], self._begin + offset + done)
            if count == 0:
                raise OSError(f"weights cannot be {what}: the file ends at byte {offset + done}")
            done += count

    def let_pages_go(self) -> None:
        """Drops the mapping's pages from this process. They stay in the system's file cache."""
        if self._file.is_mine:  # or they would lose what they have
            _libc().madvise(self._address(), self.nbytes, mmap.MADV_DONTNEED)

    def part_from_parent(self) -> None:
        """In a forked process: writes to the mapping stay in this process from now on."""
        if self._is_parted:  # and a child of that one has its pages
            return
        self._is_parted = True
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        _mapped(self._address(), self.nbytes, flags, self._file.number, self._begin)


_MAP_FIXED = 0x10
_PUNCH_HOLE = 0x1 | 0x2  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    libc.fallocate.argtypes = [number, number, ctypes.c_long, ctypes.c_long]
    return libc


def _mapped(address: int | None, nbytes: int, flags: int, number: int, begin: int) -> int:
    """Maps a range of a file."""
    found = _libc().mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, number, begin)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: {nbytes} bytes of weights cannot be mapped")
    return int(found)


def _unmap(address: int, nbytes: int, file: File, begin: int) -> None:
    _libc().munmap(address, nbytes)
    file.free(begin, nbytes)


_LOCKED_FOR_ALL = 1  # CU_MEMHOSTREGISTER_PORTABLE


def _lock(address: int, nbytes: int) -> bool:
    """Pins memory. By the driver: an error of the runtime would show up at PyTorch's next kernel."""
    torch.cuda.init()  # the driver wants a context
    torch.cuda.synchronize()
    with contextlib.suppress(OSError, AttributeError):
        register = ctypes.CDLL("libcuda.so.1").cuMemHostRegister_v2
        register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        return bool(register(address, nbytes, _LOCKED_FOR_ALL) == 0)
    return False


def _unlock(address: int, process: int) -> None:
    if process == os.getpid():
        release = ctypes.CDLL("libcuda.so.1").cuMemHostUnregister
        release.argtypes = [ctypes.c_void_p]
        release(address)


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _part_all() -> None:
    for store in list(_stores):
        store.part_from_parent()


os.register_at_fork(after_in_child=_part_all)
