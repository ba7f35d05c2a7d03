# SPDX-License-Identifier: Apache-2.0
"""Batches for any model class of transformers, by the parameters of its forward.

A batch is described by a small table that travels as JSON: which parameters are given, how long text is, which
kind of labels, and how many tokens stand for an image. Descriptions are tried one after the other; some errors
say what to change (`mended`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Description = dict[str, Any]

BATCH, LENGTH, IMAGE, SOUND, FRAMES, BOXES, FEW_LABELS = 8, 24, 64, 3200, 64, 3, 2

_Maker = Callable[["_Ask"], Any]


class _Ask:
    """What a maker may look at."""

    def __init__(self, kind: Any, config: Any, description: Description, step: int) -> None:
        self.name, self.config, self.description = kind.__name__, config, description
        self.generator = torch.Generator().manual_seed(7 + step)
        self.length: int = description.get("length", LENGTH)

    def field(self, *names: str, default: Any = None) -> Any:
        """A field of the configuration or of one inside it."""
        inner = [getattr(self.config, name, None) for name in _INNER]
        for config in (self.config, *(item for item in inner if item is not None)):
            for name in names:
                value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
                if value is not None:
                    return value
        return default

    def ids(self, *shape: int, low: int = 3, high: int | None = None) -> Tensor:
        size = high or min(int(self.field("vocab_size", "n_vocab", default=99)), 99)
        top = max(low + 1, min(size - 12, 80) if size > 20 else size)
        return torch.randint(low, top, shape, generator=self.generator)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def images(self) -> Tensor:
        size = self.description.get("image") or self.field("image_size", "input_size", default=IMAGE)
        height, width = _pair(size)
        channels = self.field("num_channels", "in_channels", "in_chans", default=3)
        return self.floats(BATCH, channels, height, width)


_INNER = (
    "text_config",
    "vision_config",
    "audio_config",
    "encoder",
    "thinker_config",
    "backbone_config",
    "encoder_config",
)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        size = [size.get("height", IMAGE), size.get("width", IMAGE)]
    if isinstance(size, (list, tuple)):
        return int(size[0]), int(size[-1])
    return int(size), int(size)


def _text(ask: _Ask) -> Tensor:
    if "MultipleChoice" in ask.name:
        return ask.ids(BATCH, 2, ask.length)
    ids = ask.ids(BATCH, ask.length)
    placed = ask.description.get("tokens", {})
    at = 1
    for name, count in placed.items():
        token = ask.field(f"{name}_token_id", f"{name}_token_index")
        each = -(-count // BATCH)
        if token is not None and at + each <= ask.length:
            ids[:, at : at + each] = token
            at += each
    eos = ask.field("eos_token_id")
    if "Clip" in ask.name or "CLIP" in ask.name or "For" in ask.name and "Classification" in ask.name:
        ids[:, -1] = eos if isinstance(eos, int) and eos < 99 else ids[:, -1]
    return ids


def _mask(ask: _Ask) -> Tensor:
    return torch.ones(BATCH, ask.length, dtype=torch.long)


def _boxes(ask: _Ask) -> Tensor:
    corners = torch.randint(0, 40, (BATCH, ask.length, 4), generator=ask.generator)
    corners[..., 2:] = corners[..., :2] + 5
    return corners


def _labels(ask: _Ask) -> Any:
    kind = ask.description.get("labels")
    classes = max(1, min(int(ask.field("num_labels", default=2) or 2), 2))
    if kind == "one":
        return torch.randint(0, classes, (BATCH,), generator=ask.generator)
    if kind == "tokens":
        return torch.randint(0, classes, (BATCH, ask.length), generator=ask.generator)
    if kind == "text":
        return ask.ids(BATCH, ask.length)
    if kind == "short text":
        return ask.ids(BATCH, 6)
    if kind == "map":
        height, width = ask.images().shape[-2:]
        return torch.randint(0, classes, (BATCH, height, width), generator=ask.generator)
    if kind == "depth":
        height, width = ask.images().shape[-2:]
        return ask.floats(BATCH, height, width).abs() + 0.1
    if kind == "boxes":
        return [
            {
                "class_labels": torch.randint(0, classes, (BOXES,), generator=ask.generator),
                "boxes": torch.rand(BOXES, 4, generator=ask.generator) * 0.3 + 0.3,
                "masks": torch.randint(
                    0, 2, (BOXES, *ask.images().shape[-2:]), generator=ask.generator
                ).float(),
            }
            for _ in range(BATCH)
        ]
    if kind == "floats":
        return ask.floats(BATCH, classes)
    return None


def _masks(ask: _Ask) -> Any:
    height, width = ask.images().shape[-2:]
    return [
        torch.randint(0, 2, (FEW_LABELS, height, width), generator=ask.generator).float()
        for _ in range(BATCH)
    ]


def _class_labels(ask: _Ask) -> Any:
    return [torch.tensor([0, 1]) for _ in range(BATCH)]


def _video(ask: _Ask) -> Tensor:
    images = ask.images()
    frames = int(ask.field("num_frames", default=4))
    return images[:, None].repeat(1, frames, 1, 1, 1) + 0.1 * ask.floats(BATCH, frames, *images.shape[1:])


def _pixels(ask: _Ask) -> Tensor:
    in_patches = {"image_grid_thw", "grid_thw"} & set(ask.description["names"])
    shape = ask.description.get("pixels", "patches" if in_patches else "images")
    if shape == "video" or shape == "images" and re.search("Video|Vivit|Timesformer", ask.name):
        return _video(ask)
    if shape == "pairs":
        return torch.stack([ask.images(), ask.images()], 1)
    if shape == "one more":
        return ask.images()[:, None]
    if shape == "patches":
        channels, patch = (
            ask.field("num_channels", "in_channels", default=3),
            int(ask.field("patch_size", default=16)),
        )
        frames = ask.field("temporal_patch_size", default=1)
        return ask.floats(BATCH * 16, channels * frames * patch * patch)
    return ask.images()


def _grid(ask: _Ask) -> Tensor:
    return torch.tensor([[1, 4, 4]] * BATCH)


def _sound(ask: _Ask) -> Tensor:
    if ask.description.get("sound") == "spectrum":
        return ask.floats(
            BATCH, FRAMES, int(ask.field("num_mel_bins", "feature_size", "input_size", default=16))
        )
    samples = ask.description.get("samples", SOUND)
    return ask.floats(BATCH, *([1] if ask.description.get("sound") == "channel" else []), samples)


def _features(ask: _Ask) -> Tensor:
    bins = int(
        ask.field("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim", default=16)
    )
    frames = 2 * int(ask.field("max_source_positions", default=FRAMES // 2))
    if ask.description.get("sound") == "frames first":
        return ask.floats(BATCH, frames, bins)
    if ask.description.get("sound") == "one channel":
        return ask.floats(BATCH, 1, frames, bins)
    return ask.floats(BATCH, bins, frames)


def _series(ask: _Ask) -> Tensor:
    length = int(ask.field("context_length", default=32)) + max(ask.field("lags_sequence", default=[0]))
    channels = ask.field("num_input_channels", "input_size", default=1)
    return (
        ask.floats(BATCH, length, channels)
        if channels > 1 or "Patch" in ask.name
        else ask.floats(BATCH, length)
    )


def _series_times(ask: _Ask) -> Tensor:
    return ask.floats(*_series(ask).shape[:2], int(ask.field("num_time_features", default=1)))


def _future(ask: _Ask) -> Tensor:
    length, channels = (
        int(ask.field("prediction_length", default=4) or 4),
        ask.field("num_input_channels", "input_size", default=1),
    )
    return (
        ask.floats(BATCH, length, channels)
        if channels > 1 or "Patch" in ask.name
        else ask.floats(BATCH, length)
    )


def _future_times(ask: _Ask) -> Tensor:
    return ask.floats(*_future(ask).shape[:2], int(ask.field("num_time_features", default=1)))


def _hidden(ask: _Ask) -> Tensor:
    return ask.floats(BATCH, ask.length, int(ask.field("hidden_size", "d_model", default=64)))


def _masked_patches(ask: _Ask) -> Tensor:
    height, width = ask.images().shape[-2:]
    patch = _pair(ask.field("patch_size", default=16))
    count = (height // patch[0]) * (width // patch[1])
    if "VideoMAE" in ask.name:
        count *= int(ask.field("num_frames", default=16)) // int(ask.field("tubelet_size", default=2))
    row = torch.arange(count) % 2 == 0
    return row.expand(BATCH, -1).clone()


MAKERS: dict[str, _Maker] = {
    "input_ids": _text,
    "attention_mask": _mask,
    "decoder_input_ids": lambda ask: ask.ids(BATCH, ask.length),
    "labels": _labels,
    "pixel_values": _pixels,
    "pixel_values_videos": _video,
    "pixel_mask": lambda ask: torch.ones(BATCH, *ask.images().shape[-2:], dtype=torch.long),
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "input_values": _sound,
    "input_features": _features,
    "bbox": _boxes,
    "start_positions": lambda ask: torch.tensor([1] * BATCH),
    "end_positions": lambda ask: torch.tensor([3] * BATCH),
    "next_sentence_label": lambda ask: torch.tensor([0, 1] * (BATCH // 2)),
    "sentence_order_label": lambda ask: torch.tensor([0, 1] * (BATCH // 2)),
    "return_loss": lambda ask: True,
    "mask_labels": _masks,
    "class_labels": _class_labels,
    "bool_masked_pos": _masked_patches,
    "past_values": _series,
    "past_time_features": _series_times,
    "past_observed_mask": lambda ask: torch.ones_like(_series(ask)),
    "future_values": _future,
    "future_time_features": _future_times,
    "inputs_embeds": _hidden,
    "hidden_states": _hidden,
    "hidden_state": _hidden,
    "encoder_hidden_states": _hidden,
    "position_ids": lambda ask: torch.arange(ask.length).expand(BATCH, -1),
    "image_sizes": lambda ask: torch.tensor([list(ask.images().shape[-2:])] * BATCH),
    "pixel_values_images": lambda ask: ask.images(),
    "text_input_ids": _text,
    "task_inputs": lambda ask: ask.ids(BATCH, ask.length),
    "flattened_patches": lambda ask: torch.cat(
        [
            torch.ones(BATCH, 16, 2),
            ask.floats(BATCH, 16, int(ask.field("patch_embed_hidden_size", default=768))),
        ],
        -1,
    ),
    "visual_feats": lambda ask: ask.floats(BATCH, 4, int(ask.field("visual_feat_dim", default=64))),
    "visual_pos": lambda ask: torch.rand(BATCH, 4, 4, generator=ask.generator),
    "visual_embeds": lambda ask: ask.floats(BATCH, 4, int(ask.field("visual_embedding_dim", default=64))),
    "visual_attention_mask": lambda ask: torch.ones(BATCH, 4),
    "audio_codes": lambda ask: ask.ids(
        BATCH, int(ask.field("num_codebooks", "num_quantizers", default=4)), 8, low=0, high=30
    ),
    "input_points": lambda ask: torch.rand(BATCH, 1, 2, 2, generator=ask.generator) * 30,
    "qformer_input_ids": lambda ask: ask.ids(BATCH, 8),
    "states": lambda ask: ask.floats(BATCH, 6, int(ask.field("state_dim", default=17))),
    "actions": lambda ask: ask.floats(BATCH, 6, int(ask.field("act_dim", default=4))),
    "rewards": lambda ask: ask.floats(BATCH, 6, 1),
    "returns_to_go": lambda ask: ask.floats(BATCH, 6, 1),
    "timesteps": lambda ask: torch.arange(6).expand(BATCH, -1),
    "spectrogram": lambda ask: ask.floats(
        BATCH, FRAMES, int(ask.field("num_mel_bins", "model_in_channels", default=16))
    ),
    "noise_sequence": lambda ask: ask.floats(BATCH, FRAMES, int(ask.field("model_in_channels", default=16))),
    "speech_labels": lambda ask: ask.floats(BATCH, 12, int(ask.field("num_mel_bins", default=16))),
    "xpath_tags_seq": lambda ask: ask.ids(
        BATCH, ask.length, int(ask.field("max_depth", default=50)), low=0, high=30
    ),
    "xpath_subs_seq": lambda ask: ask.ids(
        BATCH, ask.length, int(ask.field("max_depth", default=50)), low=0, high=30
    ),
    "entity_ids": lambda ask: ask.ids(BATCH, 3, low=1, high=30),
    "entity_attention_mask": lambda ask: torch.ones(BATCH, 3, dtype=torch.long),
    "entity_position_ids": lambda ask: torch.arange(3)[None, :, None].expand(BATCH, 3, 4).clone(),
    "input_shape_ids": lambda ask: ask.ids(BATCH, ask.length, low=0, high=30),
    "input_pronunciation_ids": lambda ask: ask.ids(BATCH, ask.length, low=0, high=30),
    "mm_token_type_ids": lambda ask: _places_of_images(ask),
    "token_type_ids": lambda ask: torch.zeros(BATCH, ask.length, dtype=torch.long),
    "pixel_position_ids": lambda ask: torch.arange(16).expand(BATCH, -1),
    "prompt_pixel_values": lambda ask: ask.images(),
    "prompt_masks": lambda ask: ask.images(),
    "prompt_depth": lambda ask: ask.images()[:, :1].abs(),
    "audio_features": lambda ask: ask.floats(BATCH, FRAMES, 64),
    "inputs": lambda ask: _inputs_of_perceiver(ask),
    "decoder_input_values": lambda ask: ask.floats(BATCH, 12, int(ask.field("num_mel_bins", default=16))),
    "is_longer": lambda ask: torch.tensor([[True]] * BATCH),
}
"""Parameter of a forward → what to give for it."""


def _places_of_images(ask: _Ask) -> Tensor:
    token = ask.field("image_token_id", "image_token_index", default=-1)
    fresh = _Ask.__new__(_Ask)
    fresh.__dict__.update(ask.__dict__, generator=torch.Generator().manual_seed(7))
    return (_text(fresh) == token).long()


def _inputs_of_perceiver(ask: _Ask) -> Tensor:
    if "MaskedLM" in ask.name or "SequenceClassification" in ask.name:
        return ask.ids(BATCH, ask.length)
    if "Image" in ask.name:
        return ask.floats(BATCH, 3, 224, 224)
    return ask.floats(BATCH, 16, int(ask.field("d_model", default=64)))


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
)

_PATTERNS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("QuestionAnswering$", ("answers", None)),
    ("(Sequence|Image|Audio|Video)Classification|ForXVector|MultipleChoice|NextSentence|WithTeacher", ("one", "floats", None)),
    ("(Token|Frame|AudioFrame)Classification", ("tokens", None)),
    ("Detection|Segmentation$", ("boxes", "map", None)),
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
    parameters = inspect.signature(kind.forward).parameters
    needed = [
        name
        for name, item in parameters.items()
        if item.default is item.empty and name in MAKERS and name != "self"
    ]
    present = [name for name in _MAIN if name in parameters]
    also = [name for name in _ALSO if name in parameters]
    main = getattr(kind, "main_input_name", "input_ids")
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


def mended(description: Description, error: str) -> Description | None:
    """What to try next, if the error says so."""
    times = description.get("mended", 0)
    if times >= _MOST_MENDED:
        return None
    change = _change(description, error)
    return None if change is None else {**description, **change, "mended": times + 1}


def _change(description: Description, error: str) -> Description | None:
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
        if re.search(pattern, error) and any(description.get(key) != value for key, value in change.items()):
            if "add" in change:
                if change["add"] in names:
                    continue
                return {"names": [*names, change["add"]]}
            return change
    return None


_HINTS: tuple[tuple[str, Description], ...] = (
    (r"decoder_input_ids", {"add": "decoder_input_ids"}),
    (r"to have 1 channels, but got|not enough values to unpack \(expected 3, got 2\)", {"sound": "channel"}),
    (r"must be a 5D tensor", {"pixels": "pairs"}),
    (r"grid_thw|'NoneType' object has no attribute '(shape|tolist|prod|repeat|device)'|'NoneType' object is not (iterable|subscriptable)", {"add": "image_grid_thw"}),
    (r"image_sizes", {"add": "image_sizes"}),
    (r"mm_token_type_ids", {"add": "mm_token_type_ids"}),
    (r"token_type_ids", {"add": "token_type_ids"}),
    (r"pixel_values.*(five|5)|expected 5|not enough values to unpack \(expected 5, got 4\)", {"pixels": "video"}),
    (r"expected 5, got 4|5D", {"pixels": "one more"}),
    (r"expected 3D|expected 2D \(unbatched\) or 3D|3-dimensional|expected 3, got 2", {"sound": "spectrum"}),
    (r"expected input\[\d+, \d+, \d+\] to have \d+ channels", {"sound": "frames first"}),
    (r"inf|mat1 and mat2 shapes cannot be multiplied", {"sound": "frames first"}),
    (r"padded input size|Kernel size can't be greater|output size is too small", {"image": 128, "samples": 16000}),
)  # fmt: skip


def batch(kind: Any, config: Any, description: Description, step: int) -> dict[str, Any]:
    """The batch of a step."""
    made = {}
    for name in description.get("names", []):
        ask = _Ask(kind, config, description, step)
        value = MAKERS[name](ask)
        if value is not None:
            made[name] = value
    return made
