# SPDX-License-Identifier: Apache-2.0
"""What `test_distributed` runs in two processes: training with and without, compared on each rank."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import distributed_memory
import torch
import torch.distributed as dist
from torch import Tensor, nn

import memscale
from frozen import count_once
from soak import samples
from zoo.blocks import Block, DataDependent, Stack, inputs
from zoo.models import Case, case, mean_square
from zoo.training import SMALLEST, built, call, same_bits

STEPS = 3


class Deceives(Block):
    """Computes something else when it runs again: the loss stays, gradients do not."""

    def forward(self, x: Tensor) -> Tensor:
        again = torch._C._current_graph_task_id() != -1
        return super().forward(x * 1.01 if again else x)


class Sometimes(nn.Module):
    """One half of it runs in a step, and one layer never does."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([Stack(depth=2), Stack(depth=2)])
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        result: Tensor = self.halves[int(second)](x)
        return result


def _saved(number: int) -> tuple[Tensor]:
    """A batch of which a layer saves tensors that are large enough to leave."""
    torch.manual_seed(number)
    return (samples.batch(),)


CASES = {
    "stack": Case("stack", functools.partial(Stack, functools.partial(Block, 0.1)), inputs, mean_square),
    "sometimes": Case(
        "sometimes", Sometimes, lambda number: (inputs(number)[0], number // 2 % 2 == 1), mean_square
    ),
    "deceives": Case("deceives", functools.partial(Stack, Deceives), inputs, mean_square),
    "data": Case("data", DataDependent, inputs, mean_square),
    "offload": Case("offload", samples.Network, _saved, mean_square),
    "convnet": case("convnet"),
    "gpt2": case("gpt2"),
}


@dataclass(frozen=True)
class Scenario:
    """One training run.

    Attributes:
        family: "ddp" or "fsdp".
        case: what is trained.
        when: MemScale is put on "before" or "after" the distributed wrapper, or on the module "inside" it.
        sample: with a sample, rather than at the first batch.
        option: of the wrapper, by name.
        detach: MemScale is taken off before the third step.
        optimizer: "AdamW", which a plan assumes, or another one, which it has to see first.
        verify: the plan is verified between two steps.
        memory: not a comparison of bits: peaks are measured and predicted.
        offload: saved tensors go to a file.
    """

    family: str
    case: str = "stack"
    when: str = "before"
    sample: bool = True
    option: str = ""
    detach: bool = False
    optimizer: str = "AdamW"
    verify: bool = False
    memory: bool = False
    offload: bool = False

    def __str__(self) -> str:
        parts = [self.case, self.option, self.when, "sample" if self.sample else "deferred"]
        parts += [name for name in ("detach", "verify", "memory", "offload") if getattr(self, name)]
        return "-".join(part for part in [*parts, self.optimizer.removeprefix("AdamW")] if part)

    @property
    def key(self) -> str:
        """Its name among those of both families."""
        return f"{self.family}-{self}"


@dataclass
class Outcome:
    """What came of it on one rank."""

    error: str = ""
    different: list[int] = field(default_factory=list)
    compared: int = 0
    active: list[str] = field(default_factory=list)
    digest: str = ""
    notes: list[str] = field(default_factory=list)
    verified: str = ""
    peaks: dict[str, list[int]] = field(default_factory=dict)
    saves_moved: int = 0


DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "buckets": {"bucket_cap_mb": 0.001},
}


def _ddp(model: nn.Module, option: str) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **DDP_OPTIONS[option])


def _parts(model: nn.Module) -> list[nn.Module]:
    blocks = model.transformer.h if hasattr(model, "transformer") else model.blocks
    return list(blocks)


