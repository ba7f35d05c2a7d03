# SPDX-License-Identifier: Apache-2.0
"""The columns of the matrix: every technique and every pair, forced onto every place that is not refused.

The executor attaches them, with what the planner has found out of the model. Only the decision is not the
planner's: it would leave most of these small models alone, and the matrix tests the techniques.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from torch import nn

from matrix.architectures import Architecture
from matrix.modes import mode, model_for
from memscale.core.executor import Executor
from memscale.core.planner import Planned, make_plan
from memscale.core.profiler import normalize_sample
from memscale.core.variants import Place, found
from memscale.errors import AttachError
from memscale.offload.engine import OffloadSettings
from memscale.offload.limits import Link
from memscale.plans.kept_ops import KeptOps
from memscale.plans.plan import Choice
from memscale.techniques.base import StepAttachment, Surroundings
from memscale.techniques.optimizer.step_in_backward import NAME as IN_BACKWARD
from memscale.techniques.precision.bf16_weights import NAME as HALF
from memscale.techniques.step_facts import StepFacts
from memscale.techniques.step_table import STEP_TECHNIQUES, StepTechnique
from processors import with_bf16
from zoo.training import SMALLEST

_TREATABLE = frozenset({"chosen", "smallest", "not-needed", "covered", "split", "costlier", "no-saving"})
"""Rules of the planner that say nothing against running a module twice."""


LINK = Link(
    OffloadSettings(
        torch.device("cpu"),
        host_bytes=64 << 20,
        file_bytes=64 << 20,
        least_bytes=1,
        window_bytes=1 << 12,
        prefetch_count=3,
        debug=True,
    ),
    out_bytes_per_us=1,
    in_bytes_per_us=1,
    limit_bytes=64 << 20,
)
"""Everything leaves, however small, and little waits."""


class Refused(Exception):
    """A cell that is not supported, and is known not to be before anything runs."""


@dataclass
class Facts:
    """What the planner knows of one architecture.

    Attributes:
        planned: its smallest plan.
        candidates: path → choice, of the modules that may run twice.
        chains: path → paths of the children, of every `nn.Sequential`.
        listed: paths of items of lists and chains: blocks, as a rule.
    """

    planned: Planned
    candidates: dict[str, Choice]
    chains: dict[str, list[str]]
    listed: set[str]

    def why_none(self) -> str:
        """The planner's reason where there is no candidate."""
        rules: dict[str, None] = {}
        for choice in self.planned.plan.choices:
            if choice.rule not in _TREATABLE and (choice.module in self.listed or not self.listed):
                rules.setdefault(choice.reason)
        return next(iter(rules), "no module may run twice")


@functools.lru_cache(maxsize=2)
def facts_of(architecture: Architecture) -> Facts:
    """Traces an architecture once."""
    model = model_for(architecture, mode("dropout"))
    args, kwargs = normalize_sample(architecture.case.batch(0))
    with with_bf16():
        planned = make_plan(model, SMALLEST, args, kwargs, StepFacts())
    candidates = {c.module: c for c in planned.plan.choices if c.rule in _TREATABLE and c.module}
    chains, listed = {}, set()
    for path, module in model.named_modules():
        head = f"{path}." if path else ""
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            listed |= {head + name for name in module._modules}
        if type(module).forward is nn.Sequential.forward:
            chains[path] = [head + name for name in module._modules]
    return Facts(planned, candidates, chains, listed)


