# SPDX-License-Identifier: Apache-2.0
"""Trained weights of a card that lie in host memory between uses: the bits of a step with them there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offloaded_runs import PIECE, card, equal, opened, technique
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from memscale.optim import cards, take_over
from memscale.optim.offload.attach import send, take_back
from memscale.optim.offload.weights import why_not_in_pieces
from memscale.optim.release.gradient import ReleasedGradient
from memscale.weights import stream as streams
from memscale.weights.card import CardBlocks, Rooms
from memscale.weights.placement import device_of_use
from memscale.weights.stream import Stream, stream_of
from memscale.weights.units import units_of

optim = torch.optim
CARD = torch.device("cuda", 0)
WIDTH, DEPTH, WORDS = 160, 4, 40
LARGE = 1 << 28
TIERS = {"pinned": (LARGE, 0, 0), "pageable": (0, LARGE, 0), "file": (0, 0, LARGE)}


class Block(nn.Module):
    """A frozen and two trained matrices, small weights, dropout; some of it may run twice."""

    def __init__(self, again: bool | None) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last, self.again = nn.Linear(WIDTH, WIDTH, bias=False), again

    def wide(self, x: Tensor) -> Tensor:
        made = F.gelu(self.first(self.norm(x))) + self.frozen(x)
        return self.last(F.dropout(made, 0.1, self.training))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.again is None or not torch.is_grad_enabled():
            return x + self.wide(x)
        return x + checkpoint(self.wide, x, use_reentrant=self.again)  # type: ignore[no-any-return]


class Stack(nn.Module):
    """`passes` times through all blocks: a weight that is used again has one gradient all the same."""

    def __init__(self, again: bool | None = None, passes: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(again) for _ in range(DEPTH))
        self.head, self.passes = nn.Linear(WIDTH, 2 * WIDTH), passes

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(self.passes):
            for block in self.blocks:
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def built(build: Callable[[], nn.Module] = Stack) -> nn.Module:
    torch.manual_seed(0)
    return build().to(CARD).train()


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, WORDS, (3, 7), generator=generator).to(CARD)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [value for value in model.parameters() if value.requires_grad]


Make = Callable[[Any], optim.Optimizer]
ADAMW: Make = partial(optim.AdamW, lr=1e-2)


@dataclass(frozen=True)
class Loop:
    """How a model is trained.

    Attributes:
        make: the optimizer.
        accumulate: backwards per step.
        together: their losses have one backward.
        norm: clipped to this.
        to_none: as `zero_grad` takes it.
        scaled: with a gradient scaler.
        autocast: to BF16.
        warm: with a scheduler.
    """

    make: Make = ADAMW
    accumulate: int = 1
    together: bool = False
    norm: float = 0.0
    to_none: bool = True
    scaled: bool = False
    autocast: bool = False
    warm: bool = False


class Training:
    """A model and its optimizer in a loop that can be stopped anywhere."""

    def __init__(self, model: nn.Module, loop: Loop) -> None:
        self.model, self.loop = model, loop
        self.optimizer = loop.make(trained(model))
        self.scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
        self.schedule = optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=6) if loop.warm else None

    def loss(self, number: int) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.loop.autocast):
            return self.model(batch(number)).float().square().mean()  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.loop.scaled else loss).backward()

    def step(self, number: int) -> list[Tensor]:
        """One step: losses, gradients as the loop reads them, and the norm."""
        torch.manual_seed(number)
        loop, numbers = self.loop, [10 * number + part for part in range(self.loop.accumulate)]
        if loop.together:
            losses = [self.loss(part) for part in numbers]
            self.backward(torch.stack(losses).sum())
        else:
            losses = []
            for part in numbers:
                losses.append(self.loss(part))
                self.backward(losses[-1])
        found = [loss.detach().cpu() for loss in losses]
        if loop.scaled:
            self.scaler.unscale_(self.optimizer)
        if loop.norm:
            found.append(clip_grad_norm_(self.model.parameters(), loop.norm).cpu())
        found += [value.grad.detach().cpu() for value in trained(self.model) if value.grad is not None]
        if loop.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=loop.to_none)
        return found

    def end(self) -> list[Any]:
        """Weights and state."""
        weights = [value.detach().cpu() for value in (*self.model.parameters(), *self.model.buffers())]
        return [*weights, self.optimizer.state_dict()["state"]]


def run(training: Training, steps: int = 10, first: int = 0) -> list[Any]:
    return [training.step(number) for number in range(first, first + steps)] + training.end()


@contextmanager
def offloaded(
    training: Training,
    tier: str = "pinned",
    folder: Path | str = "",
    window: int | None = None,
    count: int = 2 * DEPTH + 1,
    on_host: bool = False,
) -> Iterator[Stream]:
    """Optimizer state and all weights that can be are offloaded inside the block; nothing is left behind."""
    model, optimizer = training.model, training.optimizer
    assert send(optimizer, opened(), PIECE, on_host=on_host) == ""
    units, _ = units_of(model, 1, card=CARD, trained=why_not_in_pieces(optimizer))
    stream = streams.opened(model, CardBlocks(CARD, Rooms(*TIERS[tier], str(folder))))
    for unit in units:
        stream.add(unit)
    if window is not None:
        stream.window.most_bytes = window
    gone = [value for value in trained(model) if value.device.type == "cpu"]
    assert len(gone) == count and all(device_of_use(value) == CARD for value in gone)
    yield stream
    for path in list(stream.units):
        stream.remove(path)
    take_back(optimizer)
    assert stream_of(model) is None and not [
        name for name, of in model.named_modules() if "forward" in vars(of)
    ]
    assert all(value.device == CARD and not value._post_accumulate_grad_hooks for value in model.parameters())


LOOPS = {
    "adamw": Loop(),
    "single": Loop(partial(ADAMW, foreach=False)),
    "fused": Loop(partial(ADAMW, fused=True)),
    "amsgrad": Loop(partial(optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1)),
    "momentum": Loop(partial(optim.SGD, lr=1e-1, momentum=0.9, nesterov=True)),
    "clipped": Loop(norm=0.05),
    "accumulated": Loop(accumulate=3),
    "accumulated into zeros": Loop(accumulate=2, to_none=False),
    "together": Loop(accumulate=3, together=True),
    "together into zeros": Loop(accumulate=3, together=True, to_none=False),
    "scaled": Loop(scaled=True, autocast=True, norm=0.05),
    "scaled, fused": Loop(partial(ADAMW, fused=True), scaled=True),
    "scheduled": Loop(warm=True),
}


@pytest.mark.parametrize("name", LOOPS)
def test_ten_steps(name: str) -> None:
    plain, training = (Training(built(), LOOPS[name]) for _ in range(2))
    expected = run(plain)
    with offloaded(training):
        assert equal(run(training), expected)


@pytest.mark.parametrize("name", ["adamw", "accumulated", "together into zeros", "scaled"])
@pytest.mark.parametrize("window", [0, 1 << 14], ids=["no window", "window"])
def test_with_released_gradients(name: str, window: int) -> None:
    plain, training = (Training(built(), LOOPS[name]) for _ in range(2))
    expected = run(plain)
    release = technique(training.model, window)
    with offloaded(training):
        release.attach()
        found = run(training)
        training.backward(training.loss(0))
        gone = [value for value in trained(training.model) if isinstance(value.grad, ReleasedGradient)]
        assert any(value.device.type == "cpu" and value.grad.is_cuda for value in gone)
        release.undo()
        assert not any(isinstance(value.grad, ReleasedGradient) for value in trained(training.model))
    assert equal(found, expected)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("name", ["adamw", "clipped", "accumulated", "together", "scaled"])
def test_the_host_steps_weights_at_home(name: str, released: bool) -> None:
    if reason := cards.why_not(CARD):
        pytest.skip(reason)
    plain, training = (Training(built(), LOOPS[name]) for _ in range(2))
    for each in (plain, training):
        take_over(each.optimizer)
    expected = run(plain)
    release = technique(training.model, 0)
    with offloaded(training, on_host=True):
        if released:
            release.attach()
        found = run(training)
        if released:
            release.undo()
    assert equal(found, expected)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "checkpoints": partial(Stack, False),
    "reentrant checkpoints": partial(Stack, True),
    "used twice": partial(Stack, None, 2),
    "used twice, checkpoints": partial(Stack, False, 2),
}


@pytest.mark.parametrize("name", ["adamw", "accumulated"])
@pytest.mark.parametrize("model", MODELS)
def test_weights_that_are_used_several_times(model: str, name: str) -> None:
    plain, training = (Training(built(MODELS[model]), LOOPS[name]) for _ in range(2))
    expected = run(plain, 4)
    with offloaded(training):
        assert equal(run(training, 4), expected)


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier(tier: str, tmp_path: Path) -> None:
    plain, training = (Training(built(), LOOPS["accumulated"]) for _ in range(2))
    expected = run(plain, 4)
    with offloaded(training, tier, tmp_path, window=0 if tier == "file" else None):
        assert equal(run(training, 4), expected)


class Shared(nn.Module):
    """Two weights with one gradient, which PyTorch has to copy for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.one + self.other)


