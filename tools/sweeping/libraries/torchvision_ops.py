# SPDX-License-Identifier: Apache-2.0
"""Operators of torchvision that its import asks for, where its library was built for another PyTorch.

The wheel of the package index does not load beside a CPU build of PyTorch. Its import then fails because it
describes operators that do not exist. Here they are declared, and non-maximum suppression, which detectors
need in training, is written in Python; `roi_align` has a version in Python in torchvision itself.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy
import torch
from torch import Tensor

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def is_installed() -> bool:
    return importlib.util.find_spec("torchvision") is not None


def declare() -> None:
    """To be called before the first import of torchvision."""
    if not hasattr(torch.ops.torchvision, "nms"):
        _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARY.define(
            "qnms(Tensor dets, Tensor scores, float iou_threshold, float scale, int zero_point) -> Tensor"
        )
        _LIBRARY.impl("nms", _nms, "CPU")
    import torchvision
    from torchvision.ops import boxes

    if not torchvision.extension._has_ops():
        boxes._assert_has_ops = lambda: None
        # It would be compiled, and the compiler keeps tensors without data.
        align: Any = importlib.import_module("torchvision.ops.roi_align")
        align._roi_align = getattr(align._roi_align, "__wrapped__", align._roi_align)


def _nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Indices of boxes that overlap no better one by more than the threshold; by numpy, in one operator."""
    order = scores.detach().argsort(descending=True, stable=True)
    best = boxes.detach()[order].numpy()
    low = numpy.maximum(best[:, None, :2], best[None, :, :2])
    high = numpy.minimum(best[:, None, 2:], best[None, :, 2:])
    common = (high - low).clip(min=0).prod(-1)
    area = (best[:, 2:] - best[:, :2]).prod(-1)
    far = common / (area[:, None] + area[None] - common) <= threshold
    left = numpy.ones(len(best), dtype=bool)
    for index in range(len(best)):
        if left[index]:
            left[index + 1 :] &= far[index, index + 1 :]
    return order[torch.from_numpy(left)]
