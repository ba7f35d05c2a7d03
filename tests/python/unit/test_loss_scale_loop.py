# SPDX-License-Identifier: Apache-2.0
"""FP16 with loss scaling: what the loop sees of it, when it stands aside, how long it lasts."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memscale
from loss_scale_samples import (
    ROOMY,
    SMALLEST,
    Hand,
    Wrapped,
    fp16_host,
    is_from_half,
    model_and_optimizer,
    plain_loss,
    ran,
    tiny,
    tiny_batch,
    tokens,
)
from memscale.errors import BudgetError
from memscale.techniques.precision import loss_scale, loss_scale_backward
from memscale.techniques.precision.autocast import AutocastAttachment
from memscale.techniques.precision.loss_scale import STATE_KEY, LossScale
from zoo.training import same_bits

__all__ = ["fp16_host"]  # the fixture of every test here


# ---- what the loop sees ------------------------------------------------------------------------------


class TestWhatTheLoopSees:
    @pytest.fixture
    def loop(self) -> Wrapped:
        return Wrapped(*model_and_optimizer())

    def test_hooks_of_leaves_see_true_gradients(self, loop: Wrapped) -> None:
        weight, seen = loop.model.words.weight, []
        order = [weight.register_hook(lambda grad: seen.append(grad.clone())) for _ in range(2)]
        weight.register_post_accumulate_grad_hook(lambda value: seen.append(value.grad.clone()))
        loop.backward(plain_loss(loop, 0))
        assert len(seen) == 3 and all(same_bits(weight.grad, grad) for grad in seen)
        assert list(weight._backward_hooks) == [handle.id for handle in order]

    def test_gradients_of_inputs_outputs_and_what_lies_between(self, loop: Wrapped) -> None:
        def gradients() -> list[Tensor]:
            prefix = torch.full((16,), 0.5).requires_grad_()
            output = loop.forward(tokens(0), prefix)
            loss = output["logits"].square().mean()
            wanted = [loss, prefix, output["logits"], loop.model.middle, torch.ones((), requires_grad=True)]
            return list(torch.autograd.grad(loss, wanted, allow_unused=True))

        scaled = gradients()
        loop.loss_scale.value = 1.0
        plain = gradients()
        assert scaled[-1] is None and plain.pop() is None
        for one, other in zip(scaled[:-1], plain, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-4)

    def test_gradients_that_are_kept_between(self, loop: Wrapped) -> None:
        """`backward(inputs=...)` adds to `.grad` of what is no leaf: true gradients there, too."""
        loss, middle = loop.forward(tokens(0))["logits"].square().mean(), loop.model.middle
        loss.backward(inputs=[middle], retain_graph=True)
        kept = middle.grad.clone()
        (true,) = torch.autograd.grad(loss, middle)
        torch.testing.assert_close(kept, true, rtol=2e-2, atol=1e-4)

    def test_other_models_are_left_alone(self, loop: Wrapped) -> None:
        other, seen = nn.Linear(4, 2), []
        output = other(torch.ones(1, 4))
        output.register_hook(lambda grad: seen.append(grad.clone()))
        output.sum().backward()
        assert torch.equal(seen[0], torch.ones(1, 2))

    def test_gradients_too_small_for_fp16(self, loop: Wrapped) -> None:
        """What it is all for."""
        weight = loop.model.blocks[0].up.weight
        loss = loop.forward(tokens(0))["logits"].square().mean() * 1e-6
        (kept,) = torch.autograd.grad(loss, weight, retain_graph=True)
        loop.loss_scale.value = 1.0
        (lost,) = torch.autograd.grad(loss, weight)
        assert (kept != 0).float().mean() > 0.9 and (lost == 0).float().mean() > 0.5

    def test_a_thread_beside_it(self, loop: Wrapped) -> None:
        """A backward without scale, through a weight whose scaled backward is under way."""
        weight = loop.model.gain
        beside = (weight * 3).sum()
        found: list[Tensor] = []

        def meanwhile(grad: Tensor) -> None:
            thread = threading.Thread(target=lambda: found.extend(_unscaled(beside, weight)))
            thread.start()
            thread.join()

        loss = plain_loss(loop, 0)
        loop.model.middle.register_hook(meanwhile)
        loss.backward()
        assert torch.equal(found[0], torch.full_like(weight, 3))

    def test_a_tensor_inside_of_a_reentrant_checkpoint_is_refused(self) -> None:
        """One that is neither a weight nor an argument: nobody can tell it from the checkpoint's own."""
        beside = torch.ones(16, requires_grad=True)

        def block(module: nn.Module, x: Tensor) -> Any:
            return checkpoint(lambda y: module(y) * beside, x, use_reentrant=True)

        loop = Wrapped(*model_and_optimizer(wrapped_block=block))
        with pytest.raises(RuntimeError, match=r"is no nn\.Parameter"):
            loop.backward(plain_loss(loop, 0))
        loop.optimizer.add_param_group({"params": [beside]})  # known: a weight
        beside.grad = None
        loop.optimizer.zero_grad()
        loop.backward(plain_loss(loop, 0))
        assert beside.grad.abs().max() < 64  # not a thousand times as much

    def test_a_number_inside_of_a_backward_is_refused(self, loop: Wrapped) -> None:
        beside = loop.model.gain.square().sum()
        loss = plain_loss(loop, 0)
        loop.model.middle.register_hook(lambda grad: beside.backward())
        with pytest.raises(RuntimeError, match="a backward of a single number inside"):
            loss.backward()

    def test_gradients_that_are_sparse_or_complex(self) -> None:
        torch.manual_seed(0)
        table, turn = nn.Embedding(6, 4, sparse=True), nn.Parameter(torch.rand(3, dtype=torch.complex64))
        model, body = nn.Sequential(table, nn.Linear(4, 3)), torch.tensor([1, 1, 4])
        model.register_parameter("turn", turn)
        memscale.wrap(model, ROOMY, sample_input=body, optimizer=torch.optim.SGD(model.parameters()))
        for bad in (False, True):
            model.zero_grad()
            product = model(body) * turn
            (product.abs().sum() * (1e9 if bad else 1e-3)).backward()
            finite = [bool(grad.isfinite().all()) for grad in (table.weight.grad.to_dense(), turn.grad)]
            assert finite[0] is not bad
            assert 0 < table.weight.grad.to_dense().abs().nan_to_num().max() < 1 or bad


