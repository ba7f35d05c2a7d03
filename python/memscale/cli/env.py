# SPDX-License-Identifier: Apache-2.0
"""`memscale env`: versions, device and settings, for a report of a problem. Measures and touches nothing."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from memscale import __version__, _core
from memscale.cli.arguments import Options
from memscale.cli.problems import FITS, one_line
from memscale.cli.text import safe
from memscale.core import calibration
from memscale.errors import MemScaleError
from memscale.hardware import host as hardware_host
from memscale.hardware.measured_rates import is_on
from memscale.hardware.present_gpu import present_gpu
from memscale.units import format_bytes

__all__ = ["ENV_VERSION", "document", "run"]

ENV_VERSION: Final = 1

_PACKAGES: Final = {
    "transformers": "models by name, Trainer, benchmarks",
    "accelerate": "Trainer",
    "peft": "LoRA and other adapters",
    "bitsandbytes": "8-bit optimizer state, where our own cannot be",
    "torchao": "8-bit optimizer state, where our own cannot be",
    "Jinja2": "reports",
    "prometheus-client": "metrics",
    "matplotlib": "pictures of benchmarks",
}
"""Packages that MemScale works with, and for what."""

_VARIABLES: Final = (
    "MEMSCALE_ASYNC_OFFLOAD", "MEMSCALE_CALIBRATION", "MEMSCALE_NVRTC", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG",
    "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "XDG_CACHE_HOME",
)  # fmt: skip
"""What of the environment changes plans, predictions or where files lie."""


def run(options: Options) -> int:
    """Prints the description."""
    found = document()
    print(json.dumps(found, indent=2) if options.as_json else safe(_text(found)))
    return FITS


def document() -> dict[str, Any]:
    """Everything that is shown, as plain data; sizes in bytes, None for what is not there."""
    return {
        "format": "memscale-env",
        "version": ENV_VERSION,
        "memscale": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": _torch(),
        "host": _host(),
        "card": _card(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "rates": _rates(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _torch() -> dict[str, Any] | None:
    try:
        import torch
    except ImportError:
        return None
    return {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}


def _host() -> dict[str, Any]:
    memory = hardware_host.host_memory()
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "processor": hardware_host.processor_name() or None,
        "cores": os.cpu_count() if affinity is None else len(affinity(0)),
        "total_bytes": memory.total_bytes,
        "available_bytes": memory.available_bytes,
        "pinned_limit_bytes": hardware_host.pinned_limit_bytes(),
        "optimizer_steps": _core.Optim().isa,
    }


def _card() -> dict[str, Any]:
    """The first card, asked through the driver without a context; else why there is none."""
    try:
        found = present_gpu()
    except MemScaleError as error:
        return {"name": None, "reason": one_line(error)}
    capability = ".".join(map(str, found.capability))
    return {"name": found.name, "total_bytes": found.total_bytes, "capability": capability}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _rates() -> dict[str, Any]:
    """Whether the cost model's rates are measured, and where they are kept. Nothing is measured for this."""
    try:
        source = "measured" if is_on() else "table"
    except MemScaleError as error:
        source = one_line(error)
    path, home = calibration.cache_file(), Path.home()
    shown = Path("~") / path.relative_to(home) if path.is_relative_to(home) else path  # no user's name
    return {"source": source, "file": str(shown), "file_exists": path.is_file()}


# ---- text ------------------------------------------------------------------------------------------


def _text(found: dict[str, Any]) -> str:
    rows = [
        ("memscale", found["memscale"]),
        ("python", f"{found['python']} on {found['system']}"),
        ("torch", _torch_text(found["torch"])),
        ("host", _host_text(found["host"])),
        ("card", _card_text(found["card"])),
        ("rates", _rates_text(found["rates"])),
    ]
    rows += [(name, version or f"not installed ({_PACKAGES[name]})")
             for name, version in found["packages"].items()]  # fmt: skip
    rows += [(name, repr(value)) for name, value in found["environment"].items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _torch_text(torch: dict[str, Any] | None) -> str:
    if torch is None:
        return "not installed"
    build = "CPU build" if torch["cuda"] is None else f"CUDA {torch['cuda']}"
    return f"{torch['version']}, {build}, {torch['threads']} threads"


def _host_text(host: dict[str, Any]) -> str:
    limit = host["pinned_limit_bytes"]
    parts = [
        host["processor"] or "unknown processor",
        f"{host['cores']} cores",
        f"{format_bytes(host['available_bytes'])} of {format_bytes(host['total_bytes'])} available",
        "pinned memory without limit" if limit is None else f"pinned up to {format_bytes(limit)}",
        f"optimizer steps in {host['optimizer_steps']}",
    ]
    return ", ".join(parts)


def _card_text(card: dict[str, Any]) -> str:
    if card["name"] is None:
        return f"none: {card['reason']}"
    return f"{card['name']}, {format_bytes(card['total_bytes'])}, compute capability {card['capability']}"


def _rates_text(rates: dict[str, Any]) -> str:
    if rates["source"] == "table":
        return "table (MEMSCALE_CALIBRATION)"
    if rates["source"] != "measured":
        return str(rates["source"])
    return f"measured, kept in {rates['file']}" + ("" if rates["file_exists"] else ", not measured yet")
