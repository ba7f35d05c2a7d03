# SPDX-License-Identifier: Apache-2.0
"""Executes a plan on a model, re-plans when the step changes, and undoes everything.

    start ──► sample given? ──► plan, attach
                   │ no
                   └──► first training forward ──► the same, before it runs
    every training forward ──► covered by the plan? ──► no: plan again, before it runs
    stop ──► undo in reverse; the model is as it was

The executor stands in front of the model's own forward. It looks at each training batch before it runs: a
larger shape, gradients that are still there (accumulation), an output of the last step that is still held,
another optimizer or loss than assumed: each would break the prediction, so the step is re-planned first.
"""

from __future__ import annotations

import functools
import textwrap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memscale import log
from memscale.config.config import Config
from memscale.core import plan_log
from memscale.core.evaluation import Evaluations, evaluation_of
from memscale.core.in_force import InForce
from memscale.core.known_optimizers import KnownOptimizers
from memscale.core.learned_loop import LearnedLoop
from memscale.core.oom import oom_watch
from memscale.core.planner import Planned, make_plan
from memscale.core.profiler import HooksRefusedError
from memscale.core.step_signature import PlainValues, StepSignature, output_storages, signature_of
from memscale.core.unseen_forward import UnseenForward
from memscale.core.watched_forward import WatchedForward
from memscale.core.wrapped import EXECUTOR, OBSERVERS, plan_attached
from memscale.errors import BudgetError, VerificationError, exclude_text, modules_of_run
from memscale.offload import notices
from memscale.offload.figures import OffloadFigures
from memscale.optim import masters
from memscale.plans.plan import Plan
from memscale.state.module_attributes import ModuleAttributes
from memscale.techniques.checkpoint import outliving
from memscale.techniques.checkpoint.saving_hooks import without_saving_hooks
from memscale.techniques.precision.bf16_weights import Bf16Weights
from memscale.techniques.precision.loss_scale import LossScale, enter, forget, scale_for
from memscale.techniques.step_facts import StepFacts
from memscale.torchkit import saved_weights
from memscale.torchkit.callers import Callers
from memscale.torchkit.forward_slot import ForwardSlot
from memscale.torchkit.open_graph import OpenGraphs
from memscale.torchkit.plain_copies import Ours
from memscale.torchkit.replicas import ReplicaGuard
from memscale.torchkit.step_hooks import before_steps
from memscale.torchkit.torch_settings import PresentModes, has_modes, without_modes
from memscale.uninterrupted import uninterrupted

_MOST_FAILURES = 8
"""Batches that could not be planned before the executor stops trying."""

_MOST_LOSSES = 4
"""Plans that are made because the model has put other modules in the place of those of a plan."""

_LONGEST_REASON = 400
"""Characters of another's error in the log."""

_MOST_PLANS = 32
"""Plans that are kept by what they were made for."""

_CARRIED_BYTES = 64 * 1024
"""A loss that the loop still names is not worth a new plan: smaller outputs are within the reserve."""

_NOT_ALONE = (
    "another thread is in the middle of a step of this model, or holds an output of it whose backward has "
    "not run: the model cannot be looked at without its plan now"
)


