# SPDX-License-Identifier: Apache-2.0
"""`memscale.save`: what torch.load reads, and the old file or the new one whenever and however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memscale
from disks import files_up_to

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

OLD, NEW = {"value": torch.zeros(1000)}, {"value": torch.ones(5000), "step": 3}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def number(path: Path) -> float:
    """Which of the two a file has, all of it."""
    value = torch.load(path)["value"]
    assert value.numel() == (1000 if value[0] == 0 else 5000) and bool((value == value[0]).all())
    return float(value[0])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file with the old value."""
    path = tmp_path / "run.pt"
    memscale.save(OLD, path)
    return path


# ---- what is written ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.pt", "a b", "größe.pt", ".hidden", "[a]*.pt"])
def test_torch_load_reads_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    memscale.save(OLD, name)
    memscale.save(NEW, Path(name))
    assert number(tmp_path / name) == 1
    assert torch.load(name, mmap=True, weights_only=True)["step"] == 3
    assert names(tmp_path) == [name]


def test_arguments_of_torch_save(tmp_path: Path) -> None:
    memscale.save(NEW, tmp_path / "a", _use_new_zipfile_serialization=False)
    assert (tmp_path / "a").read_bytes()[:2] == b"\x80\x02"  # a pickle, not an archive
    assert number(tmp_path / "a") == 1
    with pytest.raises(TypeError, match="no_such"):
        memscale.save(NEW, tmp_path / "b", no_such=1)
    assert names(tmp_path) == ["a"]


def test_mode_and_links(target: Path, tmp_path: Path) -> None:
    expected = tmp_path / "plain"
    expected.touch()
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(expected.stat().st_mode)
    target.chmod(0o640)
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(target.name)
    other.hardlink_to(target)
    memscale.save(NEW, link)
    assert link.is_symlink() and number(target) == 1 and number(other) == 0
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    new = tmp_path / "not there"
    link.unlink()
    link.symlink_to(new)
    memscale.save(NEW, link)
    assert number(new) == 1


def test_refusals(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (target.open("rb"), 3, None):
        with pytest.raises(TypeError, match=r"path is \w+.*use torch\.save"):
            memscale.save(NEW, value)  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError):
        memscale.save(NEW, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"not a regular file.*pipe"):
        memscale.save(NEW, tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        memscale.save(NEW, tmp_path / "nowhere" / "a")
    monkeypatch.setattr(os, "access", lambda *_: False)  # for root everything can be written
    with pytest.raises(PermissionError):
        memscale.save(NEW, target)
    assert names(tmp_path) == ["pipe", "run.pt"] and number(target) == 0


def test_it_is_on_the_disk_before_it_is_in_place(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*args: Any, real: Any = real, name: str = name) -> Any:
            kind = "folder" if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode) else "file"
            order.append(f"{name} {kind}")
            return real(*args)

        monkeypatch.setattr(os, name, noted)
    memscale.save(NEW, target)
    assert order == ["fsync file", "replace file", "fsync folder"]


def test_a_folder_that_cannot_be_synced(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="the new file is in place"):
        memscale.save(NEW, target)
    assert number(target) == 1 and names(target.parent) == ["run.pt"]


# ---- failures ----------------------------------------------------------------------------------------


