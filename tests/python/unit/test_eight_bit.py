# SPDX-License-Identifier: Apache-2.0
"""8-bit optimizer state: which optimizers are patched and how, and what the prediction counts for them.

Our own state is tested in `test_optim*.py`; here only where it comes in the order of those who are asked. The
wiring is tested with stand-ins for both packages, whose optimizers keep a byte per element. What the real
ones take and compute is tested where they are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale import Config
from memscale.config.config import EIGHT_BIT_BACKENDS
from memscale.core.step_signature import optimizer_memory
from memscale.errors import ConfigError
from memscale.optim import eight_bit
from memscale.optim.eight_bit import is_8bit, package_of, with_8bit_state
from memscale.techniques.optimizer.eight_bit_layout import layout_of
from zoo.training import peak_bytes

QUIET = Config(memory_budget="4GiB", enable_logging=False)

Make = Callable[[Any], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """The settings of lion-pytorch's."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.decoupled_wd = False


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Linear(64, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        (model(torch.randn(32, 64, generator=generator)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


# ---- stand-ins for the packages ----------------------------------------------------------------------


class _OneByte(torch.optim.Optimizer):
    """Momentum in one byte per element, as a package's optimizer would look from outside."""

    fails: type[Exception] | None = None

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "weight_decay": 0.0, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if type(self).fails is not None:
            raise type(self).fails("no kernel for this device\nsecond line")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("state1", torch.zeros(parameter.shape, dtype=torch.uint8))
                    parameter.sub_(parameter.grad.sign(), alpha=float(group["lr"]))


def _optimizer(module: str, name: str) -> type[_OneByte]:
    class Made(_OneByte):
        def __init__(self, params: Any, **defaults: Any) -> None:
            if name == "SGD8bit":
                defaults["betas"] = (defaults.pop("momentum"), 0)
            super().__init__(params, **defaults)
            self.block_size = 256
            self.args = type("Args", (), {"optim_bits": 8})()

    Made.__module__, Made.__name__, Made.__qualname__ = module, name, name
    return Made


def install(patch: pytest.MonkeyPatch, package: str, *names: str) -> ModuleType:
    """Puts a stand-in for a package in force. Returns its module of optimizers."""
    optim = ModuleType(f"{package}.optim")
    for name in names:
        setattr(optim, name, _optimizer(f"{package}.optim", name))
    parent = ModuleType(package)
    parent.__path__ = []
    patch.setitem(sys.modules, package, parent)
    patch.setitem(sys.modules, f"{package}.optim", optim)
    return optim


@pytest.fixture
def none(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Neither package is installed, and "auto" asks as on a card."""
    monkeypatch.setattr(eight_bit, "backends_of", lambda optimizer: ("bitsandbytes", "torchao"))
    for package in ("bitsandbytes", "torchao"):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
    return monkeypatch


@pytest.fixture
def both(none: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Stand-ins for both."""
    install(none, "bitsandbytes", "AdamW8bit", "Adam8bit", "SGD8bit", "Lion8bit")
    install(none, "torchao", "AdamW8bit", "Adam8bit")
    yield none


# ---- which optimizer becomes which -------------------------------------------------------------------


class TestChoice:
    @pytest.mark.parametrize(
        ("make", "backend", "expected"),
        [
            (torch.optim.AdamW, "auto", "bitsandbytes AdamW8bit"),
            (torch.optim.AdamW, "torchao", "torchao AdamW8bit"),
            (torch.optim.Adam, "auto", "bitsandbytes Adam8bit"),
            (lambda p: torch.optim.Adam(p, weight_decay=0.1), "auto", "torchao Adam8bit"),
            (lambda p: torch.optim.Adam(p, decoupled_weight_decay=True), "auto", "bitsandbytes AdamW8bit"),
            (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "auto", "bitsandbytes SGD8bit"),
            (Lion, "auto", "bitsandbytes Lion8bit"),
        ],
    )
    @pytest.mark.usefixtures("both")
    def test_counterparts(self, make: Make, backend: str, expected: str) -> None:
        made, line = with_8bit_state(make(network().parameters()), backend)
        assert f"{package_of(made)} {type(made).__name__}" == expected
        assert is_8bit(made)
        package, name = expected.split()
        assert package in line and name in line and "in place of" in line

    @pytest.mark.parametrize(
        ("make", "backend", "reason"),
        [
            (torch.optim.RMSprop, "auto", "only AdamW, Adam, SGD with momentum and Lion"),
            (lambda p: torch.optim.SGD(p, lr=0.1), "auto", "without momentum there is no state"),
            (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "auto", "nesterov"),
            (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "auto", "dampening"),
            (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "torchao", "only AdamW and Adam"),
            (lambda p: torch.optim.AdamW(p, amsgrad=True), "auto", "amsgrad"),
            (lambda p: torch.optim.AdamW(p, maximize=True), "auto", "maximize"),
            (lambda p: torch.optim.Adam(p, weight_decay=0.1), "bitsandbytes", "decays weights as AdamW"),
            (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), "bitsandbytes", "lr is a tensor"),
            (type("Own", (torch.optim.AdamW,), {}), "auto", "only AdamW"),
        ],
    )
    @pytest.mark.usefixtures("both")
    def test_what_stays_and_why(self, make: Make, backend: str, reason: str) -> None:
        optimizer = make(network().parameters())
        same, line = with_8bit_state(optimizer, backend)
        assert same is optimizer and reason in line
        assert f"{type(optimizer).__name__} stays as it is" in line and "\n" not in line

    @pytest.mark.usefixtures("none")
    @pytest.mark.parametrize("backend", ["auto", "bitsandbytes", "torchao"])
    def test_a_missing_package(self, backend: str) -> None:
        optimizer = torch.optim.AdamW(network().parameters())
        same, line = with_8bit_state(optimizer, backend)
        assert same is optimizer and "not installed" in line
        assert line.count("not installed") == (2 if backend == "auto" else 1)

    def test_auto_takes_the_second_where_the_first_is_missing(self, none: pytest.MonkeyPatch) -> None:
        install(none, "torchao", "AdamW8bit")
        made, _ = with_8bit_state(torch.optim.AdamW(network().parameters()))
        assert package_of(made) == "torchao"

    def test_a_version_without_the_class(self, none: pytest.MonkeyPatch) -> None:
        install(none, "torchao")
        optimizer = torch.optim.AdamW(network().parameters())
        same, line = with_8bit_state(optimizer, "torchao")
        assert same is optimizer and "has no AdamW8bit" in line

    def test_one_that_has_8_bits_already(self, both: pytest.MonkeyPatch) -> None:
        made, _ = with_8bit_state(torch.optim.AdamW(network().parameters()))
        again, line = with_8bit_state(made)
        assert again is made and "already" in line

    def test_a_backend_that_does_not_work_here(self, both: pytest.MonkeyPatch) -> None:
        both.setattr(sys.modules["bitsandbytes.optim"].AdamW8bit, "fails", RuntimeError)
        made, _ = with_8bit_state(torch.optim.AdamW(network().parameters()))
        assert package_of(made) == "torchao"
        optimizer = torch.optim.AdamW(network().parameters())
        same, line = with_8bit_state(optimizer, "bitsandbytes")
        assert same is optimizer
        assert "RuntimeError: no kernel for this device" in line and "second line" not in line

    def test_a_step_that_goes_wrong(self, both: pytest.MonkeyPatch) -> None:
        def wrong(self: Any, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["state1"] = torch.zeros(parameter.shape, dtype=torch.uint8)
                    parameter.data.fill_(float("nan"))

        both.setattr(sys.modules["bitsandbytes.optim"].AdamW8bit, "step", wrong)
        optimizer = torch.optim.AdamW(network().parameters())
        same, line = with_8bit_state(optimizer, "bitsandbytes")
        assert same is optimizer and "goes wrong" in line
        assert all(parameter.isfinite().all() for parameter in optimizer.param_groups[0]["params"])


class TestOwn:
    """Where our own state comes in the order, and what is said."""

    def test_it_is_the_first_on_the_cpu(self) -> None:
        optimizer = torch.optim.AdamW(network().parameters())
        same, line = with_8bit_state(optimizer)
        assert same is optimizer and is_8bit(optimizer) and package_of(optimizer) is None
        assert line == "8-bit optimizer state: memscale's, AdamW goes on with it"
        assert with_8bit_state(optimizer) == (optimizer, "8-bit optimizer state: AdamW has it already")

    def test_one_that_it_cannot_take_over_is_asked_on(self, none: pytest.MonkeyPatch) -> None:
        none.undo()
        for package in ("bitsandbytes", "torchao"):
            none.setitem(sys.modules, package, None)
        optimizer = torch.optim.AdamW(nn.Linear(3, 3).half().parameters())
        same, line = with_8bit_state(optimizer)
        assert same is optimizer and not is_8bit(optimizer)
        assert "memscale: parameters of torch.float16" in line and line.count("not installed") == 2

    def test_it_is_not_for_other_devices(self) -> None:
        weight = nn.Parameter(torch.empty(3, device="meta"))
        optimizer = torch.optim.AdamW([weight])
        same, line = with_8bit_state(optimizer, "memscale")
        assert same is optimizer and "memscale: parameters on meta: its steps run on the CPU" in line
        assert eight_bit.backends_of(optimizer) == ("bitsandbytes", "torchao")


def test_a_namesake_of_adamw_is_planned_for_on_its_own(none: pytest.MonkeyPatch) -> None:
    """bitsandbytes has an AdamW with state in 32 bits, whose step takes more than PyTorch's."""
    namesake = install(none, "bitsandbytes", "AdamW").AdamW(network().parameters())
    assert optimizer_memory(torch.optim.AdamW(network().parameters())) == optimizer_memory(None)
    assert optimizer_memory(namesake) != optimizer_memory(None)


# ---- what is carried over ----------------------------------------------------------------------------


@pytest.mark.usefixtures("both")
class TestCarriedOver:
    @pytest.mark.parametrize("backend", ["bitsandbytes", "torchao"])
    def test_groups_and_settings(self, backend: str) -> None:
        model = network()
        named = list(model.named_parameters())
        named[2][1].requires_grad_(False)
        optimizer = torch.optim.AdamW(
            [
                {"params": named[:3], "lr": 2e-3, "betas": (0.8, 0.9), "tag": "first"},
                {"params": named[3:], "weight_decay": 0.3, "eps": 1e-6},
            ],
            lr=5e-4,
        )
        before = [dict(group) for group in optimizer.param_groups]
        made, _ = with_8bit_state(optimizer, backend)
        assert is_8bit(made)
        for group, old in zip(made.param_groups, before, strict=True):
            assert all(a is b for a, b in zip(group["params"], old["params"], strict=True))
            for name in ("betas", "eps", "weight_decay", "param_names"):
                assert group[name] == old[name]
            assert float(group["lr"]) == pytest.approx(old["lr"], rel=1e-6)
        assert made.param_groups[0]["tag"] == "first" and "tag" not in made.param_groups[1]
        assert [dict(group) for group in optimizer.param_groups] == before
        assert not made.state

    def test_momentum_of_every_group(self) -> None:
        first, second = list(network().parameters())[:2]
        groups = [{"params": [first], "momentum": 0.5}, {"params": [second]}]
        made, _ = with_8bit_state(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
        assert [group["betas"] for group in made.param_groups] == [(0.5, 0.0), (0.9, 0.0)]

    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [
            (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1), "scheduler"),
            (lambda optimizer: optimizer.register_step_pre_hook(print), "hooks"),
            (lambda optimizer: setattr(optimizer, "step", lambda: None), "step has been replaced"),
        ],
        ids=["scheduler", "hook", "step"],
    )
    def test_an_optimizer_that_somebody_holds(self, spoil: Callable[[Any], object], reason: str) -> None:
        optimizer = torch.optim.AdamW(network().parameters())
        kept = spoil(optimizer)
        same, line = with_8bit_state(optimizer)
        assert same is optimizer and reason in line, kept

    def test_state_is_never_lost(self) -> None:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, 1)
        before = {key: value["exp_avg"].clone() for key, value in optimizer.state.items()}
        same, line = with_8bit_state(optimizer)
        assert same is optimizer and "state would be lost" in line
        assert before and all(
            torch.equal(optimizer.state[key]["exp_avg"], value) for key, value in before.items()
        )


# ---- the configuration -------------------------------------------------------------------------------


class TestConfig:
    def test_the_backend_is_checked(self) -> None:
        with pytest.raises(ConfigError, match="'auto', 'memscale', 'bitsandbytes', 'torchao'"):
            Config(use_8bit_optimizer=True, eight_bit_backend="own")
        with pytest.raises(ConfigError, match="not int"):
            Config(use_8bit_optimizer=True, eight_bit_backend=8)  # type: ignore[arg-type]
        assert Config(use_8bit_optimizer=True, eight_bit_backend="TorchAO").eight_bit_backend == "torchao"

    def test_a_backend_without_the_switch_is_a_contradiction(self) -> None:
        with pytest.raises(ConfigError, match="use_8bit_optimizer=True only"):
            Config(eight_bit_backend="torchao")
        with pytest.raises(ConfigError, match="use_8bit_optimizer=True only"):
            Config(mode="aggressive", exact=True, eight_bit_backend="torchao")  # type: ignore[arg-type]
        aggressive = Config(mode="aggressive", eight_bit_backend="torchao")  # type: ignore[arg-type]
        assert aggressive.use_8bit_optimizer and aggressive.effective().eight_bit_backend == "torchao"

    @pytest.mark.parametrize("backend", EIGHT_BIT_BACKENDS)
    def test_round_trip(self, backend: str) -> None:
        config = Config(use_8bit_optimizer=True, eight_bit_backend=backend)
        assert Config.from_json(config.to_json()) == config
        assert config.to_dict()["eight_bit_backend"] == backend
        assert Config.from_dict({"use_8bit_optimizer": True}).eight_bit_backend == "auto"

    def test_it_is_not_announced_as_without_effect(self) -> None:
        from memscale.core.plan_log import fields_without_effect

        fields = fields_without_effect(Config(mode="aggressive"))  # type: ignore[arg-type]
        assert not {"use_mixed_precision", "use_8bit_optimizer", "eight_bit_backend"} & set(fields)


# ---- the real packages -------------------------------------------------------------------------------


def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes.optim")


def torchao() -> Any:
    return pytest.importorskip("torchao.optim")


def _sizes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all state tensors, each storage once, tables and parts of subclasses included."""
    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                visit(getattr(value, name))
        elif isinstance(value, Tensor) and value.dim():  # step counters aside
            storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()

    for state in optimizer.state.values():
        for value in state.values():
            visit(value)
    return sum(storages.values())


def _told(optimizer: torch.optim.Optimizer) -> int:
    layout = layout_of(optimizer)
    assert layout is not None
    places = [(g, i) for g, group in enumerate(optimizer.param_groups) for i in range(len(group["params"]))]
    return sum(layout.shared()) + sum(sum(layout.state(*place)) for place in places)


def _wide(dtype: torch.dtype) -> list[nn.Parameter]:
    shapes = [(256, 300), (64,), (65, 65), (16, 3, 16, 16), (4095,)]
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def _step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    return optimizer.step


class TestBitsAndBytes:
    NAMES = ("AdamW8bit", "Adam8bit", "SGD8bit", "Lion8bit", "AdamW", "RMSprop8bit", "Adagrad8bit")

    def made(self, name: str, parameters: Any) -> torch.optim.Optimizer:
        more = {"momentum": 0.9} if name == "SGD8bit" else {}
        made: torch.optim.Optimizer = getattr(bitsandbytes(), name)(
            parameters, lr=1e-3, weight_decay=0.1, **more
        )
        return made

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", NAMES)
    def test_what_it_takes_is_told(self, name: str, dtype: torch.dtype) -> None:
        optimizer = self.made(name, _wide(dtype))
        told = _told(optimizer)
        _step(optimizer)()
        assert told == _told(optimizer)
        assert told - _sizes(optimizer) == (0 if "Adam" in name else 1024)  # a table that lies there unused
        for parameter in _wide(dtype):
            single = self.made(name, [parameter])
            _step(single)()
            layout = layout_of(single)
            assert layout is not None
            measured = peak_bytes(_step(single))
            bound = sum(layout.scratch(0, 0, on_card=False))
            assert measured <= bound
            if name in ("AdamW8bit", "SGD8bit") and parameter.numel() > 60_000:
                assert bound <= 1.02 * measured

    @pytest.mark.parametrize(
        ("make", "tolerance"),
        [
            (lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.1), 0.02),
            (lambda p: torch.optim.Adam(p, lr=2e-3), 0.02),
            (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01), 0.02),
            (lambda p: Lion(p, lr=1e-4, weight_decay=0.1), None),
        ],
        ids=["adamw", "adam", "sgd", "lion"],
    )
    def test_it_trains_as_the_standard_one(self, make: Make, tolerance: float | None) -> None:
        bitsandbytes()
        model = network()
        start = [parameter.detach().clone() for parameter in model.parameters()]
        made, line = with_8bit_state(make(model.parameters()), "bitsandbytes")
        assert package_of(made) == "bitsandbytes", line
        weights = train(model, made, 20)
        assert all(not torch.equal(a, b) for a, b in zip(start, weights, strict=True))
        if tolerance is not None:
            plain = network()
            for a, b in zip(train(plain, make(plain.parameters()), 20), weights, strict=True):
                assert (a - b).abs().max() <= tolerance

    def test_the_prediction_covers_the_step(self) -> None:
        model, x = network(), torch.randn(32, 64)
        optimizer = bitsandbytes().AdamW8bit(model.parameters())
        fresh = memscale.predict(model, optimizer, QUIET, x)
        assert not any("cannot be traced" in note for note in fresh.plan.notes)
        assert not optimizer.state
        train(model, optimizer, 2)
        later = memscale.predict(model, optimizer, QUIET, x)
        assert fresh.allocated_peak_bytes == later.allocated_peak_bytes
        assert later.by_category["optimizer_state"] == _sizes(optimizer)
        held = sum(p.numel() * 4 for p in model.parameters()) + _sizes(optimizer) + x.numel() * 4

        def step() -> None:
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        measured = held + peak_bytes(step)
        assert measured <= later.allocated_peak_bytes <= 1.03 * measured
        card = memscale.predict(model, optimizer, QUIET, x, device="RTX 3090")
        assert card.by_category["optimizer_state"] == _sizes(optimizer)

    def test_a_class_that_is_not_known_is_not_told(self) -> None:
        assert layout_of(bitsandbytes().AdEMAMix8bit(_wide(torch.float32))) is None


class TestTorchAO:
    """One test: every shape is compiled."""

    def test_what_it_takes_is_told_and_it_trains_as_the_standard_one(self) -> None:
        torchao()
        model, plain = network(), network()
        made, line = with_8bit_state(
            torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=0.01), "torchao"
        )
        assert package_of(made) == "torchao", line
        told = _told(made)
        standard = torch.optim.Adam(plain.parameters(), lr=2e-3, weight_decay=0.01)
        for a, b in zip(train(plain, standard, 20), train(model, made, 20), strict=True):
            assert (a - b).abs().max() <= 0.02
        assert _sizes(made) == told == _told(made)
        for parameter in _wide(torch.float32):
            single = type(made)([parameter])
            _step(single)()
            layout = layout_of(single)
            assert layout is not None
            measured = peak_bytes(_step(single))
            assert measured <= sum(layout.scratch(0, 0, on_card=False))
