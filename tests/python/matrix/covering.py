# SPDX-License-Identifier: Apache-2.0
"""A part of the matrix that is small enough for every change, chosen by a fixed rule.

Cells are taken one after another, each time the first of those that add most, until every architecture has
been with every technique and in every mode, every technique alone and in some pair in every mode, and every
pair of techniques in two of the six, in turn: what two techniques do to each other seldom depends on how the
model is trained, and the whole matrix has all six.
"""

from __future__ import annotations

import heapq
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
        if len(columns) > 1:
            yield "technique of a pair and mode", technique.name, mode.name
    refused = not row.chains and any(technique.name == "chain" for technique in columns)
    if is_in_part(columns, mode) and not refused:
        yield "column and mode", columns, mode.name


def is_in_part(columns: Columns, mode: Mode) -> bool:
    """Whether the part has a column in a mode on purpose, and not by chance."""
    return len(columns) == 1 or (COLUMNS.index(columns) + MODES.index(mode)) % 3 == 0


def covering() -> list[Cell]:
    """The part, in the order of the whole."""
    cells = every_cell()
    adds = [frozenset(_adds(cell)) for cell in cells]
    missing = set().union(*adds)
    taken: list[int] = []
    queue = [(-len(added), number) for number, added in enumerate(adds)]  # at least what each one still adds
    heapq.heapify(queue)
    while missing:
        most, number = heapq.heappop(queue)
        added = adds[number] & missing
        if len(added) < -most:
            heapq.heappush(queue, (-len(added), number))
            continue
        taken.append(number)
        missing -= added
    return [cells[number] for number in sorted(taken)]
