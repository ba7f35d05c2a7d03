# SPDX-License-Identifier: Apache-2.0
"""Models and the training loop of the GPU tests. Random weights; nothing is downloaded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memscale

Batch = dict[str, Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """How to make a model and a batch on the device, and its loss (None: the output's `.loss`)."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Tensor], Tensor] | None = None


@dataclass
class Result:
    """What a training run leaves behind, on the host.

    Attributes:
        losses: one per step.
        grads: gradients of each step, in parameter order.
        state: the model's state at the end.
        rng: the device generator's state at the end.
        plan: MemScale's plan, or None.
        allocated_peak: `torch.cuda.max_memory_allocated`.
        reserved_peak: `torch.cuda.max_memory_reserved`.
        retries: times that the card was full, and the allocator gave back what it did not use.
    """

    losses: list[Tensor] = field(default_factory=list)
    grads: list[list[Tensor | None]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    rng: Tensor | None = None
    plan: Any = None
    allocated_peak: int = 0
    reserved_peak: int = 0
    retries: int = 0


class ConvNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for index in range(6):
            wide = width << (index // 2)
            layers.append(
                nn.Sequential(
                    nn.Conv2d(channels, wide, 3, 1 + (index in (2, 4)), 1, bias=False),
                    nn.BatchNorm2d(wide),
                    nn.ReLU(inplace=True),
                    nn.Dropout(0.1),
                )
            )
            channels = wide
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class RecurrentBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.rnn(x)[0]
        return x + self.feed(x)


class LSTMModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*[RecurrentBlock(width) for _ in range(4)])
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


def _hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made

    return build


def _text(batch: int, length: int, vocabulary: int, mask: bool = False) -> Callable[[], Batch]:
    def make() -> Batch:
        ids = torch.randint(0, vocabulary, (batch, length))
        made = {"input_ids": ids, "labels": ids.clone()}
        if mask:
            made["attention_mask"] = torch.ones_like(ids)
        return made

    return make


def _labels(output: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.arange(output.shape[0], device=output.device) % output.shape[-1])


def _transformer(model: str, config: str, size: tuple[int, int], **settings: Any) -> Callable[[], nn.Module]:
    layers, width = size
    return _hugging_face(
        model,
        config,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        **settings,
    )


def _text_cases(large: bool) -> dict[str, Case]:
    size = layers, width = (12, 768) if large else (4, 256)
    words = 30522 if large else 1000
    text = (16, 512, words) if large else (4, 256, words)
    gpt2 = {"n_layer": layers, "n_embd": width, "n_head": width // 64, "bos_token_id": 0, "eos_token_id": 0}
    llama = {"intermediate_size": width * 8 // 3, "vocab_size": words, "use_cache": False}
    bert = {"intermediate_size": 4 * width, "vocab_size": words}
    return {
        "gpt2": Case(
            _hugging_face("GPT2LMHeadModel", "GPT2Config", vocab_size=words, use_cache=False, **gpt2),
            _text(*text),
        ),
        "llama": Case(_transformer("LlamaForCausalLM", "LlamaConfig", size, **llama), _text(*text)),
        "bert": Case(_transformer("BertForMaskedLM", "BertConfig", size, **bert), _text(*text, mask=True)),
    }


def cases(scale: int = 1) -> dict[str, Case]:
    """The models; with `scale` 4 activations take some GB, with 1 some MB."""
    large = scale > 1
    size = (12, 768) if large else (4, 256)
    image, count = (
        (224, 64) if large else (128, 16)
    )  # small ones, too, peak in the step and not in the optimizer
    vit = {"intermediate_size": 4 * size[1], "image_size": image, "hidden_dropout_prob": 0.1}
    return {
        **_text_cases(large),
        "vit": Case(
            _transformer("ViTForImageClassification", "ViTConfig", size, **vit),
            lambda: {
                "pixel_values": torch.randn(count, 3, image, image),
                "labels": torch.randint(0, 2, (count,)),
            },
        ),
        "convnet": Case(
            lambda: ConvNet(32 * scale), lambda: (torch.randn(8 * scale, 3, 56 * scale, 56 * scale),), _labels
        ),
        "lstm": Case(
            lambda: LSTMModel(128 * scale),
            lambda: (torch.randint(0, 256, (16 * scale, 64 * scale)),),
            lambda output: _labels(output.flatten(0, 1)),
        ),
    }


def on_device(batch: Batch) -> Batch:
    """The batch on the CUDA device."""
    if isinstance(batch, dict):
        return {name: tensor.cuda() for name, tensor in batch.items()}
    return tuple(tensor.cuda() for tensor in batch)


def call(model: nn.Module, batch: Batch) -> Any:
    """The model's output."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def make(case: Case) -> tuple[nn.Module, Batch]:
    """Model and batch on the device, always the same ones."""
    torch.manual_seed(0)
    model = case.build().cuda().train()
    return model, on_device(case.batch())


def config_for(budget: int) -> memscale.Config:
    """A silent configuration with a byte budget."""
    return memscale.Config(memory_budget=budget, enable_logging=False)


def train(
    case: Case, budget: int | None = None, *, steps: int = 5, bf16: bool = False, keep: bool = True
) -> Result:
    """Trains from a fixed start, under a budget or plainly, and measures.

    Args:
        case: the model.
        budget: for `memscale.wrap`; None: plain.
        steps: of AdamW.
        bf16: under autocast.
        keep: copy losses, gradients and state to the host (costs no device memory).
    """
    model, batch = make(case)
    result = Result()
    if budget is not None:
        memscale.wrap(model, config_for(budget))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.cuda.reset_peak_memory_stats()
    retried = torch.cuda.memory_stats()["num_alloc_retries"]
    for _ in range(steps):
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            output = call(model, batch)
            loss = output.loss if case.loss is None else case.loss(output)
        loss.backward()
        if keep:
            result.losses.append(loss.detach().cpu())
            result.grads.append([None if p.grad is None else p.grad.cpu() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        del output, loss
    torch.cuda.synchronize()
    result.allocated_peak, result.reserved_peak = (
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
    )
    result.retries = torch.cuda.memory_stats()["num_alloc_retries"] - retried
    result.rng = torch.cuda.get_rng_state()
    if keep:
        result.state = {name: value.cpu() for name, value in model.state_dict().items()}
    if budget is not None:
        result.plan = memscale.executor_of(model).plan
    return result


def assert_equal(plain: Result, other: Result) -> None:
    """Losses, gradients of every step, final state and random state, bit for bit."""
    for step, (a, b) in enumerate(zip(plain.losses, other.losses, strict=True)):
        assert torch.equal(a, b), f"loss of step {step}: {a.item()!r} and {b.item()!r}"
    for step, (ours, theirs) in enumerate(zip(plain.grads, other.grads, strict=True)):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert (a is None) == (b is None), f"gradient {index} of step {step} is there in one run only"
            assert a is None or torch.equal(a, b), f"gradient {index} of step {step}"
    assert plain.state.keys() == other.state.keys()
    for name, value in plain.state.items():
        assert torch.equal(value, other.state[name]), name
    assert torch.equal(plain.rng, other.rng), "the device's random state"


def clean_device() -> None:
    """Gives all that can be given back to the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def context_bytes() -> int:
    """What MemScale assumes that the process takes outside the allocator; part of every budget."""
    from memscale.hardware.detect import detect

    return detect(torch.device("cuda")).context_bytes
