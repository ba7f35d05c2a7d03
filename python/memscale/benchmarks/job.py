# SPDX-License-Identifier: Apache-2.0
"""One measurement: what is trained, and how. It is passed to the measuring process as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memscale.benchmarks.registry import Shape

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """A measurement.

    Attributes:
        suite: part of the benchmarks that it belongs to, such as "registry" or "peers".
        model: name in the registry, or of a point of the sweep.
        scale: of the shape.
        shape: what is trained.
        way: how, a name out of `ways` or `peers`.
        precision: "fp32", or "bf16-amp": the loop's forward is under autocast.
        budget_bytes: of tensors, for MemScale; None where there is none, 0 for the smallest plan.
        device: "cpu" or "cuda".
        steps: training steps in all.
        warm_up: of these, the first that count neither for time nor for the peak.
        directory: where files may go that stand for host memory or a disk.
        deadline_s: most seconds that it may take.
    """

    suite: str
    model: str
    scale: str
    shape: Shape
    way: str
    precision: str
    budget_bytes: int | None = None
    device: str = "cpu"
    steps: int = 20
    warm_up: int = 3
    directory: str = ""
    deadline_s: float = 900.0

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from others: a row with the same key is its result."""
        shape = self.shape
        values = (
            self.model, self.scale, shape.batch, shape.length, self.precision, self.way, self.device,
            self.steps, self.budget_bytes,
        )  # fmt: skip
        return tuple(map(str, values))

    @property
    def label(self) -> str:
        """In a few words."""
        return f"{self.model} {self.shape.batch}×{self.shape.length}, {self.way}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Job:
        """Reads what `to_dict` wrote."""
        return cls(**{**data, "shape": Shape(**data["shape"])})
