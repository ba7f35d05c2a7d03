# SPDX-License-Identifier: Apache-2.0
"""Configurations that the rules for names cannot make: class → fields, or a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Own = dict[str, Any] | Callable[[Any, Callable[..., Any]], Any]
"""Fields that are fixed, to values or to what a function gives, those inside by names with points; or a
function of (class of the configuration, `shrink`) that gives the configuration."""


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
    encoder = shrink(Wav2Vec2Config(), num_feat_extract_layers=7, apply_spec_augment=False)
    config = kind.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def _vision_text(kind: Any, shrink: Any) -> Any:
    return kind.from_vision_text_configs(_vit(shrink), _bert(shrink), projection_dim=64)


def _letters(count: int, before: str, after: str) -> dict[str, int]:
    """Names of tokens of pictures, with their numbers in letters."""
    found = {"<image>": 98}
    for number in range(count):
        letters = "".join("ABCDEFGHIJ"[int(digit)] for digit in str(number))
        found[before + letters + after] = 40 + number
    return found


def _sapiens(kind: Any, shrink: Any) -> Any:
    from transformers import Sapiens2HeadConfig

    config = shrink(kind())
    config.num_key_value_heads_per_layer = [2] * config.num_hidden_layers
    config.head_config = Sapiens2HeadConfig(
        upsample_out_channels=[16, 16],
        upsample_kernel_sizes=[4, 4],
        conv_out_channels=[16],
        conv_kernel_sizes=[1],
        scale_conv_out_channels=[16],
        scale_conv_kernel_sizes=[1],
        scale_final_hidden_sizes=[16, 1],
    )
    config.head_config._init_scale_final_input_size(
        image_size=config.image_size, patch_size=config.patch_size
    )
    return config


def _tower() -> Any:
    from transformers import TimmWrapperConfig

    model = {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": 64, "patch_size": 16}
    return TimmWrapperConfig(architecture="vit_pe_core_tiny_patch16_384", model_args=model)


def _perception(kind: Any, shrink: Any) -> Any:
    return shrink(kind(vision_config=_tower()), projector_pooling_ratio=2)


def _pooled_tower() -> Any:
    tower = _tower()
    tower.num_labels, tower.global_pool, tower.do_pooling = 64, "map", True
    return tower


def _omdet(kind: Any, shrink: Any) -> Any:
    from transformers import TimmBackboneConfig

    config = shrink(
        kind(),
        class_embed_dim=128,
        text_projection_in_dim=128,
        text_projection_out_dim=128,
        **{"text_config.hidden_size": 128, "text_config.projection_dim": 128},
        vision_features_channels=[64] * 3,
        encoder_in_channels=[128, 256, 512],
    )
    config.apply_layernorm_after_vision_backbone = False
    backbone: dict[str, Any] = {"backbone": "resnet10t", "out_indices": [2, 3, 4]}
    config.backbone_config = TimmBackboneConfig(**backbone)
    config.timm_kwargs = {}
    return config


def _uvdoc_bridge(kind: Any, shrink: Any) -> Any:
    from transformers import UVDocBackboneConfig

    return UVDocBackboneConfig()


def _with_text_in_qformer(kind: Any, shrink: Any) -> Any:
    config = shrink(kind())
    config.qformer_config.use_qformer_text_input = True
    return config


def _small_resnet() -> Any:
    from transformers import TimmWrapperConfig

    given = {"in_chans": 3, "features_only": True, "out_indices": [1, 2, 3, 4]}
    return TimmWrapperConfig(architecture="resnet10t", model_args=given)


def _efficient_loftr(kind: Any, shrink: Any) -> Any:
    return kind(
        hidden_size=64,
        out_features=[16, 16, 32, 64],
        stage_num_blocks=[1, 1, 1, 1],
        num_attention_layers=1,
        num_attention_heads=8,
    )


def _dots_text(kind: Any, shrink: Any) -> Any:
    attention = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "head_dim": 16,
        "v_head_dim": 16,
    }
    return kind(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        shared_experts_intermediate_size=64,
        num_hidden_layers=3,
        n_routed_experts=4,
        num_experts_per_tok=2,
        index_topk=16,
        index_head_dim=16,
        index_n_heads=2,
        sliding_window=8,
        max_position_embeddings=96,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **attention,
        **{f"swa_{name}": size for name, size in attention.items()},
    )


def _dots(kind: Any, shrink: Any) -> Any:
    from transformers import Dots3NoteTextConfig

    config = shrink(kind())
    config.text_config = _dots_text(Dots3NoteTextConfig, shrink)
    return config


def _esm_fold(kind: Any, shrink: Any) -> Any:
    structure = {
        "ipa_dim": 16,
        "num_angles": 7,
        "num_blocks": 2,
        "num_heads_ipa": 4,
        "pairwise_dim": 16,
        "resnet_dim": 16,
        "sequence_dim": 48,
    }
    trunk = {
        "num_blocks": 2,
        "sequence_state_dim": 64,
        "pairwise_state_dim": 16,
        "sequence_head_width": 4,
        "pairwise_head_width": 4,
        "position_bins": 4,
        "chunk_size": 16,
        "structure_module": structure,
    }
    return kind(
        vocab_size=33,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        pad_token_id=1,
        is_folding_model=True,
        esmfold_config={"trunk": trunk, "fp16_esm": False, "lddt_head_hid_dim": 16},
    )


def _block(sizes: dict[str, int]) -> dict[str, Any]:
    """Sizes, strides and paddings of the asymmetric convolutions of PP-OCR."""
    found: dict[str, Any] = {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]}
    for ratio, size in sizes.items():
        half = size // 2
        found |= {
            f"vertical_long_to_small_conv_{ratio}": [[size, 1], [1, 1], [half, 0]],
            f"horizontal_small_to_long_conv_{ratio}": [[1, size], [1, 1], [0, half]],
            f"symmetric_conv_long_{ratio}": [[size, size], [1, 1], [half, half]],
        }
    return found


_PP_OCR_DET: dict[str, Any] = {
    "intraclass_block_config": _block({"longratio": 7, "midratio": 5, "shortratio": 3}),
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
}
_LCNET: dict[str, Any] = {
    "backbone_config.stem_channels": (3, 16, 32),
    "backbone_config.block_configs": [
        [[3, 32, 32, 1, True]],
        [[3, 32, 32, 2, False]],
        [[3, 32, 64, 2, False]],
        [[3, 64, 64, 2, False]],
    ],
    "backbone_config.stage_out_channels": [32, 32, 64, 64],
    "backbone_config.out_indices": [1, 2, 3, 4],
}
_SEW: dict[str, Any] = {
    "conv_dim": [32, 32],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
}
_EFFICIENT: dict[str, Any] = {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320}

_HIFIGAN: dict[str, Any] = {"upsample_initial_channel": 64, "model_in_dim": 16}
_FOUR_MAPS: dict[str, Any] = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}

OWN: dict[str, Own] = {
    "EncoderDecoderConfig": _encoder_decoder,
    "VisionEncoderDecoderConfig": _vision_encoder_decoder,
    "SpeechEncoderDecoderConfig": _speech_encoder_decoder,
    "VisionTextDualEncoderConfig": _vision_text,
    "XmodConfig": {"default_language": "en_XX"},
    "Granite4VisionConfig": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [1],
    },
    "ChameleonConfig": {"vocabulary_map": _letters(32, "IMGIMG", "Z")},
    "Emu3Config": {"vocabulary_map": {"<image>": 90, "<|extra_200|>": 91}},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "LwDetrConfig": {
        "projector_scale_factors": [1.0],
        "projector_in_channels": [64],
        "projector_out_channels": 64,
        "num_feature_levels": 1,
    },
    "PerceiverConfig": {"num_self_attention_heads": 1, "num_cross_attention_heads": 1},
    "LiltConfig": {"hidden_size": 96},
    "TimmBackboneConfig": {"backbone": "resnet10t", "use_pretrained_backbone": False},
    "Llama4VisionConfig": {
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
    "Sapiens2Config": _sapiens,
    "PerceptionLMConfig": _perception,
    "Blip2TextModelWithProjection": _with_text_in_qformer,
    "Blip2ForImageTextRetrieval": _with_text_in_qformer,
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "ShieldGemma2Config": {"yes_token_index": 5, "no_token_index": 6},
    "PPOCRV5ServerDetConfig": _PP_OCR_DET,
    "PPOCRV6MediumDetConfig": _PP_OCR_DET | _LCNET,
    "DeepseekOcr2SamVisionConfig": {"downsample_channels": [32, 64]},
    "ClapAudioConfig": {
        "spec_size": 128,
        "num_mel_bins": 32,
        "patch_embeds_hidden_size": 16,
        "hidden_size": 128,
    },
    "SuperPointConfig": {"keypoint_decoder_dim": 65},
    "BambaConfig": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "GraniteMoeHybridConfig": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
    "NemotronHConfig": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "mamba_num_heads": 8,
    },
    "ReformerConfig": {
        "axial_pos_shape": (4, 6),
        "axial_pos_embds_dim": (32, 32),
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 64},
    "DetrConfig": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "ConditionalDetrConfig": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "ViltForImagesAndTextClassification": {"num_images": 2, "modality_type_vocab_size": 3},
    "SEWConfig": _SEW,
    "SEWDConfig": _SEW,
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "EfficientNetConfig": _EFFICIENT,
    "AlignVisionConfig": _EFFICIENT,
    "AlignConfig": {"projection_dim": 80},
    "LayoutLMv3Config": {"coordinate_size": 10, "shape_size": 12},
    "BridgeTowerConfig": {"contrastive_hidden_size": 64, "logit_scale_init_value": 2.6592},
    "BeitForSemanticSegmentation": _FOUR_MAPS,
    "Data2VecVisionForSemanticSegmentation": _FOUR_MAPS,
    "JevConfig": {"num_verbalizers": 8, "offsets": {"noul": 0, "choice": 2, "score": 4}},
    "Kosmos2Config": {"latent_query_num": 8},
    "MllamaVisionModel": {"intermediate_layers_indices": [0]},
    "Molmo2VisionModel": {"num_position_embeddings": 64},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "MoshiForConditionalGeneration": {"audio_vocab_size": 32},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4},
    "MusicgenForConditionalGeneration": {"decoder.decoder_start_token_id": 1},
    "MusicgenMelodyForConditionalGeneration": {"decoder.decoder_start_token_id": 1},
    "EdgeTamVisionConfig": {
        "backbone_config": _small_resnet,
        "backbone_channel_list": [512, 256, 128, 64],
    },
    "EdgeTamPromptEncoderConfig": {"patch_size": 16},
    "SamPromptEncoderConfig": {"image_embedding_size": 8},
    "SamHQPromptEncoderConfig": {"image_embedding_size": 8},
    "SpeechT5HifiGanConfig": _HIFIGAN,
    "FastSpeech2ConformerHifiGanConfig": _HIFIGAN,
    "MuseGlimmerAssistantConfig": {"layer_types": ["full_attention", "full_attention"]},
    "Dots3NoteAudioConfig": {"feature_size": 16, "conv_output_size": 128, "adapter_input_size": 64},
    "Dots3NoteTextConfig": _dots_text,
    "Dots3NoteConfig": _dots,
    "SamVisionConfig": {"num_pos_feats": 32},
    "SamHQVisionConfig": {"num_pos_feats": 32},
    "Sam2HieraDetConfig": {
        "hidden_size": 16,
        "blocks_per_stage": [1, 2, 1, 1],
        "global_attention_blocks": [2],
    },
    "Sam2PromptEncoderConfig": {"patch_size": 16},
    "Sam3TrackerConfig": {"vision_config.backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]},
    "SwinForMaskedImageModeling": {"window_size": 2, "num_layers": 4},
    "TvpConfig": {"max_img_size": 64, "num_frames": 4, "visual_prompt_size": 16},
    "VitMatteConfig": {"backbone_config.patch_size": 16},
    "PPOCRV6SmallDetConfig": _LCNET | {"layer_list_out_channels": (32, 32, 64, 64)},
    "PPDocLayoutV2ReadingOrderConfig": {"max_2d_position_embeddings": 1024},
    "Phi4MultimodalAudioModel": {
        "nemo_final_size": 8,
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
    },
    "Qwen3ASREncoder": {"n_window": 50},
    "PPDocLayoutV2Config": {
        "class_thresholds": [0.5] * 25,
        "class_order": list(range(25)),
        "decoder_in_channels": [64] * 3,
    },
    "Qwen2_5OmniBigVGANConfig": {"upsample_initial_channel": 128},
    "Qwen3OmniMoeTalkerForConditionalGeneration": {"spatial_merge_size": 2},
    "NeuCodecConfig": {"quantization_dim": 128},
    "Xcodec2Config": {"quantization_dim": 128},
    "VibeVoiceAcousticTokenizerDecoderConfig": {"num_filters": 4},
    "VibeVoiceAcousticTokenizerEncoderConfig": {"num_filters": 4},
    "UVDocBackboneConfig": {"depths": [1, 1, 1, 3, 3, 3]},
    "UVDocBridge": _uvdoc_bridge,
    "PocketTTSAudioTokenizerDecoderConfig": {"upsample_groups": 64},
    "VitsConfig": {
        "upsample_initial_channel": 64,
        "flow_size": 64,
        "spectrogram_bins": 33,
        "use_stochastic_duration_prediction": False,
    },
    "UnlimitedOcrSamVisionConfig": {"downsample_channels": (32, 64)},
    "T5Gemma2Encoder": {"text_config.dropout_rate": 0.0},
    "SegGptConfig": {
        "num_hidden_layers": 4,
        "intermediate_hidden_state_indices": [0, 1, 2, 3],
        "merge_index": 0,
    },
    "Wav2Vec2BertForCTC": {"vocab_size": 99},
    "Wav2Vec2ConformerForCTC": {"vocab_size": 99},
    "Pix2StructTextConfig": {"initializer_range": 0.02},
    "PerceiverForOpticalFlow": {"train_size": [32, 32]},
    "PerceiverForMultimodalAutoencoding": {
        "num_self_attention_heads": 1,
        "num_cross_attention_heads": 1,
        "num_labels": 7,
        "image_size": 4,
        "num_frames": 2,
        "audio_samples_per_frame": 64,
        "output_shape": [2, 2, 16, 16],
        "output_num_channels": 64,
        "_label_trainable_num_channels": 64,
        "d_model": 405,
    },
    "UVDocModel": {"backbone_config.out_indices": [1, 2, 3, 4, 5, 6]},
    "XcodecModel": {
        "codebook_dim": 128,
        "semantic_model_config.num_feat_extract_layers": 7,
        "semantic_model_config.apply_spec_augment": False,
    },
    "BltConfig": {
        "num_hidden_layers": 2,
        "encoder_hash_byte_group_vocab": 100,
        "encoder_config.hidden_size_global": 64,
        "decoder_config.hidden_size_global": 64,
        "global_config.encoder_cross_output_size": 128,
    },
    "PeVideoEncoderConfig": {"vision_config": _pooled_tower},
    "OmDetTurboConfig": _omdet,
    "NemotronH_Omni_Reasoning_V3_Config": {
        "vision_config.patch_dim": 192,
        "vision_config.video_patch_dim": 384,
    },
    "EfficientLoFTRConfig": _efficient_loftr,
    "EsmForProteinFolding": _esm_fold,
    "ClvpDecoderConfig": {"feature_size": 16},
    "DecisionTransformerGPT2Model": {"vocab_size": 99},
    "DoryConfig": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "MimiConfig": {"codebook_dim": 64, "vector_quantization_hidden_dimension": 64},
    "GraniteSpeech5EncoderConfig": {"context_size": 16},
    "GraniteSpeech5Config": {"context_size": 16},
    "ZambaConfig": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "CohereCompassTextConfig": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "DPTConfig": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "DepthProConfig": {
        "intermediate_hook_ids": (1, 0),
        "patch_size": 64,
        "intermediate_feature_dims": (32, 32),
        "scaled_images_feature_dims": (32, 32, 16),
    },
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "SwinConfig": {"window_size": 2},
    "LevitConfig": {"patch_size": 16},
    "JanusVQVAEConfig": {"num_patches": 4},
    "DonutSwinConfig": {"window_size": 2},
    "Step3p7TextConfig": {"sliding_window": 8},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
}
