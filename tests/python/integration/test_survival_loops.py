# SPDX-License-Identifier: Apache-2.0
"""What loops and models do around a step that runs out of memory: every bit, or the original error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import memscale
from oom_samples import FailingAt

STEPS, FAILS = 4, 2


class Body(nn.Module):
    """Two layers, a batch norm and dropout; with more before, in the middle and behind."""

    def __init__(self, middle: Callable[[Body, Tensor], Tensor] = lambda self, h: h) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.middle = middle
        self.extra: Any = None
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        """Four numbers a row."""
        h = self.middle(self, self.norm(self.first(x)).tanh())
        return self.last(nn.functional.dropout(h, 0.2, self.training))


def batch() -> Tensor:
    return torch.randn(6, 8)


Step = Callable[[nn.Module], Any]


def backward_of_one(model: nn.Module) -> Any:
    model(batch()).square().mean().backward()


@dataclass
class Loop:
    """A model and what is done with it in each step.

    Attributes:
        step: runs forward and backward; what it returns is compared, too.
        make: the model.
        reason: in the log, why its steps are not repeated; "": they are.
        tries: failures, at operations evenly spread.
        least: so many of them must be survived.
    """

    step: Step = backward_of_one
    make: Callable[[], nn.Module] = Body
    reason: str = ""
    tries: int = 4
    least: int = 2


def two_forwards(model: nn.Module) -> None:
    """Each weight has gradients already, from the steps before: the order of the sums shows."""
    (model(batch()).square().mean() + model(batch()).sin().mean() + model(batch()).exp().mean()).backward()


def penalty_between(model: Any) -> None:
    one = model(batch()).square().mean()
    penalty = model.first.weight.square().sum()
    (one + penalty + model(batch()).sin().mean()).backward()


def one_autocast_block(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch()).square().mean() + model(batch()).sin().mean()
    loss.backward()


def losses_kept_for_later(model: nn.Module) -> None:
    losses = [model(batch()).square().mean() for _ in range(3)]
    for loss in losses[::-1]:
        loss.backward()


def evaluation_between(model: Any) -> Any:
    out = model(batch())
    model.count += 1
    model.eval()
    with torch.no_grad():
        seen = model(batch())
    model.train()
    torch.manual_seed(model.count)
    out.square().mean().backward()
    return seen, torch.rand(2)


def weight_changes_between(model: Any) -> None:
    out = model(batch())
    with torch.no_grad():
        model.last.bias.add_(1)  # plain autograd does not need it
    out.square().mean().backward()


class Filling(nn.Module):
    """Its forward fills, and empties, what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, x: dict[str, Any], seen: list[Any]) -> Tensor:
        out: Tensor = self.body(x.pop("x"))
        seen.append(len(seen))
        x["rows"] = out.shape[0]
        return out * (1 + len(seen))


def filled_arguments(model: nn.Module) -> Any:
    given, seen = {"x": batch()}, [3]
    model(given, seen).square().mean().backward()
    assert list(given) == ["rows"] and seen == [3, 1]


