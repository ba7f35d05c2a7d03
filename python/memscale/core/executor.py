# SPDX-License-Identifier: Apache-2.0
"""Carries a plan out on a model, watches that it stays true, and takes everything back.

    start ──► sample given? ──► plan, attach
                   │ no
                   └──► first training forward ──► the same, before it runs
    every training forward ──► covered by the plan? ──► no: plan again, before it runs
    stop ──► undo in reverse; the model is as it was

The executor stands in front of the model's own forward. It looks at each training batch before it runs: a
larger shape, gradients that are still there (accumulation), an output of the last step that is still held,
another optimizer than assumed: each would break the prediction, so the step is planned anew first. Plans
are kept by what they were made for.
"""

from __future__ import annotations

import copy
import functools
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memscale.core.config import Config
from memscale.core.known_optimizers import KnownOptimizers
from memscale.core.open_graph import OpenGraph
from memscale.core.plan import Choice, Plan
from memscale.core.planner import Planned, make_plan
from memscale.core.profiler import HooksRefusedError
from memscale.core.step_signature import StepSignature, output_storages, signature_of
from memscale.core.step_ways import placed
from memscale.core.tracer import StepFacts
from memscale.errors import BudgetError, VerificationError
from memscale.observability import logs, metrics, offload_log, plan_log
from memscale.observability.offload_figures import OffloadFigures
from memscale.offload.engine import Boundary, Offload
from memscale.techniques.base import Attachment, PathAttachment, Surroundings
from memscale.techniques.bf16_weights import Bf16Weights
from memscale.techniques.chains import ChainAttachment, ChainRun
from memscale.techniques.checkpoint_state import BufferRef
from memscale.techniques.checkpointing import CheckpointAttachment, runs_plain
from memscale.techniques.compiled import outside_compiler
from memscale.techniques.forward_slot import ForwardSlot, StandIn
from memscale.techniques.loss_scale import NO_OPTIMIZER, LossScale, enter, forget, scale_for
from memscale.techniques.offloading import OffloadAttachment
from memscale.techniques.replicas import ReplicaGuard
from memscale.techniques.use_cache import CacheSwitch

EXECUTOR = "_memscale_executor"


_MOST_FAILURES = 8
"""Batches that could not be planned before the executor stops trying."""

_MOST_PLANS = 32
"""Plans that are kept by what they were made for."""

_CARRIED_BYTES = 64 * 1024
"""A loss that the loop still names is not worth a new plan: smaller outputs are within the reserve."""


