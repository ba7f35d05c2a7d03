# SPDX-License-Identifier: Apache-2.0
"""What `truth.py` trains: models of many kinds, with a precision, an optimizer and a training loop each.

Random weights, nothing is downloaded; each runs in seconds. `tuned` marks the half whose figures were looked
at while rules and the error band were made; the other half is held out: the band's coverage counts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import architectures
import torch
import torch.nn.functional as F
import truth_models as models
from architectures import Entry, hugging_face, images, labels, text, tokens
from torch import Tensor, nn

Parameters = Iterable[nn.Parameter]


def _sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _rmsprop(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-4)


def _adafactor(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-3)


def _fused(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _foreach(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)


@dataclass(frozen=True)
class Workload:
    """One training run.

    Attributes:
        entry: model, batch and loss.
        tuned: looked at while rules were made; otherwise held out.
        precision: "fp32", "autocast" (BF16) or "bf16" (weights).
        optimizer: from parameters.
        accumulate: batches per optimizer step.
        keeps: the loop holds the model's output while backward runs (`out = model(**batch)`); otherwise it
            takes the loss and drops the rest (`loss = model(**batch).loss`).
        adapt: changes the model before training: freezes parts, adds adapters.
    """

    entry: Entry
    tuned: bool
    precision: str = "fp32"
    optimizer: Callable[[Parameters], torch.optim.Optimizer] = torch.optim.AdamW
    accumulate: int = 1
    keeps: bool = True
    adapt: Callable[[nn.Module], None] | None = None

    def build(self) -> nn.Module:
        """The model, ready to train."""
        model = self.entry.build().train()
        if self.adapt is not None:
            self.adapt(model)
        return model.to(torch.bfloat16) if self.precision == "bf16" else model

    def batch(self) -> architectures.Batch:
        """A batch of the right precision."""
        made = self.entry.batch()
        if self.precision != "bf16":
            return made

        def cast(value: Tensor) -> Tensor:
            return value.to(torch.bfloat16) if value.is_floating_point() else value

        if isinstance(made, dict):
            return {name: cast(value) for name, value in made.items()}
        return tuple(map(cast, made))

    def trainable(self, model: nn.Module) -> list[nn.Parameter]:
        """What the optimizer gets."""
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss(self, output: Any) -> Tensor:
        """The loss in an output, or of it."""
        if self.entry.loss is not None:
            return self.entry.loss(output)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        return loss


def _freeze_bert(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "embeddings" in name or "layer.0." in name or "layer.1." in name:
            parameter.requires_grad_(False)


def _adapters(model: nn.Module) -> None:
    """Freezes all; puts low-rank adapters beside the attention's projections."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ("q_proj", "v_proj"):
                setattr(module, name, models.LowRank(child, child.in_features, child.out_features))


def _regression(output: Tensor) -> Tensor:
    return F.mse_loss(output.float(), torch.zeros(output.shape))


def _segmentation(output: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.zeros(output.shape[0], *output.shape[2:], dtype=torch.long))


_BART = hugging_face(
    "BartForConditionalGeneration",
    "BartConfig",
    d_model=256,
    encoder_layers=3,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=1024,
    decoder_ffn_dim=1024,
    vocab_size=2000,
    use_cache=False,
)
_CONVNEXT = hugging_face(
    "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 4, 2]
)
_SWIN = hugging_face(
    "SwinForImageClassification", "SwinConfig", embed_dim=48, depths=[2, 2, 2], num_heads=[2, 4, 8]
)
_SEGFORMER = hugging_face(
    "SegformerForSemanticSegmentation",
    "SegformerConfig",
    hidden_sizes=[32, 64, 96, 128],
    depths=[1, 1, 1, 1],
    decoder_hidden_size=64,
    num_labels=8,
)
_NEOX = hugging_face(
    "GPTNeoXForCausalLM",
    "GPTNeoXConfig",
    num_hidden_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    intermediate_size=1024,
    vocab_size=8000,
    use_cache=False,
)
_DEBERTA = hugging_face(
    "DebertaV2ForSequenceClassification",
    "DebertaV2Config",
    num_hidden_layers=3,
    hidden_size=192,
    num_attention_heads=4,
    intermediate_size=768,
    vocab_size=4000,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
)


def _sounds() -> architectures.Batch:
    return {"input_features": torch.randn(4, 80, 800), "labels": torch.randint(3, 1000, (4, 64))}


def _pictures(batch: int, size: int, kinds: int = 2) -> Callable[[], architectures.Batch]:
    def make() -> architectures.Batch:
        picture = torch.randn(batch, 3, size, size)
        return {"pixel_values": picture, "labels": torch.randint(0, kinds, (batch,))}

    return make


def _segments() -> architectures.Batch:
    return {"pixel_values": torch.randn(4, 3, 128, 128), "labels": torch.randint(0, 8, (4, 128, 128))}


def _sentences() -> architectures.Batch:
    ids = torch.randint(3, 4000, (8, 128))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, (8,))}


def _clicks() -> architectures.Batch:
    bags = torch.randint(0, 20_000, (2048, 6, 5))
    return (torch.randn(2048, 13), bags, torch.randint(0, 2, (2048,)).float())


