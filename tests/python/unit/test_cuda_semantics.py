# SPDX-License-Identifier: Apache-2.0
"""Traces for a card on a build without CUDA: attention, dropout, autocast, workspaces, optimizers, first
steps.

Expected numbers are those of PyTorch 2.11's CUDA build on the stand-in runtime (`bench/standin`).
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tallies
from memscale import _core
from memscale.cuda import attention, matrix
from memscale.cuda.attention import Attention, Backend
from memscale.cuda.card import CardFacts
from memscale.hardware.target import CPU, Target
from memscale.techniques.step_facts import StepFacts
from memscale.trace.static import trace_static
from memscale.trace.step import Trace

A100, RTX3090, H100, T4 = (CardFacts.of_capability(pair) for pair in ((8, 0), (8, 6), (9, 0), (7, 5)))
HALF = torch.bfloat16


def tell(text: str) -> None:
    """Of a traced forward, whose trace puts back whatever the code of a model reaches."""
    tallies.add(text)


def told() -> list[str]:
    """What has been told since it was asked last, in order of the alphabet."""
    found = sorted(tallies.keys())
    tallies.clear()
    return found


class Block(nn.Module):
    """A module whose loss is the mean of a function of its input."""

    def __init__(self, run: Any, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.weight = nn.Parameter(torch.zeros(64))
        self.run = run

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.run(self, x * self.weight).float().mean()}


def traced(model: nn.Module, x: Tensor, target: Target | None = None, **facts: Any) -> Trace:
    """A trace for an A100, or for another target."""
    return trace_static(model, (x,), {}, StepFacts(target=target or Target.cuda((8, 0)), **facts))


def names(trace: Trace) -> list[str]:
    """Operators in order."""
    return [op[0] for op in trace.graph.ops()]


def sizes(trace: Trace, category: int) -> list[int]:
    """Bytes of the buffers of a category."""
    return [size for size, _, _, kind, _ in trace.graph.buffers() if kind == category]


def made_by(trace: Trace, operator: str) -> list[int]:
    """Bytes of what the first operation of a name made, scratch included, in order."""
    at = names(trace).index(operator)
    return [size for size, begin, _, _, resident in trace.graph.buffers() if begin == at and not resident]


class TestAttentionChoice:
    @staticmethod
    def choose(card: CardFacts, dtype: torch.dtype = HALF, **changes: Any) -> Backend:
        query = torch.empty(
            changes.pop("shape", (2, 8, 128, 64)), dtype=dtype, device="meta", requires_grad=True
        )
        key = torch.empty(changes.pop("keys", query.shape), dtype=dtype, device="meta")
        facts = {"mask": None, "dropout": 0.0, "causal": False, "scale": None, "grouped": False} | changes
        return attention.choose(Attention(query, key, key, **facts), card)

    @pytest.mark.parametrize(
        ("card", "dtype", "changes", "expected"),
        [
            (A100, HALF, {}, Backend.FLASH),
            (A100, HALF, {"dropout": 0.1, "causal": True}, Backend.FLASH),
            (A100, torch.float32, {}, Backend.EFFICIENT),
            (A100, HALF, {"mask": torch.empty(2, 1, 128, 128, dtype=HALF)}, Backend.EFFICIENT),
            (A100, HALF, {"keys": (2, 2, 128, 64), "grouped": True}, Backend.FLASH),
            (A100, torch.float32, {"keys": (2, 2, 128, 64), "grouped": True}, Backend.MATH),
            (A100, HALF, {"keys": (2, 8, 64, 64), "causal": True}, Backend.EFFICIENT),
            (A100, HALF, {"shape": (2, 8, 128, 264)}, Backend.EFFICIENT),
            (A100, HALF, {"shape": (2, 8, 128, 60)}, Backend.FLASH),
            (A100, torch.float32, {"shape": (2, 8, 128, 63)}, Backend.MATH),
            (A100, HALF, {"shape": (8, 128, 64)}, Backend.MATH),
            (RTX3090, HALF, {"shape": (2, 8, 128, 200)}, Backend.EFFICIENT),
            (RTX3090, HALF, {"shape": (2, 8, 128, 256)}, Backend.FLASH),
            (RTX3090, HALF, {"shape": (2, 8, 128, 256), "dropout": 0.1}, Backend.EFFICIENT),
            (H100, HALF, {}, Backend.CUDNN),
            (H100, HALF, {"shape": (2, 8, 128, 60)}, Backend.FLASH),
            (H100, HALF, {"shape": (2, 8, 1, 64)}, Backend.FLASH),
            (H100, torch.float32, {}, Backend.EFFICIENT),
            (T4, HALF, {}, Backend.MATH),
            (T4, torch.float16, {}, Backend.EFFICIENT),
            (T4, torch.float32, {"shape": (2, 8, 128, 63)}, Backend.EFFICIENT),
        ],
    )
    def test_as_pytorch_chooses(
        self, card: CardFacts, dtype: torch.dtype, changes: dict[str, Any], expected: Backend
    ) -> None:
        assert self.choose(card, dtype, **changes) is expected


class TestOperators:
    def test_dropout_keeps_a_byte_per_element(self) -> None:
        trace = traced(Block(lambda self, x: F.dropout(x, 0.1)), torch.zeros(128, 64))
        assert made_by(trace, "native_dropout") == [128 * 64, 4 * 128 * 64]  # the mask first
        assert "bernoulli_.float" not in names(trace)

    def test_dropout_of_nothing_is_no_operation(self) -> None:
        trace = traced(Block(lambda self, x: F.dropout(x, 0.0)), torch.zeros(128, 64))
        assert not {"native_dropout", "clone"} & set(names(trace))

    def test_flash_attention_pads_odd_heads(self) -> None:
        def run(self: Block, x: Tensor) -> Tensor:
            heads = x.bfloat16().view(2, 32, 16, 4).transpose(1, 2)[..., :3]
            return F.scaled_dot_product_attention(heads, heads, heads)

        trace = traced(Block(run), torch.zeros(64, 64))
        found = names(trace)
        before = found[: found.index("_scaled_dot_product_flash_attention")]
        assert before.count("constant_pad_nd") == 3

    def test_boolean_mask_becomes_additive(self) -> None:
        def run(self: Block, x: Tensor) -> Tensor:
            heads = x.view(2, 32, 8, 8).transpose(1, 2)
            mask = torch.ones(32, 32, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(heads, heads, heads, mask)

        assert "_scaled_dot_product_efficient_attention" in names(traced(Block(run), torch.zeros(64, 64)))

    def test_reduction_scratch_of_a_bias_gradient(self) -> None:
        body = Block(lambda self, x: self.parts[0](x), nn.Linear(64, 768))
        trace = traced(body, torch.zeros(1024, 64))
        assert made_by(trace, "sum.dim_IntList")[:3] == [3072, 6291456, 24]

    def test_other_threads_see_nothing(self) -> None:
        told()

        def run(self: Block, x: Tensor) -> Tensor:
            def other() -> None:
                y = F.dropout(torch.ones(8, requires_grad=True), 0.5)
                tell(y.grad_fn.name() if y.grad_fn is not None else "")

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return F.dropout(x, 0.5)

        traced(Block(run), torch.zeros(8, 64))
        assert told() == ["MulBackward0"]

    def test_nothing_is_left_behind(self) -> None:
        before = torch.autocast.__init__, torch.autocast.__exit__, torch.is_autocast_enabled
        traced(Block(lambda self, x: F.dropout(x, 0.5)), torch.zeros(8, 64))
        assert before == (torch.autocast.__init__, torch.autocast.__exit__, torch.is_autocast_enabled)
        after = F.dropout(torch.ones(8, requires_grad=True), 0.5)
        assert after.grad_fn is not None and after.grad_fn.name() == "MulBackward0"
        with torch.autocast("cpu", HALF):
            assert torch.exp(torch.ones(4, dtype=HALF)).dtype is HALF  # CPU autocast's own list


class TestAutocast:
    @staticmethod
    def dtypes(*contexts: Any) -> dict[str, str]:
        told()

        def note(name: str, value: object) -> None:
            tell(f"{name}={value}")

        def run(self: Block, x: Tensor) -> Tensor:
            with torch.autocast("cuda", HALF):
                h = self.parts[0](x)
                note("linear", h.dtype)
                note("softmax", h.softmax(-1).dtype)
                note("exp", h.exp().dtype)
                note("sum", h.sum().dtype)
                note("relu", h.relu().dtype)
                note("layer_norm", F.layer_norm(h, (64,)).dtype)
                note("norm", h.norm().dtype)
                note("einsum", torch.einsum("ij,kj->ik", x, x).dtype)
                note("scatter_add", torch.zeros(4, 64).scatter_add(0, torch.zeros(4, 64).long(), h[:4]).dtype)
                note("cross_entropy", F.cross_entropy(h, torch.zeros(16).long()).dtype)
                note("enabled", torch.is_autocast_enabled("cuda"))
                return h

        traced(Block(run, nn.Linear(64, 64)), torch.zeros(16, 64))
        return dict(line.split("=") for line in told())

    def test_lists_are_those_of_cuda(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "CUDA is not available. Disabling" would be one
            found = self.dtypes()
        lower = {name for name, dtype in found.items() if dtype == str(HALF)}
        assert lower == {"linear", "relu", "einsum"}
        assert found["enabled"] == "True"

    def test_weights_are_cast_once(self) -> None:
        def run(self: Block, x: Tensor) -> Tensor:
            with torch.autocast("cuda", HALF):
                return self.parts[0](self.parts[0](x))

        trace = traced(Block(run, nn.Linear(64, 64)), torch.zeros(16, 64))
        casts = Counter(
            size for size, begin, *_ in trace.graph.buffers() if begin and names(trace)[begin] == "_to_copy"
        )
        assert casts[2 * 64 * 64] == 1

    def test_around_the_step(self) -> None:
        body = Block(lambda self, x: self.parts[0](x), nn.Linear(64, 64))
        with torch.autocast("cpu", HALF):
            trace = traced(body, torch.zeros(16, 64))
        assert made_by(trace, "addmm") == [2 * 16 * 64]
        assert "_to_copy" in names(trace)
        assert torch.is_autocast_enabled("cpu") is False


class TestWorkspaces:
    @pytest.mark.parametrize(
        ("capability", "expected"), [((8, 0), 8_519_680), ((8, 6), 8_519_680), ((9, 0), 33_554_432)]
    )
    def test_one_per_thread_and_one_for_the_bias(self, capability: tuple[int, int], expected: int) -> None:
        body = Block(lambda self, x: self.parts[0](x), nn.Linear(64, 64))
        trace = traced(body, torch.zeros(16, 64), Target.cuda(capability))
        assert sizes(trace, _core.CATEGORY_WORKSPACE) == [expected, 1 << 20, expected]

    @pytest.mark.parametrize(("bias", "expected"), [(True, 1 << 20), (False, 0)])
    def test_a_second_run_adds_its_bias_in_the_thread_of_backward(self, bias: bool, expected: int) -> None:
        """On the stand-in GPT-2 and BERT peak 1 MiB above a prediction without it, Llama does not."""
        blocks = (nn.Sequential(nn.Linear(64, 64, bias=bias), nn.GELU(), nn.Tanh()) for _ in range(4))
        body = Block(lambda self, x: self.parts[0](x), nn.Sequential(*blocks))
        trace = traced(body, torch.zeros(1 << 15, 64))
        assert trace.rerun_bytes == expected
        ways: Any = {"sim": {"kind": "cuda"}, "rerun_bytes": trace.rerun_bytes}
        plain, forced = (_core.decide(trace.graph, 1 << 40, force=how, **ways) for how in (False, True))
        assert {choice[1] for choice in forced.choices} & {"checkpoint", "selective"}
        assert (plain.summary["staging_bytes"], forced.summary["staging_bytes"]) == (0, expected)

    def test_none_without_products(self) -> None:
        trace = traced(Block(lambda self, x: x.relu()), torch.zeros(16, 64))
        assert sizes(trace, _core.CATEGORY_WORKSPACE) == []

    @pytest.mark.parametrize(
        ("config", "expected"),
        [(":4096:8", 32 << 20), (":4096:2:16:8", 8_519_680), (":0:0", 0), ("x", 8_519_680)],
    )
    def test_environment(self, monkeypatch: pytest.MonkeyPatch, config: str, expected: int) -> None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
        assert matrix.workspace_bytes(Target.cuda((8, 0))) == expected

    def test_a_cpu_has_none(self) -> None:
        body = Block(lambda self, x: self.parts[0](x), nn.Linear(64, 64))
        assert sizes(traced(body, torch.zeros(16, 64), CPU), _core.CATEGORY_WORKSPACE) == []


class TestOptimizers:
    @staticmethod
    def trace(make: Any) -> Trace:
        body = Block(lambda self, x: self.parts[1](self.parts[0](x)), nn.Linear(64, 64), nn.Linear(64, 64))
        return traced(body, torch.zeros(16, 64), optimizer=make(body.parameters()))

    def test_foreach_is_the_default(self) -> None:
        trace = self.trace(torch.optim.AdamW)
        assert made_by(trace, "_foreach_sqrt") == [4 * 64, 4 * 4096, 4 * 64, 4 * 4096, 4 * 64]
        state = sizes(trace, _core.CATEGORY_OPTIMIZER_STATE)
        assert len(state) == 2 * 5  # the step counters lie in host memory

    def test_foreach_can_be_refused(self) -> None:
        found = names(self.trace(lambda parameters: torch.optim.AdamW(parameters, foreach=False)))
        assert not any(name.startswith("_foreach") for name in found)

    def test_fused_counts_on_the_card(self) -> None:
        trace = self.trace(lambda parameters: torch.optim.AdamW(parameters, fused=True))
        assert len(sizes(trace, _core.CATEGORY_OPTIMIZER_STATE)) == 3 * 5

    def test_a_foreign_optimizer_keeps_its_way(self) -> None:
        class Own(torch.optim.SGD):
            pass

        found = names(self.trace(lambda parameters: Own(parameters, lr=0.1)))
        assert not any(name.startswith("_foreach") for name in found)


class Adds(nn.Module):
    """Adds rows up as indices say, which a card does in any order."""

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(len(x), device=x.device) // 2
        return x + torch.zeros_like(x).index_add(0, index, x.tanh())


class Counts(nn.Module):
    """The same of whole numbers, whose order does not show."""

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(len(x), dtype=torch.long, device=x.device)
        count = torch.zeros(len(x), dtype=torch.long, device=x.device).index_add(0, ones.cumsum(0) - 1, ones)
        return x.tanh() * count[:, None]


def test_modules_that_a_card_gives_other_bits_each_time_are_known() -> None:
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(8, 8), Adds()), Counts(), nn.Linear(8, 8))
    model.register_forward_hook(lambda module, args, made: {"loss": made.mean()})
    x = torch.randn(4, 8)
    assert traced(model, x).unrepeatable == {"", "0", "0.1"}
    assert not traced(model, x, target=CPU).unrepeatable
