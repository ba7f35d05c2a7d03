# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: the bits of a forward under autocast by hand, and when it stands aside."""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.hardware.detect import Hardware, card_hardware, detect
from memscale.techniques.precision import loss_scale_backward, mixed_precision
from memscale.techniques.precision.autocast import AutocastAttachment, AutocastForward
from memscale.techniques.precision.loss_scale import entered
from memscale.torchkit.forward_slot import ForwardSlot, StandIn
from processors import use_flags, why_no_bf16_lstm
from zoo.models import MAIN, Case, numbers
from zoo.models import case as find_case
from zoo.training import Loop, assert_checkpointed, assert_same, built, reference, same_bits, train

PLAIN_AUTOCAST = Loop(steps=3, autocast=True)
ROOMY = memscale.Config(memory_budget="4GiB", use_mixed_precision=True, enable_logging=False, exact=True)
SMALLEST = ROOMY.replace(memory_budget=1)

pytestmark = pytest.mark.usefixtures("bf16_host")

ONEDNN_HAS_BF16 = mixed_precision.onednn_has_bf16
"""As it is without that fixture."""


def host(**changes: Any) -> Hardware:
    return dataclasses.replace(detect(torch.device("cpu")), **changes)


def card(capability: tuple[int, int]) -> Hardware:
    return card_hardware("some card", capability, 16 << 30)


