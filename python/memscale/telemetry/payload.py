# SPDX-License-Identifier: Apache-2.0
"""What telemetry says: a closed table of keys and values, and the payload of one plan.

Every value passes `FIELDS` on its way out. One that is not in the table is "other", or left out of a list.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from memscale import _core
from memscale.hardware import host
from memscale.optim.eight_bit import is_8bit
from memscale.plans.data import PlanData
from memscale.telemetry.families import FAMILIES, OTHER, family_of

if TYPE_CHECKING:
    from memscale.core.wrapped import Wrapped

__all__ = ["EVENT", "FIELDS", "Field", "Said", "payload", "payload_of"]

EVENT: Final = "plan"
"""The kind of a payload. This version has one."""


@dataclass(frozen=True)
class Field:
    """A row of the table.

    Attributes:
        name: the key.
        what: what it says, for people.
        values: all that there are.
        pattern: the form of further values, for versions; "": there are none.
        is_list: the value is a list of these, sorted, each once.
    """

    name: str
    what: str
    values: tuple[str | int, ...]
    pattern: str = ""
    is_list: bool = False

    def admitted(self, value: Any) -> Any:
        """A value as it may leave."""
        if self.is_list:
            return sorted({item for item in value if item in self.values})
        if any(value == item and type(value) is type(item) for item in self.values):
            return value
        has_form = self.pattern and isinstance(value, str) and re.fullmatch(self.pattern, value, re.ASCII)
        return value if has_form else OTHER


_MINOR: Final = r"[0-9]{1,2}\.[0-9]{1,2}"
_SIZES: Final = (("<1M", 10**6), ("1M-10M", 10**7), ("10M-100M", 10**8), ("100M-1B", 10**9),
                 ("1B-10B", 10**10), ("10B-100B", 10**11))  # fmt: skip
_LARGEST: Final = "100B+"
_SYSTEMS: Final = {"linux": "linux", "darwin": "macos", "win32": "windows"}
_TECHNIQUES: Final = (
    "attention_tile", "autocast", "bf16_weights", "boundary_offload", "checkpoint", "eight_bit_state",
    "gradient_offload", "loss_tile", "mlp_tile", "offload", "selective", "state_offload",
    "step_in_backward", "weight_offload",
)  # fmt: skip

FIELDS: Final = (
    Field("schema", "version of this table", (2,)),
    Field("event", "what has happened: a plan is attached", (EVENT,)),
    Field("architecture", "family of the model, if it is a public package's", FAMILIES),
    Field("parameters", "how many the model has", (*(name for name, _ in _SIZES), _LARGEST)),
    Field("techniques", "what the plan uses", _TECHNIQUES, is_list=True),
    Field("device", "what it trains on", ("cpu", "cuda", OTHER)),
    Field("fits", "whether the plan is within the budget", (False, True)),
    Field("os", "operating system", ("linux", "wsl", "macos", "windows", OTHER)),
    Field("python", "its version, without the last number", (OTHER,), _MINOR),
    Field("torch", "PyTorch's, likewise", (OTHER,), _MINOR),
    Field("memscale", "MemScale's release", (OTHER,), rf"{_MINOR}\.[0-9]{{1,2}}"),
)
"""All that a payload may have, in its order."""


@dataclass(frozen=True)
class Said:
    """What a payload says of a model and its plan; the defaults are those of a small one that needs none."""

    architecture: str = OTHER
    parameters: int = 0
    techniques: tuple[str, ...] = ()
    device: str = "cpu"
    fits: bool = True


def payload(said: Said) -> bytes:
    """The bytes of a payload."""
    found = {
        "schema": 2,
        "event": EVENT,
        "architecture": said.architecture,
        "parameters": next((name for name, limit in _SIZES if said.parameters < limit), _LARGEST),
        "techniques": said.techniques,
        "device": said.device,
        "fits": said.fits,
        "os": "wsl" if host.is_wsl() else _SYSTEMS.get(sys.platform, OTHER),
        "python": _start(_MINOR, platform.python_version()),
        "torch": _start(_MINOR, torch.__version__),
        "memscale": _start(rf"{_MINOR}\.[0-9]{{1,2}}", _core.version()),
    }
    values = {field.name: field.admitted(found[field.name]) for field in FIELDS}
    return json.dumps(values, separators=(",", ":")).encode("ascii")


def payload_of(executor: Wrapped) -> bytes:
    """The payload of a wrapped model, as it is sent.

    Args:
        executor: what `memscale.executor_of` returns, with a plan.

    Raises:
        ValueError: it has no plan yet.

    Example:
        >>> print(payload_of(memscale.executor_of(model)).decode())
    """
    if executor.planned is None:
        raise ValueError("there is no plan yet")
    plan, model = executor.planned.plan, executor.model
    return payload(said_of(model, plan, executor.planned.hardware.device_kind, executor.optimizers))


def said_of(
    model: nn.Module, plan: PlanData, device: str, optimizers: Iterable[torch.optim.Optimizer]
) -> Said:
    """What a payload says of a model under a plan.

    Args:
        model: the module.
        plan: for it.
        device: kind of the device.
        optimizers: that train it.
    """
    names = {name for choice in plan.active for name in choice.techniques}
    names |= {step.technique for step in plan.steps}
    if any(choice.boundary for choice in plan.choices):
        names.add("boundary_offload")
    if any(map(is_8bit, optimizers)):
        names.add("eight_bit_state")
    count = sum(parameter.numel() for parameter in model.parameters())
    return Said(family_of(model), count, tuple(names), device, plan.fits)


def _start(pattern: str, version: str) -> str:
    found = re.match(pattern, version, re.ASCII)
    return found[0] if found else OTHER
