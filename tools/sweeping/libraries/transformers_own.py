# SPDX-License-Identifier: Apache-2.0
"""Configurations that the rules for names cannot make: class → fields, or a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Own = dict[str, Any] | Callable[[Any, Callable[..., Any]], Any]
"""Fields that are fixed; or (class of the configuration, `shrink`) → configuration."""


def _bert(shrink: Any, **fixed: Any) -> Any:
    from transformers import BertConfig

    return shrink(BertConfig(), **fixed)


def _vit(shrink: Any) -> Any:
    from transformers import ViTConfig

    return shrink(ViTConfig())


def _encoder_decoder(kind: Any, shrink: Any) -> Any:
    decoder = _bert(shrink, is_decoder=True, add_cross_attention=True)
    config = kind.from_encoder_decoder_configs(_bert(shrink), decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def _vision_encoder_decoder(kind: Any, shrink: Any) -> Any:
    decoder = _bert(shrink, is_decoder=True, add_cross_attention=True)
    config = kind.from_encoder_decoder_configs(_vit(shrink), decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def _speech_encoder_decoder(kind: Any, shrink: Any) -> Any:
    from transformers import Wav2Vec2Config

    decoder = _bert(shrink, is_decoder=True, add_cross_attention=True)
    config = kind.from_encoder_decoder_configs(shrink(Wav2Vec2Config()), decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def _vision_text(kind: Any, shrink: Any) -> Any:
    return kind.from_vision_text_configs(_vit(shrink), _bert(shrink), projection_dim=64)


OWN: dict[str, Own] = {
    "EncoderDecoderConfig": _encoder_decoder,
    "VisionEncoderDecoderConfig": _vision_encoder_decoder,
    "SpeechEncoderDecoderConfig": _speech_encoder_decoder,
    "VisionTextDualEncoderConfig": _vision_text,
}
