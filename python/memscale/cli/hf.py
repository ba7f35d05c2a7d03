# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model without weights, and batches for it, from its configuration alone.

The model is built on the "meta" device, so that one of 70 billion weights takes no memory. Ids and labels are
real integers, because models decide by them; images and sound are on "meta".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from memscale.cli.hub import Found
from memscale.cli.problems import UsageError, one_line

__all__ = ["TASKS", "Built", "build", "recognise"]

Batch = dict[str, Tensor]

_NOT_SHAPE: Final = ("quantization_config",)  # `quantized` reads it
_USUAL_LENGTH: Final = 512
_LABEL_LENGTH: Final = 32  # transcripts of ten seconds of speech
_SOUND_LENGTH: Final = 160_000  # ten seconds at 16 kHz
_USUAL_IMAGE: Final = 224


@dataclass(frozen=True)
class _Task:
    """What a model is trained for.

    Attributes:
        mapping: name of the table in transformers that knows the classes for it.
        inputs: makes a batch from model, batch size and length.
        measure: what the length counts: "tokens", "samples" of sound; "" where there is none.
        usual: the length if none is given.
    """

    mapping: str
    inputs: Callable[[Any, int, int], Batch]
    measure: str = "tokens"
    usual: int = _USUAL_LENGTH


@dataclass(frozen=True)
class Built:
    """A model without weights and how to make batches for it.

    Attributes:
        model: the module, on "meta", in training mode.
        task: a key of `TASKS`.
        make: makes a batch from batch size and length.
        measure: what the length counts; "" for a model whose input has none.
        usual: the length if none is given.
        longest: the longest input that the model takes; None where there is no such limit.
        trained: the length it was trained for, where it takes longer inputs too; else None.
    """

    model: nn.Module
    task: str
    make: Callable[[int, int], Batch]
    measure: str
    usual: int
    longest: int | None
    trained: int | None


# ---- batches ---------------------------------------------------------------------------------------


def _ids(batch: int, length: int) -> Tensor:
    return torch.ones(batch, length, dtype=torch.int64)


def _floats(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


def _text_ids(config: Any, batch: int, length: int) -> Tensor:
    """Ids that are neither padding nor anything else with a meaning, where the configuration says so."""
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start")}
    flat = {item for value in special for item in (value if isinstance(value, (list, tuple)) else (value,))}
    return _ids(batch, length) * next(number for number in range(3, 32) if number not in flat)


def _language_model(model: Any, batch: int, length: int) -> Batch:
    ids = _text_ids(model.config, batch, length)
    return {"input_ids": ids, "labels": ids.clone()}


def _classified_text(model: Any, batch: int, length: int) -> Batch:
    ids = _text_ids(model.config, batch, length)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = 0  # decoders look for the last token that is not padding
    return {"input_ids": ids, "labels": torch.zeros(batch, dtype=torch.int64)}


def _classified_tokens(model: Any, batch: int, length: int) -> Batch:
    return {"input_ids": _text_ids(model.config, batch, length), "labels": 0 * _ids(batch, length)}


def _answers(model: Any, batch: int, length: int) -> Batch:
    places = {name: torch.zeros(batch, dtype=torch.int64) for name in ("start_positions", "end_positions")}
    return {"input_ids": _text_ids(model.config, batch, length), **places}


def _image(config: Any, batch: int) -> Tensor:
    config = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None) or _USUAL_IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", None) or 3
    return _floats(batch, channels, height, width)


def _classified_image(model: Any, batch: int, _: int) -> Batch:
    return {"pixel_values": _image(model.config, batch), "labels": torch.zeros(batch, dtype=torch.int64)}


def _segmented_image(model: Any, batch: int, _: int) -> Batch:
    pixels = _image(model.config, batch)
    return {"pixel_values": pixels, "labels": torch.zeros(batch, *pixels.shape[-2:], dtype=torch.int64)}


def _image_and_text(model: Any, batch: int, length: int) -> Batch:
    ids = _text_ids(model.config.text_config, batch, length)
    ids[:, -1] = max(ids.max().item(), getattr(model.config.text_config, "eos_token_id", 0) or 0)
    return {
        "input_ids": ids,
        "pixel_values": _image(model.config, batch),
        "return_loss": True,  # type: ignore[dict-item]
    }


