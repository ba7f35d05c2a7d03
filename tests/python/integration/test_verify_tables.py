# SPDX-License-Identifier: Apache-2.0
"""What `verify` says: a row per kind, bounds where a technique rounds differently, one block in the log."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_restore import assert_as_before, image
from torch import Tensor, nn

import memscale
import tallies
from calls import beside
from memscale import Config
from memscale.core import double_run, verification
from memscale.core.double_run import BOUND, double_batch, errors_of, errors_of_each, in_double
from memscale.core.executor import Executor
from memscale.core.verification import Difference, VerifyReport
from memscale.errors import VerificationError
from memscale.techniques import step_table
from memscale.techniques.step_table import StepTechnique
from memscale.torchkit.forward_slot import ForwardSlot, StandIn
from patched import use_techniques
from zoo.blocks import Block, Stack, inputs
from zoo.models import case
from zoo.training import built, seed

FORCED = Config(memory_budget=1, enable_logging=False, exact=False)


class _Rounding(StandIn):
    """Multiplies in the other order, and by a factor that is 1 if the technique is right."""

    def __init__(self, module: nn.Module, original: Any, factor: float) -> None:
        super().__init__(module, original)
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        if self.passive:
            return self.original(x)
        halves = [self.original(part) for part in x.chunk(2)]
        return torch.cat(halves) * self.factor * 3.0 / 3.0


class RoundingAttachment:
    """A step technique that rounds differently, and with another factor is wrong."""

    name, used, reason, beneath = "rounding", True, "", None

    def __init__(self, module: nn.Module, path: str, factor: float) -> None:
        self.path, self.factor, self.slot = path, factor, ForwardSlot(module, path)

    def attach(self) -> None:
        self.slot.put(_Rounding(self.slot.module, self.slot.present, self.factor))

    def undo(self) -> None:
        self.slot.remove()


@contextmanager
def rounding(factor: float = 1.0, exact: bool = False) -> Iterator[None]:
    """Has that technique in the table inside the block, attached to every linear layer named "up"."""

    def find(model: nn.Module, _: object) -> Sequence[Any]:
        named = model.named_modules()
        return [RoundingAttachment(module, path, factor) for path, module in named if path.endswith(".up")]

    row = StepTechnique("rounding", "rounds", exact, True, lambda config: True, find)
    before = step_table.STEP_TECHNIQUES
    patch = pytest.MonkeyPatch()
    use_techniques(patch, (*before, row))
    try:
        yield
    finally:
        patch.undo()


class NoDouble(Block):
    """Has a kernel that takes no float64."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise RuntimeError('"addmm" not implemented for float64\nand more')
        return super().forward(x)


def model(kind: type[Block] = Block) -> nn.Module:
    seed()
    return Stack(kind).train()


class _Slanted(_Rounding):
    """As it, and a thousandth too much in the gradient of the bias."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.passive:
            return self.original(x)
        bias = self.module.bias
        return super().__call__(x) + (bias - bias.detach()) * 1e-3


class WithFaint(Stack):
    """Blocks and a layer whose gradients are a millionth of theirs."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.faint = nn.ModuleDict({"up": nn.Linear(inputs(0)[0].shape[-1], 4)})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean() + self.faint["up"](x).mean() * 1e-6


