# SPDX-License-Identifier: Apache-2.0
"""Families of architectures that telemetry knows. A class of anybody else's is "other", whatever its name."""

from __future__ import annotations

import itertools
from typing import Final

from torch import nn

__all__ = ["FAMILIES", "OTHER", "family_of"]

OTHER: Final = "other"

_MODULES: Final = {
    "albert": "transformers:albert",
    "bart": "transformers:bart,mbart",
    "bert": "transformers:bert",
    "bloom": "transformers:bloom",
    "clip": "transformers:clip",
    "convnext": "transformers:convnext,convnextv2 torchvision:convnext timm:convnext",
    "deberta": "transformers:deberta,deberta_v2",
    "deepseek": "transformers:deepseek_v2,deepseek_v3",
    "densenet": "torchvision:densenet timm:densenet",
    "detr": "transformers:detr,rt_detr,deformable_detr",
    "diffusion_transformer": "diffusers:transformers",
    "dino": "transformers:dinov2,dinov3_vit",
    "distilbert": "transformers:distilbert",
    "efficientnet": "transformers:efficientnet torchvision:efficientnet timm:efficientnet",
    "electra": "transformers:electra",
    "falcon": "transformers:falcon",
    "gemma": "transformers:gemma,gemma2,gemma3,gemma3n,gemma4",
    "glm": "transformers:glm,glm4,glm4_moe",
    "gpt2": "transformers:gpt2",
    "gpt_neox": "transformers:gpt_neox",
    "gpt_oss": "transformers:gpt_oss",
    "granite": "transformers:granite,granitemoe",
    "hubert": "transformers:hubert",
    "llama": "transformers:llama",
    "llava": "transformers:llava,llava_next,llava_onevision",
    "mamba": "transformers:mamba,mamba2",
    "mistral": "transformers:mistral",
    "mixtral": "transformers:mixtral",
    "mobilenet": "transformers:mobilenet_v1,mobilenet_v2 torchvision:mobilenetv2,mobilenetv3",
    "modernbert": "transformers:modernbert",
    "olmo": "transformers:olmo,olmo2,olmo3,olmoe",
    "opt": "transformers:opt",
    "phi": "transformers:phi,phi3,phimoe",
    "qwen": "transformers:qwen2,qwen2_moe,qwen3,qwen3_moe,qwen3_next,qwen3_5",
    "qwen_vl": "transformers:qwen2_vl,qwen2_5_vl,qwen3_vl",
    "resnet": "transformers:resnet torchvision:resnet timm:resnet",
    "roberta": "transformers:roberta,xlm_roberta",
    "segformer": "transformers:segformer",
    "siglip": "transformers:siglip,siglip2",
    "swin": "transformers:swin,swinv2 torchvision:swin_transformer timm:swin_transformer",
    "t5": "transformers:t5,mt5,umt5",
    "unet": "diffusers:unets",
    "vgg": "torchvision:vgg timm:vgg",
    "vit": "transformers:vit,deit torchvision:vision_transformer timm:vision_transformer",
    "wav2vec2": "transformers:wav2vec2",
    "whisper": "transformers:whisper",
}
"""Family → modules below `models` of public packages, whose classes are of it."""

FAMILIES: Final = (*_MODULES, OTHER)
"""Every answer of `family_of`."""

_FAMILY_OF: Final = {
    f"{package}.models.{module}": family
    for family, places in _MODULES.items()
    for package, _, modules in (place.partition(":") for place in places.split())
    for module in modules.split(",")
}

_MOST_MODULES: Final = 64
"""A model that is wrapped in others, such as adapters, is among the first ones."""


def family_of(model: nn.Module) -> str:
    """The family of a model, or of the first part of it that has a known one.

    Args:
        model: the module. Its class and its bases count, and those of its parts, by where they are defined.
    """
    for part in itertools.islice(model.modules(), _MOST_MODULES):
        for kind in type(part).__mro__:
            place = ".".join(str(kind.__module__).split(".")[:3])
            if place in _FAMILY_OF:
                return _FAMILY_OF[place]
    return OTHER
