# SPDX-License-Identifier: Apache-2.0
"""What recording costs a training step, and what `memscale.record` costs; with the server in several states.

Two models of the same kind are trained in turn, block by block: one is recorded, the other is not. Blocks of
the same number lie next to each other, so that a busy machine slows both. The cost of a step is the median of
the differences; its share is of a step of 50 ms. Only processor time of the thread that trains counts in
`own_us`, which another process on the same core does not change.

    folder    recorded into a folder
    up        to a server in another process
    down      to a port at which nobody listens
    silent    to a server that accepts connections and never answers
    broken    to one that answers 500

    record_ns   one `memscale.record(name, value)`
    exit_s      what `detach` took: at most 2 s are left for sending

Usage: python bench/python/recording.py [--rounds 21] [--steps 200] [--dry]
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
CALLS = 20_000


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

    def seconds(self, steps: int) -> tuple[float, float]:
        """Time on the clock, and of this thread on a processor."""
        begin, own = time.perf_counter(), time.thread_time()
        for _ in range(steps):
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


def measure(record: str, rounds: int, steps: int) -> dict[str, float]:
    """Seconds of a step that is not recorded, what is added, of a call, and of the end."""
    plain, recorded = Loop(None), Loop(record)
    for loop in (plain, recorded):
        loop.seconds(steps)
    differences, own, bare = [], [], []
    for number in range(rounds):
        pair = (plain, recorded) if number % 2 else (recorded, plain)
        took = {loop: loop.seconds(steps) for loop in pair}
        bare.append(took[plain][0] / steps)
        differences.append((took[recorded][0] - took[plain][0]) / steps)
        own.append((took[recorded][1] - took[plain][1]) / steps)
    begin = time.perf_counter()
    for step in range(CALLS):
        memscale.record("accuracy", 0.5, step=step)
    call = (time.perf_counter() - begin) / CALLS
    begin = time.perf_counter()
    memscale.detach(recorded.model)
    end = time.perf_counter() - begin
    memscale.detach(plain.model)
    names = {"step": bare, "added": differences, "own": own}
    medians = {name: statistics.median(values) for name, values in names.items()}
    return {**medians, "call": call, "exit": end}


def main() -> None:
    """Measures, and writes a row per state."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=21)
    arguments.add_argument("--steps", type=int, default=200)
    options = arguments.parse_args()
    columns = ("state", "step_us", "added_us", "own_us", "share_of_50_ms", "record_ns", "exit_s")
    table = Table("recording", columns, options.dry)
    torch.set_num_threads(1)
    for state in STATES:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_STATE_HOME"] = folder
            os.environ["MEMSCALE_TOKEN"] = "ms_0123456789abcdef_" + "0a" * 32
            with place(state, Path(folder)) as record:
                found = measure(record, options.rounds, options.steps)
        share = found["added"] / STEP_S
        micros = [found[name] * 1e6 for name in ("step", "added", "own")]
        table.add(state, *micros, share, found["call"] * 1e9, found["exit"])


if __name__ == "__main__":
    main()