@dataclass
class Attaching:
    """What is going to be attached, as it is put together.

    Attributes:
        facts: of the architecture.
        model: bare.
        share: how many techniques still want a place that only one can have, this one included.
        optimizer: trains the model.
        notes: what a reader of the table should know.
        choices: so far.
        places: of step techniques, so far.
    """

    facts: Facts
    model: nn.Module
    share: int
    optimizer: torch.optim.Optimizer | None = None
    choices: list[Choice] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)

    def is_free(self, path: str) -> bool:
        """Whether nothing is attached to, in or around a module."""
        return not any(_overlap(path, choice.module) for choice in self.choices)

    def blocks(self) -> list[Choice]:
        """This technique's share of the free blocks.

        Raises:
            Refused: there is none.
        """
        candidates = self.facts.candidates
        if not candidates:
            raise Refused(self.facts.why_none())
        for pool in (candidates.keys() & self.facts.listed, candidates.keys()):
            free = [path for path in candidates if path in pool and self.is_free(path)]
            outer = [path for path in free if not any(path.startswith(f"{other}.") for other in free)]
            if not outer:
                self.notes.setdefault(f"not the blocks: {self.facts.why_none()}")
            else:
                return [candidates[path] for path in outer[:: self.share]]
        raise Refused("the other technique has every module that may run twice")


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _checkpoint(attaching: Attaching) -> None:
    blocks = attaching.blocks()
    attaching.choices += [replace(choice, techniques=("checkpoint",), kept=()) for choice in blocks]


def _selective(attaching: Attaching) -> None:
    """Every second operation is kept, whatever it is: views, writes and random ones among them."""
    trace = attaching.facts.planned.trace
    names, ids = KeptOps.of(trace.graph), {path: number for number, (path, _) in enumerate(trace.modules)}
    for choice in attaching.blocks():
        first = next(call for call in names.calls if call[0] == ids[choice.module])
        kept = names.names(ids[choice.module], range(0, first[3] - first[2], 2))
        attaching.choices.append(replace(choice, techniques=("selective",), kept=kept))


def _chain(attaching: Attaching) -> None:
    """Runs of two or three children, one after another."""
    facts = attaching.facts
    runs: list[list[str]] = []
    for children in facts.chains.values():
        for allowed, group in itertools.groupby(children, lambda path: path in facts.candidates):
            row = [path for path in group if attaching.is_free(path)] if allowed else []
            parts = [row[start : start + 3] for start in range(0, len(row), 3)]
            runs += [part for part in parts if len(part) > 1]
    if not facts.chains:
        raise Refused("no nn.Sequential")
    outer = [
        run for run in runs if not any(run[0].startswith(f"{path}.") for other in runs for path in other)
    ]
    if not outer:
        raise Refused("no two children of a nn.Sequential in a row that may run twice")
    for run in outer[:: attaching.share]:
        for path in run:
            choice = replace(facts.candidates[path], techniques=("checkpoint",), kept=())
            attaching.choices.append(replace(choice, joined=path != run[0]))


def _boundary(attaching: Attaching) -> None:
    """Checkpoints whose inputs leave."""
    blocks = attaching.blocks()
    attaching.choices += [
        replace(choice, techniques=("checkpoint",), kept=(), boundary=True) for choice in blocks
    ]


def _offload(attaching: Attaching) -> None:
    """Blocks whose saved tensors leave; also such as may not run twice."""
    facts = attaching.facts
    known = {choice.module: choice for choice in facts.planned.plan.choices if choice.rule != "no-forward"}
    free = [path for path in known if path and attaching.is_free(path) and path in facts.listed]
    free = free or [path for path in known if path and attaching.is_free(path)]
    outer = [path for path in free if not any(path.startswith(f"{other}.") for other in free)]
    if not outer:
        raise Refused("the other technique has every module that saves something")
    for path in outer[:: attaching.share]:
        attaching.choices.append(replace(known[path], techniques=("offload",), kept=()))


def _step(technique: StepTechnique, attaching: Attaching) -> None:
    hardware, optimizer = attaching.facts.planned.hardware, attaching.optimizer
    around = Surroundings(hardware, SMALLEST.effective(), optimizer, LINK)
    places = found(attaching.model, around, [technique])
    if not places:
        reason = technique.why_not(attaching.model, around)
        raise Refused(reason or "no place for it in the model")
    attaching.places += [(item.name, item.path) for item in places]


def _half(technique: StepTechnique, attaching: Attaching) -> None:
    """BF16 weights go together with autocast."""
    _step(technique, attaching)
    if not any(name == "autocast" for name, _ in attaching.places):
        _step(_STEPS["autocast"], attaching)