def small(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


# ---- where it helps ----------------------------------------------------------------------------------


class TestFind:
    @pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
    def test_cards_with_bf16(self, capability: tuple[int, int]) -> None:
        (found,) = mixed_precision.find(small(), card(capability))
        assert (found.name, found.path, found.kind, found.dtype) == ("autocast", "", "cuda", torch.bfloat16)
        assert not found.used and found.reason == ""

    def test_a_processor_with_bf16(self) -> None:
        (found,) = mixed_precision.find(small(), host())
        assert (found.kind, found.dtype) == ("cpu", torch.bfloat16)
        assert mixed_precision.why_not(small(), host()) == ""

    @pytest.mark.parametrize(
        ("hardware", "words"),
        [
            (lambda: card((7, 5)), ("FP16", "optimizer=optimizer", "some card")),
            (lambda: card((7, 0)), ("FP16", "optimizer=optimizer")),
            (lambda: card((6, 1)), ("neither in BF16 nor in FP16", "slower")),
            (lambda: host(supports_bf16=False), ("no BF16 instructions", "slower")),
        ],
        ids=["turing", "volta", "pascal", "processor"],
    )
    def test_refused_with_a_reason(self, hardware: Callable[[], Hardware], words: tuple[str, ...]) -> None:
        assert mixed_precision.find(small(), hardware()) == []
        assert all(word in mixed_precision.why_not(small(), hardware()) for word in words)

    def test_refused_where_onednn_cannot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mixed_precision, "onednn_has_bf16", lambda: False)
        assert mixed_precision.find(small(), host()) == []
        assert "oneDNN" in mixed_precision.why_not(small(), host())
        assert mixed_precision.find(small(), card((8, 0)))  # a card does not care

    def test_onednn_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert ONEDNN_HAS_BF16() == (
            torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert ONEDNN_HAS_BF16() is False

    @pytest.mark.parametrize(
        ("model", "word"),
        [
            (lambda: small(torch.bfloat16), "BF16 already"),
            (lambda: small(torch.float16), "FP16"),
            (lambda: small(torch.float64), "no FP32 weights"),
            (nn.Tanh, "no FP32 weights"),
            (lambda: nn.Sequential(small(torch.float16), small()), "FP16"),
        ],
        ids=["bf16", "fp16", "fp64", "none", "fp16-and-fp32"],
    )
    def test_weights_that_it_does_not_suit(self, model: Callable[[], nn.Module], word: str) -> None:
        assert mixed_precision.find(model(), host()) == []
        assert word in mixed_precision.why_not(model(), host())

    @pytest.mark.parametrize("capability", [(7, 0), (7, 5)], ids=["volta", "turing"])
    def test_cards_with_fp16_alone(self, capability: tuple[int, int]) -> None:
        model = small()
        with entered(model, torch.optim.SGD(model.parameters())):
            (found,) = mixed_precision.find(model, card(capability))
            assert (found.kind, found.dtype) == ("cuda", torch.float16) and found.scale is not None
            assert mixed_precision.find(model, card((6, 1))) == []
            (with_bf16,) = mixed_precision.find(model, card((8, 0)))
            assert with_bf16.scale is None

    @pytest.mark.parametrize(
        ("model", "word"),
        [
            (lambda: small(torch.float16), "half precision"),
            (lambda: nn.Sequential(small(torch.bfloat16), small()), "half precision"),
            (lambda: small(torch.float64), "no FP32 weights to train"),
            (lambda: small().requires_grad_(False), "no FP32 weights to train"),
        ],
        ids=["fp16", "bf16-and-fp32", "fp64", "frozen"],
    )
    def test_weights_that_fp16_does_not_suit(self, model: Callable[[], nn.Module], word: str) -> None:
        made = model()
        with entered(made, torch.optim.SGD(made.parameters())):
            assert mixed_precision.find(made, card((7, 5))) == []
            assert word in mixed_precision.why_not(made, card((7, 5)))

    def test_fp32_adapters_on_frozen_fp16_weights(self) -> None:
        model = nn.Sequential(small(torch.float16).requires_grad_(False), small())
        with entered(model, torch.optim.SGD(model[1].parameters())):
            assert mixed_precision.find(model, card((7, 5)))

    def test_fp16_is_refused_where_the_loss_cannot_be_scaled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = small()
        with entered(model, torch.optim.LBFGS(model.parameters())):
            assert "LBFGS" in mixed_precision.why_not(model, card((7, 5)))
        with entered(model, torch.optim.SGD(model.parameters())):
            monkeypatch.setattr(loss_scale_backward, "run_backward", None)
            assert "cannot do in PyTorch" in mixed_precision.why_not(model, card((7, 5)))
            monkeypatch.setattr(mixed_precision.sharding, "is_sharded", lambda tensor: True)
            assert "share weights" in mixed_precision.why_not(model, card((7, 5)))
            assert mixed_precision.find(model, card((7, 5))) == [] and mixed_precision.find(
                model, card((8, 0))
            )

    def test_fp32_adapters_on_bf16_weights(self) -> None:
        assert mixed_precision.find(nn.Sequential(small(torch.bfloat16), small()), host())


CASES = [case for case in MAIN if case.name != "lstm" or not why_no_bf16_lstm()]


# ---- the same bits as autocast by hand ---------------------------------------------------------------


class TestEquality:
    @pytest.mark.long
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_three_steps(self, case: Case) -> None:
        run = train(case, Loop(steps=3), ROOMY)
        assert_same(reference(case, PLAIN_AUTOCAST), run)
        assert [step.technique for step in run.plan.steps] == ["autocast"]
        assert run.plan.exact and not run.plan.active

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_three_steps_checkpointed(self, case: Case) -> None:
        run = train(case, Loop(steps=3), SMALLEST, sample=True)
        assert_same(reference(case, PLAIN_AUTOCAST), run)
        assert_checkpointed(run)

    @pytest.mark.parametrize("name", ["gpt2", "convnet"])
    def test_accumulation_on_frozen_weights(self, name: str) -> None:
        case = find_case(name)
        loop = Loop(steps=2, accumulate=2, freeze=True)
        run = train(case, loop, SMALLEST)
        assert_same(reference(case, dataclasses.replace(loop, autocast=True)), run)

    @pytest.mark.parametrize("config", [ROOMY, SMALLEST], ids=["roomy", "smallest"])
    def test_a_weight_used_inside_and_outside_of_a_checkpoint(self, config: memscale.Config) -> None:
        """Its BF16 cast is made once and shared; its gradient is summed in BF16."""
        case = Case(
            "shared", _SharedWeight, numbers(64, 48, 32), loss=lambda out: out.float().square().mean()
        )
        run = train(case, Loop(steps=3), config)
        assert_same(reference(case, PLAIN_AUTOCAST), run)
        assert bool(run.plan.active) == (config is SMALLEST)

    def test_outputs_have_the_dtypes_of_autocast(self) -> None:
        torch.manual_seed(0)
        model, x = _ManyDtypes(), torch.randn(3, 4)
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x)
        memscale.wrap(model, ROOMY, sample_input=x)
        output = model(x)
        assert output.keys() == expected.keys()
        assert {output[name].dtype for name in output} == {torch.bfloat16, torch.float32, torch.int64}
        assert all(same_bits(expected[name], output[name]) for name in output)

    def test_two_backwards_through_one_graph(self) -> None:
        grads = []
        for by_hand in (True, False):
            torch.manual_seed(0)
            model, x = _SharedWeight(), torch.randn(64, 48, 32)
            if by_hand:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(x).float().square().mean()
            else:
                memscale.wrap(model, SMALLEST)
                loss = model(x).float().square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            grads.append([parameter.grad for parameter in model.parameters()])
        assert all(same_bits(a, b) for a, b in zip(*grads, strict=True))

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_compiled_from_outside(self, backend: str) -> None:
        torch.manual_seed(0)
        model, x = small(), torch.randn(3, 4)
        with torch.autocast("cpu", torch.bfloat16):
            expected = torch.compile(copy.deepcopy(model), backend=backend)(x)
        memscale.wrap(model, ROOMY, sample_input=x)
        output = torch.compile(model, backend=backend)(x)
        assert expected.dtype is torch.bfloat16 and same_bits(expected, output)
        torch._dynamo.reset()

    @pytest.mark.parametrize("config", [ROOMY, SMALLEST], ids=["roomy", "smallest"])
    def test_compiled_with_checkpoints(self, config: memscale.Config) -> None:
        """All inside of one compiled region; the first batch is planned for in the midst of it."""
        runs = []
        for by_hand in (True, False):
            torch.manual_seed(0)
            model = _SharedWeight()
            if not by_hand:
                memscale.wrap(model, config)
            compiled = torch.compile(model, backend="aot_eager")
            for x in torch.randn(2, 64, 48, 32):
                with torch.autocast("cpu", torch.bfloat16, enabled=by_hand):
                    output = compiled(x)
                output.float().square().mean().backward()
            runs.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
            torch._dynamo.reset()
        assert runs[0][0].dtype is torch.bfloat16
        assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))


