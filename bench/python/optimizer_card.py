# SPDX-License-Identifier: Apache-2.0
"""An optimizer's step for a model on a card: on the card, streamed through it, or on the host's cores.

The model has Llama 3.2 1B's shape: 1.24 billion parameters, random weights. Each way trains a model of its
own, one after another; first it runs forward and backward without an optimizer, so that every row has its
own floor.

    state, peak     bytes on the card: of optimizer state between steps, of all in a training step
    floor_ms        median time of forward and backward alone
    step_ms         median time of a training step
    exposed_ms      what the optimizer adds: step_ms less floor_ms
    moved           bytes of state that a step moves over the link
    link_share      that over exposed_ms, as a share of what plain page-locked copies both ways at once reach

Ways that are not installed are named and left out. Losses of all ways with 8-bit state of ours must be equal.

Usage: python bench/python/optimizer_card.py [--precision bf16] [--layers 16] [--batch 1] [--length 2048]
    [--steps 7] [--out bench/results]
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Table, median, parser
from torch import Tensor, nn

from memscale.offload.engine import Offload, OffloadSettings
from memscale.optim import take_over
from memscale.optim.offload.attach import send
from memscale.techniques.optimizer.step_in_backward import StepInBackward

HIDDEN, WORDS = 2048, 128_256
PINNED_BYTES = 16 << 30
COLUMNS = (
    "precision",
    "parameters",
    "batch",
    "length",
    "way",
    "state",
    "peak",
    "floor_ms",
    "step_ms",
    "exposed_ms",
    "moved",
    "link_share",
    "loss",
)

Parameters = list[nn.Parameter]


@dataclass
class Made:
    """An optimizer, and what goes with it.

    Attributes:
        optimizer: of the model.
        offload: has its state; None: nothing is away.
        in_backward: its steps are in backward.
        is_ours: its state is our 8-bit state.
    """

    optimizer: torch.optim.Optimizer
    offload: Offload | None = None
    in_backward: StepInBackward | None = None
    is_ours: bool = False

    def moved_bytes(self) -> int:
        """Bytes that its state has moved so far."""
        if self.offload is None:
            return 0
        return sum(count for name, count in self.offload.counters().items() if name.startswith(_MOVES))


_MOVES = ("out_bytes_", "in_bytes_")


def model_of(options: argparse.Namespace) -> nn.Module:
    """In host memory, without a cache, its head tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=options.words,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=options.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(shape)
    if options.precision == "bf16":
        model.to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    made: nn.Module = model.train()
    return made


# ---- ways ----------------------------------------------------------------------------------------------


def ours(parameters: Parameters, offloaded: str = "") -> Made:
    """Our 8-bit state: on the card, "streamed" through it, or on the "host"."""
    made = Made(torch.optim.AdamW(parameters, lr=1e-4), is_ours=True)
    reason = take_over(made.optimizer)
    if offloaded and not reason:
        device = torch.device("cuda", torch.cuda.current_device())
        made.offload = Offload(OffloadSettings(device, pinned_bytes=PINNED_BYTES, least_bytes=1))
        reason = send(made.optimizer, made.offload, on_host=offloaded == "host")
    if reason:
        raise RuntimeError(reason)
    return made


def in_backward(model: nn.Module) -> Made:
    """On the host, each parameter as soon as its gradient is there."""
    made = ours(list(model.parameters()), "host")
    made.in_backward = StepInBackward(model, made.optimizer)
    made.in_backward.attach()
    return made


def streamed_fp32(parameters: Parameters) -> Made:
    """PyTorch's own state, 8 bytes per parameter of FP32, through the card."""
    made = Made(torch.optim.AdamW(parameters, lr=1e-4, foreach=False))
    device = torch.device("cuda", torch.cuda.current_device())
    made.offload = Offload(OffloadSettings(device, pinned_bytes=PINNED_BYTES, least_bytes=1))
    if reason := send(made.optimizer, made.offload):
        raise RuntimeError(reason)
    return made


def bitsandbytes(parameters: Parameters) -> Made:
    """Theirs, as documented: bitsandbytes.optim.AdamW8bit."""
    from bitsandbytes.optim import AdamW8bit

    return Made(AdamW8bit(parameters, lr=1e-4))


