# SPDX-License-Identifier: Apache-2.0
"""The peers: what others offer for the same work, each with the settings that its documentation recommends.

Every peer trains under BF16 autocast, which all of them recommend or allow, but those that have a BF16 of
their own: DeepSpeed and torchao-offload-bf16. It is compared with MemScale at its own peak. A peer that is
missing, or cannot run here, is a row with the reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

import torch
from torch import Tensor, nn

from memscale.benchmarks.job import Job
from memscale.benchmarks.loops import LEARNING_RATE, Batch, Loop
from memscale.benchmarks.registry import blocks_of

__all__ = ["PEERS", "Peer", "prepare_peer"]


@dataclass(frozen=True)
class Peer:
    """Another way to save memory or time.

    Attributes:
        name: of the way.
        package: distribution that it comes with; its version goes into the row.
        settings: what is switched on, in words.
        documentation: address of the page that recommends them.
        prepare: makes the loop.
        needs: modules that must be installed.
        card_only: why it cannot do anything on a CPU host; "" where it can.
    """

    name: str
    package: str
    settings: str
    documentation: str
    prepare: Callable[[Job, nn.Module], Loop]
    needs: tuple[str, ...] = ()
    card_only: str = ""

    def why_not(self, device: str) -> str:
        """Why it cannot run here; "" if it can be tried."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if self.card_only and device != "cuda":
            return f"not on a CPU host: {self.card_only}"
        return f"not installed: {', '.join(missing)}" if missing else ""

    @property
    def version(self) -> str:
        """Of its package; "" where it is not installed."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return ""


def prepare_peer(job: Job, model: nn.Module) -> Loop:
    """A model in the way of a peer."""
    return next(peer for peer in PEERS if peer.name == job.way).prepare(job, model)


# ---- PyTorch -----------------------------------------------------------------------------------------


_WEIGHT_DECAY: Final = 0.01
"""PyTorch's, for every peer: DeepSpeed's own is 0."""


def _adamw(job: Job, model: nn.Module, fused: bool | None = None) -> torch.optim.Optimizer:
    """PyTorch's, as the trainers of Hugging Face make it: fused on a card."""
    fused = job.device == "cuda" if fused is None else fused
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=_WEIGHT_DECAY, fused=fused or None
    )


def _checkpoint(job: Job, model: nn.Module) -> Loop:
    from torch.utils.checkpoint import checkpoint

    for block in blocks_of(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return Loop(model, _adamw(job, model))


def _save_on_cpu(job: Job, model: nn.Module) -> Loop:
    around = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=True)
    return Loop(model, _adamw(job, model), around)


def _fused(job: Job, model: nn.Module) -> Loop:
    return Loop(model, _adamw(job, model, fused=True))


# ---- Hugging Face ------------------------------------------------------------------------------------


def _checkpointed(model: Any, **more: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False}, **more)
    else:  # its name before
        model.gradient_checkpointing_enable({"use_reentrant": False}, **more)


def _hf_checkpoint(job: Job, model: nn.Module) -> Loop:
    _checkpointed(model)
    return Loop(model, _adamw(job, model))


def _hf_checkpoint_offload(job: Job, model: nn.Module) -> Loop:
    _checkpointed(model, offload=True)
    return Loop(model, _adamw(job, model))


def _hf_stack(job: Job, model: nn.Module) -> Loop:
    _checkpointed(model)
    return _bitsandbytes(job, model)


def _trl(job: Job, model: nn.Module) -> Loop:
    importlib.import_module("accelerate").PartialState()  # TRL's messages need it, as in its trainers
    trl = importlib.import_module("trl.models.activation_offloading")
    _checkpointed(model)  # TRL's trainers switch it on, and their documentation asks for both
    # It looks for the head under names that a BERT does not have, and only warns where it finds none.
    context = trl.get_act_offloading_ctx_manager(model, warn_if_no_head=job.shape.kind != "bert")
    return Loop(model, _adamw(job, model), lambda: context)