def shared() -> nn.Module:
    model: Any = Stack()
    for block in model.blocks:
        block.last = Shared()
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["adamw", "accumulated"])
def test_gradients_that_pytorch_copies_lie_on_the_card(name: str) -> None:
    plain, training = (Training(built(shared), LOOPS[name]) for _ in range(2))
    expected = run(plain, 4)
    with offloaded(training, count=3 * DEPTH + 1):
        assert equal(run(training, 4), expected)
        training.backward(training.loss(0))
        assert all(value.grad.is_cuda for value in trained(training.model) if value.grad is not None)


def test_a_gradient_of_a_gradient() -> None:
    def penalised(training: Training) -> list[Tensor]:
        found = []
        for number in range(3):
            x = torch.full((2, WIDTH), 0.1 * number + 0.1, device=CARD, requires_grad=True)
            made = training.model.blocks[1](x).square().sum()  # type: ignore[index,operator]
            (slope,) = torch.autograd.grad(made, x, create_graph=True)
            (made + slope.square().sum()).backward()
            training.optimizer.step()
            found += [value.grad.cpu() for value in trained(training.model) if value.grad is not None]
        return found + [value.detach().cpu() for value in training.model.parameters()]

    plain, training = (Training(built().eval(), Loop()) for _ in range(2))
    expected = penalised(plain)
    with offloaded(training):
        assert equal(penalised(training), expected)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception(where: str, passes: int) -> None:
    """Between two backwards of a step. What had been added before is there still."""
    plain, training = (Training(built(partial(Stack, None, passes)), LOOPS["adamw"]) for _ in range(2))
    with offloaded(training):
        for each in (plain, training):
            run(each, 2)
            each.backward(each.loss(5))
            block: Any = each.model.blocks[1]  # type: ignore[index]

            def fail(*unused: Any) -> None:
                raise KeyError(where)

            def later(module: nn.Module, args: Any, output: Tensor) -> None:
                output.register_hook(fail)

            put = block.norm.register_forward_pre_hook if where == "forward" else block.register_forward_hook
            handle = put(fail if where == "forward" else later)
            with pytest.raises(KeyError, match=where):
                each.backward(each.loss(0))
            handle.remove()
        assert equal(run(training, 3, 2), run(plain, 3, 2))  # on top of what had been added


