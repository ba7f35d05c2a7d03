# SPDX-License-Identifier: Apache-2.0
"""The offload engine's hooks where it gets rough: debug mode, interrupts, forks, code that runs between."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.errors import MemScaleError
from memscale.offload.engine import Offload, OffloadSettings

KIB = 1 << 10

CRAWL = {"fault_bytes_per_second": 4 << 20}
"""A copy of 256 KiB takes 60 ms: whoever waits for it is found waiting."""

REFUSED = "modified by an inplace operation"


@contextmanager
def offload(faults: dict[str, int] | None = None, **changes: Any) -> Iterator[Offload]:
    """An engine in debug mode with room in host memory, empty when the block ends."""
    given = {"host_bytes": 64 << 20, "least_bytes": KIB, "window_bytes": 8 << 20, "debug": True}
    door = Offload(OffloadSettings(torch.device("cpu"), **{**given, **changes}), faults)
    yield door
    gc.collect()
    counters = door.counters()
    assert (counters["block_count"], counters["source_bytes"]) == (0, 0)


# ---- debug mode ------------------------------------------------------------------------------------


def nothing(x: Tensor, y: Tensor) -> None:
    pass


def by_an_alias_that_is_gone(x: Tensor, y: Tensor) -> None:
    y.detach().add_(1)


def by_a_view(x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        y[3:5].zero_()


def of_an_input(x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        x.mul_(2)


def of_its_data(x: Tensor, y: Tensor) -> None:
    y.data.add_(1)  # not seen, as by autograd itself


def behind_autograds_back(x: Tensor, y: Tensor) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(y):
        y.add_(1)


def of_something_else(x: Tensor, y: Tensor) -> None:
    torch.zeros_like(y).add_(1)


def of_a_copy(x: Tensor, y: Tensor) -> None:
    y.clone().detach().add_(1)


WRITES = (
    nothing,
    by_an_alias_that_is_gone,
    by_a_view,
    of_an_input,
    of_its_data,
    behind_autograds_back,
    of_something_else,
    of_a_copy,
)

SAVES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "a result": lambda x: (y := x.exp(), y),
    "an operand": lambda x: (y := x.exp(), y * y),
    "a view": lambda x: (y := x.exp(), y[8:].t().sin()),
    "a result and views of it": lambda x: (y := x.exp(), y * y.flip(0) + y.view(-1)[:64].cos()),
    "an input": lambda x: (x, x * x),
}


def refuses(
    save: Callable[[Tensor], tuple[Tensor, Tensor]],
    write: Callable[[Tensor, Tensor], None],
    door: Offload | None = None,
) -> bool:
    """Whether backward refuses what was written after forward, when all copies are complete."""
    torch.manual_seed(3)
    x = torch.randn(64, 64, requires_grad=True)
    with door.hooks() if door is not None else nullcontext():
        y, z = save(x)
    write(x, y)
    try:
        z.sum().backward()
    except RuntimeError as error:
        assert REFUSED in str(error)
        torch.ones((), requires_grad=True).backward()  # until then PyTorch holds what it had in line
        return True
    return False


@pytest.mark.parametrize("capsules", [False, True], ids=["table", "capsules"])
@pytest.mark.parametrize("save", SAVES, ids=SAVES)
def test_debug_mode_refuses_what_autograd_refuses(save: str, capsules: bool) -> None:
    with offload({"fault_capsules": capsules}) as door:
        for write in WRITES:
            moved = door.counters().get("saves_moved", 0)
            assert refuses(SAVES[save], write, door) == refuses(SAVES[save], write), write.__name__
            assert door.counters()["saves_moved"] > moved


def test_debug_mode_refuses_again_and_again() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with offload() as door:
        with door.hooks():
            y = x.exp()
            loss = (y * y).sum()
        loss.backward(retain_graph=True)
        y.detach().add_(1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=REFUSED):
                loss.backward(retain_graph=True)
        del y, loss


def test_without_debug_mode_a_copy_that_is_complete_counts() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with offload(debug=False) as door:
        with door.hooks():
            y = x.exp()
            expected = y.detach().clone()
            loss = y.sum()
        y.detach().add_(1)
        loss.backward()
        assert x.grad is not None and torch.equal(x.grad, expected)
        del y, loss


def test_debug_mode_lets_the_memory_go() -> None:
    with offload(window_bytes=0) as door:
        y = torch.randn(64, 64)
        saved = door.engine.pack(y)
        gone = weakref.ref(y.untyped_storage())
        del y
        assert gone() is None
        del saved


def read(memory: int, count: int, place: int) -> bytes:
    """Bytes of this process's memory; none where there is none any more."""
    try:
        return os.pread(memory, count, place)
    except OSError:
        return b""


