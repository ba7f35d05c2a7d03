# SPDX-License-Identifier: Apache-2.0
"""One decoder that is GPT-NeoX, phi or Llama by its `Shape`, frozen but for LoRA or an adapter.

The published tables name model, batch and the longest sequence; the sizes are those of the models' public
configurations. What decides memory is here, and nothing else: which results live until when, which weights
are frozen, where rotary embeddings go through float32, and that the head and the loss work on chunks of 128
tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Method = Literal["lora", "adapter", "adapter-v2"]

_TRAINED: dict[str, tuple[str, ...]] = {
    "lora": ("lora_",),
    "adapter": ("adapter_wte", "gating_factor"),
    "adapter-v2": ("adapter_", "gating_factor", "norm_", "ln_f"),
}
"""Words in the names of the parameters that a method trains."""

_PROMPT = 10
"""Tokens of an adapter's prompt."""

_FIRST_PROMPTED = 2
"""Number of the first block that attends to it."""

HEAD_CHUNK = 128
"""Tokens whose logits are made, and whose loss is computed, at a time."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        layers, heads, width, inner: number of blocks, attention heads, features, features inside the MLP.
        groups: key/value heads; None: one per attention head.
        vocabulary: rows of embedding and head, padding included.
        context: longest sequence of the model, which sizes its rotary tables at first.
        rotary_share: of each head's features that are rotated.
        parallel: attention and MLP read the same input and are added together.
        shared_norm: they also share its normalisation.
        bias, head_bias: whether linear layers, and the head, have a bias.
        llama: root-mean-square norm and gated MLP instead of layer norm and GELU.
        gelu: approximation of GELU.
    """

    layers: int
    heads: int
    width: int
    inner: int
    vocabulary: int
    groups: int | None = None
    context: int = 4096
    rotary_share: float = 1.0
    parallel: bool = False
    shared_norm: bool = False
    bias: bool = False
    head_bias: bool = False
    llama: bool = True
    gelu: str = "none"

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.heads


SHAPES = {
    "1.3B phi-1.5": Shape(
        24,
        32,
        2048,
        8192,
        51200,
        context=2048,
        rotary_share=0.5,
        parallel=True,
        shared_norm=True,
        bias=True,
        head_bias=True,
        llama=False,
        gelu="tanh",
    ),
    "3B StableLM Alpha": Shape(
        16, 32, 4096, 16384, 50688, rotary_share=0.25, parallel=True, bias=True, llama=False
    ),
    "7B Llama 2": Shape(32, 32, 4096, 11008, 32000),
    "13B Llama 2": Shape(40, 40, 5120, 13824, 32000),
    "40B Falcon": Shape(60, 128, 8192, 32768, 65024, groups=8, context=2048, parallel=True, llama=False),
}
"""By the names of the published table."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank updates of queries and values."""

    rank: int = 8
    alpha: int = 16
    dropout: float = 0.05


class _Norm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(mean + 1e-5)
        return (self.weight * normed).to(given)


