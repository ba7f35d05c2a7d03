# SPDX-License-Identifier: Apache-2.0
"""A Llama in BF16 as two published tables train it: a ladder of techniques of 2024-11, LoRA rows of 2024-05.

What decides memory: norms and rotary embeddings compute in float32, keys and values are expanded to all
heads, and logits become float32 as a whole or in chunks. In the ladder, embedding and head are one weight,
logits are gone before backward, and packed samples use flex attention, which keeps what flash attention
keeps. The LoRA rows shift and transpose the logits before the loss, and they live until backward is over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TunedShape:
    """Sizes: blocks, heads, key/value heads, features, features inside the MLP, rows of the embedding.

    `tied`: embedding and head are one weight.
    """

    layers: int
    heads: int
    groups: int
    width: int
    inner: int
    vocabulary: int
    context: int = 131072
    tied: bool = True

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.heads


LLAMA_3_2_3B = TunedShape(28, 24, 8, 3072, 8192, 128256)
LLAMA_2_7B = TunedShape(32, 32, 32, 4096, 11008, 32000, context=4096, tied=False)


class _Updated(nn.Linear):
    """A frozen linear layer with a low-rank update."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight.requires_grad_(False)
        self.dropout = nn.Dropout(0.05)
        self.lora_a = nn.Linear(inputs, rank, bias=False)
        self.lora_b = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        update = self.lora_a(self.dropout(x))
        update = 2.0 * self.lora_b(update)
        return out + update


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


def _rotated(x: Tensor, table: Tensor) -> Tensor:
    """(batch, time, heads, features), table of (positions, features / 2, 2)."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    table = table[: x.size(1)].view(-1, pairs.size(1), 1, pairs.size(3), 2)
    real, imaginary = table[..., 0], table[..., 1]
    turned = torch.stack(
        [
            pairs[..., 0] * real - pairs[..., 1] * imaginary,
            pairs[..., 1] * real + pairs[..., 0] * imaginary,
        ],
        -1,
    )
    turned = turned.flatten(3)
    return turned.type_as(x)


def _projection(inputs: int, outputs: int, rank: int) -> nn.Linear:
    return _Updated(inputs, outputs, rank) if rank else nn.Linear(inputs, outputs, bias=False)


class _Attention(nn.Module):
    def __init__(self, shape: TunedShape, rank: int) -> None:
        super().__init__()
        self.shape = shape
        keys = shape.groups * shape.head_width
        self.q_proj = _projection(shape.width, shape.width, rank)
        self.k_proj = nn.Linear(shape.width, keys, bias=False)
        self.v_proj = _projection(shape.width, keys, rank)
        self.output_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        shape = self.shape
        batch, time, _ = x.shape
        q = self.q_proj(x)
        q = q.view(batch, time, shape.heads, shape.head_width)
        q = _rotated(q, table)
        q = q.transpose(1, 2)
        k = self.k_proj(x)
        v = self.v_proj(x)
        k = k.view(batch, time, -1, shape.head_width)
        v = v.view(batch, time, -1, shape.head_width)
        k = _rotated(k, table)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        expanded = (batch, shape.groups, shape.heads // shape.groups, -1, shape.head_width)
        if shape.heads != shape.groups:
            k = k.unsqueeze(2).expand(expanded).flatten(1, 2)
            v = v.unsqueeze(2).expand(expanded).flatten(1, 2)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output = output.transpose(1, 2).contiguous().view(batch, time, -1)
        return self.output_proj(output)


class _Mlp(nn.Module):
    def __init__(self, shape: TunedShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.inner, bias=False)
        self.w2 = nn.Linear(shape.inner, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.w1(x))
        h = h * self.w3(x)
        return self.w2(h)


class TunedBlock(nn.Module):
    """Attention and MLP with their residual sums."""

    def __init__(self, shape: TunedShape, rank: int = 0) -> None:
        super().__init__()
        self.sa_norm = _Norm(shape.width)
        self.attn = _Attention(shape, rank)
        self.mlp_norm = _Norm(shape.width)
        self.mlp = _Mlp(shape)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = self.sa_norm(x)
        attended = self.attn(h, table)
        h = attended + x
        mlp = self.mlp(self.mlp_norm(h))
        return h + mlp


class TunedDecoder(nn.Module):
    """The model and its loss.

    Args:
        shape: its sizes.
        chunks: parts in which logits and loss are made; 0: at once.
        rank: of the updates of queries and values, all else frozen; 0: everything is trained.
    """

    def __init__(self, shape: TunedShape, chunks: int = 0, rank: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.chunks = chunks
        self.rank = rank
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # made in it, so that sizes in memory are those of its own
        try:
            self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
            self.layers = nn.ModuleList(TunedBlock(shape, rank) for _ in range(shape.layers))
            self.norm = _Norm(shape.width)
            self.output = None if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)
        finally:
            torch.set_default_dtype(usual)
        if rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("lora_" in name)
        rates = 1.0 / (500000 ** (torch.arange(0, shape.head_width, 2).float() / shape.head_width))
        angles = torch.outer(torch.arange(shape.context).float(), rates)
        self.register_buffer("table", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)

    def _logits(self, h: Tensor) -> Tensor:
        return F.linear(h, self.tok_embeddings.weight) if self.output is None else self.output(h)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss and, of the LoRA rows, the logits that live as long."""
        h = self.tok_embeddings(input_ids)
        for layer in self.layers:
            h = layer(h, self.table)
        h = self.norm(h)
        if self.chunks:
            return {"loss": self._chunked(h, labels)}
        logits = self._logits(h).float()
        if self.rank:
            logits = logits[..., :-1, :].contiguous().transpose(1, 2)
            loss = F.cross_entropy(logits, labels[..., 1:].contiguous())
            return {"loss": loss, "logits": logits}
        return {"loss": F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))}

    def _chunked(self, h: Tensor, labels: Tensor) -> Tensor:
        parts = [self._logits(part) for part in h.chunk(self.chunks, dim=1)]
        total = torch.zeros((), device=h.device)
        for logits, target in zip(parts, labels.chunk(self.chunks, dim=1), strict=True):
            flat = logits.reshape(-1, logits.size(-1))
            total = total + F.cross_entropy(flat.float(), target.reshape(-1), reduction="sum")
        return total / (labels != -100).sum()
