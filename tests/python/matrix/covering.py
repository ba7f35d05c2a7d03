# SPDX-License-Identifier: Apache-2.0
"""A part of the matrix that is small enough for every change, chosen by a fixed rule.

Cells are taken one after another, each time the first of those that add most, until every architecture has
been with every technique and in every mode, and every column (technique or pair) in every mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator

from matrix.architectures import ARCHITECTURES, Architecture
from matrix.modes import MODES, Mode
from matrix.techniques import COLUMNS, Columns

Cell = tuple[Architecture, Columns, Mode]


def every_cell() -> list[Cell]:
    """The whole matrix, by architecture and mode, so that a plain run serves the cells that follow it."""
    return [(row, columns, mode) for row, mode, columns in itertools.product(ARCHITECTURES, MODES, COLUMNS)]


def _adds(cell: Cell) -> Iterator[Hashable]:
    row, columns, mode = cell
    yield "row and mode", row.name, mode.name
    for technique in columns:
        yield "row and technique", row.name, technique.name
    if row.chains or all(technique.name != "chain" for technique in columns):  # else it is refused
        yield "column and mode", columns, mode.name


def covering() -> list[Cell]:
    """The part, in the order of the whole."""
    cells = every_cell()
    adds = [frozenset(_adds(cell)) for cell in cells]
    missing = set().union(*adds)
    taken: set[int] = set()
    while missing:
        best = max(range(len(cells)), key=lambda number: (len(adds[number] & missing), -number))
        taken.add(best)
        missing -= adds[best]
    return [cells[number] for number in sorted(taken)]
