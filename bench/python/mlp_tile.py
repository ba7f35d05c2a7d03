# SPDX-License-Identifier: Apache-2.0
"""MLP tiles inside checkpointed blocks: memory of the MLP's intermediates, and time of the block.

    python bench/python/mlp_tile.py              GPT-2 and Llama blocks, 2048 and 4096 tokens
    python bench/python/mlp_tile.py gpt2 --tokens 2048

One transformer block of Hugging Face's, under MemScale's checkpoint, forward and backward, with and without
tiles. `intermediate` is what a step of the checkpointed MLP alone takes beyond its output and the gradients
of input and output. Gradients of the weights count; they have to be there in the end, but with tiles from the
first one on. `peak` is the highest number of tensor bytes that a step of the whole block adds. Times are
medians of rounds that take turns; `cpu_ratio` is that of the processor's time, which other work on the
machine disturbs less.

The figures to meet: 60 % less intermediate memory, 1.05 times the time of the checkpointed block. The exit
status is 1 where one is not met, or where gradients differ by more than rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from common import Table, measure_peak, median, parser
from torch import Tensor, nn

from memscale.techniques.checkpoint.checkpointing import CheckpointAttachment
from memscale.techniques.tiles import row_search, row_tiles

COLUMNS = (
    "block", "tokens", "width", "inner", "tile_rows", "tiles", "intermediate", "tiled_intermediate",
    "less_pct", "peak", "tiled_peak", "plain_ms", "checkpoint_ms", "tiled_ms", "time_ratio",
    "cpu_ratio", "gradient_difference", "rounds",
)  # fmt: skip

LEAST_LESS_PCT = 60
MOST_TIME = 1.05


class Gpt2(nn.Module):
    """A GPT-2 block."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        config = GPT2Config(n_embd=768, n_head=12, resid_pdrop=0.0, attn_pdrop=0.0)
        config._attn_implementation = "sdpa"
        self.block = GPT2Block(config, layer_idx=0)
        self.width = 768

    def forward(self, x: Tensor) -> Tensor:
        """The block's hidden states."""
        made = self.block(x)
        return made if isinstance(made, Tensor) else made[0]


class Llama(nn.Module):
    """A Llama block."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_attention_heads=12)
        config._attn_implementation = "sdpa"
        self.block = LlamaDecoderLayer(config, layer_idx=0)
        self.rotary = LlamaRotaryEmbedding(config)
        self.width = 768

    def forward(self, x: Tensor) -> Tensor:
        """The block's hidden states."""
        places = torch.arange(x.shape[1])[None]
        made = self.block(x, position_embeddings=self.rotary(x, places), position_ids=places)
        return made if isinstance(made, Tensor) else made[0]


BLOCKS: dict[str, Callable[[], Any]] = {"gpt2": Gpt2, "llama": Llama}


def step(module: nn.Module, x: Tensor) -> None:
    """Forward and backward."""
    module(x).backward(torch.ones_like(x))


def clear(module: nn.Module, x: Tensor) -> None:
    """No gradients are there, as when a training step begins."""
    x.grad = None
    module.zero_grad()


def peak(module: nn.Module, x: Tensor) -> int:
    """Highest number of tensor bytes that a step adds, after one that was not looked at."""
    for _ in range(2):
        clear(module, x)
        seen = measure_peak(lambda: step(module, x))
    return seen


def intermediates(module: nn.Module, path: str, x: Tensor, tiled: bool) -> int:
    """Bytes that a step of a checkpointed MLP adds beyond output, its gradient and the input's."""
    attached: list[Any] = [CheckpointAttachment(module, path)]
    if tiled:
        facts, name = _tiles(module, path)
        attached.insert(0, row_tiles.RowTiles(module, path, facts, name))
    for part in attached:
        part.attach()
    try:
        return peak(module, x) - 3 * x.untyped_storage().nbytes()
    finally:
        for part in reversed(attached):
            part.undo()


def _tiles(module: nn.Module, path: str) -> tuple[Any, str]:
    holder = nn.ModuleDict({"it": module})
    found = row_search.find(holder)
    if len(found) != 1:
        raise SystemExit(f"{path} is no candidate: {row_search.reasons(holder)}")
    return found[0].facts, found[0].argument


def times(model: nn.Module, x: Tensor, attachment: Any, rounds: int) -> list[tuple[float, float]]:
    """Seconds of a step, on the clock and of the processor: first without, then with the tiles."""
    seconds: list[list[tuple[float, float]]] = [[], []]
    for index in range(rounds + 1):
        for tiled in (False, True) if index % 2 else (True, False):
            if tiled:
                attachment.attach()
            clear(model, x)
            start = time.perf_counter(), time.process_time()
            step(model, x)
            if index:
                seconds[tiled].append((time.perf_counter() - start[0], time.process_time() - start[1]))
            if tiled:
                attachment.undo()
    return [(median([clock for clock, _ in side]), median([cpu for _, cpu in side])) for side in seconds]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of x and of all parameters, from zero; the same random numbers each time."""
    clear(model, x)
    torch.manual_seed(1)
    step(model, x)
    assert x.grad is not None
    return [x.grad.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def compare(name: str, tokens: int, rounds: int, table: Table) -> bool:
    """One block at one length. Whether it meets the figures."""
    torch.manual_seed(0)
    model = BLOCKS[name]().train()
    x = torch.randn(1, tokens, model.width, requires_grad=True)
    (tiles,) = row_search.find(model)
    plain = gradients(model, x)
    clear(model, x)
    start = time.perf_counter()
    step(model, x)
    plain_s = time.perf_counter() - start
    whole, parts = (intermediates(tiles.module, tiles.path, x, tiled) for tiled in (False, True))
    checkpoint = CheckpointAttachment(model.block, "block")
    checkpoint.attach()
    before = peak(model, x)
    tiles.attach()
    after = peak(model, x)
    difference = max(
        float((a - b).abs().max() / a.abs().max()) for a, b in zip(plain, gradients(model, x), strict=True)
    )
    tiles.undo()
    (first, first_cpu), (second, second_cpu) = times(model, x, tiles, rounds)
    checkpoint.undo()
    rows = row_tiles.tile_rows(tokens, tiles.facts)
    less = 100 * (1 - parts / whole)
    table.add(
        name, tokens, tiles.facts.width, tiles.facts.inner_bytes, rows, -(-tokens // rows), whole, parts,
        less, before, after, 1e3 * plain_s, 1e3 * first, 1e3 * second, second / first,
        second_cpu / first_cpu, difference, rounds,
    )  # fmt: skip
    return less >= LEAST_LESS_PCT and second <= MOST_TIME * first and difference < 1e-4


def main() -> None:
    """Compares the chosen blocks."""
    options = parser(__doc__)
    options.add_argument("blocks", nargs="*", help=f"of {', '.join(BLOCKS)} (all)")
    options.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096], help="sequence lengths")
    options.add_argument("--rounds", type=int, default=9, help="steps of each that count (9)")
    arguments = options.parse_args()
    table = Table("mlp_tile", COLUMNS, arguments.dry)
    met = [
        compare(name, tokens, arguments.rounds, table)
        for name in arguments.blocks or BLOCKS
        for tokens in arguments.tokens
    ]
    print(f"{sum(met)} of {len(met)} meet both figures")
    if not all(met):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
