# SPDX-License-Identifier: Apache-2.0
"""What a user may do around a checkpointed block: an error where others are silently wrong."""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.errors import RecomputeError
from zoo.blocks import WIDTH, Block, Stack, inputs
from zoo.training import SMALLEST, same_bits, seed

BATCH = inputs(0)
DROPPING = functools.partial(Block, 0.1)


def stack(block: Callable[[], nn.Module] = DROPPING, wrapped: bool = True) -> Stack:
    """A stack with the same weights every time; when wrapped, with blocks checkpointed."""
    seed()
    model = Stack(block).train()
    if wrapped:
        memscale.wrap(model, SMALLEST, BATCH)
        assert active(model)
    torch.manual_seed(7)
    return model


def active(model: nn.Module) -> list[str]:
    return [choice.module for choice in memscale.executor_of(model).plan.active]


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def both(use: Callable[[Stack], Any], block: Callable[[], nn.Module] = DROPPING) -> tuple[Any, Any]:
    """The outcome of `use` on a plain and on a wrapped model."""
    return use(stack(block, wrapped=False)), use(stack(block))


def assert_equal(pair: tuple[list[Tensor], list[Tensor]]) -> None:
    plain, planned = pair
    assert len(plain) == len(planned) > 0
    assert all(same_bits(a, b) for a, b in zip(plain, planned, strict=True))


