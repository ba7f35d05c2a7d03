# SPDX-License-Identifier: Apache-2.0
"""What memory a step takes, as the allocator counts it anyway.

On a card the allocator's own peaks are read, and never reset: they are the program's. A peak is the highest
so far, and that of a phase is known where it was a new one. On a CPU, which counts nothing, one step of each
plan runs under PyTorch's profiler (`observability/tensor_peak.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from memscale.observability.tensor_peak import TensorPeak
from memscale.survival.memory_now import memory_now
from memscale.torchkit.leaves import tensors_of

if TYPE_CHECKING:
    from memscale.core.planner import Planned
    from memscale.plans.plan import Prediction

__all__ = ["CardPeaks", "HostPeak", "predicted_values", "resident_values"]

_LOOK_SECONDS: Final = 0.2
_MOST_PROFILED: Final = 4
_MOST_FORWARDS: Final = 64
_KNOWN: Final = {"parameters": "parameter", "buffers": "buffer", "optimizer state": "optimizer_state"}


def predicted_values(planned: Planned) -> tuple[dict[str, float], int]:
    """What a plan predicts, in bytes by series, and the duration of its step in ns."""
    plan, hardware = planned.plan, planned.hardware
    predicted: Prediction = plan.predicted
    beside = predicted.device_used_peak_bytes - predicted.allocated_peak_bytes
    values: dict[str, float] = {
        "memory/predicted": predicted.device_used_peak_bytes,
        "memory/budget": plan.budget_bytes,
        "memory/limit": hardware.total_bytes,
    }
    for phase, size in predicted.timeline.phase_peaks().items():
        if phase != "recompute":
            values[f"memory/predicted/phase/{phase}"] = size + beside
    for category, size in predicted.by_category.items():
        values[f"memory/predicted/category/{category}"] = size
    return values, predicted.step_time_ns


def resident_values(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], device: torch.device, peak: float
) -> dict[str, float]:
    """Bytes that stay from step to step, by series, and what is left of a measured peak."""
    found = memory_now(model, optimizers, device).by_category
    values: dict[str, float] = {
        f"memory/category/{name}": found.get(words, 0) for words, name in _KNOWN.items()
    }
    values["memory/category/other"] = max(0.0, peak - sum(values.values()))
    return values


class CardPeaks:
    """The allocator's peaks of a card over the phases of steps.

    Args:
        device: the card.
        context_bytes: what the process takes outside of the allocator.
    """

    def __init__(self, device: torch.device, context_bytes: int) -> None:
        self._device, self._context = device, context_bytes
        self._phases: dict[str, int] = {}
        self._highest = 0
        self._looked = 0.0
        self._is_looking = True

    def begin_step(self) -> None:
        """A step begins. Not every one is looked at, where they are short."""
        now = time.monotonic()
        self._is_looking = now - self._looked >= _LOOK_SECONDS
        if self._is_looking:
            self._looked = now

    def end_phase(self, phase: str) -> None:
        """A phase is over. Its peak is known if it was the highest so far, or the first of its kind."""
        if not self._is_looking:
            return
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        reserved = int(stats["reserved_bytes"]["all"]["peak"])
        if reserved > self._highest or phase not in self._phases:
            self._phases[phase] = max(self._phases.get(phase, 0), reserved)
        self._highest = max(self._highest, reserved)

    def values(self) -> dict[str, float]:
        """Bytes by series; empty where this step was not looked at."""
        if not self._is_looking:
            return {}
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        values: dict[str, float] = {
            "memory/peak": int(stats["reserved_bytes"]["all"]["peak"]) + self._context,
            "memory/allocated_peak": int(stats["allocated_bytes"]["all"]["peak"]),
        }
        for phase, size in self._phases.items():
            values[f"memory/phase/{phase}"] = size + self._context
        return values


class HostPeak:
    """Most tensor bytes of one step on a CPU. The profiler costs that step time: few are measured in all."""

    def __init__(self) -> None:
        self._measured: set[str] = set()
        self._running: TensorPeak | None = None
        self._forwards = 0

    @property
    def is_running(self) -> bool:
        """Whether a step is being measured."""
        return self._running is not None

    def begin(
        self, digest: str, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], batch: Any
    ) -> None:
        """Measures the step that begins, unless one under this plan was, or somebody else profiles.

        It begins with a forward, so that a profiler of the program has begun before.
        """
        self._forwards += 1
        if self._running is not None and self._forwards > _MOST_FORWARDS:
            self.stop()  # the step has not come to its end
        if digest in self._measured or len(self._measured) >= _MOST_PROFILED:
            return
        if torch._C._autograd._profiler_enabled():
            return
        self._measured.add(digest)
        self._forwards = 0
        peak = TensorPeak([*_present(model, optimizers), *tensors_of(batch)])
        peak.__enter__()
        self._running = peak
        peak.mark()

    def end(self) -> int:
        """Its bytes; 0: no step was being measured."""
        running, self._running = self._running, None
        return 0 if running is None else running.end()[0]

    def stop(self) -> None:
        """Ends a measurement that nobody will ask for."""
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None, None, None)


def _present(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    found: list[Tensor] = [*model.parameters(), *model.buffers()]
    found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    entries: Any = [entry for optimizer in optimizers for entry in optimizer.state.values()]
    found += [tensor for entry in entries for tensor in tensors_of(entry)]
    return [tensor for tensor in found if tensor.device.type == "cpu"]