def _sound(model: Any, batch: int, length: int) -> Batch:
    """Sound as the model wants it: samples, or the spectrum of 30 seconds."""
    if model.main_input_name == "input_values":
        return {"input_values": _floats(batch, length)}
    bins = getattr(model.config, "num_mel_bins", None)
    if model.main_input_name != "input_features" or bins is None:
        raise UsageError(
            f"cannot tell what {model.main_input_name!r} of a {type(model).__name__} looks like; give a "
            "function that returns model and batch, MODULE:FUNCTION"
        )
    return {
        "input_features": _floats(
            batch, bins, 2 * (getattr(model.config, "max_source_positions", None) or 1500)
        )
    }


def _spoken(model: Any, batch: int, length: int) -> Batch:
    return {**_sound(model, batch, _SOUND_LENGTH), "labels": _text_ids(model.config, batch, length)}


def _classified_sound(model: Any, batch: int, length: int) -> Batch:
    return {**_sound(model, batch, length), "labels": torch.zeros(batch, dtype=torch.int64)}


def _transcribed(model: Any, batch: int, length: int) -> Batch:
    return {"input_values": _floats(batch, length), "labels": _text_ids(model.config, batch, _LABEL_LENGTH)}


TASKS: Final[Mapping[str, _Task]] = {
    "causal-lm": _Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _language_model),
    "masked-lm": _Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", _language_model),
    "seq2seq-lm": _Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _language_model),
    "image-classification": _Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _classified_image, ""),
    "speech-seq2seq": _Task("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", _spoken, usual=128),
    "image-text": _Task("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES", _image_and_text, usual=77),
    "semantic-segmentation": _Task("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", _segmented_image, ""),
    "sequence-classification": _Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", _classified_text),
    "token-classification": _Task("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", _classified_tokens),
    "question-answering": _Task("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", _answers),
    "ctc": _Task("MODEL_FOR_CTC_MAPPING_NAMES", _transcribed, "samples", _SOUND_LENGTH),
    "audio-classification": _Task(
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", _classified_sound, "samples", _SOUND_LENGTH
    ),
}
"""Tasks for which a batch can be made. Where a configuration leaves it open, the first that has a class."""


# ---- models ----------------------------------------------------------------------------------------


def build(found: Found, task: str | None, dtype: torch.dtype, with_data: bool = False) -> Built:
    """Builds the model of a configuration.

    Args:
        found: the configuration.
        task: a key of `TASKS`; None: what the configuration says.
        dtype: of the weights.
        with_data: random weights and batches on the CPU; else both are on "meta".

    Raises:
        UsageError: transformers is missing, does not know the model, or the task cannot be derived.
    """
    transformers = _transformers()
    config = _config(transformers, found)
    name, class_name = _head(found, str(config.model_type), config.architectures or [], task)
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = config.pad_token_id or 0  # which the hub's configurations have
    try:
        with torch.device("cpu" if with_data else "meta"):
            model = getattr(transformers, class_name)._from_config(config, dtype=dtype)
    except Exception as error:
        raise UsageError(f"cannot build {class_name} from {found.name!r}: {one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"cannot build {class_name}: transformers made a {type(model).__name__}")
    return _built(model.train(), name)


def recognise(model: nn.Module) -> Built | None:
    """The same for a model that somebody else has built; None if it is none of transformers' for a task."""
    name = next((kind.__name__ for kind in type(model).__mro__ if _is_transformers(kind)), None)
    if name is None or not hasattr(model, "config"):
        return None
    known = _tables()
    for task, item in TASKS.items():
        if name in getattr(known, item.mapping, {}).values():
            return _built(model, task)
    return None


def _built(model: nn.Module, task: str) -> Built:
    item = TASKS[task]
    longest, trained = _limits(model, model.config) if item.measure == "tokens" else (None, None)
    return Built(
        model=model,
        task=task,
        make=_batches(item, model),
        measure=item.measure,
        usual=min(size for size in (item.usual, longest, trained) if size is not None),
        longest=longest,
        trained=trained,
    )


def _is_transformers(kind: type) -> bool:
    return kind.__module__.startswith("transformers.models.")


def _tables() -> Any:
    return importlib.import_module("transformers.models.auto.modeling_auto")


def _transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            "a model by name or configuration needs transformers: pip install transformers (or give a "
            "function that builds the model, MODULE:FUNCTION)"
        ) from error
    transformers.logging.set_verbosity_error()  # no advice about weights that nobody loads
    return transformers


