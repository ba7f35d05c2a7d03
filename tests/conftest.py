# SPDX-License-Identifier: Apache-2.0
"""Tests marked `long` take turns: `make test` runs a quarter, another one each week; `make test-all` all."""

from __future__ import annotations

import zlib

import pytest

TURNS = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    """Without the option all tests run, as whoever names a file or a test expects."""
    parser.addoption(
        "--turn",
        type=int,
        metavar="N",
        help=f"of the tests marked long, those of turn N modulo {TURNS} alone",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the long tests of other turns."""
    turn = config.getoption("--turn")
    if turn is None:
        return
    others = [item for item in items if item.get_closest_marker("long") and not _is_of(item, turn)]
    config.hook.pytest_deselected(items=others)
    gone = set(others)
    items[:] = [item for item in items if item not in gone]


def _is_of(item: pytest.Item, turn: int) -> bool:
    return zlib.crc32(item.nodeid.encode()) % TURNS == turn % TURNS
