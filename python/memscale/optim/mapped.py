# SPDX-License-Identifier: Apache-2.0
"""Tensors whose elements lie in a file, so that saving a whole state needs no memory for it.

Each has a file of its own, without a name: it is gone with the tensor, and after `kill -9`. To PyTorch they
are tensors as any other. The system has as much of the files in memory as nobody needs for something else.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from memscale.optim.arrays import Empty
from memscale.optim.offload.pieces import LEAST_BYTES

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_ENGINE_DIRECTORY: Final = "/tmp"
"""As in src/offload/offload.c."""
_FAILED: Final = ctypes.c_void_p(-1).value


def mapped_in(directory: str) -> Empty:
    """Makes tensors in a folder; "" for the one that the C engine takes then, whatever TMPDIR says."""
    return functools.partial(_mapped, directory or _ENGINE_DIRECTORY)


def _mapped(directory: str, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """A tensor without gaps; small ones lie in memory.

    Raises:
        OSError: the folder cannot hold it.
    """
    nbytes = torch.Size(size).numel() * dtype.itemsize
    if nbytes < LEAST_BYTES:
        return torch.empty_strided(size, stride, dtype=dtype)
    try:
        memory = _memory(directory, nbytes)
    except OSError as error:
        what = f"{error.strerror}: no room for {nbytes} bytes of a state dict"
        raise OSError(error.errno, what, directory) from error
    return torch.frombuffer(memory, dtype=dtype).as_strided(tuple(size), tuple(stride))


def _memory(directory: str, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Memory over a new file. No descriptor stays open, as with `mmap.mmap`: there are many tensors."""
    with tempfile.TemporaryFile(dir=directory) as file:
        # All of its blocks now: a write to memory that the disk has no room for would end the process.
        os.posix_fallocate(file.fileno(), 0, nbytes)
        at = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno(), 0)
    if at == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * nbytes).from_address(at)
    weakref.finalize(memory, _libc.munmap, at, nbytes).atexit = False
    return memory
