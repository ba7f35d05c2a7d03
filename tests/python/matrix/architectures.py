# SPDX-License-Identifier: Apache-2.0
"""The rows of the equality matrix: models of every kind, small, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import models as zoo
from zoo.blocks import WIDTH, Block, LayerDrop, Stack, inputs
from zoo.models import LENGTH, VOCABULARY, Case, mean_square, numbers
from zoo.odd import ODD


@dataclass(frozen=True)
class Architecture:
    """One row.

    Attributes:
        kind: what it stands for.
        case: the model, its batches and its loss.
        freeze: it trains without the case's frozen part.
        chains: it has a `nn.Sequential` with two children in a row that may run twice.
    """

    kind: str
    case: Case
    freeze: bool = False
    chains: bool = False

    @property
    def name(self) -> str:
        return self.case.name


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 16}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lists = {"suppress_tokens": None, "begin_suppress_tokens": None}
    return WhisperForConditionalGeneration(
        WhisperConfig(
            **sizes, **heads, **special, **lists, d_model=32, vocab_size=VOCABULARY, max_source_positions=30,
            max_target_positions=24, dropout=0.1, attention_dropout=0.1,
        )
    )  # fmt: skip


def _whisper_batch(step: int) -> dict[str, Tensor]:
    features = torch.randn(4, 16, 60, generator=zoo.generator(step))
    return {"input_features": features, "labels": zoo.tokens(step, 4, 16)}


def _mixtral() -> nn.Module:
    from transformers import MixtralForCausalLM

    config = zoo.case("mixtral").build().config
    config.output_router_logits = False  # its blocks are then functions of their inputs
    return MixtralForCausalLM(config)


def _written_out(name: str, dropout: str) -> Case:
    """A case whose attention no kernel computes, without dropout on its weights."""

    def build() -> nn.Module:
        model: Any = zoo.case(name).build()
        model.config._attn_implementation = "eager"
        setattr(model.config, dropout, 0.0)
        made: nn.Module = type(model)(model.config)
        return made

    return replace(zoo.case(name), name=f"{name}-eager", build=build)


class UNet(nn.Module):
    """Two scales with batch normalisation, and a skip connection by concatenation."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._double(3, width), self._double(width, 2 * width)])
        self.widen = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up, self.head = self._double(2 * width, width), nn.Conv2d(width, 3, 1)

    @staticmethod
    def _double(inside: int, outside: int) -> nn.Sequential:
        first = [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
        second = [nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.Dropout2d(0.1)]
        return nn.Sequential(*first, *second)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.down[0](x)
        x = self.down[1](F.max_pool2d(kept, 2))
        return self.head(self.up(torch.cat([kept, self.widen(x)], 1)))


class Tied(nn.Module):
    """All blocks share one weight, which is also the head's and, transposed, the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(0.1) for _ in range(3))
        for block in self.blocks[1:]:
            block.up.weight = self.blocks[0].up.weight
            block.norm = self.blocks[0].norm
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Adapted(nn.Module):
    """A frozen projection with a trained low-rank path beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.first = nn.Linear(base.in_features, rank, bias=False)
        self.second = nn.Linear(rank, base.out_features, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.second(self.first(self.drop(x)))


class AdaptedBlock(Block):
    """A block whose projections are frozen and adapted; its normalisation is frozen too."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.norm.requires_grad_(False)
        self.up, self.down = Adapted(self.up), Adapted(self.down)


class Views(Block):
    """Works on views, returns a view with strides of its own, and beside it a view of its input."""

    def forward(self, x: Tensor) -> Any:
        first, second = x.chunk(2, -1)
        swapped = torch.cat([second, first], -1).t()
        y = super().forward(swapped.t())
        wide = y.unsqueeze(1).expand(-1, 2, -1)
        return wide.mul(1.5)[:, 1].t().contiguous().t(), x.view(-1, 2, WIDTH // 2).select(1, 0)


class ViewsOfViews(Stack):
    def __init__(self) -> None:
        super().__init__(Views)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, part = block(x)
            x = torch.cat([x[:, WIDTH // 2 :], part * 0.5], -1)
        return x


class Dropping(LayerDrop):
    """Leaves blocks out at random; what is before them always runs."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(0.1))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class Keyworded(Block):
    """Takes keywords: nested tensors, text, a dtype, a flag, nothing, a function."""

    def forward(self, x: Tensor, *, parts: dict[str, Any], name: str, kind: torch.dtype, **more: Any) -> Any:
        y = super().forward(x).to(kind) * parts["scales"][int(name) % 2]
        return {"y": more["function"](y) if more["flag"] else y, "name": name, "nothing": more["nothing"]}


class TakesKeywords(Stack):
    """Keyword and non-tensor arguments; dictionaries with text in them come back."""

    def __init__(self) -> None:
        super().__init__(Keyworded)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        parts = {"scales": (self.scale, self.scale.detach() * 1.1), "width": WIDTH}
        more = {"function": torch.tanh, "flag": True, "nothing": None, "kind": torch.float32}
        for number, block in enumerate(self.blocks):
            made = block(x, parts=parts, name=str(number), **more)
            assert made["name"] == str(number) and made["nothing"] is None
            x = made["y"]
        return x


class SharedTwice(nn.Module):
    """One block called twice, and another that lies in two places of the model."""

    def __init__(self) -> None:
        super().__init__()
        twice = Block(0.1)
        self.blocks = nn.ModuleList([Block(0.1), twice, Block(0.1), twice])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.blocks[0](x))
        for block in self.blocks[1:]:
            x = block(x)
        return x


class Inner(nn.Module):
    """A block of blocks: normalised, gated, with a chain inside."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)]
        self.chain, self.block = nn.Sequential(*layers), Block(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * torch.sigmoid(self.chain(x))


def _chain() -> nn.Sequential:
    """Running statistics, random numbers, in-place operations, a tied and a frozen weight."""
    first, second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)
    tied = nn.Linear(2 * WIDTH, 2 * WIDTH)
    tied.weight = second.weight
    tied.bias.requires_grad_(False)
    inner = nn.Sequential(tied, nn.BatchNorm1d(2 * WIDTH), nn.Tanh())
    return nn.Sequential(
        first, nn.BatchNorm1d(2 * WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2), second, nn.GELU(),
        inner, nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH),
    )  # fmt: skip


def _mlp() -> nn.Sequential:
    return nn.Sequential(*(Block(0.1) for _ in range(5)))


def _odd(name: str) -> Case:
    return next(case for case in ODD if case.name == name)


def _plain(name: str, build: Callable[[], nn.Module], batch: Callable[[int], Any] = inputs) -> Case:
    return Case(name, build, batch, mean_square, profile=None)


def _tokens(step: int) -> tuple[Tensor]:
    return (zoo.tokens(step, 4, LENGTH // 2),)


ARCHITECTURES = (
    Architecture("decoder", zoo.case("gpt2")),
    Architecture("decoder, attention written out", _written_out("gpt2", "attn_pdrop")),
    Architecture("decoder, grouped queries", zoo.case("llama")),
    Architecture("mixture of experts", replace(zoo.case("mixtral"), build=_mixtral)),
    Architecture("mixture of experts, router's loss", replace(zoo.case("mixtral"), name="mixtral-router")),
    Architecture("state space", zoo.case("mamba")),
    Architecture("encoder", zoo.case("bert")),
    Architecture("encoder-decoder", zoo.case("t5")),
    Architecture("encoder-decoder, attention with biases", _written_out("t5", "dropout_rate")),
    Architecture("vision", zoo.case("vit")),
    Architecture("audio encoder, layer drop", zoo.case("hubert")),
    Architecture("audio encoder-decoder", Case("whisper", _whisper, _whisper_batch)),
    Architecture("convolution", zoo.case("convnet"), chains=True),
    Architecture("convolution, skips", _plain("unet", UNet, numbers(2, 3, 16, 16)), chains=True),
    Architecture("LSTM", zoo.case("lstm")),
    Architecture("GRU", zoo.case("gru")),
    Architecture("chain", _plain("sequential", _chain, numbers(64, WIDTH)), chains=True),
    Architecture("chain of blocks", _plain("sequential-blocks", _mlp), chains=True),
    Architecture("control flow", _odd("data-dependent")),
    Architecture("random control flow", _plain("layer-drop", Dropping)),
    Architecture("custom autograd function", _odd("autograd-function")),
    Architecture("in-place operations", _odd("in-place-and-views")),
    Architecture("views", _plain("views", ViewsOfViews)),
    Architecture("tied weights", Case("tied", Tied, _tokens, zoo.next_token_loss)),
    Architecture("frozen base, adapters", _plain("adapters", lambda: Stack(AdaptedBlock))),
    Architecture("frozen part", replace(zoo.case("llama"), name="llama-frozen"), freeze=True),
    Architecture("submodule called twice", _plain("shared", SharedTwice)),
    Architecture("modules in modules", _plain("nested", lambda: Stack(Inner)), chains=True),
    Architecture("dataclass and dict outputs", _odd("structured-outputs")),
    Architecture("keyword arguments", _plain("keywords", TakesKeywords)),
    Architecture("parametrizations", _odd("parametrizations")),
    Architecture("Python's and NumPy's random numbers", _odd("python-random")),
    Architecture("user's own checkpoints inside", _odd("checkpoint-inside")),
    Architecture("complex numbers", _odd("complex")),
    Architecture("changes its input", _odd("changes-its-input")),
    Architecture("counts its calls", _odd("counts-in-number")),
)


def architecture(name: str) -> Architecture:
    """A row by its model's name."""
    return next(item for item in ARCHITECTURES if item.name == name)