def _graph() -> architectures.Batch:
    return (torch.randn(2000, 128), torch.randint(0, 2000, (2, 20_000)))


def _pair() -> architectures.Batch:
    return (torch.randn(16, 64, 384), torch.randn(16, 64, 384))


_Z = architectures.ZOO
_UNET = Entry(architectures.UNet, images(4, 64), _segmentation)
_GPT2_WIDE = Entry(architectures.gpt2(4, 256, 4, vocabulary=16_000), text(4, 256, 16_000))
_MIXER = Entry(models.Mixer, images(8, 128), labels)
_GROUPED = Entry(models.GroupedNet, images(4, 128), _regression)
_NOISE = Entry(models.TwoHeads, lambda: (torch.randn(32, 64, 1, 1), torch.randn(32, 3, 32, 32)))

WORKLOADS: dict[str, Workload] = {
    "gpt2": Workload(_Z["gpt2"], True),
    "gpt2-autocast": Workload(_Z["gpt2"], True, "autocast"),
    "gpt2-accumulate": Workload(_Z["gpt2"], False, "autocast", accumulate=3),
    "gpt2-vocab-dropped": Workload(_GPT2_WIDE, True, keeps=False),
    "gpt2-vocab-kept": Workload(_GPT2_WIDE, False),
    "llama-sgd": Workload(_Z["llama"], False, optimizer=_sgd),
    "llama-bf16": Workload(_Z["llama"], True, "bf16"),
    "llama-lora": Workload(_Z["llama"], False, adapt=_adapters),
    "llama-lora-autocast": Workload(_Z["llama"], True, "autocast", adapt=_adapters),
    "mistral-accumulate": Workload(_Z["mistral"], True, accumulate=2),
    "mixtral": Workload(_Z["mixtral"], True),
    "mamba": Workload(_Z["mamba"], False),
    "neox-bf16-adafactor": Workload(Entry(_NEOX, text(4, 256, 8000)), False, "bf16", _adafactor),
    "bert-frozen": Workload(_Z["bert"], True, optimizer=_foreach, adapt=_freeze_bert),
    "bert-autocast-dropped": Workload(_Z["bert"], False, "autocast", keeps=False),
    "deberta": Workload(Entry(_DEBERTA, _sentences), False, optimizer=_rmsprop),
    "t5-adafactor": Workload(_Z["t5"], True, optimizer=_adafactor),
    "bart-autocast": Workload(Entry(_BART, text(4, 128, 2000)), False, "autocast", _fused),
    "vit": Workload(_Z["vit"], False, optimizer=_fused),
    "vit-autocast-sgd": Workload(_Z["vit"], True, "autocast", _sgd),
    "swin": Workload(Entry(_SWIN, _pictures(4, 224)), False),
    "convnext-autocast": Workload(Entry(_CONVNEXT, _pictures(4, 160)), False, "autocast"),
    "segformer": Workload(Entry(_SEGFORMER, _segments), True),
    "hubert": Workload(_Z["hubert"], True),
    "whisper": Workload(Entry(architectures.whisper(2, 192), _sounds), False),
    "convnet-sgd": Workload(_Z["convnet"], True, optimizer=_sgd),
    "convnet-autocast-rmsprop": Workload(_Z["convnet"], False, "autocast", _rmsprop),
    "convnet-bf16": Workload(_Z["convnet"], True, "bf16"),
    "grouped-conv": Workload(_GROUPED, False),
    "grouped-conv-autocast": Workload(_GROUPED, True, "autocast"),
    "unet": Workload(_UNET, False),
    "unet-autocast": Workload(_UNET, True, "autocast", keeps=False),
    "wavenet": Workload(Entry(models.SequenceConv, lambda: (torch.randn(4, 1, 2048),), tokens), True),
    "video": Workload(Entry(models.VideoNet, lambda: (torch.randn(2, 3, 16, 56, 56),), labels), False),
    "two-heads": Workload(_NOISE, True),
    "two-heads-autocast": Workload(_NOISE, False, "autocast"),
    "lstm": Workload(_Z["lstm"], True),
    "lstm-autocast": Workload(_Z["lstm"], False, "autocast", _rmsprop),
    "gru": Workload(_Z["gru"], False, optimizer=_sgd),
    "mlp-autocast": Workload(_Z["mlp"], True, "autocast"),
    "mlp-dropped": Workload(_Z["mlp"], False, keeps=False),
    "mixer": Workload(_MIXER, True),
    "mixer-autocast-foreach": Workload(_MIXER, False, "autocast", _foreach),
    "recommender": Workload(Entry(models.Recommender, _clicks), True),
    "in-place": Workload(Entry(models.InPlaceNet, lambda: (torch.randn(1024, 512),)), False),
    "early-exit": Workload(Entry(models.EarlyExit, lambda: (torch.randn(1024, 256),)), True),
    "siamese": Workload(Entry(models.Siamese, _pair), False),
    "graph": Workload(Entry(models.GraphNet, _graph, labels), True),
}
