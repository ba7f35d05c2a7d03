# SPDX-License-Identifier: Apache-2.0
"""The offload engine under autograd's hooks: the same bits as without it, whatever the copies do.

Every test runs over each route to PyTorch's tensors: the table of DLPack functions with functions of its
library, without them, and capsules.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memscale import _core
from memscale.errors import ConfigError, MemScaleError
from memscale.offload.engine import Offload, OffloadSettings

KIB = 1 << 10
TIERS = ("pinned", "host", "file")

SLOW = {"fault_delay_most_ns": 2_000_000, "fault_split_ppm": 500_000}
"""Copies begin late and come in two halves: an edge that is missing shows as other bytes."""


ROUTES: dict[str, dict[str, int | bool]] = {
    "table": {},
    "table alone": {"fault_no_library": True},
    "capsules": {"fault_capsules": True},
}

_route: dict[str, int | bool] = {}  # an option of each engine


@pytest.fixture(autouse=True, params=ROUTES)
def route(request: pytest.FixtureRequest) -> Iterator[str]:
    """How the engine reads and makes tensors."""
    name: str = request.param
    if name != "capsules" and not hasattr(Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this PyTorch has no DLPack exchange API")
    _route.update(ROUTES[name])
    yield name
    _route.clear()


def settings(tier: str = "host", **changes: Any) -> OffloadSettings:
    """For one tier, where everything above 1 KiB leaves and little may wait."""
    given = {f"{tier}_bytes": 64 << 20, "least_bytes": KIB, "window_bytes": 64 * KIB, "debug": True}
    return OffloadSettings(torch.device("cpu"), **{**given, **changes})


def opened(tier: str = "host", faults: dict[str, int] | None = None, **changes: Any) -> Offload:
    """An engine of the route that is tried."""
    return Offload(settings(tier, **changes), {**_route, **(faults or {})})


@contextmanager
def offload(tier: str = "host", faults: dict[str, int] | None = None, **changes: Any) -> Iterator[Offload]:
    """An engine that is empty when the block ends."""
    door = opened(tier, faults, **changes)
    yield door
    gc.collect()
    counters = door.counters()
    assert {name: counters[name] for name in ("block_count", "source_bytes")} == {
        "block_count": 0,
        "source_bytes": 0,
    }


class Network(nn.Module):
    """A norm, a fused product cut in three, attention, an MLP with dropout and an in-place step."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.drop(self.down(nn.functional.gelu(self.up(x)).relu_()))


def gradients(run: Callable[[], Tensor], leaves: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(5)
    for leaf in leaves:
        leaf.grad = None
    run().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def under(door: Offload, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def hooked() -> Tensor:
        with door.hooks():
            return run()

    return hooked


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))


def case(network: nn.Module | None = None) -> tuple[Callable[[], Tensor], list[Tensor]]:
    network = Network() if network is None else network
    x = torch.randn(4, 64, 32, requires_grad=True)
    return lambda: network(network(x)).square().mean(), [x, *network.parameters()]


