# SPDX-License-Identifier: Apache-2.0
"""Shapes of well-known models, for machines that cannot reach the Hugging Face hub.

Each entry is what the hub's `config.json` says about the shape, and the number of weights, which the tests
hold against the model that the entry builds. Names are compared in lower case, with or without the owner.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Known", "closest", "find", "names"]

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """A model that is known by its shape.

    Attributes:
        name: its name on the hub.
        parameters: number of weights, tied ones counted once.
        values: what its `config.json` says, as far as it decides memory.
    """

    name: str
    parameters: int
    values: Values


def _gpt2(width: int, layers: int, heads: int) -> Values:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
    }


def _encoder(kind: str, head: str, size: tuple[int, int, int], **more: Any) -> Values:
    width, layers, heads = size
    return {
        "model_type": kind,
        "architectures": [head],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        **more,
    }


def _roberta(size: tuple[int, int, int]) -> Values:
    fixed = {
        "vocab_size": 50265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
    }
    return _encoder("roberta", "RobertaForMaskedLM", size, **fixed)


def _vit(size: tuple[int, int, int]) -> Values:
    return _encoder("vit", "ViTForImageClassification", size, num_labels=1000)


def _decoder(
    kind: str, head: str, size: tuple[int, int, int, int, int], vocabulary: int, **more: Any
) -> Values:
    width, inner, layers, heads, key_heads = size
    return {
        "model_type": kind,
        "architectures": [head],
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        **more,
    }


def _llama(size: tuple[int, int, int, int, int], vocabulary: int, positions: int, **more: Any) -> Values:
    more = {"rms_norm_eps": 1e-5, "max_position_embeddings": positions, "tie_word_embeddings": False, **more}
    return _decoder("llama", "LlamaForCausalLM", size, vocabulary, **more)


def _qwen2(size: tuple[int, int, int, int, int], vocabulary: int, positions: int, tied: bool) -> Values:
    more = {"max_position_embeddings": positions, "tie_word_embeddings": tied}
    return _decoder("qwen2", "Qwen2ForCausalLM", size, vocabulary, **more)


def _qwen3(size: tuple[int, int, int, int, int], tied: bool) -> Values:
    more = {"max_position_embeddings": 40960, "tie_word_embeddings": tied, "head_dim": 128}
    return _decoder("qwen3", "Qwen3ForCausalLM", size, 151936, **more)


def _mistral(vocabulary: int, window: int | None) -> Values:
    more = {"max_position_embeddings": 32768, "sliding_window": window, "tie_word_embeddings": False}
    return _decoder("mistral", "MistralForCausalLM", (4096, 14336, 32, 32, 8), vocabulary, **more)


def _gemma2(size: tuple[int, int, int, int, int]) -> Values:
    more = {"max_position_embeddings": 8192, "head_dim": 256}
    return _decoder("gemma2", "Gemma2ForCausalLM", size, 256000, **more)


def _opt(width: int, layers: int, heads: int) -> Values:
    return {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "ffn_dim": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }


def _t5(width: int, inner: int, layers: int, heads: int) -> Values:
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": width,
        "d_ff": inner,
        "num_layers": layers,
        "num_heads": heads,
        "vocab_size": 32128,
        "decoder_start_token_id": 0,
    }


def _whisper(width: int, layers: int, heads: int, mels: int = 80, vocabulary: int = 51865) -> Values:
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width,
        "num_mel_bins": mels,
        "vocab_size": vocabulary,
        "decoder_start_token_id": 50258,
    }


_BERT_BASE, _BERT_LARGE = (768, 12, 12), (1024, 24, 16)
_LLAMA3_8B, _LLAMA3_70B = (4096, 14336, 32, 32, 8), (8192, 28672, 80, 64, 8)

_DISTILBERT: Final[Values] = {
    "model_type": "distilbert",
    "architectures": ["DistilBertForMaskedLM"],
    "dim": 768,
    "hidden_dim": 3072,
    "n_layers": 6,
    "n_heads": 12,
}

_PHI3: Final[Values] = _decoder(
    "phi3", "Phi3ForCausalLM", (3072, 8192, 32, 32, 32), 32064,
    max_position_embeddings=4096, sliding_window=2047, tie_word_embeddings=False,
)  # fmt: skip

_TABLE: Final[tuple[Known, ...]] = (
    Known("openai-community/gpt2", 124_439_808, _gpt2(768, 12, 12)),
    Known("openai-community/gpt2-medium", 354_823_168, _gpt2(1024, 24, 16)),
    Known("openai-community/gpt2-large", 774_030_080, _gpt2(1280, 36, 20)),
    Known("openai-community/gpt2-xl", 1_557_611_200, _gpt2(1600, 48, 25)),
    Known("distilbert/distilgpt2", 81_912_576, _gpt2(768, 6, 12)),
    Known("google-bert/bert-base-uncased", 109_514_298, _encoder("bert", "BertForMaskedLM", _BERT_BASE)),
    Known("google-bert/bert-base-cased", 108_340_804,
          _encoder("bert", "BertForMaskedLM", _BERT_BASE, vocab_size=28996)),
    Known("google-bert/bert-large-uncased", 335_174_458, _encoder("bert", "BertForMaskedLM", _BERT_LARGE)),
    Known("google-bert/bert-large-cased", 333_610_308,
          _encoder("bert", "BertForMaskedLM", _BERT_LARGE, vocab_size=28996)),
    Known("distilbert/distilbert-base-uncased", 66_985_530, _DISTILBERT),
    Known("FacebookAI/roberta-base", 124_697_433, _roberta(_BERT_BASE)),
    Known("FacebookAI/roberta-large", 355_412_057, _roberta(_BERT_LARGE)),
    Known("meta-llama/Llama-2-7b-hf", 6_738_415_616, _llama((4096, 11008, 32, 32, 32), 32000, 4096)),
    Known("meta-llama/Llama-2-13b-hf", 13_015_864_320, _llama((5120, 13824, 40, 40, 40), 32000, 4096)),
    Known("meta-llama/Llama-2-70b-hf", 68_976_648_192, _llama(_LLAMA3_70B, 32000, 4096)),
    Known("meta-llama/Meta-Llama-3-8B", 8_030_261_248, _llama(_LLAMA3_8B, 128256, 8192)),
    Known("meta-llama/Meta-Llama-3-70B", 70_553_706_496, _llama(_LLAMA3_70B, 128256, 8192)),
    Known("meta-llama/Llama-3.1-8B", 8_030_261_248, _llama(_LLAMA3_8B, 128256, 131072)),
    Known("meta-llama/Llama-3.1-70B", 70_553_706_496, _llama(_LLAMA3_70B, 128256, 131072)),
    Known("meta-llama/Llama-3.2-1B", 1_235_814_400,
          _llama((2048, 8192, 16, 32, 8), 128256, 131072, head_dim=64, tie_word_embeddings=True)),
    Known("meta-llama/Llama-3.2-3B", 3_212_749_824,
          _llama((3072, 8192, 28, 24, 8), 128256, 131072, head_dim=128, tie_word_embeddings=True)),
    Known("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496, _llama(_LLAMA3_70B, 128256, 131072)),
    Known("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384, _llama((2048, 5632, 22, 32, 4), 32000, 2048)),
    Known("HuggingFaceTB/SmolLM2-135M", 134_515_008,
          _llama((576, 1536, 30, 9, 3), 49152, 8192, tie_word_embeddings=True)),
    Known("mistralai/Mistral-7B-v0.1", 7_241_732_096, _mistral(32000, 4096)),
    Known("mistralai/Mistral-7B-v0.3", 7_248_023_552, _mistral(32768, None)),
    Known("Qwen/Qwen2.5-0.5B", 494_032_768, _qwen2((896, 4864, 24, 14, 2), 151936, 32768, True)),
    Known("Qwen/Qwen2.5-1.5B", 1_543_714_304, _qwen2((1536, 8960, 28, 12, 2), 151936, 131072, True)),
    Known("Qwen/Qwen2.5-3B", 3_085_938_688, _qwen2((2048, 11008, 36, 16, 2), 151936, 32768, True)),
    Known("Qwen/Qwen2.5-7B", 7_615_616_512, _qwen2((3584, 18944, 28, 28, 4), 152064, 131072, False)),
    Known("Qwen/Qwen2.5-14B", 14_770_033_664, _qwen2((5120, 13824, 48, 40, 8), 152064, 131072, False)),
    Known("Qwen/Qwen2.5-32B", 32_763_876_352, _qwen2((5120, 27648, 64, 40, 8), 152064, 131072, False)),
    Known("Qwen/Qwen2.5-72B", 72_706_203_648, _qwen2((8192, 29568, 80, 64, 8), 152064, 131072, False)),
    Known("Qwen/Qwen3-0.6B", 596_049_920, _qwen3((1024, 3072, 28, 16, 8), True)),
    Known("Qwen/Qwen3-8B", 8_190_735_360, _qwen3((4096, 12288, 36, 32, 8), False)),
    Known("google/gemma-2-2b", 2_614_341_888, _gemma2((2304, 9216, 26, 8, 4))),
    Known("google/gemma-2-9b", 9_241_705_984, _gemma2((3584, 14336, 42, 16, 8))),
    Known("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552, _PHI3),
    Known("facebook/opt-125m", 125_239_296, _opt(768, 12, 12)),
    Known("facebook/opt-1.3b", 1_315_758_080, _opt(2048, 24, 32)),
    Known("google-t5/t5-small", 60_506_624, _t5(512, 2048, 6, 8)),
    Known("google-t5/t5-base", 222_903_552, _t5(768, 3072, 12, 12)),
    Known("google-t5/t5-large", 737_668_096, _t5(1024, 4096, 24, 16)),
    Known("google/vit-base-patch16-224", 86_567_656, _vit(_BERT_BASE)),
    Known("google/vit-large-patch16-224", 304_326_632, _vit(_BERT_LARGE)),
    Known("openai/whisper-tiny", 37_760_640, _whisper(384, 4, 6)),
    Known("openai/whisper-base", 72_593_920, _whisper(512, 6, 8)),
    Known("openai/whisper-small", 241_734_912, _whisper(768, 12, 12)),
    Known("openai/whisper-medium", 763_857_920, _whisper(1024, 24, 16)),
    Known("openai/whisper-large-v3", 1_543_490_560, _whisper(1280, 32, 20, 128, 51866)),
)  # fmt: skip

_SHORT: Final[Mapping[str, str]] = {
    "bert-base": "bert-base-uncased",
    "bert-large": "bert-large-uncased",
    "llama-2-7b": "llama-2-7b-hf",
    "llama-2-13b": "llama-2-13b-hf",
    "llama-2-70b": "llama-2-70b-hf",
    "llama-3-8b": "meta-llama-3-8b",
    "llama-3-70b": "meta-llama-3-70b",
    "mistral-7b": "mistral-7b-v0.3",
    "vit-base": "vit-base-patch16-224",
    "vit-large": "vit-large-patch16-224",
}
"""Names in daily use that are not the hub's."""

_BY_NAME: Final = {
    key: item for item in _TABLE for key in (item.name.lower(), item.name.lower().split("/")[1])
}


def find(name: str) -> Known | None:
    """The entry of a name, with or without its owner; None for a name that is not in the table.

    Example:
        >>> find("gpt2").name
        'openai-community/gpt2'
    """
    key = name.strip().lower()
    return _BY_NAME.get(_SHORT.get(key, key))


def names() -> list[str]:
    """The full names, in the order of the table."""
    return [item.name for item in _TABLE]


def closest(name: str) -> list[str]:
    """Up to three names that look like a mistyped one, best first."""
    found = difflib.get_close_matches(name.strip().lower(), [*_BY_NAME, *_SHORT], n=3, cutoff=0.55)
    return list(dict.fromkeys(_BY_NAME[_SHORT.get(key, key)].name for key in found))
