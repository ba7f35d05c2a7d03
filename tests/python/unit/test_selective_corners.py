# SPDX-License-Identifier: Apache-2.0
"""What is really taken from a selective checkpoint's cache, and what may happen around it."""

from __future__ import annotations

import copy
import io
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from memscale.ops.op_facts import facts
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.checkpoint.save_observers import observed_by
from patched import class_forward
from technique_samples import (
    WIDTH,
    Model,
    Operation,
    Transformer,
    attached,
    operations,
    seeded,
    selective,
)
from zoo.training import same_bits, seed

ROWS = (3, 5, WIDTH)


class Counted(TorchDispatchMode):
    """How often each operation really runs: outside of the mode that answers from the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[facts(func).name] += 1
        return func(*args, **(kwargs or {}))


def batch() -> Tensor:
    return torch.randn(*ROWS, generator=torch.Generator().manual_seed(3))


def model_of(block: Callable[[], nn.Module]) -> Model:
    model = seeded(lambda: Model(block))
    assert isinstance(model, Model)
    return model


def every(model: nn.Module) -> frozenset[Operation]:
    return frozenset(operations(model.blocks[0], lambda: model(batch())).every)


def eligible(model: nn.Module) -> frozenset[Operation]:
    return frozenset(operations(model.blocks[0], lambda: model(batch())).eligible)


def on_blocks(model: nn.Module, kept: frozenset[Operation]) -> list[CheckpointAttachment]:
    return [selective(model, f"blocks.{index}", kept) for index in range(2)]


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def step(model: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    loss = model(batch() if x is None else x).pow(2).mean()
    loss.backward()
    result = [loss.detach(), *gradients(model)]
    model.zero_grad()
    return result


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) > 0
    assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def both(
    use: Callable[[Model], list[Tensor]], block: Callable[[], nn.Module] = Transformer, among: Any = every
) -> None:
    """`use` gives the same on the plain model and on one of which all is kept that may be."""
    plain, model = model_of(block), model_of(block)
    kept = among(model_of(block))
    torch.manual_seed(7)
    expected = use(plain)
    torch.manual_seed(7)
    with attached(*on_blocks(model, kept)):
        assert_equal(expected, use(model))


def all_sets(use: Callable[[Model], list[Tensor]], block: Callable[[], nn.Module]) -> None:
    """As `both`, also with every single operation kept alone."""
    both(use, block)
    both(use, block, eligible)
    for operation in every(model_of(block)):
        both(use, block, lambda model, operation=operation: frozenset([operation]))


def runs(model: Model, kept: frozenset[Operation]) -> Counter[str]:
    torch.manual_seed(7)
    with attached(*on_blocks(model, kept)), Counted() as counted:
        step(model)
    return counted.runs


class TestPatched:
    @pytest.mark.parametrize("name", ["addmm", "gelu", "native_layer_norm", "tanh", "mul.Tensor"])
    def test_a_kept_operation_does_not_run_again(self, name: str) -> None:
        model = model_of(Transformer)
        kept = frozenset(operation for operation in eligible(model) if operation[0] == name)
        before, after = runs(model, frozenset()), runs(model, kept)
        assert before[name] - after[name] == 2 * len(kept) > 0
        del before["detach"], after["detach"]
        assert all(after[key] <= before[key] for key in before | after)
        assert after.keys() == before.keys()

    def test_the_ordinal_counts(self) -> None:
        """Of four products the third is kept: the other three run again."""
        model = model_of(Transformer)
        before, after = runs(model, frozenset()), runs(model, frozenset([("addmm", 2)]))
        assert before["addmm"] - after["addmm"] == 2  # one in each block

    def test_what_does_not_exist_is_not_missed(self) -> None:
        both(step, among=lambda model: frozenset([("addmm", 99), ("no_such_op", 0)]))

    def test_a_second_backward_computes_everything(self) -> None:
        model = model_of(Transformer)
        with attached(*on_blocks(model, frozenset([("gelu", 0)]))):
            counts = []
            with Counted() as counted:  # around the forward, too: its recompute runs under the same modes
                loss = model(batch()).pow(2).mean()
                for _ in range(3):
                    before = counted.runs["gelu"]
                    loss.backward(retain_graph=True)
                    counts.append(counted.runs["gelu"] - before)
        assert counts == [0, 2, 2]

    def test_without_kept_operations_there_is_no_mode(self) -> None:
        model = model_of(Transformer)
        seen: list[int] = []

        class Watched(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                seen.append(torch._C._len_torch_dispatch_stack())
                return super().forward(x)

        model.blocks[0].up.__class__ = Watched
        with attached(*on_blocks(model, frozenset())):
            step(model)
        assert seen == [0, 0]
        with attached(*on_blocks(model, frozenset([("addmm", 0)]))):
            step(model)
        assert seen == [0, 0, 1, 1]


class TestRandom:
    class Drops(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p, self.up = p, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.up(x).unsqueeze(1)
            mixed = F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)
            return x + F.dropout(mixed.sin(), self.p, self.training)

    @pytest.mark.parametrize("p", [0.0, 0.5])
    def test_what_draws_is_never_kept(self, p: float) -> None:
        all_sets(step, lambda: TestRandom.Drops(p))
        all_sets(step, lambda: nn.Dropout(p))
        all_sets(step, Noisy)

    def test_what_is_only_called_random_may_be(self) -> None:
        """Flash attention is tagged as random and draws nothing here."""
        model = model_of(lambda: TestRandom.Drops(0.0))
        name = "_scaled_dot_product_flash_attention_for_cpu"
        assert (name, 0) in every(model)
        before, after = runs(model, frozenset()), runs(model, frozenset([(name, 0)]))
        assert (before[name], after[name]) == (4, 2)


class Noisy(nn.Module):
    """Draws from the global generator in several ways, one of them without saying so."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x) + torch.bernoulli(torch.full_like(x, 0.5))
        return (x * noise).tanh() + torch.randperm(WIDTH) * x.sin()


