# SPDX-License-Identifier: Apache-2.0
"""Whatever ends it, a wrap leaves the model exactly as it was. Copies and files of a wrapped model work."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from calls import beside
from memscale.errors import AttachError
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from zoo.blocks import DataDependent, Stack, inputs
from zoo.models import Case, case
from zoo.training import SMALLEST, built, call, same_bits, seed

CASES = [case("gpt2"), case("convnet"), case("lstm")]
GPT2 = CASES[0]


def image(model: nn.Module) -> dict[str, Any]:
    """All that can be seen of a model, with tensors as copies and everything else as it is."""
    seen: dict[str, Any] = {"rng": torch.get_rng_state(), "random": random.getstate()}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            seen[f"{path}.{name}"] = dict(value) if isinstance(value, dict) else value
        seen[f"{path}()"] = module.forward
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        seen[f"tensor {name}"] = (value, value.detach().clone(), value.requires_grad, value.dtype, value.grad)
    seen["keys"] = list(model.state_dict())
    seen["use_cache"] = getattr(getattr(model, "config", None), "use_cache", None)
    return seen


def assert_as_before(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    for key, value in before.items():
        now = after[key]
        if isinstance(value, tuple) and key.startswith("tensor"):
            assert value[0] is now[0] and same_bits(value[1], now[1]), key
            assert value[2:4] == now[2:4] and value[4] is now[4], key
        elif isinstance(value, Tensor):
            assert torch.equal(value, now), key
        elif isinstance(value, dict):
            assert value.keys() == now.keys() and all(value[k] is now[k] for k in value), key
        else:
            assert value is now or value == now, key


def step(model: nn.Module, case: Case) -> list[Tensor]:
    torch.manual_seed(5)
    loss = case.loss(call(model, case.batch(0)))
    loss.backward()
    result = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return result


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def wrapped(case: Case = GPT2) -> nn.Module:
    model = memscale.wrap(built(case), SMALLEST, case.batch(0))
    assert memscale.executor_of(model).plan.active
    return model


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestDetach:
    def test_right_after_wrap(self, case: Case, training: bool) -> None:
        model = built(case).train(training)
        before = image(model)
        memscale.wrap(model, SMALLEST, case.batch(0))
        assert memscale.executor_of(model).plan.active
        memscale.detach(model)
        assert_as_before(before, image(model))

    def test_before_any_batch(self, case: Case, training: bool) -> None:
        model = built(case).train(training)
        before = image(model)
        memscale.wrap(model, SMALLEST)
        memscale.detach(model)
        assert_as_before(before, image(model))

    def test_end_of_optimize_and_exception_inside(self, case: Case, training: bool) -> None:
        model = built(case).train(training)
        before = image(model)
        with memscale.optimize(model, config=SMALLEST, sample_input=case.batch(0)) as executor:
            assert executor.plan is not None and executor.plan.active
            assert memscale.executor_of(model) is executor
        assert memscale.executor_of(model) is None
        assert_as_before(before, image(model))
        with (
            pytest.raises(KeyboardInterrupt),
            memscale.optimize(model, config=SMALLEST, sample_input=case.batch(0)),
        ):
            raise KeyboardInterrupt
        assert_as_before(before, image(model))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_detached_model_trains_as_before(case: Case) -> None:
    plain, model = built(case), wrapped(case)
    assert_equal(step(plain, case), step(model, case))
    memscale.detach(model)
    assert_equal(step(plain, case), step(model, case))
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("deferred", [False, True], ids=["sample", "deferred"])
def test_a_failed_attachment_undoes_the_others(deferred: bool) -> None:
    count: list[str] = []

    def second_fails(attachment: CheckpointAttachment) -> None:
        count.append(attachment.path)
        if len(count) == 2:
            raise AttachError("injected")

    model = built(GPT2)
    before = image(model)
    if deferred:
        memscale.wrap(model, SMALLEST)
        with beside({CheckpointAttachment.attach: second_fails}):
            result = step(model, GPT2)  # runs as it is, with a warning
        assert_equal(step(built(GPT2), GPT2), result)
        memscale.detach(model)
    else:
        fails = beside({CheckpointAttachment.attach: second_fails})
        with fails, pytest.raises(AttachError, match="injected"):
            memscale.wrap(model, SMALLEST, GPT2.batch(0))
    assert len(count) == 2
    before["rng"] = torch.get_rng_state() if deferred else before["rng"]
    assert_as_before(before, image(model))


def test_wrapping_a_wrapped_model_replaces_its_plan() -> None:
    model = built(GPT2)
    before = image(model)
    for config in (SMALLEST, memscale.Config(memory_budget="1GiB", enable_logging=False), SMALLEST):
        memscale.wrap(model, config, GPT2.batch(0))
        assert bool(memscale.executor_of(model).plan.active) == (config is SMALLEST)
    memscale.detach(model)
    assert_as_before(before, image(model))


def test_a_failed_second_wrap_keeps_the_first() -> None:
    model = wrapped()
    plan, inside = memscale.executor_of(model).plan, image(model)
    with pytest.raises(Exception):  # noqa: B017 - the model's own
        memscale.wrap(model, SMALLEST, torch.zeros(3))
    assert memscale.executor_of(model).plan is plan
    assert [key for key in inside if key.endswith(".forward")] == [
        k for k in image(model) if k.endswith(".forward")
    ]
    assert_equal(step(built(GPT2), GPT2), step(model, GPT2))


def test_detach_of_a_plain_model_warns(caplog: pytest.LogCaptureFixture) -> None:
    model = built(GPT2)
    before = image(model)
    assert memscale.detach(model) is None  # type: ignore[func-returns-value]
    assert "not wrapped" in caplog.text
    assert_as_before(before, image(model))


def test_detach_after_somebody_removed_the_forward() -> None:
    model = wrapped()
    del model.forward
    memscale.detach(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_forward_of_the_owners_own_is_kept() -> None:
    model = built(GPT2)
    inner = model.forward
    own: Callable[..., Any] = lambda *args, **kwargs: inner(*args, **kwargs)  # noqa: E731
    model.forward = own
    memscale.wrap(model, SMALLEST, GPT2.batch(0))
    assert model.forward is not own
    memscale.detach(model)
    assert model.forward is own


@pytest.mark.long
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_part_wrapped_on_its_own_and_the_whole(order: tuple[int, int]) -> None:
    seed()
    pair = nn.Sequential(Stack(), Stack()).train()
    before, batch = image(pair), inputs(0)
    plain = copy.deepcopy(pair)
    targets = (pair, pair[0])
    for target in targets:
        memscale.wrap(target, SMALLEST, batch)
    memscale.detach(targets[order[0]])
    pair(*batch).mean().backward()
    plain(*batch).mean().backward()
    assert_equal([p.grad for p in plain.parameters()], [p.grad for p in pair.parameters()])
    memscale.detach(targets[order[1]])
    pair.zero_grad()
    assert_as_before(before, image(pair))


class TestCopies:
    def test_a_copy_trains_equal_and_is_wrapped_on_its_own(self) -> None:
        model = wrapped()
        twin, inside = copy.deepcopy(model), image(model)
        assert not any("forward" in module.__dict__ for module in twin.modules())
        expected = step(built(GPT2), GPT2)
        assert_equal(expected, step(twin, GPT2))
        memscale.wrap(twin, SMALLEST, GPT2.batch(0))
        assert_equal(expected, step(twin, GPT2))
        memscale.detach(twin)
        inside["rng"] = torch.get_rng_state()
        assert_as_before(inside, image(model))
        assert_equal(expected, step(twin, GPT2))
        assert_equal(expected, step(model, GPT2))

    def test_a_failed_wrap_of_a_copy_leaves_the_original_alone(self) -> None:
        model = wrapped()
        twin, inside = copy.deepcopy(model), image(model)
        with pytest.raises(Exception):  # noqa: B017 - the model's own
            memscale.wrap(twin, SMALLEST, torch.zeros(3))
        assert_as_before(inside, image(model))

    def test_a_copy_of_a_conv_net_updates_its_own_statistics(self) -> None:
        convnet = case("convnet")
        model = wrapped(convnet)
        twin, before = copy.deepcopy(model), {name: value.clone() for name, value in model.named_buffers()}
        step(twin, convnet)
        assert all(same_bits(before[name], value) for name, value in model.named_buffers())
        plain = built(convnet)
        step(plain, convnet)
        assert_equal(list(plain.buffers()), list(twin.buffers()))

    @pytest.mark.parametrize("how", ["pickle", "torch"])
    def test_a_pickled_model_is_a_plain_one(self, how: str, tmp_path: Path) -> None:
        model = wrapped()
        if how == "pickle":
            loaded = pickle.loads(pickle.dumps(model))
        else:
            torch.save(model, tmp_path / "model.pt")
            loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert_equal(step(built(GPT2), GPT2), step(loaded, GPT2))
        memscale.wrap(loaded, SMALLEST, GPT2.batch(0))
        assert memscale.executor_of(loaded).plan.active
        assert_equal(step(model, GPT2), step(loaded, GPT2))
        memscale.detach(loaded)

    def test_state_dict_is_that_of_the_plain_model(self) -> None:
        plain, model = built(GPT2), wrapped()
        assert list(plain.state_dict()) == list(model.state_dict())
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        plain.load_state_dict(torch.load(buffer), strict=True)

    def test_a_detached_model_is_freed_at_once(self) -> None:
        model = wrapped()
        step(model, GPT2)
        memscale.detach(model)
        alive = weakref.ref(model.transformer.h[0])
        gc.collect()
        gc.disable()
        try:
            del model
            assert alive() is None
        finally:
            gc.enable()

    def test_planning_keeps_nothing_of_the_first_step_alive(self) -> None:
        """A profile that fell back to a real step once kept its exception, and the output with it."""
        model = memscale.wrap(DataDependent(), SMALLEST)
        gc.collect()
        gc.disable()
        try:
            output = model(*inputs(0))
            assert memscale.executor_of(model).plan.profile == "empirical"
            output.mean().backward()
            last, root = weakref.ref(output), weakref.ref(model)
            del output
            assert last() is None
            del model
            assert root() is None
        finally:
            gc.enable()

    def test_an_optimizer_outlives_a_wrapped_model(self) -> None:
        model = wrapped()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(**GPT2.batch(0)).loss.backward()
        del model
        optimizer.step()  # every optimizer passes the executor's hook


class TestInference:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_equal_and_untouched(self, case: Case) -> None:
        plain, model = built(case).eval(), wrapped(case).eval()
        with torch.no_grad():
            a, b = call(plain, case.batch(0)), call(model, case.batch(0))
        for one, other in zip(
            torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b), strict=False
        ):
            assert not isinstance(one, Tensor) or same_bits(one, other)

    @pytest.mark.parametrize("deferred", [False, True], ids=["sample", "deferred"])
    def test_generate(self, deferred: bool) -> None:
        plain, model = built(GPT2).eval(), built(GPT2)
        memscale.wrap(model, SMALLEST, None if deferred else GPT2.batch(0))
        if deferred:
            step(model, GPT2)
        model.eval()
        prompt = GPT2.batch(0)["input_ids"][:2, :8]
        settings = {
            "max_new_tokens": 8,
            "do_sample": False,
            "pad_token_id": 0,
            "attention_mask": torch.ones_like(prompt),
        }
        assert torch.equal(plain.generate(prompt, **settings), model.generate(prompt, **settings))
        model.train()
        assert_equal(step(plain.train(), GPT2), step(model, GPT2))