@pytest.mark.parametrize("faults", [None, SLOW], ids=["quick", "slow"])
@pytest.mark.parametrize("tier", TIERS)
def test_gradients_keep_every_bit(tier: str, faults: dict[str, int] | None, tmp_path: Path) -> None:
    run, leaves = case()
    plain = gradients(run, leaves)
    with offload(tier, faults, directory=str(tmp_path) if tier == "file" else "") as door:
        for _ in range(4):
            assert same(gradients(under(door, run), leaves), plain)
        counters = door.counters()
        assert counters[f"out_bytes_{tier}"] > 0 and counters[f"in_bytes_{tier}"] > 0
        assert counters["prefetched_count"] + counters["late_count"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype).requires_grad_()
    plain = gradients(lambda: (x * x).abs().float().sum(), [x])
    with offload() as door:
        assert same(gradients(under(door, lambda: (x * x).abs().float().sum()), [x]), plain)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.t(),
        lambda x: x[3:9, ::2],
        lambda x: x.expand(3, 64, 64),
        lambda x: x.diagonal(),
        lambda x: x.view(8, 8, 64).permute(2, 0, 1),
        lambda x: x.unfold(0, 5, 3),
        lambda x: x.flip(0)[1:],
    ],
    ids=["transposed", "strided", "expanded", "diagonal", "permuted", "overlapping", "flipped"],
)
def test_views_come_back_with_their_strides(look: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def run() -> Tensor:
        base = x.exp()
        return (look(base) * look(base).sin()).sum()

    plain = gradients(run, [x])
    with offload(faults=SLOW) as door:
        assert same(gradients(under(door, run), [x]), plain)
        seen: list[Any] = []
        y = look(x.detach().exp())
        saved = door.engine.pack(y)
        seen.append(door.engine.unpack(saved))
        assert seen[0].stride() == y.stride() and seen[0].shape == y.shape and torch.equal(seen[0], y)
        del saved, seen


def test_one_copy_for_all_tensors_on_a_storage() -> None:
    x = torch.randn(64, 64)
    with offload() as door:
        engine = door.engine
        saves = [engine.pack(x), engine.pack(x.t()), engine.pack(x[2:])]
        engine.settle()
        saves.append(engine.pack(x.view(-1)))  # also when the first copy is complete
        counters = door.counters()
        assert counters["saves_moved"] == 1 and counters["saves_shared"] == 3
        for save, expected in zip(saves, (x, x.t(), x[2:], x.view(-1)), strict=True):
            assert torch.equal(engine.unpack(save), expected)
        del saves, save


def test_a_storage_that_was_written_since_is_copied_anew() -> None:
    x = torch.randn(64, 64)
    with offload(debug=False) as door:  # or else it is refused, as by autograd
        engine = door.engine
        first, before = engine.pack(x), x.clone()
        engine.settle()
        x.add_(1)
        second = engine.pack(x)
        assert door.counters()["saves_moved"] == 2
        assert torch.equal(engine.unpack(first), before) and torch.equal(engine.unpack(second), x)
        del first, second


def test_tensors_that_share_memory_and_no_version_have_copies_of_their_own() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def run() -> Tensor:
        first, second = torch.unsafe_chunk(x * 2, 2)
        return (
            first.sigmoid_() * second.sigmoid_()
        ).sum()  # each is saved before, or after, the other changes

    plain = gradients(run, [x])
    with offload() as door:
        assert same(gradients(under(door, run), [x]), plain)


def test_what_stays() -> None:
    network = nn.Linear(64, 64)
    buffer = torch.randn(64, 64)
    with offload(least_bytes=KIB) as door:
        engine = door.engine
        stays = {
            "a parameter": network.weight,
            "a view of a parameter": network.weight.t(),
            "a small tensor": torch.randn(8),
            "a sparse tensor": buffer.to_sparse(),
            "an empty tensor": torch.empty(0, 64),
            "a meta tensor": torch.empty(64, 64, device="meta"),
            "a subclass": buffer.as_subclass(type("Sub", (Tensor,), {})),
        }
        for what, tensor in stays.items():
            before = door.counters()["saves_kept"]
            save = engine.pack(tensor)
            assert door.counters()["saves_kept"] == before + 1, what
            back = engine.unpack(save)
            assert back.shape == tensor.shape and type(back) is type(tensor), what
            if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
                assert back.data_ptr() == tensor.data_ptr(), what
        assert door.counters()["saves_moved"] == 0
        del save


def test_copies_that_autocast_makes_of_parameters_stay() -> None:
    network = nn.Sequential(nn.Linear(64, 64), nn.Conv1d(16, 16, 3, padding=1))
    x = torch.randn(16, 64, requires_grad=True)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return network(x).float().sum()

    leaves = [x, *network.parameters()]
    plain = gradients(run, leaves)
    with offload() as door:
        assert same(gradients(under(door, run), leaves), plain)
        moved = door.counters()["out_bytes_host"]
    assert moved <= 3 * 16 * 64 * 2  # activations in BF16, and not a weight


def test_a_tensor_that_is_changed_in_place_is_refused_as_without_hooks() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with offload(faults=SLOW) as door:
        with door.hooks():
            y = x.exp()
            loss = y.sum()
            y.detach().add_(1)  # while its copy is on its way; later, the copy would be right all the same
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del y, loss


def test_a_kept_tensor_that_is_changed_in_place_is_refused_too() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64, requires_grad=True)
    with offload() as door:
        with door.hooks():
            loss = (x @ weight).sum()
        with torch.no_grad():
            weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss


def test_retain_graph_and_double_backward() -> None:
    network = Network()
    network.drop.p = 0.0
    x = torch.randn(4, 64, 32, requires_grad=True)

    def twice() -> list[Tensor]:
        loss = network(x).square().mean()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (again,) = torch.autograd.grad(loss, x, create_graph=True)
        second = torch.autograd.grad(again.square().sum(), list(network.parameters()), allow_unused=True)
        return [first, again.detach(), *(grad for grad in second if grad is not None)]

    plain = twice()
    with offload(faults=SLOW) as door, door.hooks():
        assert same(twice(), plain)


def test_exceptions_in_the_middle() -> None:
    run, leaves = case()
    plain = gradients(run, leaves)

    class Stop(Exception):
        pass

    def fail(grad: Tensor) -> Tensor:
        raise Stop

    with offload(faults=SLOW) as door:
        with pytest.raises(Stop), door.hooks():
            run()
            raise Stop
        with door.hooks():
            loss = run()
            middle = torch.randn(4, 64, 32, requires_grad=True).exp()
            middle.register_hook(fail)
            loss = loss + (middle * 2).sum()
        with pytest.raises(Stop):
            loss.backward()
        del loss, middle
        assert same(gradients(under(door, run), leaves), plain)


