# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` around a wrapped model, beneath it, inside it: the bits of the same compile without.

With a sample the plan is there before the compiler looks, and no graph is broken. Without one, the first call
leaves the compiler once to plan, and is then compiled again in one piece.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from amounts import also, some
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from zoo.blocks import Block, Stack, inputs
from zoo.models import Case, case, gpt2, mean_square
from zoo.training import SMALLEST, built, call, same_bits, seed

pytestmark = pytest.mark.filterwarnings("ignore:.*")  # the compiler's own

STACK = Case("stack", functools.partial(Stack, functools.partial(Block, 0.1)), inputs, mean_square)
CONVNET, GPT2 = case("convnet"), dataclasses.replace(case("gpt2"), build=lambda: gpt2(layers=1))
PARTS = {"stack": "blocks.1", "convnet": "blocks.1", "gpt2": "transformer.h.0"}
MOST_BREAKS = 1
"""Graph breaks of a wrap without a sample; see docs. With one there are none.

The compiler counts each of a model's own breaks once more per function around it, and MemScale's stand-in is
one such function.
"""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def counted() -> tuple[int, int]:
    """Graphs that were compiled, and graph breaks, since the last call."""
    counters = torch._dynamo.utils.counters
    numbers = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    counters.clear()
    torch._dynamo.reset()
    return numbers


def trained(run: Callable[..., Any], model: nn.Module, case: Case, steps: int = 3) -> list[Tensor]:
    """Losses, gradients and the final state of some steps of `run`, which calls `model`."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    values = []
    for step in range(steps):
        loss = case.loss(call(run, case.batch(step)))  # type: ignore[arg-type]
        loss.backward()
        values += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return values + [value.detach().clone() for value in (*model.parameters(), *model.buffers())]


def assert_equal(plain: list[Tensor], planned: list[Tensor]) -> None:
    assert len(plain) == len(planned) > 0
    wrong = [i for i, (a, b) in enumerate(zip(plain, planned, strict=True)) if not same_bits(a, b)]
    assert not wrong, f"{len(wrong)} of {len(plain)} differ, first {wrong[:3]}"


def active(model: nn.Module) -> list[str]:
    plan = memscale.executor_of(model).plan
    return [] if plan is None else [choice.module for choice in plan.active]


def wrapped(model: nn.Module, case: Case, sample: bool) -> nn.Module:
    return memscale.wrap(model, SMALLEST, case.batch(0) if sample else None)


def around(model: nn.Module, case: Case, backend: str, sample: bool, wrap: bool) -> tuple[Any, nn.Module]:
    """`torch.compile(wrap(model))`"""
    if wrap:
        wrapped(model, case, sample)
    return torch.compile(model, backend=backend), model


def beneath(model: nn.Module, case: Case, backend: str, sample: bool, wrap: bool) -> tuple[Any, nn.Module]:
    """`wrap(torch.compile(model))`"""
    compiled = torch.compile(model, backend=backend)
    if wrap:
        assert wrapped(compiled, case, sample) is compiled
    return compiled, compiled


def in_place(model: nn.Module, case: Case, backend: str, sample: bool, wrap: bool) -> tuple[Any, nn.Module]:
    """`model.compile()` before `wrap`"""
    model.compile(backend=backend)
    if wrap:
        wrapped(model, case, sample)
    return model, model


def inside(model: nn.Module, case: Case, backend: str, sample: bool, wrap: bool) -> tuple[Any, nn.Module]:
    """A compiled submodule, put in place of the plain one."""
    parent, _, name = PARTS[case.name].rpartition(".")
    children = model.get_submodule(parent)._modules
    children[name] = torch.compile(children[name], backend=backend)
    if wrap:
        wrapped(model, case, sample)
    return model, model


def inside_in_place(
    model: nn.Module, case: Case, backend: str, sample: bool, wrap: bool
) -> tuple[Any, nn.Module]:
    """A submodule that was compiled by its own method."""
    model.get_submodule(PARTS[case.name]).compile(backend=backend)
    if wrap:
        wrapped(model, case, sample)
    return model, model


Way = Callable[[nn.Module, Case, str, bool, bool], tuple[Any, nn.Module]]
WAYS: list[Way] = [around, beneath, in_place, inside, inside_in_place]
SEEN_FROM_OUTSIDE: list[Way] = [beneath, inside, inside_in_place]
"""The executor's own code is not compiled, so that it can plan without a break."""


@functools.lru_cache(maxsize=32)
def reference(way: Way, case: Case, backend: str) -> tuple[list[Tensor], tuple[int, int]]:
    run, model = way(built(case), case, backend, False, False)
    values = trained(run, model, case)
    return values, counted()


RUNS = [
    *((STACK, way, "aot_eager", sample) for way, sample in itertools.product(WAYS, (True, False))),
    *((STACK, way, "eager", sample) for way, sample in
      some([(around, True), (beneath, False)], [*itertools.product(WAYS, (True, False))])),
    *((CONVNET, way, backend, sample) for way, backend, sample in
      ((around, "eager", True), (around, "aot_eager", False), (beneath, "aot_eager", True),
       (inside, "aot_eager", False), (inside_in_place, "aot_eager", True))),
    *((GPT2, way, "aot_eager", sample) for way, sample in
      ((around, True), (inside, True), *also((around, False)))),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0].name}-{run[1].__name__}-{run[2]}-{run[3]}")