def _unscaled(loss: Tensor, weight: Tensor) -> list[Tensor]:
    """As a backward that begins in C++."""
    engine = torch.autograd.Variable._execution_engine
    return list(engine.run_backward((loss,), (torch.ones(()),), False, False, (weight,), False))


# ---- when it stands aside, and what the plan says ----------------------------------------------------


class TestStandsAside:
    def test_without_an_optimizer(self) -> None:
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memscale.wrap(model, ROOMY, sample_input=tiny_batch())
        for rows in (3, 5):
            assert not is_from_half(model(tiny_batch(rows)))
            optimizer.step()  # seen, and still not named
        notes = memscale.executor_of(model).plan.notes
        assert any("optimizer=optimizer" in note for note in notes) and not loss_scale.active()

    def test_the_loops_own_autocast_and_scaler(self) -> None:
        hand, mine = Hand(*model_and_optimizer()), Hand(*model_and_optimizer())
        scale = LossScale(mine.model, mine.optimizer)
        AutocastAttachment(mine.model, "cpu", torch.float16, scale=scale).attach()
        first, second = (ran(loop, lambda loop, step: loop.backward(plain_loss(loop, step)))
                         for loop in (hand, mine))  # fmt: skip
        assert all(a is b or same_bits(a, b) for a, b in zip(first, second, strict=True))
        assert scale.value == 65536.0 and not scale.is_due(mine.optimizer)

    def test_a_copy_computes_in_fp32(self) -> None:
        model, batch = tiny(), tiny_batch()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memscale.wrap(model, ROOMY, sample_input=batch, optimizer=optimizer)
        twin = copy.deepcopy(model)
        assert is_from_half(model(batch)) and not is_from_half(twin(batch))
        assert twin(batch).dtype is torch.float32
        assert not is_from_half(twin(tiny_batch(7)))
        assert is_from_half(model(batch)) and len(loss_scale.active()) == 1

    def test_functorch(self) -> None:
        loop = Wrapped(*model_and_optimizer())

        def loss(gain: Tensor) -> Tensor:
            return (gain * 3).sum()

        assert torch.equal(torch.func.grad(loss)(loop.model.gain), torch.full((12,), 3.0))

    def test_evaluation(self) -> None:
        model = tiny()
        scale = LossScale(model, torch.optim.SGD(model.parameters()))
        AutocastAttachment(model, "cpu", torch.float16, scale=scale).attach()
        assert is_from_half(model(tiny_batch()))
        with torch.no_grad():
            assert not is_from_half(model(tiny_batch()))

    def test_a_given_optimizer_must_be_one(self) -> None:
        with pytest.raises(TypeError, match="optimizer is a str"):
            memscale.wrap(tiny(), ROOMY, optimizer="adamw")