def places_of(pattern: bytes) -> list[int]:
    """Where in this process's writable memory some bytes are."""
    found = []
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps.read().splitlines():
            span, access, *_ = line.split()
            begin, end = (int(part, 16) for part in span.split("-"))
            if not access.startswith("rw") or end - begin > 256 << 20:
                continue
            content = read(memory.fileno(), end - begin, begin)
            at = content.find(pattern)
            while at >= 0:
                found.append(begin + at)
                at = content.find(pattern, at + 1)
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs /proc")
@pytest.mark.parametrize("debug", [True, False])
def test_freed_places_are_poisoned_in_debug_mode(debug: bool) -> None:
    torch.manual_seed(11 + debug)  # the other run's bytes may still lie about
    tensor = torch.randint(0, 256, (64 * KIB,), dtype=torch.uint8)
    with offload(debug=debug) as door, open("/proc/self/mem", "rb", buffering=0) as memory:
        keeps = door.engine.pack(torch.zeros(64 * KIB, dtype=torch.uint8))  # so that the slab stays mapped
        saved = door.engine.pack(tensor)
        door.engine.settle()
        places = places_of(bytes(tensor[KIB : KIB + 64].tolist()))
        assert len(places) > 1  # here and in the tier
        del saved
        now = [read(memory.fileno(), 32 * KIB, at) for at in places]
        assert now.count(b"\xdb" * 32 * KIB) == debug
        del keeps


# ---- interrupts ------------------------------------------------------------------------------------


@contextmanager
def interrupt(after_s: float) -> Iterator[None]:
    """A SIGINT for the main thread, and KeyboardInterrupt out of the block."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(after_s, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
            timer.join()
            time.sleep(10)  # the handler runs here at the latest
    finally:
        timer.join()


def step(x: Tensor) -> Tensor:
    y = x.exp()
    return (y * y.sin()).sum()


def gradient(door: Offload | None, x: Tensor) -> Tensor:
    if door is None:
        return torch.autograd.grad(step(x), x)[0]
    with door.hooks():
        loss = step(x)
    return torch.autograd.grad(loss, x)[0]


def many() -> list[Tensor]:
    """Each of them takes 60 ms to copy, so an interrupt comes long before the last one."""
    return [torch.randn(64 * KIB) for _ in range(12)]


def test_an_interrupt_while_pack_waits() -> None:
    xs = many()
    with offload(CRAWL, window_bytes=0) as door:
        with interrupt(0.02):
            list(map(door.engine.pack, xs))  # no Python code runs in between
        assert door.counters()["saves_moved"] < len(xs)
        saved = door.engine.pack(xs[0])
        assert torch.equal(door.engine.unpack(saved), xs[0])
        del saved


def test_an_interrupt_while_settle_waits() -> None:
    xs = many()
    with offload(CRAWL, window_bytes=64 << 20) as door:
        saves = [door.engine.pack(x) for x in xs]
        with interrupt(0.02):
            door.engine.settle()
        assert door.counters()["source_bytes"] > 0
        del saves[2:]
        door.engine.settle()
        assert door.counters()["source_bytes"] == 0
        assert torch.equal(door.engine.unpack(saves[1]), xs[1])
        del saves


def test_an_interrupt_while_unpack_waits() -> None:
    x = torch.randn(64 * KIB)
    with offload(CRAWL) as door:
        saved = door.engine.pack(x)
        door.engine.settle()
        with interrupt(0.02):
            list(map(door.engine.unpack, [saved] * 12))  # each one fetches anew
        assert door.counters()["in_bytes_host"] < 12 * x.nbytes
        for _ in range(2):
            assert torch.equal(door.engine.unpack(saved), x)
        del saved


@pytest.mark.parametrize("after_ms", [5, 40, 90, 150, 210])
def test_an_interrupted_step_leaves_nothing(after_ms: int) -> None:
    x = torch.randn(64 * KIB, requires_grad=True)
    plain = gradient(None, x)
    with offload(CRAWL, window_bytes=300 * KIB) as door:
        with interrupt(after_ms / 1000):
            gradient(door, x)
        assert torch.equal(gradient(door, x), plain)


# ---- forks -----------------------------------------------------------------------------------------


def in_child(run: Callable[[], bool]) -> bool:
    """What a forked child says, which has some time for it."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)  # a lock that nobody gives back ends here
            os._exit(0 if run() else 1)
        finally:
            traceback.print_exc()
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="PyTorch for CUDA runs no backward in a child")
@pytest.mark.parametrize("offloaded", [False, True], ids=["on their way", "offloaded"])
def test_a_fork_between_forward_and_backward(offloaded: bool) -> None:
    x = torch.randn(64 * KIB, requires_grad=True)
    plain = gradient(None, x)
    with offload(CRAWL) as door:
        engine = door.engine
        engine.region(None)
        with torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack):
            loss = step(x)
        if offloaded:
            engine.settle()
        graph = [loss]

        def child() -> bool:
            assert (door.counters(), door.trace(), door.notes()) == ({}, [], ())
            if offloaded:
                with pytest.raises(RuntimeError, match="forked"):
                    graph[0].backward()
            else:  # the sources came along
                assert torch.equal(torch.autograd.grad(graph[0], x)[0], plain)
            graph.clear()
            return torch.equal(gradient(door, x), plain)

        assert in_child(child)
        assert torch.equal(torch.autograd.grad(loss, x)[0], plain)
        del loss, graph[:]


