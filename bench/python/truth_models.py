# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch models for `truth.py`: each has something that a tracer can get wrong."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mixer(nn.Module):
    """MLP-Mixer: patches, mixing over tokens and over channels in turn."""

    class Block(nn.Module):
        """One pair of mixing layers."""

        def __init__(self, tokens: int, width: int) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.across = nn.Sequential(
                nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens)
            )
            self.along = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.across(self.first(x).transpose(1, 2)).transpose(1, 2)
            return x + self.along(self.second(x))

    def __init__(self, width: int = 192, depth: int = 4, size: int = 128, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        tokens = (size // patch) ** 2
        self.blocks = nn.Sequential(*[self.Block(tokens, width) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1)


class Recommender(nn.Module):
    """Bags of categories and dense features, pairwise interactions, a click probability; its loss inside."""

    def __init__(self, tables: int = 6, rows: int = 20_000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)])
        self.dense = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = tables * (tables + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, dense: Tensor, bags: Tensor, clicked: Tensor) -> Tensor:
        first = self.dense(dense)
        rows = torch.stack([first] + [table(bags[:, i]) for i, table in enumerate(self.tables)], 1)
        products = rows @ rows.transpose(1, 2)
        lower = torch.tril_indices(products.shape[1], products.shape[2], -1)
        features = torch.cat([first, products[:, lower[0], lower[1]]], 1)
        return F.binary_cross_entropy_with_logits(self.top(features).squeeze(1), clicked)


class _Swish(torch.autograd.Function):
    """Swish that saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return grad * gate * (1 + x * (1 - gate))


class InPlaceNet(nn.Module):
    """A custom autograd function, operations in place, and a running statistic of its own."""

    running: Tensor

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)
        self.register_buffer("running", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y.mul_(0.5).add_(x)
            x = _Swish.apply(y)
            self.running.lerp_(x.detach().mean(0), 0.1)
        return F.cross_entropy(self.head(x), torch.zeros(x.shape[0], dtype=torch.long))


class EarlyExit(nn.Module):
    """How many layers run depends on computed values, which fake tensors do not have."""

    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(depth)
            ]
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if x.detach().abs().mean().item() > 1e3:
                break
        return F.cross_entropy(self.head(x), torch.zeros(x.shape[0], dtype=torch.long))


class TwoHeads(nn.Module):
    """A generator and a discriminator that share a step: transposed convolutions up, strided ones down."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(64, 4 * width, 4, 1, 0, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, True),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2, True),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.LeakyReLU(0.2, True),
            nn.Flatten(),
            nn.Linear(64 * width, 1),
        )

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        made = self.generator(noise)
        fooled, told = self.discriminator(made), self.discriminator(real)
        loss = F.binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled))
        return loss + F.binary_cross_entropy_with_logits(told, torch.ones_like(told))


class GroupedNet(nn.Module):
    """Convolutions that are not ordinary: grouped, dilated, depthwise, with group normalisation."""

    class Block(nn.Module):
        """Bottleneck with a grouped or depthwise convolution inside."""

        def __init__(self, width: int, groups: int, dilation: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(width, width, 1, bias=False),
                nn.GroupNorm(8, width),
                nn.SiLU(),
                nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation, groups=groups, bias=False),
                nn.GroupNorm(8, width),
                nn.SiLU(),
                nn.Conv2d(width, width, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(x)

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3)
        kinds = ((8, 1), (1, 2), (width, 1), (8, 4), (width, 2), (1, 1))
        self.blocks = nn.Sequential(*[self.Block(width, groups, dilation) for groups, dilation in kinds])
        self.head = nn.Conv2d(width, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        small = self.blocks(self.stem(x))
        return F.interpolate(self.head(small), size=x.shape[2:], mode="bilinear", align_corners=False)


class SequenceConv(nn.Module):
    """A causal, dilated stack of 1-D convolutions with gates, as in WaveNet."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.inlet = nn.Conv1d(1, width, 1)
        self.gated = nn.ModuleList([nn.Conv1d(width, 2 * width, 2, dilation=1 << i) for i in range(depth)])
        self.mix = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(depth)])
        self.head = nn.Conv1d(width, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for gated, mix in zip(self.gated, self.mix, strict=True):
            value, gate = gated(F.pad(x, (gated.dilation[0], 0))).chunk(2, 1)
            x = x + mix(value.tanh() * gate.sigmoid())
        return self.head(x).transpose(1, 2)


class VideoNet(nn.Module):
    """3-D convolutions and pooling."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 4 * width)
        self.stages = nn.Sequential(
            *[
                nn.Sequential(
                    nn.Conv3d(inside, outside, 3, padding=1),
                    nn.BatchNorm3d(outside),
                    nn.ReLU(),
                    nn.MaxPool3d(2),
                )
                for inside, outside in itertools.pairwise(widths)
            ]
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean((2, 3, 4)))


class Siamese(nn.Module):
    """The same encoder called on two inputs, compared; a checkpointed module is called twice then."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *[
                nn.TransformerEncoderLayer(width, 6, 4 * width, batch_first=True, norm_first=True)
                for _ in range(3)
            ]
        )
        self.project = nn.Linear(width, 128)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        one = F.normalize(self.project(self.encoder(first).mean(1)), dim=-1)
        two = F.normalize(self.project(self.encoder(second).mean(1)), dim=-1)
        return F.cross_entropy(one @ two.t() / 0.07, torch.arange(one.shape[0]))


class GraphNet(nn.Module):
    """Message passing over an edge list: gather, scatter, attention per neighbourhood."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.message = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(depth)])
        self.score = nn.ModuleList([nn.Linear(width, 1) for _ in range(depth)])
        self.head = nn.Linear(width, 8)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for message, score in zip(self.message, self.score, strict=True):
            sent = F.relu(message(torch.cat([nodes[edges[0]], nodes[edges[1]]], 1)))
            weight = score(sent).squeeze(1).exp()
            total = nodes.new_zeros(nodes.shape[0]).index_add(0, edges[1], weight)
            share = (weight / total[edges[1]]).unsqueeze(1)
            nodes = nodes + torch.zeros_like(nodes).index_add_(0, edges[1], share * sent)
        return self.head(nodes)


class LowRank(nn.Module):
    """A frozen linear layer and a trainable product of two thin ones beside it."""

    def __init__(self, base: nn.Module, inside: int, outside: int, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inside, rank, bias=False)
        self.up = nn.Linear(rank, outside, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))
