# SPDX-License-Identifier: Apache-2.0
"""Attention in tiles of queries: memory and time of attention that is written out.

    python bench/python/attention_tile.py              GPT-2 and Llama blocks, 4 × 1024 and 1 × 2048 tokens
    python bench/python/attention_tile.py gpt2 --sizes 4x1024

Modules of Hugging Face's with attn_implementation="eager", forward and backward. The attention alone runs as
it is and in tiles; a whole block also under MemScale's checkpoint, and with both. `scores` is one tensor of
all queries and keys, `…_peak` the highest number of tensor bytes that a step adds, `…_kept` what autograd
saves beside parameters and input. Times are medians of rounds that take turns, of the clock and of the
processor, which other work on the machine disturbs less; ratios are to the module as it is.

The figures to meet: tiles keep no scores, have two fewer of them at the attention's peak, and take at most
1.25 times the plain attention's processor time. The exit status is 1 where one is not met, or where gradients
differ by more than rounding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from common import Table, measure_peak, median, parser
from torch import Tensor, nn

from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.tiles import attention_tiles
from memscale.techniques.tiles.attention_run import tile_rows

WAYS = ("plain", "tiled", "checkpoint", "both")

COLUMNS = (
    "block", "batch", "tokens", "tile_rows", "scores", "attention_peak", "attention_tiled_peak",
    "attention_kept", "attention_tiled_kept", "attention_ms", "attention_ratio", "attention_cpu_ratio",
    *(f"block_{way}_peak" for way in WAYS), "block_ms",
    *(f"block_{way}_{kind}" for way in WAYS[1:] for kind in ("ratio", "cpu_ratio")),
    "gradient_difference", "rounds",
)  # fmt: skip

MOST_TIME = 1.25


class Block(nn.Module):
    """A block of GPT-2's or Llama's, or its attention, with the mask and places that its model would make."""

    def __init__(self, name: str, tokens: int, whole: bool) -> None:
        super().__init__()
        self.width, self.heads = 768, 12
        self.more: dict[str, Any] = {}
        if name == "gpt2":
            from transformers import GPT2Config
            from transformers.models.gpt2.modeling_gpt2 import GPT2Block

            config: Any = GPT2Config(n_embd=768, n_head=12, resid_pdrop=0.0, attn_pdrop=0.0)
            config._attn_implementation = "eager"
            block: nn.Module = GPT2Block(config, layer_idx=0)
            self.block = block if whole else block.get_submodule("attn")
        else:
            from transformers import LlamaConfig
            from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

            config = LlamaConfig(
                hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=4
            )
            config._attn_implementation = "eager"
            block = LlamaDecoderLayer(config, layer_idx=0)
            self.block = block if whole else block.get_submodule("self_attn")
            places = torch.arange(tokens)[None]
            rotary = LlamaRotaryEmbedding(config)(torch.empty(1, tokens, 768), places)
            self.more = {"position_embeddings": rotary, "position_ids": places}
        mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)
        self.mask = mask[None, None]

    def forward(self, x: Tensor) -> Tensor:
        """The block's hidden states."""
        made = self.block(x, attention_mask=self.mask, **self.more)
        return made if isinstance(made, Tensor) else made[0]


def clear(model: nn.Module, x: Tensor) -> None:
    """No gradients are there, as when a training step begins."""
    x.grad = None
    model.zero_grad()


def step(model: nn.Module, x: Tensor) -> None:
    """Forward and backward."""
    model(x).backward(torch.ones_like(x))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of x and of all parameters, from zero."""
    clear(model, x)
    step(model, x)
    assert x.grad is not None
    return [x.grad.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def attachments(model: Block, way: str) -> list[Any]:
    """What a way attaches."""
    found: list[Any] = list(attention_tiles.find(model)) if way in ("tiled", "both") else []
    return found + ([CheckpointAttachment(model.block, "block")] if way in ("checkpoint", "both") else [])


def attached(model: Block, way: str) -> ExitStack:
    """A context with a way in force."""
    with ExitStack() as stack:
        for part in attachments(model, way):
            part.attach()
            stack.callback(part.undo)
        return stack.pop_all()


@dataclass(frozen=True)
class Measured:
    """Of one way: tensor bytes at the peak and kept by forward, seconds of the clock and of the processor."""

    peak: int
    kept: int
    clock: float
    processor: float


def memory(model: Block, x: Tensor, way: str) -> tuple[int, int]:
    """Highest number of tensor bytes that a step adds, and how many its forward leaves."""
    with attached(model, way):
        for _ in range(2):
            clear(model, x)
            seen = measure_peak(lambda: step(model, x))
        clear(model, x)
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            held[storage._cdata] = storage.nbytes()
            return tensor

        known = {t.untyped_storage()._cdata for t in (x, model.mask, *model.parameters())}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = model(x)
        kept = sum(size for key, size in held.items() if key not in known)
        del made
    return seen, kept


def measured(model: Block, x: Tensor, ways: Sequence[str], rounds: int) -> dict[str, Measured]:
    """Memory and median times of a step, of each way."""
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in ways if number % 2 else reversed(ways):
            with attached(model, way):
                clear(model, x)
                start = time.perf_counter(), time.process_time()
                step(model, x)
                if number:
                    taken[way].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return {
        way: Measured(*memory(model, x, way), *(median(list(side)) for side in zip(*taken[way], strict=True)))
        for way in ways
    }


def compare(name: str, batch: int, tokens: int, rounds: int, table: Table) -> bool:
    """One block at one size. Whether it meets the figures."""
    torch.manual_seed(0)
    attention, block = (Block(name, tokens, whole).train() for whole in (False, True))
    x = torch.randn(batch, tokens, attention.width, requires_grad=True)
    plain = gradients(attention, x)
    with attached(attention, "tiled"):
        tiled = gradients(attention, x)
    difference = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(plain, tiled, strict=True))
    del plain, tiled
    alone = measured(attention, x, WAYS[:2], rounds)
    whole = measured(block, x, WAYS, rounds)
    scores = 4 * batch * attention.heads * tokens**2
    base, ours, first = alone["plain"], alone["tiled"], whole["plain"]
    ratios = [
        ratio
        for way in WAYS[1:]
        for ratio in (whole[way].clock / first.clock, whole[way].processor / first.processor)
    ]
    table.add(
        name, batch, tokens, tile_rows(tokens), scores, base.peak, ours.peak, base.kept, ours.kept,
        1e3 * base.clock, ours.clock / base.clock, ours.processor / base.processor,
        *(whole[way].peak for way in WAYS), 1e3 * first.clock, *ratios, difference, rounds,
    )  # fmt: skip
    return (
        base.kept - ours.kept >= scores
        and base.peak - ours.peak >= 2 * scores
        and ours.processor <= MOST_TIME * base.processor
        and difference < 1e-4
    )


def main() -> None:
    """Compares the chosen blocks."""
    options = parser(__doc__)
    options.add_argument("blocks", nargs="*", help="of gpt2, llama (both)")
    options.add_argument("--sizes", nargs="*", default=["4x1024", "1x2048"], help="batch × tokens")
    options.add_argument("--rounds", type=int, default=3, help="steps of each that count (3)")
    arguments = options.parse_args()
    table = Table("attention_tile", COLUMNS, arguments.dry)
    met = [
        compare(name, *map(int, size.split("x")), arguments.rounds, table)
        for name in arguments.blocks or ("gpt2", "llama")
        for size in arguments.sizes
    ]
    print(f"{sum(met)} of {len(met)} meet the figures")
    if not all(met):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
