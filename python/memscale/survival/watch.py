# SPDX-License-Identifier: Apache-2.0
"""Watches one wrapped model for running out of memory: reports it, or has the step repeated.

    forward ──► out of memory? ──► the failed graph goes, the world is put back, a tighter plan, forward again
    backward ─► out of memory? ──► the model's graph goes, a tighter plan, forward and backward again
                                   (see `replay`)
    too often, or not exactly repeatable ──► the report, and the exception that it is about

What was caught is handled after its `except` block: inside, the traceback holds every frame, and with them
the tensors that have to go.
"""

from __future__ import annotations

import gc
import itertools
import logging
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from memscale import events, log
from memscale.optim.kinds import inner_of
from memscale.survival import host_allocator, outer_backward
from memscale.survival.allocator_history import HISTORY
from memscale.survival.eligibility import Eligibility
from memscale.survival.facts import Facts
from memscale.survival.guard import GUARD
from memscale.survival.memory_now import MemoryNow, memory_now
from memscale.survival.oom_errors import asked_bytes, who_ran_out
from memscale.survival.replay import Replay
from memscale.survival.report import report_lines
from memscale.survival.step_guard import StepGuard
from memscale.survival.where import BACKWARD, ELSEWHERE, EVALUATION, FORWARD, STEP, Where, where
from memscale.techniques.checkpoint.checkpoint_state import Body, Uses
from memscale.torchkit.torch_settings import has_modes, without_modes
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.plans.plan import Plan
    from memscale.survival.arguments import Arguments

_MOST_TRIES: Final = 4
"""Repetitions of one step."""

_MOST_AS_BEFORE: Final = 2
"""Under a plan that cannot be made tighter: somebody else may have had the memory for a moment."""

_PASSES: Final = ("forward", "backward")
"""Phases of a step that may be repeated."""

_USABLE_PERCENT: Final = 95
"""Of what is free; the rest goes to fragments."""

_MOST_RECOVERIES: Final = 16
_WINDOW: Final = 100
"""So many recoveries within so many forwards: the budget is not the problem."""

_REPORTED: Final = "_memscale_reported"

_forwards = itertools.count()


