# SPDX-License-Identifier: Apache-2.0
"""The rules of the loss scale, what models return in FP16, and steps that are skipped."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from earlier_models import forget_earlier_models
from memscale.techniques.precision import loss_scale, loss_scale_step
from memscale.techniques.precision.autocast import AutocastAttachment
from memscale.techniques.precision.loss_scale import STATE_KEY, LossScale
from memscale.techniques.precision.loss_scale_outputs import in_fp32
from memscale.torchkit import backward_calls

INF, NAN = float("inf"), float("nan")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def opened() -> Iterator[Callable[..., LossScale]]:
    """Opens scales, and closes them in the end."""
    attached: list[AutocastAttachment] = []
    models: list[nn.Module] = []

    def open_one(model: nn.Module, optimizer: Optimizer) -> LossScale:
        scale = LossScale(model, optimizer)
        attachment = AutocastAttachment(model, "cpu", torch.float16, scale=scale)
        attachment.attach()
        attached.append(attachment)
        models.append(model)
        return scale

    yield open_one
    for attachment in reversed(attached):
        attachment.undo()
    assert not loss_scale.active()


# ---- S as it goes ------------------------------------------------------------------------------------


class TestRules:
    @pytest.mark.parametrize("seed", [0, 1])
    def test_as_gradscaler(self, seed: int) -> None:
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        scaler = torch.amp.GradScaler("cpu", growth_interval=5)
        mine = LossScale(nn.Linear(1, 1), optimizer, growth_interval=5)
        values = []
        for good in (torch.rand(60) < 0.85).tolist():
            (scaler.scale(weight.sum() if good else weight.sum() * INF)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            mine.count_backward()
            assert mine.is_due(optimizer)
            mine.judge(optimizer, good)
            assert not mine.is_due(optimizer)
            values.append((mine.value, scaler.get_scale()))
        assert all(a == b for a, b in values) and len(set(values)) > 3

    def test_defaults_are_gradscalers(self) -> None:
        optimizer = torch.optim.SGD(small().parameters())
        scaler, mine = torch.amp.GradScaler("cpu"), LossScale(small(), optimizer)
        assert mine.value == scaler.get_scale()
        assert scaler.get_growth_interval() == mine.growth_interval
        assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)

    @pytest.mark.parametrize("verdicts", [(True, False), (False, True), (False, False)])
    def test_two_optimizers_are_one_step(self, verdicts: tuple[bool, bool]) -> None:
        model = small()
        both = [torch.optim.SGD([value], lr=0.1) for value in list(model.parameters())[:2]]
        scale = LossScale(model, both[0])
        scale.count_backward()
        for optimizer, finite in zip(both, verdicts, strict=True):
            assert scale.is_due(optimizer)
            scale.judge(optimizer, finite)
        assert (scale.value, scale.good_steps) == (32768.0, 0)

    def test_it_stays_a_normal_number(self) -> None:
        """So that S and 1/S are both exact."""
        optimizer = torch.optim.SGD(small().parameters())
        scale = LossScale(small(), optimizer, growth_interval=1)
        for finite, bound in ((True, 2.0**126), (False, 2.0**-126)):
            for _ in range(300):
                scale.count_backward()
                scale.judge(optimizer, finite)
            assert scale.value == bound
            assert torch.tensor(scale.value).reciprocal().reciprocal() == bound

    def test_a_scale_below_one_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        optimizer = torch.optim.SGD(small().parameters())
        scale = LossScale(small(), optimizer)
        with caplog.at_level(logging.INFO, "memscale"):
            for _ in range(17):
                scale.count_backward()
                scale.judge(optimizer, False)
        levels = [record.levelno for record in caplog.records]
        assert levels == [logging.INFO] * 16 + [logging.WARNING]


# ---- what the model returns --------------------------------------------------------------------------


class _Named(NamedTuple):
    a: Tensor
    b: int


@dataclasses.dataclass(frozen=True)
class _Frozen:
    a: Tensor
    b: str = "word"


def half(requires_grad: bool = True) -> Tensor:
    return torch.ones(2, dtype=torch.float16, requires_grad=requires_grad) * 2


class TestOutputs:
    @pytest.mark.parametrize(
        "made",
        [
            lambda t: t,
            lambda t: (t, 1),
            lambda t: [t, None],
            lambda t: {"a": t, "b": [t]},
            lambda t: collections.OrderedDict(a=t),
            lambda t: MappingProxyType({"a": t}),
            lambda t: _Named(t, 3),
            lambda t: _Frozen(t),
            lambda t: {"deep": (_Frozen(t), [{"a": t}])},
        ],
    )
    def test_nesting_stays(self, made: Callable[[Tensor], Any]) -> None:
        tensor = half()
        output = made(tensor)
        result = in_fp32(output)
        assert type(result) is type(output)
        assert repr(result) == repr(made(tensor.float())).replace("ToCopy", "ToCopy")

    def test_transformers_outputs(self) -> None:
        from transformers.modeling_outputs import CausalLMOutput

        logits, hidden = half(), half()
        output = CausalLMOutput(logits=logits, hidden_states=(hidden, logits))
        result = in_fp32(output)
        assert type(result) is CausalLMOutput and list(result) == ["logits", "hidden_states"]
        assert result.logits is result["logits"] is result.hidden_states[1]
        assert result.logits.dtype is result.hidden_states[0].dtype is torch.float32
        assert output.logits is logits

    @pytest.mark.parametrize(
        "tensor",
        [
            half(requires_grad=False),
            torch.ones(2, dtype=torch.float16, requires_grad=True),
            torch.ones(2, requires_grad=True) * 2,
            torch.ones(2, dtype=torch.bfloat16, requires_grad=True) * 2,
            torch.ones(2, dtype=torch.int64),
        ],
        ids=["no-gradient", "leaf", "fp32", "bf16", "integers"],
    )
    def test_what_stays(self, tensor: Tensor) -> None:
        output = {"a": (tensor, _Frozen(tensor)), "b": object()}
        assert in_fp32(output) is output

    def test_a_scalar_and_a_view(self) -> None:
        base = half()
        scalar, view = in_fp32((base.sum(), base[:1]))
        assert scalar.shape == () and view.shape == (1,)
        assert scalar.dtype is view.dtype is torch.float32
        (scalar + view).sum().backward()


# ---- steps -------------------------------------------------------------------------------------------

OPTIMIZERS = sorted(
    (
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, LBFGS)
    ),
    key=lambda kind: kind.__name__,
)


def stepped(kind: type[Optimizer], **settings: Any) -> tuple[nn.Module, Optimizer]:
    """A model and its optimizer after one good step, so that there is state."""
    model = nn.Linear(4, 3, bias=False)
    optimizer = kind(model.parameters(), lr=0.1, **settings)  # type: ignore[call-arg]
    model.weight.grad = torch.ones_like(model.weight)
    if kind is torch.optim.SparseAdam:
        model.weight.grad = model.weight.grad.to_sparse()
    optimizer.step()
    return model, optimizer


def frozen_state(optimizer: Optimizer) -> list[Any]:
    return [copy.deepcopy(dict(state)) for state in optimizer.state.values()]


def same_state(first: list[Any], second: list[Any]) -> bool:
    flat = [(a, b[key]) for one, b in zip(first, second, strict=True) for key, a in one.items()]
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in flat)


class TestSkippedSteps:
    @pytest.mark.parametrize("bad", [INF, -INF, NAN])
    @pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
    def test_nothing_moves(self, opened: Any, kind: type[Optimizer], bad: float) -> None:
        model, optimizer = stepped(kind)
        scale = opened(model, optimizer)
        before, state = model.weight.detach().clone(), frozen_state(optimizer)
        grad = model.weight.grad
        (grad._values() if grad.is_sparse else grad).view(-1)[5] = bad
        scale.count_backward()
        optimizer.step()
        assert torch.equal(before, model.weight) and same_state(state, frozen_state(optimizer))
        assert model.weight.grad is grad and scale.value == 32768.0
        (grad._values() if grad.is_sparse else grad).view(-1)[5] = 1.0
        scale.count_backward()
        optimizer.step()
        assert not torch.equal(before, model.weight) and scale.good_steps == 1

    @pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"capturable": False}])
    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
    def test_every_way_to_step(self, opened: Any, kind: type[Optimizer], settings: dict[str, bool]) -> None:
        model, optimizer = stepped(kind, **settings)
        scale = opened(model, optimizer)
        before, state = model.weight.detach().clone(), frozen_state(optimizer)
        model.weight.grad.fill_(NAN)
        scale.count_backward()
        optimizer.step()
        assert torch.equal(before, model.weight) and same_state(state, frozen_state(optimizer))

    def test_a_closure_is_looked_at_when_it_returns(self, opened: Any) -> None:
        model, optimizer = stepped(torch.optim.SGD)
        scale = opened(model, optimizer)
        before = model.weight.detach().clone()

        def closure(factor: float) -> Tensor:
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 4)) * factor).sum()
            loss.backward()
            return loss

        assert optimizer.step(lambda: closure(INF)) is not None
        assert torch.equal(before, model.weight) and scale.value == 32768.0
        optimizer.step(closure=lambda: closure(0.01))
        assert not torch.equal(before, model.weight)

    def test_clipping_by_value_hides_no_infinity(self, opened: Any) -> None:
        model, optimizer = stepped(torch.optim.SGD)
        scale = opened(model, optimizer)
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        (model(torch.ones(2, 4)) * 1e9).sum().backward()  # infinite, and nothing to make it NaN
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        assert torch.equal(before, model.weight) and scale.value == 32768.0

    def test_a_step_of_nobodys_gradients_is_not_looked_at(self, opened: Any) -> None:
        """Gradients that no scaled backward has made are the loop's own affair."""
        model, optimizer = stepped(torch.optim.SGD)
        scale = opened(model, optimizer)
        model.weight.grad = torch.full_like(model.weight, INF)
        optimizer.step()
        assert not model.weight.isfinite().any() and scale.value == 65536.0

    def test_another_models_optimizer(self, opened: Any) -> None:
        model, optimizer = stepped(torch.optim.SGD)
        scale = opened(model, optimizer)
        other, its_optimizer = stepped(torch.optim.SGD)
        opened(other, its_optimizer)
        scale.count_backward()
        other.weight.grad.fill_(INF)
        its_optimizer.step()
        assert not other.weight.isfinite().all() and scale.is_due(optimizer)

    def test_any_optimizer_that_trains_the_model(self, opened: Any) -> None:
        model, named = stepped(torch.optim.SGD)
        scale = opened(model, named)
        before = model.weight.detach().clone()
        model.weight.grad.fill_(INF)
        scale.count_backward()
        torch.optim.Adam(model.parameters(), lr=0.1).step()
        assert torch.equal(before, model.weight)

    def test_a_step_that_breaks_off(self, opened: Any) -> None:
        """Gradients of then are not put back over those of later."""

        class Breaks(torch.optim.SGD):
            broken = False

            def step(self, closure: Any = None) -> Any:
                if self.broken:
                    raise RuntimeError("broken")
                return super().step(closure)

        model, optimizer = stepped(Breaks)
        scale = opened(model, optimizer)
        model.weight.grad.fill_(INF)
        optimizer.broken = True
        scale.count_backward()
        with pytest.raises(RuntimeError, match="broken"):
            optimizer.step()
        optimizer.broken = False
        model.weight.grad = later = torch.ones_like(model.weight)
        scale.count_backward()
        optimizer.step()
        assert model.weight.grad is later

    def test_lbfgs_is_refused(self, opened: Any) -> None:
        model, optimizer = stepped(torch.optim.SGD)
        opened(model, optimizer)
        assert "LBFGS" in loss_scale.optimizer_refusal(LBFGS(model.parameters()))
        with pytest.raises(RuntimeError, match="LBFGS"):
            LBFGS(model.parameters()).step(lambda: model(torch.ones(2, 4)).sum())

    def test_an_optimizer_without_hooks_is_refused(self) -> None:
        class Deaf(Optimizer):
            def __init__(self, weights: Any) -> None:
                self.param_groups = [{"params": list(weights)}]

            def step(self, closure: Any = None) -> None:
                """Does nothing."""

        assert "no hooks" in loss_scale.optimizer_refusal(Deaf(small().parameters()))
        assert loss_scale.optimizer_refusal(torch.optim.AdamW(small().parameters())) == ""

    @pytest.mark.parametrize("has_kernel", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
    def test_finite(self, dtype: torch.dtype, has_kernel: bool) -> None:
        are_finite = loss_scale_step.are_finite
        if not has_kernel:
            are_finite = functools.partial(are_finite, check="_there_is_no_such_function")
        grads = [torch.rand(3, 4).to(dtype), torch.rand(5, 2).to(dtype).t(), torch.rand(())]
        kept = [grad.clone() for grad in grads]
        assert are_finite(grads)
        assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))
        grads[1][1, 3] = NAN
        assert not are_finite(grads)


