# SPDX-License-Identifier: Apache-2.0
"""Operators of torchvision that its import asks for, where its library was built for another PyTorch.

The wheel of the package index does not load beside a CPU build of PyTorch. Its import then fails because it
describes operators that do not exist. Here they are declared, and non-maximum suppression, which detectors
need in training, is written in Python; `roi_align` has a version in Python in torchvision itself.
"""

from __future__ import annotations

import importlib.util

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


def _nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Indices of boxes that overlap no better one by more than the threshold."""
    left, order = boxes.detach(), scores.detach().argsort(descending=True, stable=True)
    kept = []
    while order.numel():
        best, order = order[0], order[1:]
        kept.append(best)
        low = torch.maximum(left[best, :2], left[order, :2])
        high = torch.minimum(left[best, 2:], left[order, 2:])
        common = (high - low).clamp(min=0).prod(1)
        area = (left[:, 2:] - left[:, :2]).prod(1)
        order = order[common / (area[best] + area[order] - common) <= threshold]
    return torch.stack(kept) if kept else torch.zeros(0, dtype=torch.long)
