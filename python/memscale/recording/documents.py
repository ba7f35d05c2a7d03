# SPDX-License-Identifier: Apache-2.0
"""The documents of a run as plain data: its plan, configuration, environment and report.

They name the script, the machine and versions. No paths, no variables of the environment, no user.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, is_dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from memscale import _core
from memscale.plans.timeline import PHASES
from memscale.recording.places import script_name

if TYPE_CHECKING:
    from memscale.config.config import Config
    from memscale.core.planner import Planned
    from memscale.core.wrapped import Wrapped
    from memscale.plans.plan import Plan

__all__ = ["config_document", "environment", "plan_document", "report_document"]

_MOST_ENTRIES: Final = 1024
_MOST_CHOICES: Final = 2000
_PLACES: Final = ("log_file", "oom_snapshot", "record", "directory")
"""Fields of a configuration that name a place of this machine or network."""


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan, its timelines shortened so that the peak of each phase stays. Its frontier is not walked."""
    data = replace(plan, walk=lambda: ()).to_dict()
    for name in ("predicted", "plain"):
        data[name]["timeline"] = _short(data[name]["timeline"])
    data["choices"] = data["choices"][:_MOST_CHOICES]
    return data


def _short(timeline: dict[str, Any]) -> dict[str, Any]:
    """A timeline of few entries: of each stretch within a phase the one with most bytes."""
    live, phase = timeline["live_bytes"], timeline["phase"]
    stride = max(1, -(-len(live) // (_MOST_ENTRIES - 4 * len(PHASES))))
    kept: list[int] = []
    begin = 0
    while begin < len(live):
        end = begin + 1
        while end < min(begin + stride, len(live)) and phase[end] == phase[begin]:
            end += 1
        kept.append(max(range(begin, end), key=live.__getitem__))
        begin = end
    return {name: [values[index] for index in kept[:_MOST_ENTRIES]] for name, values in timeline.items()}


def config_document(config: Config) -> dict[str, Any]:
    """The fields of a configuration. Of one that names a place only whether it is set."""
    return {name: _of_field(name, getattr(config, name)) for name in config.CHECKS}


def _of_field(name: str, value: Any) -> Any:
    if name in _PLACES:
        return None if value is None else "(set)"
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {field: _of_field(field, item) for field, item in asdict(value).items()}
    return list(value) if isinstance(value, tuple) else value


def environment(planned: Planned | None) -> dict[str, Any]:
    """The machine, and what runs on it."""
    import torch

    found: dict[str, Any] = {
        "script": script_name(),
        "memscale": _core.version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "host": platform.node(),
        "os": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "world_size": _world_size(),
    }
    for package in ("transformers", "accelerate", "lightning", "pytorch_lightning", "peft"):
        version = getattr(sys.modules.get(package), "__version__", None)
        if isinstance(version, str):
            found[package] = version
    if planned is not None:
        found |= {
            "device": planned.hardware.name,
            "device_kind": planned.hardware.device_kind,
            "device_bytes": planned.hardware.total_bytes,
            "host_bytes": planned.hardware.host_total_bytes,
        }
    return found


def _world_size() -> int:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return 1


def report_document(executor: Wrapped, figures: list[str]) -> dict[str, Any]:
    """What can be said of plan and run, in lines.

    Args:
        executor: of the model.
        figures: lines about the steps that were made.
    """
    lines: list[str] = []
    plan = executor.plan
    if plan is not None:
        lines += plan.explain().splitlines()
    lines += ["", *figures] if figures else []
    offload = executor.offload_figures(events=False)
    if offload is not None:
        lines += ["", *offload.explain().splitlines()]
    return {"lines": [line[:400] for line in lines[:400]]}
