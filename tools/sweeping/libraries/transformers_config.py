# SPDX-License-Identifier: Apache-2.0
"""Tiny configurations for any class of transformers, by the names of their fields.

The default configuration of a class is made small: numbers by what their names say, lists element by
element, configurations inside of it likewise. Widths stay divisible by heads because all widths become 64 (or
keep their ratios, in lists), heads 4 and heads' widths 16.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from sweeping.libraries.transformers_own import OWN

STYLES = ("in place", "anew", "sections")
"""How: fields of the default are changed, so that what follows from them stays as it is; or the class is
given the small fields, so that it derives the rest again; or as the first, with sections of rotary positions
named."""

WIDTH, HEADS, LAYERS, VOCABULARY, POSITIONS = 64, 4, 2, 99, 96

_RULES: tuple[tuple[str, int], ...] = (
    (r"(^|_)vocab_size$|^n_vocab$|_vocab_size_|^vocab_size", VOCABULARY),
    (r"type_vocab_size$", 4),
    (r"(rope|nope)_head_dim$|^rotary_dim$", 8),
    (r"head_dim$|head_size$|^d_kv$|d_head$|dim_head$|kv_channels$|attention_key_dim", 16),
    (r"(num_|n_)?(key_value_heads|kv_heads|global_kv_heads)$|num_key_value_heads$", 2),
    (r"heads?(_num)?$|^n_head$|_n_heads$", HEADS),
    (r"(_layers|^layers|n_layers?|^depth|_depth|num_(.*_)?blocks)$", LAYERS),
    (r"(top_?k|experts_per_tok|experts_per_token|num_selected_experts|topk_method_k)$", 2),
    (r"(num|n)_(.*_)?experts$|^moe_num_experts$|^num_local_experts$", 4),
    (r"^(n_group|topk_group|n_shared_experts)$", 1),
    (r"(_rank|_lora_dim)$", 8),
    (r"intermediate|ffn|feed_forward|feedforward|mlp|inner|^d_ff$|^ff_dim$", 2 * WIDTH),
    (r"(state_size|d_state|_state_dim)$", 8),
    (r"max_.*position|n_positions|n_ctx|max_seq|context_length|max_length", POSITIONS),
    (r"(codebook_size|num_embeddings)$", 32),
    (r"codebook_dim$", 16),
    (r"(num|n)_codebooks$", 4),
    (r"^num_mel_bins$|^n_mels$|mel_bins$", 16),
    (r"(num|n)_(.*_)?(queries|query_tokens|latents|query)$|^num_latents$", 10),
    (r"^image_size$|_image_size$|^input_size$", 64),
    (r"^patch_size$", 8),
    (r"^(chunk_size|mamba_chunk_size)$", 8),
    (r"^(num_)?groups$|_groups$", 4),
    (r"window$|window_size$", 4),
    (
        r"(hidden_size|d_model|_embd|embedding_size|_dim|_width|^dim|^width|_channels|_size_per_head|"
        r"_features|_hidden)$",
        WIDTH,
    ),
)  # fmt: skip

_RULES_COMPILED = tuple((re.compile(pattern), value) for pattern, value in _RULES)

_KEPT = re.compile(
    r"^(num_channels|in_channels|out_channels|image_channels|in_chans|n_channels|audio_channels|num_labels|"
    r".*_id|.*_index|.*_ids|num_frames|tubelet_size|temporal_patch_size|spatial_merge_size|"
    r"conv_kernel.*|.*kernel.*|.*stride.*|.*_ratio.*|.*_factor.*|.*scale.*|conv_dim_out|num_conv_pos.*|"
    r"bos|eos|pad|sampling_rate|.*_pdrop|.*prob.*|.*drop.*|num_feature_levels|.*_points|dilation|"
    r"use_.*|rms.*|layer_norm.*|initializer.*|.*loss.*|.*cost.*|_.*)$"
)


def tiny(kind: Any, style: str) -> Any:
    """A small configuration for a model class."""
    own = OWN.get(kind.__name__) or OWN.get(kind.config_class.__name__)
    if own is not None:
        return own(kind.config_class, shrink) if callable(own) else shrink(kind.config_class(), **own)
    config = kind.config_class()
    shrink(config)
    if style == "sections":
        _name_sections(config)
    return _anew(kind.config_class, config) if style == "anew" else config


def _name_sections(config: Any) -> None:
    """For models whose code has sections of its own for widths that are not tiny."""
    for inner in (config, *(value for value in vars(config).values() if is_config(value))):
        if isinstance(getattr(inner, "rope_parameters", None), dict):
            inner.rope_parameters = {**inner.rope_parameters, "mrope_section": [2, 3, 3]}


def shrink(config: Any, **fixed: Any) -> Any:
    """Makes a configuration small, in place; `fixed` fields are set to what is given."""
    for name, value in list(vars(config).items()):
        if name in fixed or name.startswith("_"):
            continue
        if is_config(value):
            shrink(value)
            continue
        small = _small(name, value, config)
        if small is not None and small != value:
            _set(config, name, small)
    for name, value in fixed.items():
        setattr(config, name, value)
    _special_tokens(config)
    _follow(config)
    return config


def is_config(value: Any) -> bool:
    import transformers

    return isinstance(value, transformers.PreTrainedConfig)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a validator of the class knows better
        return


def _small(name: str, value: Any, config: Any) -> Any:
    """The value to use, or None to leave it."""
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _small_rope(value)
    if name in ("attn_layer_indices", "attention_layers_idx") and isinstance(value, list):
        return [LAYERS - 1]
    if re.search(r"layer_types$|layers_block_type$", name) and isinstance(value, (list, tuple)):
        return _few_kinds(value)
    if _KEPT.match(name):
        return None
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        small = _by_rule(name)
        if small is None or value <= small:
            return None
        if "key_value_heads" in name or "kv_heads" in name:
            heads = getattr(config, "num_attention_heads", HEADS)
            return HEADS if value == heads or (heads == HEADS and value > 16) else 2
        return small
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        return _small_list(name, value)
    return None


def _by_rule(name: str) -> int | None:
    return next((value for pattern, value in _RULES_COMPILED if pattern.search(name)), None)


def _small_list(name: str, value: Any) -> Any:
    if re.search(r"depths|layers|blocks", name) and not re.search(r"indic|indexes|ids", name):
        return type(value)(min(item, 1) for item in value)
    if re.search(r"heads$", name):
        return type(value)(min(item, 2) for item in value)
    if re.search(r"(sizes|dims?|channels|widths|hidden_size|embed_dim)$", name) and min(value) >= 16:
        by = max(1, min(value) // 16)
        return type(value)(item // by for item in value)
    return None


def _few_kinds(kinds: Any) -> Any:
    """One layer of each kind, two at least, in the order in which they come."""
    few = list(dict.fromkeys(kinds))
    return (few + list(kinds))[: max(LAYERS, len(few))] if len(few) <= LAYERS else few[:LAYERS]


def _small_rope(value: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            small[name] = _small_rope(item)
        elif name == "mrope_section" and isinstance(item, (list, tuple)):
            by = max(1, sum(item) // 8)
            parts = [max(1, part // by) for part in item]
            parts[-1] += 8 - sum(parts)
            small[name] = parts
        else:
            small[name] = item
    return small


_SPECIAL = re.compile(r"(token_id|token_index|_token|sentinel)$")


def _special_tokens(config: Any) -> None:
    """Ids beyond the small vocabulary get places at its end, each its own."""
    size = getattr(config, "vocab_size", None)
    inner = getattr(config, "text_config", None)
    if not isinstance(size, int):
        size = getattr(inner, "vocab_size", VOCABULARY) if inner is not None else VOCABULARY
    free = size - 1
    for name, value in list(vars(config).items()):
        if not _SPECIAL.search(name):
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value >= size:
            _set(config, name, free)
            free -= 1
        elif isinstance(value, (list, tuple)) and any(
            isinstance(item, int) and item >= size for item in value
        ):
            _set(config, name, [free])
            free -= 1
    if getattr(config, "pad_token_id", 0) is None:
        _set(config, "pad_token_id", 0)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", 0) is None:
        _set(config, "decoder_start_token_id", 1)


def _follow(config: Any) -> None:
    """Fields that must agree with others."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return
    for name, value in list(vars(config).items()):
        if (
            isinstance(value, list)
            and len(value) > layers
            and re.search(
                r"layer_types$|_layers_pattern$|layers_block_type$|^mlp_layer_types$|^no_rope_layers$", name
            )
        ):
            _set(config, name, value[:layers])


def _anew(kind: Any, config: Any) -> Any:
    """The same small fields, given to the class."""
    default = kind()
    known = set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs", "args"}
    given = {}
    for name in known:
        small = getattr(config, name, None)
        if is_config(small) or (
            isinstance(small, (int, list, tuple)) and small != getattr(default, name, None)
        ):
            given[name] = small
    derived = {name for name in given if name.endswith("layer_types")}
    made = kind(**{name: value for name, value in given.items() if name not in derived})
    _special_tokens(made)
    return made
