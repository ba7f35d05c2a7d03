# SPDX-License-Identifier: Apache-2.0
"""Models of torchvision: for each task the smallest of each file, with small pictures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sweeping.libraries import torchvision_ops
from sweeping.subject import Attempts, Made, Recipe, leaves, usual_loss

torchvision_ops.declare()

from torchvision import models  # noqa: E402

DISTRIBUTIONS = ("torch", "torchvision")

_SMALLEST = {
    "alexnet": ("alexnet",),
    "convnext": ("convnext_tiny",),
    "densenet": ("densenet121",),
    "efficientnet": ("efficientnet_b0", "efficientnet_v2_s"),
    "googlenet": ("googlenet",),
    "inception": ("inception_v3",),
    "maxvit": ("maxvit_t",),
    "mnasnet": ("mnasnet0_5",),
    "mobilenet": ("mobilenet_v2", "mobilenet_v3_small"),
    "regnet": ("regnet_x_400mf", "regnet_y_400mf"),
    "resnet": ("resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2"),
    "shufflenet": ("shufflenet_v2_x0_5",),
    "squeezenet": ("squeezenet1_0", "squeezenet1_1"),
    "swin": ("swin_t", "swin_v2_t"),
    "vgg": ("vgg11", "vgg11_bn"),
    "vit": ("vit_b_16",),
    "segmentation": ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"),
    "detection": (
        "fasterrcnn_mobilenet_v3_large_320_fpn", "fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2",
        "fcos_resnet50_fpn", "keypointrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2",
        "retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2", "ssd300_vgg16",
        "ssdlite320_mobilenet_v3_large",
    ),
    "video": ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b", "mvit_v2_s", "swin3d_t"),
    "optical_flow": ("raft_small", "raft_large"),
}  # fmt: skip

_SIZES = (64, 128, 224)
_FEW_BOXES = {"rpn_pre_nms_top_n_train": 200, "rpn_post_nms_top_n_train": 100, "box_batch_size_per_image": 16}
"""As many as small pictures have room for: suppression of boxes is written in Python here."""
_BATCH = 2
_CLASSES = 5


def names() -> list[str]:
    return [f"{task}.{name}" for task, of_task in _SMALLEST.items() for name in of_task]


def attempts(name: str) -> Attempts:
    task = name.split(".")[0]
    if task == "optical_flow":
        yield {"size": 128}
        return
    for size in (299,) if task == "inception" else _SIZES:
        yield {"size": size}


def make(name: str, recipe: Recipe) -> Made:
    task, name = name.split(".")
    size = recipe["size"]
    given: dict[str, Any] = {"weights": None}
    if task in ("segmentation", "detection"):
        given["weights_backbone"] = None
    if task != "optical_flow":
        given["num_classes"] = _CLASSES
    if task == "vit" or name == "maxvit_t":
        given |= {"image_size": size} if task == "vit" else {"input_size": (size, size)}
    if task == "detection" and "ssd" not in name:
        given |= {"min_size": size, "max_size": size, "trainable_backbone_layers": 5}
    if "rcnn" in name:
        given |= _FEW_BOXES
    if name in ("googlenet", "inception_v3"):
        given["init_weights"] = False
    model = models.get_model(name, **given).train()
    if task == "detection":
        return Made(model, lambda step: _detection(name, size, step), _sum_of_losses)
    if task == "optical_flow":
        return Made(model, lambda step: ((_pictures(step, size), _pictures(step + 50, size)), {}), usual_loss)
    if task == "video":
        frames = 16
        return Made(model, lambda step: ((_pictures(step, size, frames),), {}), usual_loss)
    return Made(model, lambda step: ((_pictures(step, size),), {}), usual_loss)


def _pictures(step: int, size: int, *frames: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(_BATCH, 3, *frames, size, size, generator=generator)


def _detection(name: str, size: int, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    images = [torch.rand(3, size, size, generator=generator) for _ in range(_BATCH)]
    targets = []
    for _ in images:
        corner = torch.rand(2, 2, generator=generator) * size / 2
        target = {"boxes": torch.cat([corner, corner + size / 4], 1), "labels": torch.tensor([1, 2])}
        if "mask" in name:
            target["masks"] = torch.randint(0, 2, (2, size, size), dtype=torch.uint8, generator=generator)
        if "keypoint" in name:
            points = corner[:, None] + torch.rand(2, 17, 2, generator=generator) * size / 4
            target["keypoints"] = torch.cat([points, torch.ones(2, 17, 1)], 2)
            target["labels"] = torch.ones(2, dtype=torch.long)
        targets.append(target)
    return (images, targets), {}


def _sum_of_losses(output: Any) -> Tensor:
    return torch.stack([item for _, item in leaves(output)]).sum()