class _WatchedForward(StandIn):
    """Stands in for the wrapped model's `forward`."""

    calls_through = True

    def __init__(self, executor: Executor, original: Callable[..., Any]) -> None:
        super().__init__(executor.model, original)
        self.executor = executor

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original, for accelerate, which finds its way back to a model's own forward by this name."""
        return self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward, planned."""
        if torch.compiler.is_compiling():  # traced: nothing can be looked at here
            if self.executor.awaits_batch and not self.passive and torch.is_grad_enabled():
                outside_compiler(self.executor.before_forward, self.run_original, args, kwargs)
            if self.executor.has_half and not self.passive and not torch.is_grad_enabled():
                return Bf16Weights.evaluate(self.run_original, args, kwargs)
            return self.run_original(*args, **kwargs)
        if self.passive or self.executor.idle or runs_plain():
            if self.executor.has_half and not (self.passive or self.executor.idle):
                return Bf16Weights.evaluate(self.original, args, kwargs)
            return self.original(*args, **kwargs)
        failures = self.executor.failures
        self.executor.before_forward(self.original, args, kwargs)
        try:
            output = self.original(*args, **kwargs)
        except BaseException:
            if self.executor.failures > failures:  # the batch is at fault, and says nothing of the next one
                self.executor.forget_failure()
            raise
        self.executor.after_forward(output)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> _WatchedForward:
        _, original = self.copied_original(memo)
        executor = copy.deepcopy(self.executor, memo)
        if id(self) in memo:  # copied on the way, as the copied model's forward
            return memo[id(self)]  # type: ignore[no-any-return]
        twin = _WatchedForward(executor, original)
        twin.passive = self.passive
        return twin


class Executor:
    """The life of one wrapped model.

    Attributes:
        config: as the caller gave it.
        planned: the plan in force and what it was made from; None while the first batch is awaited.
        idle: true while MemScale itself runs the model; the executor then stands aside.
        has_half: weights are BF16, and need autocast in evaluation, too.
        planning_seconds: what planning has taken in the middle of training, in all.
        loss_scale: for FP16, with the optimizer that the caller has named; or why there is none.
    """

    def __init__(
        self, model: nn.Module, config: Config, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._model = weakref.ref(model)  # the model owns the executor
        self._slot: ForwardSlot | None = None
        self._guard: ReplicaGuard | None = None
        self.config = config
        self.planned: Planned | None = None
        self.idle = False
        self.has_half = False
        self.planning_seconds = 0.0
        self.loss_scale: LossScale | str = scale_for(model, optimizer)
        self._optimizers = KnownOptimizers(optimizer)
        self._signature: StepSignature | None = None
        self._known: dict[StepSignature, Planned] = {}
        self._attached: list[Attachment] = []
        self._path: list[PathAttachment] = []  # stay attached while a plan is made
        self._run_with: frozenset[str] = frozenset()  # those of them that a forward has run with
        self._outputs: list[weakref.ref[Any]] = []
        self._open: OpenGraph | None = None
        self._has_warned_of_open = False
        self._failed: set[StepSignature] = set()  # could not be planned; not tried again
        self._failures = 0
        self._latest_failure: StepSignature | None = None
        self._optimizer_hook: Any = None
        self._offload: Offload | None = None

    @property
    def model(self) -> nn.Module:
        """The wrapped module."""
        model = self._model()
        if model is None:
            raise ReferenceError("the wrapped model is gone")
        return model

    @property
    def failures(self) -> int:
        """Batches that could not be planned."""
        return self._failures

    def forget_failure(self) -> None:
        """The latest of them could not be run either: one like it is to be planned again."""
        self._failures -= 1
        self._failed -= {self._latest_failure}

    @property
    def awaits_batch(self) -> bool:
        """There is no plan yet, and the next training batch is to bring one."""
        return self.planned is None and not self.idle and self._failures < _MOST_FAILURES

    @property
    def switched_off(self) -> list[str]:
        """What the model does on its own and has been switched off, for the log."""
        return [line for item in self._attached if isinstance(item, CacheSwitch) for line in item.lines]

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or None while the first training batch is awaited."""
        return None if self.planned is None else self.planned.plan

    def offload_figures(self, events: bool = True) -> OffloadFigures | None:
        """What the offload engine has done so far; None where nothing was offloaded yet.

        Args:
            events: with the latest copies and waits, for reports and traces.
        """
        return OffloadFigures.of(self._offload, events)

    # ---- life ------------------------------------------------------------------------------------

    def start(
        self, sample: tuple[tuple[Any, ...], dict[str, Any]] | None, grads_present: bool = False
    ) -> None:
        """Takes the model over. Either all of it succeeds or the model is left as it was.

        Args:
            sample: a training batch to plan for now; None waits for the first one.
            grads_present: plan for steps that find gradients of earlier ones (accumulation).

        Raises:
            BudgetError: the budget cannot be met and the configuration is strict.
            AttachError: a technique could not be attached.
            Exception: the model rejects the sample.
        """
        self._take_over()
        try:
            if sample is not None:
                # A model from `from_pretrained` is in evaluation mode until the loop calls train().
                facts = self._facts(training=None if self.model.training else True)
                facts.grads_present |= grads_present
                self._plan_for(*sample, facts)
        except HooksRefusedError as error:
            self._cannot_plan(error)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Undoes everything, in reverse order."""
        metrics.detach(self)
        self._undo()
        self._have_path([])
        self._optimizer_hook()
        if self._guard is not None:
            self._guard.remove()
        self.model.__dict__.pop(EXECUTOR, None)
        forget(self.model)
        if self._slot is not None:
            self._slot.remove()
            self._slot = None
        self._offload = None  # a graph that still needs the engine holds it

    def resume(self) -> None:
        """Takes the model over again after `stop`, with the plan that was in force."""
        self._take_over()
        if self.planned is not None:
            self._attach(self.planned)

    def _take_over(self) -> None:
        slot = ForwardSlot(self.model, "")
        slot.put(_WatchedForward(self, self.model.forward))
        self._slot = slot
        self._guard = ReplicaGuard(self.model)
        self._guard.put()
        self.model.__dict__[EXECUTOR] = self
        enter(self.model, self.loss_scale)
        self._watch_optimizers()
        metrics.attach(self)

    def _undo(self) -> None:
        """Takes all techniques off but those of the path."""
        while self._attached:
            self._attached.pop().undo()

    @contextmanager
    def bare(self, keep: Collection[str] = ()) -> Iterator[None]:
        """Runs the block on the model without techniques, then attaches them again.

        Path techniques stay attached: a trace is told of them, and others may be in the middle of a step.

        Args:
            keep: names of step techniques that stay.
        """
        undone = list(self._attached)
        self._undo()
        kept = [attachment for attachment in undone if attachment.name in keep]
        for attachment in kept:
            attachment.attach()
        idle, self.idle = self.idle, True
        try:
            yield
        finally:
            self.idle = idle
            for attachment in reversed(kept):
                attachment.undo()
            for attachment in undone:
                attachment.attach()
                self._attached.append(attachment)

    # ---- what the model and the optimizer are about to do ----------------------------------------

    def before_forward(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Makes sure that the plan in force covers this batch. Called before a forward with gradients.

        Args:
            forward: the model's own, about to run on this batch.
            args: positional part of the batch.
            kwargs: keyword part.
        """
        for item in self._attached:
            if isinstance(item, CacheSwitch):
                item.hold()
        self._warn_of_open_graph()
        if self._failures >= _MOST_FAILURES:
            return
        facts = self._facts()
        facts.forward = forward
        signature = signature_of(self.model, args, kwargs, facts)
        if signature in self._failed or (self._signature is not None and self._signature.covers(signature)):
            return
        began = time.perf_counter()
        try:
            self._plan_for(args, kwargs, facts)
        except (BudgetError, VerificationError):
            self.stop()  # the model is left untouched
            raise
        except Exception as error:
            self._failed.add(signature)
            self._latest_failure = signature
            self._cannot_plan(error)
        finally:
            self.planning_seconds += time.perf_counter() - began

    def _cannot_plan(self, error: Exception) -> None:
        """The model may well run: then it runs as it is. If it does not, its own error follows now."""
        self._failures = _MOST_FAILURES if isinstance(error, HooksRefusedError) else self._failures + 1
        what = "runs unchanged" if self.planned is None else "keeps its present plan"
        logs.LOGGER.warning("cannot plan this step, the model %s: %s: %s", what, type(error).__name__, error)

    def after_forward(self, output: Any) -> None:
        """Remembers the output, to see before the next forward whether it is still held."""
        self._outputs = [weakref.ref(storage) for storage in output_storages(output)]
        self._open = OpenGraph(output)
        if self._path:
            self._run_with = frozenset(item.name for item in self._path)
        if self._offload is not None:
            offload_log.warn(self, self._offload)

    def _warn_of_open_graph(self) -> None:
        """Says once that a forward keeps tensors beside those of the one that is about to run."""
        if self._has_warned_of_open or self._open is None or not self._open.waits:
            return
        self._has_warned_of_open = True
        logs.LOGGER.warning(
            "the model runs forward while the graph of an earlier forward waits for its backward: plans "
            "count one forward a step, so the peak is above the prediction by what the others keep"
        )

    def _facts(self, training: bool | None = None) -> StepFacts:
        optimizers = self._optimizers.all
        alive = [storage.nbytes() for storage in (ref() for ref in self._outputs) if storage is not None]
        return StepFacts(
            optimizer=optimizers[0] if optimizers else None,
            others=optimizers[1:],
            grads_present=any(parameter.grad is not None for parameter in self.model.parameters()),
            carried_bytes=tuple(size for size in alive if size >= _CARRIED_BYTES),
            training=training,
            watch=self._watch,
            may_change_optimizer=self._optimizers.named is not None,
            staying=frozenset(item.name for item in self._path if item.stays and item.name in self._run_with),
        )

    @property
    def _watch(self) -> StandIn | None:
        return None if self._slot is None else self._slot.stand_in

    def _watch_optimizers(self) -> None:
        handle = register_optimizer_step_pre_hook(functools.partial(_note_optimizer, weakref.ref(self)))
        self._optimizer_hook = weakref.finalize(self, handle.remove)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step; if it is this model's, the next forward plans for it."""
        model = self._model()
        if model is not None and not self.idle:
            self._optimizers.note(optimizer, model)

    # ---- planning --------------------------------------------------------------------------------

    def _plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any], facts: StepFacts) -> None:
        """Plans and attaches for one batch. On any error the model keeps what it had."""
        signature = signature_of(self.model, args, kwargs, facts)
        planned = self._known.get(signature)
        if planned is None or not facts.staying <= {name for name, _ in planned.places}:
            with self.bare():
                planned = make_plan(self.model, self.config, args, kwargs, facts)
            if not planned.plan.fits and self.config.strict_budget:
                raise BudgetError(
                    planned.plan.budget_bytes, planned.plan.smallest_peak_bytes, planned.plan.advice
                )
        before, path = list(self._attached), list(self._path)
        self._undo()
        try:
            self._attach(planned)
        except BaseException:
            self._undo()
            self._have_path(path)
            for attachment in before:
                attachment.attach()
                self._attached.append(attachment)
            raise
        replaced = self.planned
        self.planned = self._known[signature] = planned
        if len(self._known) > _MOST_PLANS:
            del self._known[next(iter(self._known))]
        self._signature = signature
        plan_log.announce(self, replaced, facts)
        if self.config.verify_correctness and replaced is None:
            plan_log.announce_verification(self, args, kwargs, facts)

    def _attach(self, planned: Planned) -> None:
        off = planned.cache_off or planned.plan.active
        parts: list[Attachment] = [CacheSwitch(self.model)] if off else []
        steps = placed(self.model, self._around(planned), planned.places)
        self._have_path([item for item in steps if isinstance(item, PathAttachment)])
        for item in steps:
            if not isinstance(item, PathAttachment):
                item.beneath = None if item.path else self._watch
                parts.append(item)
        chains: dict[str, list[ChainRun]] = {}
        for run in runs_of(planned.plan.active):
            path, offload = run[0].module, self._offload_of(planned) if run[0].offloads else None
            if offload is not None and not run[0].boundary:
                watch = None if path else self._watch
                module, saves = self.model.get_submodule(path), run[0].moved or None
                parts.append(OffloadAttachment(module, path, offload, saves, watch))
                continue
            boundary = None if offload is None else Boundary(offload, run[0].moved or None)
            facts = self._written(planned, run), planned.trace.python_random, self._foreign(planned, run)
            if len(run) == 1:
                kept = frozenset(map(_operation, run[0].kept))
                module = self.model.get_submodule(path)
                parts.append(CheckpointAttachment(module, path, *facts, kept=kept, boundary=boundary))
            else:
                chain, _, first = path.rpartition(".")
                last = run[-1].module.rpartition(".")[2]
                chains.setdefault(chain, []).append(ChainRun(first, last, *facts, boundary))
        for chain, runs in chains.items():
            # The executor must go on seeing the batches of a model that is a chain itself.
            watch = None if chain else self._watch
            parts.append(ChainAttachment(self.model.get_submodule(chain), chain, runs, beneath=watch))
        for part in parts:
            part.attach()
            self._attached.append(part)

    def _around(self, planned: Planned) -> Surroundings:
        offload = None if planned.link is None else functools.partial(self._offload_of, planned)
        named, link = self._optimizers.named, planned.link or ""
        return Surroundings(planned.hardware, self.config.effective(), named, link, offload)

    def _have_path(self, wanted: Sequence[PathAttachment]) -> None:
        """Has these path techniques in force and no others.

        Those that are in force already stay, up to the first that does not: what lies on top of that one is
        taken off, too, and attached again.
        """
        kept = 0
        for present, item in zip(self._path, wanted, strict=False):
            if (present.name, present.path) != (item.name, item.path):
                break
            kept += 1
        while len(self._path) > kept:
            self._path.pop().undo()
        for item in wanted[kept:]:
            item.attach()
            self._path.append(item)
            self._run_with -= {item.name}
        self.has_half = any(isinstance(item, Bf16Weights) for item in self._path)

    def _offload_of(self, planned: Planned) -> Offload:
        """The engine for a plan; one for all plans that want the same."""
        assert planned.link is not None  # a plan offloads only over a link
        settings = planned.link.settings
        if self._offload is None or self._offload.settings != settings:
            self._offload = Offload(settings)
        return self._offload

    def _written(self, planned: Planned, run: list[Choice]) -> list[BufferRef]:
        """Buffers that the modules of a run change, each once."""
        names = {name for choice in run for name in planned.trace.written_buffers.get(choice.module, [])}
        return [(self.model.get_submodule(owner), name) for owner, name in sorted(names)]

    def _foreign(self, planned: Planned, run: list[Choice]) -> list[weakref.ref[Tensor]]:
        """Tensors from outside that the modules of a run read, each once."""
        reads = [read for choice in run for read in planned.trace.foreign_reads.get(choice.module, [])]
        return list({id(read()): read for read in reads}.values())

    # ---- copies ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Executor:
        """A copied model is wrapped as the original is; it plans anew for what the plan does not cover."""
        twin = Executor.__new__(Executor)
        memo[id(self)] = twin
        same = ("config", "planned", "idle", "planning_seconds", "_signature", "_failures")
        for name in same:
            setattr(twin, name, getattr(self, name))
        if self._path:
            twin._signature = None  # the copy has no optimizer that could be changed
        twin._path, twin._run_with, twin.has_half = [], frozenset(), False
        twin._optimizers = self._optimizers.unnamed()
        twin._known, twin._outputs, twin._failed = {}, [], set()
        twin._open, twin._has_warned_of_open = None, self._has_warned_of_open
        twin._latest_failure = None
        twin._offload = copy.deepcopy(self._offload, memo)  # that of the copied attachments
        twin._model = weakref.ref(copy.deepcopy(self.model, memo))
        twin.loss_scale = NO_OPTIMIZER
        enter(twin.model, NO_OPTIMIZER)
        twin._attached = copy.deepcopy(self._attached, memo)
        twin._slot = copy.deepcopy(self._slot, memo)
        twin._guard = copy.deepcopy(self._guard, memo)
        twin._watch_optimizers()
        return twin

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled model is a plain model


def runs_of(active: Sequence[Choice]) -> list[list[Choice]]:
    """Groups choices into what is run again as one: a module, or consecutive children of a chain."""
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


def _note_optimizer(executor: weakref.ref[Executor], optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    alive = executor()
    if alive is not None:
        alive.note_optimizer(optimizer)