def test_detached_between_backward_and_step() -> None:
    plain, training = (Training(built(), LOOPS["clipped"]) for _ in range(2))
    expected, found = run(plain, 4), []
    torch.manual_seed(0)
    with offloaded(training):
        found = [training.step(number) for number in range(2)]
        torch.manual_seed(2)
        loss = training.loss(20)
        training.backward(loss)
    clip_grad_norm_(training.model.parameters(), 0.05)
    training.optimizer.step()
    training.optimizer.zero_grad()
    assert all(value.device == CARD for value in training.model.parameters())
    found = [*expected[:3], training.step(3), *training.end()]
    assert equal(found, expected)


def test_detached_between_forward_and_backward() -> None:
    plain, training = (Training(built(), Loop()) for _ in range(2))
    for each in (plain, training):
        torch.manual_seed(1)
        if each is training:
            with offloaded(training):
                loss = each.loss(1)
        else:
            loss = each.loss(1)
        each.backward(loss)
        each.optimizer.step()
    assert equal(plain.end(), training.end())


def test_saved_in_the_middle_and_resumed() -> None:
    """What is saved while weights are offloaded goes on in a plain run, and in one with offloaded weights."""
    plain, training = (Training(built(), LOOPS["adamw"]) for _ in range(2))
    expected = run(plain, 6)
    with offloaded(training):
        run(training, 3)
        saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
        twin = copy.deepcopy(training.model)
        assert all(value.device == CARD for value in twin.parameters())
        assert equal([value.detach() for value in twin.parameters()], [*saved[0].values()])
    for is_offloaded in (False, True):
        other = Training(built(), LOOPS["adamw"])
        run(other, 1)
        if is_offloaded:
            with offloaded(other):
                other.model.load_state_dict(saved[0])
                other.optimizer.load_state_dict(copy.deepcopy(saved[1]))
                found = run(other, 3, 3)
        else:
            other.model.load_state_dict(saved[0])
            other.optimizer.load_state_dict(copy.deepcopy(saved[1]))
            found = run(other, 3, 3)
        assert equal(found, expected[3:])


