# SPDX-License-Identifier: Apache-2.0
"""A plain training loop that records every bit, and one that measures its memory."""

from __future__ import annotations

import functools
import gc
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import memscale
from memscale.core.executor import Executor
from memscale.observability.tensor_peak import quiet
from zoo.models import Batch, Case

SMALLEST = memscale.Config(memory_budget=1, enable_logging=False)
"""A budget that nothing meets: the smallest plan is attached, which checkpoints whatever helps."""


@dataclass(frozen=True)
class Loop:
    """How a case is trained.

    Attributes:
        steps: optimizer steps.
        autocast: forward under BF16 autocast.
        accumulate: micro-batches per step.
        freeze: without the case's frozen part.
        optimizer: its class.
    """

    steps: int = 5
    autocast: bool = False
    accumulate: int = 1
    freeze: bool = False
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW


@dataclass
class Run:
    """All that a training run computed.

    Attributes:
        values: (step, what, name) → tensor: losses, gradients, and at the end the state.
        model: the trained model.
    """

    values: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)
    model: nn.Module = field(default_factory=nn.Module)

    @property
    def executor(self) -> Executor:
        return memscale.executor_of(self.model)

    @property
    def plan(self) -> memscale.Plan:
        plan = self.executor.plan
        assert plan is not None, "the step was never planned"
        return plan


def call(model: nn.Module, batch: Batch) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def seed(number: int = 0) -> None:
    torch.manual_seed(number)
    random.seed(number)
    import numpy

    numpy.random.seed(number)


def built(case: Case, loop: Loop = Loop()) -> nn.Module:
    """A case's model, ready to train; random generators are where building it left them."""
    seed()
    model = case.build().train()
    if loop.freeze:
        assert case.frozen
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(case.frozen))
    return model


def train(
    case: Case,
    loop: Loop = Loop(),
    config: memscale.Config | None = None,
    sample: bool = False,
    record: bool = True,
) -> Run:
    """Trains a case from its seed.

    Args:
        case: what.
        loop: how.
        config: wraps the model with it; None trains plain.
        sample: wrap with the first batch, rather than wait for it.
        record: keep gradients of every step; without it the run holds no memory of its own before its end.
    """
    model = built(case, loop)
    if config is not None:
        assert memscale.wrap(model, config, sample_input=case.batch(0) if sample else None) is model
    run = Run(model=model)
    optimizer = loop.optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(loop.steps):
        for part in range(loop.accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=loop.autocast):
                output = call(model, case.batch(step * loop.accumulate + part))
                loss = case.loss(output)
            (loss / loop.accumulate).backward()
            if record:
                run.values[step, "loss", str(part)] = loss.detach().clone()
            del output, loss
        for name, parameter in model.named_parameters():
            if record and parameter.grad is not None:
                run.values[step, "gradient", name] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    del optimizer
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        run.values[loop.steps, "state", name] = value.detach().clone()
    return run


@functools.lru_cache(maxsize=64)
def reference(case: Case, loop: Loop = Loop()) -> Run:
    """The plain run, computed once."""
    return train(case, loop)


def assert_same(plain: Run, planned: Run) -> None:
    """Every loss, gradient, parameter and buffer of two runs is equal, bit for bit."""
    assert plain.values.keys() == planned.values.keys()
    different = [key for key, value in plain.values.items() if not same_bits(value, planned.values[key])]
    assert not different, f"{len(different)} of {len(plain.values)} tensors differ, first {different[:3]}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return a.dtype == b.dtype and torch.equal(a, b)


def assert_checkpointed(run: Run) -> None:
    """The run was a test of something."""
    assert run.plan.active, {choice.module: choice.rule for choice in run.plan.choices}


def memory_changes(work: Callable[[], object], alive: dict[int, int] | None = None) -> list[int]:
    """Bytes that PyTorch's CPU allocator handed out, and, below 0, took back during `work`, in order.

    The end of memory counts if it began in `work` or is in `alive`: bytes by address, brought up to date.
    The profiler keeps addresses between profiles: it takes what an earlier test began for ended here.
    """
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # the garbage of an earlier test is not this one's
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = _memory_events(profiler.profiler.kineto_results.experimental_event_tree())
    assert events, "the profiler saw no memory event"
    alive, changes = {} if alive is None else alive, []
    for address, change in events:
        if change > 0:
            alive[address] = change
        elif address not in alive:
            continue
        changes.append(change if change > 0 else -alive.pop(address))
    return changes


def _memory_events(roots: Iterable[Any]) -> list[tuple[int, int]]:
    """Address and bytes of each event of memory in the profiler's trees, in order of time."""
    found, open_events = [], list(roots)
    while open_events:
        event = open_events.pop()
        open_events += event.children
        if event.name == "[memory]":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, change) for _, address, change in sorted(found)]


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that PyTorch's CPU allocator held at one moment of `work`, beyond what it held before."""
    return max(itertools.accumulate(memory_changes(work), initial=0))
