# SPDX-License-Identifier: Apache-2.0
"""Trainings with streamed weights compute every bit of plain PyTorch, whatever models and loops do."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from calls import beside
from memscale.techniques.tiles import attention_tiles, loss_tiles, row_search
from memscale.weights.backing import FileStore
from memscale.weights.blocks import HostBlocks
from memscale.weights.saves import can_save
from memscale.weights.stream import stream_of, window_bytes
from memscale.weights.unit import Unit
from memscale.weights.units import units_of
from weight_samples import (
    WIDTH,
    Convolutions,
    Helped,
    Loop,
    Odd,
    PastVersions,
    Recurrent,
    Stack,
    adapted,
    batch,
    built,
    loss_of,
    odd_stack,
    same,
    shrink_all,
    streamed,
    trained,
)

pytestmark = pytest.mark.skipif(not can_save(), reason="this PyTorch does not tell which hooks are in force")


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=8, n_embd=24, n_layer=3, n_head=2))
    return WithLabels(model)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40, d_model=24, d_kv=12, d_ff=36, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return WithLabels(T5ForConditionalGeneration(config))


class WithLabels(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(input_ids=x, labels=x)


WAYS = (
    "kept by a function",
    "view cached",
    "written",
    "given new data",
    "without its module",
    "saved as it is",
    "conjugate",
)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "torch's checkpoints": partial(Stack, False),
    "torch's reentrant checkpoints": partial(Stack, True),
    "recurrent": Recurrent,
    "convolutions": Convolutions,
    "adapted": adapted,
    "gpt2": gpt2,
    "t5": t5,
    **{way: partial(odd_stack, way) for way in WAYS},
}


HOLDING = ("kept by a function", "view cached", "conjugate")
"""Somebody has a view of a weight when its module's forward is over."""


def clipped(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def written(model: nn.Module) -> Tensor:
    """What loops do to weights, by every way."""
    with torch.no_grad():
        for number, value in enumerate(model.parameters()):
            if number % 4 == 0:
                value.mul_(0.999)
            elif number % 4 == 1:
                value.data.mul_(1.001)
            elif number % 4 == 2:
                value.detach().add_(1e-4)
    return torch.stack([value.detach().norm() for value in model.parameters()])


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.99 for name, value in model.state_dict().items()})


def evaluated(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        first = loss_of(model, 5000)
    with torch.inference_mode():
        second = loss_of(model, 5001)
    model.train()
    return torch.stack([first, second.clone()])


AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
LOOPS = {
    "accumulation": Loop(accumulate=3, before_step=clipped),
    "two forwards": Loop(forwards=2, before_step=clipped),
    "lists": Loop(partial(AdamW, lr=1e-2, foreach=True)),
    "fused": Loop(partial(AdamW, lr=1e-2, fused=True, amsgrad=True)),
    "momentum": Loop(partial(SGD, lr=1e-2, momentum=0.9)),
    "written between": Loop(after_step=written),
    "written past versions before backward": Loop(
        between=lambda model: [value.data.mul_(1.01) for value in model.parameters()]
    ),
    "loaded": Loop(after_step=loaded),
    "evaluated": Loop(after_step=evaluated),
    "evaluated before backward": Loop(between=evaluated),
    "autocast": Loop(around=partial(torch.autocast, "cpu", torch.bfloat16)),
    "saves on the host": Loop(around=torch.autograd.graph.save_on_cpu),
    "operations counted": Loop(around=partial(FlopCounterMode, display=False)),
    "many steps": Loop(steps=50),
}
if hasattr(torch.optim, "Adafactor"):  # PyTorch 2.5
    LOOPS["Adafactor"] = Loop(partial(torch.optim.Adafactor, lr=1e-2))


@cache
def plain_run(model: str, loop: str) -> list[Tensor]:
    return trained(built(MODELS[model]), LOOPS.get(loop, Loop()))


@pytest.mark.parametrize("name", MODELS)
def test_every_bit_of_models(name: str) -> None:
    model = built(MODELS[name])
    with streamed(model) as stream:
        assert same(trained(model), plain_run(name, ""))
        used = stream.window.counters
        assert used["read_count"] > (
            3 if name in ("view cached", "conjugate") else 8
        )  # which stay in memory from then on
        assert bool(used["over_window"]) == (name in HOLDING)
        staying = {path for path, unit in stream.units.items() if unit.stays}
        assert bool(staying) == (name == "view cached")
    assert same([value.detach() for value in model.parameters()], final_weights(model, plain_run(name, "")))
    assert stream_of(model) is None


def test_units_that_share_a_module_come_and_go() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu())  # type: ignore[no-any-return]

    for first in range(3):
        model, plain = built(Tied), built(Tied)
        with streamed(model) as stream:
            paths = list(stream.units)
            assert paths == ["first.weight", "first", "last"]
            for path in paths[first:] + paths[:first]:
                for item in (model, plain):
                    item(torch.ones(2, WIDTH)).sum().backward()
                stream.remove(path)
        theirs = [value.grad for value in plain.parameters() if value.grad is not None]
        assert same([value.grad for value in model.parameters() if value.grad is not None], theirs)