class TestLife:
    def test_the_scale_goes_on(self) -> None:
        """In the next plan, in the next wrap, and in a run that is resumed from a checkpoint."""
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memscale.wrap(model, ROOMY, sample_input=tiny_batch(), optimizer=optimizer)
        scale = memscale.executor_of(model).loss_scale
        scale.value = 512.0
        assert is_from_half(model(tiny_batch(5)))  # re-planned
        assert loss_scale.active() == [scale] and scale.value == 512.0
        memscale.wrap(model, SMALLEST, sample_input=tiny_batch(), optimizer=optimizer)
        (scale,) = loss_scale.active()
        assert scale is memscale.executor_of(model).loss_scale and scale.value == 512.0
        state = copy.deepcopy(optimizer.state_dict())
        assert state[STATE_KEY]["scale"] == 512.0
        scale.value = 1.0
        optimizer.load_state_dict(state)
        assert scale.value == 512.0
        memscale.detach(model)
        assert STATE_KEY not in optimizer.state_dict()

    def test_a_wrap_that_fails_leaves_the_old_one(self) -> None:
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memscale.wrap(model, ROOMY, sample_input=tiny_batch(), optimizer=optimizer)
        with pytest.raises(BudgetError):
            memscale.wrap(model, SMALLEST.replace(strict_budget=True), sample_input=tiny_batch())
        assert is_from_half(model(tiny_batch(9))) and len(loss_scale.active()) == 1

    def test_nothing_is_left_after_many_steps(self) -> None:
        loop = Wrapped(*model_and_optimizer())
        counts = []
        for _ in range(3):
            for step in range(20):
                loop.backward(plain_loss(loop, step % 2))
                loop.step()
            gc.collect()
            counts.append(len(gc.get_objects()))
        assert abs(counts[2] - counts[1]) < 20 and not loss_scale_backward._running

    @pytest.mark.parametrize("optimizer", [True, False])
    def test_a_card_by_name(self, monkeypatch: pytest.MonkeyPatch, optimizer: bool) -> None:
        monkeypatch.undo()
        model = tiny()
        named = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
        made = memscale.predict(model, named, ROOMY, sample_input=tiny_batch(), device="T4")
        text = made.plan.explain()
        assert ("FP16 autocast with loss scaling" in text) is optimizer
        assert any("T4 computes in FP16" in note for note in made.plan.notes) is not optimizer
        assert not loss_scale.active() and loss_scale.scale_of(model) == loss_scale.NO_OPTIMIZER

    def test_the_log_says_it(self, caplog: pytest.LogCaptureFixture) -> None:
        model, config = tiny(), ROOMY.replace(enable_logging=True)
        with caplog.at_level("INFO", "memscale"):
            memscale.wrap(model, config, tiny_batch(), optimizer=torch.optim.SGD(model.parameters()))
        assert "FP16 autocast with loss scaling" in caplog.text

    def test_the_trace_sees_the_copies_and_the_division(self) -> None:
        """The prediction is that of a loop that does the same."""
        model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 2048))
        batch = torch.ones(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = memscale.predict(model, optimizer, ROOMY, sample_input=batch)
        forward = model.forward

        def halved(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                return forward(x)

        model.forward = halved
        without = memscale.predict(
            model, optimizer, ROOMY.replace(use_mixed_precision=False), sample_input=batch
        )
        copies = 64 * 2048 * 4
        assert made.allocated_peak_bytes >= without.allocated_peak_bytes + copies