class Chain(nn.Module):
    """A product and what one test does to it."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.change = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), change

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x.sin())
        self.change(y)
        return x + self.down(y.sin())


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda y: y.mul_(2),
    "of a view": lambda y: y.view(-1)[3:].neg_(),
    "by index": lambda y: y.__setitem__((slice(None), 0), 1.0),
    "of the data": lambda y: y.data.mul_(2),
    "detached": lambda y: y.detach().mul_(2),
    "out": lambda y: torch.add(y.detach(), 1.0, out=y.detach()),
    "foreach": lambda y: torch._foreach_mul_([y.data], 2.0),
    "shape": lambda y: y.data.transpose_(0, 1).transpose_(0, 1),
    "copied over": lambda y: y.data.copy_(torch.ones(WIDTH)),
}


class TestChanged:
    @pytest.mark.parametrize("change", CHANGES)
    def test_inside_the_module(self, change: str) -> None:
        def use(model: Model) -> list[Tensor]:
            return step(model) + step(model)

        all_sets(use, lambda: Chain(CHANGES[change]))

    @pytest.mark.parametrize("what", ["the output", "what it is a part of"])
    def test_what_is_not_saved_is_changed_outside(self, what: str) -> None:
        """Plain PyTorch allows it; the recompute must not see the change."""

        class Reveals(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                product = self.up(x.flatten(0, 1))
                shown = product
                if what != "the output":  # shares memory, and no version counter
                    product = torch.ops.aten._unsafe_view(product, x.shape)
                y = x + (product * 2).sin().view_as(x)
                shown.mul_(3)
                return y

        def use(model: Model) -> list[Tensor]:
            shown: list[Tensor] = []
            for block in model.blocks:
                block.show = shown.append
            x = model.first(batch())
            for block in model.blocks:
                x = block(x)
            for tensor in shown:
                tensor.detach().mul_(3)
            loss = x.pow(2).mean()
            loss.backward()
            return gradients(model)

        class RevealsLater(Reveals):
            show: Callable[[Tensor], Any] = staticmethod(lambda tensor: None)

            def forward(self, x: Tensor) -> Tensor:
                product = self.up(x.flatten(0, 1))
                self.show(product)
                if what != "the output":
                    product = torch.ops.aten._unsafe_view(product, x.shape)
                return x + (product * 2).sin().view_as(x)

        all_sets(step, Reveals)
        all_sets(use, RevealsLater)

    def test_outside_of_it(self) -> None:
        """The last operation's output is changed before anybody saves it: it is computed again."""

        class InPlaceOutside(Model):
            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x)
                for block in self.blocks:
                    x = block(x)
                    x.mul_(1.5).add_(1)
                return x

        def made() -> InPlaceOutside:
            model = seeded(lambda: InPlaceOutside(lambda: Chain(lambda y: None)))
            assert isinstance(model, InPlaceOutside)
            return model

        plain, model = made(), made()
        kept = every(made())
        with attached(*on_blocks(model, kept)):
            assert_equal(step(plain), step(model))

    def test_a_kept_save_fails_as_autograds_own(self) -> None:
        class Shows(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                self.shown = self.up(x.flatten(0, 1))
                return x + F.gelu(self.shown).view_as(x)

        def message(model: Model) -> str:
            loss = model(batch()).sum()
            with torch.no_grad():
                model.blocks[1].shown.add_(1)
            with pytest.raises(RuntimeError) as caught:
                loss.backward()
            return str(caught.value)

        model = model_of(Shows)
        expected = message(model_of(Shows))
        with attached(*on_blocks(model, eligible(model_of(Shows)))):
            got = message(model)
        assert "modified by an inplace operation" in got and "Backward0" in got
        # Releases of PyTorch differ in whether they print a node's name to its end.
        assert expected.replace("Backward0", "").startswith(got.replace("Backward0", ""))

    def test_an_input_changed_in_place_is_an_error(self) -> None:
        model = model_of(Transformer)
        with attached(*on_blocks(model, eligible(model_of(Transformer)))):
            x = model.first(batch())
            loss = model.blocks[0](x).sum()
            with torch.no_grad():
                x.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    def test_a_change_in_the_second_run_does_not_reach_the_first_graph(self) -> None:
        """`retain_graph` after a backward that took everything: the kept saves are still the first run's."""

        def use(model: Model) -> list[Tensor]:
            loss = model(batch()).pow(2).mean()
            loss.backward(retain_graph=True)
            loss.backward()
            return gradients(model)

        both(use, lambda: Chain(CHANGES["in place"]))
        both(use)


class TestBackward:
    def test_create_graph(self) -> None:
        def use(model: Model) -> list[Tensor]:
            x = batch().requires_grad_()
            loss = model(x).pow(2).mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.pow(2).sum() * 1e3).backward()
            return [*gradients(model), x.grad] if x.grad is not None else []

        class Smooth(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                return x + torch.tanh(F.gelu(self.up(self.norm(x)))) * torch.exp(self.up(x) * 0.1)

        both(use, Smooth)

    def test_gradients_inside_the_forward(self) -> None:
        """As models of forces do it: backward runs inside both runs."""

        class Force(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                energy = torch.tanh(self.up(x)).pow(2).sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=True)
                return x + force

        both(step, Force)

    def test_some_inputs_then_the_rest(self) -> None:
        def use(model: Model) -> list[Tensor]:
            x = batch().requires_grad_()
            loss = model(x).pow(2).mean()
            chosen = [model.blocks[1].up.weight, x]
            first = torch.autograd.grad(loss, chosen, retain_graph=True)
            return [*first, *torch.autograd.grad(loss, list(model.blocks[0].up.parameters()))]

        both(use)

    def test_two_calls_of_one_block_in_turn(self) -> None:
        def use(model: Model) -> list[Tensor]:
            first, second = model(batch()).mean(), model(batch() * 2).pow(2).mean()
            second.backward()
            first.backward()
            return gradients(model)

        both(use)

    def test_in_several_threads(self) -> None:
        def use(model: Model) -> list[Tensor]:
            model.eval()  # one generator for all threads has no order
            results: list[list[Tensor]] = [[], []]
            lock = threading.Barrier(2)

            def work(number: int) -> None:
                for _ in range(10):
                    lock.wait()
                    x = (batch() * (number + 1)).requires_grad_()
                    loss = model(x).pow(2).mean()
                    results[number] = [loss.detach(), *torch.autograd.grad(loss, [x, *used(model)])]

            threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return results[0] + results[1]

        def used(model: Model) -> list[nn.Parameter]:
            return [parameter for parameter in model.parameters() if parameter.requires_grad]

        both(use)

    def test_backward_in_another_thread(self) -> None:
        def use(model: Model) -> list[Tensor]:
            loss = model(batch()).pow(2).mean()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            return gradients(model)

        both(use)


class TestExceptions:
    @pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
    @pytest.mark.parametrize("moment", ["forward", "recompute"])
    def test_a_good_step_follows(self, kind: type[BaseException], moment: str) -> None:
        model, plain = model_of(Transformer), model_of(Transformer)
        kept = eligible(model_of(Transformer)) - {("addmm", 3), ("tanh", 0), ("mul.Tensor", 0)}
        state = torch.get_rng_state()

        def boom(x: Tensor) -> Tensor:
            raise kind("boom")

        with attached(*on_blocks(model, kept)):
            target = model.blocks[0].down
            if moment == "forward":
                with class_forward(target, boom), pytest.raises(kind, match="boom"):
                    model(batch())
            else:
                loss = model(batch()).pow(2).mean()
                before = torch.get_rng_state()
                with class_forward(target, boom), pytest.raises(kind, match="boom"):
                    loss.backward()
                assert torch.equal(torch.get_rng_state(), before)
            assert torch._C._len_torch_dispatch_stack() == 0
            model.zero_grad()
            torch.set_rng_state(state)
            expected = step(plain)
            torch.set_rng_state(state)
            assert_equal(expected, step(model))

    def test_an_operation_that_fails_and_is_tried_again(self) -> None:
        """Failed calls are counted by both runs, so the ordinals stay right."""

        class Tries(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up = nn.Linear(WIDTH, WIDTH, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                flat = x.reshape(-1, WIDTH)
                try:
                    torch.mm(flat, flat)
                except RuntimeError:
                    y = torch.mm(flat, self.up.weight).sin()
                return x + torch.mm(y, self.up.weight).reshape(x.shape).sin()

        both(step, Tries)


class TestSurroundings:
    def test_a_flop_counter_around_the_step(self) -> None:
        plain, model = model_of(Transformer), model_of(Transformer)
        kept = eligible(model_of(Transformer))
        flops = []
        for each, what in ((plain, None), (model, frozenset()), (model, kept)):
            torch.manual_seed(7)
            parts = [] if what is None else on_blocks(each, what)
            with attached(*parts), FlopCounterMode(display=False) as counter:
                result = step(each)
            flops.append(counter.get_total_flops())
            if what is None:
                expected = result
            else:
                assert_equal(expected, result)
        assert flops[0] == flops[1] == flops[2]  # nobody counts a recompute

    def test_a_mode_inside_the_forward(self) -> None:
        class Inside(Transformer):
            def forward(self, x: Tensor) -> Tensor:
                with Counted():
                    return super().forward(x)

        both(step, Inside)

    def test_tensor_subclasses(self) -> None:
        class Tagged(Tensor):
            pass

        def use(model: Model) -> list[Tensor]:
            return [part.as_subclass(Tensor) for part in step(model, batch().as_subclass(Tagged))]

        both(use)

    def test_wrapper_subclasses(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        def use(model: Model) -> list[Tensor]:
            model.eval()
            loss = model(TwoTensor(batch(), batch() * 2)).pow(2).mean()
            loss.backward()
            assert isinstance(loss, TwoTensor)
            parts = [loss.a, loss.b]
            for parameter in model.parameters():
                if parameter.grad is not None:
                    assert isinstance(parameter.grad, TwoTensor)
                    parts += [parameter.grad.a, parameter.grad.b]
            return [part.detach().clone() for part in parts]

        both(use)

    def test_without_gradients_and_under_functorch(self) -> None:
        def use(model: Model) -> list[Tensor]:
            model.eval()
            with torch.no_grad():
                first = model(batch())
            with torch.inference_mode():
                second = model(batch()).clone()
            named = dict(model.named_parameters())
            grads = torch.func.grad(
                lambda parameters: torch.func.functional_call(model, parameters, (batch(),)).pow(2).mean()
            )(named)
            return [first, second, *grads.values()]

        both(use)

    def test_inference_tensors_inside(self) -> None:
        class Looks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                with torch.inference_mode():
                    peak = float(self.up(x).abs().max())
                with torch.no_grad():
                    scale = self.up(x).sigmoid()
                return x + self.up(x).sin() * scale * peak

        both(step, Looks)

    def test_integers_lists_and_several_outputs(self) -> None:
        class Mixed(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                values, places = x.topk(4, -1)
                parts = torch._foreach_sin([x, values])
                order = torch.argsort(x, -1)
                return (
                    x.gather(-1, order) + parts[0] + F.pad(parts[1] * values + places, (0, WIDTH - 4)).tanh()
                )

        both(step, Mixed)

    def test_autocast_with_a_weight_used_twice(self) -> None:
        """The recompute finds other casts in autocast's cache than the first did."""

        def use(model: Model) -> list[Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                model.blocks[0].qkv(model.first(batch()))  # casts it before the block does
                loss = model(batch()).float().pow(2).mean()
            loss.backward()
            return gradients(model)

        both(use, among=eligible)
        both(use, among=lambda model: frozenset(("_to_copy", ordinal) for ordinal in range(12)))
        for ordinal in range(12):
            both(use, among=lambda model, ordinal=ordinal: frozenset([("_to_copy", ordinal)]))

    def test_torch_compile(self) -> None:
        model = model_of(Transformer).eval()
        expected = step(model)
        kept = eligible(model)
        with attached(*on_blocks(model, kept)):
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            assert_equal(expected, step(compiled))
        torch._dynamo.reset()

    def test_observed_it_reports_every_save_of_the_plain_step(self) -> None:
        class Log:
            def __init__(self) -> None:
                self.events: list[Any] = []

            def on_pack(self, tensor: Tensor) -> object:
                self.events.append(("pack", tuple(tensor.shape)))
                return sum(event[0] == "pack" for event in self.events)

            def on_unpack(self, save: object) -> None:
                self.events.append(("unpack", save))

            def on_release(self, save: object) -> None:
                self.events.append(("release", save))

            def on_hold(self, tensor: Tensor) -> Tensor:
                return tensor

            @contextmanager
            def unseen(self) -> Iterator[None]:
                self.events.append(("unseen", True))
                yield
                self.events.append(("unseen", False))

        logs = []
        for kept in (frozenset(), eligible(model_of(Transformer))):
            model, log = model_of(Transformer), Log()
            with attached(*on_blocks(model, kept)), observed_by(log):
                step(model)
            logs.append(log.events)
        assert logs[0] == logs[1]
        assert {kind for kind, _ in logs[0]} == {"pack", "unpack", "release", "unseen"}
        assert not torch._C._len_torch_dispatch_stack()


class TestCopies:
    def test_a_copy_is_a_plain_model(self) -> None:
        model = model_of(Transformer)
        kept = eligible(model_of(Transformer))
        torch.manual_seed(7)
        expected = step(model_of(Transformer))
        with attached(*on_blocks(model, kept)):
            twin = copy.deepcopy(model)
            assert "forward" not in twin.blocks[0].__dict__ and "forward" in model.blocks[0].__dict__
            for each in (twin, model):
                torch.manual_seed(7)
                assert_equal(expected, step(each))
            torch.manual_seed(7)
            with Counted() as counted:
                step(twin)
            assert counted.runs["gelu"] == len(twin.blocks)
        assert "forward" not in model.blocks[0].__dict__

    def test_a_saved_model_is_a_plain_one(self) -> None:
        model = seeded(lambda: nn.Sequential(Transformer(), Transformer()))
        file = io.BytesIO()
        with attached(selective(model, "0", frozenset([("addmm", 0)]))):
            torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert "forward" not in loaded[0].__dict__ or loaded[0].forward.__self__ is loaded[0]
        torch.manual_seed(7)
        expected = step(model)
        torch.manual_seed(7)
        assert_equal(expected, step(loaded))

    def test_undo_leaves_nothing(self) -> None:
        model = model_of(Transformer)
        before = [dict(module.__dict__) for module in model.modules()]
        with attached(*on_blocks(model, eligible(model))):
            step(model)
        assert [dict(module.__dict__) for module in model.modules()] == before
        seed()

    def test_undone_between_forward_and_backward(self) -> None:
        model = model_of(Transformer)
        torch.manual_seed(7)
        expected = step(model)
        torch.manual_seed(7)
        with attached(*on_blocks(model, eligible(model_of(Transformer)))):
            torch.manual_seed(7)
            loss = model(batch()).pow(2).mean()
        loss.backward()
        assert_equal(expected, [loss.detach(), *gradients(model)])