# ---- code that runs in between ---------------------------------------------------------------------


def test_a_tensor_that_ends_may_call_the_engine() -> None:
    calls = []
    with offload(window_bytes=0) as door:
        engine = door.engine

        def ended() -> None:
            engine.settle()
            calls.append(engine.pack(torch.randn(64, 64)))

        y = torch.randn(64, 64)
        weakref.finalize(y.untyped_storage(), ended)
        saved = engine.pack(y)
        del y  # gone with the source, if not here
        engine.settle()
        assert len(calls) == 1
        del saved
        calls.clear()


def test_a_tensor_that_ends_may_close_the_engine() -> None:
    door = Offload(OffloadSettings(torch.device("cpu"), host_bytes=1 << 20, least_bytes=KIB), CRAWL)
    engine = door.engine
    tensors = [torch.randn(64, 64) for _ in range(4)]
    for tensor in tensors:
        weakref.finalize(tensor.untyped_storage(), engine.close)
    saves = [engine.pack(tensor) for tensor in tensors]
    del tensor, tensors
    del saves[2]
    with pytest.raises((RuntimeError, ValueError), match="closed"):
        engine.unpack(saves[0])
    with pytest.raises(ValueError, match="closed"):
        engine.pack(torch.randn(64, 64))
    engine.close()
    del saves


@pytest.mark.parametrize("waits", ["settle", "unpack"])
def test_an_engine_is_closed_while_a_thread_waits(waits: str) -> None:
    door = Offload(OffloadSettings(torch.device("cpu"), host_bytes=4 << 20, least_bytes=KIB), CRAWL)
    engine = door.engine
    x = torch.randn(64 * KIB)
    saves = [engine.pack(x)]
    if waits == "unpack":
        engine.settle()
    said: list[Any] = []

    def wait() -> None:
        try:
            said.append(engine.settle() if waits == "settle" else torch.equal(engine.unpack(saves[0]), x))
        except Exception as error:
            said.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.02)
    engine.close()
    thread.join()
    assert len(said) == 1 and (said[0] in (None, True) or isinstance(said[0], Exception))


