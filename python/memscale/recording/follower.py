# SPDX-License-Identifier: Apache-2.0
"""Follows one wrapped model and records its steps: an observer, as `core/wrapped.py` has it.

    wrap ──► attach ──► a follower: hooks of optimizer steps, outputs of forwards, what `events` says
    step of the optimizer ──► time, loss, peaks, figures of offload, predictions where they are new ──► Run
    detach ─► detach ─► the report, hooks off, the run released

A step is one of the optimizer. Nothing here changes what is computed, and no error leaves.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from memscale import events
from memscale.core.planner import device_of
from memscale.core.wrapped import FORWARD_OBSERVERS
from memscale.optim.kinds import inner_of
from memscale.recording.current import CURRENT
from memscale.recording.documents import config_document, environment, plan_document, report_document
from memscale.recording.losses import Losses
from memscale.recording.peaks import CardPeaks, HostPeak, predicted_values, resident_values
from memscale.recording.run import Run
from memscale.torchkit.step_hooks import StepHook, after_steps, before_steps
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.core.planner import Planned
    from memscale.core.wrapped import Wrapped

__all__ = ["Follower", "attach", "detach", "follower_of"]

_F = TypeVar("_F", bound=Callable[..., None])

_OFFLOAD_SECONDS: Final = 1.0
_PROFILED_STEP: Final = 2
"""Under a plan, which step is measured on a CPU: by then optimizer state is there."""


def attach(executor: Wrapped) -> None:
    """A model was wrapped: if it is to be recorded, it is followed from now on."""
    setting = executor.config.record
    if setting is None:
        return
    run = CURRENT.hold(setting, f"{type(executor.model).__name__} {time.strftime('%Y-%m-%d %H:%M:%S')}")
    if run is not None:
        follower = Follower(executor, run, is_first=not _followers)
        _followers[executor] = follower
        weakref.finalize(executor, _gone, follower).atexit = False
        follower.begin()


def detach(executor: Wrapped) -> None:
    """A model is not wrapped any more. Harmless for one that is not followed."""
    follower = _followers.pop(executor, None)
    if follower is not None:
        follower.end()
        CURRENT.release("finished" if sys.exc_info()[1] is None else "failed")


def _gone(follower: Follower) -> None:
    """A model has gone without `detach`."""
    if not follower.is_over:
        follower.end()
        CURRENT.release()


def follower_of(executor: Wrapped) -> Follower | None:
    """Who follows a wrapped model; None: nobody does."""
    return _followers.get(executor)


_followers: weakref.WeakKeyDictionary[Wrapped, Follower] = weakref.WeakKeyDictionary()


def _harmless(method: _F) -> _F:
    """A method whose errors are the run's, and not the program's."""

    @functools.wraps(method)
    def run(self: Follower, *args: Any, **kwargs: Any) -> None:
        if self.run.is_over:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.run.warn(error)

    return run  # type: ignore[return-value]


class Follower:
    """Records the steps of one model.

    Args:
        executor: of the model; held weakly.
        run: where they go.
        is_first: of several models in a run the first has the names of series. The others only keep it open.

    Attributes:
        is_over: `end` was called.
    """

    def __init__(self, executor: Wrapped, run: Run, is_first: bool) -> None:
        self.run = run
        self.is_over = False
        self._executor = weakref.ref(executor)
        self._is_first = is_first
        self._losses = Losses()
        self._hooks: list[StepHook] = []
        self._planned: Planned | None = None
        self._under_plan = 0  # steps
        self._card: CardPeaks | None = None
        self._host = HostPeak()
        self._began_ns = 0
        self._times_ns = [0, 0]  # of all steps, and how many
        self._offload_at = 0.0
        self._peak = 0.0
        self._has_forward = False  # in this step
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None  # under this plan

    @_harmless
    def begin(self) -> None:
        """Puts the hooks."""
        executor = self._executor()
        assert executor is not None
        if not self._is_first:
            return
        events.LISTENERS.append(self._told)
        FORWARD_OBSERVERS.append(self)
        self._hooks = [before_steps(self, Follower._before_step), after_steps(self, Follower._after_step)]
        self.run.at_close.append(self.report)
        self.run.document("config", config_document(executor.config))
        self.run.document("environment", environment(None))

    def end(self) -> None:
        """Takes them off, and leaves the report."""
        self.is_over = True
        self._host.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self in FORWARD_OBSERVERS:
            FORWARD_OBSERVERS.remove(self)
        if self._told in events.LISTENERS:
            events.LISTENERS.remove(self._told)
        if self.report in self.run.at_close:
            self.run.at_close.remove(self.report)
            self.report()

    @_harmless
    def report(self) -> None:
        """Records what is known at the end."""
        executor = self._executor()
        if executor is None or not self.run.is_open:
            return
        total, count = self._times_ns
        figures = [f"steps      {self.run.step + 1}"]
        if count:
            figures.append(f"step time  {total / count / 1e6:.1f} ms on average, measured")
        if self._peak:
            figures.append(f"peak       {format_bytes(int(self._peak))}, measured")
        self._record_plan_values(max(self.run.step, 0))
        self.run.document("report", report_document(executor, figures))

    # ---- what happens ----------------------------------------------------------------------------

    def _told(self, kind: str, text: str, **data: Any) -> None:
        """What `events` says."""
        self.run.event(kind, text, **data)

    @_harmless
    def starts(self, executor: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward with gradients is about to run."""
        if executor is not self._executor() or executor.idle:
            return
        if executor.planned is not self._planned:
            self._note_plan(executor)
        planned = self._planned
        if planned is None or self._under_plan != _PROFILED_STEP or planned.hardware.device_kind != "cpu":
            return
        self._host.begin(planned.plan.digest, executor.model, executor.optimizers, (args, kwargs))

    @_harmless
    def returned(self, executor: Wrapped, output: Any) -> None:
        """A forward with gradients has run."""
        if executor is not self._executor() or executor.idle:
            return
        self._has_forward = True
        if not self.run.has_loss:
            self._losses.add(output)
        if self._card is not None:
            self._card.end_phase("forward")

    @_harmless
    def _before_step(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        if self._card is not None and self._has_forward and self._is_mine(optimizer):
            self._card.end_phase("backward")  # else forward and backward are in the step's closure

    @_harmless
    def _after_step(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        executor = self._executor()
        if executor is None or not self._is_mine(optimizer):
            return
        now_ns = time.perf_counter_ns()
        self._has_forward = False
        self.run.step += 1
        step = self.run.step
        if self._began_ns and not self._host.is_running:  # the profiler's time is none of the step's
            took_ns = now_ns - self._began_ns
            self._times_ns = [self._times_ns[0] + took_ns, self._times_ns[1] + 1]
            self.run.values(step, {"time/step": took_ns}, "ns")
        self._losses.end_step(step)
        for at, loss in () if self.run.has_loss else self._losses.ready():
            self.run.values(at, {"loss": loss})
        self._record_memory(executor, step)
        self._under_plan += 1
        if self._under_plan == 1:
            self._record_plan_values(step)
        self._record_offload(executor, step)
        if self._card is not None:
            self._card.begin_step()
        self._began_ns = time.perf_counter_ns()

    def _is_mine(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this is the optimizer whose steps count: the first that steps the model."""
        executor = self._executor()
        if executor is None or executor.idle:
            return False
        if self._optimizer is not None and self._optimizer() is optimizer:
            return True
        first = next(iter(executor.optimizers), None)
        if first is None or inner_of(first) is not inner_of(optimizer):
            return False
        self._optimizer = weakref.ref(optimizer)
        return True

    # ---- values ----------------------------------------------------------------------------------

    def _note_plan(self, executor: Wrapped) -> None:
        """Another plan is in force."""
        planned = self._planned = executor.planned
        self._under_plan, self._optimizer = 0, None
        self._host.stop()
        self._card = None
        if planned is None:
            return
        device = device_of(executor.model)
        if device.type == "cuda":
            self._card = CardPeaks(device, planned.hardware.context_bytes)
        self.run.document("plan", plan_document(planned.plan))
        self.run.document("environment", environment(planned))

    def _record_plan_values(self, step: int) -> None:
        if self._planned is not None:
            values, step_ns = predicted_values(self._planned)
            self.run.values(step, values, "bytes")
            self.run.values(step, {"time/predicted": step_ns}, "ns")

    def _record_memory(self, executor: Wrapped, step: int) -> None:
        values: dict[str, float] = {}
        if self._card is not None:
            self._card.end_phase("optimizer")
            values = self._card.values()
        elif size := self._host.end():
            values = {"memory/peak": size, "memory/allocated_peak": size}
        if not values:
            return
        self._peak = max(self._peak, values["memory/peak"])
        if self._card is None or self._under_plan == _PROFILED_STEP:
            device = device_of(executor.model)
            values |= resident_values(executor.model, executor.optimizers, device, values["memory/peak"])
        self.run.values(step, values, "bytes")

    def _record_offload(self, executor: Wrapped, step: int) -> None:
        now = time.monotonic()
        if now - self._offload_at < _OFFLOAD_SECONDS:
            return
        self._offload_at = now
        found = executor.offload_figures(events=False)
        if found is None:
            return
        sizes: dict[str, float] = {
            "offload/out": sum(tier.out_bytes for tier in found.tiers),
            "offload/in": sum(tier.in_bytes for tier in found.tiers),
        }
        for tier in found.tiers:
            sizes[f"offload/held/{tier.tier}"] = tier.held_bytes
        self.run.values(step, sizes, "bytes")
        waits = {"offload/out_wait": found.out_wait_ns, "offload/in_wait": found.in_wait_ns}
        self.run.values(step, waits, "ns")
        counts: dict[str, float] = {
            "offload/prefetch/hit": found.prefetched_count,
            "offload/prefetch/late": found.late_count,
            "offload/prefetch/miss": found.missed_count,
            "offload/trouble/refused": found.refused_count,
            "offload/trouble/moved": found.moved_count,
            "offload/trouble/failed": found.failed_count,
            "offload/trouble/lost": found.lost_count,
        }
        self.run.values(step, counts)
