# SPDX-License-Identifier: Apache-2.0
"""Training runs drawn from a seed: techniques that offload, alone and combined, over copies that misbehave.

A seed draws a cell of the matrix (architecture, columns, way to train) with at least one column that
offloads, an engine (tier, windows, least size) and what the copies do: begin late, come in two halves, in
another order than they were submitted in, at some rate. The run is compared with plain PyTorch, bit for bit
where every technique is exact, as the matrix does.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

from matrix import techniques
from matrix.architectures import ARCHITECTURES, Architecture
from matrix.cells import REFUSED, Outcome, outcome
from matrix.modes import MODES, Mode
from matrix.techniques import LINK, TECHNIQUES, Attaching, Columns, Technique, column_name
from memscale.core import in_force
from memscale.offload.engine import Offload, OffloadSettings


def _selective_boundary(attaching: Attaching) -> None:
    """Selective checkpoints whose inputs leave."""
    before = len(attaching.choices)
    SELECTIVE.add(attaching)
    added = attaching.choices[before:]
    attaching.choices[before:] = [replace(choice, boundary=True) for choice in added]


SELECTIVE = next(technique for technique in TECHNIQUES if technique.name == "selective")
OFFLOADING = (
    *(technique for technique in TECHNIQUES if technique.name in ("offload", "boundary")),
    Technique("selective boundary", True, True, _selective_boundary),
)
TIERS = ("pinned", "host", "file")

_WINDOWS = (0, 1, 1 << 10, 1 << 12, 1 << 16)
_DELAYS = (0, 50_000, 400_000)
_RATES = (0, 200 << 20, 40 << 20)


@dataclass
class Drawn:
    """One run.

    Attributes:
        seed: that it was drawn from.
        row: architecture.
        columns: techniques; the first one offloads.
        how: way to train.
        settings: of the engine, without the directory.
        faults: what the copies do.
        engines: that the run opened, in order.
    """

    seed: int
    row: Architecture
    columns: Columns
    how: Mode
    settings: OffloadSettings
    faults: dict[str, int]
    engines: list[Offload] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For a reader, such as "17: gpt2, offload + checkpoint, dropout, file"."""
        tier = next(tier for tier in TIERS if getattr(self.settings, f"{tier}_bytes"))
        return f"{self.seed}: {self.row.name}, {column_name(self.columns)}, {self.how.name}, {tier}"

    @property
    def shares_blocks(self) -> bool:
        """Another technique takes blocks, too: what is left to the first may have nothing that leaves."""
        return any(technique.twice or technique.name == "offload" for technique in self.columns[1:])

    @property
    def moved(self) -> int:
        """Saved tensors that left the device."""
        return sum(engine.counters().get("saves_moved", 0) for engine in self.engines)


def drawn(seed: int) -> Drawn:
    """The run of a seed; the same on every machine."""
    draw = random.Random(seed)
    first = draw.choice(OFFLOADING)
    others = [technique for technique in TECHNIQUES if technique is not first]
    columns = (first, *draw.sample(others, draw.choice((0, 1, 1, 2))))  # that which offloads comes first
    settings = replace(
        LINK.settings,
        **{"host_bytes": 0, f"{draw.choice(TIERS)}_bytes": 64 << 20},
        window_bytes=draw.choice(_WINDOWS),
        prefetch_count=draw.choice((0, 1, 3, 8)),
        prefetch_bytes=draw.choice((1 << 12, 1 << 20)),
        least_bytes=draw.choice((1, 1, 512)),
    )
    faults = {
        "fault_seed": seed + 1,
        "fault_delay_most_ns": draw.choice(_DELAYS),
        "fault_split_ppm": draw.choice((0, 300_000, 1_000_000)),
        "fault_bytes_per_second": draw.choice(_RATES),
    }
    row, how = draw.choice(ARCHITECTURES), draw.choice(MODES)
    return Drawn(seed, row, columns, how, settings, faults)


def in_order(runs: Iterable[Drawn]) -> list[Drawn]:
    """Runs of one architecture and mode one after another: they share the plain run."""
    return sorted(runs, key=lambda run: (ARCHITECTURES.index(run.row), MODES.index(run.how), run.seed))


@contextmanager
def _engines(run: Drawn, folder: Path) -> Iterator[None]:
    """Has the executor open the run's engine, with its faults."""

    def opened(settings: OffloadSettings) -> Offload:
        run.engines.append(Offload(settings, run.faults))
        return run.engines[-1]

    file = replace(run.settings, directory=str(folder) if run.settings.file_bytes else "")
    with (
        mock.patch.object(techniques, "LINK", replace(LINK, settings=file)),
        mock.patch.object(in_force, "Offload", opened),
    ):
        yield


def carried_out(run: Drawn, folder: Path) -> Outcome:
    """Carries a run out, with the last technique left out while one has no place in the model; afterwards its
    engines must be empty.
    """
    with _engines(run, folder):
        made = outcome(run.row, run.columns, run.how)
        while made.status == REFUSED and len(run.columns) > 1:
            run.columns = run.columns[:-1]
            made = outcome(run.row, run.columns, run.how)
    for engine in run.engines:
        counters = engine.counters()
        left = {name: counters.get(name, 0) for name in ("block_count", "source_bytes", "lost_count")}
        assert not any(left.values()), f"{run.name}: {left}"
    assert not list(folder.iterdir()), "a file has a name"
    return made