def test_equal_to_the_same_compile_without(run: tuple[Case, Way, str, bool]) -> None:
    case, way, backend, sample = run
    plain, (graphs, breaks) = reference(way, case, backend)
    compiled, model = way(built(case), case, backend, sample, True)
    planned = trained(compiled, model, case)
    planned_graphs, planned_breaks = counted()
    assert_equal(plain, planned)
    assert active(model)  # compiled by "eager" it has no effect, and a line in the log says so
    at_first = 0 if sample or way in SEEN_FROM_OUTSIDE else MOST_BREAKS
    caches = int(case is GPT2)  # what keeps nothing in place of them takes one more
    assert planned_breaks <= (2 + at_first) * breaks + at_first + caches
    assert planned_graphs <= (1 + at_first) * graphs + (1 if breaks else 0)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_detached_it_is_what_it_was(way: Way) -> None:
    plain, _ = reference(way, STACK, "aot_eager")
    run, model = way(built(STACK), STACK, "aot_eager", True, True)
    trained(run, model, STACK, steps=1)
    memscale.detach(model)
    assert not any(memscale.executor_of(module) is not None for module in model.modules())
    fresh = built(STACK)
    with torch.no_grad():
        for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
            old.copy_(new)
    assert_equal(plain, trained(run, model, STACK))


def test_full_graphs_with_a_sample() -> None:
    model = wrapped(built(STACK), STACK, sample=True)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal(reference(around, STACK, "aot_eager")[0], trained(run, model, STACK))
    assert active(model)


def test_full_graphs_without_a_sample_are_refused_in_words() -> None:
    run = torch.compile(wrapped(built(STACK), STACK, sample=False), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="outside_compiler"):
        call(run, STACK.batch(0))


def test_it_breaks_at_the_first_call_only() -> None:
    run, model = around(built(STACK), STACK, "eager", sample=False, wrap=True)
    trained(run, model, STACK, steps=2)
    torch._dynamo.utils.counters.clear()
    trained(run, model, STACK, steps=2)
    assert counted() == (0, 0)


def test_larger_and_smaller_batches() -> None:
    """Compiled, a plan stays the one it is; the bits do too."""
    sizes = Case("sizes", STACK.build, lambda step: (inputs(step)[0][: 64 * (step + 1)],), mean_square)
    plain = trained(torch.compile(model := built(sizes), backend="aot_eager"), model, sizes)
    run, model = around(built(sizes), sizes, "aot_eager", sample=True, wrap=True)
    assert_equal(plain, trained(run, model, sizes))


def test_a_compiled_step_around_a_wrapped_model() -> None:
    """The loop's own function is compiled, its loss and its backward too."""

    def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            loss = mean_square(model(x))
            loss.backward()
            return loss.detach()

        return torch.compile(step, backend="aot_eager")  # type: ignore[return-value]

    def use(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(5)
        step, values = step_of(model), []
        for number in range(3):
            values.append(step(*inputs(number)))
            values += [parameter.grad.clone() for parameter in model.parameters()]
        return values

    plain = use(built(STACK))
    for sample in (True, False):
        torch._dynamo.reset()
        model = wrapped(built(STACK), STACK, sample)
        assert_equal(plain, use(model))
        assert active(model)


def test_hooks_of_a_checkpoint_around_compiled_code_are_not_compiled() -> None:
    """They run while compiled code packs what it saves, one call per tensor, of all shapes."""
    _, (graphs, _) = reference(inside, STACK, "eager")
    run, model = inside(built(STACK), STACK, "eager", sample=True, wrap=True)
    assert PARTS["stack"] in active(model)
    trained(run, model, STACK, steps=6)
    assert counted()[0] == graphs


@pytest.mark.parametrize("kept", [{("addmm", 0)}, {("addmm", 0), ("addmm", 1), ("gelu", 0)}], ids=len)
def test_a_selective_checkpoint_around_compiled_code(kept: set[tuple[str, int]]) -> None:
    class Two(Block):
        """Its inner part is compiled."""

        def __init__(self) -> None:
            super().__init__(0.1)
            self.inner = torch.compile(Block(0.1), backend="aot_eager")

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.inner(x))

    two = Case("two", functools.partial(Stack, Two), inputs, mean_square)
    model = built(two)
    plain = trained(model, model, two)
    model = built(two)
    attachment = CheckpointAttachment(model.blocks[1], "blocks.1", kept=frozenset(kept))
    attachment.attach()
    assert_equal(plain, trained(model, model, two))


def test_verify_of_a_compiled_model() -> None:
    _, model = beneath(built(STACK), STACK, "aot_eager", sample=True, wrap=True)
    report = memscale.verify(model, STACK.batch(0))
    assert report.equal and report.checkpointed


def test_a_plan_of_a_compiled_model_is_that_of_the_plain_one() -> None:
    plain = memscale.plan(built(STACK), config=SMALLEST, sample_input=STACK.batch(0))
    compiled = torch.compile(built(STACK), backend="eager")
    plan = memscale.plan(compiled, config=SMALLEST, sample_input=STACK.batch(0))
    names = [choice.module.replace("_orig_mod.", "") for choice in plan.active]
    assert names == [choice.module for choice in plain.active]
    assert plan.predicted.allocated_peak_bytes == plain.predicted.allocated_peak_bytes
    assert counted() == (0, 0)


@pytest.mark.long
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)
@pytest.mark.parametrize("way", [around, inside], ids=lambda way: way.__name__)
def test_inductor(way: Way) -> None:
    small = Case("stack", functools.partial(Stack, Block, 2), inputs, mean_square)
    plain, _ = reference(way, small, "inductor")
    seed()
    run, model = way(built(small), small, "inductor", True, True)
    assert_equal(plain, trained(run, model, small))
    assert active(model)
