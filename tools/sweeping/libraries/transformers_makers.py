# SPDX-License-Identifier: Apache-2.0
"""What to give for each parameter of a forward of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sweeping.libraries.transformers_ask import (
    BATCH,
    FRAMES,
    PATCHES,
    SOUND,
    Ask,
    boxes,
    class_labels,
    features,
    images_or_more,
    labels,
    mask,
    masks,
    pair,
    patches,
    text,
    video,
)

_Maker = Callable[[Ask], Any]


def _grid(ask: Ask) -> Tensor:
    return torch.tensor([[1, 4, 4]] * BATCH)


def _sound(ask: Ask) -> Tensor:
    if ask.description.get("sound") == "spectrum":
        return ask.floats(
            BATCH,
            int(ask.field("max_length", default=FRAMES)),
            int(ask.field("num_mel_bins", "feature_size", "input_size", default=16)),
        )
    samples = ask.description.get("samples", SOUND)
    return ask.floats(BATCH, *([1] if ask.description.get("sound") == "channel" else []), samples)


def _series(ask: Ask) -> Tensor:
    length = int(ask.field("context_length", default=32)) + max(ask.field("lags_sequence", default=[0]))
    channels = ask.field("num_input_channels", "input_size", default=1)
    return (
        ask.floats(BATCH, length, channels)
        if channels > 1 or "Patch" in ask.name
        else ask.floats(BATCH, length)
    )


def _series_times(ask: Ask) -> Tensor:
    return ask.floats(*_series(ask).shape[:2], int(ask.field("num_time_features", default=1)))


def _future(ask: Ask) -> Tensor:
    length, channels = (
        int(ask.field("prediction_length", default=4) or 4),
        ask.field("num_input_channels", "input_size", default=1),
    )
    return (
        ask.floats(BATCH, length, channels)
        if channels > 1 or "Patch" in ask.name
        else ask.floats(BATCH, length)
    )


def _future_times(ask: Ask) -> Tensor:
    return ask.floats(*_future(ask).shape[:2], int(ask.field("num_time_features", default=1)))


def _hidden(ask: Ask) -> Tensor:
    if "grid_thw" in ask.description["names"]:  # a tower that calls its patches so
        return patches(ask)
    if "hidden channels" in ask.description:
        return ask.floats(BATCH, ask.description["hidden channels"], 16, 16)
    return ask.floats(BATCH, ask.length, int(ask.field("hidden_size", "d_model", default=64)))


def _masked_patches(ask: Ask) -> Tensor:
    height, width = ask.images().shape[-2:]
    patch = pair(ask.field("patch_size", default=16))
    count = (height // patch[0]) * (width // patch[1])
    if "VideoMAE" in ask.name:
        count *= int(ask.field("num_frames", default=16)) // int(ask.field("tubelet_size", default=2))
    row = torch.arange(count) % 2 == 0
    return row.expand(BATCH, -1).clone()


MAKERS: dict[str, _Maker] = {
    "input_ids": text,
    "attention_mask": mask,
    "decoder_input_ids": lambda ask: ask.ids(BATCH, ask.length),
    "labels": labels,
    "pixel_values": images_or_more,
    "pixel_values_videos": video,
    "pixel_mask": lambda ask: torch.ones(BATCH, *ask.images().shape[-2:], dtype=torch.long),
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "input_values": _sound,
    "input_features": features,
    "bbox": boxes,
    "start_positions": lambda ask: torch.tensor([1] * BATCH),
    "end_positions": lambda ask: torch.tensor([3] * BATCH),
    "next_sentence_label": lambda ask: torch.tensor([0, 1] * (BATCH // 2)),
    "sentence_order_label": lambda ask: torch.tensor([0, 1] * (BATCH // 2)),
    "return_loss": lambda ask: True,
    "mask_labels": masks,
    "class_labels": class_labels,
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
    "text_input_ids": text,
    "task_inputs": lambda ask: ask.ids(BATCH, int(ask.field("task_seq_len", default=ask.length))),
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
    "actions": lambda ask: (
        ask.floats(BATCH, int(ask.field("chunk_size")), int(ask.field("max_action_dim")))
        if ask.field("max_action_dim")
        else ask.floats(BATCH, 6, int(ask.field("act_dim", default=4)))
    ),
    "rewards": lambda ask: ask.floats(BATCH, 6, 1),
    "returns_to_go": lambda ask: ask.floats(BATCH, 6, 1),
    "timesteps": lambda ask: torch.arange(6).expand(BATCH, -1),
    "spectrogram": lambda ask: ask.floats(
        BATCH, FRAMES, int(ask.field("num_mel_bins", "model_in_channels", "model_in_dim", default=16))
    ),
    "noise_sequence": lambda ask: ask.floats(
        BATCH, FRAMES, int(ask.field("model_in_channels", "model_in_dim", default=16))
    ),
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
    "image_grid_hw": lambda ask: _grid(ask)[:, 1:],
    "target_sizes": lambda ask: _grid(ask)[:, 1:],
    "spatial_shapes": lambda ask: _grid(ask)[:, 1:],
    "merge_sizes": lambda ask: torch.tensor([2] * BATCH),
    "image_merge_sizes": lambda ask: torch.tensor([2] * BATCH),
    "pixel_attention_mask": lambda ask: torch.ones(BATCH, PATCHES, dtype=torch.long),
    "aspect_ratio_ids": lambda ask: torch.ones(BATCH, 1, dtype=torch.long),
    "aspect_ratio_mask": lambda ask: torch.ones(
        BATCH, 1, int(ask.field("max_num_tiles", default=4)), dtype=torch.long
    ),
    "chunk_sample_lengths": lambda ask: torch.tensor([SOUND] * BATCH),
    "state": lambda ask: ask.floats(BATCH, int(ask.field("max_state_dim", default=32))),
    "codes": lambda ask: ask.ids(BATCH, int(ask.field("num_quantizers", default=4)), 8, low=0, high=20),
    "input_features_mask": lambda ask: mask(ask),
    "image_attention_mask": lambda ask: torch.ones(BATCH, ask.length, 2, dtype=torch.long),
    "codebook_idx": lambda ask: 1,
    "spkr_id": lambda ask: torch.zeros(BATCH, 1, dtype=torch.long),
    "lang_id": lambda ask: torch.zeros(BATCH, 1, dtype=torch.long),
    "past_values_padding": lambda ask: torch.zeros_like(_series(ask), dtype=torch.long),
    "freq": lambda ask: torch.zeros(BATCH, 1, dtype=torch.long),
    "image_embeds_position_mask": lambda ask: (
        ((torch.arange(ask.length) > 0) & (torch.arange(ask.length) <= int(ask.field("latent_query_num"))))
        .long()
        .expand(BATCH, -1)
    ),
    "spectrogram_labels": lambda ask: ask.floats(BATCH, 2 * ask.length, int(ask.field("num_mel_bins"))),
    "duration_labels": lambda ask: torch.full((BATCH, ask.length), 2),
    "pitch_labels": lambda ask: ask.floats(BATCH, ask.length, 1),
    "energy_labels": lambda ask: ask.floats(BATCH, ask.length, 1),
    "is_longer": lambda ask: torch.tensor([[True]] * BATCH),
}
"""Parameter of a forward → what to give for it."""


def _places_of_images(ask: Ask) -> Tensor:
    token = int(ask.field("image_token_id", "image_token_index", default=-1))
    fresh = Ask.__new__(Ask)
    fresh.__dict__.update(ask.__dict__, generator=torch.Generator().manual_seed(7))
    return (text(fresh) == token).long()


def _inputs_of_perceiver(ask: Ask) -> Tensor:
    if "MaskedLM" in ask.name or "SequenceClassification" in ask.name:
        return ask.ids(BATCH, ask.length)
    if "Image" in ask.name:
        return ask.floats(BATCH, 3, 224, 224)
    return ask.floats(BATCH, 16, int(ask.field("d_model", default=64)))
