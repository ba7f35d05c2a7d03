# SPDX-License-Identifier: Apache-2.0
"""Every family of timm: of each file of models one of the smallest, with small pictures."""

from __future__ import annotations

import re

import torch

from sweeping.libraries import torchvision_ops
from sweeping.subject import Attempts, Made, Recipe, usual_loss

torchvision_ops.declare()

import timm  # noqa: E402

DISTRIBUTIONS = ("torch", "timm")

_BATCH = 2
_CLASSES = 5
_SIZES = (64, 96, 112, 128, None)
"""Some want a multiple of 14; the last is the model's own."""

_SMALL = (
    "test_",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "xxt",
    "zepto",
    "tiny",
    "_xs",
    "mini",
    "_t",
    "_s",
    "small",
    "_b0",
    "_0",
    "18",
    "26",
    "_12",
)
_LARGE = re.compile(r"large|huge|giant|gigantic|_xl|_b\b|base|enormous|_[lgh]\d|so\d+m|152|200|269|101")

_SMALLER: dict[str, dict[str, int]] = {"deepseek_vit_412m": {"depth": 2}}
"""Families whose smallest is large."""


def names() -> list[str]:
    """The first of each file in the order of what its name says of its size."""
    by_file: dict[str, list[str]] = {}
    for name in timm.list_models():
        by_file.setdefault(timm.models.model_entrypoint(name).__module__.rpartition(".")[2], []).append(name)
    return sorted(f"{file}.{min(found, key=_size)}" for file, found in by_file.items())


def _size(name: str) -> tuple[bool, int, int, str]:
    rank = next((index for index, part in enumerate(_SMALL) if part in name), len(_SMALL))
    return bool(_LARGE.search(name)), rank, len(name), name


def attempts(name: str) -> Attempts:
    for size in _SIZES:
        yield {"size": size, "given": True}
        yield {"size": size, "given": False}


def make(name: str, recipe: Recipe) -> Made:
    given: dict[str, int] = {"img_size": recipe["size"]} if recipe["given"] and recipe["size"] else {}
    given |= _SMALLER.get(name.partition(".")[2], {})
    model = timm.create_model(
        name.partition(".")[2], pretrained=False, num_classes=_CLASSES, drop_rate=0.1, **given
    ).train()
    height, width = (recipe["size"],) * 2 if recipe["size"] else model.default_cfg["input_size"][1:]
    channels = model.default_cfg["input_size"][0]

    def batch(step: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(step)
        return (torch.randn(_BATCH, channels, height, width, generator=generator),), {}

    return Made(model, batch, usual_loss)