def final_weights(model: nn.Module, run: list[Tensor]) -> list[Tensor]:
    """Those in a run, in order: states of parameters have their shapes, too."""
    shapes = [tuple(value.shape) for value in model.parameters()]
    starts = [
        i
        for i in range(len(run) - len(shapes) + 1)
        if [tuple(value.shape) for value in run[i : i + len(shapes)]] == shapes
    ]
    return run[starts[-1] : starts[-1] + len(shapes)]


@pytest.mark.parametrize("name", LOOPS)
def test_every_bit_of_loops(name: str) -> None:
    model = built(Stack)
    with streamed(model) as stream:
        assert same(trained(model, LOOPS[name]), plain_run("stack", name))
        assert not any(unit.stays for unit in stream.units.values())


@pytest.mark.parametrize("name", ["stack", "torch's checkpoints", "gpt2", "kept by a function"])
@pytest.mark.parametrize("window", [0, 1 << 30])
def test_every_bit_whatever_the_window(name: str, window: int) -> None:
    model = built(MODELS[name])
    with streamed(model, window=window) as stream:
        assert same(trained(model), plain_run(name, ""))
        assert bool(stream.window.counters["over_window"]) == (window == 0)


@pytest.mark.parametrize("name", ["stack", "torch's checkpoints"])
def test_every_bit_with_late_reads(name: str) -> None:
    model = built(MODELS[name])
    with beside({FileStore.read: lambda *unused: time.sleep(0.003)}), streamed(model) as stream:
        assert same(trained(model, Loop(steps=2)), trained(built(MODELS[name]), Loop(steps=2)))
        assert stream.window.counters["waited_for"] > 4


def test_a_block_does_not_leave_while_it_is_read() -> None:
    """One was asked for that is not used this time: whoever has its memory next must not see the read."""

    class Choosing(Stack):
        last = 2

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x) + self.place[: x.shape[1]]
            for index in (0, self.last, 1):
                x = self.blocks[index](x)
            self.last = 3 - self.last
            return self.head(x)  # type: ignore[no-any-return]

    pending: list[bool] = []

    class Watching(HostBlocks):
        def give(self, unit: Unit, memory: Tensor) -> None:
            pending.append(unit.pending is not None)
            super().give(unit, memory)

    model = built(Choosing)
    late = {FileStore.read: lambda *unused: time.sleep(0.02)}
    with beside(late), streamed(model, blocks=Watching):
        assert same(trained(model, Loop(steps=2)), trained(built(Choosing), Loop(steps=2)))
    assert pending and not any(pending)


def test_a_block_of_another_size_goes_before_the_next_one_is_made() -> None:
    given: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    class Watching(HostBlocks):
        def give(self, unit: Unit, memory: Tensor) -> None:
            given.append(weakref.ref(memory))
            super().give(unit, memory)

        def beyond(self, nbytes: int) -> Tensor:
            alive.extend(past() is not None for past in given)
            return super().beyond(nbytes)

    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, 2 * WIDTH)]
    model = built(lambda: nn.Sequential(*layers, nn.Linear(2 * WIDTH, 4)))
    with streamed(model, window=16 * WIDTH * WIDTH, blocks=Watching) as stream:
        model(torch.randn(3, WIDTH)).sum().backward()
        assert stream.window.here_bytes <= stream.window.most_bytes
    assert alive and not any(alive)


def test_what_is_written_to_a_weight_that_somebody_holds() -> None:
    """By a way that no version counts, while a function keeps a view of it."""
    model, plain = (built(MODELS["kept by a function"]) for _ in range(2))
    with streamed(model):
        for item in (model, plain):
            output = item(batch(0))
            for value in item.parameters():
                value.data.mul_(1.01)
            del output
        for number in range(2):
            assert torch.equal(model(batch(number)), plain(batch(number)))
    assert same([value.detach() for value in model.parameters()], list(plain.state_dict().values()))


def test_who_keeps_a_saved_weight_sees_what_is_written_to_it() -> None:
    kept: list[Tensor] = []

    class Showing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            kept.append(weight)
            return gradient @ weight.t(), x.t() @ gradient

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return Showing.apply(x, self.weight)  # type: ignore[no-untyped-call,no-any-return]

    model = built(lambda: nn.Sequential(Layer(), Layer()))
    with streamed(model):
        model(torch.randn(3, WIDTH)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        weights = list(model.parameters())
        for _ in range(2):
            assert torch.equal(kept[0], weights[1]) and torch.equal(kept[1], weights[0])
            model(torch.randn(3, WIDTH))


def test_hooks_around_get_what_is_no_weight() -> None:
    def saves(model: nn.Module) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Tensor:
            if not (isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)):
                found.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss_of(model, 0).backward()
        return found

    model, plain = built(Stack), built(Stack)
    with streamed(model):
        found = saves(model)
    assert found and found == saves(plain)