def torchao(parameters: Parameters) -> Made:
    """Theirs, as documented: torchao.optim.AdamW8bit."""
    from torchao.optim import AdamW8bit

    return Made(AdamW8bit(parameters, lr=1e-4))


WAYS: dict[str, Callable[[nn.Module], Made]] = {
    "torch fused": lambda model: Made(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)),
    "8 bits": lambda model: ours(list(model.parameters())),
    "8 bits, streamed": lambda model: ours(list(model.parameters()), "streamed"),
    "8 bits, on the host": lambda model: ours(list(model.parameters()), "host"),
    "8 bits, on the host in backward": in_backward,
    "torch, streamed": lambda model: streamed_fp32(list(model.parameters())),
    "bitsandbytes 8 bits": lambda model: bitsandbytes(list(model.parameters())),
    "torchao 8 bits": lambda model: torchao(list(model.parameters())),
}


# ---- measuring -----------------------------------------------------------------------------------------


def forward_backward(model: nn.Module, words: Tensor, made: Made | None) -> Tensor:
    """One of each; what steps in backward hears of the forward as it would from the executor."""
    steps = None if made is None else made.in_backward
    if steps is not None:
        steps.about_to_run()
    output: Any = model(input_ids=words, labels=words)
    if steps is not None:
        steps.has_run(output)
    output.loss.backward()
    loss: Tensor = output.loss.detach()
    return loss


def timed(work: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of some runs, the card idle before and after."""
    found = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found


def link_rate(nbytes: int = 256 << 20, rounds: int = 5) -> float:
    """Bytes per second, out and back together, of plain page-locked copies both ways at once."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    card = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            card[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(card[1], non_blocking=True)

    both()
    return 2 * nbytes / median(timed(both, rounds))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of tensors on the card that the state has."""
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_cuda]
    return sum(value.untyped_storage().nbytes() for value in tensors)


def measured(name: str, fresh: nn.Module, options: argparse.Namespace, rate: float) -> tuple[list[Any], bool]:
    """The row of a way, but for the shape; and whether its losses are to be those of others."""
    model = copy.deepcopy(fresh).cuda()
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(options.words, (options.batch, options.length), generator=generator).cuda()

    def bare() -> None:
        forward_backward(model, words, None)
        model.zero_grad(set_to_none=True)

    timed(bare, 2)
    floor = median(timed(bare, options.steps))
    made = WAYS[name](model)
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(forward_backward(model, words, made))
        made.optimizer.step()
        made.optimizer.zero_grad()

    timed(step, 2)
    torch.cuda.reset_peak_memory_stats()
    before = made.moved_bytes()
    whole = median(timed(step, options.steps))
    moved = (made.moved_bytes() - before) // options.steps
    exposed = whole - floor
    share = f"{moved / exposed / rate:.2f}" if moved and exposed > 0 else ""
    peak, state = torch.cuda.max_memory_allocated(), state_bytes(made.optimizer)
    times = [f"{1000 * seconds:.1f}" for seconds in (floor, whole, exposed)]
    count = sum(value.numel() for value in model.parameters())
    row = [count, name, state, peak, *times, moved or "", share, f"{losses[-1].item():.9g}"]
    if made.in_backward is not None:
        made.in_backward.undo()
    return row, made.is_ours


def main() -> int:
    """Measures, and writes a row per way."""
    arguments = parser(__doc__)
    arguments.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--hidden", type=int, default=HIDDEN)
    arguments.add_argument("--words", type=int, default=WORDS)
    arguments.add_argument("--batch", type=int, default=1)
    arguments.add_argument("--length", type=int, default=2048)
    arguments.add_argument("--steps", type=int, default=7)
    arguments.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA card: nothing is measured")
        return 0
    table = Table("optimizer_card", COLUMNS, options.dry, options.out)
    rate, losses = link_rate(), dict[str, str]()
    fresh = model_of(options)
    print(f"plain copies both ways: {rate / 1e9:.1f} GB/s")
    for name in WAYS:
        try:
            row, is_ours = measured(name, fresh, options, rate)
        except ImportError as error:
            print(f"{name}: not measured, {error}")
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        table.add(options.precision, *row[:1], options.batch, options.length, *row[1:])
        if is_ours:
            losses[name] = row[-1]
    if len(set(losses.values())) > 1:
        print(f"losses differ: {losses}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