def _config(transformers: Any, found: Found) -> Any:
    kind = found.values["model_type"]
    try:
        family = transformers.CONFIG_MAPPING[kind]
    except KeyError:
        raise UsageError(
            f"transformers {transformers.__version__} does not know model_type {kind!r} of {found.name!r}; "
            f"{_way_to_build(found)}"
        ) from None
    try:
        return family.from_dict({key: value for key, value in found.values.items() if key not in _NOT_SHAPE})
    except Exception as error:
        raise UsageError(f"cannot read the configuration of {found.name!r}: {one_line(error)}") from error


def _way_to_build(found: Found) -> str:
    """What to do about a model that transformers has no code for."""
    if "auto_map" in found.values:
        return (
            "its code is in its own repository (auto_map), which is never run here: give a function that "
            "builds it, MODULE:FUNCTION, with AutoConfig.from_pretrained and AutoModel.from_config and "
            "trust_remote_code=True"
        )
    return (
        "a newer one may (pip install --upgrade transformers); or give a function that returns model and "
        "batch, MODULE:FUNCTION"
    )


def _head(found: Found, kind: str, architectures: list[str], task: str | None) -> tuple[str, str]:
    """Task and class for a model: what was asked for, else what its configuration names."""
    known = _tables()

    def class_for(name: str) -> str | None:
        entry = getattr(known, TASKS[name].mapping, {}).get(kind)
        return entry[0] if isinstance(entry, (list, tuple)) else entry

    if task is not None:
        entry = class_for(task)
        if entry is None:
            able = [name for name in TASKS if class_for(name)]
            raise UsageError(
                f"{found.name!r} cannot be trained for {task}; it can for: {', '.join(able) or '-'}"
            )
        return task, entry
    for name, item in TASKS.items():
        classes = getattr(known, item.mapping, {}).values()
        for architecture in architectures:
            if architecture in classes:
                return name, architecture
    for name in TASKS:
        entry = class_for(name)
        if entry is not None and not (name == "causal-lm" and class_for("masked-lm")):
            return name, entry
    raise UsageError(
        f"cannot tell what a batch for {found.name!r} ({', '.join(architectures) or kind}) looks like; "
        "give a function that returns model and batch, MODULE:FUNCTION"
    )


def _limits(model: Any, config: Any) -> tuple[int | None, int | None]:
    """The longest input a model takes, and the longest it was trained for where that is no limit."""
    config = getattr(config, "text_config", None) or config
    for name in ("max_target_positions", "max_position_embeddings", "n_positions"):
        positions = getattr(config, name, None)
        if isinstance(positions, int) and positions > 0:
            break
    else:
        return None, None
    model = getattr(model, "text_model", model)  # of two encoders, the one that has positions of tokens
    words = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    tables = {
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module is not words
    }
    offset = max(tables & {positions, positions + 2}, default=None)  # OPT and BART keep two rows more
    if offset is None:
        if config.model_type in ("t5", "mt5", "umt5", "longt5"):  # relative positions, any length
            return None, None
        return None, positions
    padding = (
        config.pad_token_id if "roberta" in config.model_type or config.model_type == "camembert" else None
    )
    return positions - (0 if padding is None else padding + 1), None


def _batches(task: _Task, model: nn.Module) -> Callable[[int, int], Batch]:
    weight = next((item for item in model.parameters() if item.is_floating_point()), torch.empty(0))

    def fit(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.to(weight.dtype) if weight.is_meta else torch.randn(value.shape, dtype=weight.dtype)

    def make(batch: int, length: int) -> Batch:
        return {name: fit(value) for name, value in task.inputs(model, batch, length).items()}

    return make
