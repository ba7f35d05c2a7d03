# SPDX-License-Identifier: Apache-2.0
"""From a traced step and a budget to a plan: hands numbers to the C core, and its answer back in words."""

from __future__ import annotations

import functools
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memscale import _core
from memscale.core.plan import Choice, Plan, Prediction, timeline_of
from memscale.core.units import format_bytes

if TYPE_CHECKING:
    from memscale.core.config import EffectiveConfig
    from memscale.core.hardware import Budget, Hardware
    from memscale.core.tracer import Trace

_RESERVE_PPM = 5_000
_RESERVE_FLOOR_BYTES = 256 * 1024


def reserve_bytes(budget: int) -> int:
    """Part of a budget that a plan leaves free for what a trace cannot see.

    0.5 %, and at least 256 KiB: the largest under-estimate seen over the models of the test suite was 0.36 %
    (`bench/python/truth.py` measures it anew).
    """
    return max(_RESERVE_FLOOR_BYTES, budget * _RESERVE_PPM // 1_000_000)


@dataclass(frozen=True)
class DecisionEngine:
    """Decides for one machine and one configuration. The same trace gives the same plan, anywhere."""

    config: EffectiveConfig
    hardware: Hardware
    budget: Budget

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
        return {"kind": "cuda" if self.hardware.device_kind == "cuda" else "host"}

    def decide(self, trace: Trace) -> Plan:
        """The fastest plan within the budget, or the smallest there is."""
        context = self.hardware.context_bytes
        allowed = max(self.budget.bytes - context - reserve_bytes(self.budget.bytes), 1)
        decided = _core.decide(
            trace.graph,
            allowed,
            sim=self.sim,
            rates=self.rates,
            allow_checkpoint=self.config.enable_checkpointing,
            force=self.config.force_optimize,
        )
        summary = decided.summary
        plain = self._predict(trace, None, summary["plain_step_ns"])
        predicted = self._predict(trace, decided, summary["step_ns"])
        return Plan(
            choices=tuple(self._choice(trace, item) for item in decided.choices),
            fits=summary["fits"],
            budget_bytes=self.budget.bytes,
            budget_source=self.budget.source,
            predicted=predicted,
            plain=plain,
            smallest_peak_bytes=summary["smallest_peak_bytes"] + context,
            time_bound_ppm=summary["time_bound_ppm"],
            walk=functools.partial(self._frontier, trace.graph),
            digest=decided.digest,
            profile=trace.method,
            advice=() if summary["fits"] else tuple(self._advice(summary, predicted)),
            notes=tuple(trace.notes),
        )

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

    def _predict(self, trace: Trace, plan: _core.Plan | None, step_ns: int) -> Prediction:
        replay = _core.replay(trace.graph, plan, sim=self.sim)
        times: array[int] = array("q")
        times.frombytes(_core.op_times_ns(trace.graph, self.rates))
        phases = [op[2] for op in trace.graph.ops()]
        peak, context = replay["peak_bytes"], self.hardware.context_bytes
        reserve = reserve_bytes(self.budget.bytes)
        used = peak + context
        return Prediction(
            allocated_peak_bytes=replay["stats"]["allocated_peak_bytes"],
            reserved_peak_bytes=peak,
            device_used_peak_bytes=used,
            context_bytes=context,
            by_category={name: size for name, size in replay["category_peak_bytes"].items() if size},
            timeline=timeline_of(replay, phases, times, self.hardware.recompute_ns),
            step_time_ns=step_ns,
            error_band_bytes=(max(used - 4 * reserve - trace.output_bytes, 0), used + reserve),
            fits=used + reserve <= self.budget.bytes,
            budget_bytes=self.budget.bytes,
        )

    def _advice(self, summary: Any, predicted: Prediction) -> list[str]:
        """What would help when no plan fits, by what fills the memory at the smallest plan's peak."""
        needed = summary["smallest_peak_bytes"] + self.hardware.context_bytes
        needed += reserve_bytes(needed)
        lines = [f"raise the budget to {format_bytes(needed)} ({needed} bytes)"]
        fixed = sum(
            predicted.by_category.get(name, 0)
            for name in ("parameter", "gradient", "optimizer_state", "buffer")
        )
        left = self.budget.bytes - reserve_bytes(self.budget.bytes) - self.hardware.context_bytes - fixed
        varying = predicted.reserved_peak_bytes - fixed
        if left > 0 and varying > 0:
            lines.append(f"or a batch (or sequence) of about {100 * left // varying} % of this one")
        else:
            lines.append(
                "a smaller batch would not do: weights, gradients and optimizer state alone take "
                f"{format_bytes(fixed)}; an optimizer with less state, or fewer trainable weights, would"
            )
        if not self.config.enable_checkpointing:
            lines.append("allow checkpointing (enable_checkpointing=True)")
        return lines