class _ManyDtypes(nn.Module):
    """Autocast computes products in BF16, losses in FP32, and leaves integers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        best = logits.argmax(-1)
        return {"logits": logits, "best": best, "loss": nn.functional.mse_loss(logits, torch.ones(3, 2))}


class _SharedWeight(nn.Module):
    """A projection called inside a block, in a second block, and once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(_Block(self.shared) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        projected: Tensor = self.shared(x)
        return projected


class _Block(nn.Module):
    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.up, self.shared = nn.Linear(32, 32), shared

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.shared(torch.sigmoid(self.shared(self.up(x)))))


# ---- when it stands aside ----------------------------------------------------------------------------


class TestStandsAside:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_loops_own_autocast(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        model, x = small(), torch.randn(3, 4)
        with torch.autocast("cpu", dtype):
            expected = model(x)
            memscale.wrap(model, ROOMY)
            output = model(x)
        assert output.dtype is dtype and same_bits(expected, output)
        plan = memscale.executor_of(model).plan
        assert plan is not None and not plan.steps
        assert any("opens autocast itself" in note for note in plan.notes)

    def test_a_loop_that_opens_autocast_later(self) -> None:
        torch.manual_seed(0)
        model, x = small(), torch.randn(3, 4)
        memscale.wrap(model, ROOMY, sample_input=x)
        assert model(x).dtype is torch.bfloat16
        with torch.autocast("cpu", torch.float16):
            assert model(x).dtype is torch.float16
        assert model(x).dtype is torch.bfloat16

    def test_a_gradient_scaler_of_the_loop(self) -> None:
        """Its autocast in FP16 and its scaler work as without MemScale."""
        weights = []
        for wrapped in (False, True):
            torch.manual_seed(0)
            model = small()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            if wrapped:
                memscale.wrap(model, SMALLEST)
            for step in range(3):
                x = torch.full((5, 4), 0.5 + step)
                with torch.autocast("cpu", torch.float16):
                    loss = model(x).float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            weights.append([parameter.detach().clone() for parameter in model.parameters()])
        assert all(same_bits(a, b) for a, b in zip(*weights, strict=True))

    def test_evaluation_is_as_before(self) -> None:
        torch.manual_seed(0)
        model, x = small(), torch.randn(3, 4)
        with torch.no_grad():
            expected = model(x)
        memscale.wrap(model, ROOMY, sample_input=x)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert same_bits(expected, model(x))
        assert model.eval()(x).dtype is torch.bfloat16  # gradients are wanted: a step without dropout

    def test_functorch(self) -> None:
        model, x = small(), torch.randn(3, 4)
        expected = torch.func.vmap(model)(x)
        memscale.wrap(model, ROOMY, sample_input=x)
        assert same_bits(expected, torch.func.vmap(model)(x))

    def test_without_the_hardware_the_step_is_plain(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        use_flags(monkeypatch, ())
        torch.manual_seed(0)
        model, x = small(), torch.randn(3, 4)
        expected = model(x)
        with caplog.at_level(logging.INFO, "memscale"):
            memscale.wrap(model, ROOMY.replace(enable_logging=True), sample_input=x)
        assert "autocast: the processor has no BF16 instructions" in caplog.text
        assert "use_mixed_precision" not in caplog.text
        assert same_bits(expected, model(x))

    def test_an_error_in_the_model_leaves_autocast(self) -> None:
        model = small()
        memscale.wrap(model, ROOMY, sample_input=torch.randn(3, 4))
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.randn(3, 5))
        assert not torch.is_autocast_enabled("cpu")
        assert model(torch.randn(3, 4)).dtype is torch.bfloat16


# ---- attaching and undoing ---------------------------------------------------------------------------


class _Watch(StandIn):
    calls_through = True

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__(module, original)
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.original(*args, **kwargs)


@pytest.fixture
def attached() -> Iterator[tuple[nn.Module, AutocastAttachment]]:
    model = small()
    attachment = AutocastAttachment(model, "cpu", torch.bfloat16)
    attachment.attach()
    yield model, attachment


class TestAttachment:
    def test_undo_leaves_no_trace(self) -> None:
        model = small()
        before = dict(model.__dict__)
        attachment = AutocastAttachment(model, "cpu", torch.bfloat16)
        for _ in range(2):
            attachment.attach()
            assert model(torch.ones(1, 4)).dtype is torch.bfloat16 and attachment.used
            attachment.undo()
            assert model.__dict__ == before and attachment.used
            assert model(torch.ones(1, 4)).dtype is torch.float32

    def test_it_says_what_became_of_it(self, attached: tuple[nn.Module, AutocastAttachment]) -> None:
        model, attachment = attached
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(1, 4))
        assert not attachment.used and "opens autocast itself" in attachment.reason
        model(torch.ones(1, 4))
        assert attachment.used and attachment.reason == ""

    def test_beneath_the_watch(self) -> None:
        model = small()
        slot = ForwardSlot(model, "")
        watch = _Watch(model, slot.present)
        slot.put(watch)
        attachment = AutocastAttachment(model, "cpu", torch.bfloat16, beneath=watch)
        attachment.attach()
        assert model.__dict__["forward"] is watch and isinstance(watch.original, AutocastForward)
        assert model(torch.ones(1, 4)).dtype is torch.bfloat16 and watch.calls == 1
        attachment.undo()
        assert model(torch.ones(1, 4)).dtype is torch.float32 and watch.calls == 2
        slot.remove()
        assert "forward" not in model.__dict__

    def test_copies_are_plain(self, attached: tuple[nn.Module, AutocastAttachment]) -> None:
        model, _ = attached
        twin = copy.deepcopy(model)
        assert twin(torch.ones(1, 4)).dtype is torch.float32
        assert model(torch.ones(1, 4)).dtype is torch.bfloat16

    def test_a_saved_model_is_plain(self, attached: tuple[nn.Module, AutocastAttachment]) -> None:
        model, _ = attached
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert loaded(torch.ones(1, 4)).dtype is torch.float32

    def test_it_does_not_keep_the_model_alive(self) -> None:
        import weakref

        model = small()
        attachment = AutocastAttachment(model, "cpu", torch.bfloat16)
        attachment.attach()
        gone = weakref.ref(model)
        del model
        assert gone() is None

    def test_detach_gives_the_bits_of_before(self) -> None:
        torch.manual_seed(0)
        model, x = small(), torch.randn(3, 4)
        expected = model(x)
        memscale.wrap(model, ROOMY, sample_input=x)
        assert model(x).dtype is torch.bfloat16
        memscale.detach(model)
        assert same_bits(expected, model(x))


