# SPDX-License-Identifier: Apache-2.0
"""Every model class of the installed transformers, with a tiny random configuration."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

from sweeping.libraries import torchvision_ops

if torchvision_ops.is_installed():
    torchvision_ops.declare()  # some files of models import it

import torch
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

_ABSTRACT = re.compile(r"Pre[Tt]rained")
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
    for number, (style, asked) in enumerate(sizes.STYLES.items()):
        if not re.search(asked, said):
            continue
        try:
            config = sizes.tiny(kind, style)
        except Exception:
            said += yield {"style": style, "batch": {}}  # building it says why
            continue
        if number and sizes.own_of(kind):
            return  # it has one configuration
        few = None if number < 2 else 4  # there is an end to tries
        for first, batch in enumerate(itertools.islice(inputs.batches(kind, config), few)):
            tried: Description | None = batch
            heard = ""
            while tried is not None:
                error = yield {"style": style, "batch": tried}
                heard += error
                tried = inputs.mended(kind, tried, error)
            said += heard
            sections = number < 2 and "size at dimension -1" in heard  # no batch of this style goes better
            if first == 0 and (sections or not _builds(kind, config)):
                break


def _builds(kind: Any, config: Any) -> bool:
    """Whether a failure is about a batch, and not about the configuration."""
    try:
        kind(config)
    except Exception:
        return False
    return True


def make(name: str, recipe: Recipe) -> Made:
    kind = _class(name)
    config = sizes.tiny(kind, recipe["style"])
    try:
        model = kind(config).float().train()
    except ImportError as error:
        wanted = re.search(r"requires the (\w+)|No module named '(\w+)", str(error))
        raise Unsupported(f"needs {wanted.group(1) or wanted.group(2)}" if wanted else str(error)) from None
    return Made(model, lambda step: ((), inputs.batch(kind, config, recipe["batch"], step)), usual_loss)


def _class(name: str) -> Any:
    family, _, class_name = name.partition(".")
    kind = getattr(transformers, class_name, None) or getattr(
        importlib.import_module(f"transformers.models.{family}"), class_name
    )
    missing = getattr(kind, "_backends", None)
    if missing and type(kind).__name__ == "DummyObject":
        raise Unsupported(f"needs {', '.join(missing)}")
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise Unsupported("not a model but a part or a function")
    if getattr(kind, "config_class", None) is None:
        raise Unsupported("has no configuration of its own")
    given = list(inspect.signature(kind.__init__).parameters.values())[2:]
    if any(item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD for item in given):
        raise Unsupported("not a model but a part or a function")
    if kind.forward is torch.nn.Module.forward:
        raise Unsupported("has no forward")
    if class_name in _UNFIT:
        raise Unsupported(_UNFIT[class_name])
    for wanted, reason in _NEEDS.items():
        if wanted in inspect.signature(kind.forward).parameters:
            raise Unsupported(reason)
    return kind


_NEEDS = {
    "inference_session": "needs an inference session",
    "shared_kv_states": "needs keys and values of another model",
    "context_input_ids": "needs a retriever",
}
"""Parameter of a forward → why such a class is not trained alone."""

_UNFIT = {
    "DiffusionGemmaDecoderModel": "needs keys and values of another model",
    "EsmFold2Model": "takes the atoms of a protein as an object of a class of its own; there is no recipe",
    "Llama4ForConditionalGeneration": "its forward reads a field that its output lacks",
}
"""Class → why it is not trained."""
