# SPDX-License-Identifier: Apache-2.0
"""Runs the whole equality matrix and writes docs/guide/equality.md from what came of it.

    python tools/equality_matrix.py [--cells FILE] [--only NAME ...] [--table]

A cell is an architecture × a technique or a pair of them × a way to train; tests/python/matrix says what
each is and how it is compared. Outcomes are appended to FILE as they come. Cells that are in it already
are not run again, so a run can be interrupted. `--table` runs nothing and writes the table of what there
is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "python")]
os.environ.setdefault("MEMSCALE_CALIBRATION", "off")

import torch  # noqa: E402

from matrix.architectures import ARCHITECTURES  # type: ignore[import-not-found]  # noqa: E402
from matrix.cells import outcome  # type: ignore[import-not-found]  # noqa: E402
from matrix.modes import MODES, STEPS  # type: ignore[import-not-found]  # noqa: E402
from matrix.techniques import COLUMNS, TECHNIQUES, column_name  # type: ignore[import-not-found]  # noqa: E402

PAGE = ROOT / "docs" / "guide" / "equality.md"
SIGNS = {"equal": "=", "within": "≈", "refused": "–", "FAILED": "**FAILED**"}

Key = tuple[str, str, str]
"""Architecture, column, mode."""

Cells = dict[Key, dict[str, Any]]


def read(path: Path) -> Cells:
    """Cells of earlier runs."""
    cells: Cells = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            cells[row["architecture"], row["column"], row["mode"]] = row
    return cells


def run(path: Path, cells: Cells, only: list[str]) -> None:
    """Runs every cell that is missing."""
    with path.open("a", encoding="utf-8") as file:
        for architecture in ARCHITECTURES:
            if only and architecture.name not in only:
                continue
            for mode in MODES:
                for columns in COLUMNS:
                    key = architecture.name, column_name(columns), mode.name
                    if key in cells:
                        continue
                    made = outcome(architecture, columns, mode)
                    row = dict(zip(("architecture", "column", "mode"), key, strict=True))
                    cells[key] = row | vars(made)
                    file.write(json.dumps(cells[key]) + "\n")
                    if made.status == "FAILED":
                        print(f"FAILED {' × '.join(key)}: {made.note}", flush=True)
            file.flush()
            print(f"# {architecture.name}", flush=True)


def _table(header: list[str], rows: Iterator[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _rows(cells: Cells, names: list[str], notes: dict[str, int]) -> Iterator[list[str]]:
    for item in ARCHITECTURES:
        signs = (_together(cells, item.name, name, notes) for name in names)
        yield [f"{item.name} ({item.kind})", *signs]


def _together(cells: Cells, architecture: str, column: str, notes: dict[str, int]) -> str:
    """The sign of all modes of a cell, where they agree, and the numbers of its notes."""
    rows = [
        cells[architecture, column, mode.name] for mode in MODES if (architecture, column, mode.name) in cells
    ]
    signs = dict.fromkeys(SIGNS[row["status"]] for row in rows)
    said = dict.fromkeys(_lasting(row) for row in rows if _lasting(row))
    marks = "".join(f" [{notes.setdefault(note, len(notes) + 1)}]" for note in said)
    short = "" if len(rows) == len(MODES) else f" ({len(rows)} of {len(MODES)} modes)"
    return " ".join(signs) + marks + short


def _lasting(row: dict[str, Any]) -> str:
    """A note without what differs from mode to mode."""
    if row["status"] == "FAILED":
        return str(row["note"])
    return "; ".join(part for part in row["note"].split("; ") if "plain's error" not in part)


def _worst(cells: Cells) -> Iterator[list[str]]:
    for technique in TECHNIQUES:
        if technique.exact:
            continue
        rows = [
            row for row in cells.values() if technique.name in row["column"] and row["status"] == "within"
        ]
        if not rows:
            continue
        worst = max(rows, key=_ratio)
        where = f"{worst['architecture']}, {worst['column']}, {worst['mode']}"
        yield [technique.name, str(len(rows)), f"{_ratio(worst):.2f}", where]


def _ratio(row: dict[str, Any]) -> float:
    """Its error over plain PyTorch's."""
    return float(row["note"].split(" ×")[0])


