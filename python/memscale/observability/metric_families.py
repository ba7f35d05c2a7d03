# SPDX-License-Identifier: Apache-2.0
"""The metrics, and the source of each value. A value that is not known is left out.

Names, units and labels are one table: a row is a family, and gives the samples of one model. What belongs to
a model has the label `model`; what PyTorch knows of a device only has `device`. Units are bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from memscale import _core
from memscale.offload.figures import OffloadFigures, TierFigures

if TYPE_CHECKING:
    from memscale.core.wrapped import Wrapped
    from memscale.plans.plan import Plan

__all__ = ["Reading", "families"]

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels beside `model`, and the value."""

Values = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class Reading:
    """One model at one moment.

    Attributes:
        planning_seconds: that planning took in the middle of training.
        plan: in force; None while the first batch is awaited.
        offload: None where nothing was offloaded yet.
        device: such as "cuda:0"; "" before there is a plan.
        memory: PyTorch's figures of that device; None where PyTorch keeps none.
    """

    planning_seconds: float
    plan: Plan | None
    offload: OffloadFigures | None
    device: str
    memory: Mapping[str, int] | None

    @classmethod
    def of(cls, executor: Wrapped) -> Reading:
        """Reads a model without waiting for it."""
        planned = executor.planned
        device = "" if planned is None else planned.hardware.device_kind
        if planned is not None and device == "cuda":
            device = f"cuda:{planned.hardware.device_index}"
        known = device.startswith("cuda") and torch.cuda.is_initialized()
        return cls(
            executor.planning_seconds,
            None if planned is None else planned.plan,
            executor.offload_figures(events=False),
            device,
            torch.cuda.memory_stats(device) if known else None,
        )