def _accelerate(job: Job, model: nn.Module) -> Loop:
    accelerator = importlib.import_module("accelerate").Accelerator(
        mixed_precision="bf16", cpu=job.device == "cpu"
    )
    prepared, optimizer = accelerator.prepare(model, _adamw(job, model, fused=True))
    return Loop(prepared, optimizer, backward=accelerator.backward, autocast=False)


# ---- 8-bit state -------------------------------------------------------------------------------------


def _bitsandbytes(job: Job, model: nn.Module) -> Loop:
    optim = importlib.import_module("bitsandbytes.optim")
    return Loop(model, optim.AdamW8bit(model.parameters(), lr=LEARNING_RATE, weight_decay=_WEIGHT_DECAY))


def _bitsandbytes_paged(job: Job, model: nn.Module) -> Loop:
    optim = importlib.import_module("bitsandbytes.optim")
    return Loop(model, optim.PagedAdamW8bit(model.parameters(), lr=LEARNING_RATE, weight_decay=_WEIGHT_DECAY))


def _torchao(job: Job, model: nn.Module) -> Loop:
    optim = importlib.import_module("torchao.optim")
    return Loop(model, optim.AdamW8bit(model.parameters(), lr=LEARNING_RATE, weight_decay=_WEIGHT_DECAY))


def _torchao_offload(job: Job, model: nn.Module) -> Loop:
    optimizer = importlib.import_module("torchao.optim").CPUOffloadOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        offload_gradients=True,
        fused=True,
        lr=LEARNING_RATE,
        weight_decay=_WEIGHT_DECAY,
    )
    return Loop(model, optimizer)


def _torchao_offload_bf16(job: Job, model: nn.Module) -> Loop:
    loop = _torchao_offload(job, model.to(torch.bfloat16))
    loop.autocast = False
    return loop


# ---- kernels and engines -----------------------------------------------------------------------------


def _liger(job: Job, model: Any) -> Loop:
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()

    def forward(batch: Batch) -> Tensor:
        if job.shape.kind == "bert":
            head = model.cls.predictions
            hidden, labels = head.transform(model.bert(batch["input_ids"])[0]), batch["labels"]
            decoder = head.decoder
        else:
            hidden, labels = model.transformer(batch["input_ids"])[0][:, :-1], batch["labels"][:, 1:]
            decoder = model.lm_head
        flat = hidden.flatten(0, 1).to(torch.get_autocast_dtype(job.device))
        bias = None if decoder.bias is None else decoder.bias.to(flat.dtype)
        value: Tensor = loss(decoder.weight.to(flat.dtype), flat, labels.flatten(), bias)
        return value

    return Loop(model, _adamw(job, model, fused=True), forward=forward)


def _deepspeed(job: Job, model: nn.Module) -> Loop:
    return _deepspeed_with(job, model, {"stage": 2, "contiguous_gradients": True, "overlap_comm": True})


def _deepspeed_3(job: Job, model: nn.Module) -> Loop:
    return _deepspeed_with(job, model, {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}})