class _UpdatedQkv(nn.Module):
    """The joint projection to queries, keys and values; queries and values with a low-rank update."""

    def __init__(self, shape: Shape, lora: LoRA) -> None:
        super().__init__()
        groups = shape.groups or shape.heads
        keys = groups * shape.head_width
        self.parts = (shape.width, keys)  # widths of the updates of queries and of values
        self.linear = nn.Linear(shape.width, shape.width + 2 * keys, bias=shape.bias)
        self.dropout = nn.Dropout(lora.dropout)
        self.lora_down = nn.Parameter(torch.zeros(2 * lora.rank, shape.width))
        self.lora_up = nn.Parameter(torch.zeros(sum(self.parts), lora.rank))
        self.scaling = lora.alpha / lora.rank
        self.updated = [*range(shape.width), *range(shape.width + keys, shape.width + 2 * keys)]

    def _up(self, low: Tensor) -> Tensor:
        """(batch, 2 rank, time) → (batch, updated features, time): a grouped convolution of width 1."""
        weight = self.lora_up.unsqueeze(-1)
        if self.parts[0] == self.parts[1]:
            return F.conv1d(low, weight, groups=2)
        pairs = zip(low.chunk(2, dim=1), weight.split(self.parts), strict=True)
        return torch.cat([F.conv1d(part, rows) for part, rows in pairs], dim=1)

    def _spread(self, x: Tensor) -> Tensor:
        """Puts zeros where keys are; (batch, time, updated) → (batch, time, all)."""
        x = x.transpose(0, 1)
        full = x.new_zeros((*x.shape[:-1], self.linear.out_features)).view(-1, self.linear.out_features)
        places = torch.tensor(self.updated, device=full.device)
        full = full.index_copy(1, places, x.reshape(-1, sum(self.parts)))
        return full.view((*x.shape[:-1], self.linear.out_features)).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.linear(x)
        low = F.linear(self.dropout(x), self.lora_down)
        up = self._up(low.transpose(-2, -1)).transpose(-2, -1)
        update = self._spread(up) * self.scaling
        return frozen + update


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    result = (x * cos) + (turned * sin)
    return result.type_as(x)


