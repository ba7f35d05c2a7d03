# SPDX-License-Identifier: Apache-2.0
"""Tests of memscale-server through its socket. They need the program: `make test-c` builds it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from server_process import Client, Server, binary, serving

if binary() is None:
    if os.environ.get("CI") == "true":
        raise pytest.UsageError("memscale-server is not built: are its libraries missing?")
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "data") as started:
        yield started


@pytest.fixture
def ann(server: Server) -> Client:
    """The first account, with a session."""
    return server.set_up()


@pytest.fixture
def tool(server: Server, ann: Client) -> Client:
    """Ann's program, with a token of all scopes."""
    return server.with_token(ann, "admin")
