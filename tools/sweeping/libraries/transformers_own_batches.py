# SPDX-License-Identifier: Apache-2.0
"""Batches that the parameters of a forward do not say: class → parameter → what to give for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sweeping.libraries.transformers_ask import BATCH, LENGTH, PATCHES, Ask, patches, text, video
from sweeping.libraries.transformers_makers import MAKERS

_Maker = Callable[[Ask], Any]


def _text_with(**counts: int) -> _Maker:
    """Text in which so many tokens of a row stand for something else."""

    def made(ask: Ask) -> Tensor:
        tokens = {name: BATCH * count for name, count in counts.items()}
        ask.description = {**ask.description, "tokens": tokens}
        ask.length = sum(counts.values()) + 8
        return text(ask)

    return made


def _kinds(maker: _Maker) -> _Maker:
    """Which tokens of such a text stand for a picture."""
    return lambda ask: (maker(ask) == int(ask.field("image_token_id"))).long()


def _separated(ask: Ask) -> Tensor:
    """Text with the three separators of a question and its context."""
    ids = text(ask)
    ids[..., [5, 6, ask.length - 1]] = int(ask.field("sep_token_id"))
    return ids


def _codes(*names: str, length: int = LENGTH) -> _Maker:
    """Codes of an audio codec; the first of the names that a configuration has says how many."""
    return lambda ask: ask.ids(BATCH, int(ask.field(*names)), length, low=0, high=30)


def _codes_of(length: int) -> _Maker:
    return lambda ask: ask.ids(BATCH, length, low=0, high=30)


def _talker_text(ask: Ask) -> Tensor:
    return ask.floats(BATCH, LENGTH, int(ask.field("embedding_size")))


def _modalities(ask: Ask) -> dict[str, Tensor]:
    return {
        "image": ask.floats(2, 2, 3, 16, 16),
        "audio": ask.floats(2, 128, 1),
        "label": torch.zeros(2, 7),
    }


def _points(ask: Ask) -> dict[str, Tensor | None]:
    return {"image": torch.arange(64), "audio": torch.arange(4), "label": None}


def _rows(*shape: int) -> _Maker:
    return lambda ask: ask.floats(BATCH, *shape)


def _ones(*shape: int) -> _Maker:
    return lambda ask: torch.ones(BATCH, *shape, dtype=torch.long)


def _grid_of(height: int, width: int) -> _Maker:
    return lambda ask: torch.tensor([[1, height, width]] * BATCH)


def _places(side: int) -> _Maker:
    """Column and row of every patch."""
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return lambda ask: torch.stack([column, row], -1).view(1, -1, 2).repeat(BATCH, 1, 1)


_LABELLED: dict[str, _Maker] = {"labels": lambda ask: ask.ids(BATCH, LENGTH, 4, low=0, high=30)}
_MUSIC: dict[str, _Maker] = {
    "input_ids": text,
    "decoder_input_ids": lambda ask: ask.ids(BATCH * 4, LENGTH, low=0, high=30),
}
_DEPTH: dict[str, _Maker] = {"pixel_values": lambda ask: ask.floats(2, 3, 256, 256)}
_VIDEO_BLIP: dict[str, _Maker] = {
    "pixel_values": lambda ask: video(ask),
    "input_ids": _text_with(video=40),
    "qformer_input_ids": lambda ask: ask.ids(BATCH, 8),
}
_CODEC: dict[str, _Maker] = {"input_values": _rows(1, 3200), "input_features": _rows(10, 64)}
_PATCHES_OF_ONE: dict[str, _Maker] = {
    "pixel_values": lambda ask: ask.floats(1, BATCH * PATCHES, 3, 8, 8),
    "grid_thw": _grid_of(4, 4),
}
_CAMERA: dict[str, _Maker] = {
    "input_ids": _text_with(image=64),
    "pixel_values": _rows(1, 3, 64, 64),
    "pixel_attention_mask": lambda ask: torch.ones(BATCH, 1, dtype=torch.bool),
}
_SOUND_AND_VIDEO: dict[str, _Maker] = {
    "input_values": _rows(1, 4 * 1920),
    "pixel_values_videos": _rows(4, 3, 64, 64),
}
_UNITS: dict[str, _Maker] = {
    "inputs_embeds": _rows(LENGTH, 64),
    "decoder_input_ids": lambda ask: ask.ids(BATCH, 12),
}
_VIDEO_AND_TEXT: dict[str, _Maker] = {  # it takes one at a time
    "input_ids": lambda ask: ask.ids(1, LENGTH),
    "pixel_values": lambda ask: ask.floats(1, 4, 3, 64, 64),
}
_SPOKEN: dict[str, _Maker] = {
    "input_ids": lambda ask: ask.ids(BATCH, 8),
    "input_features": _rows(16, 64),
}
_PAIRS: dict[str, _Maker] = {"pixel_values": lambda ask: ask.floats(2, 2, 3, 64, 64)}

OWN_BATCHES: dict[str, dict[str, _Maker]] = {
    "Blip2QFormerModel": {
        "query_embeds": _rows(10, 64),
        "encoder_hidden_states": lambda ask: ask.floats(BATCH, 12, int(ask.field("encoder_hidden_size"))),
    },
    "ColQwen2ForRetrieval": {
        "input_ids": text,
        "pixel_values": lambda ask: patches(ask).view(BATCH, PATCHES, -1),
        "image_grid_thw": _grid_of(4, 4),
    },
    "DepthProModel": _DEPTH,
    "DepthProForDepthEstimation": _DEPTH,
    "EfficientLoFTRModel": _PAIRS,
    "EfficientLoFTRForKeypointMatching": _PAIRS,
    "EsmForProteinFolding": {"input_ids": lambda ask: ask.ids(2, 12, low=0, high=19)},
    "FunAsrNanoEncoder": {"input_features": _rows(32, 112), "input_features_mask": _ones(32)},
    "Gemma3nAudioEncoder": {
        "audio_mel": _rows(32, 128),
        "audio_mel_mask": lambda ask: torch.zeros(BATCH, 32, dtype=torch.bool),
    },
    "Gemma4VisionModel": {"pixel_values": _rows(36, 192), "pixel_position_ids": _places(6)},
    "HunYuanVLForConditionalGeneration": {
        "input_ids": _text_with(image=8),
        "pixel_values": patches,
        "image_grid_thw": _grid_of(4, 4),
        "mm_token_type_ids": _kinds(_text_with(image=8)),
        "labels": lambda ask: ask.ids(BATCH, 16),
    },
    "InklingAudioModel": {"audio_input_ids": lambda ask: ask.ids(BATCH, LENGTH, 16, low=0)},
    "InklingVisionModel": {"pixel_values": _rows(2, 8, 8, 3)},
    "Inkling2VisionModel": {
        "pixel_values": lambda ask: ask.floats(4 * BATCH, 16, 16, 3),
        "image_grid_thw": _grid_of(2, 2),
    },
    "InstructBlipVideoModel": _VIDEO_BLIP,
    "InstructBlipVideoForConditionalGeneration": _VIDEO_BLIP,
    "InstructBlipVideoVisionModel": {"pixel_values": lambda ask: ask.images()},
    "JevForDecision": {
        "input_ids": lambda ask: ask.ids(1, LENGTH),
        "marks": lambda ask: torch.tensor([[4, 10, 20]]),
        "num_options": lambda ask: torch.tensor([[2, 2, 3]]),
        "question_type_ids": lambda ask: torch.tensor([[0, 1, 2]]),
    },
    "LongformerForMultipleChoice": {
        "input_ids": _separated,
        "labels": lambda ask: ask.ids(BATCH, low=0, high=2),
    },
    "LongformerForQuestionAnswering": {
        "input_ids": _separated,
        "start_positions": lambda ask: torch.tensor([8] * BATCH),
        "end_positions": lambda ask: torch.tensor([9] * BATCH),
    },
    "LukeForEntitySpanClassification": {
        "input_ids": text,
        "entity_ids": lambda ask: ask.ids(BATCH, 3, low=1, high=30),
        "entity_attention_mask": _ones(3),
        "entity_position_ids": lambda ask: torch.arange(3)[None, :, None].expand(BATCH, 3, 4).clone(),
        "entity_start_positions": lambda ask: torch.tensor([[0, 1, 2]] * BATCH),
        "entity_end_positions": lambda ask: torch.tensor([[1, 2, 3]] * BATCH),
    },
    "MimiDecoderModel": {"latents": _rows(64, 8)},
    "Molmo2Adapter": {
        "image_features": _rows(PATCHES, 128),
        "pooled_patches_idx": lambda ask: torch.arange(BATCH * PATCHES).view(-1, 4),
    },
    "Molmo2VisionModel": {"pixel_values": _rows(64, 192)},
    "MoshiForConditionalGeneration": {
        "input_ids": text,
        "moshi_audio_codes": _codes("num_codebooks"),
        "user_audio_codes": _codes("num_codebooks"),
    },
    "MuseGlimmerAssistantModel": {
        "noise_embeds": _rows(16, 64),
        "context_hidden_states": lambda ask: ask.floats(BATCH, 12, 64 * len(ask.config.target_layer_ids)),
    },
    "MusicgenForConditionalGeneration": _MUSIC | _LABELLED,
    "MusicgenMelodyForConditionalGeneration": _MUSIC | {"input_features": _rows(16, 12)} | _LABELLED,
    "NeuCodecModel": _CODEC,
    "Xcodec2Model": _CODEC,
    "OmDetTurboForObjectDetection": {
        "pixel_values": lambda ask: ask.images(),
        "classes_input_ids": lambda ask: ask.ids(2 * BATCH, 8),
        "classes_attention_mask": lambda ask: torch.ones(2 * BATCH, 8, dtype=torch.long),
        "tasks_input_ids": lambda ask: ask.ids(BATCH, 8),
        "tasks_attention_mask": _ones(8),
        "classes_structure": lambda ask: torch.tensor([2] * BATCH),
    },
    "PaddleOCRVisionModel": _PATCHES_OF_ONE,
    "PaddleOCRVisionTransformer": _PATCHES_OF_ONE,
    "PaddleOCRVLForConditionalGeneration": {
        "input_ids": _text_with(image=4),
        "pixel_values": lambda ask: ask.floats(BATCH * PATCHES, 3, 8, 8),
        "image_grid_thw": _grid_of(4, 4),
        "mm_token_type_ids": _kinds(_text_with(image=4)),
        "labels": lambda ask: ask.ids(BATCH, 12),
    },
    "PeAudioVideoEncoder": _SOUND_AND_VIDEO,
    "PeAudioVideoModel": _SOUND_AND_VIDEO,
    "PerceiverForMultimodalAutoencoding": {"inputs": _modalities, "subsampled_output_points": _points},
    "PerceiverForOpticalFlow": {"inputs": lambda ask: ask.floats(2, 2, 27, 32, 32)},
    "Phi4MultimodalAudioModel": {
        "hidden_states": _rows(64, 64),
        "mask": lambda ask: torch.ones(BATCH, 64, dtype=torch.bool),
    },
    "PI0Model": {"action_embeds": _rows(5, 64)} | _CAMERA,
    "PI0ForConditionalGeneration": {name: MAKERS[name] for name in ("state", "actions")} | _CAMERA,
    "PocketTTSAudioTokenizerDecoderModel": {"latents": _rows(64, 8)},
    "PPDocLayoutV2ReadingOrder": {
        "boxes": lambda ask: ask.ids(BATCH, 6, 4, low=0, high=30).cumsum(-1),
        "labels": lambda ask: ask.ids(BATCH, 6, low=0, high=10),
        "mask": lambda ask: torch.ones(BATCH, 6, dtype=torch.bool),
    },
    "PPOCRV5MobileDetModel": {"hidden_states": _rows(3, 64, 64)},
    "Qwen2_5OmniTalkerForConditionalGeneration": {"inputs_embeds": _talker_text},
    "Qwen2_5OmniThinkerForConditionalGeneration": {
        "input_ids": _text_with(audio=16),
        "input_features": _rows(16, 64),
        "feature_attention_mask": _ones(64),
        "labels": lambda ask: ask.ids(BATCH, LENGTH),
    },
    "Qwen2_5OmniToken2WavBigVGANModel": {"mel_spectrogram": _rows(64, 8)},
    "Qwen2_5OmniToken2WavDiTModel": {
        "hidden_states": _rows(16, 64),
        "condition_vector": _rows(16, 64),
        "speaker_embedding": _rows(16, 64),
        "quantized_code": _codes_of(8),
        "time_step": lambda ask: torch.rand(BATCH, generator=ask.generator),
    },
    "Qwen2_5OmniToken2WavModel": {
        "code": _codes_of(8),
        "conditioning": _rows(64),
        "reference_mel": _rows(16, 64),
    },
    "Qwen3ASREncoder": {"input_features": _rows(16, 200), "input_features_mask": _ones(200)},
    "Qwen3OmniMoeCode2WavTransformerModel": {"inputs_embeds": _rows(LENGTH, 64)},
    "Qwen3OmniMoeTalkerCodePredictorModel": {"inputs_embeds": _rows(LENGTH, 64)},
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": {"inputs_embeds": _rows(4, 64)},
    "Qwen3OmniMoeTalkerForConditionalGeneration": {"inputs_embeds": _rows(LENGTH, 64)},
    "Qwen3OmniMoeTalkerModel": {"inputs_embeds": _rows(LENGTH, 64)},
    "SeamlessM4TTextToUnitModel": _UNITS,
    "SeamlessM4TTextToUnitForConditionalGeneration": _UNITS,
    "SLANeXtBackbone": {"hidden_states": lambda ask: ask.images()},
    "SpeechT5Model": {"input_values": _rows(LENGTH, 64), "decoder_input_values": _rows(12, 64)},
    "SwinForMaskedImageModeling": {
        "pixel_values": lambda ask: ask.images(),
        "bool_masked_pos": MAKERS["bool_masked_pos"],
    },
    "TvpModel": _VIDEO_AND_TEXT,
    "TvpForVideoGrounding": _VIDEO_AND_TEXT,
    "UVDocBridge": {"hidden_states": _rows(128, 8, 8)},
    "VibeVoiceAcousticTokenizerDecoderModel": {"hidden_states": _rows(64, 4)},
    "VibeVoiceAcousticTokenizerEncoderModel": {"hidden_states": _rows(1, 6400)},
    "VisualBertForRegionToPhraseAlignment": {
        name: MAKERS[name] for name in ("input_ids", "visual_embeds", "visual_attention_mask")
    }
    | {
        "attention_mask": lambda ask: torch.ones(BATCH, LENGTH),
        "region_to_phrase_position": lambda ask: ask.ids(BATCH, LENGTH + 4, low=0, high=LENGTH),
        "labels": lambda ask: ask.floats(BATCH, LENGTH + 4, 4).softmax(-1),
    },
    "VoxtralRealtimeModel": _SPOKEN,
    "VoxtralRealtimeForConditionalGeneration": _SPOKEN | {"labels": lambda ask: ask.ids(BATCH, 8)},
    "WavTokenizerEncoderModel": {"input_values": _rows(1, 3200)},
    "XcodecModel": {"input_values": _rows(1, 3200)},
}
