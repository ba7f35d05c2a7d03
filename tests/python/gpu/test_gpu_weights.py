# SPDX-License-Identifier: Apache-2.0
"""Frozen weights of a card that lie in host memory between uses: every bit, the budget, what a loop sees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_training import clean_device, context_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memscale
from calls import beside
from memscale import AsyncOffloadConfig, Config
from memscale.weights.backing import FileStore, HostStore
from memscale.weights.card import CardBlocks, Rooms
from memscale.weights.stream import Stream, device_of_use, opened, stream_of
from memscale.weights.unit import Unit, Weight
from memscale.weights.units import units_of
from patched import use_only

CARD = torch.device("cuda", 0)
WIDTH, DEPTH, WORDS = 64, 4, 50
NAME = "weight_offload"


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it, which reads the frozen weight, too."""

    def __init__(self, width: int, reads: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.first, self.second = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        made = self.base(x) + self.second(self.first(x))
        return made * self.base.weight.norm(dim=1) if self.reads else made  # type: ignore[no-any-return]


class Block(nn.Module):
    """Adapted layers, a norm, dropout; some of it may run twice."""

    def __init__(self, width: int, again: bool | None = None, reads: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.up, self.down = Adapted(width, reads), Adapted(width)
        self.again = again

    def wide(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1, self.training))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.again is None or not torch.is_grad_enabled():
            return x + self.wide(x)
        return x + checkpoint(self.wide, x, use_reentrant=self.again)  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, again: bool | None = None, reads: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width).requires_grad_(False)
        self.place = nn.Parameter(torch.randn(7, width))
        self.blocks = nn.ModuleList(Block(width, again, reads) for _ in range(DEPTH))
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.head = nn.Linear(width, 3 * width).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def built(build: Callable[[], nn.Module] = Stack) -> nn.Module:
    torch.manual_seed(0)
    return build().to(CARD).train()


def batch(number: int, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, WORDS, (rows, 7), generator=generator).to(CARD)


def trained(
    model: nn.Module, steps: int = 3, between: Callable[[nn.Module], Any] = nn.Module.train
) -> list[Tensor]:
    """Losses, gradients, what is done between steps, weights at the end; all on the host."""
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-2)
    torch.manual_seed(7)
    found = []
    for step in range(steps):
        for part in range(2):
            loss = model(batch(10 * step + part)).square().mean()
            loss.backward()
            found.append(loss.detach().cpu())
        found += [value.grad.cpu() for value in model.parameters() if value.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        between(model)
    return found + [value.detach().cpu() for value in [*model.parameters(), *model.buffers()]]


def weights(run: list[Tensor], model: nn.Module) -> list[Tensor]:
    """Those at the end of a run."""
    return run[-len(list(model.parameters())) - len(list(model.buffers())) :]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


LARGE = 1 << 30
TIERS = {"pinned": (LARGE, 0, 0), "pageable": (0, LARGE, 0), "file": (0, 0, LARGE)}


@contextmanager
def streamed(
    model: nn.Module, folder: Path | str = "", tier: str = "pinned", window: int | None = None
) -> Iterator[Stream]:
    """Streams all frozen weights inside the block, and sees that nothing is left of it."""
    units, _ = units_of(model, 1, card=CARD)
    stream = opened(model, CardBlocks(CARD, Rooms(*TIERS[tier], str(folder))))
    for unit in units:
        stream.add(unit)
    if window is not None:
        stream.window.most_bytes = window
    yield stream
    for path in list(stream.units):
        stream.remove(path)
    assert stream_of(model) is None
    assert all(value.device == CARD for value in model.parameters())
    assert not [path for path, module in model.named_modules() if "forward" in vars(module)]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "adapted": Stack,
    "torch's checkpoints": lambda: Stack(False),
    "torch's reentrant checkpoints": lambda: Stack(True),
    "weights read beside their modules": lambda: Stack(None, reads=True),
    "the same, run again": lambda: Stack(False, reads=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_bit(name: str) -> None:
    expected = trained(built(MODELS[name]))
    model = built(MODELS[name])
    with streamed(model) as stream:
        assert set(stream.units) == {*(f"blocks.{i}" for i in range(DEPTH)), "head"}
        assert all(isinstance(unit.backing, HostStore) for unit in stream.units.values())
        assert same(trained(model), expected)
        assert stream.window.counters["read_count"] > 3 * 2 * 2 * DEPTH
        assert not stream.window.counters["over_window"]
    assert same(
        [value.detach().cpu() for value in [*model.parameters(), *model.buffers()]], weights(expected, model)
    )


def test_every_bit_under_autocast() -> None:
    def run(model: nn.Module) -> list[Tensor]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return trained(model)

    model = built()
    with streamed(model):
        assert same(run(model), run(built()))


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier(tier: str, tmp_path: Path) -> None:
    expected, model = trained(built()), built()
    with streamed(model, tmp_path, tier) as stream:
        assert all(isinstance(unit.backing, FileStore) == (tier == "file") for unit in stream.units.values())
        assert same(trained(model), expected)


@pytest.mark.parametrize("window", [0, 1 << 14, 1 << 30], ids=["none", "less than one", "all"])
def test_every_bit_whatever_the_window(window: int) -> None:
    expected, model = trained(built()), built()
    with streamed(model, window=window) as stream:
        assert same(trained(model), expected)
        assert bool(stream.window.counters["over_window"]) == (window < 1 << 30)


def written(model: nn.Module) -> None:
    """What a loop may do to weights between steps, by every way; frozen ones, too."""
    with torch.no_grad():
        for number, value in enumerate(model.parameters()):
            if number % 4 == 0:
                value.mul_(0.999)
            elif number % 4 == 1:
                value.data.mul_(1.001)
            elif number % 4 == 2:
                value.data = value.data * 0.99
            else:
                value.copy_(torch.full(value.shape, 0.01, device=CARD))


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() * 0.99 for name, value in model.state_dict().items()})


