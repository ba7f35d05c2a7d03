# SPDX-License-Identifier: Apache-2.0
"""The planner: hardware, profile and decision, without touching the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from memscale.config.config import Config
from memscale.core.amounts import NOTHING, Resident, all_resident
from memscale.core.calibration import calibrated
from memscale.core.decision_engine import DecisionEngine
from memscale.core.profiler import MemoryProfiler
from memscale.core.step_amounts import Refiner
from memscale.core.variants import (
    Place,
    Tried,
    Way,
    attached,
    better,
    combined,
    far_above,
    for_way,
    found,
    suspects,
    techniques_of,
    tried,
)
from memscale.hardware.detect import Hardware, budget_bytes, detect
from memscale.log import Pace
from memscale.offload.limits import Link, link_for
from memscale.plans.budget import reserve_bytes
from memscale.plans.plan import Plan
from memscale.techniques.base import SettlingAttachment, StepAttachment, Surroundings
from memscale.techniques.checkpoint import global_hooks
from memscale.techniques.checkpoint.empty_caches import Seen
from memscale.techniques.checkpoint.given_caches import preserved
from memscale.techniques.checkpoint.saving_hooks import without_saving_hooks
from memscale.techniques.checkpoint.use_cache import CacheSwitch
from memscale.techniques.left_out import NOTHING_LEFT_OUT, LeftOut, left_out_of
from memscale.techniques.optimizer.state_offload import with_state_room
from memscale.techniques.optimizer.weight_offload import with_room
from memscale.techniques.precision.loss_scale import entered
from memscale.techniques.step_facts import StepFacts
from memscale.torchkit.scripted import uncounted_scripts
from memscale.trace.step import Trace
from memscale.weights.placement import device_of_use

_Made = TypeVar("_Made")

_CACHE_STAYS = (
    "use_cache: stays on with a cache that keeps what it is given ({}); modules that are given one are not "
    "checkpointed, so set config.use_cache=False before training"
)


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from.

    Attributes:
        cache_off: the plan holds with caches that keep nothing, and without the model's own checkpoints.
        places: where step techniques are attached, in the order of their table.
        link: how saved tensors leave the device, where the plan may let them.
        resident: technique → names of the parts that it leaves as they are.
        left_out: modules that it leaves alone.
        cache_stays: why caches that the model makes keep what they are given; "" where they keep nothing.
    """

    plan: Plan
    trace: Trace
    hardware: Hardware
    cache_off: bool
    places: tuple[Place, ...] = ()
    link: Link | None = None
    resident: Resident = field(default_factory=lambda: NOTHING)
    left_out: LeftOut = NOTHING_LEFT_OUT
    cache_stays: str = ""

    def is_alike(self, other: Planned) -> bool:
        """Whether two steps are one and the same to a plan: equal, or with peaks that are, nearly."""
        if self.trace.graph.digest == other.trace.graph.digest:
            return True
        peaks = [planned.plan.plain.allocated_peak_bytes for planned in (self, other)]
        modules = [[item.module for item in planned.plan.active] for planned in (self, other)]
        return modules[0] == modules[1] and abs(peaks[0] - peaks[1]) <= _ALIKE_SHARE * peaks[0]