class OomWatch:
    """One wrapped model's.

    Args:
        model: held weakly.
        survives: have steps repeated; else only report.
        is_guarded: see `Config.guard`.
        snapshots: folder, see `Config.oom_snapshot`; None: nobody asked.
        facts: tells what is in force.
        tighten: attaches a plan for fewer bytes, at most those given, and returns it; None: there is none.

    Attributes:
        latest: when its latest forward began, among those of all wrapped models.
        eligibility: of its forwards.
        recoveries: how many steps were repeated, in all.
    """

    def __init__(
        self,
        model: nn.Module,
        survives: bool,
        is_guarded: bool,
        snapshots: str | None,
        facts: Callable[[], Facts],
        tighten: Callable[[int], Plan | None],
    ) -> None:
        self._model = weakref.ref(model)
        self.survives = survives
        self._is_guarded, self._retries = is_guarded, 0
        self._snapshots = snapshots
        self._guarding: weakref.finalize[Any, OomWatch] | None = None
        self._recording: weakref.finalize[Any, OomWatch] | None = None
        self._facts, self._tighten = facts, tighten
        self.latest = -1
        self.recoveries = 0
        self._recent: deque[int] = deque(maxlen=_MOST_RECOVERIES)
        self._forwards = 0
        self._tries = self._as_before = 0
        self._first_plan: Plan | None = None  # that the step at hand began with
        self._cannot = ""  # why the step at hand cannot be repeated
        self.eligibility = Eligibility(facts)
        self._steps = StepGuard(self._is_mine, lambda: facts().plan, lambda error: self.notice(error, STEP))

    def begin(self) -> None:
        """The model is wrapped."""
        outer_backward.add(self)
        if self.survives:
            self._steps.put()
        if self._is_guarded and self._facts().device.type == "cpu" and self._guarding is None:
            GUARD.put()
            self._guarding = weakref.finalize(self, GUARD.remove)

    def end(self) -> None:
        """It is no more."""
        outer_backward.remove(self)
        self._steps.remove()
        if self._guarding is not None:
            self._guarding()
            self._guarding = None
        if self._recording is not None:
            self._recording()
            self._recording = None

    def _is_mine(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._model() is None:
            return False
        return any(inner_of(item) is inner_of(optimizer) for item in self._facts().optimizers)

    # ---- what the model does -------------------------------------------------------------------------

    def forward(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a forward with gradients.

        Args:
            run: the model's own, with what is attached.
            args: positional part of the batch.
            kwargs: keyword part.
        """
        self.latest = next(_forwards)
        self._forwards += 1
        self._tries, self._as_before, self._first_plan, self._cannot = 0, 0, None, ""
        self._steps.check()
        if self._is_guarded:
            self._guard()
        if self._snapshots is not None and self._recording is None and self._facts().device.type == "cuda":
            HISTORY.put()
            self._recording = weakref.finalize(self, HISTORY.remove)
        model = self._model() if self.survives else None
        if model is not None:
            arguments = self.eligibility.arguments(model, args, kwargs)
            if arguments is not None:
                return self._repeatable(model, run, arguments)
        try:
            return run(*args, **kwargs)
        except Exception as error:
            self.notice(error, FORWARD)
            raise

    def _guard(self) -> None:
        """Before a forward: the limit follows what is left; on a card, thrash is memory that has run out."""
        if self._guarding is not None:
            GUARD.follow()
            return
        facts = self._facts()
        if facts.device.type != "cuda":
            return
        retries = torch.cuda.memory_stats(facts.device).get("num_alloc_retries", 0)
        before, self._retries = self._retries, retries
        if retries <= before or self._forwards == 1:
            return
        plan = self._tighter(facts)
        if plan is not None:
            log.LOGGER.warning(
                "the allocator had to retry %d times in the last step: a tighter plan, peak %s",
                retries - before,
                format_bytes(plan.predicted.device_used_peak_bytes),
            )

    def evaluation(self, run: Callable[[], Any]) -> Any:
        """Runs a forward without gradients."""
        try:
            return run()
        except Exception as error:
            self.notice(error, EVALUATION)
            raise

    def in_backward(self, error: Exception) -> None:
        """A backward of the loop has raised."""
        self.notice(error, BACKWARD)

    def elsewhere(self, error: BaseException) -> None:
        """An exception ends the program."""
        self.notice(error, ELSEWHERE)

    def notice(self, error: BaseException, phase: str) -> None:
        """Reports an error that says that memory has run out; once.

        Args:
            error: any.
            phase: see `where`.
        """
        if getattr(error, _REPORTED, False) or who_ran_out(error) is None:
            return
        model = self._model()
        if model is None:
            return
        try:
            facts = self._facts()
            self._report(error, where(error, model, phase), self._now(facts), facts.plan)
        except Exception as trouble:  # must not come in the place of what it is about
            kind = type(trouble).__name__
            log.LOGGER.warning("memory has run out, and the report of it failed: %s: %s", kind, trouble)

    # ---- repeating -----------------------------------------------------------------------------------

    def _repeatable(self, model: nn.Module, run: Callable[..., Any], arguments: Arguments) -> Any:
        """Runs a forward that can begin anew, and behind a boundary its backward, too.

        The first backward under a plan is watched only: it shows what the loop does with outputs. It cannot
        be repeated, so what it will take is made sure of.
        """
        if not self.eligibility.cuts:
            self._make_sure()
        while True:
            replay = None
            try:
                replay = self._replay(model, run, arguments)
                output = replay.first(self.eligibility.cuts)
                break
            except Exception as error:
                failure = error
            try:
                self._recover(failure, FORWARD, replay)
            finally:
                del failure
        self.eligibility.note_refused(replay.reason)
        if replay.is_cut:
            outer_backward.note_cut(replay)
        elif not replay.reason:
            self.eligibility.note(model, replay.window)
        return output

    def _make_sure(self) -> None:
        """Has a tighter plan where what the present one takes for a step is not to be had."""
        while True:
            facts = self._facts()
            if facts.plan is None:
                return
            try:
                with without_modes() if has_modes() else nullcontext():
                    torch.empty(_more_bytes(facts.plan, facts.device), dtype=torch.uint8, device=facts.device)
                failure = None
            except Exception as error:
                if who_ran_out(error) is None:
                    raise
                failure = error
            if failure is None or self._tries == _MOST_TRIES:
                break
            _let_go(failure)
            self._tries += 1
            plan = self._tighter(facts)
            if plan is None:
                break
            log.LOGGER.warning(
                "a step would take more memory than there is: %s", _tighter_in_words(facts.plan, plan)
            )
        self._tries = 0
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _replay(self, model: nn.Module, run: Callable[..., Any], arguments: Arguments) -> Replay:
        trace = self._facts().trace
        assert trace is not None
        buffers = [
            (model.get_submodule(owner), name) for owner, name in sorted(trace.written_buffers.get("", ()))
        ]
        uses = Uses("" in trace.random, trace.changes.python_random, trace.changes.uses_gradients)
        body = Body("", buffers, uses, trace.foreign_reads.get("", ()), kept=trace.changes.in_process)
        return Replay(body, model, run, arguments, self._again, outer_backward.come_to)

    def _again(self, failure: Exception, reason: str) -> None:
        if reason and who_ran_out(failure) is not None:
            self._cannot = reason
            self.notice(failure, BACKWARD)
            raise failure
        self._recover(failure, BACKWARD, None)

    def _recover(self, failure: Exception, phase: str, replay: Replay | None) -> None:
        """Makes it possible to begin again, or raises the failure.

        Args:
            failure: what was caught.
            phase: what has failed.
            replay: the forward that failed; None: nothing of it has to be put back.
        """
        model = self._model()
        if model is None or who_ran_out(failure) is None:
            raise failure
        facts = self._facts()
        place, now = where(failure, model, phase), self._now(facts)
        self._tries += 1
        if self._is_too_often():
            self._report(failure, place, now, facts.plan)
            raise failure
        _let_go(failure)
        self._cannot = self.eligibility.why_not_now(model)
        if replay is not None and not self._cannot:
            self._cannot = replay.rewind()
        if self._cannot:
            self._report(failure, place, now, facts.plan)
            raise failure
        with without_modes() if has_modes() else nullcontext():
            plan = self._tighter(facts)
        self._as_before += plan is None
        if self._as_before > _MOST_AS_BEFORE:
            self._report(failure, place, now, facts.plan)
            raise failure
        self.recoveries += 1
        self._recent.append(self._forwards)
        self._say(failure, place, facts.plan, plan)

    def _is_too_often(self) -> bool:
        full = len(self._recent) == _MOST_RECOVERIES
        return self._tries > _MOST_TRIES or (full and self._forwards - self._recent[0] < _WINDOW)

    def _tighter(self, facts: Facts) -> Plan | None:
        """A plan between the one that the step began with and the smallest, by how often it has failed.

        Within what there is now, when all of the step is gone.
        """
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        host_allocator.give_back()
        if facts.plan is None:
            return None
        if self._first_plan is None:
            self._first_plan = facts.plan
        first = self._first_plan
        highest, lowest = first.predicted.device_used_peak_bytes, first.smallest_peak_bytes
        wanted = lowest + (highest - lowest) * (_MOST_TRIES - 1 - min(self._tries, _MOST_TRIES - 1)) // (
            _MOST_TRIES - 1
        )
        available = self._now(facts).available + first.predicted.context_bytes
        wanted = min(wanted, available * _USABLE_PERCENT // 100)
        if lowest >= facts.plan.predicted.device_used_peak_bytes:
            return None
        return self._tighten(max(wanted, 1))

    # ---- words ---------------------------------------------------------------------------------------

    def _now(self, facts: Facts) -> MemoryNow:
        model = self._model()
        assert model is not None
        with without_modes() if has_modes() else nullcontext():
            return memory_now(model, facts.optimizers, facts.device)

    def _report(self, error: BaseException, place: Where, now: MemoryNow, plan: Plan | None) -> None:
        setattr(error, _REPORTED, True)
        reason = ""
        if self.survives:
            reason = self._cannot or self.eligibility.reason
            if not reason and self._tries:
                reason = f"repeated {self._tries - 1} times, and out of memory each time"
        lines = report_lines(error, place, now, plan, reason, self._snapshot(now.device))
        log.block(lines, "MemScale: out of memory", logging.ERROR)
        facts = {"phase": place.phase, "module": place.module, "asked_bytes": asked_bytes(error)}
        told = [line for line in lines if not line.startswith("snapshot")]  # a path of this machine
        events.tell("oom", "\n".join(told), **facts, allocated_bytes=now.allocated)
        if reason:
            events.tell("refused", reason)

    def _snapshot(self, device: torch.device) -> str:
        """In words for the report; "" if nobody asked."""
        if self._snapshots is None:
            return ""
        if device.type != "cuda":
            return "none: PyTorch records allocations of cards alone"
        return HISTORY.write(self._snapshots)

    def _say(self, failure: Exception, place: Where, before: Plan | None, plan: Plan | None) -> None:
        asked = asked_bytes(failure)
        what = f"{format_bytes(asked)} refused" if asked else "an allocation was refused"
        how = "under the same plan, which is the smallest"
        if plan is not None and before is not None:
            how = f"under {_tighter_in_words(before, plan)}"
        log.LOGGER.warning("out of memory in %s (%s): the step is repeated %s", place.text, what, how)
        found: dict[str, float] = {}
        if plan is not None and before is not None:
            found["predicted_bytes"] = plan.predicted.device_used_peak_bytes
            found["slowdown"] = plan.predicted.step_time_ns / max(before.predicted.step_time_ns, 1)
        events.tell("recovery", f"{place.text} ({what}): the step is repeated {how}", **found)


def _tighter_in_words(before: Plan, plan: Plan) -> str:
    peaks = [format_bytes(item.predicted.device_used_peak_bytes) for item in (plan, before)]
    time = plan.predicted.step_time_ns / max(before.predicted.step_time_ns, 1)
    return f"a tighter plan: peak {peaks[0]}, was {peaks[1]}, × {time:.2f} of the time (predicted)"


def _more_bytes(plan: Plan, device: torch.device) -> int:
    """What a step under a plan takes beside what is there before it."""
    if device.type != "cuda":
        return plan.predicted.timeline.rise_bytes(_PASSES)
    torch.cuda.empty_cache()
    predicted = plan.predicted.device_used_peak_bytes - plan.predicted.context_bytes
    return max(0, predicted - torch.cuda.memory_reserved(device))


def _let_go(error: BaseException) -> None:
    """Drops what the frames of an error hold, and those of errors that it came from."""
    item: BaseException | None = error
    while item is not None:
        if item.__traceback__ is not None:
            traceback.clear_frames(item.__traceback__)
            item.__traceback__ = None
        item = item.__cause__ or item.__context__
    torch.clear_autocast_cache()
    gc.collect()