def test_a_block_comes_once_in_forward_and_once_in_backward() -> None:
    model = built(partial(Stack, False))
    with streamed(model) as stream:
        trained(model, Loop(steps=1))
        before = stream.window.counters["read_count"]
        trained(model, Loop(steps=3))
        count = sum(not unit.is_read_in_place for unit in stream.units.values())
        # Recompute and gradient share a read. What the embedding and places take, forwards read in the file.
        assert stream.window.counters["read_count"] - before == 3 * 2 * count


def test_memory_is_the_window() -> None:
    model = built(partial(Stack, depth=8))
    with streamed(model) as stream:
        sizes = sorted(unit.nbytes for unit in stream.units.values())
        assert stream.window.most_bytes == sizes[-1] + sizes[-2]
        seen: list[int] = []
        for block in model.get_submodule("blocks").children():
            block.register_forward_hook(lambda *unused: seen.append(stream.window.here_bytes))
        trained(model)
        assert max(seen) == stream.window.most_bytes and stream.window.here_bytes == 0
        homes = [value.data_ptr() for unit in stream.units.values() for value in [unit.weights[0].backing]]
        assert homes == [unit.weights[0].parameter.data_ptr() for unit in stream.units.values()]


def test_what_others_see_between_steps() -> None:
    model, plain = built(Stack), built(Stack)
    with streamed(model):
        trained(model), trained(plain)
        expected = plain.state_dict()
        assert same(list(model.state_dict().values()), list(expected.values()))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        size = len(file.getvalue())
        file.seek(0)
        assert same(list(torch.load(file).values()), list(expected.values()))
        other = io.BytesIO()
        torch.save(expected, other)
        assert size < len(other.getvalue()) + 4096  # no more than its own bytes
        twin = copy.deepcopy(model)
        assert stream_of(twin) is None
        assert same(trained(twin), trained(plain))
        assert same(list(model.state_dict().values())[:1], [expected["embed.weight"]]) is False
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in model.parameters())
        model.to(torch.float64)  # they are in memory then, as anybody's
        assert model(batch(0)).dtype is torch.float64
        loss_of(model, 0).backward()


def test_a_weight_written_before_backward_is_refused() -> None:
    model = built(Stack)
    with streamed(model):
        loss = loss_of(model, 0)
        with torch.no_grad():
            model.get_parameter("blocks.1.up.weight").mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_weight_written_by_others_between_two_uses() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
            return self.layer(self.other(x))  # type: ignore[no-any-return]

    model, plain = built(Twice), built(Twice)
    x = torch.randn(3, WIDTH)
    with streamed(model), torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
    assert same([value.detach() for value in model.parameters()], list(plain.state_dict().values()))


def test_an_output_written_before_backward_is_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).train()
    x = torch.randn(3, WIDTH, requires_grad=True)
    with streamed(model):
        output = model(x)
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception(kind: type[BaseException], where: str) -> None:
    def fail(*unused: Any) -> None:
        raise kind

    models = built(Stack), built(Stack)
    with streamed(models[0]):
        for model in models:
            block = model.get_submodule("blocks.1")
            up = block.get_submodule("up")
            if where == "forward":
                handle = up.register_forward_hook(fail)
            else:
                handle = block.register_full_backward_hook(fail)
            torch.manual_seed(3)
            with pytest.raises(kind):
                loss_of(model, 0).backward()
            handle.remove()
            model.zero_grad()
        assert same(trained(models[0]), trained(models[1]))


def test_graphs_that_go_on() -> None:
    """Several backwards through one graph, and a graph of a backward."""
    models = built(Stack), built(Stack)
    found: list[list[Tensor]] = []
    with streamed(models[0]):
        for model in models:
            model.eval()
            loss = loss_of(model, 0)
            loss.backward(retain_graph=True)
            loss.backward()
            weights = [value for name, value in model.named_parameters() if "blocks.1." in name]
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                loss = loss_of(model, 1)
                first = torch.autograd.grad(loss, weights, create_graph=True)
                torch.stack([value.pow(2).sum() for value in first]).sum().backward()
            found.append([value.grad for value in model.parameters() if value.grad is not None])
            del loss, first
    assert same(*found)


