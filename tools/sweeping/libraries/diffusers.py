# SPDX-License-Identifier: Apache-2.0
"""Nets of diffusers, small: for each its arguments and what its forward takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sweeping.libraries import torchvision_ops
from sweeping.subject import Attempts, Made, Recipe, usual_loss

torchvision_ops.declare()

import diffusers  # noqa: E402

DISTRIBUTIONS = ("torch", "diffusers")

_PAIR: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
_UNET: dict[str, Any] = _PAIR | {"sample_size": 16, "in_channels": 4, "out_channels": 4}
_KL: dict[str, Any] = _PAIR | {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
_CROSS: dict[str, Any] = {"cross_attention_dim": 16, "attention_head_dim": 4}
_DIT: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3}

Given = dict[str, Any]
"""Parameter of a forward → shape of random numbers, or a value."""

_SAMPLE: Given = {"sample": (2, 4, 16, 16), "timestep": 10}
_TEXT: Given = {"encoder_hidden_states": (2, 6, 16)}

NETS: dict[str, tuple[dict[str, Any], Given]] = {
    "UNet1DModel": (
        {
            "block_out_channels": (8, 8, 16, 16), "sample_size": 32, "in_channels": 4, "out_channels": 4,
            "time_embedding_type": "positional", "use_timestep_embedding": True, "flip_sin_to_cos": False,
            "freq_shift": 1.0, "out_block_type": "OutConv1DBlock", "mid_block_type": "MidResTemporalBlock1D",
            "down_block_types": ("DownResnetBlock1D",) * 4, "up_block_types": ("UpResnetBlock1D",) * 3,
            "act_fn": "swish",
        },
        {"sample": (2, 4, 32), "timestep": 10},
    ),
    "UNet2DModel": (
        _UNET | {
            "attention_head_dim": 4, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "dropout": 0.1,
        },
        _SAMPLE,
    ),
    "UNet2DModel:fir": (
        _UNET | {
            "in_channels": 3, "out_channels": 3, "attention_head_dim": 4,
            "down_block_types": ("SkipDownBlock2D", "AttnSkipDownBlock2D"),
            "up_block_types": ("AttnSkipUpBlock2D", "SkipUpBlock2D"), "norm_num_groups": None,
            "block_out_channels": (32, 64), "time_embedding_type": "fourier",
        },
        {"sample": (2, 3, 16, 16), "timestep": 10},
    ),
    "UNet2DConditionModel": (
        _UNET | _CROSS | {
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        },
        _SAMPLE | _TEXT,
    ),
    "UNet3DConditionModel": (
        _UNET | _CROSS | {
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        {"sample": (1, 4, 3, 16, 16), "timestep": 10, "encoder_hidden_states": (1, 6, 16)},
    ),
    "UNetMotionModel": (
        _UNET | {
            "cross_attention_dim": 16, "num_attention_heads": 2, "motion_num_attention_heads": 2,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
        },
        {"sample": (1, 4, 3, 16, 16), "timestep": 10, "encoder_hidden_states": (3, 6, 16)},
    ),
    "UNetSpatioTemporalConditionModel": (
        {
            "block_out_channels": (32, 64), "layers_per_block": 1, "in_channels": 8, "out_channels": 4,
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "cross_attention_dim": 16, "num_attention_heads": 2, "projection_class_embeddings_input_dim": 24,
            "addition_time_embed_dim": 8,
        },
        {
            "sample": (1, 3, 8, 16, 16), "timestep": 10, "encoder_hidden_states": (1, 1, 16),
            "added_time_ids": (1, 3),
        },
    ),
    "UVit2DModel": (
        {
            "hidden_size": 32, "vocab_size": 32, "codebook_size": 24, "in_channels": 16,
            "block_out_channels": 16, "num_attention_heads": 2, "num_hidden_layers": 2,
            "intermediate_size": 64, "encoder_hidden_size": 16, "cond_embed_dim": 16,
            "micro_cond_encode_dim": 4, "micro_cond_embed_dim": 20, "block_num_heads": 2, "num_res_blocks": 1,
            "sample_size": 8,
        },
        {
            "input_ids": ("ids", 24, (2, 8, 8)), "encoder_hidden_states": (2, 6, 16),
            "pooled_text_emb": (2, 16), "micro_conds": (2, 5),
        },
    ),
    "ControlNetModel": (
        _PAIR | _CROSS | {
            "in_channels": 4, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "conditioning_embedding_out_channels": (8, 16),
        },
        _SAMPLE | _TEXT | {"controlnet_cond": (2, 3, 32, 32)},
    ),
    "AutoencoderKL": (_KL | {"latent_channels": 4}, {"sample": (2, 3, 32, 32)}),
    "AsymmetricAutoencoderKL": (
        {
            "down_block_out_channels": (8, 16), "layers_per_down_block": 1, "up_block_out_channels": (8, 16),
            "layers_per_up_block": 1, "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4,
        },
        {"sample": (2, 3, 32, 32), "mask": (2, 1, 32, 32)},
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1),
        },
        {"sample": (2, 3, 32, 32)},
    ),
    "AutoencoderKLTemporalDecoder": (
        {
            "block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2,
            "layers_per_block": 1,
        },
        {"sample": (2, 3, 32, 32), "num_frames": 2},
    ),
    "AutoencoderOobleck": (
        {
            "encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_channels": 8,
            "decoder_input_channels": 4, "channel_multiples": [1, 2],
        },
        {"sample": (2, 2, 64)},
    ),
    "VQModel": (_KL | {"latent_channels": 3, "num_vq_embeddings": 32}, {"sample": (2, 3, 32, 32)}),
    "Transformer2DModel": (
        _DIT | {"in_channels": 8, "norm_num_groups": 4, "cross_attention_dim": 16},
        {"hidden_states": (2, 8, 16, 16), "encoder_hidden_states": (2, 6, 16)},
    ),
    "DiTTransformer2DModel": (
        _DIT | {
            "in_channels": 4, "out_channels": 8, "sample_size": 16, "patch_size": 2,
            "num_embeds_ada_norm": 10, "norm_num_groups": 4,
        },
        {"hidden_states": (2, 4, 16, 16), "timestep": ("ids", 100, (2,)), "class_labels": ("ids", 10, (2,))},
    ),
    "PixArtTransformer2DModel": (
        _DIT | {
            "in_channels": 4, "out_channels": 8, "sample_size": 16, "cross_attention_dim": 32,
            "caption_channels": 16, "norm_num_groups": 4, "use_additional_conditions": False,
        },
        {
            "hidden_states": (2, 4, 16, 16), "encoder_hidden_states": (2, 6, 16),
            "timestep": ("ids", 100, (2,)), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "SD3Transformer2DModel": (
        _DIT | {
            "sample_size": 16, "patch_size": 2, "in_channels": 4, "joint_attention_dim": 16,
            "caption_projection_dim": 32, "pooled_projection_dim": 16, "out_channels": 4,
        },
        {
            "hidden_states": (2, 4, 16, 16), "encoder_hidden_states": (2, 6, 16),
            "pooled_projections": (2, 16), "timestep": ("ids", 100, (2,)),
        },
    ),
    "FluxTransformer2DModel": (
        {
            "patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2,
            "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16,
            "pooled_projection_dim": 16, "axes_dims_rope": [4, 4, 8],
        },
        {
            "hidden_states": (2, 64, 4), "encoder_hidden_states": (2, 6, 16), "pooled_projections": (2, 16),
            "timestep": (2,), "img_ids": (64, 3), "txt_ids": (6, 3),
        },
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1,
            "num_single_dit_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
            "joint_attention_dim": 16, "caption_projection_dim": 32, "out_channels": 4,
            "pos_embed_max_size": 256,
        },
        {"hidden_states": (2, 4, 16, 16), "encoder_hidden_states": (2, 6, 16), "timestep": (2,)},
    ),
    "CogVideoXTransformer3DModel": (
        _DIT | {
            "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16, "sample_width": 8,
            "sample_height": 8, "sample_frames": 9, "patch_size": 2, "temporal_compression_ratio": 4,
            "max_text_seq_length": 6,
        },
        {
            "hidden_states": (1, 3, 4, 8, 8), "encoder_hidden_states": (1, 6, 16),
            "timestep": ("ids", 100, (1,)),
        },
    ),
    "LTXVideoTransformer3DModel": (
        _DIT | {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 16},
        {
            "hidden_states": (2, 64, 8), "encoder_hidden_states": (2, 6, 16), "timestep": ("ids", 100, (2,)),
            "encoder_attention_mask": ("ones", 1, (2, 6)), "num_frames": 4, "height": 4, "width": 4,
        },
    ),
    "WanTransformer3DModel": (
        _DIT | {
            "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 64,
            "patch_size": (1, 2, 2),
        },
        {
            "hidden_states": (1, 4, 2, 16, 16), "encoder_hidden_states": (1, 6, 16),
            "timestep": ("ids", 100, (1,)),
        },
    ),
    "SanaTransformer2DModel": (
        _DIT | {
            "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 16,
            "sample_size": 16,
        },
        {
            "hidden_states": (2, 4, 16, 16), "encoder_hidden_states": (2, 6, 16),
            "timestep": ("ids", 100, (2,)),
        },
    ),
    "LuminaNextDiT2DModel": (
        {
            "sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 32, "num_layers": 2,
            "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16, "cross_attention_dim": 16,
        },
        {
            "hidden_states": (2, 4, 16, 16), "encoder_hidden_states": (2, 6, 16), "timestep": (2,),
            "encoder_mask": ("ones", 1, (2, 6)), "image_rotary_emb": "lumina", "cross_attention_kwargs": {},
        },
    ),
    "PriorTransformer": (
        _DIT | {"embedding_dim": 16, "num_embeddings": 7, "additional_embeddings": 4},
        {
            "hidden_states": (4, 16), "timestep": 2, "proj_embedding": (4, 16),
            "encoder_hidden_states": (4, 7, 16),
        },
    ),
    "TransformerTemporalModel": (
        _DIT | {"in_channels": 8, "norm_num_groups": 4},
        {"hidden_states": (8, 8, 8, 8), "num_frames": 4},
    ),
}  # fmt: skip


def names() -> list[str]:
    return sorted(NETS)


def attempts(name: str) -> Attempts:
    yield {}


def make(name: str, recipe: Recipe) -> Made:
    arguments, given = NETS[name]
    model = getattr(diffusers, name.partition(":")[0], None) or _deep(name)
    net = model(**arguments).train()
    return Made(net, lambda step: ((), _batch(given, step)), usual_loss)


def _deep(name: str) -> Callable[..., Any]:
    """Some nets stand only in the package of models."""
    from diffusers import models

    found: Callable[..., Any] = getattr(models, name)
    return found


def _batch(given: Given, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    made: dict[str, Any] = {}
    for name, item in given.items():
        if isinstance(item, tuple) and item[0] == "ids":
            made[name] = torch.randint(0, item[1], item[2], generator=generator)
        elif isinstance(item, tuple) and item[0] == "ones":
            made[name] = torch.ones(item[2], dtype=torch.long)
        elif isinstance(item, tuple):
            made[name] = torch.randn(*item, generator=generator)
        elif item == "lumina":
            from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

            made[name] = get_2d_rotary_pos_embed_lumina(16, 384, 384)
        else:
            made[name] = item
    return made
