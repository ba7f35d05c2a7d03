# SPDX-License-Identifier: Apache-2.0
"""Steps by the host's cores, and what comes between: saves, failures, moves that break off."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offloaded_runs import PIECE, card, equal, opened, parameters, step
from torch import Tensor, nn

from calls import beside, failing
from memscale.optim import cards, steps, take_over
from memscale.optim.backward_step import BackwardStep
from memscale.optim.offload import step as offloaded_step
from memscale.optim.offload.attach import keep_resident, send
from memscale.optim.offload.store import Run

WIDTH = 256
SECONDS = 20.0
"""Until what waits for ever is given up."""


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if reason := cards.why_not(card()):
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("on_host", "then"),
    [(True, {"resident": True}), (True, {"on_host": False}), (False, {"on_host": True})],
    ids=["comes", "leaves-the-host", "goes-to-the-host"],
)
def test_a_move_that_breaks_off_goes_on_in_a_step(on_host: bool, then: dict[str, bool]) -> None:
    both = parameters(), parameters()
    optimizers = [torch.optim.AdamW(values, lr=1e-2) for values in both]
    for optimizer in optimizers:
        take_over(optimizer, "code8")
    assert send(optimizers[1], opened(), PIECE, on_host=on_host) == ""
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 2)
    fails = beside({Run.do: failing(torch.OutOfMemoryError("no room"), at=4)})
    with fails, pytest.raises(torch.OutOfMemoryError, match="no room"):
        keep_resident(optimizers[1], both[1] if "resident" in then else [], then.get("on_host"))
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())
    for values, optimizer in zip(both, optimizers, strict=True):
        step(values, optimizer, 2, seed=4)
    assert equal(both[0], both[1])
    assert equal(optimizers[0].state_dict(), optimizers[1].state_dict())


# ---- beside backward ---------------------------------------------------------------------------------


class Failing(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(*_: Any) -> Any:
        raise ValueError("broken off")


class Net(nn.Module):
    def __init__(self, bias: bool, fails: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fails = fails
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.layers
        x = first(x)
        x = Failing.apply(x) if self.fails else x
        for layer in rest:
            x = layer(x)
        return x.square().sum()


class Slow:
    """The host's core, whose steps wait for a gate."""

    def __init__(self, core: Any, gate: threading.Event) -> None:
        self._core, self._gate = core, gate

    def step(self, *given: Any) -> None:
        assert self._gate.wait(SECONDS), "nobody opens the gate: backward waits for this step"
        self._core.step(*given)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Steps on the host wait for it."""
    made, real = threading.Event(), offloaded_step.core_on
    monkeypatch.setattr(
        offloaded_step,
        "core_on",
        lambda device: Slow(real(device), made) if device.type == "cpu" else real(device),
    )
    return made


def stepping(model: nn.Module, then: Callable[[], object] = lambda: None) -> tuple[Any, BackwardStep]:
    """An optimizer whose parameters the host steps in backward; `then` is called behind the last of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    take_over(optimizer, "code8")
    assert send(optimizer, opened(), 1 << 20, on_host=True) == ""
    names = {id(value): name for name, value in model.named_parameters()}
    record, left = BackwardStep(optimizer, names, 1 << 30), len(names)
    steps_in = weakref.WeakMethod(record.completed)  # hooks keep what they hold

    def completed(parameter: Tensor) -> None:
        nonlocal left
        call = steps_in()
        assert call is not None
        call(parameter)
        left -= 1
        if not left:
            then()

    for value in model.parameters():
        value.register_post_accumulate_grad_hook(completed)
    return optimizer, record


def batch() -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).to(card())


def test_backward_goes_on_while_the_host_steps(gate: threading.Event) -> None:
    """Its small parameters, whose state stays, are stepped by the card meanwhile."""
    model = Net(bias=True, fails=False).to(card())
    before = [value.detach().clone() for value in model.parameters()]
    optimizer, record = stepping(model, then=gate.set)
    model(batch()).backward()
    record.before_step(optimizer, (optimizer,), {})
    assert not any(map(torch.equal, before, model.parameters()))


def test_who_saves_waits_for_a_step_of_the_card_beside_them() -> None:
    model = Net(bias=True, fails=False).to(card())
    optimizer, record = stepping(model)
    waited: list[bool] = []

    def run(*unused: Any) -> None:
        saver = threading.Thread(target=optimizer.state_dict)
        saver.start()
        saver.join(0.2)
        waited.append(saver.is_alive())

    with beside({steps.CoreStep.run: run}):
        model(batch()).backward()
    assert waited and all(waited)
    record.before_step(optimizer, (optimizer,), {})


def test_state_is_put_in_order_when_no_step_makes_any(gate: threading.Event) -> None:
    model = Net(bias=False, fails=True).to(card())
    optimizer, record = stepping(model)
    cleared = []

    class State(defaultdict[Any, Any]):
        def clear(self) -> None:
            cleared.append(gate.is_set())
            super().clear()

    optimizer.state = State(dict, optimizer.state)
    with pytest.raises(ValueError, match="broken off"):
        model(batch()).backward()
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    with pytest.raises(RuntimeError, match="a backward was broken off when it had stepped 3 of 4"):
        record.before_step(optimizer, (optimizer,), {})
    opener.join()
    assert cleared == [True]
    assert all(layer.weight in optimizer.state for layer in list(model.layers)[1:])


def broken_off() -> set[int]:
    """Where the weights of a model were that has gone with its optimizer."""
    model = Net(bias=False, fails=True).to(card())
    made = stepping(model)
    with pytest.raises(ValueError, match="broken off"):
        model(batch()).backward()
    del made
    return {value.data_ptr() for value in model.parameters()}


def test_weights_that_go_while_they_are_on_their_way_up() -> None:
    """Nobody waits for the copies: their memory is another tensor's when they have ended."""
    places = broken_off()
    gc.collect()
    anew = [torch.zeros(WIDTH, WIDTH, device=card()) for _ in range(16)]
    torch.cuda.synchronize()
    assert places & {value.data_ptr() for value in anew}
    assert not any(bool(value.any()) for value in anew)