def test_detached_between_forward_and_backward() -> None:
    model, plain = built(Stack), built(Stack)
    torch.manual_seed(2)
    with streamed(model):
        loss = loss_of(model, 0)
    torch.manual_seed(2)
    loss_of(plain, 0).backward()
    loss.backward()
    grads = [[value.grad for value in item.parameters() if value.grad is not None] for item in (model, plain)]
    assert same(*grads)


def test_parts_of_the_model_called_alone() -> None:
    model, plain = built(partial(Stack, False)), built(partial(Stack, False))
    x = torch.randn(2, 5, WIDTH)
    with streamed(model) as stream:
        for item in (model, plain):
            torch.manual_seed(4)
            item.get_submodule("blocks.0")(x).sum().backward()
        assert stream.window.counters["read_count"] <= 2  # in backward only
        theirs = [value.grad for value in plain.parameters() if value.grad is not None]
        assert same([value.grad for value in model.parameters() if value.grad is not None], theirs)


@pytest.mark.parametrize("kind", [PastVersions, Helped, Odd], ids=["method", "function", "hook"])
def test_models_that_write_past_versions_keep_their_weights(kind: type[Odd]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind("saved as it is"))
    if kind is Odd:
        assert units_of(model, 1)[0]
        model[0].register_forward_pre_hook(shrink_all)
    found, left = units_of(model, 1)
    assert not found
    assert "through `.data`" in next(iter(left.values()))


def test_a_storage_that_somebody_keeps() -> None:
    model: Any = built(Stack)
    kept: list[Any] = []

    def look(module: Any, args: Any) -> None:
        if not kept:
            kept.append(module.weight.untyped_storage())

    first = model.head
    first.register_forward_pre_hook(look)
    with streamed(model):
        trained(model, Loop(steps=2))
        there = torch.empty(0).set_(kept[0], first.weight.storage_offset(), first.weight.shape)
        assert torch.equal(there, first.weight)
        del there


def test_data_of_another_form_stay_the_callers() -> None:
    model, plain = built(Stack), built(Stack)
    with streamed(model):
        for item in (model, plain):
            trained(item, Loop(steps=1))
            square = next(value for value in item.parameters() if value.shape == (WIDTH, WIDTH))
            square.data = square.data.t()
        assert same(trained(model), trained(plain))
        square = next(value for value in model.parameters() if value.shape == (WIDTH, WIDTH))
        square.data = square.data.t()


def test_a_module_that_uses_several_blocks_has_them_together() -> None:
    blocks = [(5, ["a"]), (3, ["a", "b"]), (4, ["c"])]
    assert window_bytes(blocks) == 5 + 3 + 4
    assert window_bytes([(5, ["a"]), (3, ["b"]), (4, ["c"])]) == 5 + 4
    assert window_bytes([]) == 0


def test_threads() -> None:
    model, plain = built(Stack).eval(), built(Stack).eval()
    expected = [plain(batch(number)) for number in range(8)]
    found: dict[int, Tensor] = {}

    def run(number: int) -> None:
        found[number] = model(batch(number))
        found[number].sum().backward()

    with streamed(model):
        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert same([found[number] for number in range(8)], expected)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="PyTorch for CUDA runs no backward in a child")
def test_a_forked_process_has_weights_of_its_own() -> None:
    model, plain = built(Stack), built(Stack)
    with streamed(model):
        trained(model, Loop(steps=1)), trained(plain, Loop(steps=1))
        expected = [value.clone() for value in plain.parameters()]
        child = os.fork()
        if child == 0:
            right = False
            try:
                right = same(trained(model), trained(plain))
            finally:  # or an error would let the child go on with the next test
                os._exit(0 if right else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert same([value.detach() for value in model.parameters()], expected)


def test_a_read_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = built(Stack), built(Stack)
    with streamed(model):

        def failing(*unused: Any) -> int:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing)
            with pytest.raises(OSError, match="Input/output"):
                loss_of(model, 0)
        assert same(trained(model), trained(plain))


def test_a_full_disk_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = built(Stack), built(Stack)

    def full(*unused: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"), streamed(model):
        pass
    assert stream_of(model) is None
    assert same(trained(model), trained(plain))


def test_nothing_is_left_of_a_model() -> None:
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    model: Any = built(Stack)
    with streamed(model):
        trained(model, Loop(steps=2))
    units = [weakref.ref(value) for value in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert not any(unit() is not None for unit in units)
    finally:
        gc.enable()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_tiles_find_their_places_beneath() -> None:
    """A plan is made again while weights are streamed, and is to have the same techniques."""

    def places(model: nn.Module) -> list[tuple[str, str]]:
        found = [row_search.find(model), loss_tiles.find(model), attention_tiles.find(model)]
        return [(item.name, item.path) for items in found for item in items]

    for name in ("gpt2", "t5"):
        model = built(MODELS[name])
        bare = places(model)
        with streamed(model):
            assert bare and places(model) == bare