class Bias(Block):
    """Uses a parameter and a buffer that autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x + self.bias + self.shift))


def equal_or_error(use: Callable[[Stack], list[Tensor]], block: Callable[[], nn.Module] = Bias) -> None:
    """Right gradients or a clear error, but never wrong gradients."""
    plain = use(stack(block, wrapped=False))
    try:
        planned = use(stack(block))
    except (RuntimeError, RecomputeError) as error:
        assert "block" in str(error)
        return
    assert_equal((plain, planned))


class TestChangesBetweenForwardAndBackward:
    def test_saved_input_changed_in_place_is_an_error(self) -> None:
        model, x = stack(), BATCH[0].clone()
        loss = model(x).mean()
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"blocks\.0.*version"):
            loss.backward()

    @pytest.mark.parametrize("name", ["down.weight", "norm.weight"])
    def test_saved_parameter_changed_in_place_is_an_error(self, name: str) -> None:
        model = stack()
        loss = model(BATCH[0]).mean()
        with torch.no_grad():
            model.blocks[0].get_parameter(name).add_(1)
        with pytest.raises(RuntimeError, match=r"version|modified"):
            loss.backward()

    @pytest.mark.parametrize("name", ["bias", "shift"])
    def test_unsaved_parameter_or_buffer_changed_in_place(self, name: str) -> None:
        def use(model: Stack) -> list[Tensor]:
            loss = model(BATCH[0]).pow(2).mean()
            with torch.no_grad():
                getattr(model.blocks[1], name).add_(1)
            loss.backward()
            return gradients(model)

        equal_or_error(use)

    @pytest.mark.parametrize("what", ["new data", "foreign tensor"])
    def test_what_no_version_shows(self, what: str) -> None:
        foreign = torch.ones(WIDTH)

        class ReadsForeign(Bias):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(torch.tanh(x + foreign))

        def use(model: Stack) -> list[Tensor]:
            foreign.fill_(1)
            loss = model(BATCH[0]).pow(2).mean()
            if what == "foreign tensor":
                foreign.add_(1)
            else:
                model.blocks[1].bias.data = torch.ones(WIDTH)
            loss.backward()
            return gradients(model)

        equal_or_error(use, ReadsForeign)

    def test_parameters_exchanged_for_the_time_of_the_forward(self) -> None:
        def use(model: Stack) -> list[Tensor]:
            other = {name: (p.detach() * 1.5 + 0.1).requires_grad_() for name, p in model.named_parameters()}
            loss = torch.func.functional_call(model, other, (BATCH[0],)).pow(2).mean()
            return list(torch.autograd.grad(loss, list(other.values())))

        equal_or_error(use)

    def test_train_and_eval_switched(self) -> None:
        def use(model: Stack) -> list[Tensor]:
            loss = model(BATCH[0]).pow(2).mean()
            model.eval()
            loss.backward()
            return gradients(model)

        class Normed(Bias):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(WIDTH)  # type: ignore[assignment]

        equal_or_error(use)
        equal_or_error(use, functools.partial(Block, 0.1))
        equal_or_error(use, Normed)

    def test_random_numbers_drawn_in_between(self) -> None:
        def use(model: Stack) -> list[Tensor]:
            loss = model(BATCH[0]).pow(2).mean()
            torch.manual_seed(99)
            loss.backward()
            return [*gradients(model), torch.rand(4)]

        assert_equal(both(use))


class TestBackward:
    def test_second_backward_through_a_retained_graph(self) -> None:
        def use(model: Stack) -> list[Tensor]:
            loss = model(BATCH[0]).pow(2).mean()
            loss.backward(retain_graph=True)
            loss.backward()
            return gradients(model)

        assert_equal(both(use))

    def test_backward_twice_without_retain_is_an_error(self) -> None:
        loss = stack()(BATCH[0]).pow(2).mean()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    def test_gradients_of_some_inputs_only(self) -> None:
        def use(model: Stack) -> list[Tensor]:
            x = BATCH[0].clone().requires_grad_()
            loss = model(x).pow(2).mean()
            chosen = [model.blocks[1].up.weight, x]
            return list(torch.autograd.grad(loss, chosen, retain_graph=True)) + list(
                torch.autograd.grad(loss, [x])
            )

        assert_equal(both(use))

    def test_double_backward(self) -> None:
        def use(model: Stack) -> list[Tensor]:
            x = BATCH[0].clone().requires_grad_()
            loss = model(x).pow(2).mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.pow(2).sum() * 1e3).backward()
            return [*gradients(model), x.grad]

        assert_equal(both(use))

    def test_two_losses_in_turn(self) -> None:
        def use(model: Stack) -> list[Tensor]:
            first, second = model(BATCH[0]).mean(), model(BATCH[0] * 2).pow(2).mean()
            second.backward()
            first.backward()
            return gradients(model)

        assert_equal(both(use))

    def test_in_another_thread(self) -> None:
        def use(model: Stack) -> list[Tensor]:
            loss = model(BATCH[0]).pow(2).mean()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            return gradients(model)

        assert_equal(both(use))

    def test_optimizer_step_inside_backward(self) -> None:
        def use(model: Stack) -> list[Tensor]:
            for parameter in model.parameters():
                optimizer = torch.optim.SGD([parameter], lr=0.1)
                parameter.register_post_accumulate_grad_hook(
                    lambda p, o=optimizer: (o.step(), o.zero_grad())[1]
                )
            for _ in range(3):
                model(BATCH[0]).pow(2).mean().backward()
            return [parameter.detach() for parameter in model.parameters()]

        assert_equal(both(use))

    def test_as_part_of_a_larger_graph(self) -> None:
        def use(model: Stack) -> list[Tensor]:
            before = nn.Linear(WIDTH, WIDTH)
            model(before(BATCH[0]).relu()).sigmoid().mean().backward()
            return [*gradients(model), *gradients(before)]

        assert_equal(both(use))

    def test_under_other_saved_tensor_hooks(self) -> None:
        def use(model: Stack) -> list[Tensor]:
            with torch.autograd.graph.save_on_cpu():
                loss = model(BATCH[0]).pow(2).mean()
            loss.backward()
            return gradients(model)

        assert_equal(both(use))

    def test_two_wrapped_models_at_once(self) -> None:
        def use(model: Stack) -> list[Tensor]:
            other = stack(wrapped=(memscale.executor_of(model) is not None))
            (model(BATCH[0]) * other(BATCH[0])).mean().backward()
            return gradients(model) + gradients(other)

        assert_equal(both(use))

    def test_a_released_graph_keeps_no_activation(self) -> None:
        model = stack()
        loss = model(BATCH[0]).mean()
        del loss
        assert_equal(both(lambda model: [model(BATCH[0])]))


class Norm(nn.LayerNorm):
    """Runs what its thread has instead, if anything: recomputes do not put back what threads have."""

    def forward(self, x: Tensor) -> Tensor:
        instead = getattr(threading.current_thread(), "instead", None)
        return super().forward(x) if instead is None else instead(x)


class Exploding(Block):
    """Has such a norm."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.norm = Norm(WIDTH)


