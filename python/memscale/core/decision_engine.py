# SPDX-License-Identifier: Apache-2.0
"""From a traced step and a budget to a plan: hands numbers to the C core, and its answer back in words."""

from __future__ import annotations

import functools
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memscale import _core
from memscale.core.advice import allocator_hint, reserve_bytes, unmet_advice
from memscale.core.allocator_settings import EXPANDABLE, AllocatorSettings, allocator_settings
from memscale.core.plan import Choice, Plan, Prediction
from memscale.core.prediction_build import NamedGraph, Predictor

if TYPE_CHECKING:
    from memscale.core.config import EffectiveConfig
    from memscale.core.hardware import Budget, Hardware
    from memscale.core.tracer import Trace

__all__ = ["DecisionEngine", "reserve_bytes"]


@dataclass(frozen=True)
class DecisionEngine:
    """Decides for one machine and one configuration. The same trace gives the same plan, anywhere."""

    config: EffectiveConfig
    hardware: Hardware
    budget: Budget
    settings: AllocatorSettings = field(default_factory=allocator_settings)

    @property
    def rates(self) -> dict[str, int]:
        """The hardware's rates, as the core takes them."""
        hw = self.hardware
        return {
            "flops_per_us": hw.flops_per_us,
            "moved_bytes_per_us": hw.moved_bytes_per_us,
            "launch_ns": hw.launch_ns,
            "recompute_ns": hw.recompute_ns,
        }

    @property
    def sim(self) -> dict[str, Any]:
        """The allocator that the step will run on."""
        return self.settings.sim if self.hardware.device_kind == "cuda" else {"kind": "host"}

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
        plain = self._plain(named if plain_trace is None else NamedGraph(plain_trace))
        return Plan(
            choices=tuple(self._choice(trace, item) for item in decided.choices),
            fits=predicted.fits,
            budget_bytes=self.budget.bytes,
            budget_source=self.budget.source,
            predicted=predicted,
            plain=replace(plain, smallest_peak_bytes=smallest),
            smallest_peak_bytes=smallest,
            time_bound_ppm=decided.summary["time_bound_ppm"],
            walk=functools.partial(self._frontier, trace.graph),
            digest=decided.digest,
            profile=trace.method,
            advice=self._advice(trace, decided, predicted),
            notes=(*trace.notes, self.settings.note) if self.settings.note else tuple(trace.notes),
        )

    def _advice(self, trace: Trace, decided: _core.Plan, predicted: Prediction) -> tuple[str, ...]:
        lines = () if predicted.fits else unmet_advice(predicted, self.config.enable_checkpointing)
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
        )

    def plain_used_bytes(self, trace: Trace) -> int:
        """Device-used peak of a step without any technique."""
        return self.predictor.peaks(trace, None)[1] + self.hardware.context_bytes

    def smallest_used_bytes(self, trace: Trace) -> int:
        """Device-used peak of a step under the smallest plan that the configuration allows."""
        smallest = self._decided(trace, allowed=1, force=False)
        return self.predictor.peaks(trace, smallest)[1] + self.hardware.context_bytes

    def _frontier(self, graph: _core.Graph) -> tuple[tuple[int, int], ...]:
        if not self.config.enable_checkpointing:
            return ()
        points = _core.frontier(graph, sim=self.sim, rates=self.rates)
        return tuple((peak + self.hardware.context_bytes, ns) for peak, ns in points)

    @staticmethod
    def _choice(trace: Trace, item: tuple[int, str, str, int, int, int]) -> Choice:
        module, action, rule, calls, saved, cost = item
        path, kind = trace.modules[module]
        techniques = () if action == "keep" else (action,)
        return Choice(path, kind, techniques, rule, _core.rule_text(rule), calls, saved, cost)


def _checkpoints(plan: _core.Plan) -> bool:
    return any(action == "checkpoint" for _, action, *_ in plan.choices)
