# SPDX-License-Identifier: Apache-2.0
"""Makes a plan from a traced step and a budget: the C core decides, this module translates."""

from __future__ import annotations

import functools
from array import array
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memscale import _core
from memscale.core.advice import allocator_hint, least_bytes, unmet_advice
from memscale.core.prediction_build import NamedGraph, Predictor
from memscale.hardware.allocator_settings import EXPANDABLE, AllocatorSettings, allocator_settings
from memscale.offload.link import OffloadLink
from memscale.plans.budget import reserve_bytes
from memscale.plans.plan import Choice, Plan, Prediction
from memscale.plans.timeline import PHASES

if TYPE_CHECKING:
    from memscale.config.config import EffectiveConfig
    from memscale.hardware.detect import Budget, Hardware
    from memscale.trace.step import Trace

ChoiceRow = tuple[
    int, str, str, int, int, int, int, int, bool, tuple[int, ...], bool, int, int, int, tuple[int, ...], int
]
"""A choice as the core gives it; see `_core.Plan.choices`."""

__all__ = ["DecisionEngine", "OffloadLink", "reserve_bytes"]


@dataclass(frozen=True)
class DecisionEngine:
    """Decides for one machine and one configuration. The same trace gives the same plan, anywhere.

    Attributes:
        link: how tensors may leave the device; None: they stay.
    """

    config: EffectiveConfig
    hardware: Hardware
    budget: Budget
    settings: AllocatorSettings = field(default_factory=allocator_settings)
    link: OffloadLink | None = None

    @property
    def rates(self) -> dict[str, Any]:
        """The hardware's rates, as the core takes them."""
        return self.hardware.cost.for_core

    @property
    def sim(self) -> dict[str, Any]:
        """The allocator that the step will run on."""
        return self.settings.sim if self.hardware.device_kind == "cuda" else {"kind": "host"}

    def offload(self, trace: Trace) -> dict[str, int | None] | None:
        """The link, as the core takes it for a step; the engine's memory only if the graph lacks it."""
        if self.link is None:
            return None
        link: dict[str, Any] = asdict(self.link)
        del link["tiers"]
        if self.link.tiers:
            least = self.link.least_bytes
            sizes = {size for size, _, _, _, stays in trace.graph.buffers() if size >= least and not stays}
            link["limit_bytes"] = self.link.limit_for(sizes)
        if self.hardware.device_kind != "cpu" or trace.path.engine_bytes:
            link["staging_bytes"] = 0
        return link

    @property
    def predictor(self) -> Predictor:
        """Makes predictions for this machine and budget."""
        reserve = reserve_bytes(self.budget.bytes)
        return Predictor(self.hardware, self.budget, self.rates, self.sim, reserve)

    def decide(self, trace: Trace, plain_trace: Trace | None = None) -> Plan:
        """The fastest plan within the budget, or the smallest there is.

        Args:
            trace: the step to plan for.
            plain_trace: the step as it is without a plan, where that differs (with the key/value cache).
        """
        named = NamedGraph(trace)
        decided = self._decided(trace, self._allowed)
        smallest = decided.summary["smallest_peak_bytes"] + self.hardware.context_bytes
        predicted = self.predictor.predict(named, decided, decided.summary["step_ns"])
        predicted = replace(predicted, smallest_peak_bytes=smallest)
        unplanned = plain_trace or trace
        unplanned = unplanned.larger or unplanned
        plain = self._plain(named if unplanned is trace else NamedGraph(unplanned))
        return Plan(
            choices=tuple(_choice(named, item) for item in decided.choices),
            fits=predicted.fits,
            budget_bytes=self.budget.bytes,
            budget_source=self.budget.source,
            predicted=predicted,
            plain=replace(plain, smallest_peak_bytes=smallest),
            smallest_peak_bytes=smallest,
            time_bound_ppm=decided.summary["time_bound_ppm"],
            away_peak_bytes=decided.summary["away_peak_bytes"],
            window_out_bytes=decided.summary["window_out_bytes"],
            window_in_bytes=decided.summary["window_in_bytes"],
            staging_bytes=decided.summary["staging_bytes"],
            path_staging_bytes=trace.path.engine_bytes + trace.path.state_engine_bytes,
            walk=functools.partial(self._frontier, trace),
            digest=decided.digest,
            profile=trace.method,
            mode=self.config.mode.value,
            advice=self._advice(named, decided, predicted),
            notes=tuple(filter(None, (*trace.notes, self.settings.note, self.hardware.cost.note))),
        )

    def _advice(self, named: NamedGraph, decided: _core.Plan, predicted: Prediction) -> tuple[str, ...]:
        trace = named.trace
        checkpointing = self.config.enable_checkpointing or not trace.gradients
        switches = trace.optimizer_switches
        lines: tuple[str, ...] = ()
        if not predicted.fits:
            step = PHASES.index("optimizer")
            begins = next((op for op, phase in enumerate(named.phases) if phase == step), len(named.phases))
            least = least_bytes(trace.graph.buffers(), begins)
            lines = unmet_advice(predicted, checkpointing, switches, least)
        if self.hardware.device_kind != "cuda" or self.settings.is_expandable or not _checkpoints(decided):
            return lines
        conf = ",".join(filter(None, (self.settings.conf, EXPANDABLE)))
        other = _core.replay(trace.graph, decided, sim={"kind": "cuda", "alloc_conf": conf})["peak_bytes"]
        hint = allocator_hint(predicted, other + self.hardware.context_bytes)
        return (*lines, hint) if hint else lines

    def _plain(self, named: NamedGraph) -> Prediction:
        times: array[int] = array("q")
        times.frombytes(_core.op_times_ns(named.trace.graph, self.rates))
        return self.predictor.predict(named, None, sum(times))

    @property
    def _allowed(self) -> int:
        """Bytes that the allocator may reserve."""
        used = self.hardware.context_bytes + reserve_bytes(self.budget.bytes)
        return max(self.budget.bytes - used, 1)

    def _decided(self, trace: Trace, allowed: int, force: bool | None = None) -> _core.Plan:
        return _core.decide(
            trace.graph,
            allowed,
            sim=self.sim,
            rates=self.rates,
            allow_checkpoint=self.config.enable_checkpointing,
            force=self.config.force_optimize if force is None else force,
            offload=self.offload(trace),
            rerun_bytes=trace.rerun_bytes,
        )

    def plain_used_bytes(self, trace: Trace) -> int:
        """Device-used peak of a step without any technique."""
        return self.predictor.peaks(trace.larger or trace, None)[1] + self.hardware.context_bytes

    def worse(self, all_outputs: Trace, one: Trace) -> Trace:
        """Which of two uses of the outputs to plan for.

        The graphs of outputs that no loss goes through stay, and no plan makes up for that. A loss through
        all of them is worse if it takes more in every plan, or if it alone needs one.

        Args:
            all_outputs: the loss goes through all.
            one: through one alone.
        """
        plain, other = (self.predictor.peaks(trace, None)[1] for trace in (all_outputs, one))
        if other <= self._allowed < plain:
            return all_outputs
        if plain < other or self.smallest_used_bytes(all_outputs) < self.smallest_used_bytes(one):
            return one
        return all_outputs

    def smallest_used_bytes(self, trace: Trace) -> int:
        """Device-used peak of a step under the smallest plan that the configuration allows."""
        smallest = self._decided(trace, allowed=1, force=False)
        return self.predictor.peaks(trace, smallest)[1] + self.hardware.context_bytes

    def _frontier(self, trace: Trace) -> tuple[tuple[int, int], ...]:
        allow_checkpoint = self.config.enable_checkpointing
        if not allow_checkpoint and self.link is None:
            return ()
        points = _core.frontier(
            trace.graph,
            sim=self.sim,
            rates=self.rates,
            allow_checkpoint=allow_checkpoint,
            offload=self.offload(trace),
            rerun_bytes=trace.rerun_bytes,
        )
        return tuple((peak + self.hardware.context_bytes, ns) for peak, ns in points)


def _choice(named: NamedGraph, item: ChoiceRow) -> Choice:
    """A choice of the core in words."""
    module, action, rule, calls, saved, cost, other_peak, other_ns, joined, kept = item[:10]
    boundary, moved_bytes, moved_count, transfer_ns, moved, ahead_bytes = item[10:]
    path, kind = named.trace.modules[module]
    return Choice(
        module=path,
        type=kind,
        techniques=() if action == "keep" else (action,),
        rule=rule,
        reason=_core.rule_text(rule),
        calls=calls,
        bytes=saved,
        ns=cost,
        kept=named.kept_ops.names(module, kept),
        joined=joined,
        other_peak_bytes=other_peak,
        other_ns=other_ns,
        boundary=boundary,
        moved=moved,
        moved_bytes=moved_bytes,
        moved_count=moved_count,
        transfer_ns=transfer_ns,
        ahead_bytes=ahead_bytes,
    )


def _checkpoints(plan: _core.Plan) -> bool:
    return any(choice[1] != "keep" for choice in plan.choices)
