# SPDX-License-Identifier: Apache-2.0
"""Classes of work, moved bytes, formulas and randomness of operators, and what of them reaches a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memscale import Config, _core
from memscale.core.planner import Planner
from memscale.hardware.detect import detect
from memscale.ops import op_facts
from memscale.ops.work import moved_bytes
from memscale.techniques.step_facts import StepFacts
from memscale.trace.step import Trace

aten = torch.ops.aten


def class_of(func: Any, *args: Any, **kwargs: Any) -> str:
    """Name of the class of a call."""
    result = func(*args, **kwargs)
    outputs = [part for part in (result if isinstance(result, tuple) else (result,)) if part is not None]
    return _core.RATE_NAMES[op_facts.facts(func).work_of(args, kwargs, outputs)]


X = torch.randn(64, 64)
IMAGE = torch.randn(2, 16, 8, 8)
COMMON = ([1, 1], [1, 1], [1, 1], False, [0, 0])


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "name"),
    [
        (aten.mm.default, (X, X), {}, "matrix"),
        (aten.addmm.default, (X[0], X, X), {}, "matrix"),
        (aten.bmm.default, (X[None], X[None]), {}, "batch"),
        (aten.add.Tensor, (X, X), {}, "move"),
        (aten.threshold_backward.default, (X, X, 0), {}, "move"),
        (aten.exp.default, (X,), {}, "math"),
        (aten.tanh.default, (X,), {}, "slow_math"),
        (aten.gelu.default, (X,), {}, "math"),
        (aten.gelu.default, (X,), {"approximate": "tanh"}, "slow_math"),
        (aten.gelu_backward.default, (X, X), {"approximate": "tanh"}, "slow_math"),
        (aten.pow.Tensor_Scalar, (X, 2), {}, "move"),
        (aten.pow.Tensor_Scalar, (X, 2.5), {}, "slow_math"),
        (aten.pow.Tensor_Tensor, (X, X), {}, "slow_math"),
        (aten._softmax.default, (X, -1, False), {}, "reduce"),
        (aten.native_layer_norm.default, (X, [64], None, None, 1e-5), {}, "reduce"),
        (aten.native_batch_norm.default, (IMAGE, None, None, None, None, True, 0.1, 1e-5), {}, "channel"),
        (aten.where.self, (X > 0, X, X), {}, "select"),
        (aten.clone.default, (X,), {}, "move"),
        (aten.clone.default, (X.t(),), {"memory_format": torch.contiguous_format}, "select"),
        (aten.clone.default, (IMAGE.transpose(1, 2),), {"memory_format": torch.contiguous_format}, "move"),
        (aten.copy_.default, (torch.empty(64, 64), X.t()), {}, "select"),
        (aten.copy_.default, (torch.empty(64, 64), X[0]), {}, "move"),
        (aten.max_pool2d_with_indices.default, (IMAGE, [2, 2]), {}, "window"),
        (aten.upsample_nearest2d.default, (IMAGE, [16, 16]), {}, "window"),
        (aten.bernoulli.p, (X, 0.5), {}, "random"),
        (aten.embedding.default, (X, torch.arange(5)), {}, "gather"),
        (aten.convolution.default, (IMAGE, torch.randn(4, 16, 3, 3), None, *COMMON, 1), {}, "convolution"),
        (aten.convolution.default, (IMAGE, torch.randn(16, 1, 3, 3), None, *COMMON, 16), {}, "grouped"),
        (
            aten.convolution_backward.default,
            (IMAGE, IMAGE, torch.randn(16, 1, 3, 3), [0], *COMMON, 16, [True, True, False]),
            {},
            "grouped_gradient",
        ),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (IMAGE, IMAGE, IMAGE), {}, "attention"),
        (aten.histc.default, (X,), {}, "other"),
    ],
)
def test_classes(func: Any, args: Any, kwargs: Any, name: str) -> None:
    assert class_of(func, *args, **kwargs) == name


def moved(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    info = op_facts.facts(func)
    return moved_bytes(info.schema, info.work, inputs, outputs)


def test_moved_bytes_count_what_is_touched() -> None:
    size = X.numel() * 4
    assert moved(aten.add.Tensor, [X, X], [X]) == 3 * size
    assert moved(aten.add.Tensor, [X, X[0].expand(64, 64)], [X]) == 2 * size + 64 * 4
    assert moved(aten.empty_like.default, [X], [X]) == 0
    assert moved(aten.copy_.default, [X, X], [X]) == 2 * size
    assert moved(aten.zero_.default, [X], [X]) == size
    index = torch.arange(2)
    assert moved(aten.embedding.default, [X, index], [X[:2]]) == 2 * (2 * 64 * 4) + 16


def flops(func: Any, *args: Any) -> int:
    result = func(*args)
    return op_facts.flops(op_facts.facts(func), args, {}, result)


def test_formulas_that_pytorch_lacks() -> None:
    q = torch.randn(2, 3, 16, 8)
    k = torch.randn(2, 3, 32, 8)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    both = 2 * 2 * 3 * 16 * 32 * (8 + 8)
    assert flops(forward, q, k, k) == both
    out, sums = forward(q, k, k)
    gradient = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert flops(gradient, out, q, k, k, out, sums, 0.0, False) == both * 5 // 2
    weight = torch.randn(16, 1, 3, 3)
    once = 2 * IMAGE.numel() * 9
    assert flops(aten.convolution.default, IMAGE, weight, None, *COMMON, 16) == once
    for mask, count in (([True, True, False], 2), ([False, True, True], 1)):
        call = (IMAGE, IMAGE, weight, [0], *COMMON, 16, mask)
        assert flops(aten.convolution_backward.default, *call) == count * once


def test_formula_of_a_recurrent_layer() -> None:
    weights = [torch.randn(32, 4), torch.randn(32, 8), torch.randn(32), torch.randn(32)]
    state = torch.randn(1, 3, 8)
    call = (torch.randn(5, 3, 4), *weights, state, state, False, [], 2, 8, 1, True, False, False, True)
    assert flops(aten.mkldnn_rnn_layer.default, *call) == 2 * 5 * 3 * (32 * 4 + 32 * 8)


Q = torch.randn(1, 2, 16, 8)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.native_dropout.default, (X, 0.5, True)),
        (aten.native_dropout.default, (X, 0.0, True)),
        (aten.native_dropout.default, (X, 0.5, False)),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q, Q, Q, 0.0, True)),
        (aten._scaled_dot_product_attention_math.default, (Q, Q, Q, None, 0.0)),
        (aten._scaled_dot_product_attention_math.default, (Q, Q, Q, None, 0.5)),
        (aten.rrelu_with_noise.default, (X, torch.empty(64, 64), 0.1, 0.3, False)),
        (aten.rrelu_with_noise.default, (X, torch.empty(64, 64), 0.1, 0.3, True)),
        (aten.bernoulli.p, (X, 0.5)),
        (aten.add.Tensor, (X, X)),
    ],
)
def test_what_draws_is_what_moves_the_generator(func: Any, args: Any) -> None:
    before = torch.get_rng_state()
    func(*args)
    assert op_facts.facts(func).draws(args, {}) == (not torch.equal(before, torch.get_rng_state()))


@pytest.mark.parametrize(
    "func",
    [
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ],
)
def test_attention_of_a_card_draws_with_dropout_only(func: Any) -> None:
    info = op_facts.facts(func)
    place = [arg.name for arg in func._schema.arguments].index("dropout_p")
    args = (Q, Q, Q, None, False)[:place]
    assert not info.draws(args, {}) and not info.draws((*args, 0.0), {})
    assert not info.draws(args, {"dropout_p": 0.0})
    assert info.draws((*args, 0.1), {}) and info.draws(args, {"dropout_p": 0.1})


# ---- in a graph --------------------------------------------------------------------------------------


def traced(model: nn.Module, *args: Tensor, autocast: bool = False) -> Trace:
    planner = Planner(model, Config(), StepFacts(), detect(torch.device("cpu")))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return planner.trace(args, {}, False)


def kinds(trace: Trace) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, _, _, flags, *_, work in trace.graph.ops():
        half = _core.WORK_COUNT if flags & _core.OP_HALF else 0
        found.setdefault(name, set()).add(_core.RATE_NAMES[work + half])
    return found


class Block(nn.Module):
    """Attention without dropout, and a product."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)[:, None]
        return self.dropout(F.scaled_dot_product_attention(q, q, q)).sum()


