# SPDX-License-Identifier: Apache-2.0
"""Small models of every kind that the benchmarks train. Random weights; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Entry:
    """A model, one batch for it and its loss.

    Attributes:
        build: makes the module.
        batch: makes the batch: keyword arguments, or positional ones.
        loss: from the module's output; None: the output has `.loss`.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any], Tensor] | None = None


def call(model: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def labels(output: Tensor) -> Tensor:
    """Cross-entropy of rows of scores."""
    return F.cross_entropy(output, torch.arange(output.shape[0], device=output.device) % output.shape[-1])


def tokens(output: Tensor) -> Tensor:
    """The same of scores per position."""
    return labels(output.flatten(0, -2))


class ConvNet(nn.Module):
    """Residual blocks of convolution, batch normalisation and ReLU."""

    class Block(nn.Module):
        """Two convolutions around a shortcut."""

        def __init__(self, inside: int, outside: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
                nn.BatchNorm2d(outside),
                nn.ReLU(inplace=True),
                nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
                nn.BatchNorm2d(outside),
            )
            same = stride == 1 and inside == outside
            self.shortcut = (
                nn.Identity()
                if same
                else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
            )

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.body(x) + self.shortcut(x))

    def __init__(self, width: int = 32, stages: int = 3, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        layers: list[nn.Module] = []
        channels = width
        for stage in range(stages):
            for index in range(blocks):
                layers.append(self.Block(channels, width << stage, 2 if stage and not index else 1))
                channels = width << stage
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class RecurrentLM(nn.Module):
    """Embedding, recurrent layers, head."""

    def __init__(
        self, kind: type[nn.RNNBase], vocabulary: int = 1000, width: int = 128, hidden: int = 256
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = kind(width, hidden, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


class Decoder(nn.Module):
    """Blocks of causal attention and MLP as in GPT-2, in PyTorch alone."""

    class Block(nn.Module):
        """Attention and MLP, each behind a normalisation and beside a shortcut."""

        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
            )

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in self.qkv(self.first(x)).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.mlp(self.second(x))

    def __init__(
        self, layers: int, width: int, heads: int, vocabulary: int = 1000, length: int = 1024
    ) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([self.Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class UNet(nn.Module):
    """Three scales, with skip connections by concatenation."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def double(inside: int, outside: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inside, outside, 3, padding=1),
                nn.BatchNorm2d(outside),
                nn.ReLU(),
                nn.Conv2d(outside, outside, 3, padding=1),
                nn.BatchNorm2d(outside),
                nn.ReLU(),
            )

        self.down = nn.ModuleList([double(3, width), double(width, 2 * width), double(2 * width, 4 * width)])
        self.widen = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.up = nn.ModuleList([double(4 * width, 2 * width), double(2 * width, width)])
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for index, block in enumerate(self.down):
            x = block(x if not index else F.max_pool2d(x, 2))
            kept.append(x)
        for widen, block, skip in zip(self.widen, self.up, kept[-2::-1], strict=True):
            x = block(torch.cat([skip, widen(x)], 1))
        return self.head(x)


def text(batch: int, length: int, vocabulary: int = 1000, mask: bool = False) -> Callable[[], Batch]:
    """Random token ids that are their own labels."""

    def make() -> Batch:
        ids = torch.randint(0, vocabulary, (batch, length))
        made = {"input_ids": ids, "labels": ids.clone()}
        if mask:
            made["attention_mask"] = torch.ones_like(ids)
        return made

    return make


def hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A class of transformers over a configuration, by name."""

    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made

    return build


def gpt2(
    layers: int, width: int, heads: int, vocabulary: int = 1000, dropout: float = 0.1, length: int = 1024
) -> Callable[[], nn.Module]:
    """A GPT-2 of any size."""
    return hugging_face(
        "GPT2LMHeadModel",
        "GPT2Config",
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=length,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )


def bert(layers: int, width: int, heads: int, vocabulary: int = 1000) -> Callable[[], nn.Module]:
    """A BERT of any size."""
    return hugging_face(
        "BertForMaskedLM",
        "BertConfig",
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
    )


def whisper(layers: int, width: int) -> Callable[[], nn.Module]:
    """A Whisper with as many layers in its encoder as in its decoder."""
    return hugging_face(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        vocab_size=1000,
        num_mel_bins=80,
        max_source_positions=400,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def images(batch: int, size: int) -> Callable[[], Batch]:
    """Random pictures."""
    return lambda: (torch.randn(batch, 3, size, size),)


_LLAMA_LIKE = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 688,
    "vocab_size": 1000,
    "use_cache": False,
}

ZOO: dict[str, Entry] = {
    "gpt2": Entry(gpt2(4, 256, 4), text(4, 256)),
    "bert": Entry(bert(4, 256, 4), text(4, 256, mask=True)),
    "llama": Entry(hugging_face("LlamaForCausalLM", "LlamaConfig", **_LLAMA_LIKE), text(4, 256)),
    "mistral": Entry(
        hugging_face("MistralForCausalLM", "MistralConfig", sliding_window=128, **_LLAMA_LIKE), text(4, 256)
    ),
    "mixtral": Entry(
        hugging_face(
            "MixtralForCausalLM",
            "MixtralConfig",
            num_local_experts=4,
            num_experts_per_tok=2,
            **{**_LLAMA_LIKE, "num_hidden_layers": 2},
        ),
        text(2, 128),
    ),
    "mamba": Entry(
        hugging_face(
            "MambaForCausalLM",
            "MambaConfig",
            num_hidden_layers=2,
            hidden_size=128,
            vocab_size=1000,
            state_size=8,
            use_cache=False,
        ),
        text(2, 64),
    ),
    "t5": Entry(
        hugging_face(
            "T5ForConditionalGeneration",
            "T5Config",
            num_layers=3,
            d_model=256,
            d_ff=512,
            num_heads=4,
            d_kv=64,
            vocab_size=1000,
            use_cache=False,
            decoder_start_token_id=0,
        ),
        text(4, 256),
    ),
    "vit": Entry(
        hugging_face(
            "ViTForImageClassification",
            "ViTConfig",
            num_hidden_layers=4,
            hidden_size=192,
            num_attention_heads=4,
            intermediate_size=768,
        ),
        lambda: {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(0, 2, (4,))},
    ),
    "hubert": Entry(
        hugging_face(
            "HubertForSequenceClassification",
            "HubertConfig",
            num_hidden_layers=2,
            hidden_size=128,
            num_attention_heads=4,
            intermediate_size=512,
            conv_dim=(128,) * 7,
            num_conv_pos_embeddings=32,
            apply_spec_augment=False,
            layerdrop=0.0,
        ),
        lambda: {"input_values": torch.randn(2, 16000), "labels": torch.randint(0, 2, (2,))},
    ),
    "convnet": Entry(ConvNet, images(8, 64), labels),
    "unet": Entry(UNet, images(4, 64), lambda output: output.square().mean()),
    "lstm": Entry(lambda: RecurrentLM(nn.LSTM), lambda: (torch.randint(0, 1000, (4, 256)),), tokens),
    "gru": Entry(lambda: RecurrentLM(nn.GRU), lambda: (torch.randint(0, 1000, (4, 128)),), tokens),
    "mlp": Entry(
        lambda: nn.Sequential(
            *[layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1))],
            nn.Linear(512, 10),
        ),
        lambda: (torch.randn(2048, 512),),
        labels,
    ),
}