def test_two_threads_go_through_the_same_graph() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    plain = gradient(None, x)
    with offload({"fault_delay_most_ns": 1_000_000}) as door:
        with door.hooks():
            graph = [step(x)]
        got: list[Any] = []

        def backward() -> None:
            try:
                for _ in range(20):
                    got.append(torch.autograd.grad(graph[0], x, retain_graph=True)[0])
            except Exception as error:
                got.append(error)

        threads = [threading.Thread(target=backward) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 60 and all(torch.equal(grad, plain) for grad in got)
        graph.clear()


# ---- tensors that are not what they seem -----------------------------------------------------------


@pytest.mark.parametrize("capsules", [False, True], ids=["table", "capsules"])
def test_lazy_conjugates_and_negatives_keep_their_values(capsules: bool) -> None:
    z = torch.randn(64, 64, dtype=torch.complex64)
    x = torch.randn(64, 64, requires_grad=True)
    with offload({"fault_capsules": capsules}) as door:
        for lazy in (z.conj(), z.conj().imag, z.conj().imag.detach(), z.conj()[3:].imag.t()):
            weight = x[: lazy.shape[0], : lazy.shape[1]]
            plain = torch.autograd.grad((weight * lazy).abs().sum(), x)[0]
            with door.hooks():
                loss = (weight * lazy).abs().sum()
            assert torch.equal(torch.autograd.grad(loss, x)[0], plain)
            del loss
        saved = door.engine.pack(z)
        assert door.counters()["saves_shared"] == 0  # on the same storage, yet none of them has left
        assert torch.equal(door.engine.unpack(saved), z)
        del saved


def test_a_tensor_that_is_given_another_storage_is_not_taken_for_the_first() -> None:
    with offload(debug=False) as door:
        engine = door.engine
        x = torch.randn(64, 64)
        for _ in range(50):  # storages of before come back at the same place
            saves, values = [], []
            for _ in range(4):
                saves.append(engine.pack(x))
                values.append(x.clone())
                engine.settle()
                x.data = torch.randn(64, 64)
            for save, value in zip(saves, values, strict=True):
                assert torch.equal(engine.unpack(save), value)
            del saves, save


def test_a_tensor_with_a_version_of_its_own_is_not_taken_for_one_that_is_gone() -> None:
    base = torch.randn(64, 64)
    with offload(debug=False) as door:
        engine = door.engine
        saves, values = [], []
        for _ in range(20):
            x = base.data  # on the same storage, at version 0, and where the one before was
            saves.append(engine.pack(x))
            values.append(base.clone())
            engine.settle()
            x.add_(1)
            del x
        for save, value in zip(saves, values, strict=True):
            assert torch.equal(engine.unpack(save), value)
        del saves, save


def test_a_storage_that_grows_is_not_taken_for_the_first() -> None:
    with offload(debug=False) as door:
        engine = door.engine
        x = torch.arange(4096.0)
        first = engine.pack(x)
        engine.settle()
        x.resize_(1 << 16)
        x[4096:] = 7
        second = engine.pack(x)
        assert engine.unpack(first).shape == (4096,) and torch.equal(engine.unpack(second), x)
        del first, second


def test_inference_tensors_have_no_version() -> None:
    with offload() as door:
        with torch.inference_mode():
            x = torch.randn(64, 64)
        saved = door.engine.pack(x)
        door.engine.settle()
        assert torch.equal(door.engine.unpack(saved), x)
        del saved


class Sees(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("least_bytes", [1, 1 << 30], ids=["leaves", "stays"])
def test_a_dispatch_mode_sees_what_is_done(least_bytes: int) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    plain = gradient(None, x)
    with offload(least_bytes=least_bytes) as door:
        assert torch.equal(gradient(door, x), plain)
        with Sees() as sees:
            assert torch.equal(gradient(door, x), plain)
        assert "detach.default" in sees.names


class SavesItsResult(torch.autograd.Function):
    """Saves a view of what it returns, which refers to the node by its base."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y.view(2, -1))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y.view_as(grad)


@pytest.mark.parametrize("least_bytes", [1, KIB], ids=["leaves", "stays"])
def test_what_is_saved_makes_no_cycle(least_bytes: int) -> None:
    x = torch.randn(8, requires_grad=True)
    weight = nn.Parameter(torch.randn(8, 8))
    frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    with offload(least_bytes=least_bytes) as door:
        with door.hooks():
            y = x.exp()
            z = (y @ weight.t()).sigmoid() * y.tanh()
            v = frozen.view(-1).mul(x.sum())
            v.relu_()
            u: Tensor = SavesItsResult.apply(x)  # type: ignore[no-untyped-call]
        gone = [weakref.ref(tensor.untyped_storage()) for tensor in (y, z, v, u)]
        loss = z.sum() + v.sum() + u.sum()
        del y, z, v, u, loss
        assert [ref() for ref in gone] == [None] * 4


# ---- no room on the device ---------------------------------------------------------------------------


REASONS = {
    "CUDA out of memory. Tried to allocate 2.00 MiB": torch.cuda.OutOfMemoryError,
    "[enforce fail] DefaultCPUAllocator: not enough memory": torch.cuda.OutOfMemoryError,
    "CUDA error: an illegal memory access was encountered": MemScaleError,
}


@pytest.mark.parametrize("reason", REASONS)
def test_no_room_for_what_comes_back(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own exception, as without offload; and another time there is room."""
    full = False
    empty = torch.empty

    def limited(*args: Any, **kwargs: Any) -> Tensor:
        if full:
            raise torch.cuda.OutOfMemoryError(reason)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", limited)
    x = torch.randn(64 * KIB, requires_grad=True)
    with offload({"fault_capsules": True}) as door:
        with door.hooks():
            loss = (x * x.exp()).sum()
        full = True
        with pytest.raises(REASONS[reason], match=re.escape(reason)) as caught:
            loss.backward(retain_graph=True)
        assert getattr(caught.value, "status", "") == (
            "EDEVMEM" if REASONS[reason] is torch.cuda.OutOfMemoryError else "EDRIVER"
        )
        full = False
        x.grad = None
        loss.backward()
        del loss
    plain = x.detach().requires_grad_()
    (plain * plain.exp()).sum().backward()
    assert x.grad is not None and plain.grad is not None
    assert torch.equal(x.grad, plain.grad)


def test_no_room_in_the_process() -> None:
    """The same where PyTorch makes the memory without Python."""
    x = torch.randn(64 << 20, requires_grad=True)
    with offload({}, file_bytes=512 << 20, host_bytes=0, window_bytes=KIB, debug=False) as door:
        with door.hooks():
            loss = x.exp().exp().sum()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), limits[1]))
        try:
            with pytest.raises(torch.cuda.OutOfMemoryError):
                loss.backward()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        del loss
