# SPDX-License-Identifier: Apache-2.0
"""The benchmark models, in the order of their importance, and the sizes that a CPU trains in seconds.

A reduced shape is the same architecture with half the width, heads and tokens, a quarter of the layers and an
eighth of the vocabulary. Then the parameters of the layers, those of the embeddings, the activations and the
logits are all a sixteenth: the shares that they have of the memory stay what they are. A tiny shape is for
tests alone, and shows nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from memscale.errors import MemScaleError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BENCHMARK_MODELS", "SCALES", "WAYS", "BenchmarkModel", "Shape", "blocks_of", "build", "chosen"]

SCALES: Final = ("full", "reduced", "tiny")

WAYS: Final = ("plain-fp32", "plain-bf16", "resident", "smallest", "wrap")
"""What is measured of every model, see `ways`. In order: what others are compared with comes first."""


@dataclass(frozen=True)
class Shape:
    """An architecture, and what it is trained on.

    Attributes:
        kind: "bert" (masked language model) or "gpt2" (causal language model).
        layers: blocks.
        width: of the hidden states; the MLP has four times that.
        heads: of attention.
        words: vocabulary.
        batch: samples per step.
        length: tokens per sample.
    """

    kind: str
    layers: int
    width: int
    heads: int
    words: int
    batch: int
    length: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True)
class BenchmarkModel:
    """A model of the registry.

    Attributes:
        name: for the command line.
        title: for tables.
        full: as it is meant.
        reduced: for a host without a card.
        tiny: for tests.
        resident_bytes: peak to reach on a card with weights that stay there; the budget of that run.
        smallest_bytes: peak to reach on a card at all.
    """

    name: str
    title: str
    full: Shape
    reduced: Shape
    tiny: Shape
    resident_bytes: int
    smallest_bytes: int

    def shape(self, scale: str) -> Shape:
        """The shape of one of `SCALES`."""
        shape: Shape = getattr(self, scale)
        return shape


_TINY_GPT2 = Shape("gpt2", 2, 64, 2, 512, 2, 64)
_TINY_BERT = Shape("bert", 2, 64, 2, 512, 2, 64)

BENCHMARK_MODELS: Final = (
    BenchmarkModel(
        "gpt2-medium", "GPT-2 Medium",
        Shape("gpt2", 24, 1024, 16, 50257, 4, 512), Shape("gpt2", 6, 512, 8, 6282, 4, 256), _TINY_GPT2,
        1_050_000_000, 450_000_000,
    ),
    BenchmarkModel(
        "bert-base", "BERT-Base",
        Shape("bert", 12, 768, 12, 30522, 16, 128), Shape("bert", 3, 384, 6, 3815, 8, 128), _TINY_BERT,
        400_000_000, 250_000_000,
    ),
    BenchmarkModel(
        "gpt2-large", "GPT-2 Large",
        Shape("gpt2", 36, 1280, 20, 50257, 2, 512), Shape("gpt2", 9, 640, 10, 6282, 2, 256), _TINY_GPT2,
        1_900_000_000, 500_000_000,
    ),
    BenchmarkModel(
        "bert-large", "BERT-Large",
        Shape("bert", 24, 1024, 16, 30522, 16, 128), Shape("bert", 6, 512, 8, 3815, 8, 128), _TINY_BERT,
        900_000_000, 350_000_000,
    ),
    BenchmarkModel(
        "gpt2-xl", "GPT-2 XL",
        Shape("gpt2", 48, 1600, 25, 50257, 1, 512), Shape("gpt2", 12, 800, 10, 6282, 1, 256), _TINY_GPT2,
        3_600_000_000, 600_000_000,
    ),
)  # fmt: skip
"""The models of the contract. Their order is that of the measurements: the most telling first."""


def chosen(names: list[str] | None) -> tuple[BenchmarkModel, ...]:
    """The models of these names, in the registry's order; None: all.

    Raises:
        ValueError: there is none of a name.
    """
    if names is None:
        return BENCHMARK_MODELS
    known = [model.name for model in BENCHMARK_MODELS]
    for name in names:
        if name not in known:
            raise ValueError(f"there is no benchmark model {name!r}; allowed: {', '.join(known)}")
    return tuple(model for model in BENCHMARK_MODELS if model.name in names)


def build(shape: Shape) -> nn.Module:
    """A model with random weights, on the default device. Nothing is downloaded.

    Raises:
        MemScaleError: transformers is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MemScaleError(
            "the benchmark models are built by transformers, which is not installed: pip install transformers"
        ) from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if shape.kind == "bert":
        bert = transformers.BertConfig(
            num_hidden_layers=shape.layers,
            hidden_size=shape.width,
            num_attention_heads=shape.heads,
            intermediate_size=4 * shape.width,
            vocab_size=shape.words,
        )
        return transformers.BertForMaskedLM(bert)
    gpt2 = transformers.GPT2Config(
        n_layer=shape.layers,
        n_embd=shape.width,
        n_head=shape.heads,
        vocab_size=shape.words,
        n_positions=max(1024, shape.length),
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(gpt2)


def blocks_of(model: nn.Module) -> Any:
    """The blocks of a model that `build` made."""
    return model.get_submodule("bert.encoder.layer" if hasattr(model, "bert") else "transformer.h")