class TestInexactTechniques:
    def test_within_the_bound_passes(self) -> None:
        with rounding():
            report = memscale.verify(model(), inputs(0), config=FORCED)
        assert not report.equal and report.passed and report.inexact == ("rounding",)
        assert [item.kind for item in report.errors] == ["loss", "gradient"] and not report.no_float64
        for item in report.errors:
            assert 0 < item.plain < 1e-5 and item.planned <= BOUND * max(item.plain, item.unit)
        text = report.table()
        assert "verified" in text and "measured against float64" in text and "1.5 ×" in text
        report.require()

    def test_a_wrong_technique_does_not(self) -> None:
        with rounding(factor=1 + 1e-5):
            report = memscale.verify(model(), inputs(0), config=FORCED)
        assert not report.passed and "NOT WITHIN BOUNDS" in report.summary()
        assert "TOO LARGE" in report.table() and "gradient" in report.table()
        with pytest.raises(VerificationError, match="err by"):
            report.require()

    def test_one_small_wrong_gradient_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is a millionth of all gradients, so the sum over all does not show it."""
        seed()
        subject = WithFaint().train()
        with rounding():
            assert memscale.verify(subject, inputs(0), config=FORCED).passed
        put = RoundingAttachment.attach

        def attach(self: RoundingAttachment) -> None:
            slanted = _Slanted(self.slot.module, self.slot.present, 1.0)
            self.slot.put(slanted) if self.path == "faint.up" else put(self)

        monkeypatch.setattr(RoundingAttachment, "attach", attach)
        with rounding():
            report = memscale.verify(subject, inputs(0), config=FORCED)
        assert all(item.within for item in report.errors), "the sum shows it, so this is a test of nothing"
        assert [item.name for item in report.each if not item.within] == ["faint.up.bias"]
        assert not report.passed and "gradient 'faint.up.bias' errs by 1.0e-03" in report.summary()
        assert any(line.startswith("faint.up.bias") and "TOO" in line for line in report.table().splitlines())

    def test_a_technique_that_calls_itself_exact_has_no_bound(self) -> None:
        with rounding(exact=True):
            report = memscale.verify(model(), inputs(0), config=FORCED.replace(exact=True))
        assert not report.passed and not report.errors and "NOT EQUAL" in report.summary()

    def test_the_model_is_left_as_it_was(self) -> None:
        subject = model()
        before = image(subject)
        with rounding():
            memscale.verify(subject, inputs(0), config=FORCED)
        assert_as_before(before, image(subject))

    def test_without_float64_the_plain_step_is_the_measure(self) -> None:
        with rounding():
            report = memscale.verify(model(NoDouble), inputs(0), config=FORCED)
        assert report.passed and report.no_float64 == 'RuntimeError: "addmm" not implemented for float64'
        assert "cannot be computed in float64" in report.table() and "32 roundings" in report.summary()
        with rounding(factor=1 + 1e-4):
            assert not memscale.verify(model(NoDouble), inputs(0), config=FORCED).passed

    def test_the_check_before_training(self, caplog: pytest.LogCaptureFixture) -> None:
        config = FORCED.replace(verify_correctness=True, enable_logging=True)
        with rounding(), caplog.at_level(logging.INFO, "memscale"):
            subject = memscale.wrap(model(), config)
            subject(*inputs(0)).mean().backward()
        blocks = [record.getMessage() for record in caplog.records if "verification" in record.getMessage()]
        assert len(blocks) == 1 and "measured against float64" in blocks[0]
        memscale.detach(subject)
        with rounding(factor=1.01):
            subject = memscale.wrap(model(), config)
            with pytest.raises(VerificationError):
                subject(*inputs(0))
        assert "forward" not in subject.__dict__


@pytest.mark.usefixtures("bf16_host")
class TestPrecision:
    def test_a_plan_under_autocast_is_compared_under_autocast(self) -> None:
        gpt2 = case("gpt2")
        config = Config(memory_budget=1, enable_logging=False, use_mixed_precision=True)
        report = memscale.verify(built(gpt2), gpt2.batch(0), config=config)
        assert report.equal and "autocast" in report.techniques
        assert report.baseline == "plain PyTorch under the same autocast" in report.summary()

    def test_the_users_autocast(self) -> None:
        gpt2 = case("gpt2")
        with torch.autocast("cpu", torch.bfloat16):
            report = memscale.verify(built(gpt2), gpt2.batch(0))
        assert report.equal and "bfloat16 autocast" in report.summary()

    def test_techniques_of_the_model_itself_are_part_of_the_check(self) -> None:
        """On the first batch the model's forward is called beneath the watch: with what lies there now."""
        seen: list[tuple[bool, bool]] = []
        handles: list[Any] = []

        def begun(executor: Executor, *rest: Any) -> None:
            handles.append(executor.model.register_forward_hook(lambda *_: None))

        def made(step: Any, executor: Executor, *rest: Any) -> None:
            handles.pop().remove()
            checkpointed = any(item.name == "checkpoint" for item in executor.in_force.attached)
            seen.append((checkpointed, step["loss", ""].dtype is torch.float32))

        autocast_is_on = functools.partial(torch.is_autocast_enabled, "cpu")
        tallies.clear()  # what code reaches is put back after a check
        subject = model()
        subject.blocks[0].up.register_forward_hook(lambda *_: tallies.add("lowered", autocast_is_on()))
        config = Config(
            memory_budget=1, enable_logging=False, use_mixed_precision=True, verify_correctness=True
        )
        memscale.wrap(subject, config)
        with beside({verification.one_step: begun}, after={verification.one_step: made}):
            subject(*inputs(0)).mean().backward()
        assert len(seen) == 2 and seen == [(False, True), (True, True)]
        assert tallies.of("lowered") >= 3
        memscale.detach(subject)


class TestTable:
    ROWS = (
        Difference("loss", "", True, 0.0),
        *(Difference("gradient", f"blocks.{n}.weight", n != 3, 0.5 * (n == 3), 0.1) for n in range(20)),
        Difference("buffer", "mean", True, 0.0),
    )  # fmt: skip

    def test_a_row_per_kind_those_that_differ_first(self) -> None:
        lines = VerifyReport(self.ROWS, 2).table().splitlines()
        assert lines[0].startswith("NOT EQUAL: gradient 'blocks.3.weight' differs by up to 0.5")
        kinds = [line.split()[0] for line in lines[4:7]]
        assert kinds == ["gradients", "loss", "buffers"]
        assert lines[4].split() == ["gradients", "20", "19", "0.5", "1.0e-01", "blocks.3.weight"]
        assert lines[-1].split()[:2] == ["gradient", "blocks.3.weight"]

    def test_many_differences_are_counted(self) -> None:
        rows = tuple(Difference("gradient", str(number), False, 1.0, 1.0) for number in range(40))
        assert "and 28 more" in VerifyReport(rows, 1).table()

    def test_equal_is_short(self) -> None:
        report = VerifyReport(self.ROWS[:1], 1)
        assert report.passed and report.equal and len(report.table().splitlines()) == 5