def _fsdp(model: nn.Module, option: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    settings: dict[str, Any] = {"mesh": mesh}
    if option == "mixed":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if option == "kept":
        settings["reshard_after_forward"] = False
    units = [] if option == "root" else _parts(model)
    if option == "inner":  # units inside of what is checkpointed
        units = [getattr(part, "up", None) or part.mlp for part in units]
    for unit in units:
        fully_shard(unit, **settings)
    fully_shard(model, **settings)
    return model


WRAPPERS: dict[str, Callable[[nn.Module, str], nn.Module]] = {"ddp": _ddp, "fsdp": _fsdp}


def _gradients(model: nn.Module) -> list[Tensor]:
    present = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [getattr(grad, "_local_tensor", grad).clone() for grad in present]


def _backward_without_sync(run: nn.Module, loss: Callable[[], Tensor]) -> None:
    if isinstance(run, nn.parallel.DistributedDataParallel):
        with run.no_sync():
            loss().backward()
        return
    run.set_requires_gradient_sync(False)
    loss().backward()
    run.set_requires_gradient_sync(True)


REPORTS: list[str] = []
"""What `memscale.verify` said in the training that runs."""


def train(scenario: Scenario, wrapped: bool, folder: Path) -> tuple[list[Tensor], Any]:
    """Losses, gradients, buffers of some steps with accumulation in one of them; and the executor."""
    case, rank = CASES[scenario.case], dist.get_rank()
    model = built(case)
    sample = case.batch(rank) if scenario.sample else None

    config = samples.config(folder, budget=1) if scenario.offload else SMALLEST

    def wrap(module: nn.Module) -> nn.Module:
        return memscale.wrap(module, config, sample) if wrapped else module

    if scenario.when == "before":
        wrap(model)
    run = WRAPPERS[scenario.family](model, scenario.option)
    owner = run if scenario.when == "after" else model
    if scenario.when != "before":
        wrap(owner)
    optimizer = getattr(torch.optim, scenario.optimizer)(model.parameters(), lr=1e-3)
    torch.manual_seed(5 + rank)
    values: list[Tensor] = []
    executor = memscale.executor_of(owner)
    for step in range(STEPS):
        if step == 2 and scenario.option != "static":  # static graphs do not go with no_sync on some steps
            _backward_without_sync(run, lambda: case.loss(call(run, case.batch(40 + rank))))
        if step == 2 and scenario.detach and wrapped:
            memscale.detach(owner)
        if step == 1 and scenario.verify and wrapped:
            REPORTS.append(memscale.verify(run, case.batch(rank)).summary())
        loss = case.loss(call(run, case.batch(2 * step + (rank if scenario.case != "sometimes" else 0))))
        loss.backward()
        values += [loss.detach(), *_gradients(model), *(buffer.clone() for buffer in model.buffers())]
        optimizer.step()
        optimizer.zero_grad()
    return values, executor


def compared(scenario: Scenario, reference: list[Tensor], folder: Path) -> Outcome:
    """The run with MemScale against the one without."""
    values, executor = train(scenario, True, folder)
    differ = [i for i, (a, b) in enumerate(zip(reference, values, strict=False)) if not same_bits(a, b)]
    outcome = Outcome(different=differ, compared=len(values) if len(values) == len(reference) else 0)
    outcome.verified = REPORTS.pop() if REPORTS else ""
    plan, engine = executor.plan, executor.in_force.offload
    outcome.saves_moved = 0 if engine is None else engine.counters()["saves_moved"]
    if plan is not None:
        outcome.active = [choice.module for choice in plan.active]
        outcome.digest, outcome.notes = plan.digest, list(plan.notes)
    return outcome


def work(rank: int, world: int, folder: str, scenarios: list[Scenario]) -> None:
    """One rank's process. Writes an outcome per scenario into the folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    count_once()
    torch.set_num_threads(1)
    logging.getLogger("memscale").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    references: dict[tuple[str, ...], list[Tensor]] = {}
    outcomes = {}
    for scenario in scenarios:
        gc.collect()
        gc.freeze()  # collections look at what the scenario makes, and not at all that has been imported
        key = scenario.family, scenario.case, scenario.option, scenario.optimizer
        if key not in references and not scenario.memory:
            plain = Scenario(*key[:2], option=scenario.option, optimizer=scenario.optimizer)
            references[key], _ = train(plain, False, Path(folder))
        try:
            if scenario.memory:
                outcome = Outcome(peaks=distributed_memory.peaks(scenario, DDP_OPTIONS[scenario.option]))
            else:
                outcome = compared(scenario, references[key], Path(folder))
        except Exception as error:
            outcome = Outcome(error=f"{type(error).__name__}: {error}")
        outcomes[scenario.key] = asdict(outcome)
        Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))  # what there is, if the next one hangs
    dist.barrier()
    # Whoever frees a process group holds Python's lock and joins gloo's thread, which may want that lock for
    # what a collective has kept of the thread that began it. So nothing is freed.
    os._exit(0)
