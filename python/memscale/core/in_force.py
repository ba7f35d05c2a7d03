# SPDX-License-Identifier: Apache-2.0
"""The attached techniques of a plan: attached in order, undone in reverse.

path        what changes data and optimizer (`PathAttachment`); stays while a plan is made
attached    on top of these: the cache's switch, step techniques, checkpoints, chains, offload
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memscale.core.variants import placed
from memscale.offload.engine import Boundary, Offload
from memscale.techniques.base import (
    Attachment,
    ForwardAttachment,
    PartialAttachment,
    PathAttachment,
    Surroundings,
)
from memscale.techniques.checkpoint.chains import ChainAttachment, ChainRun
from memscale.techniques.checkpoint.checkpoint_state import BufferRef, Uses
from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.checkpoint.recompute_check import UNCHECKED, RecomputeCheck
from memscale.techniques.checkpoint.use_cache import CacheSwitch
from memscale.techniques.offloading import OffloadAttachment
from memscale.techniques.optimizer.gradient_offload import GradientOffload
from memscale.techniques.precision.bf16_weights import Bf16Weights
from memscale.techniques.tiles.row_tiles import RowTiles
from memscale.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from memscale.config.config import Config
    from memscale.core.known_optimizers import KnownOptimizers
    from memscale.core.planner import Planned
    from memscale.plans.plan import Choice, Plan
    from memscale.techniques.step_facts import StepFacts
    from memscale.torchkit.forward_slot import StandIn


class InForce:
    """What is attached to one model.

    Args:
        model: the model; it owns this.
        config: as the caller gave it.
        optimizers: of the model.
        recompute_failed: is given a module's path and the reason when a recompute of it went another way than
            its forward, on the thread of backward.

    Attributes:
        watch: the executor's stand-in before the model's forward; the model's own techniques go beneath it.
        method: of the model, which is watched; another than `forward` is a whole step up to its loss.
        attached: all but those of the path, in the order in which they were attached.
        path: optimizer-side techniques, likewise.
        offload: the engine that plans use, once one of them has.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        optimizers: KnownOptimizers,
        recompute_failed: Callable[[str, str], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._config = config
        self._optimizers = optimizers
        self._recompute_failed = recompute_failed
        self._run_with: frozenset[str] = frozenset()  # those of the path that a forward has run with
        self._places: list[Place] = []
        self.watch: StandIn | None = None
        self.method = "forward"
        self.attached: list[Attachment] = []
        self.path: list[PathAttachment] = []
        self.offload: Offload | None = None

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self._model()
        if model is None:
            raise ReferenceError("the wrapped model no longer exists")
        return model

    @property
    def half(self) -> Bf16Weights | None:
        """What has weights in BF16, which need autocast in evaluation, too; None where none are."""
        return next((item for item in self.path if isinstance(item, Bf16Weights)), None)

    @property
    def own_step(self) -> Callable[..., Any] | None:
        """What runs the model where that is another method than its forward, beneath the watch."""
        return None if self.method == "forward" or self.watch is None else self.watch.original

    @property
    def staying(self) -> frozenset[str]:
        """Optimizer-side techniques that later plans have, too."""
        return frozenset(item.name for item in self.path if item.stays and item.name in self._run_with)

    @property
    def has_lost_a_module(self) -> bool:
        """A module that the plan knows is in its place no more: the model, or its owner, has another."""
        for owned_by, name, known in self._places:
            owner, module = owned_by(), known()
            if owner is None or module is None or owner._modules.get(name) is not module:
                return True
        return False

    @property
    def switches(self) -> list[CacheSwitch]:
        """What the model does on its own and has been switched off."""
        return [item for item in self.attached if isinstance(item, CacheSwitch)]

    def about_to_run(self) -> None:
        """A forward is about to run. Raises what a technique of the path has against that."""
        for item in self.path:
            if isinstance(item, ForwardAttachment):
                item.about_to_run()

    def has_run(self, output: Any) -> None:
        """A forward has run with what is in force, and returned this."""
        if self.path:
            self._run_with = frozenset(item.name for item in self.path)
        for item in self.path:
            if isinstance(item, ForwardAttachment):
                item.has_run(output)

    def exchange(self, planned: Planned) -> None:
        """Attaches a plan in place of what is in force, which comes back if that fails."""
        before = list(self.attached)
        path = [(item, copy.copy(item)) for item in self.path]  # a plan may change them in place
        try:
            self.undo()
            self.attach(planned)
        except BaseException:
            with uninterrupted():
                self.undo()
                try:
                    self.have_path([was if item in self.path else item for item, was in path])
                finally:
                    self._attach(before)
            raise
        self._let_engine_go(planned.plan)

    def await_optimizer(self) -> None:
        """The named optimizer stands in for one yet to come: nothing is done to its state and weights."""
        self.have_path([])

    def hand_over(self, optimizer: Optimizer, planned: Planned | None) -> None:
        """The optimizer that another has stood in for has come: the plan does to it what it has."""
        self.have_path([])
        self._optimizers.name(optimizer)
        if planned is not None:
            self.exchange(planned)

    def _let_engine_go(self, plan: Plan) -> None:
        """An engine that nothing in force needs goes, with buffers that the plan does not count.

        A graph that waits for its backward holds it for as long.
        """
        if not any(choice.offloads for choice in plan.choices) and not any(
            isinstance(item, GradientOffload) for item in self.path
        ):
            self.offload = None

    def undo(self) -> None:
        """Takes all techniques off but those of the path, whatever one of them raises."""
        with uninterrupted(), ExitStack() as stack:
            for attachment in self.attached:  # the last one first
                stack.callback(attachment.undo)
            self.attached.clear()

    def _attach(self, parts: Sequence[Attachment]) -> None:
        """Puts techniques on top of what is attached. What is put is also known to be."""
        for part in parts:
            with uninterrupted():
                part.attach()
                self.attached.append(part)

    @contextmanager
    def bare(self, keep: Collection[str] = ()) -> Iterator[None]:
        """Runs the block on the model without techniques, then attaches them again.

        Optimizer-side techniques stay attached: a trace reads them from `StepFacts.path`, and other threads
        may be in the middle of a step.

        Args:
            keep: names of step techniques that stay.
        """
        undone = list(self.attached)
        try:
            self.undo()
            self._attach([attachment for attachment in undone if attachment.name in keep])
            yield
        finally:
            with uninterrupted():
                self.undo()
                self._attach(undone)

    def attach(self, planned: Planned) -> None:
        """Attaches what a plan has. Optimizer-side techniques that are in force already stay.

        Raises:
            AttachError: a technique could not be attached; those before it are.
        """
        off = planned.cache_off or planned.plan.active
        switch = CacheSwitch(self.model, self.watch, planned.cache_stays, planned.trace.reads_lengths)
        parts: list[Attachment] = [switch] if off else []
        steps = placed(self.model, self._around(planned), planned.places)
        self.have_path([item for item in steps if isinstance(item, PathAttachment)])
        for item in steps:
            if not isinstance(item, PathAttachment):
                item.beneath = None if item.path else self.watch
                if isinstance(item, RowTiles):
                    item.check = self._new_check(planned, item.path)
                parts.append(item)
        self._attach(parts + self._of_choices(planned))
        self._places = _places_of(self.model, [path for path, _ in planned.trace.modules])

    def _of_choices(self, planned: Planned) -> list[Attachment]:
        """Checkpoints and offloads of a plan; those of one chain are one attachment."""
        parts: list[Attachment] = []
        chains: dict[str, list[ChainRun]] = {}
        for run in runs_of(planned.plan.active):
            path, offload = run[0].module, self._offload_of(planned) if run[0].offloads else None
            moved, ahead_bytes = run[0].moved or None, run[0].ahead_bytes
            if offload is not None and not run[0].boundary:
                watch, module = None if path else self.watch, self.model.get_submodule(path)
                check = RecomputeCheck(self._config.check_recompute, self._recompute_failed)
                parts.append(OffloadAttachment(module, path, offload, moved, watch, ahead_bytes, check))
                continue
            boundary = None if offload is None else Boundary(offload, moved, ahead_bytes)
            check = self._new_check(planned, *(choice.module for choice in run))
            facts = self._written(planned, run), _uses(planned, run), self._foreign(planned, run)
            in_process = planned.trace.changes.in_process
            if len(run) == 1:
                kept = frozenset(map(_operation, run[0].kept))
                module = self.model.get_submodule(path)
                parts.append(CheckpointAttachment(module, path, *facts, kept, boundary, check, in_process))
            else:
                chain, _, first = path.rpartition(".")
                last = run[-1].module.rpartition(".")[2]
                chains.setdefault(chain, []).append(
                    ChainRun(first, last, *facts, boundary, check, in_process)
                )
        for chain, runs in chains.items():
            # The executor must go on seeing the batches of a model that is a chain itself.
            watch = None if chain else self.watch
            parts.append(ChainAttachment(self.model.get_submodule(chain), chain, runs, beneath=watch))
        return parts

    def as_traced(self, planned: Planned, step: StepFacts) -> StepFacts:
        """A step as it is traced with a plan's optimizer-side techniques."""
        for item in placed(self.model, self._around(planned), planned.places):
            if isinstance(item, PathAttachment):
                step = item.traced(step)
        return step

    def _new_check(self, planned: Planned, *paths: str) -> RecomputeCheck:
        """For one run of modules. What a card does not repeat itself is not compared."""
        if (
            not planned.trace.unrepeatable.isdisjoint(paths)
            and not torch.are_deterministic_algorithms_enabled()
        ):
            return UNCHECKED
        return RecomputeCheck(self._config.check_recompute, self._recompute_failed)

    def _around(self, planned: Planned) -> Surroundings:
        offload = None if planned.link is None else functools.partial(self._offload_of, planned)
        named, link = self._optimizers.named, planned.link or ""
        config = self._config.effective()
        left_out = planned.left_out
        return Surroundings(
            planned.hardware, config, named, link, offload, planned.resident, left_out=left_out
        )

    def have_path(self, wanted: Sequence[PathAttachment]) -> None:
        """Has these optimizer-side techniques in force and no others.

        Those that are in force already stay, unless something that they lie on comes or goes: they are taken
        off then, and attached again.
        """
        kept = _kept(self.path, wanted)
        for item in self.path[::-1]:
            if kept.get(_key(item)) is not item:
                self.path.remove(item)
                item.undo()
        for place, item in enumerate(wanted):
            present = kept.get(_key(item))
            if present is None:
                item.attach()
                self.path.insert(place, item)
                self._run_with -= {item.name}
            elif isinstance(present, PartialAttachment):
                present.become(item)

    def _offload_of(self, planned: Planned) -> Offload:
        """The engine for a plan; one for all plans that want the same."""
        assert planned.link is not None  # a plan offloads only over a link
        settings = planned.link.settings
        if self.offload is None or self.offload.settings != settings:
            self.offload = Offload(settings)
        return self.offload

    def _written(self, planned: Planned, run: list[Choice]) -> list[BufferRef]:
        """Buffers that the modules of a run change, each once."""
        names = {name for choice in run for name in planned.trace.written_buffers.get(choice.module, [])}
        return [(self.model.get_submodule(owner), name) for owner, name in sorted(names)]

    def _foreign(self, planned: Planned, run: list[Choice]) -> list[weakref.ref[Tensor]]:
        """Tensors from outside that the modules of a run read, each once."""
        reads = [read for choice in run for read in planned.trace.foreign_reads.get(choice.module, [])]
        return list({id(read()): read for read in reads}.values())


def _uses(planned: Planned, run: list[Choice]) -> Uses:
    trace = planned.trace
    draws = not trace.random.isdisjoint(choice.module for choice in run)
    return Uses(draws, trace.changes.python_random, trace.changes.uses_gradients)


_Key = tuple[str, str]
"""Name and place."""


def _key(item: PathAttachment) -> _Key:
    return item.name, item.path


def _kept(path: Sequence[PathAttachment], wanted: Sequence[PathAttachment]) -> dict[_Key, PathAttachment]:
    """Of a path in force what stays in another one, in order."""
    places, kept = {_key(item): place for place, item in enumerate(path)}, dict[_Key, PathAttachment]()
    for place, item in enumerate(wanted):
        was = places.get(_key(item))
        if was is None:
            continue
        present = path[was]
        beneath = [_key(other) for other in wanted[:place] if other.name not in present.apart_from]
        before = [_key(other) for other in path[:was] if other.name not in present.apart_from]
        if beneath == before and all(key in kept for key in beneath):
            kept[_key(item)] = present
    return kept


Place = tuple["weakref.ref[nn.Module]", str, "weakref.ref[nn.Module]"]
"""A module, the name of one of its children, and that one; either may go."""


def _places_of(model: nn.Module, paths: Collection[str]) -> list[Place]:
    """Where the modules of some paths, and all around them, are: who has them, and under what name.

    Nobody replaces what is in a scripted module, which does not say what is there either.
    """
    found: dict[str, Place] = {}
    for path in filter(None, paths):
        names, owner = path.split("."), model
        for depth, name in enumerate(names, 1):
            module = None if isinstance(owner, torch.jit.ScriptModule) else owner._modules.get(name)
            if module is None:
                break
            found[".".join(names[:depth])] = (weakref.ref(owner), name, weakref.ref(module))
            owner = module
    return list(found.values())


def runs_of(active: Sequence[Choice]) -> list[list[Choice]]:
    """Groups choices into what is recomputed as one: a module, or consecutive children of a chain."""
    runs: list[list[Choice]] = []
    latest: dict[str, list[Choice]] = {}  # chain → its last run so far
    for choice in active:
        chain = choice.module.rpartition(".")[0]
        if choice.joined:
            latest[chain].append(choice)
        else:
            latest[chain] = [choice]
            runs.append(latest[chain])
    return runs


def _operation(text: str) -> tuple[str, int]:
    """`"addmm#0"` as name and ordinal."""
    name, _, ordinal = text.rpartition("#")
    return name, int(ordinal)
