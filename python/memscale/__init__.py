# SPDX-License-Identifier: Apache-2.0
"""MemScale: PyTorch training that fits the memory there is.

    import memscale
    memscale.wrap(model, memscale.Config(memory_budget="8GiB"))

The training loop stays as it is; loss and gradients keep every bit. See `memscale.wrap`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "AsyncOffloadConfig",
    "Config",
    "OptimizationMode",
    "Plan",
    "Prediction",
    "Savings",
    "__version__",
    "apply_all_optimizations",
    "autosave",
    "autotuning",
    "detach",
    "errors",
    "estimate_savings",
    "executor_of",
    "optimize",
    "plan",
    "predict",
    "record",
    "save",
    "verify",
    "wrap",
]

if TYPE_CHECKING:
    from memscale import autotuning, errors
    from memscale.api import (
        apply_all_optimizations,
        detach,
        estimate_savings,
        optimize,
        plan,
        predict,
        verify,
        wrap,
    )
    from memscale.config.config import AsyncOffloadConfig, Config, OptimizationMode
    from memscale.core.wrapping import executor_of
    from memscale.plans.plan import Plan, Prediction
    from memscale.plans.savings import Savings
    from memscale.recording.current import record
    from memscale.saving import autosave, save

# Where each public name lives. Loaded at first use, so that `import memscale` costs next to nothing.
_HOME = {
    "AsyncOffloadConfig": "memscale.config.config",
    "Config": "memscale.config.config",
    "OptimizationMode": "memscale.config.config",
    "Plan": "memscale.plans.plan",
    "Prediction": "memscale.plans.plan",
    "Savings": "memscale.plans.savings",
    "apply_all_optimizations": "memscale.api",
    "autosave": "memscale.saving",
    "detach": "memscale.api",
    "estimate_savings": "memscale.api",
    "executor_of": "memscale.core.wrapping",
    "optimize": "memscale.api",
    "plan": "memscale.api",
    "predict": "memscale.api",
    "record": "memscale.recording.current",
    "save": "memscale.saving",
    "verify": "memscale.api",
    "wrap": "memscale.api",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return _imported("memscale.errors")
    home = "memscale.autotuning" if name == "autotuning" else _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'memscale' has no attribute {name!r}")
    try:
        module = _imported(home)
        value = module if name == "autotuning" else getattr(module, name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        words = f"memscale.{name} needs PyTorch, which is not installed: pip install torch"
        raise ModuleNotFoundError(words, name="torch") from error
    globals()[name] = value
    return value


def _imported(module: str) -> Any:
    """A module. What it makes stays, so looking for garbage meanwhile, in all of PyTorch, is in vain."""
    import gc
    import importlib

    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted(__all__)
