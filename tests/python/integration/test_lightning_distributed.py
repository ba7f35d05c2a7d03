# SPDX-License-Identifier: Apache-2.0
"""Lightning's strategies for several processes: every bit on each rank, and one plan."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")


@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
def test_two_processes(tmp_path: Path) -> None:
    """DDP and FSDP2, one after the other: most of the time goes into imports."""
    script = Path(__file__).with_name("lightning_runs.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), port, str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(texts)[-3000:]
    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert outcomes[0] == outcomes[1] and set(outcomes[0]) == {"ddp", "fsdp2"}
    assert all(outcome["modules"] and outcome["compared"] > 60 for outcome in outcomes[0].values())