def evaluated(model: nn.Module) -> None:
    model.eval()
    with torch.inference_mode():
        model(batch(99))
    with torch.no_grad():
        model.blocks[1](model.embed(batch(98)) * 1.0)  # type: ignore[index,operator]
    model.train()


def moved(model: nn.Module) -> None:
    model.to(CARD)


@pytest.mark.parametrize("between", [written, loaded, evaluated, moved], ids=lambda item: item.__name__)
def test_what_loops_do_between_steps(between: Callable[[nn.Module], None]) -> None:
    expected, model = trained(built(), between=between), built()
    with streamed(model):
        assert same(trained(model, between=between), expected)


def test_at_home_weights_are_the_hosts() -> None:
    model, plain = built(), built()
    with streamed(model) as stream:
        trained(model), trained(plain)
        base: Any = model.blocks[2].up.base.weight  # type: ignore[index]
        assert base.device.type == "cpu" and device_of_use(base) == CARD and not base.requires_grad
        assert not stream.window.used_bytes
        state = model.state_dict()
        assert all(torch.equal(value.cpu(), state[name].cpu()) for name, value in plain.state_dict().items())
        twin = copy.deepcopy(model)
        assert all(map(torch.equal, map(Tensor.cpu, twin.parameters()), map(Tensor.cpu, plain.parameters())))
        assert all(value.device == CARD for value in twin.parameters())
        assert torch.equal(twin(batch(5)).cpu(), twin(batch(5)).cpu()) or twin.training
        with pytest.raises(RuntimeError, match="same device"):
            F.linear(torch.ones(2, WIDTH, device=CARD), base)


def test_a_part_of_the_model_called_alone() -> None:
    model, plain = built().eval(), built().eval()
    x = torch.linspace(-1, 1, 7 * WIDTH).view(7, WIDTH).to(CARD)
    with streamed(model):
        for part in ("blocks.1", "blocks.3.up", "head"):
            one, other = (item.get_submodule(part)(x) for item in (model, plain))
            assert torch.equal(one.detach().cpu(), other.detach().cpu())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception(where: str) -> None:
    model, plain = built(), built()
    with streamed(model):
        block: Any = model.blocks[2]  # type: ignore[index]

        def fail(*unused: Any) -> None:
            raise KeyError(where)

        def hook(module: Any, args: Any, output: Tensor) -> None:
            output.register_hook(fail)

        handle = (
            block.norm.register_forward_pre_hook(fail)
            if where == "forward"
            else block.register_forward_hook(hook)
        )
        with pytest.raises(KeyError, match=where):
            model(batch(0)).square().mean().backward()
        handle.remove()
        for value in model.parameters():
            value.grad = None
        assert same(trained(model), trained(plain))