_ALIKE_SHARE = 0.001
"""Of the plain peak: two steps that differ by less do the same, as far as plans go."""


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are (its buffers, for a model without any; else the CPU)."""
    for tensor in (*model.parameters(), *model.buffers()):
        return device_of_use(tensor)
    return torch.device("cpu")


@dataclass(frozen=True)
class Planner:
    """Plans steps of one bare model, which is left as it was.

    Attributes:
        may_run: the model may be run for real, if it cannot be traced on fakes.
        pace: called for every trace.
    """

    model: nn.Module
    config: Config
    step: StepFacts
    hardware: Hardware
    may_run: bool = True
    pace: Pace | None = None

    @cached_property
    def engine(self) -> DecisionEngine:
        """Decides under the configuration's budget."""
        link = None if isinstance(self.link, str) else self.link.for_decision
        budget = budget_bytes(self.config, self.hardware)
        return DecisionEngine(self.config.effective(), self.hardware, budget, link=link)

    @cached_property
    def link(self) -> Link | str:
        """How saved tensors may leave the device, or why they may not; "" if nobody asked for it."""
        if not self.step.gradients:  # nothing is saved that could leave
            return ""
        budget, device = budget_bytes(self.config, self.hardware), device_of(self.model)
        if device.type != self.hardware.device_kind:  # a prediction for a card, say
            device = torch.device(self.hardware.device_kind)
        link = link_for(self.config.effective(), self.hardware, device, budget.bytes)
        known = self.step.optimizer if self.step.may_change_optimizer else None
        return with_room(with_state_room(link, self.step.optimizer), self.model, known)

    @cached_property
    def left_out(self) -> LeftOut:
        """What techniques leave alone in this model."""
        return left_out_of(self.model, self.config, self.step.differed)

    @property
    def switches_cache(self) -> bool:
        """Whether a plan would have the model's caches keep nothing, or its own checkpoints off."""
        if not self.step.gradients:
            return False
        return CacheSwitch(self.model).is_needed and self.engine.config.enable_checkpointing

    @uncounted_scripts()
    def trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cache_off: bool,
        attachments: Sequence[StepAttachment] = (),
    ) -> Trace:
        """Traces one step.

        Args:
            args: positional part of a batch.
            kwargs: keyword part.
            cache_off: with caches that keep nothing, and without the model's own checkpoints.
            attachments: step techniques to trace with; afterwards they say whether they were used.

        Raises:
            Exception: the model rejects the batch.
        """
        stays = self._cache_stays.get("read", "")
        try:
            return self._profiled(args, kwargs, cache_off, attachments, stays)
        except Exception as error:
            if not cache_off or attachments or stays or not CacheSwitch(self.model).empties:
                raise
            # Most models never look into a cache that they have filled. One that does may fail in any way.
            trace = self._profiled(args, kwargs, cache_off, attachments, stays="read")
            self._cache_stays["read"] = str(error).strip().partition("\n")[0][:160]
            return trace

    @without_saving_hooks()
    def _profiled(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cache_off: bool,
        attachments: Sequence[StepAttachment],
        stays: str,
    ) -> Trace:
        step = replace(self.step, target=self.hardware.target, left_out=self.left_out)
        profiler = MemoryProfiler(self.engine.config, self.engine.worse)
        switch = CacheSwitch(self.model, cache_stays=stays)
        with (
            torch.inference_mode(False),  # wherever the caller is: what is traced is a training step
            global_hooks.silenced(),
            switch.in_trace(args, kwargs, step.training) if cache_off else nullcontext(Seen()) as seen,
            preserved(args, kwargs),
            attached(attachments, step) as step,
        ):
            trace = profiler.profile(self.model, args, kwargs, step, self.may_run)
        if seen.kept:
            self._cache_stays["made"] = ", ".join(sorted(seen.kept))
        if cache_off:
            trace.reads_lengths = seen.reads_lengths
        if self.pace is not None:
            self.pace.traced()
        return trace

    @cached_property
    def _cache_stays(self) -> dict[str, str]:
        """Why caches that the model makes are real: it reads them, or they are of such a kind."""
        return {}

    @uncounted_scripts()
    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """The plan for a batch, with as few traces as will do."""
        cache_off = self.switches_cache
        plain = self._tried((), args, kwargs, cache_off)
        best = self._best(plain, args, kwargs, cache_off)
        own = CacheSwitch(self.model).checkpoints > 0
        if not cache_off or (best.plan.does_something and (best.plan.fits or not own)):
            return self._planned(best, cache_off)
        # Nothing to do without the cache and the model's own checkpoints. If the step fits with them too, or
        # nothing fits and they help, the model is not touched at all.
        with_cache = self._tried((), args, kwargs, cache_off=False)
        if with_cache.plan.active or (not best.plan.fits and better(best, with_cache) is best):
            return self._planned(best, cache_off)
        return self._planned(with_cache, cache_off=False)

    @uncounted_scripts()
    def plan_and_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """The same plan; its `plain` is the step of the untouched model, its cache included."""
        as_is = self._tried((), args, kwargs, cache_off=False)
        if not self.switches_cache:
            return self._planned(self._best(as_is, args, kwargs, cache_off=False), cache_off=False)
        if as_is.plan.fits and not as_is.plan.active and not self._asked:
            return self._planned(as_is, cache_off=False)
        without = self._tried((), args, kwargs, cache_off=True, plain=as_is)
        return self._planned(self._best(without, args, kwargs, cache_off=True), cache_off=True)

    @uncounted_scripts()
    def used_bytes(self, args: tuple[Any, ...], kwargs: dict[str, Any], with_plan: bool) -> int:
        """Device-used bytes of a step: under the smallest plan there is, or without any."""
        trace = self.trace(args, kwargs, cache_off=with_plan and self.switches_cache)
        if not with_plan:
            return self.engine.plain_used_bytes(trace)
        smallest = self.engine.smallest_used_bytes(trace)
        if not self._techniques:
            return smallest
        trace = self._surviving(
            self._techniques, lambda way: self.trace(args, kwargs, self.switches_cache, self._found(way)[0])
        )
        return min(smallest, self.engine.smallest_used_bytes(trace))

    # ---- ways to compute the step ------------------------------------------------------------------

    @cached_property
    def _techniques(self) -> Way:
        return techniques_of(self.engine.config) if self.step.gradients else ()

    @property
    def _asked(self) -> Way:
        """What is attached because the user asked for it, or because it is in force and stays."""
        staying = self.step.staying
        return tuple(item for item in self._techniques if item.asked or item.name in staying)

    def _around(self, resident: Resident) -> Surroundings:
        known = self.step.optimizer if self.step.may_change_optimizer else None
        return Surroundings(
            self.hardware,
            self.engine.config,
            known,
            self.link,
            resident=resident,
            left_out=self.left_out,
            known=self._known,
        )

    @cached_property
    def _known(self) -> dict[Any, Any]:
        """What techniques know of the model's modules; they look at it for every way."""
        return {}

    def _best(self, plain: Tried, args: tuple[Any, ...], kwargs: dict[str, Any], cache_off: bool) -> Tried:
        """The best way to compute the step; see `core/variants`."""
        if not self._techniques:
            return plain
        self._failed.clear()  # another batch may do with what the last one did not
        ways = [plain]
        if self._asked:
            ways.append(self._tried(self._asked, args, kwargs, cache_off, plain))
        best = ways[-1]
        enough = best.plan.fits and not best.plan.active and not self.engine.config.force_optimize
        rounds = [] if enough else self._rounds
        for techniques in rounds:
            whole = self._tried(techniques, args, kwargs, cache_off, plain)
            ways.append(whole)
            if techniques is rounds[-1] or not far_above(whole.plan, self.engine.budget.bytes):
                ways += self._without_each(whole, args, kwargs, cache_off, plain, ways)
            if any(item.plan.fits for item in ways):
                break
        candidates = ways[1:] if self._asked else ways
        best = functools.reduce(better, candidates)
        if not enough:
            less = self._less(args, kwargs, cache_off, plain).refined(candidates, best)
            ways, best = ways + less, functools.reduce(better, less, best)
        return replace(best, plan=combined(best, ways, plain.plan))

    @property
    def _rounds(self) -> list[Way]:
        """Techniques to look at; later ones where nothing fits with those before."""
        first = tuple(item for item in self._techniques if not item.last or item in self._asked)
        rounds = [first, self._techniques] if len(first) < len(self._techniques) else [first]
        return [techniques for techniques in rounds if len(techniques) > len(self._asked)]

    def _without_each(
        self,
        whole: Tried,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cache_off: bool,
        plain: Tried,
        known: Sequence[Tried],
    ) -> list[Tried]:
        """Without each of the techniques of a way in turn, but for those that are known."""
        ways: list[Tried] = []
        for name in whole.names:
            rest = tuple(item for item in whole.way if item.name != name or item in self._asked)
            if rest in (item.way for item in known):
                continue
            if len(whole.names) > 1 + len(self._asked) and len(rest) < len(whole.way):
                ways.append(self._tried(rest, args, kwargs, cache_off, plain))
        return ways

    def _less(self, args: tuple[Any, ...], kwargs: dict[str, Any], cache_off: bool, plain: Tried) -> Refiner:
        """Looks for ways that take no more of a technique than the budget demands."""

        def again(way: Tried, resident: Resident) -> Tried:
            unused = all_resident(way.parts, resident)
            rest = tuple(
                item
                for item in way.way
                if item.name not in unused or item.even_resident or item in self._asked
            )
            return self._tried(rest, args, kwargs, cache_off, plain, resident)

        budget = self.engine.budget.bytes
        return Refiner(budget - reserve_bytes(budget), again, better)

    @cached_property
    def _failed(self) -> dict[str, str]:
        """Techniques that the present step cannot be traced with, and why: each is found out once."""
        return {}

    def _surviving(self, way: Way, run: Callable[[Way], _Made]) -> _Made:
        """What comes of a way without the techniques that its step cannot be traced with.

        The model itself runs, so an error of what nobody asked for must not take the plan with it.

        Args:
            way: the techniques.
            run: traces with some of them.

        Raises:
            Exception: of the first trace, if it is not the fault of what may be left out.
        """
        way = tuple(item for item in way if item.name not in self._failed)
        try:
            return run(way)
        except Exception as error:
            asked = {item.name for item in self._asked}
            there = dict.fromkeys(item.name for item in self._found(way)[0] if item.name not in asked)
            for names in suspects(there, str(error)):
                try:
                    made = run(tuple(item for item in way if item.name not in names))
                except Exception:  # it is not these, or not only
                    continue
                line = str(error).strip().partition("\n")[0][:160]
                what = "it" if len(names) == 1 else ", ".join(sorted(names))
                why = f"the step cannot be traced with {what} ({line})"
                self._failed.update(dict.fromkeys(names, why))
                return made
            raise

    def _tried(
        self,
        way: Way,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cache_off: bool,
        plain: Tried | None = None,
        resident: Resident = NOTHING,
    ) -> Tried:
        """A way, traced and decided; it lacks what the step cannot be traced with, and says so."""

        def run(rest: Way) -> Tried:
            if way and not rest and plain is not None:  # nothing is left of it
                return plain
            return self._decided(rest, args, kwargs, cache_off, plain, resident)

        made = self._surviving(way, run)
        failed = tuple((item.name, self._failed[item.name]) for item in way if item.name in self._failed)
        return replace(made, idle=(*made.idle, *failed))

    def _decided(
        self,
        way: Way,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cache_off: bool,
        plain: Tried | None,
        resident: Resident,
    ) -> Tried:
        attachments, why_not = self._found(way, resident)
        if way and not attachments and plain is not None:  # nothing to trace anew
            return tried(way, (), (plain.plan, plain.trace), why_not)
        trace, attachments = self._traced(args, kwargs, cache_off, plain, attachments, why_not)
        beside = None if plain is None else plain.trace
        plan = self.engine.decide(trace, beside)
        settling = [item for item in attachments if isinstance(item, SettlingAttachment)]
        while not all([item.settles(plan.choices) for item in settling]):
            trace, attachments = self._traced(args, kwargs, cache_off, plain, attachments, why_not)
            plan = self.engine.decide(trace, beside)
        return tried(way, attachments, (plan, trace), why_not)

    def _traced(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cache_off: bool,
        plain: Tried | None,
        attachments: list[StepAttachment],
        why_not: dict[str, str],
    ) -> tuple[Trace, list[StepAttachment]]:
        """A trace, and what it was made with: what stands aside is left out, and `why_not` says why.

        It may have changed the order of operations before it stood aside, and no run will have it.
        """
        trace = self.trace(args, kwargs, cache_off, attachments)
        aside = [item for item in attachments if item.reason and not item.used]
        if not aside:
            return trace, attachments
        working = {item.name for item in attachments if item.used}
        for item in aside:
            if item.name not in working:
                why_not.setdefault(item.name, item.reason)
        rest = [item for item in attachments if item not in aside]
        if not rest and plain is not None:
            return plain.trace, []
        return self.trace(args, kwargs, cache_off, rest), rest

    def _found(self, way: Way, resident: Resident = NOTHING) -> tuple[list[StepAttachment], dict[str, str]]:
        """Where techniques could attach, and why some could not."""
        around = for_way(self._around(resident), way)
        with entered(self.model, self.step.optimizer):
            attachments = found(self.model, around, way)
            places = {item.name for item in attachments}
            missing = [technique for technique in way if technique.name not in places]
            reasons = {technique.name: technique.why_not(self.model, around) for technique in missing}
        return attachments, {name: reason for name, reason in reasons.items() if reason}

    def _planned(self, best: Tried, cache_off: bool) -> Planned:
        plan, link = best.plan, self.link
        notes = [*self.left_out.notes]
        notes += [_CACHE_STAYS.format(why) for why in self._cache_stays.values() if cache_off]
        notes += [f"offload: {link}"] if isinstance(link, str) and link else []
        planned = Planned(
            replace(plan, notes=(*plan.notes, *notes)),
            best.trace,
            self.hardware,
            cache_off,
            best.places,
            left_out=self.left_out,
            cache_stays=self._cache_stays.get("read", ""),
        )
        return planned if isinstance(link, str) else replace(planned, link=link, resident=best.resident)


def make_plan(
    model: nn.Module,
    config: Config,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    step: StepFacts,
    hardware: Hardware | None = None,
    may_run: bool = True,
) -> Planned:
    """Plans one training step of a bare model. The model is left as it was.

    Args:
        model: the model.
        config: what to do.
        args: positional part of a batch.
        kwargs: keyword part.
        step: what else decides the step.
        hardware: what to plan for; None: the model's own device.
        may_run: see `Planner`.

    Raises:
        Exception: the model rejects the batch, or the device is not one that MemScale knows.
    """
    if hardware is None:
        hardware = calibrated(detect(device_of(model)))
    return Planner(model, config, step, hardware, may_run, Pace()).plan(args, kwargs)