class TestFloat64:
    def test_the_model_is_float64_inside_and_itself_outside(self) -> None:
        subject = built(case("lstm"))
        before = {name: (id(value), value.clone()) for name, value in subject.named_parameters()}
        with in_double(subject):
            assert {value.dtype for value in subject.parameters()} == {torch.float64}
            assert subject(*case("lstm").batch(0)).dtype == torch.float64
        for name, value in subject.named_parameters():
            assert id(value) == before[name][0] and torch.equal(value, before[name][1])
        assert torch.get_default_dtype() is torch.float32

    def test_tied_weights_stay_tied(self) -> None:
        gpt2 = built(case("gpt2"))
        with in_double(gpt2):
            assert gpt2.lm_head.weight is gpt2.transformer.wte.weight

    def test_requests_for_float32_and_random_numbers(self) -> None:
        x = torch.randn(64, dtype=torch.float64)

        def draws() -> list[Tensor]:
            own = torch.Generator().manual_seed(4)
            noise = (
                torch.randn(8),
                torch.rand(8),
                torch.empty(8).bernoulli_(0.3),
                torch.randn(8, generator=own),
            )
            return [*noise, torch.randint(0, 9, (8,))]

        torch.manual_seed(3)
        plain = draws()
        kept = nn.functional.dropout(x.float(), 0.4) != 0
        with in_double(nn.Identity()):
            torch.manual_seed(3)
            drawn = draws()
            assert torch.equal(kept, nn.functional.dropout(x, 0.4) != 0)
            assert x.float().dtype is torch.float64 and x.to(torch.bfloat16).dtype is torch.float64
            assert torch.softmax(x, 0, dtype=torch.float32).dtype is torch.float64
        for one, other in zip(plain, drawn, strict=True):
            assert torch.equal(one.double(), other.double())
        assert [value.dtype for value in drawn] == [torch.float64] * 4 + [torch.int64]

    def test_products_of_groups(self) -> None:
        rows, columns, offs = torch.randn(8, 16), torch.randn(3, 16, 4), torch.tensor([2, 2, 8])
        expected = torch.cat([rows[:2] @ columns[0], rows[2:8] @ columns[2]]).double()
        made = double_run.grouped_product(rows.double(), columns.double(), offs.int())
        assert torch.allclose(made, expected, atol=1e-5)
        gradient = double_run.grouped_product(rows.double().t(), made, offs.int())
        assert gradient.shape == (3, 16, 4) and torch.equal(gradient[1], torch.zeros(16, 4).double())
        other = double_run.grouped_product(columns.double().transpose(1, 2), rows.double().t(), offs.int())
        assert torch.allclose(other.t(), made)

    def test_integers_of_a_batch_stay(self) -> None:
        made = double_batch({"ids": torch.arange(3), "x": [torch.ones(2, requires_grad=True)], "name": "a"})
        assert made["ids"].dtype is torch.int64 and made["x"][0].dtype is torch.float64
        assert made["x"][0].requires_grad and made["name"] == "a"

    def test_errors(self) -> None:
        truth = {0: torch.tensor([3.0, 4.0], dtype=torch.float64)}
        item = errors_of("loss", truth, {0: torch.tensor([3.0, 4.5])}, {0: torch.tensor([3.0, 5.0])})
        assert item.plain == pytest.approx(0.1) and item.planned == pytest.approx(0.2)
        assert not item.within and item.is_other_step
        nothing = {0: torch.tensor(float("nan"))}
        assert errors_of("loss", {0: nothing[0].double()}, nothing, nothing).within

    def test_errors_of_single_gradients(self) -> None:
        right = {"w": torch.full((100,), 2.0), "key": torch.zeros(4), "lucky": torch.tensor([3.0])}
        plain = {"w": right["w"] * (1 + 1e-6), "key": torch.full((4,), 1e-7), "lucky": right["lucky"]}

        def errors(**changed: Tensor) -> dict[str, bool]:
            truth = {("gradient", name): value.double() for name, value in right.items()}
            own = {("gradient", name): value for name, value in plain.items()}
            theirs = {**own, **{("gradient", name): value for name, value in changed.items()}}
            whole = errors_of("gradient", truth, own, theirs)
            return {item.name: item.within for item in errors_of_each(truth, own, theirs, whole)}

        good = {"w": True, "key": True, "lucky": True}
        assert errors() == good
        assert errors(lucky=right["lucky"] * (1 + 1e-6)) == good  # plain has hit it by luck
        assert errors(key=torch.full((4,), -1e-6)) == good  # ten times plain's error, and still nothing
        assert errors(key=torch.full((4,), 1e-5)) == {**good, "key": False}
        assert errors(lucky=right["lucky"] * (1 + 1e-5)) == {**good, "lucky": False}

    def test_nan_is_no_error_where_plain_is_nan(self) -> None:
        nothing = {0: torch.tensor(float("nan"))}
        assert errors_of("loss", {0: nothing[0].double()}, nothing, nothing).within