@dataclass(frozen=True)
class Technique:
    """One column.

    Attributes:
        name: of the column.
        exact: every bit is plain PyTorch's.
        twice: it runs forwards a second time.
        add: adds its part to what is going to be attached.
        changes_precision: its reference is the step at its precision.
    """

    name: str
    exact: bool
    twice: bool
    add: Callable[[Attaching], None]
    changes_precision: bool = False


_STEPS = {technique.name: technique for technique in STEP_TECHNIQUES}


def _row(technique: StepTechnique) -> Technique:
    add = functools.partial(_half if technique.name == HALF else _step, technique)
    return Technique(technique.name, technique.exact, False, add, technique.name in ("autocast", HALF))


TECHNIQUES = (
    Technique("checkpoint", True, True, _checkpoint),
    Technique("selective", True, True, _selective),
    Technique("chain", True, True, _chain),
    Technique("boundary", True, True, _boundary),
    Technique("offload", True, False, _offload),
    *(_row(technique) for technique in STEP_TECHNIQUES if technique.name != IN_BACKWARD),
)
"""A new technique is a row here; a step technique is one already, by its row in `step_table`.

But for the step in backward: cells compare gradients, and it leaves none (`test_matrix_step_in_backward.py`).
"""

Columns = tuple[Technique, ...]

_PAIRS = tuple(itertools.combinations(TECHNIQUES, 2))
COLUMNS: tuple[Columns, ...] = tuple((technique,) for technique in TECHNIQUES) + _PAIRS


def column_name(columns: Columns) -> str:
    """Such as "checkpoint + chain"."""
    return " + ".join(technique.name for technique in columns)


@dataclass
class Forced:
    """What has been attached.

    Attributes:
        regions: modules that run twice.
        steps: attachments of step techniques.
        notes: what a reader of the table should know.
    """

    regions: int
    steps: list[StepAttachment]
    notes: list[str]


@contextmanager
def forced(
    model: nn.Module,
    architecture: Architecture,
    columns: Columns,
    optimizer: torch.optim.Optimizer | None = None,
) -> Iterator[Forced]:
    """Has techniques attached to a model, and to its optimizer, inside the block, by the executor.

    Raises:
        Refused: one of them has no place in this architecture.
    """
    facts = facts_of(architecture)
    with with_bf16(), patch("memscale.optim.offload.state.LEAST_BYTES", 1):  # state leaves, however small
        yield from _forced(facts, model, columns, optimizer)
    left = [path for path, module in model.named_modules() if "forward" in module.__dict__]
    assert not left, f"forwards that were not given back: {left}"


def _forced(
    facts: Facts, model: nn.Module, columns: Columns, optimizer: torch.optim.Optimizer | None
) -> Iterator[Forced]:
    attaching = Attaching(facts, model, 1, optimizer)
    sharing = sum(technique.twice or technique.name == "offload" for technique in columns)
    # Chains first: they need several modules in a row. Then autocast, which BF16 weights bring otherwise.
    order_of = {"chain": 0, "autocast": 1}
    for technique in sorted(columns, key=lambda technique: order_of.get(technique.name, 2)):
        shares = technique.twice or technique.name == "offload"
        attaching.share = max(sharing, 1) if shares else 1
        technique.add(attaching)
        sharing -= shares
    order = [choice.module for choice in facts.planned.plan.choices]
    choices = tuple(sorted(attaching.choices, key=lambda choice: order.index(choice.module)))
    plan = replace(facts.planned.plan, choices=choices)
    executor = Executor(model, SMALLEST, optimizer)
    executor.idle = True  # it attaches what it is told to, and plans nothing
    executor._take_over()
    try:
        try:
            executor.in_force.attach(
                replace(facts.planned, plan=plan, places=tuple(attaching.places), link=LINK)
            )
        except AttachError as error:
            raise Refused(str(error)) from error
        places = set(attaching.places)
        steps = [
            item for item in executor.in_force.attached if (item.name, getattr(item, "path", None)) in places
        ]
        assert places == {(item.name, item.path) for item in (*steps, *executor.in_force.path)}
        yield Forced(len(choices), steps, list(attaching.notes))
    finally:
        executor.stop()