class Listing(nn.Module):
    """Its outputs are in a list that it holds, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.outputs = [self.body(x)]
        return {"all": self.outputs, "more": (self.body(2 * x), 1)}


def listed_outputs(model: Any) -> None:
    out = model(batch())
    assert out["all"] is model.outputs and type(out["more"]) is tuple
    (model.outputs[0].square().mean() + out["more"][0].sin().mean()).backward()
    model.outputs = []


class Pair(nn.Module):
    """Two outputs; the second one may be a view of the first."""

    def __init__(self, is_view: bool) -> None:
        super().__init__()
        self.one, self.other, self.is_view = nn.Linear(8, 4), nn.Linear(8, 4), is_view

    def forward(self, x: Tensor) -> Any:
        out = self.one(x)
        return out, out[:, :1] if self.is_view else self.other(x).tanh()


def changed_view(model: nn.Module) -> None:
    out, view = model(batch())
    out.mul_(3)
    view.sum().backward()


def backward_of_each(model: nn.Module) -> None:
    for out in model(batch()):
        out.square().mean().backward()


def twice_the_same_input(model: nn.Module) -> Any:
    x = batch().requires_grad_()
    (model(x) + x[:, :4]).square().mean().backward()
    return x.grad


def tagged_input(model: nn.Module) -> Any:
    x: Any = batch()
    x.tag = 1
    model(x).square().mean().backward()
    return x.tag


class Tagging(Body):
    """Notes something on its input."""

    def forward(self, x: Any) -> Any:
        x.tag += 1
        return super().forward(x) * x.tag


def aux_loss(self: Body, h: Tensor) -> Tensor:
    self.extra = h.square().mean()
    return h


def loss_with_aux(model: Any) -> None:
    (model(batch()).square().mean() + model.extra).backward()


def hook_inside(self: Body, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: setattr(self, "count", self.count + 1))
    return h


def graded_inside(self: Body, h: Tensor) -> Tensor:
    self.last.bias.grad = torch.ones(4) if self.last.bias.grad is None else self.last.bias.grad + 1
    return h


def written_inside(self: Body, h: Tensor) -> Tensor:
    self.extra = torch.zeros(8) if self.extra is None else self.extra
    self.extra.mul_(0.5).add_(h.detach().mean(0))
    return h + self.extra


def teacher_by_data(self: Body, h: Tensor) -> Tensor:
    if self.extra is None:
        self.extra = [nn.Linear(8, 8).requires_grad_(False)]
    self.extra[0].weight.data.mul_(0.9).add_(self.first.weight.data, alpha=0.1)
    return h + self.extra[0](h)


class Keeping(Body):
    """Holds its output."""

    def forward(self, x: Tensor) -> Any:
        self.extra = super().forward(x)
        return self.extra


def loss_by_attribute(model: Any) -> None:
    model(batch())
    model.extra.square().mean().backward()
    model.extra = None


class Stateful(nn.Module):
    """Reads what its last forward has left, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 4)
        self.state: Any = None

    def forward(self, x: Tensor) -> Any:
        self.state = self.cell(x, self.state)
        return self.state * 2


def three_of_a_state(model: Any) -> None:
    model.state = None
    loss = sum(model(batch()).square().mean() for _ in range(3))
    loss.backward()
    model.state = None


class Counting(torch.autograd.Function):
    """Its backward is Python code with an effect."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, owner: Body) -> Tensor:
        ctx.owner = owner
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.owner.count += 1
        return gradient * ctx.owner.count, None


class Rounding(torch.autograd.Function):
    """Its backward draws random numbers."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(gradient)


def cached_generation(model: Any) -> Any:
    """The key/value cache is an output, too, and the model's plan may switch it off."""
    out = model(torch.randint(0, 96, (2, 24)), labels=torch.randint(0, 96, (2, 24)))
    out.loss.backward()
    return out.loss.detach(), out.logits.detach()


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=24, n_embd=16, n_layer=2, n_head=2))


def mixtral() -> nn.Module:
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 2,
    }
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=96, hidden_size=16, intermediate_size=16, output_router_logits=True, **sizes)
    )


def callers_checkpoint(model: nn.Module) -> None:
    checkpoint(model, batch(), use_reentrant=False).square().mean().backward()