@pytest.mark.parametrize("how", ["fused", "default"])
def test_a_state_of_the_card_is_loaded(how: str) -> None:
    """PyTorch would bring it to where the weights are now."""
    make = partial(ADAMW, fused=how == "fused")
    plain, training = (Training(built(), Loop(make)) for _ in range(2))
    run(plain, 2)
    saved = copy.deepcopy(plain.optimizer.state_dict())
    assert any(value.is_cuda for value in saved["state"][2].values())
    with offloaded(training):
        training.model.load_state_dict(plain.model.state_dict())
        training.optimizer.load_state_dict(copy.deepcopy(saved))
        plain.optimizer.load_state_dict(saved)
        assert equal(run(training, 3, 2), run(plain, 3, 2))


def written(model: nn.Module) -> None:
    """What a loop may do to weights between steps, by every way."""
    with torch.no_grad():
        for number, value in enumerate(model.parameters()):
            if number % 3 == 0:
                value.mul_(0.999)
            elif number % 3 == 1:
                value.data.mul_(1.001)
            else:
                value.copy_(value.clone() * 0.99)


def test_weights_written_between_steps() -> None:
    both = [Training(built(), Loop()) for _ in range(2)]
    with offloaded(both[1]):
        for _ in range(3):
            for each in both:
                run(each, 1)
                written(each.model)
        assert equal(both[0].end(), both[1].end())


def test_norms_are_those_of_the_stepped_weights() -> None:
    """The host has waited: what it reads right behind a step is what the step wrote."""
    plain, training = (Training(built(), Loop()) for _ in range(2))
    with offloaded(training):
        for number in range(3):
            plain.step(number), training.step(number)
            resident_state = [value.detach().clone() for value in trained(training.model)]
            assert equal(resident_state, [value.detach() for value in trained(plain.model)])


def turned(training: Training, number: int) -> None:
    """A step with one gradient in another order, so PyTorch takes another kernel for all of the group."""
    torch.manual_seed(number)
    training.backward(training.loss(number))
    value: Any = training.model.embed.weight
    value.grad = value.grad.t().contiguous().t()
    training.optimizer.step()
    training.optimizer.zero_grad()


@pytest.mark.parametrize("how", ["lists", "capturable", "plain momentum", "another optimizer"])
def test_steps_of_whole_weights(how: str) -> None:
    """What is not stepped in pieces is on the card for its step, and offloaded again behind it."""
    makes: dict[str, Make] = {
        "lists": ADAMW,
        "capturable": ADAMW,
        "plain momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
        "another optimizer": ADAMW,
    }
    plain, training = (Training(built(), Loop(makes[how])) for _ in range(2))
    with offloaded(training):
        for each in (plain, training):
            run(each, 1)
            if how == "capturable":
                each.optimizer.param_groups[0]["capturable"] = True
                for entry in each.optimizer.state.values():
                    entry["step"] = entry["step"].cuda()
            if how == "plain momentum":
                each.optimizer.param_groups[0]["momentum"] = 0
            if how == "another optimizer":
                each.optimizer.zero_grad()
                other = optim.RMSprop(trained(each.model), lr=1e-3)
                each.backward(each.loss(3))
                other.step()
                each.optimizer.zero_grad()
            for number in range(2):
                if how == "lists":
                    turned(each, number)
                else:
                    each.step(number)
        assert sum(value.device.type == "cpu" for value in trained(training.model)) == 2 * DEPTH + 1
        assert equal(
            [value.detach() for value in plain.model.parameters()],
            [value.detach() for value in training.model.parameters()],
        )