def page(cells: Cells) -> str:
    """The page: what was compared, the table, its notes, and the versions."""
    import transformers

    import memscale

    counts = Counter(row["status"] for row in cells.values())
    compared = sum(row["compared"] for row in cells.values())
    notes: dict[str, int] = {}
    alone = [column_name(columns) for columns in COLUMNS if len(columns) == 1]
    pairs = [column_name(columns) for columns in COLUMNS if len(columns) > 1]
    tables = [_table(["architecture", *names], _rows(cells, names, notes)) for names in (alone, pairs)]
    listed = [f"{number}. {text}" for text, number in notes.items()]
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    inexact = list(_worst(cells))
    parts = [
        _HEAD.format(
            steps=STEPS,
            architectures=len(ARCHITECTURES),
            columns=len(COLUMNS),
            techniques=len(TECHNIQUES),
            modes=len(MODES),
        ),
        f"{len(cells):,} cells, {compared:,} tensors compared: {counts['equal']:,} cells equal, "
        f"{counts['within']:,} within the bound, {counts['refused']:,} refused, {counts['FAILED']:,} failed. "
        f"{today}, PyTorch {torch.__version__}, transformers {transformers.__version__}, "
        f"MemScale {memscale.__version__}, Python {sys.version.split()[0]}, on a CPU with one thread.",
        f"## Alone\n\n{tables[0]}",
        f"## In pairs\n\n{tables[1]}",
        "## Notes\n\n" + "\n".join(listed) if listed else "",
        _INEXACT + _table(["technique", "cells", "worst ratio", "where"], iter(inexact)) if inexact else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_HEAD = """# Equality

Techniques, alone and in pairs, trained beside plain PyTorch. `python tools/equality_matrix.py` makes
this page. The tests of every change run a part of it, chosen by a fixed rule (`tests/python/matrix`). 8-bit
optimizer state and the step in backward are not in it: they have tests of their own
([techniques.md](techniques.md)).

{architectures} architectures × {columns} columns ({techniques} techniques and their pairs) × {modes} ways
to train. In each cell a model is trained for {steps} optimizer steps with AdamW, once plain and once with
the techniques attached wherever the planner does not refuse them, whether or not memory is short.

* **=** every loss, gradient, parameter, buffer and random generator is equal, bit for bit, in all of
  them.
* **≈** a technique that rounds differently: losses and gradients of {steps} steps, each from the state of
  the plain training, are compared with float64. Their error is at most 1.5 times that of plain PyTorch.
* **–** refused before anything runs; the note says why.

A pair shares the model: each of the two has some of the blocks. The ways to train: *plain* has no
dropout; *dropout* has 0.2 everywhere; *autocast* is BF16; *accumulation* has two micro-batches per step;
in *exception* the first attempts at three of the steps end in an exception, raised in forward, in the
recompute of a forward and in backward; *second backward* runs backward twice through a retained graph.
Where autocast is the technique, plain PyTorch runs under `torch.autocast`. Where BF16 weights are, plain
PyTorch has the same weights in BF16, with FP32 masters, under autocast."""

_INEXACT = """## Inexact techniques

The error beside plain PyTorch's own, both against float64.

"""


def main() -> int:
    """Runs, writes the page, and fails if a cell did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=Path, default=ROOT / "build" / "equality.jsonl", help="outcomes")
    parser.add_argument("--only", nargs="*", default=[], help="names of architectures")
    parser.add_argument("--table", action="store_true", help="run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.cells.parent.mkdir(parents=True, exist_ok=True)
    cells = read(given.cells)
    if not given.table:
        run(given.cells, cells, given.only)
    PAGE.write_text(page(cells), encoding="utf-8")
    return 1 if any(row["status"] == "FAILED" for row in cells.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
