# SPDX-License-Identifier: Apache-2.0
"""Batches for any model class of transformers, by the parameters of its forward.

A batch is described by a small table that travels as JSON: which parameters are given, how long text is,
which kind of labels, and how many tokens stand for an image. Descriptions are tried one after the other; some
errors say what to change (`mended`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

from sweeping.libraries.transformers_ask import BATCH, LENGTH, Ask, Description
from sweeping.libraries.transformers_makers import MAKERS
from sweeping.libraries.transformers_own_batches import OWN_BATCHES

_MAIN = (
    "input_ids",
    "pixel_values",
    "input_values",
    "input_features",
    "past_values",
    "flattened_patches",
    "inputs",
    "states",
    "audio_codes",
)

_ALSO = (
    "bbox",
    "past_time_features",
    "future_time_features",
    "visual_feats",
    "visual_pos",
    "next_sentence_label",
    "xpath_tags_seq",
    "xpath_subs_seq",
    "entity_ids",
    "entity_attention_mask",
    "entity_position_ids",
    "input_shape_ids",
    "input_pronunciation_ids",
    "actions",
    "rewards",
    "returns_to_go",
    "timesteps",
    "past_observed_mask",
    "task_inputs",
    "visual_embeds",
    "visual_attention_mask",
    "image_merge_sizes",
    "spatial_shapes",
    "spectrogram_labels",
    "duration_labels",
    "pitch_labels",
    "energy_labels",
)

_PATTERNS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("QuestionAnswering$", ("answers", None)),
    (
        "(Sequence|Image|Audio|Video)Classification|ForXVector|MultipleChoice|NextSentence|WithTeacher",
        ("one", "floats", None),
    ),
    ("(Token|Frame|AudioFrame)Classification", ("tokens", None)),
    ("Detection", ("boxes", None)),
    ("Segmentation$", ("boxes", "map", None)),
    ("Segmentation", ("map", "masks", None)),
    ("DepthEstimation", ("depth", None)),
    ("ForCTC|SpeechToText|Speech2Text", ("short text", "text", None)),
    ("LM|Generation|PreTraining|Seq2Seq", ("text", "short text", None)),
)  # fmt: skip


def _label_kinds(name: str) -> tuple[str | None, ...]:
    for pattern, kinds in _PATTERNS:
        if re.search(pattern, name):
            return kinds
    return (None, "text", "boxes")


def batches(kind: Any, config: Any) -> Iterator[Description]:
    """Descriptions to try, the fullest first."""
    if kind.__name__ in OWN_BATCHES:
        yield {"names": list(OWN_BATCHES[kind.__name__])}
        return
    parameters = inspect.signature(kind.forward).parameters
    needed = [
        name
        for name, item in parameters.items()
        if item.default is item.empty and name in MAKERS and name != "self"
    ]
    present = [name for name in _MAIN if name in parameters]
    also = [name for name in _ALSO if name in parameters]
    main = getattr(kind, "main_input_name", "input_ids")
    main = main[0] if isinstance(main, list) else main
    mains = [name for name in {main: 0, **dict.fromkeys(present)} if name in parameters and name in MAKERS]
    choices: list[list[str]] = []
    both = [name for name in mains if name in ("input_ids", "pixel_values", "input_features")]
    if len(both) > 1:
        choices.append(both)
    choices += [[name] for name in mains]
    choices = choices or [needed]
    for label in _label_kinds(kind.__name__):
        for chosen in choices:
            names = list(dict.fromkeys([*chosen, *needed, *also]))
            described = _with_labels(names, label, parameters)
            if described is not None:
                yield described
    if needed and needed not in choices:
        yield {"names": needed}


def _with_labels(names: list[str], label: str | None, parameters: Any) -> Description | None:
    """A description with labels, or None for a forward that takes none of that kind."""
    if label is None:
        extra = ["return_loss"] if "return_loss" in parameters else []
        return {"names": [name for name in names if name != "labels"] + extra}
    if label == "answers":
        wanted = [name for name in ("start_positions", "end_positions") if name in parameters]
        return {"names": names + wanted} if wanted else None
    if label == "masks":
        wanted = [name for name in ("mask_labels", "class_labels") if name in parameters]
        return {"names": names + wanted} if wanted else None
    if "labels" not in parameters:
        return None
    return {"names": [name for name in names if name != "labels"] + ["labels"], "labels": label}


_COUNTS = re.compile(
    r"(Image|Video|Audio|Multimodal)\w* features and .*tokens.* do not match.*?tokens:\D*(\d+)\D+(\d+)"
)
_MISSING = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.*)")
_MOST_MENDED = 4


def mended(kind: Any, description: Description, error: str) -> Description | None:
    """What to try next, if the error says so."""
    times = description.get("mended", 0)
    if times >= _MOST_MENDED:
        return None
    change = _change(description, error, inspect.signature(kind.forward).parameters)
    return None if change is None else {**description, **change, "mended": times + 1}


def _change(description: Description, error: str, parameters: Any) -> Description | None:
    names = description.get("names", [])
    counted = _COUNTS.search(error)
    if counted:
        what, _, features = counted.group(1).lower(), *map(int, counted.groups()[1:])
        what = "image" if what == "multimodal" else what
        if description.get("tokens", {}).get(what) == features or features > BATCH * 256:
            return None
        return {
            "tokens": {**description.get("tokens", {}), what: features},
            "length": max(LENGTH, features // BATCH + 8),
        }
    missing = _MISSING.search(error)
    if missing:
        wanted = [
            name for name in re.findall(r"'(\w+)'", missing.group(1)) if name in MAKERS and name not in names
        ]
        return {"names": names + wanted} if wanted else None
    for pattern, change in _HINTS:
        found = re.search(pattern, error)
        if not found:
            continue
        if "add" in change:
            if change["add"] in parameters and change["add"] not in names:
                return {"names": [*names, change["add"]]}
            continue
        change = {key: int(found.group(1)) if value == "\\1" else value for key, value in change.items()}
        if any(description.get(key) != value for key, value in change.items()):
            return change
    return None


_NOTHING = r"'NoneType' object (has no attribute|is not|cannot)|NoneType, Parameter|not NoneType"

_TOO_LONG = r"tensor a \(24\) must match the size of tensor b "

_HINTS: tuple[tuple[str, Description], ...] = (
    (r"decoder_input_ids|decoder_inputs_embeds", {"add": "decoder_input_ids"}),
    (r"multiple of (\d+)", {"samples": r"\1"}),
    (r"to have 1 channels, but got|not enough values to unpack \(expected 3, got 2\)", {"sound": "channel"}),
    (r"must be a 5D tensor|match the number of images", {"pixels": "pairs"}),
    (r"grid_thw|grid_hw", {"add": "image_grid_thw"}),
    (r"image_sizes", {"add": "image_sizes"}),
    (r"target_sizes|tgt_sizes", {"add": "target_sizes"}),
    (r"mm_token_type_ids", {"add": "mm_token_type_ids"}),
    (r"token_type_ids", {"add": "token_type_ids"}),
    *(
        (_NOTHING, {"add": name})
        for name in (
            "image_grid_thw",
            "grid_thw",
            "image_grid_hw",
            "image_sizes",
            "target_sizes",
            "image_embeds_position_mask",
            "attention_mask",
            "decoder_input_values",
            "image_attention_mask",
            "input_features_mask",
        )
    ),
    (r"and 'NoneType'", {"add": "attention_mask"}),
    (r"question token", {"tokens": {"question": 8}}),
    (_TOO_LONG + r"\((\d\d)\) at non-singleton dimension 1", {"length": r"\1"}),
    (_TOO_LONG + r"\((\d)\) at non-singleton dimension 1", {"codes": r"\1"}),
    (_TOO_LONG + r"\((8)\) at non-singleton dimension 1", {"length": r"\1"}),
    (r"too many indices for tensor of dimension 2", {"codes": 8}),
    (r"index out of range in self", {"length": 4}),
    (r"expected 6, got", {"pixels": "tiles"}),
    (r"expected 4, got 3", {"pixels": "pairs"}),
    (r"exactly one of input_ids|specify input_ids|" + _NOTHING, {"add": "decoder_input_ids"}),
    (r"pixel_values.*(five|5)|expected 5", {"pixels": "video"}),
    (r"expected 5, got 4\)", {"pixels": "patch images of one"}),
    (r"too many values to unpack \(expected 2", {"pixels": "patches"}),
    (r"input to conv2d, but got input of size: \[\d+, \d+\]", {"pixels": "patch images"}),
    (r"expected 5, got 4|5D", {"pixels": "one more"}),
    (r"expected input\[\d+, \d+, \d+(?:, \d+)?\] to have (\d+) channels", {"hidden channels": r"\1"}),
    (r"cannot be multiplied \(128x\d+ and (\d+)x", {"patch width": r"\1"}),
    (r"expected 3D|expected 2D \(unbatched\) or 3D|3-dimensional|expected 3, got 2", {"sound": "spectrum"}),
    (r"range of \[-3, 2\], but got 3", {"sound": "spectrum"}),
    (r"expected input\[\d+, \d+, \d+\] to have \d+ channels", {"sound": "frames first"}),
    (r"inf|mat1 and mat2 shapes cannot be multiplied|normalized_shape", {"sound": "frames first"}),
    (r"range of \[-3, 2\], but got 3|unpack \(expected 4, got 3", {"sound": "one channel"}),
    (
        r"padded input size|Kernel size can't be greater|output size is too small|Output size is too small",
        {"image": 128, "samples": 16000},
    ),
)  # fmt: skip
"""What an error says → a parameter to add, or a change of the description."""


def batch(kind: Any, config: Any, description: Description, step: int) -> dict[str, Any]:
    """The batch of a step."""
    made = {}
    for name in description.get("names", []):
        ask = Ask(kind, config, description, step)
        own = OWN_BATCHES.get(kind.__name__, {}).get(name)
        value = (own or MAKERS[name])(ask)
        if value is not None:
            two = "MultipleChoice" in kind.__name__ and name not in ("input_ids", "labels")
            made[name] = torch.stack([value, value], 1) if two else value
    return made
