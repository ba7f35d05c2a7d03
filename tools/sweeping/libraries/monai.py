# SPDX-License-Identifier: Apache-2.0
"""Nets of monai, small and in two dimensions where that is possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sweeping.libraries import torchvision_ops
from sweeping.subject import Attempts, Made, Recipe, leaves, usual_loss

torchvision_ops.declare()  # two nets import it

from monai.networks import nets  # noqa: E402
from monai.networks.nets.restormer import Restormer  # noqa: E402

DISTRIBUTIONS = ("torch", "monai")

_FLAT: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_DEEP: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
_UNET: dict[str, Any] = {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1, "dropout": 0.1}
_DIFFUSION: dict[str, Any] = {
    "channels": (8, 16),
    "attention_levels": (False, True),
    "num_res_blocks": 1,
    "norm_num_groups": 4,
    "num_head_channels": 8,
}
_KL: dict[str, Any] = {
    "channels": (8, 16),
    "attention_levels": (False, False),
    "num_res_blocks": (1, 1),
    "latent_channels": 3,
    "norm_num_groups": 4,
}


def _voxel_morph() -> Any:
    return nets.VoxelMorphUNet(
        spatial_dims=2, in_channels=2, unet_out_channels=8, channels=(8, 8, 8, 8), final_conv_channels=(8,)
    )


NETS: dict[str, tuple[dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "AttentionUnet": (
        _FLAT | {"channels": (8, 16, 32), "strides": (2, 2), "dropout": 0.1},
        ((2, 1, 64, 64),),
    ),
    "AutoEncoder": (_FLAT | {"channels": (8, 16), "strides": (2, 2)}, ((2, 1, 64, 64),)),
    "AutoencoderKL": (_FLAT | _KL, ((2, 1, 32, 32),)),
    "BasicUNet": (_FLAT | {"features": (8, 8, 16, 32, 32, 8)}, ((2, 1, 64, 64),)),
    "BasicUNetPlusPlus": (_FLAT | {"features": (8, 8, 16, 32, 32, 8)}, ((2, 1, 64, 64),)),
    "Classifier": (
        {"in_shape": (1, 32, 32), "classes": 3, "channels": (8, 16), "strides": (2, 2)},
        ((2, 1, 32, 32),),
    ),
    "Critic": ({"in_shape": (1, 32, 32), "channels": (8, 16), "strides": (2, 2)}, ((2, 1, 32, 32),)),
    "DenseNet": (_FLAT | {"init_features": 8, "growth_rate": 8, "block_config": (2, 2)}, ((2, 1, 64, 64),)),
    "DiffusionModelUNet": (_FLAT | _DIFFUSION, ((2, 1, 32, 32), (2,))),
    "Discriminator": ({"in_shape": (1, 32, 32), "channels": (8, 16), "strides": (2, 2)}, ((2, 1, 32, 32),)),
    "DynUNet": (
        _FLAT | {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2)},
        ((2, 1, 32, 32),),
    ),
    "EfficientNetBN": (
        {
            "model_name": "efficientnet-b0", "pretrained": False, "spatial_dims": 2, "in_channels": 1,
            "num_classes": 3,
        },
        ((2, 1, 64, 64),),
    ),
    "FlexibleUNet": (
        {"in_channels": 1, "out_channels": 2, "backbone": "efficientnet-b0", "spatial_dims": 2},
        ((2, 1, 64, 64),),
    ),
    "FullyConnectedNet": (
        {"in_channels": 16, "out_channels": 3, "hidden_channels": (32, 32), "dropout": 0.1},
        ((64, 16),),
    ),
    "Generator": (
        {"latent_shape": (8,), "start_shape": (8, 4, 4), "channels": (8, 4), "strides": (2, 2)},
        ((4, 8),),
    ),
    "HighResNet": (_FLAT, ((1, 1, 32, 32),)),
    "HoVerNet": ({"mode": "fast", "out_classes": 3}, ((1, 3, 256, 256),)),
    "MaskedAutoEncoderViT": (
        {
            "in_channels": 1, "img_size": 32, "patch_size": 8, "spatial_dims": 2, "hidden_size": 32,
            "mlp_dim": 64, "num_layers": 2, "num_heads": 2, "decoder_hidden_size": 32, "decoder_mlp_dim": 64,
            "decoder_num_layers": 1, "decoder_num_heads": 2,
        },
        ((2, 1, 32, 32),),
    ),
    "MedNeXtSmall": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, ((1, 1, 64, 64),)),
    "MILModel": ({"num_classes": 3, "pretrained": False, "mil_mode": "att"}, ((2, 2, 3, 64, 64),)),
    "PatchDiscriminator": (
        {"spatial_dims": 2, "channels": 8, "in_channels": 1, "num_layers_d": 2},
        ((2, 1, 64, 64),),
    ),
    "Quicknat": ({"num_classes": 3, "num_channels": 1, "num_filters": 8}, ((1, 1, 64, 64),)),
    "Regressor": (
        {"in_shape": (1, 32, 32), "out_shape": (1,), "channels": (8, 16), "strides": (2, 2)},
        ((2, 1, 32, 32),),
    ),
    "RegUNet": (_FLAT | {"num_channel_initial": 4, "depth": 2}, ((2, 1, 32, 32),)),
    "ResNet": (
        {
            "block": "basic", "layers": (1, 1, 1, 1), "block_inplanes": (8, 16, 16, 32), "spatial_dims": 2,
            "n_input_channels": 1, "num_classes": 3,
        },
        ((2, 1, 64, 64),),
    ),
    "Restormer": (
        {
            "spatial_dims": 2, "in_channels": 1, "out_channels": 1, "dim": 8, "num_blocks": (1, 1, 1, 1),
            "heads": (1, 1, 2, 2), "num_refinement_blocks": 1,
        },
        ((1, 1, 32, 32),),
    ),
    "SegResNet": (
        _FLAT | {"init_filters": 8, "blocks_down": (1, 1, 1), "blocks_up": (1, 1), "dropout_prob": 0.1},
        ((2, 1, 64, 64),),
    ),
    "SegResNetDS": (_FLAT | {"init_filters": 8, "blocks_down": (1, 1, 1)}, ((2, 1, 64, 64),)),
    "SegResNetVAE": (
        {
            "input_image_size": (32, 32), "spatial_dims": 2, "in_channels": 1, "out_channels": 2,
            "init_filters": 8, "blocks_down": (1, 1, 1), "blocks_up": (1, 1),
        },
        ((2, 1, 32, 32),),
    ),
    "SENet": (
        {
            "spatial_dims": 2, "in_channels": 3, "block": "se_resnet_bottleneck", "layers": (1, 1, 1, 1),
            "groups": 1, "reduction": 16, "num_classes": 3,
        },
        ((2, 3, 64, 64),),
    ),
    "SwinUNETR": (
        _FLAT | {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 4), "drop_rate": 0.1},
        ((1, 1, 64, 64),),
    ),
    "TorchVisionFCModel": (
        {
            "model_name": "resnet18", "num_classes": 3, "pretrained": False,
            "pool": ("avg", {"kernel_size": 2, "stride": 1}),
        },
        ((2, 3, 64, 64),),
    ),
    "UNet": (_FLAT | _UNET, ((2, 1, 64, 64),)),
    "UNETR": (
        _FLAT | {"img_size": 32, "feature_size": 8, "hidden_size": 48, "mlp_dim": 64, "num_heads": 4},
        ((1, 1, 32, 32),),
    ),
    "VarAutoEncoder": (
        {
            "spatial_dims": 2, "in_shape": (1, 32, 32), "out_channels": 1, "latent_size": 4,
            "channels": (8, 16), "strides": (2, 2),
        },
        ((2, 1, 32, 32),),
    ),
    "ViT": (
        {
            "in_channels": 1, "img_size": 32, "patch_size": 8, "spatial_dims": 2, "hidden_size": 32,
            "mlp_dim": 64, "num_layers": 3, "num_heads": 2, "classification": True, "dropout_rate": 0.1,
        },
        ((4, 1, 32, 32),),
    ),
    "ViTAutoEnc": (
        {
            "in_channels": 1, "img_size": 32, "patch_size": 4, "spatial_dims": 2, "hidden_size": 32,
            "mlp_dim": 64, "num_layers": 2, "num_heads": 2,
        },
        ((2, 1, 32, 32),),
    ),
    "VNet": (_DEEP, ((1, 1, 32, 32, 32),)),
    "VoxelMorph": (
        {"spatial_dims": 2, "backbone": _voxel_morph},
        ((1, 1, 32, 32), (1, 1, 32, 32)),
    ),
    "VQVAE": (
        _FLAT | {
            "out_channels": 1, "channels": (8, 16), "num_res_channels": (8, 16), "num_res_layers": 1,
            "downsample_parameters": ((2, 4, 1, 1), (2, 4, 1, 1)),
            "upsample_parameters": ((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)), "num_embeddings": 16,
            "embedding_dim": 8,
        },
        ((2, 1, 32, 32),),
    ),
}  # fmt: skip
"""Class → its arguments, and the shapes of what its forward takes; one number alone is a time step."""


def names() -> list[str]:
    return sorted(NETS)


def attempts(name: str) -> Attempts:
    yield {}


def make(name: str, recipe: Recipe) -> Made:
    given, shapes = NETS[name]
    kind = Restormer if name == "Restormer" else getattr(nets, name)  # the package does not export it
    model = kind(**{key: item() if callable(item) else item for key, item in given.items()}).train()
    return Made(model, lambda step: (tuple(_input(shape, step) for shape in shapes), {}), _loss)


def _input(shape: tuple[int, ...], step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if len(shape) == 1:
        return torch.randint(0, 100, shape, generator=generator)
    return torch.rand(*shape, generator=generator)


def _loss(output: Any) -> Tensor:
    """Of all outputs, in lists as well."""
    return usual_loss([item for _, item in leaves(output)])
