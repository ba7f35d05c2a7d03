# SPDX-License-Identifier: Apache-2.0
"""Tiny configurations for any class of transformers, by the names of their fields.

The default configuration of a class is made small: numbers by what their names say, lists element by
element, configurations inside of it likewise. Widths stay divisible by heads because all widths become 64 (or
keep their ratios, in lists), heads 4 and heads' widths 16.
"""

from __future__ import annotations

import inspect
import operator
import re
from typing import Any

from sweeping.libraries.transformers_own import OWN

STYLES = {
    "in place": "",
    "anew": "",
    "sections": "split_with_sizes|has no len|expanded size|RoPE axes",
    "filled": r"NoneType|empty\(\)",
    "even": "channels|normalized_shape|running_mean|mat1|must match",
    "wide": "channels|running_mean",
}
"""How, and what an earlier error must say for it to be worth a try: fields of the default are changed, so
that what follows from them stays as it is; or the class is given the small fields, so that it derives the
rest again; or as the first, with sections of rotary positions named, with numbers where the default has none,
with all widths divided by the same, or with all widths as they are."""

WIDTH, HEADS, LAYERS, VOCABULARY, POSITIONS, IMAGE = 64, 4, 2, 99, 96, 64

_RULES: tuple[tuple[str, int], ...] = (
    (r"(^|_)vocab_size$|^n_vocab$|_vocab_size_|^vocab_size", VOCABULARY),
    (r"type_vocab_size$", 4),
    (r"(rope|nope)_head_dim$|^rotary_dim$", 8),
    (r"head_dim$|head_size$|^d_kv$|d_head$|dim_head$|kv_channels$|attention_key_dim", 16),
    (r"(num_|n_)?(key_value_heads|kv_heads|global_kv_heads)$|num_key_value_heads$", 2),
    (r"heads?(_num)?$|^n_head$|_n_heads$", HEADS),
    (r"(_layers|^layers|n_layers?|^depth|_depth|num_(.*_)?blocks)$", LAYERS),
    (r"(attn|attention)_layer_period$|^layer_group_size$|^full_attention_interval$", LAYERS),
    (r"(attn|attention)_layer_offset$", LAYERS - 1),
    (r"(top_?k|moe_k|experts_per_tok|experts_per_token|num_selected_experts|topk_method_k)$", 2),
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
    (r"^image_size$|_image_size$|^input_size$", IMAGE),
    (r"^mm_tokens_per_image$", 16),
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
    r"num_encoder_blocks|use_.*|rms.*|layer_norm.*|initializer.*|.*loss.*|.*cost.*|_.*)$"
)


def tiny(kind: Any, style: str) -> Any:
    """A small configuration for a model class."""
    own = own_of(kind)
    if own is not None:
        return own(kind.config_class, shrink) if callable(own) else shrink(kind.config_class(), **own)
    config = kind.config_class()
    widths = {"wide": 1, "even": _common_divisor(config)}.get(style)
    if style == "filled":
        _fill(config)
    shrink(config, widths)
    if style == "sections":
        _name_sections(config)
    return _anew(kind.config_class, config) if style == "anew" else config


def own_of(kind: Any) -> Any:
    """What `OWN` says of a class or of its configuration."""
    return OWN.get(kind.__name__) or OWN.get(kind.config_class.__name__)


