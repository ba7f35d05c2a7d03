# SPDX-License-Identifier: Apache-2.0
"""Streamed weights in a file: how many files there are, and what disk space they take."""

from __future__ import annotations

import gc
import os
import stat
from contextlib import suppress
from functools import partial

import pytest

from memscale.weights.blocks import HostBlocks
from memscale.weights.saves import can_save
from weight_samples import Loop, Stack, built, same, streamed, trained

pytestmark = pytest.mark.skipif(not can_save(), reason="this PyTorch does not tell which hooks are in force")


def open_files() -> set[tuple[int, int]]:
    """Files that this process has open, each as its device and number there.

    What is garbage is closed first: the number of a file that is closed later is the next one's, which
    would be taken for it.
    """
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder itself was open while it was read
            status = os.fstat(int(number))
            if stat.S_ISREG(status.st_mode):
                found.add((status.st_dev, status.st_ino))
    return found


def data_bytes(number: int) -> int:
    """Bytes of a file that are no hole; a file system's own blocks, which `st_blocks` counts, are none."""
    end, total, at = os.fstat(number).st_size, 0, 0
    while at < end:
        try:
            at = os.lseek(number, at, os.SEEK_DATA)
        except OSError:  # ENXIO: no data from here on
            break
        hole = os.lseek(number, at, os.SEEK_HOLE)
        total, at = total + hole - at, hole
    return total


def test_a_model_has_one_open_file() -> None:
    """Whatever the number of its units; and gives the disk space of those back that come back."""
    model = built(partial(Stack, depth=6))
    before = open_files()
    with streamed(model) as stream:
        assert len(stream.units) > 6 and len(open_files() - before) == 1
        assert isinstance(stream.blocks, HostBlocks) and stream.blocks._file is not None
        number, path = stream.blocks._file.number, "blocks.2"
        full = data_bytes(number)
        size = stream.units[path].nbytes
        stream.remove(path)
        gc.collect()
        assert full - data_bytes(number) == size
        assert same(trained(model, Loop(steps=2)), trained(built(partial(Stack, depth=6)), Loop(steps=2)))