@contextmanager
def norms_run(instead: Callable[..., Any]) -> Iterator[None]:
    thread: Any = threading.current_thread()
    thread.instead = instead
    try:
        yield
    finally:
        del thread.instead


class TestExceptions:
    class Bomb(Block):
        """Raises in its n-th run."""

        def __init__(self) -> None:
            super().__init__(0.1)
            self.when: list[type[BaseException] | None] = []

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            explode = self.when[0] if self.when else None
            if explode is not None:
                self.when[0] = None
                raise explode("boom")
            return y

    @pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, torch.cuda.OutOfMemoryError])
    @pytest.mark.parametrize("moment", ["forward", "recompute"])
    def test_surfaces_and_the_next_step_is_equal(self, kind: type[BaseException], moment: str) -> None:
        def use(model: Stack, explode: bool) -> list[Tensor]:
            # The last block ends inside `super().forward` when it is recomputed; the others' runs do too, so
            # the recompute is interrupted from within a submodule.
            target = model.blocks[0].norm if moment == "recompute" else model.blocks[1]
            original, state = type(target), torch.get_rng_state()

            def bomb(*args: Any) -> Any:
                raise kind("boom")

            if explode:
                if moment == "forward":
                    forward, target.forward = target.forward, bomb
                    with pytest.raises(kind) as caught:
                        model(BATCH[0])
                    target.forward = forward
                    if forward == original.forward.__get__(target):
                        del target.__dict__["forward"]
                else:
                    loss = model(BATCH[0]).mean()
                    with norms_run(bomb), pytest.raises(kind) as caught:
                        loss.backward()
                    model.zero_grad()
                frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
                assert str(caught.value) == "boom"
                assert kind is not ValueError or moment == "recompute" or "bomb" in frames
                torch.set_rng_state(state)
            model(BATCH[0]).pow(2).mean().backward()
            return gradients(model)

        assert_equal((use(stack(Exploding, wrapped=False), False), use(stack(Exploding), True)))

    def test_random_state_is_put_back_when_a_recompute_fails(self) -> None:
        model = stack(Exploding)
        loss = model(BATCH[0]).mean()
        before = torch.get_rng_state()
        with norms_run(lambda x: 1 / 0), pytest.raises(ZeroDivisionError):
            loss.backward()
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("instead", [ValueError, None], ids=["translated", "swallowed"])
    def test_a_forward_that_catches_everything(self, instead: type[Exception] | None) -> None:
        """A recompute ends by an exception, and what a forward makes of it does not reach the user."""

        class Catches(Block):
            def forward(self, x: Tensor) -> Tensor:
                try:
                    return super().forward(x)
                except BaseException as error:
                    if instead is None:
                        return x
                    raise instead("caught") from error

        def use(model: Stack) -> list[Tensor]:
            model(BATCH[0]).mean().backward()
            return gradients(model)

        assert_equal(both(use, Catches))

    def test_a_recompute_that_differs_in_shape_names_the_module(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Shrinks(Block):
            def forward(self, x: Tensor) -> Tensor:
                fewer = hasattr(threading.current_thread(), "shrinks")
                return super().forward(x) + self.up(x.tanh()[: len(x) - fewer])[:1].sum()

        model = Stack(Shrinks).train()
        memscale.wrap(model, SMALLEST, BATCH)
        assert active(model)
        loss = model(BATCH[0]).mean()
        for thread in threading.enumerate():  # what these have for attributes no recompute puts back
            monkeypatch.setattr(thread, "shrinks", True, raising=False)
        with pytest.raises(RecomputeError, match=r"blocks\.\d"):
            loss.backward()


def test_functorch_around_a_wrapped_model() -> None:
    """`torch.func` brings its own saves and tensors without storage; MemScale stands aside."""

    def use(model: Stack) -> list[Tensor]:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            output: Tensor = torch.func.functional_call(model, parameters, BATCH)
            return output.pow(2).mean()

        return list(torch.func.grad(loss)(dict(model.named_parameters())).values())

    expected, got = both(use)
    assert len(expected) == len(got) and all(map(same_bits, expected, got))
