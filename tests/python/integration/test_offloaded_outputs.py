# SPDX-License-Identifier: Apache-2.0
"""What a module has saved is in somebody else's hands, too, and changes past autograd after it left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.errors import RecomputeError
from memscale.offload.engine import Boundary, Offload, OffloadSettings, why_not
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.checkpoint.recompute_check import RecomputeCheck
from memscale.techniques.offloading import OffloadAttachment
from memscale.weights.saves import can_save
from patched import use_disk_of
from weight_samples import streamed

pytestmark = pytest.mark.skipif(why_not(torch.device("cpu")) != "", reason="no offload")
WIDTH = 32


class Layer(nn.Module):
    """Its output is a save of its own, and one of the layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Of one width."""
        return torch.tanh(self.linear(x))


def _offload() -> Offload:
    return Offload(OffloadSettings(torch.device("cpu"), host_bytes=1 << 26, least_bytes=1))


Change = Callable[[Tensor], None]
Step = Callable[[nn.Sequential, Tensor, Change], tuple[Tensor, Tensor | None]]
"""The loss, and what the loop still has in backward."""


def _halve(x: Tensor) -> None:
    x.data.mul_(0.5)


def _halve_by_numpy(x: Tensor) -> None:
    array = x.detach().numpy()
    array *= 0.5


def _held(model: nn.Sequential, x: Tensor, change: Change) -> tuple[Tensor, Tensor | None]:
    y = model[0](x)
    change(y)
    return y.sum() + model[1](y).sum(), y


def _after_forward(model: nn.Sequential, x: Tensor, change: Change) -> tuple[Tensor, Tensor | None]:
    y = model[1](model[0](x))
    loss = y.square().sum()
    change(y)
    return loss, y


def _gone_by_backward(model: nn.Sequential, x: Tensor, change: Change) -> tuple[Tensor, Tensor | None]:
    """The second layer's save finds that it has changed."""
    y = model[0](x)
    change(y)
    return model[1](y).sum(), None


def _input(model: nn.Sequential, x: Tensor, change: Change) -> tuple[Tensor, Tensor | None]:
    y = x * 1.0
    z = model[0](y)
    change(y)
    return z.sum() + y.sum(), y


STEPS = (_held, _after_forward, _gone_by_backward, _input)


def _gradients(step: Step, change: Change, mode: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    x = torch.randn(16, WIDTH, requires_grad=True)
    offload = _offload()
    if mode is not None:
        for path, layer in model.named_children():
            OffloadAttachment(layer, path, offload, check=RecomputeCheck(mode)).attach()
    loss, held = step(model, x, change)
    gradients = torch.autograd.grad(loss, [x, *model[0].parameters()])
    del held
    assert mode is None or offload.counters()["out_bytes_host"] > 0
    return list(gradients)


@pytest.mark.parametrize("change", [_halve, _halve_by_numpy])
@pytest.mark.parametrize("step", STEPS)
def test_a_change_after_it_left_is_an_error(step: Step, change: Change) -> None:
    plain, unchanged = _gradients(step, change, None), _gradients(step, lambda x: None, None)
    assert not all(map(torch.equal, plain, unchanged))
    with pytest.raises(
        RecomputeError, match="was changed between forward and backward, and its copy was not"
    ):
        _gradients(step, change, "always")


@pytest.mark.parametrize("step", STEPS)
def test_what_nobody_changes_comes_back(step: Step) -> None:
    plain = _gradients(step, lambda x: None, None)
    for mode in ("always", "off"):
        assert all(map(torch.equal, _gradients(step, lambda x: None, mode), plain))


def test_another_part_of_the_memory_may_change() -> None:
    offload, layer = _offload(), Layer()
    OffloadAttachment(layer, "0", offload, check=RecomputeCheck("always")).attach()
    memory = torch.randn(2, 16, WIDTH)
    y = layer(memory[0].requires_grad_())
    memory[1].zero_()
    y.sum().backward()


def test_the_input_of_a_checkpoint_that_left() -> None:
    """The recompute reads the copy; plain PyTorch's backward would read what is there now."""
    layer = Layer()
    check = RecomputeCheck("always")
    CheckpointAttachment(layer, "0", boundary=Boundary(_offload()), check=check).attach()
    x = torch.randn(16, WIDTH, requires_grad=True)
    y = x * 1.0
    z = layer(y)
    z.sum().backward()
    y = x * 1.0
    z = layer(y)
    _halve(y)
    with pytest.raises(RecomputeError, match="was changed"):
        z.sum().backward()


_HALVES = {"now": False}


class Secretive(nn.Module):
    """Changes an output when a global says so, which no plan sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """The layers one after another."""
        for layer in self.layers:
            x = layer(x)
            if _HALVES["now"]:
                _halve(x)
        return x


def test_the_run_goes_on_without_it(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    use_disk_of(monkeypatch)  # worth it
    torch.manual_seed(0)
    model, plain = Secretive(), Secretive()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(1 << 14, WIDTH)
    tiers = memscale.AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path))
    config = memscale.Config(
        memory_budget=4 << 20, async_offload=True, async_config=tiers, enable_checkpointing=False,
        enable_logging=False,
    )  # fmt: skip
    memscale.wrap(model, config, sample_input=x)
    assert memscale.executor_of(model).plan.active
    model(x).square().sum().backward()
    model.zero_grad()
    monkeypatch.setitem(_HALVES, "now", True)
    for _ in range(4):  # the whole model leaves, then parts of it
        try:
            model(x).square().sum().backward()
            break
        except RecomputeError:
            model.zero_grad()
    else:
        pytest.fail("what has failed is still in the plan")
    plain(x).square().sum().backward()
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None and expected.grad is not None
        assert torch.equal(got.grad, expected.grad)


def test_running_statistics_are_no_change() -> None:
    """PyTorch saves them before it updates them."""
    layer, x = nn.BatchNorm1d(WIDTH), torch.randn(16, WIDTH, requires_grad=True)
    OffloadAttachment(layer, "0", _offload(), check=RecomputeCheck("always")).attach()
    layer(x).square().sum().backward()
    assert x.grad is not None and not layer.running_mean.equal(torch.zeros(WIDTH))


class Descends(nn.Module):
    """Its forward runs a backward, which saves weights when their modules have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.energy = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Of one width."""
        x = self.first(x)
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return x - 0.1 * slope


@pytest.mark.skipif(not can_save(), reason="this PyTorch does not tell which hooks are in force")
def test_streamed_weights_do_not_leave_again() -> None:
    """Their memory is used for others when their module has returned. Of others a view of a weight leaves."""

    def put_count(model: nn.Module) -> int:
        offload = _offload()
        attachment = OffloadAttachment(model, "", offload, check=RecomputeCheck("always"))
        attachment.attach()
        loss = model(torch.ones(64, WIDTH)).square().mean()
        attachment.undo()
        assert offload.engine is not None
        count = offload.engine.counters()["put_count_host"]
        loss.backward()
        return count

    model = Descends()
    plain = put_count(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with streamed(model):
        assert put_count(model) < plain
    for before, parameter in zip(gradients, model.parameters(), strict=True):
        assert before is None or torch.equal(before, parameter.grad)
