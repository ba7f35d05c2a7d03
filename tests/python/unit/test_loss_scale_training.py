# SPDX-License-Identifier: Apache-2.0
"""FP16 with loss scaling: the bits of autocast, FP32 outputs and `GradScaler` by hand, for any loop.

Most steps of most tests are good. In the step that overflows, gradients are not compared number by number:
where some are infinite, others may be NaN here. That no weight moves is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memscale
from loss_scale_samples import (
    BAD,
    INITIAL,
    SMALLEST,
    Hand,
    LanguageModel,
    Loop,
    Wrapped,
    assert_as_by_hand,
    fp16_host,
    model_and_optimizer,
    plain_loss,
    tiny,
    tokens,
)
from memscale.techniques.precision.autocast import AutocastAttachment
from memscale.techniques.precision.loss_scale import LossScale
from zoo.training import same_bits

__all__ = ["fp16_host"]  # the fixture of every test here


# ---- the same bits as by hand ------------------------------------------------------------------------


class TestAsByHand:
    def test_checkpointed_with_two_backwards_through_one_graph(self) -> None:
        def body(loop: Loop, step: int) -> None:
            loss = plain_loss(loop, step)
            loop.backward(loss, retain_graph=True)
            loop.backward(2 * loss)

        loop = assert_as_by_hand(body, SMALLEST)
        assert loop.executor.plan.active
        assert memscale.verify(loop.model, (tokens(0),)).equal
        memscale.detach(loop.model)
        assert loop.model(tokens(0))["logits"].dtype is torch.float32
        assert all(value._backward_hooks is None for value in loop.model.parameters())

    def test_accumulation_and_clipping(self) -> None:
        def body(loop: Loop, step: int) -> None:
            for part in range(2):
                loop.backward(plain_loss(loop, step) / (part + 2))
            loop.unscale()
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)

        with _unscaled_once():
            assert_as_by_hand(body)

    def test_frozen_weights(self) -> None:
        def body(loop: Loop, step: int) -> None:
            loop.model.words.weight.requires_grad_(False)
            loop.model.blocks[0].requires_grad_(step % 2 == 0)
            loop.backward(plain_loss(loop, step))

        assert_as_by_hand(body)

    def test_a_penalty_on_weights(self) -> None:
        """It shares leaves with the model, and no edge of its graph."""

        def body(loop: Loop, step: int) -> None:
            penalty = sum(weight.square().sum() for weight in loop.model.parameters())
            loop.backward(plain_loss(loop, step) + 0.01 * penalty)

        assert_as_by_hand(body)

    def test_a_penalty_in_a_backward_of_its_own(self) -> None:
        def body(loop: Loop, step: int) -> None:
            loop.backward(plain_loss(loop, step))
            loop.backward(loop.model.words.weight.norm())

        assert_as_by_hand(body)

    def test_a_loss_on_what_the_model_does_not_return(self) -> None:
        def body(loop: Loop, step: int) -> None:
            loss = plain_loss(loop, step)
            loop.backward(loss + loop.model.middle.float().square().mean())

        assert_as_by_hand(body)

    def test_all_outputs_and_in_place_operations(self) -> None:
        def body(loop: Loop, step: int) -> None:
            batch = tokens(step)
            output = loop.forward(batch)
            assert output["hidden"][0] is output["hidden"][1] and output["tokens"] is batch
            output["logits"].mul_(2).add_(1)
            hidden = output["hidden"][1]
            hidden[0, 0] = 0
            loss = output["logits"].square().mean() + hidden.abs().mean() + output["hidden"][0].mean()
            loop.backward(loss * (1e9 if step == BAD else 1e-2))

        assert_as_by_hand(body)

    def test_a_backward_that_breaks_off(self) -> None:
        def fail(grad: Tensor) -> None:
            raise RuntimeError("on purpose")

        def body(loop: Loop, step: int) -> None:
            loss = plain_loss(loop, step)
            handle = loop.model.middle.register_hook(fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                loop.backward(loss)
            handle.remove()
            loop.optimizer.zero_grad()
            loop.backward(plain_loss(loop, step))

        assert_as_by_hand(body)

    def test_part_of_the_weights(self) -> None:
        def body(loop: Loop, step: int) -> None:
            wanted = list(loop.model.blocks.parameters())
            loop.backward(plain_loss(loop, step), inputs=wanted)

        assert_as_by_hand(body)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_the_models_own_checkpoints(self, reentrant: bool) -> None:
        """The reentrant ones run a backward inside of the backward."""

        def block(module: nn.Module, x: Tensor) -> Any:
            return checkpoint(module, x, use_reentrant=reentrant)

        assert_as_by_hand(lambda loop, step: loop.backward(plain_loss(loop, step)), wrapped_block=block)

    def test_a_reentrant_checkpoint_that_hides_all_weights(self) -> None:
        """The graph of the loss has no weight of the model in it."""

        def block(module: nn.Module, x: Tensor) -> Any:
            return checkpoint(module, x, use_reentrant=True)

        def body(loop: Loop, step: int) -> None:
            loop.model.words.weight.requires_grad_(False)
            loop.model.gain.requires_grad_(False)
            prefix = torch.full((16,), 0.5).requires_grad_()
            logits = loop.forward(tokens(step), prefix)["logits"]
            loop.backward(logits.square().mean() * (1e9 if step == BAD else 1))

        assert_as_by_hand(body, wrapped_block=block)

    def test_the_penalty_of_a_gradient(self) -> None:
        """Second derivatives, by way of `autograd.grad` and a graph of it."""

        def body(loop: Loop, step: int) -> None:
            prefix = torch.full((16,), 0.5).requires_grad_()
            loss = loop.forward(tokens(step), prefix)["logits"].square().mean()
            if isinstance(loop, Hand):
                scaled = loop.scaler.scale(loss)
                grads = torch.autograd.grad(scaled, [prefix, loop.model.middle], create_graph=True)
                grads = [grad * (1 / loop.scale) for grad in grads]
            else:
                grads = torch.autograd.grad(loss, [prefix, loop.model.middle], create_graph=True)
            penalty = sum(grad.float().square().sum() for grad in grads)
            loop.backward((loss + penalty) * (1e9 if step == BAD else 1e-2))

        assert_as_by_hand(body)

    def test_the_loops_own_scaler_on_top(self) -> None:
        """Without its autocast. Both factors are taken out again."""
        hand, mine = Hand(*model_and_optimizer()), Wrapped(*model_and_optimizer())
        hand.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
        mine.loss_scale.value = 2.0**6
        for step in range(2):
            hand.backward(plain_loss(hand, step))
            hand.step()
            scaler.scale(plain_loss(mine, step)).backward()
            scaler.step(mine.optimizer)
            scaler.update()
            mine.optimizer.zero_grad()
        pairs = zip(hand.model.parameters(), mine.model.parameters(), strict=True)
        assert all(same_bits(a.detach(), b.detach()) for a, b in pairs)

    def test_with_tiles_and_checkpoints(self) -> None:
        """Tiles round differently; the error may be 1.5 times that of autocast and scaler by hand."""
        model, batch = LanguageModel(), (tokens(0).repeat(8, 2), tokens(1).repeat(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        config = SMALLEST.replace(exact=False, enable_tiling=True)
        memscale.wrap(model, config, sample_input=batch, optimizer=optimizer)
        plan = memscale.executor_of(model).plan
        assert [step.technique for step in plan.steps] == ["autocast", "loss_tile"]
        report = memscale.verify(model, batch)
        assert report.passed and not report.equal
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        grads = [value.grad for value in model.parameters()]
        memscale.detach(model)
        plain = torch.autograd.grad(model(*batch), list(model.parameters()))
        for mine, true in zip(grads, plain, strict=True):
            torch.testing.assert_close(mine, true, rtol=2e-2, atol=2e-2 * float(true.abs().max()))

    def test_compiled(self) -> None:
        runs = []
        for by_hand in (True, False):
            model = tiny()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", enabled=by_hand, init_scale=INITIAL)
            scale = LossScale(model, optimizer)
            scale.value = INITIAL
            if not by_hand:
                AutocastAttachment(model, "cpu", torch.float16, scale=scale).attach()
            compiled = torch.compile(model, backend="aot_eager")
            for step in range(2):
                with torch.autocast("cpu", torch.float16, enabled=by_hand):
                    output = compiled(torch.full((4, 8), 0.1 + step))
                assert output.dtype is (torch.float16 if by_hand else torch.float32)
                scaler.scale(output.float().square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            runs.append([output.detach().float(), *(value.detach() for value in model.parameters())])
            torch._dynamo.reset()
        assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))


@contextmanager
def _unscaled_once() -> Iterator[None]:
    """A body unscales by hand before it clips; the loop around it does not again."""
    original = Hand.unscale

    def once(self: Hand) -> None:
        state = self.scaler._per_optimizer_states[id(self.optimizer)]
        if state["stage"] is torch.amp.grad_scaler.OptState.READY:
            original(self)

    Hand.unscale = once
    try:
        yield
    finally:
        Hand.unscale = original