# ---- what the plan says ------------------------------------------------------------------------------


class TestPlan:
    def test_a_chain_runs_beneath_autocast(self) -> None:
        """Both change the forward of the model itself."""
        layer = nn.Linear(32, 64), nn.Sigmoid(), nn.Linear(64, 32), nn.Tanh()
        parts = [part for _ in range(6) for part in copy.deepcopy(layer)]
        case = Case(
            "chain",
            lambda: copy.deepcopy(nn.Sequential(*parts)),
            numbers(512, 32),
            loss=lambda out: out.float().square().mean(),
        )
        run = train(case, Loop(steps=3), SMALLEST)
        assert_same(train(case, PLAIN_AUTOCAST), run)
        assert any(choice.joined for choice in run.plan.active)
        assert [step.technique for step in run.plan.steps] == ["autocast"]

    @pytest.mark.parametrize("device", ["cpu", "RTX 3090"])
    def test_the_prediction_is_that_of_autocast_by_hand(self, device: str) -> None:
        case = find_case("bert")  # without a key/value cache, which a plan would have keep nothing
        batch = case.batch(0)
        asked = memscale.predict(built(case), config=ROOMY, sample_input=batch, device=device)
        model = built(case)
        kind = "cpu" if device == "cpu" else "cuda"
        forward = model.forward

        def by_hand(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(kind, dtype=torch.bfloat16):
                return forward(*args, **kwargs)

        model.forward = by_hand
        plain = memscale.predict(
            model, config=ROOMY.replace(use_mixed_precision=False), sample_input=batch, device=device
        )
        assert asked.allocated_peak_bytes == plain.allocated_peak_bytes
        assert asked.by_category == plain.by_category
        assert [step.technique for step in asked.plan.steps] == ["autocast"]

    def test_a_card_without_bf16_is_told(self) -> None:
        prediction = memscale.predict(small(), config=ROOMY, sample_input=torch.randn(3, 4), device="T4")
        assert not prediction.plan.steps
        assert any("optimizer=optimizer" in note for note in prediction.plan.notes)
