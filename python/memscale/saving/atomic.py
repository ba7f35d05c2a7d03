# SPDX-License-Identifier: Apache-2.0
"""`memscale.save`: `torch.save` that leaves either the old file or the new one, even after a crash.

    .name.<8 hex>.memscale     written beside the file, whole and on the disk before it takes the file's place
    name                       the old bytes up to one moment, and the new ones from then on

The writer of a temporary file holds a lock on it, which ends with the process. So one that is not locked was
left by a process that was killed, and the next save of that file removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import stat
from typing import Any

import torch


def save(obj: object, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """Saves an object to a file, as `torch.save` does; `torch.load` reads it, anywhere.

    At no moment is there half a file under that name. After a failure, an interrupt, a full disk, `kill -9`
    or a power cut the file is the one before; when this returns, the new one is on the disk. While it is
    written, the disk has both.

    A link is followed, and a file that there is keeps its mode and, where the system allows it, its owner.
    Other hard links to it keep the old bytes.

    Args:
        obj: what to save.
        path: of the file.
        **kwargs: as `torch.save` takes them.

    Raises:
        TypeError: `path` is an open file, which cannot be replaced at once.
        OSError: the disk is full, or the file cannot be written. It is as it was, unless the error says
            that the new one is in place, which then may not outlast a power cut.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"path is {type(path).__name__}; memscale.save replaces a file as a whole and takes its path, a "
            "str or os.PathLike: use torch.save for a file that is open"
        )
    target = os.path.realpath(os.fsdecode(path))
    folder, name = os.path.split(target)
    before = _replaced(target)
    _remove_leftovers(folder, name)
    temporary, descriptor = _create(folder, name, before)
    try:
        _write(obj, descriptor, kwargs)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)
    _sync_folder(folder)


def _replaced(target: str) -> os.stat_result | None:
    """What is there.

    Raises:
        OSError: nothing that can be replaced.
    """
    try:
        before = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(before.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if not stat.S_ISREG(before.st_mode):
        raise OSError(errno.EINVAL, "not a regular file, which could not be replaced: use torch.save", target)
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)
    return before


# ---- temporary files ---------------------------------------------------------------------------------


def _create(folder: str, name: str, before: os.stat_result | None) -> tuple[str, int]:
    """A temporary file that is locked: path and descriptor."""
    mode = 0o666 if before is None else stat.S_IMODE(before.st_mode) & 0o777
    while True:
        path = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.memscale")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        try:
            # Before that, another save may take it for a leftover: it holds it then, or has removed it.
            if _lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
                if before is not None:
                    _keep(descriptor, before)
                return path, descriptor
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(descriptor)
            raise
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether a file is locked now; False: by somebody else.

    None: the file system has no locks. There nothing counts as a leftover.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _keep(descriptor: int, before: os.stat_result) -> None:
    """Gives a file the owner and the mode of another one."""
    with contextlib.suppress(OSError):  # only root may give files away
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _remove_leftovers(folder: str, name: str) -> None:
    """Removes what processes that are gone have left of this file."""
    pattern = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.memscale")
    for found in filter(pattern.fullmatch, os.listdir(folder)):
        path = os.path.join(folder, found)
        with contextlib.suppress(OSError):  # somebody else's, or gone by now
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _lock(descriptor) and stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.unlink(path)
            finally:
                os.close(descriptor)


# ---- writing -----------------------------------------------------------------------------------------


class _File(io.FileIO):
    """Remembers why it could not be written, which PyTorch's writer hides behind an error of its own."""

    failure: BaseException | None = None

    def write(self, data: Any) -> Any:
        """Writes some of the data."""
        try:
            return os.write(self.fileno(), data)
        except BaseException as error:
            self.failure = error
            raise


def _write(obj: object, descriptor: int, kwargs: dict[str, Any]) -> None:
    file = _File(descriptor, "wb", closefd=False)
    try:
        buffer = io.BufferedWriter(file)
        torch.save(obj, buffer, **kwargs)
        buffer.flush()
        os.fsync(descriptor)
    except BaseException as error:
        if file.failure is not None and file.failure is not error:
            raise file.failure from error
        raise
    finally:
        file.close()  # what the buffer still holds is of no use


def _sync_folder(folder: str) -> None:
    """Has the new name on the disk.

    Raises:
        OSError: the new file is in place, but nobody knows whether its name is on the disk.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such thing
            what = f"{error.strerror}: the new file is in place, but may not outlast a power cut"
            raise OSError(error.errno, what, folder) from error
    finally:
        os.close(descriptor)