def test_several_threads_run_backward() -> None:
    network = Network()
    xs = [torch.randn(4, 64, 32, requires_grad=True) for _ in range(4)]

    def backward(x: Tensor, loss: Tensor, out: dict[int, Tensor]) -> None:
        (out[id(x)],) = torch.autograd.grad(loss, x)

    def steps() -> dict[int, Tensor]:
        torch.manual_seed(5)
        out: dict[int, Tensor] = {}
        losses = [network(x).square().mean() for x in xs]
        threads = [
            threading.Thread(target=backward, args=(x, loss, out)) for x, loss in zip(xs, losses, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return out

    plain = steps()
    with offload(faults=SLOW) as door:
        with door.hooks():
            got = steps()
        assert all(torch.equal(got[key], value) for key, value in plain.items())


def test_failing_copies_keep_their_source() -> None:
    run, leaves = case()
    plain = gradients(run, leaves)
    with offload(faults={"fault_seed": 3, "fault_fail_ppm": 5_000}) as door:
        right = failed = 0
        while right < 5 or failed == 0 or door.counters()["failed_count"] == 0:
            try:
                assert same(gradients(under(door, run), leaves), plain)
                right += 1
            except MemScaleError as error:  # a copy back failed: it is said, and no wrong gradient comes out
                assert "copy" in str(error)
                failed += 1
            assert right + failed < 200


def test_without_room_everything_stays() -> None:
    run, leaves = case()
    plain = gradients(run, leaves)
    with offload(host_bytes=16 * KIB) as door:
        assert same(gradients(under(door, run), leaves), plain)
        counters = door.counters()
        assert counters["refused_count"] > 0 and counters["taken_bytes_host"] <= 16 * KIB


def test_no_growth_with_changing_shapes() -> None:
    network = Network()
    held = 0
    with offload() as door:
        for step in range(120):
            x = torch.randn(2 + step % 5, 64, 32, requires_grad=True)
            gradients(under(door, lambda x=x: network(x).square().mean()), [x])  # type: ignore[misc]
            if step == 20:
                held = door.counters()["taken_bytes_host"]
        assert door.counters()["taken_bytes_host"] == held > 0
        del x


def test_nothing_refers_to_what_was_saved() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with offload(window_bytes=0) as door:
        with door.hooks():
            y = x.exp()
            z = y * y
        gone = weakref.ref(y.untyped_storage())
        loss = z.sum()
        del y, z
        door.engine.settle()
        assert gone() is None  # its bytes are offloaded
        loss.backward()
        del loss


def test_a_model_may_be_let_go_between_forward_and_backward() -> None:
    run, leaves = case()
    plain = gradients(run, leaves)
    door = opened()
    torch.manual_seed(5)
    for leaf in leaves:
        leaf.grad = None
    with door.hooks():
        loss = run()
    engine = weakref.finalize(door, lambda: None)
    del door
    assert not engine.alive
    loss.backward()
    assert same([leaf.grad for leaf in leaves if leaf.grad is not None], plain)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_opens_an_engine_of_its_own() -> None:
    with offload() as door:
        x = torch.randn(64, 64)
        save = door.engine.pack(x)
        child = os.fork()
        if child == 0:
            try:
                own = door.engine
                again = own.pack(x)
                os._exit(0 if torch.equal(own.unpack(again), x) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(door.engine.unpack(save), x)
        del save


def test_a_closed_engine_says_so() -> None:
    door = opened()
    engine = door.engine
    x = torch.randn(64, 64)
    save = engine.pack(x)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.unpack(save)
    with pytest.raises(ValueError, match="closed"):
        engine.pack(x)
    with pytest.raises(RuntimeError, match="closed"):
        engine.counters()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host_bytes": 0}, "at least one tier"),
        ({"host_bytes": 1 << 20, "chunk_bytes": 5}, "chunk_bytes is 5"),
        ({"nonsense": 1}, "nonsense"),
        ({"host_bytes": -1}, "host_bytes"),
    ],
)
def test_bad_options_are_named(options: dict[str, int], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        _core.OffloadEngine(Tensor, nn.Parameter, None, {**_route, **options})


def test_a_folder_that_is_not_there() -> None:
    door = opened("file", directory="/nowhere/at/all")
    with pytest.raises(FileNotFoundError, match="nowhere"), door.hooks():
        pass


def detached_by_a_step(monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the engine goes through Python for what it holds of a tensor."""
    count, detach = 0, Tensor.detach

    def counted(tensor: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return detach(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "detach", counted)
        with offload(debug=False) as door:
            x = torch.randn(64, 64, requires_grad=True)
            with door.hooks():
                loss = x.exp().sum()
            loss.backward()
            assert x.grad is not None and torch.equal(x.grad, detach(x).exp())
            del loss
    return count


def test_symbols_of_pytorch_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = detached_by_a_step(monkeypatch)
    monkeypatch.setenv("MEMSCALE_TORCH_SYMBOLS", "off")
    without = detached_by_a_step(monkeypatch)
    assert without > 0
    assert usual in (0, without)  # 0 where they are there
    monkeypatch.setenv("MEMSCALE_TORCH_SYMBOLS", "1")
    with pytest.raises(ConfigError, match="MEMSCALE_TORCH_SYMBOLS is '1'; allowed: 'auto', 'off'"):
        _ = opened().engine