def _deepspeed_with(job: Job, model: nn.Module, zero: dict[str, Any]) -> Loop:
    deepspeed = importlib.import_module("deepspeed")
    _checkpointed(model)  # its tutorial runs with --checkpoint-activations
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    settings = {
        "train_micro_batch_size_per_gpu": job.shape.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": _WEIGHT_DECAY}},
        "zero_optimization": {**zero, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=settings)
    return Loop(engine, optimizer, backward=engine.backward, update=engine.step, autocast=False)


_NO_DEVICE: Final = "what it moves to host memory is there already"

PEERS: Final = (
    Peer(
        "torch-checkpoint", "torch", "torch.utils.checkpoint around every block, use_reentrant=False",
        "https://docs.pytorch.org/docs/stable/checkpoint.html", _checkpoint,
    ),
    Peer(
        "hf-checkpoint", "transformers", "activation_checkpointing_enable, use_reentrant=False",
        "https://huggingface.co/docs/transformers/en/grad_checkpointing", _hf_checkpoint,
    ),
    Peer(
        "hf-checkpoint+bnb", "bitsandbytes", "both at once: gradient checkpointing and AdamW8bit",
        "https://huggingface.co/docs/transformers/main/en/perf_train_gpu_one", _hf_stack, ("bitsandbytes",),
    ),
    Peer(
        "bitsandbytes", "bitsandbytes", "AdamW8bit",
        "https://huggingface.co/docs/bitsandbytes/main/en/optimizers", _bitsandbytes, ("bitsandbytes",),
    ),
    Peer(
        "torchao", "torchao", "torchao.optim.AdamW8bit",
        "https://github.com/pytorch/ao/blob/main/torchao/optim/README.md", _torchao, ("torchao",),
    ),
    Peer(
        "torch-fused", "torch", "AdamW(fused=True)",
        "https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html", _fused,
    ),
    Peer(
        "accelerate", "accelerate", 'Accelerator(mixed_precision="bf16"), AdamW(fused=True)',
        "https://huggingface.co/docs/accelerate/quicktour", _accelerate, ("accelerate",),
    ),
    Peer(
        "trl-offload", "trl", "OffloadActivations with streams, beside gradient checkpointing",
        "https://huggingface.co/docs/trl/main/en/reducing_memory_usage", _trl, ("trl", "accelerate"),
        _NO_DEVICE,
    ),
    Peer(
        "hf-checkpoint-offload", "transformers", "activation_checkpointing_enable(offload=True)",
        "https://huggingface.co/docs/transformers/en/grad_checkpointing", _hf_checkpoint_offload, (),
        _NO_DEVICE,
    ),
    Peer(
        "torchao-offload", "torchao", "CPUOffloadOptimizer over AdamW(fused=True), offload_gradients=True",
        "https://github.com/pytorch/ao/blob/main/torchao/optim/README.md", _torchao_offload, ("torchao",),
        _NO_DEVICE,
    ),
    Peer(
        "torchao-offload-bf16", "torchao", "the same with the whole model in BF16, as its README recommends",
        "https://github.com/pytorch/ao/blob/main/torchao/optim/README.md", _torchao_offload_bf16,
        ("torchao",), _NO_DEVICE,
    ),
    Peer(
        "deepspeed-zero2", "deepspeed",
        "ZeRO stage 2, optimizer in host memory, BF16, gradient checkpointing",
        "https://www.deepspeed.ai/tutorials/zero-offload/", _deepspeed, ("deepspeed",), _NO_DEVICE,
    ),
    Peer(
        "deepspeed-zero3", "deepspeed",
        "ZeRO stage 3, optimizer and parameters in host memory, BF16, gradient checkpointing",
        "https://www.deepspeed.ai/docs/config-json/#parameter-offloading", _deepspeed_3, ("deepspeed",),
        _NO_DEVICE,
    ),
    Peer(
        "save-on-cpu", "torch", "torch.autograd.graph.save_on_cpu(pin_memory=True) around forward",
        "https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu", _save_on_cpu,
        (), _NO_DEVICE,
    ),
    Peer(
        "bitsandbytes-paged", "bitsandbytes",
        "PagedAdamW8bit; its pages are unified memory, which PyTorch's peak does not count",
        "https://huggingface.co/docs/bitsandbytes/main/en/optimizers", _bitsandbytes_paged,
        ("bitsandbytes",), "its pages are CUDA's unified memory",
    ),
    Peer(
        "liger", "liger-kernel", "LigerFusedLinearCrossEntropyLoss as the head (it patches no BERT or GPT-2)",
        "https://github.com/linkedin/Liger-Kernel#low-level-apis", _liger, ("liger_kernel", "triton"),
        "its kernels are Triton's",
    ),
)  # fmt: skip
"""In the order of measurement."""
