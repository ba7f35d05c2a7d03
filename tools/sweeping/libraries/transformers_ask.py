# SPDX-License-Identifier: Apache-2.0
"""Text, pictures and labels for models of transformers: what most batches are made of."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

Description = dict[str, Any]
"""A batch, as text that travels as JSON; see `transformers_inputs`."""

BATCH, LENGTH, IMAGE, SOUND, FRAMES, BOXES, FEW_LABELS = 8, 24, 64, 3200, 64, 3, 2


class Ask:
    """What a maker may look at."""

    def __init__(self, kind: Any, config: Any, description: Description, step: int) -> None:
        self.name, self.config, self.description = kind.__name__, config, description
        self.generator = torch.Generator().manual_seed(7 + step)
        self.length: int = description.get("length", LENGTH)

    def field(self, *names: str, default: Any = None) -> Any:
        """A field of the configuration or of one inside it."""
        for config in _with_inner(self.config):
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
        height, width = pair(size)
        height //= 2 if "SegGpt" in self.name else 1  # it puts two pictures one above the other
        channels = self.field("num_channels", "in_channels", "in_chans", default=3)
        return self.floats(BATCH, channels, height, width)


def _with_inner(config: Any) -> list[Any]:
    """A configuration, those inside, and those inside of them."""
    found = [config]
    for item in (config, *_inside(config)):
        found += [one for one in _inside(item) if not any(one is known for known in found)]
    return found


def _inside(config: Any) -> list[Any]:
    if isinstance(config, dict):
        return []
    return [one for one in (getattr(config, name, None) for name in _INNER) if one is not None]


_INNER = (
    "text_config",
    "vision_config",
    "audio_config",
    "encoder",
    "thinker_config",
    "backbone_config",
    "encoder_config",
    "vlm_config",
    "model_config",
)


def pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        size = [size.get("height", IMAGE), size.get("width", IMAGE)]
    if isinstance(size, (list, tuple)):
        return int(size[0]), int(size[-1])
    return int(size), int(size)


def text(ask: Ask) -> Tensor:
    if "MultipleChoice" in ask.name:
        return ask.ids(BATCH, 2, ask.length)
    if "codes" in ask.description:
        return ask.ids(BATCH, ask.length, ask.description["codes"], low=0, high=20)
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
    if "Clip" in ask.name or "CLIP" in ask.name or ("For" in ask.name and "Classification" in ask.name):
        ids[:, -1] = eos if isinstance(eos, int) and eos < 99 else ids[:, -1]
    return ids


def mask(ask: Ask) -> Tensor:
    if {"input_ids", "input_features"} & set(ask.description["names"]) == {"input_features"}:
        return torch.ones(BATCH, features(ask).shape[1], dtype=torch.long)
    return torch.ones(BATCH, ask.length, dtype=torch.long)


def features(ask: Ask) -> Tensor:
    bins = int(
        ask.field(
            "num_chroma",
            "feature_projection_input_dim",
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "n_mels",
            "input_dim",
            default=16,
        )
    )
    frames = 2 * int(ask.field("max_source_positions", default=FRAMES // 2))
    if ask.description.get("sound") == "frames first":
        return ask.floats(BATCH, frames, bins)
    if ask.description.get("sound") == "one channel":
        return ask.floats(BATCH, 1, frames, bins)
    return ask.floats(BATCH, bins, frames)


def boxes(ask: Ask) -> Tensor:
    corners = torch.randint(0, 40, (BATCH, ask.length, 4), generator=ask.generator)
    corners[..., 2:] = corners[..., :2] + 5
    return corners


def labels(ask: Ask) -> Any:
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


def masks(ask: Ask) -> Any:
    height, width = ask.images().shape[-2:]
    return [
        torch.randint(0, 2, (FEW_LABELS, height, width), generator=ask.generator).float()
        for _ in range(BATCH)
    ]


def class_labels(ask: Ask) -> Any:
    return [torch.tensor([0, 1]) for _ in range(BATCH)]


def video(ask: Ask) -> Tensor:
    images = ask.images()
    frames = int(ask.field("num_frames", default=4))
    return images[:, None].repeat(1, frames, 1, 1, 1) + 0.1 * ask.floats(BATCH, frames, *images.shape[1:])


def images_or_more(ask: Ask) -> Tensor:
    in_patches = {"image_grid_thw", "grid_thw", "image_grid_hw"} & set(ask.description["names"])
    shape = ask.description.get("pixels", "patches" if in_patches else "images")
    if shape == "video" or (shape == "images" and re.search("Video|Vivit|Timesformer", ask.name)):
        return video(ask)
    if shape == "pairs":
        return torch.stack([ask.images(), ask.images()], 1)
    if shape == "tiles":
        return ask.images()[:, None, None].repeat(1, 1, int(ask.field("max_num_tiles", default=4)), 1, 1, 1)
    if shape == "one more":
        return ask.images()[:, None]
    if "target_sizes" in ask.description["names"]:  # patches of all pictures side by side
        patch = pair(ask.field("patch_size", default=16))[0]
        return ask.floats(1, 3, patch, BATCH * PATCHES * patch)
    if "spatial_shapes" in ask.description["names"]:
        return patches(ask).view(BATCH, PATCHES, -1)
    if shape.startswith("patch"):
        return patches(ask, shape)
    return ask.images()


PATCHES = 16
"""Of a picture that comes in patches, four by four."""


def patches(ask: Ask, shape: str = "patches") -> Tensor:
    """Patches of all pictures, one after the other: flat, or small pictures."""
    channels = int(ask.field("num_channels", "in_channels", "in_chans", default=3))
    patch = pair(ask.field("patch_size", default=16))
    if shape != "patches":
        few = ask.floats(BATCH * PATCHES, channels, *patch)
        return few[None] if shape.endswith("one") else few
    frames = int(ask.field("temporal_patch_size", "patch_temporal", default=1))
    width = ask.description.get("patch width") or channels * frames * patch[0] * patch[1]
    return ask.floats(BATCH * PATCHES, width)