LOOPS = {
    "one forward": Loop(),
    "several forwards before one backward": Loop(two_forwards),
    "a backward each, in another order": Loop(losses_kept_for_later),
    "an evaluation between": Loop(evaluation_between, least=1),
    "a weight changes between": Loop(weight_changes_between, least=1),
    "arguments are filled": Loop(filled_arguments, Filling),
    "outputs in a list of the model's": Loop(listed_outputs, Listing),
    "a backward for each output": Loop(backward_of_each, lambda: Pair(False)),
    "a function's backward draws": Loop(make=lambda: Body(lambda self, h: Rounding.apply(h))),
    "a function's backward counts": Loop(make=lambda: Body(lambda self, h: Counting.apply(h, self)), least=1),
    "a key/value cache": Loop(cached_generation, gpt2, tries=2, least=1),
    "router logits, collected by hooks": Loop(cached_generation, mixtral, tries=2, least=1),
    "an input needs a gradient": Loop(twice_the_same_input, reason="an input needs a gradient"),
    "a tag on an input": Loop(tagged_input, Tagging, reason="attributes of an argument"),
    "a penalty between forwards": Loop(penalty_between, reason="weights of the model beside"),
    "two forwards in one autocast block": Loop(one_autocast_block, reason="share the casts of weights"),
    "an output is a view of another": Loop(changed_view, lambda: Pair(True), reason="on the same memory"),
    "a loss in an attribute": Loop(
        loss_with_aux, lambda: Body(aux_loss), reason="leaves a tensor with its graph"
    ),
    "a hook inside": Loop(make=lambda: Body(hook_inside), reason="registers hooks"),
    "a gradient made inside": Loop(make=lambda: Body(graded_inside), reason="changes gradients"),
    "a tensor written inside": Loop(make=lambda: Body(written_inside), reason="no registered buffer"),
    "a teacher written by .data": Loop(make=lambda: Body(teacher_by_data), reason="no registered buffer"),
    "an output in an attribute, too": Loop(loss_by_attribute, Keeping, reason="held elsewhere"),
    "a state with its graph": Loop(three_of_a_state, Stateful, reason="leaves a tensor with its graph"),
    "a checkpoint of the caller's": Loop(callers_checkpoint, reason="hooks on saved tensors"),
}


@dataclass
class Ran:
    """What a loop has left, and how it went."""

    tensors: list[Any] = field(default_factory=list)
    error: str = ""
    count: int = 0
    recoveries: int = 0


def run(loop: Loop, at: int | None = None) -> Ran:
    """Some steps, gradients adding up; an operation of one fails.

    Args:
        loop: what runs.
        at: number of the operation; 0: none fails; None: the model is plain.
    """
    torch.manual_seed(0)
    model, ran = loop.make(), Ran()
    if at is not None:
        memscale.wrap(model, on_oom="survive", enable_logging=False)
    for step in range(STEPS):
        failing = FailingAt(*([at] if at and step == FAILS else []))
        try:
            with failing:
                ran.tensors.append(loop.step(model))
        except RuntimeError as error:
            ran.error = str(error)
            break
        finally:
            ran.count = failing.count if step == FAILS else ran.count
    executor: Any = memscale.executor_of(model)
    ran.recoveries = 0 if executor is None else executor.oom.recoveries
    extra = getattr(model, "count", 0), getattr(model, "extra", None)
    ran.tensors += [*extra, *model.parameters(), *model.buffers(), torch.get_rng_state()]
    ran.tensors += [value.grad for value in model.parameters()]
    ran.tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(ran.tensors) if leaf is not None]
    if at is not None:
        memscale.detach(model)
    return ran


def equal(one: Ran, other: Ran) -> bool:
    """Whether all that they have left is the same."""
    kept = [[value for value in ran.tensors if isinstance(value, (Tensor, int))] for ran in (one, other)]
    pairs = zip(*kept, strict=True)
    return all(torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs)) for mine, theirs in pairs)


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_every_bit_or_the_error(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = LOOPS[name]
    plain = run(loop)
    with caplog.at_level(logging.WARNING, "memscale"):
        quiet = run(loop, 0)
    assert not quiet.error and equal(quiet, plain) and not quiet.recoveries
    assert (loop.reason in caplog.text) if loop.reason else ("cannot be repeated" not in caplog.text)
    survived = 0
    for at in range(1, quiet.count + 1, max(1, quiet.count // loop.tries)):
        ran = run(loop, at)
        if ran.error:
            assert "DefaultCPUAllocator" in ran.error
        else:
            assert equal(ran, plain)
            survived += ran.recoveries  # none where planning was what failed
    if not loop.reason:
        assert survived >= loop.least
