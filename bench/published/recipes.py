# SPDX-License-Identifier: Apache-2.0
"""Published whole training runs, rebuilt with random weights: model, batch, optimizer, and what was printed.

Models are built on "meta": no weight is ever held. Each recipe says what its source says; what had to be
found out beyond the table is in `remark`, and docs/guide/published.md tells how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from decoder import SHAPES, Decoder, Method
from torch import Tensor, nn
from tuned_decoder import LLAMA_2_7B, LLAMA_3_2_3B, TunedDecoder

GIB = 2**30
MIB = 2**20

Metric = Literal["allocated", "reserved", "device_used"]


@dataclass(frozen=True)
class Recipe:
    """One run.

    Attributes:
        build: makes the model on the current default device.
        device: card, as `memscale.predict` takes it, and its compute capability.
        batch, sequence: of one forward pass.
        optimizer: makes it from the parameters that are trained.
        metric: which of the prediction's figures was printed, and `unit` what it was divided by.
        blocks: class of the modules that the run checkpoints; None: none.
        keeps_gradients: gradients exist before forward, as under accumulation or zeroed in place.
        accumulate: forward and backward passes per optimizer step.
        half: dtype of autocast, or None.
        context_bytes: what the source says the process takes outside the allocator.
        gap: what the recipe leaves out, for rows that are rebuilt in part; "" otherwise.
        remark: what the table does not say and the source does.
    """

    build: Callable[[], nn.Module]
    device: str
    capability: tuple[int, int]
    batch: int
    sequence: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    metric: Metric
    unit: int
    blocks: str | None = None
    keeps_gradients: bool = False
    accumulate: int = 1
    half: torch.dtype | None = None
    context_bytes: int = 0
    gap: str = ""
    remark: str = ""

    def sample(self, device: torch.device | str) -> dict[str, Tensor]:
        """A batch of ids and labels; the labels are the ids, or zeros for a classifier."""
        ids = torch.ones(self.batch, self.sequence, dtype=torch.int64, device=device)
        return {"input_ids": ids, "labels": torch.ones_like(ids)}


# ---- BERT-large, Trainer of January 2022 ---------------------------------------------------------------


class _SoftmaxOf2022(torch.autograd.Function):
    """Softmax that keeps its argument beside its result, as PyTorch did up to 1.10, for its dtype alone."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        result = torch.softmax(scores, -1)
        ctx.save_for_backward(scores, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        scores, result = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, result, -1, scores.dtype)