class Interrupts:
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("value", "error"),
    [({"a": OLD, "b": lambda: None}, Exception), ({"a": OLD, "b": Interrupts()}, KeyboardInterrupt)],
)
def test_what_cannot_be_saved(value: Any, error: type[BaseException], target: Path) -> None:
    with pytest.raises(error):
        memscale.save(value, target)
    assert names(target.parent) == ["run.pt"] and number(target) == 0


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_writing_fails(nth: int, error: BaseException, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the one that there was, not what PyTorch's writer says about it."""
    calls, real = 0, os.write

    def write(descriptor: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise error
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(type(error)) as caught:
        memscale.save({"a": torch.ones(100_000), "b": torch.ones(100_000)}, target)
    assert caught.value is error
    assert names(target.parent) == ["run.pt"] and number(target) == 0


@pytest.mark.parametrize("size", [0, 1000, 10_000])
def test_no_room(size: int, target: Path) -> None:
    with files_up_to(size), pytest.raises(OSError, match="too large") as caught:
        memscale.save(NEW, target)
    assert caught.value.errno == errno.EFBIG
    assert names(target.parent) == ["run.pt"] and number(target) == 0


# ---- leftovers ---------------------------------------------------------------------------------------


def test_leftovers_are_removed_and_nothing_else(target: Path) -> None:
    folder = target.parent
    stay = [".run.pt.0123456g.memscale", ".run.pt.memscale", ".other.pt.01234567.memscale", "run.pt.tmp"]
    for name in [*stay, ".run.pt.01234567.memscale", ".run.pt.89abcdef.memscale"]:
        (folder / name).touch()
    (folder / ".run.pt.aaaaaaaa.memscale").mkdir()
    (folder / ".run.pt.bbbbbbbb.memscale").symlink_to(folder / stay[0])
    os.mkfifo(folder / ".run.pt.cccccccc.memscale")
    stay += [f".run.pt.{letter * 8}.memscale" for letter in "abc"]
    memscale.save(NEW, target)
    assert names(folder) == sorted([*stay, "run.pt"])


def test_the_file_of_a_living_process_stays(target: Path) -> None:
    living = target.parent / ".run.pt.01234567.memscale"
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        memscale.save(NEW, target)
        assert living.exists()
    memscale.save(NEW, target)
    assert names(target.parent) == ["run.pt"]


def test_taken_for_a_leftover_before_it_was_locked(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = fcntl.flock, list[int]()

    def late(descriptor: int, operation: int) -> None:
        if not seen:
            Path(os.readlink(f"/proc/self/fd/{descriptor}")).unlink()
        seen.append(descriptor)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    memscale.save(NEW, target)
    assert len(seen) == 2 and number(target) == 1 and names(target.parent) == ["run.pt"]


def test_another_save_holds_it_before_it_was_locked(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be removed at any moment until the other has closed it, so it is not the one to write."""
    real, write, held = fcntl.flock, os.write, list[int]()

    def late(descriptor: int, operation: int) -> None:
        if not held:
            other = os.open(os.readlink(f"/proc/self/fd/{descriptor}"), os.O_RDWR)
            held.append(other)
            real(other, operation)
        real(descriptor, operation)

    def removed_meanwhile(descriptor: int, data: Any) -> int:
        Path(os.readlink(f"/proc/self/fd/{held[0]}")).unlink(missing_ok=True)
        return write(descriptor, data)

    monkeypatch.setattr(fcntl, "flock", late)
    monkeypatch.setattr(os, "write", removed_meanwhile)
    memscale.save(NEW, target)
    os.close(held[0])
    assert number(target) == 1 and names(target.parent) == ["run.pt"]


def test_a_file_system_without_locks(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    left = target.parent / ".run.pt.01234567.memscale"
    left.touch()
    monkeypatch.setattr(fcntl, "flock", flock)
    memscale.save(NEW, target)
    assert number(target) == 1 and left.exists()


# ---- kill -9 -----------------------------------------------------------------------------------------


def ends(work: Callable[[], None]) -> bool:
    """Whether work in a process of its own comes to its end; False: it was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def saved_with_a_kill(target: Path, position: int, after: bool) -> None:
    """Saves, and dies at one of the calls that the system sees, before it or after it."""
    count = 0

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == position and not after:
                die()
            result = real(*args, **more)
            if count == position:
                die()
            return result

        return call

    for name in (
        "open",
        "close",
        "write",
        "fsync",
        "fchmod",
        "fchown",
        "replace",
        "unlink",
        "listdir",
        "fstat",
    ):
        setattr(os, name, deadly(getattr(os, name)))
    fcntl.flock = deadly(fcntl.flock)
    memscale.save(NEW, target)


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_call(after: bool, target: Path) -> None:
    """What is there is whole, the old or the new, and the new from one call on."""
    found = []
    for position in range(1, 100):
        ended = ends(lambda position=position: saved_with_a_kill(target, position, after))
        found.append(number(target))
        memscale.save(OLD, target)
        assert names(target.parent) == ["run.pt"]
        if ended:
            break
    assert ended and len(found) > 12
    assert found == sorted(found) and found[0] == 0 and found[-2] == 1


def test_killed_at_any_byte(target: Path) -> None:
    draw = random.Random(5)
    real = os.write

    def partly(descriptor: int, data: Any, most: int) -> int:
        written = os.lseek(descriptor, 0, os.SEEK_CUR)
        if written + len(data) > most:
            real(descriptor, memoryview(data)[: most - written])
            die()
        return real(descriptor, data)

    size = target.stat().st_size + 4000 * 4  # of the new one
    for _ in range(10):
        most = draw.randrange(size)

        def work(most: int = most) -> None:
            os.write = lambda descriptor, data: partly(descriptor, data, most)  # type: ignore[assignment]
            memscale.save(NEW, target)

        assert not ends(work)
        left = [name for name in names(target.parent) if name != "run.pt"]
        assert len(left) == 1 and (target.parent / left[0]).stat().st_size == most
        assert number(target) == 0
        memscale.save(OLD, target)
        assert names(target.parent) == ["run.pt"]


def test_several_at_once(target: Path) -> None:
    """Whoever comes last wins; nobody sees, or removes, what others are writing."""
    children = []
    for value in (OLD, NEW, NEW):
        child = os.fork()
        if child == 0:
            try:
                for _ in range(10):
                    memscale.save(value, target)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    for _ in range(20):
        number(target)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    number(target)
    assert names(target.parent) == ["run.pt"]
