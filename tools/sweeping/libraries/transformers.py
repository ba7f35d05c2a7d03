# SPDX-License-Identifier: Apache-2.0
"""Every model class of the installed transformers, with a tiny random configuration."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

from sweeping.libraries import torchvision_ops

if torchvision_ops.is_installed():
    torchvision_ops.declare()  # some files of models import it

import transformers

from sweeping.libraries import transformers_config as sizes
from sweeping.libraries import transformers_inputs as inputs
from sweeping.libraries.transformers_ask import Description
from sweeping.subject import Attempts, Made, Recipe, Unsupported, usual_loss

DISTRIBUTIONS = ("torch", "transformers")

PARTS = tuple(
    f"transformers.{name}"
    for name in (
        "modeling_utils",
        "modeling_layers",
        "masking_utils",
        "generation.utils",
        "generation.candidate_generator",
        "loss.loss_utils",
        "modeling_rope_utils",
    )
)
"""What the files of all models import, and which is no model."""

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]

_ABSTRACT = re.compile(r"(PreTrainedModel|PretrainedModel)$")
_NO_MODEL = re.compile(r"(Config|Processor|Tokenizer|Cache|Output|Layer|Mixin)$")


def names() -> list[str]:
    """`family.Class` of what the files of models export; read, not imported."""
    found = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        if path.parent.name == "auto":
            continue
        found += [
            f"{path.parent.name}.{name}"
            for name in _exported(path)
            if not _ABSTRACT.search(name) and not _NO_MODEL.search(name) and name[0].isupper()
        ]
    return sorted(set(found))


def _exported(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(
            getattr(target, "id", "") == "__all__" for target in node.targets
        ):
            return [
                item.value
                for item in getattr(node.value, "elts", [])
                if isinstance(item, ast.Constant) and isinstance(item.value, str)
            ]
    return []


def attempts(name: str) -> Attempts:
    """Configurations × batches; what an error asks for is tried next."""
    kind = _class(name)
    said = ""
    for style in sizes.STYLES:
        if style == "sections" and "split_with_sizes" not in said:
            continue
        try:
            config = sizes.tiny(kind, style)
        except Exception:
            said += yield {"style": style, "batch": {}}  # building it says why
            continue
        for batch in inputs.batches(kind, config):
            tried: Description | None = batch
            while tried is not None:
                error = yield {"style": style, "batch": tried}
                said += error
                tried = inputs.mended(tried, error)


def make(name: str, recipe: Recipe) -> Made:
    kind = _class(name)
    config = sizes.tiny(kind, recipe["style"])
    model = kind(config).float().train()
    return Made(model, lambda step: ((), inputs.batch(kind, config, recipe["batch"], step)), usual_loss)


def _class(name: str) -> Any:
    family, _, class_name = name.partition(".")
    kind = getattr(transformers, class_name, None) or getattr(
        importlib.import_module(f"transformers.models.{family}"), class_name
    )
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise Unsupported("not a model but a part or a function")
    if getattr(kind, "config_class", None) is None:
        raise Unsupported("has no configuration of its own")
    return kind
