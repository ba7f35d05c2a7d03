# SPDX-License-Identifier: Apache-2.0
"""Whole runs with offload through `wrap`: what goes wrong leaves nothing behind, and no wrong bit."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memscale
from disks import files_up_to
from memscale.offload.engine import why_not
from soak.samples import (
    Network,
    batch,
    engine_of,
    files_in,
    gradients,
    is_empty,
    loss_of,
    same,
    step,
    wrapped,
)

WHY_NOT = why_not(torch.device("cpu"))
pytestmark = [
    pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]


class Broken(Exception):
    pass


@contextlib.contextmanager
def breaking(module: nn.Module, where: str, error: BaseException) -> Iterator[None]:
    """Has a module's forward, or the gradient of its first parameter, raise."""

    def fail(*_: object) -> None:
        raise error

    if where == "forward":  # no hook, which would be planned for
        module.forward = fail
        yield
        del module.forward
    else:
        handle = next(module.parameters()).register_post_accumulate_grad_hook(fail)
        yield
        handle.remove()


@pytest.mark.parametrize("error", [Broken(), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle(where: str, error: BaseException, tmp_path: Path) -> None:
    model, x = Network(), batch()
    plain = step(model, x)
    wrapped(model, x, tmp_path)
    engine = engine_of(model)
    with breaking(model.blocks[2].down, where, error), pytest.raises(type(error)):  # type: ignore[union-attr,index]
        step(model, x)
    assert engine.counters()["put_count_file"] > 0
    error.__traceback__ = None  # its frames hold the graph
    # So do nodes that PyTorch had ready to run, until the next backward.
    torch.ones(1, requires_grad=True).sum().backward()
    assert is_empty(engine)
    assert same(step(model, x), plain)


def test_a_graph_that_is_let_go(tmp_path: Path) -> None:
    model, x = Network(), batch()
    plain = step(model, x)
    wrapped(model, x, tmp_path)
    loss = loss_of(model, x)
    assert engine_of(model).counters()["held_bytes_file"] > 0
    del loss
    assert is_empty(engine_of(model))
    assert same(step(model, x), plain)


def test_what_is_offloaded_outlives_detach_and_no_more(tmp_path: Path) -> None:
    model, x = Network(), batch()
    plain = step(model, x)
    wrapped(model, x, tmp_path)
    threads = len(os.listdir("/proc/self/task"))
    model.zero_grad()
    loss = loss_of(model, x)
    engine = engine_of(model)
    memscale.detach(model)
    assert engine.counters()["held_bytes_file"] > 0 and files_in(tmp_path)
    loss.backward()
    assert same([loss.detach(), *gradients(model)], plain) and is_empty(engine)
    del engine, loss
    gc.collect()
    assert not files_in(tmp_path) and len(os.listdir("/proc/self/task")) < threads + 2


def test_kill_9_leaves_nothing(tmp_path: Path) -> None:
    """A child is killed in the middle of a step, with blocks in its file."""
    model, x = Network(depth=2), batch()
    wrapped(model, x, tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - it is killed
        try:
            loss = loss_of(model, x)
            offloaded = engine_of(model).counters()["held_bytes_file"]
            os.write(writing, b"gone" if offloaded > 0 and files_in(tmp_path) else b"here")
            time.sleep(60)
            del loss
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 4) == b"gone"
        assert not list(tmp_path.iterdir()), "the file has a name"
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(reading)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not list(tmp_path.iterdir())


# ---- a disk that gives up --------------------------------------------------------------------------


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """What the disk has no room for stays; nothing is lost."""
    model, x = Network(), batch()
    plain = step(model, x)
    wrapped(model, x, tmp_path)
    with files_up_to(6 << 20):
        assert same(step(model, x), plain)
        counters = engine_of(model).counters()
    assert counters["refused_count"] > 0 and counters["lost_count"] == counters["failed_count"] == 0
    assert 0 < counters["taken_bytes_file"] <= 6 << 20
    assert same(step(model, x), plain) and is_empty(engine_of(model))


def test_a_disk_that_fails_while_it_is_written(tmp_path: Path) -> None:
    """Its space is reserved, then writing it fails: the tensors stay."""
    model, x = Network(), batch()
    plain = step(model, x)
    wrapped(model, x, tmp_path)
    assert same(step(model, x), plain)
    with files_up_to(2 << 20):
        assert same(step(model, x), plain)
        counters = engine_of(model).counters()
    assert counters["failed_count"] + counters["refused_count"] > 0 and counters["lost_count"] == 0
    assert same(step(model, x), plain) and is_empty(engine_of(model))


def test_a_disk_that_fails_while_it_is_read(tmp_path: Path) -> None:
    """The bytes are gone, and backward says so; it computes nothing from what it did not get."""
    model, x = Network(), batch()
    plain = step(model, x)
    wrapped(model, x, tmp_path)
    model.zero_grad()
    loss = loss_of(model, x)
    (first, *_) = files_in(tmp_path)
    os.ftruncate(first, 0)
    with pytest.raises(OSError, match="read"):
        loss.backward()
    assert engine_of(model).counters()["lost_count"] > 0
    del loss
    assert is_empty(engine_of(model))
    assert same(step(model, x), plain)


def test_a_slow_disk(tmp_path: Path) -> None:
    """Copies at 300 MB/s, begun late and cut in two: later, and the same."""
    model, x = Network(depth=2), batch()
    plain = step(model, x)
    wrapped(model, x, tmp_path)
    slow = {"fault_bytes_per_second": 300 << 20, "fault_delay_most_ns": 2_000_000, "fault_split_ppm": 500_000}
    engine_of(model)._faults.update(slow)
    assert same(step(model, x), plain)
    assert engine_of(model).counters()["arrive_wait_ns"] > 0


# ---- what else people do ----------------------------------------------------------------------------


def test_two_models_in_one_process(tmp_path: Path) -> None:
    """Their steps are interleaved; each has an engine."""
    models, x = [Network(2), Network(3)], batch()
    plain = [step(model, x) for model in models]
    for model in models:
        wrapped(model, x, tmp_path)
        model.zero_grad()
    losses = [loss_of(model, x) for model in models]
    for model, loss, expected in zip(models, losses, plain, strict=True):
        loss.backward()
        assert same([loss.detach(), *gradients(model)], expected)
    assert engine_of(models[0]) is not engine_of(models[1])


def test_wrapping_again_between_forward_and_backward(tmp_path: Path) -> None:
    model, x = Network(), batch()
    plain = step(model, x)
    wrapped(model, x, tmp_path)
    model.zero_grad()
    loss = loss_of(model, x)
    first = engine_of(model)
    wrapped(model, x, tmp_path, percent=70)
    loss.backward()
    assert same([loss.detach(), *gradients(model)], plain) and is_empty(first)
    assert same(step(model, x), plain)


def test_saving_and_copying_between_forward_and_backward(tmp_path: Path) -> None:
    """Copies are plain models, also while a graph of the original waits."""
    import copy
    import pickle

    model, x = Network(), batch()
    plain = step(model, x)
    folder = tmp_path / "offloaded"
    folder.mkdir()
    wrapped(model, x, folder)
    model.zero_grad()
    loss = loss_of(model, x)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    twins = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    loss.backward()
    assert same([loss.detach(), *gradients(model)], plain)
    assert all(same(step(twin, x), plain) for twin in twins)
    state = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*")  # the compiler's own
def test_a_compiler_around_it(tmp_path: Path) -> None:
    """Nothing leaves in there; the bits are those of the same compile without MemScale."""
    model, x = Network(2), batch()
    compiled = torch.compile(model, backend="aot_eager")
    plain = step(compiled, x)
    wrapped(model, x, tmp_path)
    torch._dynamo.reset()
    assert same(step(torch.compile(model, backend="aot_eager"), x), plain)
    torch._dynamo.reset()


def test_data_parallel_is_refused(tmp_path: Path) -> None:
    """Its replicas would share an engine that knows one device."""
    model, x = Network(2), batch()
    wrapped(model, x, tmp_path)
    with pytest.raises(Exception, match=r"DistributedDataParallel|DataParallel"):
        model._replicate_for_data_parallel()  # type: ignore[operator]


def test_calls_from_several_threads(tmp_path: Path) -> None:
    """Forward and backward of one wrapped model in two threads at once, on graphs of their own."""
    import threading

    model, x = Network(2), batch()
    wrapped(model, x, tmp_path)
    names = [name for name, _ in model.named_parameters()]

    def grads(value: Tensor) -> list[Tensor]:
        loss = model(value).square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    model.eval()  # no random numbers: two threads draw them in no order
    inputs = [batch(), batch()]
    expected = [grads(value) for value in inputs]
    found: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        for _ in range(2):
            found[number] = grads(inputs[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(found[number], expected[number]) for number in range(2)), names
    assert is_empty(engine_of(model))
