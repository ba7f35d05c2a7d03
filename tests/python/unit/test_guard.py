# SPDX-License-Identifier: Apache-2.0
"""The limit that turns the kernel's kill into an error: what it is set to, and that it comes and goes."""

from __future__ import annotations

import gc
import logging
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memscale
from memscale.survival import guard as module
from memscale.survival.guard import Guard

GIB = 1 << 30


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """What a test sets is set back."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (before[0], resource.getrlimit(resource.RLIMIT_DATA)[1]))


def soft() -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def host(folder: Path, available: int, here: int = 4 * GIB, pressure: float = 0.0) -> Path:
    """A stand-in for what the kernel says."""
    (folder / "proc/self").mkdir(parents=True, exist_ok=True)
    (folder / "proc/pressure").mkdir(exist_ok=True)
    (folder / "proc/meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {available >> 10} kB\n")
    (folder / "proc/self/status").write_text(f"VmRSS:\t 5 kB\nVmData:\t {here >> 10} kB\n")
    (folder / "proc/pressure/memory").write_text(f"some avg10={pressure} avg60=0.00 avg300=0.00 total=5\n")
    return folder


def test_follows_what_is_left(tmp_path: Path) -> None:
    before, guard = soft(), Guard(host(tmp_path, 20 * GIB))
    guard.put()
    assert soft() == 4 * GIB + 20 * GIB * 97 // 100
    host(tmp_path, 10 * GIB)
    guard.follow()
    assert soft() == 4 * GIB + 10 * GIB * 97 // 100
    guard.put()
    guard.remove()
    assert soft() != before
    guard.remove()
    assert soft() == before


def test_a_smaller_limit_of_the_user_stays(tmp_path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (30 * GIB, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    guard = Guard(host(tmp_path, 50 * GIB))
    guard.put()
    assert soft() == 30 * GIB
    guard.remove()
    assert soft() == 30 * GIB


def test_a_limit_that_somebody_sets_meanwhile_stays(tmp_path: Path) -> None:
    guard = Guard(host(tmp_path, 50 * GIB))
    guard.put()
    resource.setrlimit(resource.RLIMIT_DATA, (40 * GIB, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    guard.follow()
    guard.remove()
    assert soft() == 40 * GIB


def test_nothing_known_nothing_set(tmp_path: Path) -> None:
    before, guard = soft(), Guard(tmp_path)
    guard.put()
    assert soft() == before
    guard.remove()


def test_pressure_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(host(tmp_path, 20 * GIB, pressure=9.9))
    with caplog.at_level(logging.WARNING, "memscale"):
        guard.put()
        assert not caplog.records
        host(tmp_path, 20 * GIB, pressure=35.2)
        guard.follow()
        guard.follow()
        guard.remove()
    assert [record.getMessage() for record in caplog.records] == [
        "memory pressure: tasks have waited for memory in 35 % of the last ten seconds; 20.00 GiB left"
    ]


def test_as_long_as_a_model_is_wrapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before, guard = soft(), Guard(host(tmp_path, 20 * GIB))
    monkeypatch.setattr("memscale.survival.watch.GUARD", guard)
    assert module.GUARD is not guard
    model = torch.nn.Linear(2, 2)
    memscale.wrap(model, guard=True, enable_logging=False)
    assert soft() != before
    memscale.detach(model)
    assert soft() == before
    memscale.wrap(model, guard=True, enable_logging=False)
    host(tmp_path, 10 * GIB)
    model(torch.ones(1, 2)).sum().backward()
    assert soft() == 4 * GIB + 10 * GIB * 97 // 100
    del model
    gc.collect()
    assert soft() == before


def test_too_large_a_tensor_is_refused_and_not_killed() -> None:
    program = """
        import torch, memscale
        from memscale.hardware.host import host_memory

        class Model(torch.nn.Linear):
            def forward(self, x):
                torch.empty(large, dtype=torch.uint8)
                return super().forward(x)

        large = 0
        model = Model(2, 2)
        memscale.wrap(model, guard=True, enable_logging=False)
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        large = host_memory().available_bytes * 101 // 100
        try:
            model(torch.ones(1, 2))
        except RuntimeError as error:
            print("DefaultCPUAllocator" in str(error))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr
    assert "RLIMIT_DATA" in done.stderr
