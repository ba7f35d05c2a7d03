# SPDX-License-Identifier: Apache-2.0
"""BF16 weights with FP32 masters: what a step computes, what is kept, and what comes back."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from calls import beside, failing
from memscale.hardware.detect import Hardware, card_hardware, detect
from memscale.offload.engine import Offload, OffloadSettings
from memscale.optim import is_patched, moments_of
from memscale.optim.masters import is_half, to_bf16
from memscale.optim.offload.attach import is_offloaded, offloaded_bytes, send, take_back
from memscale.techniques.base import Surroundings
from memscale.techniques.precision import bf16_weights, mixed_precision
from zoo.training import peak_bytes

SMALLEST = memscale.Config(
    memory_budget=1, use_mixed_precision=True, exact=False, enable_checkpointing=False, enable_logging=False
)
pytestmark = pytest.mark.usefixtures("bf16_host")

IN_8BIT = SMALLEST.replace(use_8bit_optimizer=True)


class Net(nn.Module):
    """An embedding that is tied to the head, a norm, layers of which one may be frozen."""

    def __init__(self, frozen: bool = False, words: int = 60, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 40), nn.Linear(40, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        if frozen:
            self.up.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), words.flatten())


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).train()


def words(step: int = 0, rows: int = 4) -> Tensor:
    return torch.randint(0, 60, (rows, 12), generator=torch.Generator().manual_seed(step))


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)


def wrapped(
    config: memscale.Config = SMALLEST, model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(**options) if model is None else model
    optimizer = adamw(model)
    memscale.wrap(model, config, sample_input=words(), optimizer=optimizer)
    assert has_half(model)
    return model, optimizer


def has_half(model: nn.Module) -> bool:
    return any(map(is_half, model.parameters()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, begin: int = 0) -> list[float]:
    losses = []
    for step in range(begin, begin + steps):
        loss = model(words(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def rounded(master: Tensor) -> Tensor:
    """FP32 to BF16, to nearest, halves away from zero: what magnitude bits do when half a unit is added."""
    return (
        ((master.detach().contiguous().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    )


def image(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype is other[name].dtype and torch.equal(value, other[name]), name


@pytest.mark.parametrize("config", [SMALLEST, IN_8BIT], ids=["fp32", "8 bits"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_weight_that_is_set_to_zero_is_zero(config: memscale.Config, steps: int) -> None:
    model, optimizer = wrapped(config)
    train(model, optimizer, steps)
    weight = dict(model.named_parameters())["up.weight"]
    with torch.no_grad():
        weight[::2] = 0  # pruned, or initialised anew; what it lacked of its master is behind the times
        weight[1::2] *= -0.0
    assert float(model.state_dict()["up.weight"].abs().max()) < 1e-40
    losses = train(model, optimizer, 3, begin=steps)
    assert all(map(math.isfinite, losses))
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


class TestSteps:
    def test_loss_and_gradients_are_those_of_bf16_weights_under_autocast(self) -> None:
        model, optimizer = wrapped()
        for step in range(3):
            plain = net()
            plain.load_state_dict(model.state_dict())
            for value in plain.parameters():
                if value.dim() > 1:
                    value.data = rounded(value.data)
            with torch.autocast("cpu", torch.bfloat16):
                expected = plain(words(step))
            expected.backward()
            loss = model(words(step))
            loss.backward()
            assert torch.equal(loss, expected)
            for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert mine.dtype is theirs.dtype and mine.grad is not None, name
                assert theirs.grad is not None and mine.grad.dtype is mine.dtype, name
                assert torch.equal(mine.grad, theirs.grad), name
            optimizer.step()
            optimizer.zero_grad()

    @pytest.mark.parametrize("name", ["adamw", "sgd"])
    def test_masters_are_stepped_as_pytorch_steps_fp32_weights(self, name: str) -> None:
        def made(parameters: Any) -> torch.optim.Optimizer:
            if name == "adamw":
                return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False)
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)

        model = net()
        masters = {key: nn.Parameter(value.detach().clone()) for key, value in model.named_parameters()}
        optimizer, reference = made(model.parameters()), made(masters.values())
        memscale.wrap(model, SMALLEST, sample_input=words(), optimizer=optimizer)
        for step in range(8):
            model(words(step)).backward()
            for key, value in model.named_parameters():
                assert value.grad is not None
                masters[key].grad = value.grad.float()
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            saved = model.state_dict()
            for key, value in model.named_parameters():
                # The order of operations differs by a few roundings a step (memscale/optim.h).
                assert torch.allclose(saved[key], masters[key], rtol=3e-6, atol=1e-8), (key, step)
                assert torch.equal(value, rounded(saved[key]) if value.dim() > 1 else saved[key])
        memscale.detach(model)
        for key, value in model.named_parameters():
            assert torch.equal(value, saved[key])

    def test_updates_below_a_bf16_digit_are_not_lost(self) -> None:
        model = net()
        before = image(model)
        optimizer = adamw(model, lr=1e-6)  # a last place of BF16 is 2^-8 of the weight
        memscale.wrap(model, SMALLEST, sample_input=words(), optimizer=optimizer)
        train(model, optimizer, 5)
        moved = model.state_dict()["up.weight"] - before["up.weight"]
        assert 2e-6 < moved.abs().mean() < 6e-6

    def test_8_bit_state_keeps_masters_of_24_bits(self) -> None:
        model, optimizer = wrapped(IN_8BIT)
        assert moments_of(optimizer) == "code8"
        train(model, optimizer, 3)
        weight = model.get_submodule("up").weight
        state = optimizer.state[weight]["memscale_state"]
        assert state.nbytes == pytest.approx(3 * weight.numel(), rel=0.02)  # and 2 of the weight: 5
        whole = model.state_dict()["up.weight"]
        assert bool((whole.view(torch.int32) & 0xFF == 0).all()) and torch.equal(weight, rounded(whole))
        assert not torch.equal(whole, weight.float())

    def test_it_learns_as_fp32_weights_do(self) -> None:
        plain = net()
        expected = train(plain, adamw(plain), 30)
        for config in (SMALLEST, IN_8BIT):
            losses = train(*wrapped(config), steps=30)
            assert losses[-1] == pytest.approx(expected[-1], rel=0.03) and losses[-1] < losses[0] / 2

    def test_tied_and_frozen_weights(self) -> None:
        model, optimizer = wrapped(frozen=True)
        assert isinstance(model, Net)
        assert model.head.weight is model.words.weight and model.words.weight.dtype is torch.bfloat16
        assert model.up.weight.dtype is torch.float32
        before = model.up.weight.clone()
        train(model, optimizer, 2)
        saved = model.state_dict()
        assert saved["head.weight"] is saved["words.weight"] and torch.equal(model.up.weight, before)
        assert "up.weight" in saved and saved["up.weight"].data_ptr() == model.up.weight.data_ptr()

    def test_accumulation_and_an_exception_in_the_middle(self) -> None:
        def run(model: nn.Module, optimizer: torch.optim.Optimizer, fails: bool) -> dict[str, Tensor]:
            for step in range(3):
                for part in range(2):
                    model(words(2 * step + part)).backward()
                    if fails:
                        with pytest.raises(IndexError):
                            model(words() + 60)
                optimizer.step()
                optimizer.zero_grad()
            return model.state_dict()

        assert_same(run(*wrapped(), fails=True), run(*wrapped(), fails=False))

    def test_clipping_schedulers_and_groups(self) -> None:
        def run(half: bool) -> dict[str, Tensor]:
            model = net()
            groups = [
                {"params": list(model.words.parameters()), "lr": 3e-3},
                {"params": [*model.up.parameters(), *model.down.parameters()], "weight_decay": 0.0},
                {"params": list(model.norm.parameters())},
            ]
            optimizer = torch.optim.AdamW(groups, lr=1e-2)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            if half:
                memscale.wrap(model, SMALLEST, sample_input=words(), optimizer=optimizer)
            for step in range(5):
                model(words(step)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            assert has_half(model) == half
            return model.state_dict()

        for (name, mine), theirs in zip(run(True).items(), run(False).values(), strict=True):
            # Adam steps by about the learning rate, whatever the gradient's size: 5 steps of 1e-2 and less.
            assert (mine - theirs).abs().mean() < 2e-3, name


class TestDetach:
    @pytest.mark.parametrize("config", [SMALLEST, IN_8BIT], ids=["fp32", "8bit"])
    @pytest.mark.parametrize("steps", [0, 2])
    def test_before_a_step_everything_is_as_it_was(self, config: memscale.Config, steps: int) -> None:
        model = net()
        optimizer = adamw(model)
        train(model, optimizer, steps)
        before, kind = image(model), type(optimizer)
        state = copy.deepcopy(optimizer.state_dict()["state"])
        memscale.wrap(model, config, sample_input=words(), optimizer=optimizer)
        model(words()).backward()
        memscale.detach(model)
        assert_same(image(model), before)
        assert type(optimizer) is kind and not has_half(model)
        assert all(not set(vars(value)) for value in model.parameters())
        assert "_save_to_state_dict" not in vars(model.get_submodule("up"))
        assert all(value.grad.dtype is torch.float32 for value in model.parameters())
        if config is SMALLEST:
            after = optimizer.state_dict()["state"]
            assert state.keys() == after.keys()
            assert all(
                torch.equal(state[key][name], after[key][name]) for key in state for name in state[key]
            )

    def test_between_steps_training_goes_on_in_fp32(self) -> None:
        model, optimizer = wrapped()
        train(model, optimizer, 3)
        saved = model.state_dict()
        memscale.detach(model)
        assert_same(image(model), {name: saved[name] for name, _ in model.named_parameters()})
        assert type(optimizer) is torch.optim.AdamW
        assert optimizer.state[model.get_submodule("up").weight]["exp_avg"].dtype is torch.float32
        train(model, optimizer, 2, begin=3)

    def test_a_graph_made_before_raises_pytorchs_own_error(self) -> None:
        model, _ = wrapped()
        loss = model(words())
        memscale.detach(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_a_gradient_that_is_there_is_kept(self) -> None:
        model = net()
        optimizer = adamw(model)
        model(words()).backward()
        before = {name: value.grad.clone() for name, value in model.named_parameters()}
        memscale.wrap(model, SMALLEST, sample_input=words(), optimizer=optimizer)
        for name, value in model.named_parameters():
            assert value.grad is not None and value.grad.dtype is value.dtype
            assert torch.equal(value.grad, before[name].to(value.dtype)), name

    def test_a_failing_conversion_leaves_everything(self) -> None:
        model = net()
        optimizer, before = adamw(model), image(model)
        fails = beside({to_bf16: failing(MemoryError, at=3)})
        with fails, pytest.raises(MemoryError):
            memscale.wrap(model, SMALLEST, sample_input=words(), optimizer=optimizer)
        assert not has_half(model) and not is_patched(optimizer)
        assert_same(image(model), before)


class TestPlans:
    def test_another_shape_keeps_the_weights_and_their_graphs(self) -> None:
        model, optimizer = wrapped()
        train(model, optimizer, 2)
        data = model.get_submodule("up").weight.data_ptr()
        first = model(words())
        second = model(words(rows=9))  # is re-planned while the first graph waits
        (first + second).backward()
        optimizer.step()
        assert model.get_submodule("up").weight.data_ptr() == data
        plan = memscale.executor_of(model).plan
        assert "bf16_weights" in [step.technique for step in plan.steps]
        assert plan.plain.allocated_peak_bytes > plan.predicted.allocated_peak_bytes

    def test_a_budget_that_fits_leaves_the_weights(self) -> None:
        model = net()
        optimizer = adamw(model)
        memscale.wrap(
            model, SMALLEST.replace(memory_budget="4GiB"), sample_input=words(), optimizer=optimizer
        )
        assert not has_half(model) and type(optimizer) is torch.optim.AdamW

    def test_what_the_plan_says(self) -> None:
        model = net()
        plan = memscale.plan(model, adamw(model), SMALLEST, words())
        step = next(step for step in plan.steps if step.technique == "bf16_weights")
        assert step.modules == ("",) and not step.exact and step.bytes > 0 and not plan.exact
        assert "3 of them" in step.reason and "FP32" in step.reason
        assert not has_half(model)

    def test_verify(self) -> None:
        model, optimizer = wrapped()
        train(model, optimizer, 2)
        before = model.state_dict()
        report = memscale.verify(model, words())
        assert report.equal and "bf16_weights" in report.techniques and "BF16 weights" in report.summary()
        assert_same(model.state_dict(), before)
        fresh = net()
        before = image(fresh)
        assert memscale.verify(fresh, words(), adamw(fresh), SMALLEST).passed
        assert_same(image(fresh), before)

    def test_predictions_of_a_wrapped_model_are_those_of_the_bare_one(self) -> None:
        bare = net()
        before = memscale.predict(bare, adamw(bare), SMALLEST, words())
        model, optimizer = wrapped()
        after = memscale.predict(model, optimizer, SMALLEST, words())
        assert after.allocated_peak_bytes == before.allocated_peak_bytes
        assert has_half(model)

    def test_the_loops_own_autocast(self) -> None:
        """Before any step the technique stands aside; once it has trained, weights stay as they are."""
        model, optimizer = wrapped()
        with torch.autocast("cpu", torch.bfloat16):
            model(words()).backward()
        assert not has_half(model) and type(optimizer) is torch.optim.AdamW
        model, optimizer = wrapped()
        train(model, optimizer)
        with torch.autocast("cpu", torch.bfloat16):
            model(words()).backward()
        assert has_half(model)
        train(model, optimizer)

    def test_evaluation_computes_in_bf16_and_returns_fp32(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).train()
        optimizer, x = adamw(model), torch.randn(4, 8)
        expected = model(x).detach()
        memscale.wrap(model, SMALLEST, sample_input=x, optimizer=optimizer)
        assert has_half(model) and model(x).dtype is torch.bfloat16  # as autocast by hand
        with torch.no_grad():
            output = model(x)
        assert output.dtype is torch.float32 and torch.allclose(output, expected, atol=0.02)


class TestSaving:
    def test_the_run_goes_on_in_another_process_bit_for_bit(self) -> None:
        model, optimizer = wrapped()
        train(model, optimizer, 3)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        expected = train(model, optimizer, 3, begin=3)
        for order in ("wrap last", "model first", "optimizer first"):
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            again = net()
            fresh = adamw(again)
            if order != "wrap last":
                memscale.wrap(again, SMALLEST, sample_input=words(), optimizer=fresh)
                train(again, fresh, 1)
            if order != "optimizer first":
                again.load_state_dict(saved["model"])
            fresh.load_state_dict(saved["optimizer"])
            if order == "optimizer first":
                again.load_state_dict(saved["model"])
            if order == "wrap last":
                memscale.wrap(again, SMALLEST, sample_input=words(), optimizer=fresh)
            assert train(again, fresh, 3, begin=3) == expected, order
            assert_same(again.state_dict(), model.state_dict())

    def test_plain_pytorch_loads_what_was_saved(self) -> None:
        model, optimizer = wrapped()
        train(model, optimizer, 2)
        plain = net()
        theirs = adamw(plain)
        plain.load_state_dict(model.state_dict())
        theirs.load_state_dict(optimizer.state_dict())
        assert all(value.dtype is torch.float32 for value in plain.parameters())
        assert theirs.state[plain.up.weight]["exp_avg"].dtype is torch.float32
        train(plain, theirs, 1)

    @pytest.mark.parametrize("config", [SMALLEST, IN_8BIT], ids=["fp32", "8bit"])
    def test_loaded_values_are_the_masters(self, config: memscale.Config) -> None:
        model, optimizer = wrapped(config)
        train(model, optimizer, 1)
        values = net().state_dict()
        model.load_state_dict(values)
        assert_same(dict(model.state_dict()), dict(values))
        assert torch.equal(model.get_submodule("up").weight, rounded(values["up.weight"]))

    def test_a_state_dict_is_a_picture(self) -> None:
        model, optimizer = wrapped()
        saved = model.state_dict()
        before = {name: value.clone() for name, value in saved.items()}
        train(model, optimizer, 1)
        assert torch.equal(saved["up.weight"], before["up.weight"])
        assert not torch.equal(model.state_dict()["up.weight"], before["up.weight"])
        kept = model.state_dict(keep_vars=True)
        assert kept["up.weight"] is model.get_submodule("up").weight

    @pytest.mark.parametrize("way", ["deepcopy", "save"])
    def test_copies_are_plain_and_have_the_masters(self, way: str) -> None:
        model, optimizer = wrapped()
        train(model, optimizer, 2)
        if way == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        assert not has_half(twin) and twin.head.weight is twin.words.weight
        assert_same(dict(twin.state_dict()), dict(model.state_dict()))
        theirs = adamw(twin)
        train(twin, theirs, 2)
        assert has_half(model) and not has_half(twin)
        twin.load_state_dict(model.state_dict())
        train(model, optimizer, 1)

    def test_model_and_optimizer_copied_together(self) -> None:
        model, optimizer = wrapped()
        train(model, optimizer, 2)
        twin, theirs = copy.deepcopy((model, optimizer))
        assert theirs.param_groups[0]["params"][0] is twin.words.weight
        train(twin, theirs, 1)
        train(model, optimizer, 1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("config", [SMALLEST, IN_8BIT], ids=["fp32", "8bit"])
def test_the_predicted_peak_is_the_measured_one(config: memscale.Config, checkpointing: bool) -> None:
    """From the wrap on: conversions and the first step, which makes the state, stay below it as well."""
    config = config.replace(enable_checkpointing=checkpointing)
    predicted: list[int] = []

    def run() -> None:
        model, x = net(words=400, width=192), words(rows=16)
        optimizer = adamw(model)
        memscale.wrap(model, config, sample_input=x, optimizer=optimizer)
        predicted.append(memscale.executor_of(model).plan.predicted.allocated_peak_bytes)
        for _ in range(2):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss

    run()
    measured = peak_bytes(run)
    assert measured <= predicted[1] + 1024 and predicted[1] <= 1.02 * measured


@pytest.mark.parametrize("config", [SMALLEST, IN_8BIT], ids=["fp32", "8bit"])
def test_with_the_state_elsewhere(config: memscale.Config) -> None:
    """The same bits: weights, what is saved in the middle, what is loaded, and what detach gives back."""

    def run(leaves: bool) -> list[dict[str, Tensor]]:
        model, optimizer = wrapped(config, words=500, width=160)
        if leaves:
            settings = OffloadSettings(torch.device("cpu"), host_bytes=1 << 24, least_bytes=1)
            assert send(optimizer, Offload(settings)) == ""
        train(model, optimizer, 2)
        pictures = [dict(model.state_dict())]
        train(model, optimizer, 1, begin=2)
        model.load_state_dict(pictures[0])
        train(model, optimizer, 1, begin=3)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        pictures.append({**model.state_dict(), "moment": state["state"][0]["exp_avg"]})
        train(model, optimizer, 1, begin=4)
        assert is_offloaded(optimizer) == leaves == (offloaded_bytes(optimizer) > 0)
        take_back(optimizer)
        memscale.detach(model)
        return [*pictures, image(model)]

    for one, other in zip(run(leaves=False), run(leaves=True), strict=True):
        assert_same(one, other)


class Scaled(nn.Parameter):
    """A class of its own."""


def shared() -> nn.Module:
    both = torch.randn(2, 8, 8)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[0].weight, model[1].weight = nn.Parameter(both[0]), nn.Parameter(both[1])
    return model


def of_a_class() -> nn.Module:
    model = nn.Linear(8, 8)
    model.weight = Scaled(torch.randn(8, 8))
    return model


def on_its_own(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    return model


LEFT: dict[str, Callable[[], nn.Module]] = {
    "vectors": lambda: nn.LayerNorm(8),
    "norm of a matrix": lambda: nn.LayerNorm((8, 8)),
    "parametrized": lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "weight norm of old": lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
    "sparse": lambda: nn.Embedding(8, 8, sparse=True),
    "renormalised": lambda: nn.Embedding(8, 8, max_norm=1.0),
    "parts of one tensor": shared,
    "a class of its own": of_a_class,
    "frozen": lambda: on_its_own(nn.Linear(8, 8)),
    "BF16 already": lambda: nn.Linear(8, 8).bfloat16(),
}


def around(optimizer: Any, hardware: Hardware | None = None) -> Surroundings:
    here = dataclasses.replace(detect(torch.device("cpu")), supports_bf16=True)
    return Surroundings(here if hardware is None else hardware, SMALLEST.effective(), optimizer)


class TestRefusals:
    @pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
    @pytest.mark.parametrize("which", LEFT)
    def test_weights_that_stay(self, which: str) -> None:
        model = nn.ModuleDict({"it": LEFT[which](), "other": nn.Linear(4, 4)})
        optimizer = torch.optim.AdamW(model.parameters())
        (found,) = bf16_weights.find(model, around(optimizer))
        assert found.names == {"other.weight"}
        alone = LEFT[which]()
        place = around(torch.optim.AdamW(alone.parameters()))
        assert not bf16_weights.find(alone, place)
        assert bf16_weights.why_not(alone, place) or mixed_precision.why_not(alone, place.hardware)

    def test_groups_that_pytorch_steps(self) -> None:
        model = net()
        groups = [{"params": list(model.up.parameters()), "amsgrad": True}, {"params": [model.down.weight]}]
        (found,) = bf16_weights.find(model, around(torch.optim.AdamW(groups)))
        assert found.names == {"down.weight"}

    @pytest.mark.parametrize(
        ("place", "words"),
        [
            (lambda model: around(None), "pass it to wrap"),
            (lambda model: around(torch.optim.Adagrad(model.parameters())), "only AdamW"),
            (lambda model: around(torch.optim.SGD(model.parameters(), 0.1)), "without momentum"),
            (lambda model: around(adamw(model), card_hardware("card", (7, 0), 1 << 34)), ""),
            (
                lambda model: around(
                    adamw(model), dataclasses.replace(detect(torch.device("cpu")), supports_bf16=False)
                ),
                "",
            ),
        ],
        ids=["no optimizer", "another optimizer", "no state", "FP16 card", "no BF16"],
    )
    def test_what_it_needs(self, place: Callable[[nn.Module], Surroundings], words: str) -> None:
        model = net()
        assert bf16_weights.find(model, place(model)) == []
        assert words in bf16_weights.why_not(model, place(model))

    def test_distributed_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = net()
        monkeypatch.setattr(bf16_weights, "replicas_of", lambda _: [object()])
        assert "DistributedDataParallel" in bf16_weights.why_not(model, around(adamw(model)))
        monkeypatch.undo()
        monkeypatch.setattr(bf16_weights.sharding, "has_units", lambda _: True)
        assert "fully_shard" in bf16_weights.why_not(model, around(adamw(model)))

    def test_an_optimizer_that_nobody_has_named(self) -> None:
        model = net()
        optimizer = adamw(model)
        memscale.wrap(model, SMALLEST, sample_input=words())
        train(model, optimizer)
        model(words(rows=9)).backward()  # is planned for the optimizer that has stepped
        assert not has_half(model) and type(optimizer) is torch.optim.AdamW
        notes = memscale.executor_of(model).plan.notes
        assert any("bf16_weights: the optimizer is not known" in note for note in notes)

    def test_exact_plans_do_without(self) -> None:
        model = net()
        plan = memscale.plan(model, adamw(model), SMALLEST.replace(exact=True), words())
        assert [step.technique for step in plan.steps] == ["autocast"] and plan.exact

    def test_a_model_that_wants_one_dtype(self) -> None:
        class Picky(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(8, 8))

            def forward(self, x: Tensor) -> Tensor:
                return torch.index_put(torch.zeros(8, 8), (torch.arange(8),), self.weight).mul(x).sum()

        model = Picky()
        plan = memscale.plan(model, adamw(model), SMALLEST, torch.randn(8, 8))
        assert "bf16_weights" not in [step.technique for step in plan.steps]
        assert any("bf16_weights: the step cannot be traced with it" in note for note in plan.notes)

    def test_what_pytorch_has_to_step_later_becomes_fp32(self) -> None:
        model, optimizer = wrapped()
        train(model, optimizer, 1)
        before = model.state_dict()["words.weight"]
        model(words()).backward()
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
        optimizer.step()
        after = model.get_submodule("words").weight
        assert after.dtype is torch.float32 and not has_half(model)
        assert 0 < (after - before).abs().max() < 0.1
        memscale.detach(model)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_another_optimizer_for_the_same_weights_steps_them_in_fp32(kind: type[torch.optim.Optimizer]) -> None:
    model, first = wrapped()
    train(model, first, 3)
    second = kind(model.parameters(), lr=1e-5)  # type: ignore[call-arg]
    for step in range(3, 6):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, second, 1, begin=step)
        changed = (model.state_dict()["up.weight"] != before["up.weight"]).float().mean()
        assert changed > 0.9  # in BF16, 1 % of them
    del first


def test_a_state_dict_has_what_was_written_through_data() -> None:
    model, optimizer = wrapped()
    train(model, optimizer, 2)
    held = model.state_dict()
    before = held["up.weight"].clone()
    for weight in model.parameters():
        weight.data.mul_(0.5)  # as averages of weights are swapped in, for an evaluation
    now = model.state_dict()
    assert torch.allclose(now["up.weight"], before / 2, rtol=1e-2)
    assert torch.equal(held["up.weight"], before) and now["head.weight"] is now["words.weight"]
