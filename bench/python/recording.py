# SPDX-License-Identifier: Apache-2.0
"""What recording costs a training step, and what `memscale.record` costs; with the server in several states.

Two models of the same kind are trained in turn, step by step: one is recorded, the other is not. Each pair of
steps lies side by side, so that a busy machine slows both, and the medians of the differences count:
`added_us` on the clock, `own_us` in processor time of the thread that trains. The share is that of `own_us`
in a step of 50 ms.

    folder    recorded into a folder
    up        to a server in another process
    down      to a port at which nobody listens
    silent    to a server that accepts connections and never answers
    broken    to one that answers 500

    record_ns   one `memscale.record(name, value)`
    exit_s      what `detach` took: at most 2 s are left for sending

Usage: python bench/python/recording.py [--steps 2000] [--dry]
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from common import ROOT, Table, parser
from torch import Tensor, nn

import memscale

STATES = ("folder", "up", "down", "silent", "broken")
STEP_S = 0.050
CALLS = 5_000
BLOCKS = 9
WARM_UP = 10


class Net(nn.Module):
    """Small: the shorter a step, the clearer what is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) ** 2).mean()


class Loop:
    """A wrapped model and its loop."""

    def __init__(self, record: str | None) -> None:
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(64, 64)
        config = memscale.Config(memory_budget="1GiB", enable_logging=False, record=record)
        memscale.wrap(self.model, config, optimizer=self.optimizer)

    def step(self) -> tuple[float, float]:
        """Seconds of a step, on the clock and of this thread on a processor."""
        begin, own = time.perf_counter(), time.thread_time()
        self.model(self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin, time.thread_time() - own


def serve(state: str, pipe: Connection) -> None:
    """A stand-in server, until the pipe says that it is over."""
    sys.path.insert(0, str(ROOT / "tests" / "python"))
    from record_server import Store, broken, serving, silent

    with serving(Store(), {"silent": silent, "broken": broken}.get(state)) as server:
        pipe.send(server.url)
        pipe.recv()


@contextmanager
def place(state: str, folder: Path) -> Iterator[str]:
    """A value for `Config.record`."""
    if state == "folder":
        yield str(folder / "runs")
    elif state == "down":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    else:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(state, theirs))
        process.start()
        try:
            yield ours.recv()
        finally:
            ours.send("over")
            process.join()


def measure(record: str, steps: int) -> dict[str, float]:
    """Seconds of a step that is not recorded, what is added, of a call, and of the end."""
    plain, recorded = Loop(None), Loop(record)
    for _ in range(WARM_UP):
        plain.step()
        recorded.step()
    pairs = []
    for number in range(steps):
        first, second = (plain, recorded) if number % 2 else (recorded, plain)
        took = {first: first.step(), second: second.step()}
        pairs.append((took[plain], took[recorded]))
    calls = []
    for _ in range(BLOCKS):
        own = time.thread_time()
        for step in range(CALLS):
            memscale.record("accuracy", 0.5, step=step)
        calls.append((time.thread_time() - own) / CALLS)
        time.sleep(0.2)  # the ring empties
    begin = time.perf_counter()
    memscale.detach(recorded.model)
    end = time.perf_counter() - begin
    memscale.detach(plain.model)
    return {
        "step": statistics.median(bare[0] for bare, _ in pairs),
        "added": statistics.median(with_it[0] - bare[0] for bare, with_it in pairs),
        "own": statistics.median(with_it[1] - bare[1] for bare, with_it in pairs),
        "call": statistics.median(calls),
        "exit": end,
    }


def main() -> None:
    """Measures, and writes a row per state."""
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=2000)
    options = arguments.parse_args()
    columns = ("state", "step_us", "added_us", "own_us", "share_of_50_ms", "record_ns", "exit_s")
    table = Table("recording", columns, options.dry)
    torch.set_num_threads(1)
    for state in STATES:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_STATE_HOME"] = folder
            os.environ["MEMSCALE_TOKEN"] = "ms_0123456789abcdef_" + "0a" * 32
            with place(state, Path(folder)) as record:
                found = measure(record, options.steps)
        share = found["own"] / STEP_S
        micros = [found[name] * 1e6 for name in ("step", "added", "own")]
        table.add(state, *micros, share, found["call"] * 1e9, found["exit"])


if __name__ == "__main__":
    main()