def _attention_of_2022(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **unused: Any
) -> tuple[Tensor, Tensor]:
    """Attention written out, with an additive mask of zeros; probabilities in float32 under autocast."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / q.size(-1) ** 0.5
    scores = scores + torch.zeros(q.size(0), 1, 1, k.size(-2), device=q.device)
    weights = _SoftmaxOf2022.apply(scores.float())
    weights = nn.functional.dropout(weights, 0.1, module.training)
    return torch.matmul(weights, v).transpose(1, 2).contiguous(), weights


class BertClassifier(nn.Module):
    """BERT-large for two classes, forward and loss under autocast if asked for."""

    def __init__(self, half: torch.dtype | None) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register("written-out-2022", _attention_of_2022)
        config = BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
        config._attn_implementation = "written-out-2022"
        self.half = half
        self.model = BertForSequenceClassification(config)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        with torch.autocast("cuda", self.half or torch.float16, enabled=self.half is not None):
            return self.model(input_ids=input_ids, labels=labels[:, 0].contiguous() - 1)


def _one_by_one(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


def _all_at_once(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def _fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def _adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, scale_parameter=False, relative_step=False, lr=1e-3)


_BERT_REMARK = "softmax kept its input in PyTorch 1.10; gradients zeroed in place; optimizer one by one"


def _bert(batch: int, optimizer: Any, blocks: str | None = None, half: torch.dtype | None = None) -> Recipe:
    return Recipe(
        build=lambda: BertClassifier(half),
        device="V100 16GB",
        capability=(7, 0),
        batch=batch,
        sequence=512,
        optimizer=optimizer,
        metric="device_used",
        unit=MIB,
        blocks=blocks,
        keeps_gradients=True,
        accumulate=4 // batch,
        half=half,
        context_bytes=1343 * MIB,
        remark=_BERT_REMARK,
    )


# ---- decoders ------------------------------------------------------------------------------------------


def _ladder(chunks: int, blocks: str | None = None, gap: str = "") -> Recipe:
    return Recipe(
        build=lambda: TunedDecoder(LLAMA_3_2_3B, chunks),
        device="A100 80GB",
        capability=(8, 0),
        batch=2,
        sequence=4096,
        optimizer=_fused,
        metric="allocated",
        unit=GIB,
        blocks=blocks,
        gap=gap,
        remark="fused AdamW; flex attention keeps what flash attention keeps",
    )


def _frozen(model: str, batch: int, longest: int, method: Method) -> Recipe:
    return Recipe(
        build=lambda: Decoder(SHAPES[model], longest, method),
        device="A100 40GB",
        capability=(8, 0),
        batch=batch,
        sequence=longest,
        optimizer=_all_at_once,
        metric="allocated",
        unit=10**9,
        remark="first batch has the longest sample; logits as float32 chunks; source of 2023-10-24",
    )


_TUNED_LORA = Recipe(
    build=lambda: TunedDecoder(LLAMA_2_7B, rank=8),
    device="RTX 4090",
    capability=(8, 9),
    batch=4,
    sequence=2048,
    optimizer=_all_at_once,
    metric="reserved",
    unit=10**9,
    blocks="TunedBlock",
    remark="the table does not say which peak: reserved here, allocated would be -5.8 %",
)

_COMPILED = "the run is compiled, which fuses operations and keeps less for backward"


def recipe_of(row: dict[str, str]) -> Recipe | None:
    """The run of a row of `measurements.csv`, or None for one that cannot be expressed."""
    technique = row["technique"]
    if row["set"] == "hf_bert_large":
        return _BERT.get((row["optimizer"], technique))
    if row["set"] == "torchtune_optflags":
        return _LADDER.get(technique)
    if row["set"] == "torchtune_2024" and technique == "LoRA" and row["batch"] == "4":
        return _TUNED_LORA
    if row["set"] == "litgpt_resource" and row["n_gpus"] == "1" and technique in _METHODS:
        return _frozen(row["model"], int(row["batch"]), int(row["seq"]), _METHODS[technique])
    return None


_METHODS: dict[str, Method] = {
    "LoRA quant=None": "lora",
    "Adapter quant=None": "adapter",
    "Adapter_v2 quant=None": "adapter-v2",
}


_BERT = {
    ("AdamW", "vanilla"): _bert(4, _one_by_one),
    ("AdamW", "grad_accum4"): _bert(1, _one_by_one),
    ("AdamW", "grad_accum4+checkpoint"): _bert(1, _one_by_one, "BertLayer"),
    ("AdamW", "fp16"): _bert(4, _one_by_one, half=torch.float16),
    ("AdamW", "grad_accum4+checkpoint+fp16"): _bert(1, _one_by_one, "BertLayer", torch.float16),
    ("Adafactor", "vanilla"): _bert(4, _adafactor),
    ("Adafactor", "grad_accum4+checkpoint+fp16"): _bert(1, _adafactor, "BertLayer", torch.float16),
}

_LADDER = {
    "+packed": _ladder(0),
    "+chunked_ce": _ladder(8, gap=_COMPILED),
    "+activation_ckpt": _ladder(8, "TunedBlock", gap=_COMPILED),
}

_REASONS = (
    ("quant=", "4-bit weights: a technique that MemScale does not have"),
    ("QLoRA", "4-bit weights: a technique that MemScale does not have"),
    ("FSDP", "several cards"),
    ("compile", "torch.compile"),
    ("baseline", "unpadded samples of unknown lengths"),
    ("optimizer_in_bwd", "optimizer in backward: a technique that MemScale does not have yet"),
    ("opt-in-bwd", "optimizer in backward and a paged 8-bit optimizer: not in MemScale yet"),
    ("opt_in_bwd", "optimizer in backward, offload of activations or 8-bit state: not in MemScale yet"),
    ("offload", "offload: a technique that MemScale does not have yet"),
    ("8bit", "8-bit optimizer state: a technique that MemScale does not have yet"),
    ("full finetune alpaca", "unpadded samples of unknown lengths"),
    ("LoRA", "recipe or sequence length not given"),
)


def reason_against(row: dict[str, str]) -> str:
    """Why a row cannot be expressed."""
    if row["n_gpus"] not in ("", "1"):
        return "several cards"
    if "bnb" in row["optimizer"] or "8bit" in row["optimizer"] or "4bit" in row["optimizer"]:
        return "8-bit or 4-bit optimizer state: a technique that MemScale does not have yet"
    if row["set"] == "unsloth_maxctx":
        return "4-bit weights: a technique that MemScale does not have"
    for word, reason in _REASONS:
        if word in row["technique"]:
            return reason
    return "not rebuilt"
