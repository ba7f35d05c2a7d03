# SPDX-License-Identifier: Apache-2.0
"""Where weights lie between their uses: a file without a name, and tensors over a mapping of it.

    tensor over the mapping    for whoever looks at a weight: a norm, a copy, `state_dict`, an optimizer.
                               Its pages are the system's file cache, and it writes them to the disk
    read, write                for the copies of whole blocks: past the mapping, so that a failing disk is an
                               OSError, and with the interpreter's lock released

Both see the same bytes at any time. The disk space is reserved when the file is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PIECE = 1 << 30  # the most that the system copies in one call is a little less than 2 GiB

_homes: weakref.WeakSet[Home] = weakref.WeakSet()


class Home:
    """A file of a fixed size, which goes when the last tensor over it goes.

    Args:
        directory: its folder; "" for the system's folder of temporary files.
        nbytes: its size.

    Raises:
        OSError: the folder cannot hold it.
    """

    def __init__(self, directory: str, nbytes: int) -> None:
        self.nbytes = nbytes
        number, path = tempfile.mkstemp(prefix="memscale-", dir=directory or None)
        try:
            os.unlink(path)
            _reserve(number, nbytes, directory)
            self._map = mmap.mmap(number, nbytes)
        except BaseException:
            os.close(number)
            raise
        self._file, self._process, self._is_parted = number, os.getpid(), False
        weakref.finalize(self, os.close, number)
        _homes.add(self)

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """A tensor of bytes of the file, whose storage has no others."""
        count = _numel(shape)
        with torch._C._DisableTorchDispatch():
            whole = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
            return whole.as_strided(tuple(shape), tuple(stride))

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
        if self._process != os.getpid():  # the file is the parent's
            mine = self._address() + offset
            ctypes.memmove(*((mine, address) if call is os.pwritev else (address, mine)), nbytes)
            return
        done = 0
        while done < nbytes:
            size = min(_PIECE, nbytes - done)
            memory = (ctypes.c_char * size).from_address(address + done)
            count = call(self._file, [memory], offset + done)
            if count == 0:
                raise OSError(f"weights cannot be {what}: the file ends at byte {offset + done}")
            done += count

    def let_pages_go(self) -> None:
        """Takes the mapping's pages out of this process. They stay in the system's file cache."""
        if (
            hasattr(mmap, "MADV_DONTNEED") and self._process == os.getpid()
        ):  # or they would lose what they have
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED)

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def part_from_parent(self) -> None:
        """In a forked process: writes to the mapping stay in this process from now on."""
        if self._is_parted:  # and a child of that one has its pages
            return
        self._is_parted = True
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        libc.mmap(self._address(), self.nbytes, access, flags, self._file, 0)


_MAP_FIXED = 0x10


def _reserve(number: int, nbytes: int, directory: str) -> None:
    """Has places on the disk: a page without one would end the process later."""
    try:
        os.posix_fallocate(number, 0, nbytes)
    except OSError as error:
        where = directory or tempfile.gettempdir()
        raise OSError(
            error.errno, f"{error.strerror}: no room for {nbytes} bytes of weights in {where!r}"
        ) from None


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _part_all() -> None:
    for home in list(_homes):
        home.part_from_parent()


os.register_at_fork(after_in_child=_part_all)
