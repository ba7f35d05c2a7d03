# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in a file, and gradients too: memory and time of a training step beside plain AdamW.

The model is a language model of 100 million parameters. Plain PyTorch has 12 bytes per parameter beside
the weight, moments and gradient. All ways train in turn, round by round; a ratio is the median over rounds.

    beside      most bytes of optimizer state, gradients and the step's own tensors that were there from the
                end of backward to the end of the step
    share       of what plain has
    peak        most bytes of all tensors in a training step
    file        bytes per second that the optimizer's step moved to and from the file, over its whole time,
                and over what the file does by itself (out and back in turn)

Usage: python bench/python/optimizer_offload.py [--directory /tmp] [--batch 8] [--length 256] [--rounds 3]
"""

from __future__ import annotations

import gc
import tempfile
import time
from dataclasses import dataclass, field

import torch
from common import Table, measure_peak, median, parser
from torch import Tensor, nn

from memscale.hardware.detect import detect
from memscale.offload import limits
from memscale.offload.engine import Offload, OffloadSettings
from memscale.optim.offload.attach import send
from memscale.techniques.optimizer.gradient_offload import GradientOffload

WIDTH, LAYERS, HEADS, WORDS = 768, 12, 12, 19_500
MOST_SHARE, MOST_RATIO = 0.20, 1.5
FILE_BYTES = 8 << 30


class LanguageModel(nn.Module):
    """Transformer blocks between tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)

    def forward(self, words: Tensor) -> Tensor:
        """Its loss on a batch."""
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        hidden = self.blocks(self.words(words), mask=mask, is_causal=True)
        logits = nn.functional.linear(hidden[:, :-1], self.words.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


@dataclass
class Way:
    """A training run.

    Attributes:
        name: for the table.
        model: what is trained.
        optimizer: its optimizer.
        offload: engine of the state, or None.
        seconds: of each training step.
        in_step: seconds of the optimizer's part.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    offload: Offload | None = None
    seconds: list[float] = field(default_factory=list)
    in_step: list[float] = field(default_factory=list)

    def backward(self, words: Tensor) -> None:
        """Forward and backward."""
        self.model(words).backward()

    def train(self, words: Tensor) -> None:
        """One step, timed."""
        begin = time.perf_counter()
        self.backward(words)
        middle = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - begin)
        self.in_step.append(end - middle)

    def beside(self, words: Tensor) -> int:
        """As in the table, by the profiler, from zero_grad on."""
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        held = sum(value.nbytes for value in state if isinstance(value, Tensor))
        self.backward(words)
        gc.collect()
        held += sum(_bytes_here(value.grad) for value in self.model.parameters())
        extra = measure_peak(self.optimizer.step)
        self.optimizer.zero_grad()
        return held + extra

    def moved(self) -> int:
        """Bytes to and from the state's file so far."""
        counters = {} if self.offload is None else self.offload.counters()
        return counters.get("out_bytes_file", 0) + counters.get("in_bytes_file", 0)


def _bytes_here(gradient: Tensor | None) -> int:
    return 0 if gradient is None else Tensor.untyped_storage(gradient).nbytes()


def settings_in(directory: str) -> OffloadSettings:
    """Of both engines."""
    return OffloadSettings(
        torch.device("cpu"), file_bytes=FILE_BYTES, directory=directory, window_bytes=32 << 20
    )


def ways(directory: str) -> list[Way]:
    """Plain, with state away, and with gradients away as well; the same weights at first."""
    made = []
    for name in ("plain", "state", "state + gradients"):
        torch.manual_seed(0)
        model = LanguageModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        way = Way(name, model, optimizer)
        if name != "plain":
            way.offload = Offload(settings_in(directory))
            reason = send(optimizer, way.offload)
            assert not reason, reason
        if name == "state + gradients":
            link = limits.Link(settings_in(directory), 1, 1, FILE_BYTES)
            GradientOffload(model, link, detect(torch.device("cpu"))).attach()
        made.append(way)
    return made


def main() -> int:
    """Measures, and writes a row per way."""
    arguments = parser(__doc__)
    arguments.add_argument("--directory", default=tempfile.gettempdir())
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--length", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    columns = (
        "threads",
        "batch",
        "length",
        "way",
        "beside",
        "share",
        "peak",
        "seconds",
        "ratio",
        "file_mb_s",
        "file_share",
    )
    table = Table("optimizer_offload", columns, options.dry)
    out, back = limits._measured(options.directory, 0, limits.chunk_bytes(1 << 40))
    alone = 2 * out * back / (out + back)
    every = ways(options.directory)
    words = torch.randint(WORDS, (options.batch, options.length), generator=torch.Generator().manual_seed(0))
    beside: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for way in every:
        way.train(words)  # the state comes into being
        way.seconds.clear()
        way.in_step.clear()
        beside[way.name] = way.beside(words)
        weights = sum(value.nbytes for value in way.model.parameters())
        state = [value for entry in way.optimizer.state.values() for value in entry.values()]
        held = sum(value.nbytes for value in state if isinstance(value, Tensor))
        peaks[way.name] = weights + held + measure_peak(lambda way=way: way.train(words))
        way.seconds.clear()
        way.in_step.clear()
    moved = {way.name: way.moved() for way in every}
    for _ in range(options.rounds):
        for way in every:
            way.train(words)
    plain, wrong = every[0], []
    for way in every:
        assert all(map(torch.equal, plain.model.parameters(), way.model.parameters())), way.name
        ratio = median([b / a for a, b in zip(plain.seconds, way.seconds, strict=True)])
        share = beside[way.name] / beside["plain"]
        rate = (way.moved() - moved[way.name]) / sum(way.in_step) / 1e6
        table.add(
            torch.get_num_threads(),
            options.batch,
            options.length,
            way.name,
            beside[way.name],
            f"{share:.3f}",
            peaks[way.name],
            f"{median(way.seconds):.3f}",
            f"{ratio:.3f}",
            f"{rate:.0f}",
            f"{rate / alone:.2f}",
        )
        if way.name == "state + gradients" and (share > MOST_SHARE or ratio > MOST_RATIO):
            wrong.append(f"{way.name}: {share:.3f} of the memory at {ratio:.3f} of the time")
    for line in wrong:
        print(f"too much: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
