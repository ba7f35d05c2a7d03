# SPDX-License-Identifier: Apache-2.0
"""Numbers that autograd keeps as tensors: counted where PyTorch's profiler sees them, and for as long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from trace_program import Meter, trace_program

import memscale
from memscale import _core
from memscale.core.executor import Planned
from memscale.hardware.target import Target
from memscale.ops import op_facts
from zoo.training import peak_bytes

NOTE = "a number that autograd keeps"
WIDTH, WIDE = 32, 256


class Scaled(nn.Module):
    """Layers between which one operation stands; what they save makes the last one the peak."""

    def __init__(self, operation: Callable[[Tensor], Tensor], depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.operation(layer(x)).tanh()
        return x.sum()


def both(model: nn.Module, batch: dict[str, Tensor], budget: int = 1 << 40) -> tuple[int, int, Planned]:
    """Predicted peak, measured peak and plan of a step of SGD."""
    tensors = (*model.parameters(), *model.buffers(), *batch.values())
    held = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        output = model(**batch)
        (output if isinstance(output, Tensor) else output.loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    config = memscale.Config(memory_budget=budget, enable_logging=False)
    with memscale.optimize(model, optimizer, config) as executor:
        for _ in range(2):
            step()
        truth = peak_bytes(step) + sum(held.values())
        assert executor.planned is not None
        plan = executor.planned.plan
        assert plan.profile == "static"
        return plan.predicted.allocated_peak_bytes, truth, executor.planned


def counted(graph: _core.Graph) -> list[int]:
    """Buffers of a graph that are numbers."""
    return [buffer for buffer, _, text in graph.buffer_notes() if text == NOTE]


OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "product": (lambda x: 0.5 * x, 8),
    "products": (lambda x: torch.mul(2, x.sin()) * True, 8 + 1),
    "quotients": (lambda x: 3 / (x.exp() / 3) + torch.div(2, x.cosh()), 8 + 8 + 8),
    "rounded": (lambda x: x + torch.div(x, 3, rounding_mode="floor"), 8),
    "in-place": (lambda x: x.mul_(0.5).sin().div_(3), 8 + 8),
    "in-place-view": (lambda x: x.view(-1, 4)[:, :2].mul_(0.5).sum() + x, 8),
    "sums": (lambda x: 1 - (x + 0.5) + 0.5 * x.detach(), 0),
    "powers": (lambda x: 2.0 ** (x**3.0), 0),
    "mixtures": (lambda x: torch.lerp(torch.where(x > 0, x, 0.5), x.relu(), 0.3), 0),
    "fused": (lambda x: torch.addcmul(x, x, x, value=0.5), 0),
}
"""An operation, and the bytes of numbers that its nodes keep."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_number_is_counted_where_autograd_keeps_it(name: str) -> None:
    operation, kept = OPERATIONS[name]
    depth = 3
    predicted, truth, planned = both(Scaled(operation, depth), {"x": torch.zeros(16, WIDTH)})
    graph = planned.trace.graph
    sizes = [size for size, *_ in graph.buffers()]
    assert sum(sizes[buffer] for buffer in counted(graph)) == depth * kept
    assert predicted == truth


def test_a_number_goes_when_its_node_has_run_or_died() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            x * 0.125  # nobody wants it
            (x * 0.25).exp().sum()  # nor the end of this
            return (x * 0.5).tanh().sum()

    predicted, truth, planned = both(Model(), {"x": torch.zeros(16, WIDTH)})
    graph = planned.trace.graph
    names = [name for name, *_ in graph.ops()]
    forward = names.index("tanh")
    ends = [graph.buffers()[buffer][2] for buffer in counted(graph)]
    assert [end <= forward for end in ends] == [True, True, False]
    assert names[ends[2] - 1] == "mul.Tensor"  # the work of its own node
    assert ends[2] - 1 > forward
    assert predicted == truth


def test_a_checkpointed_module_keeps_its_numbers_and_makes_them_again() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, WIDE), (WIDE, WIDTH)))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down((0.5 * self.up(x)).tanh() * 0.25) / 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.sum()

    batch = {"x": torch.zeros(64, WIDTH)}
    plain, _, _ = both(Model(), batch)
    predicted, truth, planned = both(Model(), batch, budget=int(0.75 * plain))
    assert sum("checkpoint" in choice.techniques for choice in planned.plan.choices) >= 2
    assert predicted == truth


def scaled(meter: Meter) -> None:
    """A program that keeps a number."""
    weight = torch.zeros(128, device=meter.device, requires_grad=True)
    meter.reset_peak()
    (weight * 0.5).sum().backward()
    meter.read_peak()


@pytest.mark.parametrize(
    ("function", "dtype", "number"),
    [
        (torch.add, torch.float32, 2),
        (torch.mul, torch.bfloat16, 0.5),
        (torch.ops.aten.mul.Scalar, torch.float32, 2),
        (torch.div, torch.float64, 0.5),
        (torch.rsub, torch.int64, 2),
        (torch.eq, torch.float64, 2),
        (torch.remainder, torch.float32, True),
        (torch.clamp_min, torch.float32, 0.5),
        (torch.pow, torch.float32, 3),
    ],
)
def test_an_operation_takes_what_a_number_and_its_cast_take(
    function: Any, dtype: torch.dtype, number: Any
) -> None:
    source, made = torch.zeros(100, dtype=dtype), []
    truth = peak_bytes(lambda: made.append(function(source, number)))
    seen: list[tuple[Any, Any]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, args))
            return func(*args, **(kwargs or {}))

    with Seen():
        function(source, number)
    ((func, args),) = seen
    assert op_facts.scratch(func, op_facts.facts(func), (args, {}), made, 0) == truth - made[0].nbytes


def test_numbers_lie_on_the_host_beside_a_card() -> None:
    on_host = trace_program(scaled, Target("cpu"))
    on_card = trace_program(scaled, Target.cuda((8, 0)))
    assert len(counted(on_host.graph)) == 1
    assert counted(on_card.graph) == []


def gpt2(hf: Any) -> nn.Module:
    config = hf.GPT2Config(
        n_layer=3, n_head=2, n_embd=32, vocab_size=97, n_positions=64, bos_token_id=1, eos_token_id=1
    )
    model: nn.Module = hf.GPT2LMHeadModel(config)
    return model


def t5(hf: Any) -> nn.Module:
    config = hf.T5Config(
        num_layers=2, d_model=32, d_kv=16, d_ff=64, num_heads=2, vocab_size=97, decoder_start_token_id=0
    )
    model: nn.Module = hf.T5ForConditionalGeneration(config)
    return model


def bert(hf: Any) -> nn.Module:
    config = hf.BertConfig(
        num_hidden_layers=3,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=97,
        attn_implementation="eager",
    )
    model: nn.Module = hf.BertForMaskedLM(config)
    return model


@pytest.mark.parametrize("build", [gpt2, t5, bert])
def test_the_peak_of_a_transformer_is_the_profilers(build: Callable[[Any], nn.Module]) -> None:
    hf = pytest.importorskip("transformers")
    tokens = torch.arange(48).view(2, 24) + 2
    predicted, truth, planned = both(build(hf), {"input_ids": tokens, "labels": tokens.clone()})
    assert len(counted(planned.trace.graph)) > 0
    assert predicted == truth