class _Scaled(nn.Module):
    """A frozen linear layer whose result is shifted and scaled by trained vectors."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.adapter_bias = nn.Parameter(torch.zeros(outputs))
        self.adapter_scale = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter_scale * (self.linear(x) + self.adapter_bias)


def _linear(inputs: int, outputs: int, bias: bool, method: Method) -> nn.Module:
    return _Scaled(inputs, outputs, bias) if method == "adapter-v2" else nn.Linear(inputs, outputs, bias=bias)


class _Attention(nn.Module):
    """With adapters, all but the first two blocks also attend to a trained prompt, through a trained gate."""

    def __init__(self, shape: Shape, method: Method, block: int) -> None:
        super().__init__()
        self.shape = shape
        keys = (shape.groups or shape.heads) * shape.head_width
        qkv = shape.width + 2 * keys
        self.attn = (
            _UpdatedQkv(shape, LoRA()) if method == "lora" else _linear(shape.width, qkv, shape.bias, method)
        )
        self.proj = _linear(shape.width, shape.width, shape.bias, method)
        self.prompted = method != "lora" and block >= _FIRST_PROMPTED
        if self.prompted:
            self.adapter_wte = nn.Embedding(_PROMPT, shape.width)
            self.gating_factor = nn.Parameter(torch.zeros(1, 1, shape.heads, 1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = self.shape
        batch, time, width = x.size()
        qkv = self.attn(x)
        groups, size = shape.groups or shape.heads, shape.head_width
        per_group = shape.heads // groups
        qkv = qkv.view(batch, time, groups, per_group + 2, size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((per_group, 1, 1), dim=2)
        k = k.expand(batch, groups, per_group, time, size)
        v = v.expand(batch, groups, per_group, time, size)
        q, k, v = (part.reshape(batch, -1, time, size) for part in (q, k, v))
        turned = int(shape.rotary_share * size)
        turned_q = _rotated(q[..., :turned], cos, sin)
        turned_k = _rotated(k[..., :turned], cos, sin)
        q = torch.cat((turned_q, q[..., turned:]), dim=-1)
        k = torch.cat((turned_k, k[..., turned:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(size)).transpose(1, 2)
        if self.prompted:
            y = y + self.gating_factor * self._prompt(q)
        return self.proj(y.reshape(batch, time, width))

    def _prompt(self, q: Tensor) -> Tensor:
        """Attention of the queries to the prompt (as many key/value heads as heads)."""
        shape = self.shape
        qkv = self.attn(self.adapter_wte.weight.reshape(1, _PROMPT, shape.width))
        qkv = qkv.view(1, _PROMPT, shape.heads, 3, shape.head_width).permute(0, 2, 3, 1, 4)
        _, k, v = qkv.split((1, 1, 1), dim=2)
        k = k.reshape(1, -1, _PROMPT, shape.head_width)
        v = v.reshape(1, -1, _PROMPT, shape.head_width)
        mask = torch.ones(q.size(2), _PROMPT, dtype=torch.bool, device=q.device)
        scale = 1 / math.sqrt(shape.head_width)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


class _PlainMlp(nn.Module):
    def __init__(self, shape: Shape, method: Method) -> None:
        super().__init__()
        self.gelu = shape.gelu
        self.fc = _linear(shape.width, shape.inner, shape.bias, method)
        self.proj = _linear(shape.inner, shape.width, shape.bias, method)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        x = F.gelu(x, approximate=self.gelu)
        return self.proj(x)


class _GatedMlp(nn.Module):
    def __init__(self, shape: Shape, method: Method) -> None:
        super().__init__()
        self.gate = _linear(shape.width, shape.inner, shape.bias, method)
        self.up = _linear(shape.width, shape.inner, shape.bias, method)
        self.proj = _linear(shape.inner, shape.width, shape.bias, method)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        up = self.up(x)
        x = F.silu(gate) * up
        return self.proj(x)


class Block(nn.Module):
    """Attention and MLP with their residual sums."""

    def __init__(self, shape: Shape, method: Method, number: int) -> None:
        super().__init__()
        self.shape = shape
        self.norm_1 = _Norm(shape.width) if shape.llama else nn.LayerNorm(shape.width)
        self.attn = _Attention(shape, method, number)
        if not shape.shared_norm:
            self.norm_2 = _Norm(shape.width) if shape.llama else nn.LayerNorm(shape.width)
        self.mlp = (_GatedMlp if shape.llama else _PlainMlp)(shape, method)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = self.norm_1(x)
        attended = self.attn(first, cos, sin)
        if self.shape.parallel:
            second = first if self.shape.shared_norm else self.norm_2(x)
            return self.mlp(second) + attended + x
        x = attended + x
        return self.mlp(self.norm_2(x)) + x


class Decoder(nn.Module):
    """The model and its loss, in BF16, frozen but for what the method trains.

    Args:
        shape: its sizes.
        longest: longest sequence of the data, which the float32 rotary tables are made for.
        method: of fine-tuning.
    """

    def __init__(self, shape: Shape, longest: int, method: Method = "lora") -> None:
        super().__init__()
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # made in it, so that sizes in memory are those of its own
        try:
            self._build(shape, method)
        finally:
            torch.set_default_dtype(usual)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(word in name for word in _TRAINED[method]))
        turned = int(shape.rotary_share * shape.head_width)
        rates = 1.0 / (10000 ** (torch.arange(0, turned, 2).float() / turned))
        angles = torch.outer(torch.arange(longest).float(), rates).repeat(1, 2)
        self.register_buffer("cos", torch.cos(angles), persistent=False)
        self.register_buffer("sin", torch.sin(angles), persistent=False)

    def _build(self, shape: Shape, method: Method) -> None:
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.h = nn.ModuleList(Block(shape, method, number) for number in range(shape.layers))
        self.ln_f = _Norm(shape.width) if shape.llama else nn.LayerNorm(shape.width)
        self.lm_head = _linear(shape.width, shape.vocabulary, shape.head_bias, method)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, object]:
        """Loss and, alive as long as it, the float32 logits of every chunk."""
        cos, sin = self.cos[: input_ids.size(1)], self.sin[: input_ids.size(1)]
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        chunks = [self.lm_head(part) for part in x.split(HEAD_CHUNK, dim=1)]
        logits = [chunk.float() for chunk in chunks]
        del x, chunks
        logits[-1] = logits[-1][..., :-1, :]
        parts = labels[..., 1:].split(logits[0].size(1), dim=1)
        losses = [
            F.cross_entropy(
                chunk.reshape(-1, chunk.size(-1)), part.reshape(-1), ignore_index=-1, reduction="none"
            )
            for chunk, part in zip(logits, parts, strict=True)
        ]
        return {"loss": torch.cat(losses).mean(), "logits": logits}
