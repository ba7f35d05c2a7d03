# SPDX-License-Identifier: Apache-2.0
"""What `by_hand.py` trains: models of many kinds, big enough that a step takes a good part of a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import truth_models as models
from architectures import Batch, ConvNet, Entry, bert, gpt2, hugging_face, images, labels, text, whisper
from hand import Stacks
from torch import Tensor, nn


@dataclass(frozen=True)
class Contestant:
    """A model and where its blocks are.

    Attributes:
        entry: model, batch and loss.
        stacks: the blocks that somebody would checkpoint by hand.
    """

    entry: Entry
    stacks: Callable[[nn.Module], Stacks]


def at(*paths: str, together: int = 1) -> Callable[[nn.Module], Stacks]:
    """Blocks that are the children of the modules at some paths, `together` children each."""

    def find(model: nn.Module) -> Stacks:
        found = []
        for path in paths:
            children = list(model.get_submodule(path).children())
            found.append([children[i : i + together] for i in range(0, len(children), together)])
        return found

    return find


class Encoder(nn.Module):
    """PyTorch's own transformer layers, as in translation and time series, and a head."""

    def __init__(self, width: int = 384, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 6, 4 * width, batch_first=True) for _ in range(depth)]
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


_LLAMA = {
    "num_hidden_layers": 8,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 1024,
    "vocab_size": 2000,
    "use_cache": False,
}

_T5 = hugging_face(
    "T5ForConditionalGeneration",
    "T5Config",
    num_layers=6,
    d_model=320,
    d_ff=1280,
    num_heads=5,
    d_kv=64,
    vocab_size=2000,
    use_cache=False,
    decoder_start_token_id=0,
)
_VIT = hugging_face(
    "ViTForImageClassification",
    "ViTConfig",
    num_hidden_layers=8,
    hidden_size=256,
    num_attention_heads=4,
    intermediate_size=1024,
)
_MAMBA = hugging_face(
    "MambaForCausalLM",
    "MambaConfig",
    num_hidden_layers=4,
    hidden_size=192,
    vocab_size=1000,
    state_size=8,
    use_cache=False,
)
_MIXTRAL = hugging_face(
    "MixtralForCausalLM",
    "MixtralConfig",
    num_local_experts=4,
    num_experts_per_tok=2,
    **{**_LLAMA, "num_hidden_layers": 6, "intermediate_size": 512},
)


def _mlp() -> nn.Module:
    layers = [layer for _ in range(16) for layer in (nn.Linear(1024, 1024), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers)


def _pictures() -> Batch:
    return {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(0, 2, (4,))}


def _sounds() -> Batch:
    return {"input_features": torch.randn(2, 80, 800), "labels": torch.randint(3, 1000, (2, 128))}


CONTESTANTS: dict[str, Contestant] = {
    "gpt2": Contestant(Entry(gpt2(8, 384, 6, 2000, 0.0), text(2, 384, 2000)), at("transformer.h")),
    "gpt2-dropout": Contestant(Entry(gpt2(8, 384, 6, 2000), text(2, 384, 2000)), at("transformer.h")),
    "llama": Contestant(
        Entry(hugging_face("LlamaForCausalLM", "LlamaConfig", **_LLAMA), text(2, 384, 2000)),
        at("model.layers"),
    ),
    "bert": Contestant(Entry(bert(8, 384, 6, 2000), text(4, 192, 2000, mask=True)), at("bert.encoder.layer")),
    "t5": Contestant(Entry(_T5, text(4, 192, 2000)), at("encoder.block", "decoder.block")),
    "vit": Contestant(Entry(_VIT, _pictures), at("vit.layers")),
    "whisper": Contestant(
        Entry(whisper(6, 256), _sounds), at("model.encoder.layers", "model.decoder.layers")
    ),
    "mixtral": Contestant(Entry(_MIXTRAL, text(2, 256, 2000)), at("model.layers")),
    "mamba": Contestant(Entry(_MAMBA, text(2, 96)), at("backbone.layers")),
    "encoder": Contestant(Entry(Encoder, lambda: (torch.randn(4, 192, 384),), labels), at("layers")),
    "mixer": Contestant(
        Entry(lambda: models.Mixer(width=256, depth=8), images(8, 128), labels), at("blocks")
    ),
    "convnet": Contestant(
        Entry(lambda: ConvNet(width=48, stages=3, blocks=3), images(8, 64), labels),
        at("layers"),
    ),
    "mlp": Contestant(Entry(_mlp, lambda: (torch.randn(1024, 1024),), labels), at("", together=3)),
}