class Executor(Ours):
    """The life of one wrapped model.

    Attributes:
        config: as the caller gave it.
        planned: the plan in force and what it was made from; None while the first batch is awaited.
        idle: true while MemScale itself runs the model; the executor then stands aside.
        in_force: what is attached to the model.
        open: graphs of its forwards that wait for their backward.
        callers: the threads that run it.
        evaluations: its forwards without gradients.
        unseen: tells of a loop that never calls it.
        learned: what its steps have shown of the loop.
        planning_seconds: what planning has taken in the middle of training, in all.
        drops_output: see `StepFacts`, as `loss`.
        oom: what happens when memory runs out.
        values: which numbers among the arguments are a part of what a plan is for.
        loss_scale: for FP16, with the optimizer that the caller has named; or why there is none.
        failures: batches that could not be planned.
    """

    def __init__(
        self, model: nn.Module, config: Config, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._model = weakref.ref(model)  # the model owns the executor
        self._slot: ForwardSlot | None = None
        self._guard: ReplicaGuard | None = None
        self.config = config
        self.planned: Planned | None = None
        self.idle = self.drops_output = False
        self.planning_seconds = 0.0
        self.loss_scale: LossScale | str = scale_for(model, optimizer)
        self._optimizers = KnownOptimizers(optimizer)
        self.in_force = InForce(
            model, config, self._optimizers, functools.partial(_keep_module, weakref.ref(self))
        )
        self._signature: StepSignature | None = None
        self.values = PlainValues()
        self._attributes = ModuleAttributes()
        self._why_new = "the model has changed"
        self._is_new = False  # no forward has run under the plan in force
        self._known: dict[StepSignature, Planned] = {}
        self._outputs: dict[int, list[weakref.ref[Any]]] = {}  # by the thread that has run the forward
        self.open = OpenGraphs()
        self.callers, self.evaluations, self.unseen = Callers(), Evaluations(), UnseenForward()
        self.loss: Callable[[Any], Any] | None = None
        self.learned = LearnedLoop(config.learn_loss)
        self._has_warned_of_open = self._has_warned_of_computed_weights = self._has_warned_of_threads = False
        self._failed: set[StepSignature] = set()  # could not be planned; not tried again
        self.failures = self._losses = 0
        self._differed: frozenset[str] = frozenset()  # paths of modules whose recompute failed
        self._to_keep: deque[tuple[str, str]] = deque()  # more of them, noted by any thread
        self._latest_failure: StepSignature | None = None
        self._optimizer_hook: Any = None
        self._cap_bytes: int | None = None  # a budget that steps have run out of memory above
        self.oom = oom_watch(self)

    @property
    def model(self) -> nn.Module:
        """The wrapped module."""
        model = self._model()
        if model is None:
            raise ReferenceError("the wrapped model no longer exists")
        return model

    def forget_plans(self, why: str = "the model has changed") -> None:
        """The next training batch brings a plan of its own, also where the present one covers it.

        Args:
            why: in words, for the log.
        """
        self._why_new = why
        self._signature = None
        self._known.clear()

    def forget_failure(self) -> None:
        """The latest of them could not be run either: one like it is to be planned again."""
        self.failures -= 1
        self._failed -= {self._latest_failure}

    @property
    def awaits_batch(self) -> bool:
        """There is no plan yet, and the next training batch is to bring one."""
        return self.planned is None and not self.idle and self.failures < _MOST_FAILURES

    @property
    def half(self) -> Bf16Weights | None:
        """What has weights in BF16, which need autocast in evaluation, too; None where none are."""
        return self.in_force.half

    @property
    def switched_off(self) -> list[str]:
        """What the model does on its own and has been switched off, for the log."""
        return [line for switch in self.in_force.switches for line in switch.lines]

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or None while the first training batch is awaited."""
        return None if self.planned is None else self.planned.plan

    @property
    def plans(self) -> list[Plan]:
        """Those that are kept for the steps they were made for, the newest last."""
        return [planned.plan for planned in self._known.values()]

    def offload_figures(self, events: bool = True) -> OffloadFigures | None:
        """What the offload engine has done so far; None where nothing was offloaded yet.

        Args:
            events: with the latest copies and waits, for reports and traces.
        """
        return OffloadFigures.of(self.in_force.offload, events)

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
        try:
            self._take_over()
            if sample is not None:
                # A model from `from_pretrained` is in evaluation mode until the loop calls train().
                facts = self._facts(training=None if self.model.training else True)
                facts.grads_present |= grads_present
                self._plan_for(*sample, facts, PresentModes())
        except HooksRefusedError as error:
            self._cannot_plan(error)
        except BaseException:
            self.stop()
            raise

    def keep_module(self, path: str, reason: str) -> None:
        """Has a module run once only, for the rest of this executor's life: a recompute of it has failed.

        Only notes it, so any thread may call it in the middle of a backward. The next forward re-plans.

        Args:
            path: of the module, as in `RecomputeError.module`: also "net.0 to net.3".
            reason: in words, for the log.
        """
        self._to_keep.append((path, reason))

    def stop(self) -> None:
        """Undoes everything, in reverse order, whatever fails, and also where `start` was broken off."""
        with uninterrupted(), ExitStack() as stack:
            stack.callback(self._let_go)
            stack.callback(self.in_force.have_path, [])
            stack.callback(self.in_force.undo)
            stack.callback(plan_log.announce_return, self, self._optimizers.named)
            for observer in OBSERVERS:
                stack.callback(observer.detach, self)

    def _let_go(self) -> None:
        """The model has nothing of the executor's own any more."""
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        if self._guard is not None:
            self._guard.remove()
        self.model.__dict__.pop(EXECUTOR, None)
        self.learned.rest()
        self.oom.end()
        forget(self.model)
        if not self.open.are_there:  # their backward asks for the weights still
            saved_weights.forget(self.model)
        if self._slot is not None:
            self._slot.remove()
            self._slot = self.in_force.watch = None
        self.in_force.offload = None  # a graph that still needs the engine holds it

    def resume(self) -> None:
        """Takes the model over again after `stop`, with the plan that was in force."""
        with uninterrupted():
            self._take_over()
            if self.planned is not None:
                self.in_force.attach(self.planned)

    def _take_over(self) -> None:
        with uninterrupted():
            slot = ForwardSlot(self.model, "", method=self.in_force.method)
            slot.put(WatchedForward(self, slot.present))
            self._slot, self.in_force.watch = slot, slot.stand_in
            self._guard = ReplicaGuard(self.model)
            self._guard.put()
            self.model.__dict__[EXECUTOR] = self
            enter(self.model, self.loss_scale)
            saved_weights.watch(self.model)
            self._watch_optimizers()
            self.oom.begin()
            for observer in OBSERVERS:
                observer.attach(self)

    @contextmanager
    def bare(self, keep: Collection[str] = ()) -> Iterator[None]:
        """Runs the block on the model without techniques, as `InForce.bare`, and stands aside meanwhile.

        Raises:
            RuntimeError: another thread needs them. The model is as it was.
        """
        with self.callers.planning() as alone:
            if not alone or self.open.are_of_others:
                raise RuntimeError(_NOT_ALONE)
            with self.in_force.bare(keep):
                idle, self.idle = self.idle, True
                try:
                    yield
                finally:
                    self.idle = idle

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
        modes = PresentModes()
        with without_modes() if has_modes() else nullcontext():
            self._before_forward(forward, args, kwargs, modes)

    def _before_forward(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        modes: PresentModes,
    ) -> None:
        saved_weights.stale()
        self.unseen.has_run = True
        self.evaluations.trained()
        for switch in self.in_force.switches:
            switch.hold()
        self.in_force.about_to_run()
        self.open.look()
        if not self._has_warned_of_open:
            self._has_warned_of_open = plan_log.warn_of_open_graphs(self.open)
        self._keep_noted()
        if self.failures >= _MOST_FAILURES:
            self._let_go_of_kept()
            return
        if not all(parameter.is_leaf for parameter in self.model.parameters()):
            self._warn_of_computed_weights()
            return
        if self.in_force.has_lost_a_module and self._losses < _MOST_LOSSES:
            self._losses += 1
            self.forget_plans()
        loss = self.learned.before(self.open, self.planned, args, kwargs)
        facts = self._facts()
        facts.forward, facts.loss_bytes = forward, loss
        signature = self._signature_of(args, kwargs, facts)
        if signature in self._failed or (self._signature is not None and self._signature.covers(signature)):
            return
        began = time.perf_counter()
        try:
            with self.callers.planning() as alone:
                if not alone or self.open.are_of_others:
                    self._warn_of_threads()
                    return
                self._plan_for(args, kwargs, facts, modes)
        except (BudgetError, VerificationError):
            self.stop()  # the model is left untouched
            raise
        except Exception as error:
            self._failed.add(signature)
            self._latest_failure = signature
            self._cannot_plan(error)
            self._let_go_of_kept()
        finally:
            self.planning_seconds += time.perf_counter() - began

    def _keep_noted(self) -> None:
        """Sees to it that what `keep_module` has noted is in no plan from now on."""
        new: dict[str, str] = {}
        while self._to_keep:
            run, reason = self._to_keep.popleft()
            for path in _modules_of(self.model, run):
                new.setdefault(path, reason)
        new = {path: reason for path, reason in new.items() if path not in self._differed}
        if not new:
            return
        self._differed |= new.keys()
        self.forget_plans()
        self._failed.clear()
        reasons = "; ".join(dict.fromkeys(new.values()))
        log.LOGGER.warning(
            "not recomputed for the rest of this run: %s (%s). To leave it out from the start: %s",
            ", ".join(repr(path) for path in new),
            textwrap.shorten(reasons, _LONGEST_REASON, placeholder=" …"),
            exclude_text(sorted(self._differed)),
        )

    def _let_go_of_kept(self) -> None:
        """Takes a plan off that recomputes what must run once, where there is no other plan."""
        if self.planned is not None and not self._differed <= self.planned.left_out.differed:
            self.in_force.undo()
            self.planned = None

    def _cannot_plan(self, error: Exception) -> None:
        """The model may well run: then it runs as it is. If it does not, its own error follows now."""
        self.failures = _MOST_FAILURES if isinstance(error, HooksRefusedError) else self.failures + 1
        what = "runs unchanged" if self.planned is None else "keeps its present plan"
        why = textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" …")  # some print a tensor
        log.LOGGER.warning("cannot plan this step, the model %s: %s: %s", what, type(error).__name__, why)

    def after_forward(self, output: Any) -> None:
        """Remembers the output, to see before the next forward whether it is still held."""
        with without_modes() if has_modes() else nullcontext():
            self._after_forward(output)

    def _after_forward(self, output: Any) -> None:
        outliving.look()
        me = threading.get_ident()
        if not self.open.waiting:
            others = [(thread, refs) for thread, refs in [*self._outputs.items()] if thread != me]
            self._outputs = {
                thread: refs for thread, refs in others if any(ref() is not None for ref in refs)
            }
        self._outputs.setdefault(me, []).extend(weakref.ref(storage) for storage in output_storages(output))
        self.learned.returned(self.open.add(output), output)
        self.in_force.has_run(output)
        self._look_at_attributes()
        if self.in_force.offload is not None:
            notices.warn(self.model, self.in_force.offload)

    def _warn_of_computed_weights(self) -> None:
        """`functional_call` with weights that a graph has made; mostly the model's own come back."""
        if self.planned is None and not self._has_warned_of_computed_weights:
            self._has_warned_of_computed_weights = True
            log.LOGGER.warning(
                "cannot plan a forward with weights that a graph has made, such as those of a hypernetwork: "
                "the model runs unchanged until it is called with its own"
            )

    def _warn_of_threads(self) -> None:
        """Another thread is in the middle of a step, with the techniques that a new plan would exchange."""
        if not self._has_warned_of_threads:
            self._has_warned_of_threads = True
            what = "runs unchanged" if self.planned is None else "keeps its present plan"
            log.LOGGER.warning(
                "cannot plan this step while another thread is in the middle of one, or holds an output "
                "whose backward has not run: the model %s",
                what,
            )

    def _facts(self, training: bool | None = None) -> StepFacts:
        optimizers = self.optimizers
        # Those of forwards that wait are outputs of this step, and traced with it.
        outputs = () if self.open.waiting else self._outputs.get(threading.get_ident(), ())
        alive = [storage.nbytes() for storage in (ref() for ref in outputs) if storage is not None]
        return StepFacts(
            optimizer=optimizers[0] if optimizers else None,
            others=optimizers[1:],
            grads_present=any(parameter.grad is not None for parameter in self.model.parameters()),
            carried_bytes=tuple(size for size in alive if size >= _CARRIED_BYTES),
            training=training,
            forward=self.in_force.own_step,
            watch=self.in_force.watch,
            may_change_optimizer=self._optimizers.named is not None,
            staying=self.in_force.staying,
            forwards=self.open.planned,
            differed=self._differed,
            loss=self.loss,
            drops_output=self.drops_output,
            holds_gradients=self.oom.survives,
            **self.learned.facts(self.open.planned, is_given=self.loss is not None),
        )

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those that are known to step the model."""
        return self._optimizers.all

    def facts_of_evaluation(self, forward: Callable[..., Any] | None = None) -> StepFacts:
        """A forward without gradients, now: beside what is in memory, with the techniques that are in force.

        Args:
            forward: as in `StepFacts`.
        """
        facts = evaluation_of(self._facts(), forward)
        return facts if self.planned is None else self.in_force.as_traced(self.planned, facts)

    def _watch_optimizers(self) -> None:
        self._optimizer_hook = before_steps(self, Executor.note_optimizer)

    def note_optimizer(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        """An optimizer is about to step; if it is this model's, the next forward plans for it."""
        self.learned.rest()
        model = self._model()
        if model is None or self.idle:
            return
        if self._optimizers.note(optimizer, model) and self.in_force.path and self._losses < _MOST_LOSSES:
            self._losses += 1  # what the plan does to state and weights goes with the other optimizer
            self.forget_plans()
        masters.part_from_others(optimizer)
        if self.planned is None:
            self.unseen.stepping(model, optimizer)

    def _signature_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], facts: StepFacts) -> StepSignature:
        """What a plan for this step would be for, without what is known not to matter."""
        return self.values.read(signature_of(self.model, args, kwargs, facts, self._attributes))

    def _look_at_attributes(self) -> None:
        """After the first forward under a plan: what it has changed itself is no sign of another step."""
        if not self._is_new or self._signature is None or self.planned is None:
            return
        self._is_new = False
        before, after = self._signature.attributes, self._attributes.read(self.model)
        if before != after:
            self._attributes.note_forward(before, after)
            self._signature = replace(self._signature, attributes=self._attributes.read(self.model))
            self._known[self._signature] = self.planned

    def _learn(self, signature: StepSignature, planned: Planned, is_same_step: bool) -> None:
        """From a new plan, which values are no sign of another step."""
        before = self._signature
        self._attributes.ignore(planned.trace.changes.attributes)
        if before is not None and replace(before, attributes=signature.attributes).covers(signature):
            self._attributes.learn(before.attributes, signature.attributes, is_same_step)
        self.values.learn(before, signature, is_same_step)

    # ---- planning --------------------------------------------------------------------------------

    def _found(self, signature: StepSignature) -> tuple[StepSignature, Planned | None]:
        """A plan from before that covers a step, and what it was made for: of several the smallest."""
        planned = self._known.get(signature)
        if planned is not None:
            return signature, planned
        covering = [item for item in self._known.items() if item[0].covers(signature)]
        return min(
            covering, key=lambda item: item[1].plan.predicted.allocated_peak_bytes, default=(signature, None)
        )

    @property
    def _capped_config(self) -> Config:
        cap = self._cap_bytes
        return self.config if cap is None else self.config.replace(memory_budget=cap)

    def tighten(self, planned: Planned) -> None:
        """Has a plan for fewer bytes in force, in the middle of a step that has run out of memory.

        Later plans have its budget.

        Args:
            planned: made for the step at hand.
        """
        self.in_force.exchange(planned)
        self.planned, self._cap_bytes = planned, planned.plan.budget_bytes
        self.forget_plans("a step has run out of memory")

    @without_saving_hooks()
    def _plan_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], facts: StepFacts, modes: PresentModes
    ) -> None:
        """Plans and attaches for one batch. On any error the model keeps what it had."""
        signature = self._signature_of(args, kwargs, facts)
        changed = None
        made_for, planned = self._found(signature)
        if planned is None or not facts.staying <= {name for name, _ in planned.places}:
            changed = [self._why_new] if self._signature is None else signature.beyond(self._signature)
            with self.bare(), modes.on():
                planned = make_plan(self.model, self._capped_config, args, kwargs, facts)
            self._learn(signature, planned, self.planned is not None and self.planned.is_alike(planned))
            if not planned.plan.fits and self.config.strict_budget:
                raise BudgetError(
                    planned.plan.budget_bytes, planned.plan.smallest_peak_bytes, planned.plan.advice
                )
            made_for = signature
        self.in_force.exchange(planned)
        replaced = self.planned
        # A plan may switch the model's own cache and checkpoints: what they are from now on is no other step.
        signature = self.values.read(replace(made_for, attributes=self._attributes.read(self.model)))
        self.planned = self._known[signature] = planned
        if len(self._known) > _MOST_PLANS:
            del self._known[next(iter(self._known))]
        self._signature, self._is_new = signature, True
        plan_log.announce(self, replaced, changed)
        plan_attached(self)
        if self.config.verify_correctness and replaced is None:
            plan_log.announce_verification(self, args, kwargs, facts)


def _keep_module(ref: weakref.ref[Executor], path: str, reason: str) -> None:
    """`Executor.keep_module`, for what the executor owns; a graph may outlive it."""
    if (executor := ref()) is not None:
        executor.keep_module(path, reason)


def _modules_of(model: nn.Module, run: str) -> tuple[str, ...]:
    """The paths of what was recomputed as one: a module, or children of a chain from one to another."""
    first, is_run, last = run.partition(" to ")
    chain, _, start = first.rpartition(".")
    try:
        names = list(model.get_submodule(chain)._modules) if is_run else []
        part = names[names.index(start) : names.index(last.rpartition(".")[2]) + 1]
    except (AttributeError, ValueError):  # the model has other modules by now
        part = []
    return tuple(f"{chain}.{name}".lstrip(".") for name in part) or modules_of_run(run)