def test_a_gradient_that_is_asked_for_is_refused() -> None:
    """PyTorch looks for the node that the weight has forgotten, and says so."""
    training = Training(built(), Loop())
    with offloaded(training):
        weight: Any = training.model.head.weight
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(training.loss(0), weight)


def test_hooks_on_a_gradient_keep_a_weight_on_the_card() -> None:
    plain, training = (Training(built(partial(Stack, None, 2)), LOOPS["accumulated"]) for _ in range(2))
    counts: list[list[int]] = [[], []]
    with offloaded(training):
        for each, seen in zip((plain, training), counts, strict=True):
            run(each, 1)
            weight: Any = each.model.blocks[1].first.weight  # type: ignore[index,union-attr]
            weight.register_hook(lambda gradient, seen=seen: seen.append(gradient.numel()))
        assert equal(run(training, 2, 1), run(plain, 2, 1))
        assert weight.device == CARD and counts[0] == counts[1]
        reasons = units_of(training.model, 1, card=CARD, trained=why_not_in_pieces(training.optimizer))[1]
        assert "hooks on its gradient" in reasons["blocks.1.first.weight"]
        assert "less than 65536 bytes" in reasons["blocks.1.norm.weight"]


def test_what_stays() -> None:
    model: Any = built()
    for make, why in (
        (partial(optim.SGD, lr=0.1), "not computed in pieces"),
        (partial(ADAMW, capturable=True), "steps it as a whole"),
        (partial(optim.Adagrad, lr=0.1), "steps it as a whole"),
    ):
        optimizer = make([model.head.weight])
        units, left = units_of(model, 1, card=CARD, trained=why_not_in_pieces(optimizer))
        assert why in left["head.weight"] and "runs on the card" in left["blocks.0.first.weight"]
        assert not any(value.requires_grad for unit in units for value in unit.parameters)


@pytest.mark.parametrize("moments", ["code8", "fp32"])
def test_our_own_state(moments: str) -> None:
    if reason := cards.why_not(card()):
        pytest.skip(reason)
    plain, training = (Training(built(), LOOPS["clipped"]) for _ in range(2))
    for each in (plain, training):
        assert take_over(each.optimizer, moments) == ""
    expected = run(plain)
    with offloaded(training):
        found = run(training, 5)[:5]
        saved = copy.deepcopy(training.optimizer.state_dict())
        training.optimizer.load_state_dict(saved)
        assert equal([*found, *run(training, 5, 5)], expected)


def test_state_comes_back_while_weights_stay_offloaded() -> None:
    """As where `detach` finds no room on the card: their optimizer's own steps have them for their time."""
    plain, training = (Training(built(), LOOPS["scaled, fused"]) for _ in range(2))
    expected = run(plain, 6)
    with offloaded(training):
        found = [training.step(number) for number in range(3)]
        take_back(training.optimizer)
        assert type(training.optimizer) is optim.AdamW
        found += [training.step(number) for number in range(3, 6)]
        assert sum(value.device.type == "cpu" for value in trained(training.model)) == 2 * DEPTH + 1
        assert equal([*found, *training.end()], expected)


def test_a_graph_that_is_used_twice() -> None:
    """Two forwards, two backwards through both: each time a weight has two contributions."""
    plain, training = (Training(built(), Loop()) for _ in range(2))
    with offloaded(training):
        for number in range(3):
            for each in (plain, training):
                torch.manual_seed(number)
                loss = each.loss(2 * number) + each.loss(2 * number + 1)
                loss.backward(retain_graph=True)
                (3 * loss).backward()
                each.optimizer.step()
                del loss
                if number:
                    each.optimizer.zero_grad()
        assert equal(training.end(), plain.end())
