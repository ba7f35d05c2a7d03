# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters, added by peft itself: from `--lora`, or from the folder of an adapter."""

from __future__ import annotations

import importlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from memscale.cli.problems import UsageError, one_line

__all__ = ["ADAPTER_FILE", "ALL_LINEAR", "Adapter", "read_adapter"]

ADAPTER_FILE: Final = "adapter_config.json"
ALL_LINEAR: Final = "all-linear"
_HEADS: Final = ("classifier", "score", "qa_outputs")
"""New heads, which peft trains whole beside the adapters."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter to train.

    Attributes:
        rank: of the matrices.
        targets: names of layers; "all-linear" is every linear layer but the head.
        folder: of the adapter whose settings these are; "" for those of the command line.
    """

    rank: int
    targets: tuple[str, ...] = (ALL_LINEAR,)
    folder: str = ""

    @property
    def option(self) -> str:
        """What asked for it, for messages."""
        return repr(self.folder) if self.folder else f"--lora {self.rank}"

    def attach(self, model: nn.Module) -> None:
        """Freezes a model, and puts the adapter into it.

        Raises:
            UsageError: peft is missing, or cannot do it.
        """
        peft = _peft()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of peft about transformers, which are not the user's
                peft.get_peft_model(model, self._config(peft, model))
        except Exception as error:
            raise UsageError(
                f"{self.option}: peft cannot put it in: {one_line(error)}{self._hint()}"
            ) from error

    def _config(self, peft: Any, model: nn.Module) -> Any:
        if self.folder:
            config = peft.PeftConfig.from_pretrained(self.folder)
            config.inference_mode, config.task_type = False, None
            return config
        targets = ALL_LINEAR if self.targets == (ALL_LINEAR,) else list(self.targets)
        heads = [name for name in _HEADS if isinstance(getattr(model, name, None), nn.Module)]
        return peft.LoraConfig(r=self.rank, target_modules=targets, modules_to_save=heads or None)

    def _hint(self) -> str:
        return "" if self.folder else "; name the layers with --lora-targets, such as q_proj,v_proj"


def read_adapter(folder: Path) -> tuple[Adapter, str]:
    """The adapter in a folder, and the name of its base model.

    Raises:
        UsageError: the file cannot be read, is of another kind than LoRA, or names no base model.
    """
    path = folder / ADAPTER_FILE
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {str(path)!r}: {one_line(error)}") from error
    kind = values.get("peft_type") if isinstance(values, dict) else None
    if kind != "LORA":
        raise UsageError(f"{str(path)!r}: peft_type is {kind!r}; allowed: 'LORA'")
    base, rank = values.get("base_model_name_or_path"), values.get("r")
    if not isinstance(base, str) or not base:
        raise UsageError(
            f"{str(path)!r}: base_model_name_or_path names no model; give the base and --lora {rank}"
        )
    if (Path(base).expanduser() / ADAPTER_FILE).is_file():
        raise UsageError(f"{str(path)!r}: its base {base!r} is an adapter itself; allowed: a model")
    if not isinstance(rank, int) or rank < 1:
        raise UsageError(f"{str(path)!r}: r is {rank!r}; allowed: a number of at least 1")
    targets = values.get("target_modules")
    names = (targets,) if isinstance(targets, str) else tuple(sorted(map(str, targets or ())))
    return Adapter(rank, names, str(folder)), base


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise UsageError(
            "LoRA needs peft, which puts the adapters in: pip install peft (or give a function that returns "
            "the model with its adapters, MODULE:FUNCTION)"
        ) from error