def _name_sections(config: Any) -> None:
    """For models whose code has sections of its own for widths that are not tiny."""
    if isinstance(getattr(config, "rope_parameters", None), dict):
        total = int(8 * config.rope_parameters.get("partial_rotary_factor", 1))
        sections = [total // 4, total // 4, total - 2 * (total // 4)]
        config.rope_parameters = {**config.rope_parameters, "mrope_section": sections}
    for value in vars(config).values():
        if is_config(value):
            _name_sections(value)


def _common_divisor(config: Any) -> int:
    """What makes 16 of the least of the lists' widths, here and in configurations inside."""
    least = [
        min(value)
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and _SIZES.search(name) and all(type(n) is int for n in value)
        if value and min(value) >= 16
    ]
    inner = [_common_divisor(value) for value in vars(config).values() if is_config(value)]
    return max(1, min([*(size // 16 for size in least), *(by for by in inner if by > 1)], default=1))


def _fill(config: Any) -> None:
    """Numbers for fields that have none."""
    hints = inspect.get_annotations(type(config))
    for name, value in list(vars(config).items()):
        if is_config(value):
            _fill(value)
        elif value is None and "int" in str(hints.get(name, "")) and not _KEPT.match(name):
            _set(config, name, _by_rule(name))


def shrink(config: Any, widths: int | None = None, **fixed: Any) -> Any:
    """Makes a configuration small, in place; `fixed` fields are set to what is given.

    A name with points is of a field of a configuration inside.
    Widths are divided by `widths` if it is given.
    """
    before = dict(vars(config))
    own = OWN.get(type(config).__name__)
    fixed = {**(own if isinstance(own, dict) else {}), **fixed}
    for name, value in before.items():
        if name in fixed or name.startswith("_"):
            continue
        if is_config(value):
            shrink(value, widths)
            continue
        small = _small(name, value, before, widths)
        if small is not None and small != value:
            _set(config, name, small)
    deep = {name: fixed.pop(name) for name in list(fixed) if "." in name}
    for name, value in fixed.items():
        setattr(config, name, value() if callable(value) else value)
    _special_tokens(config)
    _follow(config, before)
    for name, value in deep.items():
        path, _, last = name.rpartition(".")
        setattr(operator.attrgetter(path)(config), last, value)
    return config


def is_config(value: Any) -> bool:
    import transformers

    return isinstance(value, transformers.PreTrainedConfig)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a validator of the class knows better
        return


def _small(name: str, value: Any, before: dict[str, Any], widths: int | None) -> Any:
    """The value to use, or None to leave it; `before` are all fields as they were."""
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _small_rope(value)
    if name in ("attn_layer_indices", "attention_layers_idx") and isinstance(value, list):
        return [LAYERS - 1]
    if re.search(r"layer_types$|layers_block_type$|^block_types$|^attn_layers$", name) and isinstance(
        value, (list, tuple)
    ):
        return _few_kinds(value)
    if _KEPT.match(name):
        return None
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        small = _by_rule(name)
        if small == WIDTH and widths is not None:
            return None if value % widths else value // widths
        if small is None or value <= small:
            return None
        if "key_value_heads" in name or "kv_heads" in name:
            heads = before.get(re.sub("key_value|kv", "attention", name), before.get("num_attention_heads"))
            return HEADS if value == heads else 2
        return small
    if name == "backbone_feature_sizes":
        return [[item // 16 for item in sizes] for sizes in value]
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        return _small_list(name, value, widths)
    return None


def _by_rule(name: str) -> int | None:
    return next((value for pattern, value in _RULES_COMPILED if pattern.search(name)), None)


_SIZES = re.compile(r"(sizes|dims?|channels|widths|hidden_size|embed_dim|channel_list|embed_dim_per_stage)$")


def _small_list(name: str, value: Any, widths: int | None) -> Any:
    if re.search(r"depths|layers|blocks", name) and not re.search(r"indic|indexes|ids", name):
        return type(value)(min(item, 1) for item in value)
    if re.search(r"heads$", name):
        return type(value)(min(item, 2) for item in value)
    if name in ("image_size", "input_size") and min(value) > IMAGE:
        return [max(8, IMAGE * item // max(value) // 8 * 8) for item in value]
    if _SIZES.search(name) and min(value) >= 16:
        by = widths or max(1, min(value) // 16)
        return [item // by if item % by == 0 else max(8, item // by // 8 * 8) for item in value]
    return None


def _few_kinds(kinds: Any) -> Any:
    """One layer of each kind, two at least, in the order in which they come."""
    few = list(dict.fromkeys(kinds))
    attention = [kind for kind in few if "attention" in str(kind)]
    if attention and not set(attention) & set(few[:LAYERS]):
        few = [few[0], attention[0]]
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
    for name in ("image_token_id", "image_token_index", "video_token_id", "video_token_index"):
        if name in vars(config) and vars(config)[name] is None and hasattr(config, "vision_config"):
            _set(config, name, free)
            free -= 1
    if getattr(config, "pad_token_id", 0) is None:
        _set(config, "pad_token_id", 0)
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        _set(config, "decoder_start_token_id", 1)


def _follow(config: Any, before: dict[str, Any]) -> None:
    """Fields that must agree with others, and those that have no default."""
    now = vars(config)
    width, heads = (now.get(name) for name in ("hidden_size", "num_attention_heads"))
    if "head_dim" in now and now["head_dim"] is None and isinstance(width, int) and isinstance(heads, int):
        _set(config, "head_dim", width // heads)
    if before.get("head_dim") and before["head_dim"] == before.get("qk_rope_head_dim"):
        _set(config, "head_dim", now["qk_rope_head_dim"])  # rotary positions read it
    for name in ("codebook_dim", "pooler_output_size"):
        if before.get(name) and before[name] == before.get("hidden_size"):
            _set(config, name, width)
    if "prediction_length" in now and now["prediction_length"] is None:
        _set(config, "prediction_length", 4)
    if {"stem_channels", "stage_in_channels", "stage_out_channels"} <= set(now):
        out = list(now["stage_out_channels"])
        _set(config, "stage_in_channels", [now["stem_channels"][-1], *out[:-1]])
        _set(config, "hidden_sizes", out)
    if {"expand", "num_heads", "head_dim"} <= set(now):
        _set(config, "num_heads", int(now["expand"] * width) // now["head_dim"])
    if {"window_size", "spatial_merge_size", "patch_size"} <= set(now):
        _set(config, "window_size", 2 * now["spatial_merge_size"] * now["patch_size"])
    if now.get("_out_indices") and isinstance(now.get("num_hidden_layers"), int):
        _set_stages(config, len(now["_out_indices"]))
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


def _set_stages(config: Any, count: int) -> None:
    """As many layers as a backbone gives maps of; those above the stem are given."""
    layers = max(LAYERS, count)
    _set(config, "num_hidden_layers", layers)
    config.stage_names = ["stem", *(f"stage{number}" for number in range(1, layers + 1))]
    config._out_indices = list(range(layers + 1))[-count:]
    config._out_features = [config.stage_names[index] for index in config._out_indices]


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