@dataclass(frozen=True)
class _Family:
    """A row of the table; `kind` is gauge or counter, whose name gets "_total" by the format."""

    kind: str
    name: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Reading], Samples]
    of_device: bool = False

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Of its samples."""
        return self.labels if self.of_device else ("model", *self.labels)

    def values(self, readings: Mapping[str, Reading]) -> Values:
        """The samples of all models by their labels; a device that several are on is there once."""
        return {
            labels if self.of_device else (name, *labels): value
            for name, reading in readings.items()
            for labels, value in self.samples(reading)
        }


def families(core: Any, readings: Mapping[str, Reading]) -> Iterator[Any]:
    """The families of some models, as a collector of the client library yields them.

    Args:
        core: the module `prometheus_client.core`.
        readings: of the models, by the value of their label.
    """
    kinds = {"gauge": core.GaugeMetricFamily, "counter": core.CounterMetricFamily}
    for row in _FAMILIES:
        values = row.values(readings)
        if values:
            family = kinds[row.kind](f"memscale_{row.name}", row.help, labels=row.all_labels)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family


# ---- where values come from ------------------------------------------------------------------------


def _of_plan(value: Callable[[Plan], float]) -> Callable[[Reading], Samples]:
    return lambda reading: [] if reading.plan is None else [((), value(reading.plan))]


def _plan_info(reading: Reading) -> Samples:
    return [] if reading.plan is None else [((reading.plan.digest, _core.version()), 1)]


def _categories(reading: Reading) -> Samples:
    found = {} if reading.plan is None else reading.plan.predicted.by_category
    return [((category,), size) for category, size in found.items()]


def _of_device(key: str) -> Callable[[Reading], Samples]:
    return lambda reading: (
        [((reading.device,), reading.memory[key])] if reading.memory and key in reading.memory else []
    )


def _fragmentation(reading: Reading) -> Samples:
    memory = reading.memory or {}
    reserved = memory.get("reserved_bytes.all.current", 0)
    live = memory.get("allocated_bytes.all.current", 0)
    return [((reading.device,), 1 - live / reserved)] if reserved else []


def _of_tiers(value: Callable[[TierFigures], float]) -> Callable[[Reading], Samples]:
    return lambda reading: (
        [] if reading.offload is None else [((tier.tier,), value(tier)) for tier in reading.offload.tiers]
    )


def _moved(reading: Reading) -> Samples:
    for tier in () if reading.offload is None else reading.offload.tiers:
        yield ("out", tier.tier), tier.out_bytes
        yield ("in", tier.tier), tier.in_bytes


def _of_offload(value: Callable[[OffloadFigures], Mapping[str, float]]) -> Callable[[Reading], Samples]:
    """Samples by the value of one label."""
    return lambda reading: (
        []
        if reading.offload is None
        else [((label,), number) for label, number in value(reading.offload).items()]
    )


_FAMILIES: Final = (
    _Family(
        "gauge", "plan_info", "The plan in force, by its digest, and the version that made it.",
        ("plan", "version"), _plan_info,
    ),
    _Family(
        "gauge", "memory_limit_bytes", "The budget.", (), _of_plan(lambda plan: plan.budget_bytes),
    ),
    _Family(
        "gauge", "predicted_peak_bytes", "Peak that the plan predicts.", (),
        _of_plan(lambda plan: plan.predicted.device_used_peak_bytes),
    ),
    _Family(
        "gauge", "predicted_peak_category_bytes", "What that peak is made of.", ("category",), _categories,
    ),
    _Family(
        "gauge", "predicted_step_seconds", "Duration of a step by the cost model.", (),
        _of_plan(lambda plan: plan.predicted.step_time_ns / 1e9),
    ),
    _Family(
        "counter", "planning_seconds", "Time that planning took in the middle of training.", (),
        lambda reading: [((), reading.planning_seconds)],
    ),
    _Family(
        "gauge", "memory_allocated_bytes", "Live tensors of the process on the device.", ("device",),
        _of_device("allocated_bytes.all.current"), of_device=True,
    ),
    _Family(
        "gauge", "memory_reserved_bytes", "What PyTorch's allocator holds for the process.", ("device",),
        _of_device("reserved_bytes.all.current"), of_device=True,
    ),
    _Family(
        "gauge", "fragmentation_ratio", "Share of the reserved bytes that no tensor is in.", ("device",),
        _fragmentation, of_device=True,
    ),
    _Family(
        "counter", "offload_bytes", "Bytes that left the device (out) and came back (in).",
        ("direction", "tier"), _moved,
    ),
    _Family(
        "counter", "offload_tensors", "Tensors that were sent to a tier.", ("tier",),
        _of_tiers(lambda tier: tier.put_count),
    ),
    _Family(
        "gauge", "offload_held_bytes", "Tensors in a tier.", ("tier",),
        _of_tiers(lambda tier: tier.held_bytes),
    ),
    _Family(
        "gauge", "offload_held_peak_bytes", "Most of them at one moment.", ("tier",),
        _of_tiers(lambda tier: tier.held_peak_bytes),
    ),
    _Family(
        "gauge", "offload_taken_bytes", "What a tier has taken from the machine.", ("tier",),
        _of_tiers(lambda tier: tier.taken_bytes),
    ),
    _Family(
        "gauge", "offload_limit_bytes", "Most that it may take.", ("tier",),
        _of_tiers(lambda tier: tier.limit_bytes),
    ),
    _Family(
        "counter", "offload_wait_seconds", "Time that the program waited for copies.", ("direction",),
        _of_offload(lambda found: {"out": found.out_wait_ns / 1e9, "in": found.in_wait_ns / 1e9}),
    ),
    _Family(
        "counter", "offload_prefetch",
        "Tensors that were back when they were needed (hit), on their way (late), not fetched ahead (miss).",
        ("result",),
        _of_offload(
            lambda found: {
                "hit": found.prefetched_count, "late": found.late_count, "miss": found.missed_count,
            }
        ),
    ),
    _Family(
        "counter", "offload_trouble",
        "Tensors that no tier had room for (refused), that went to memory because the file failed (moved), "
        "whose copy out failed (failed), that could not be read back (lost).",
        ("kind",),
        _of_offload(
            lambda found: {
                "refused": found.refused_count, "moved": found.moved_count,
                "failed": found.failed_count, "lost": found.lost_count,
            }
        ),
    ),
)  # fmt: skip