def test_classes_and_precision_reach_the_graph() -> None:
    x = torch.randn(2, 8, 16)
    full, half = kinds(traced(Block(), x)), kinds(traced(Block(), x, autocast=True))
    assert full["addmm"] == {"matrix"} and half["addmm"] == {"matrix_half"}
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert full[name] == {"attention"} and half[name] == {"attention_half"}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_only_what_draws_is_random_in_the_graph(dropout: float) -> None:
    trace = traced(Block(dropout), torch.randn(2, 8, 16))
    random = [op[0] for op in trace.graph.ops() if op[3] & _core.OP_RANDOM]
    assert all("attention" not in name for name in random)
    assert bool(random) == (dropout > 0)


class Named(nn.Sequential):
    """A subclass that leaves forward alone."""


class Other(nn.Sequential):
    """One that does not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_chains_are_marked() -> None:
    hooked = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    hooked[1].register_forward_hook(lambda *_: None)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4)), Named(nn.Linear(4, 4)), Other(nn.Linear(4, 4)), hooked, nn.ReLU()
    )
    trace = traced(nn.Sequential(model, nn.Flatten()), torch.randn(2, 4))
    flags = {path: row[3] for (path, _), row in zip(trace.modules, trace.graph.modules(), strict=True)}
    chains = {path for path, value in flags.items() if value & _core.MODULE_CHAIN}
    assert chains == {"", "0", "0.0", "0.1"}


def test_a_forward_of_its_own_is_no_chain() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    inner.forward = lambda x: inner[1](inner[0](x)) * 2  # type: ignore[method-assign, assignment]
    trace = traced(nn.Sequential(inner), torch.randn(2, 4))
    rows = trace.graph.modules()
    assert [bool(row[3] & _core.MODULE_CHAIN) for row in rows[:2]] == [True, False]