# ---- saved, loaded, forgotten ------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def alone() -> None:
    """What stands in PyTorch's place belongs to the test."""
    forget_earlier_models()


class TestState:
    def test_saved_with_the_optimizer(self, opened: Any) -> None:
        model, optimizer = stepped(torch.optim.AdamW)
        scale = opened(model, optimizer)
        scale.value, scale.good_steps = 1024.0, 7
        state = optimizer.state_dict()
        assert state[STATE_KEY] == {"scale": 1024.0, "good_steps": 7}
        twin, its_optimizer = stepped(torch.optim.AdamW)
        its_optimizer.load_state_dict(state)  # without MemScale: nobody minds
        its_scale = opened(twin, its_optimizer)
        its_optimizer.load_state_dict(state)
        assert (its_scale.value, its_scale.good_steps) == (1024.0, 7)
        del state[STATE_KEY]
        its_optimizer.load_state_dict(state)
        assert its_scale.value == 1024.0

    def test_undone_without_a_trace(self) -> None:
        original = torch.autograd._engine_run_backward
        model, optimizer = stepped(torch.optim.SGD)
        attachment = AutocastAttachment(model, "cpu", torch.float16, scale=LossScale(model, optimizer))
        for _ in range(2):
            attachment.attach()
            assert torch.autograd._engine_run_backward is not original
            model(torch.ones(1, 4)).sum().backward()
            attachment.undo()
            assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
            assert torch.autograd._engine_run_backward is original
            assert not loss_scale_step.is_installed() and STATE_KEY not in optimizer.state_dict()
            assert model.weight._backward_hooks is None and "forward" not in model.__dict__

    def test_model_and_optimizer_are_let_go(self) -> None:
        model, optimizer = stepped(torch.optim.SGD)
        scale = LossScale(model, optimizer)
        loss_scale.enter(model, scale)
        AutocastAttachment(model, "cpu", torch.float16, scale=scale).attach()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        watched = [weakref.ref(item) for item in (model, optimizer, scale)]
        del model, optimizer, scale
        gc.collect()
        assert [ref() for ref in watched] == [None, None, None]
        assert torch.autograd._engine_run_backward is backward_calls.run_backward
        assert not loss_scale_step.is_installed()

    def test_what_somebody_else_has_put_on_top_stays(self) -> None:
        model, optimizer = stepped(torch.optim.SGD)
        attachment = AutocastAttachment(model, "cpu", torch.float16, scale=LossScale(model, optimizer))
        original = torch.autograd._engine_run_backward
        attachment.attach()
        door = torch.autograd._engine_run_backward

        def theirs(*args: Any, **kwargs: Any) -> Any:
            return door(*args, **kwargs)

        torch.autograd._engine_run_backward = theirs
        try:
            model(torch.ones(1, 4)).sum().backward()
            attachment.undo()
            assert torch.autograd._engine_run_backward is theirs
            model(torch.ones(1, 4)).sum().backward()
        finally:
            torch.autograd._engine_run_backward = original