def test_a_weight_written_before_backward_is_refused() -> None:
    model = built()
    with streamed(model):
        loss = model(batch(0)).square().mean()
        with torch.no_grad():
            model.blocks[1].up.base.weight.mul_(0.5)  # type: ignore[index,union-attr]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_weight_written_right_after_its_use_is_not_in_that_use() -> None:
    """The copy of a block is over before its weights are back in their store."""

    class Writing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x) * self.scale + self.place
            for block in self.blocks:
                x = block(x)
                with torch.no_grad():
                    block.up.base.weight.fill_(3.0)  # type: ignore[union-attr,operator]
            return x

    model, plain = built(Writing), built(Writing)
    with streamed(model), torch.no_grad():
        for number in range(3):
            torch.manual_seed(number)
            one = model(batch(number))
            torch.manual_seed(number)
            assert torch.equal(one.cpu(), plain(batch(number)).cpu())


def test_no_copy_is_under_way_when_a_weight_is_at_home() -> None:
    """On a card that is late what is written there would be in it."""
    seen: list[bool] = []

    def watched(self: Unit, weight: Weight) -> None:
        assert isinstance(self.blocks, CardBlocks) and self.pending is None
        seen.append(self not in self.blocks._ready)

    model = built()
    with beside({Unit._go: watched}), streamed(model):
        trained(model)
    assert len(seen) > 100 and all(seen)


def test_a_view_that_somebody_keeps() -> None:
    model, plain = built(), built()
    with streamed(model) as stream:
        kept = []
        block: Any = model.blocks[1]  # type: ignore[index]
        handle = block.up.base.register_forward_hook(lambda module, args, out: kept.append(module.weight.t()))
        model(batch(0))
        handle.remove()
        before = kept[0].clone().cpu()
        assert same(trained(model), trained(plain))
        assert torch.equal(kept[0].cpu(), before) and stream.units["blocks.1"].stays
        kept.clear()


def test_a_weight_that_is_trained_from_now_on_stays() -> None:
    model, plain = built(), built()
    with streamed(model):
        for item in (model, plain):
            trained(item, steps=1)
            item.blocks[0].up.base.weight.requires_grad_()  # type: ignore[index,union-attr]
        assert same(trained(model), trained(plain))
        assert model.blocks[0].up.base.weight.device == CARD  # type: ignore[index,union-attr]


def test_side_streams() -> None:
    expected, model = trained(built()), built()
    with streamed(model), torch.cuda.stream(torch.cuda.Stream(CARD)):
        assert same(trained(model), expected)
    torch.cuda.synchronize()


def test_what_stays() -> None:
    model: Any = built()
    model.blocks[1].down.base.weight = model.blocks[0].down.base.weight
    units, left = units_of(model, 1, card=CARD)
    assert "trained" in left["blocks.0.up.first.weight"] and "embedding" in left["embed.weight"]
    assert "share" in left["blocks.0.down.base.weight"]
    assert all(not value.requires_grad for unit in units for value in unit.parameters)


def test_rooms() -> None:
    rooms = Rooms(8192, 4096, 0, "")
    assert [rooms.reserve(4096) for _ in range(4)] == [0, 0, 1, None]
    with pytest.raises(OSError, match="no room for 4096 bytes of weights"):
        rooms.make(4096)
    rooms.give(1, 4096)
    backing, tier = rooms.make(4096)
    assert tier == 1 and isinstance(backing, HostStore) and not backing.is_locked
    model = built()
    before = [value.detach().cpu() for value in model.parameters()]
    stream = opened(model, CardBlocks(CARD, Rooms(0, 0, 0, "")))
    unit = units_of(model, 1, card=CARD)[0][0]
    with pytest.raises(OSError, match="max_cpu_offload_gb"):
        stream.add(unit)
    assert stream_of(model) is None and same(before, [value.detach().cpu() for value in model.parameters()])


# ---- by a plan ---------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other techniques could meet the budgets, too."""
    use_only(monkeypatch, NAME)


def large() -> nn.Module:
    return Stack(width=1536)


def config(budget: int, **more: Any) -> Config:
    return Config(
        memory_budget=budget,
        enable_logging=False,
        enable_checkpointing=False,
        async_config=AsyncOffloadConfig(),
        **more,
    )


def planned(model: nn.Module, optimizer: Any, settings: Config) -> Any:
    memscale.wrap(model, settings, sample_input=batch(0), optimizer=optimizer)
    return memscale.executor_of(model)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 3) -> list[Tensor]:
    torch.manual_seed(3)
    found = []
    for step in range(3):
        loss = model(batch(step, rows)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-2)


def peak_of_plain() -> int:
    clean_device()
    model = built(large)
    run(model, adamw(model))
    peak = torch.cuda.max_memory_reserved()
    del model
    clean_device()
    return peak


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("share", [30, 85])
def test_the_budget_holds(share: int) -> None:
    peak = peak_of_plain()
    plain = built(large)
    expected = run(plain, adamw(plain))
    before = [value.detach().cpu() for value in plain.parameters()]
    del plain
    clean_device()
    model = built(large)
    optimizer = adamw(model)
    sizes = sorted((unit.nbytes() for unit in units_of(model, 1 << 20, card=CARD)[0]), reverse=True)
    budget = context_bytes() + peak - sum(sizes[2:]) * share // 100  # all but two may go
    executor = planned(model, optimizer, config(budget))
    clean_device()
    found = run(model, optimizer)
    measured = torch.cuda.max_memory_reserved()
    plan = executor.plan
    assert plan.fits and [choice.technique for choice in plan.steps] == [NAME]
    assert "weights that are trained stay" in plan.steps[0].reason
    assert 0.95 * plan.predicted.reserved_peak_bytes <= measured <= plan.predicted.reserved_peak_bytes
    assert 2 < len(stream_of(model).units) == {30: 3, 85: len(sizes)}[share]  # type: ignore[union-attr]
    memscale.detach(model)
    assert stream_of(model) is None and all(value.device == CARD for value in model.parameters())
    assert same(found, expected)
    assert same([value.detach().cpu() for value in model.parameters()], before)


def test_with_checkpoints_and_all_else() -> None:
    """Nothing but all of it together fits."""
    peak = peak_of_plain()
    plain, model = built(large), built(large)
    expected = run(plain, adamw(plain))
    optimizer = adamw(model)
    settings = Config(
        memory_budget=context_bytes() + peak * 68 // 100,
        enable_logging=False,
        use_mixed_precision=False,
        enable_tiling=False,
        async_config=AsyncOffloadConfig(),
    )
    executor = planned(model, optimizer, settings)
    assert NAME in {choice.technique for choice in executor.plan.steps}
    assert same(run(model, optimizer), expected)
    assert memscale.verify(model, batch(1)).equal
    assert same(
        [value.detach().cpu() for value in model.parameters()],
        [value.detach().cpu() for value in plain.parameters()],
    )


@pytest.mark.usefixtures("alone")
def test_replanned_while_weights_are_offloaded() -> None:
    """For a larger batch; for a weight that is trained from now on; and predicted."""
    peak = peak_of_plain()
    plain, model = built(large), built(large)
    optimizer, other = adamw(model), adamw(plain)
    settings = config(context_bytes() + peak * 80 // 100)
    executor = planned(model, optimizer, settings)
    assert stream_of(model) is not None and model.blocks[3].up.base.weight.device != CARD  # type: ignore[index,union-attr]
    assert same(run(model, optimizer), run(plain, other))
    assert same(run(model, optimizer, rows=5), run(plain, other, rows=5))
    assert executor.failures == 0 and len(executor.plans) > 1
    predicted = memscale.predict(model, optimizer, settings, batch(0))
    assert predicted.reserved_peak_bytes <= peak * 80 // 100
    for item, of in ((model, optimizer), (plain, other)):
        value = item.blocks[3].up.base.weight.requires_grad_()  # type: ignore[index,union-attr]
        of.add_param_group({"params": [value]})
    assert same(run(model, optimizer), run(plain, other))
    assert executor.failures == 0
    memscale.detach(model)
    assert same(
        [value.detach().cpu() for value in model.parameters()],
        [value.detach().cpu() for value in plain.parameters()],
    )


@pytest.mark.usefixtures("alone")
def test_why_not() -> None:
    settings = config(context_bytes() + (8 << 20), max_cpu_offload_gb=0.16)

    def plan(model: nn.Module) -> Any:
        return memscale.plan(model, config=settings, sample_input=batch(0))

    (choice,) = plan(built(large)).steps  # half of host memory may be the weights'
    assert f"{DEPTH} of {DEPTH} blocks" in choice.reason
    notes = "\n".join(plan(built(large).requires_grad_(True)).notes)
    assert "it is trained, and the step of what is trained runs on the card" in notes
