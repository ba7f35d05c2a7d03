# SPDX-License-Identifier: Apache-2.0
"""Save, kill, load, go on: the bits of the run that nobody interrupted. The loop is in `resume_runs`."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import resume_runs
import torch
from resume_runs import CALLS, CHECKPOINT, LOG, STEPS, WAYS, Run

from memscale.offload.engine import why_not

WHY_NOT = why_not(torch.device("cpu"))
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)

EXACT = ("plain", "offloaded")
"""Ways whose bits are plain PyTorch's."""

KILLS = ((1, "step"), (1, "save"))

Runner = Callable[[Run], int]


@pytest.fixture(scope="module")
def run() -> Iterator[Runner]:
    """Runs in a process of its own; returns its status, 9 if it was killed."""
    command = [sys.executable, resume_runs.__file__]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # with the folder of what tests share
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | paths
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        into, out = server.stdin, server.stdout

        def started(what: Run) -> int:
            into.write(what.line() + "\n")
            into.flush()
            return int(out.readline())

        yield started
        into.close()


@pytest.fixture(scope="module")
def whole(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a run that nobody interrupts, by its way."""
    known: dict[str, Path] = {}

    def folder_of(way: str) -> Path:
        if way not in known:
            known[way] = tmp_path_factory.mktemp("whole")
            assert run(Run(str(known[way]), way)) == 0
            assert len(log(known[way])) == STEPS
        return known[way]

    return folder_of


def log(folder: Path) -> list[str]:
    return (folder / LOG).read_text(encoding="utf-8").splitlines()


def assert_same(folder: Path, expected: Path) -> None:
    """Whatever a run has computed, the first or the second time, it has computed right."""
    lines = log(expected)
    assert [line.split()[0] for line in lines] == [str(step) for step in range(STEPS)]
    assert set(log(folder)) == set(lines)
    assert sorted(path.name for path in folder.iterdir()) == sorted([CHECKPOINT, LOG, CALLS])


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_the_run_goes_on(way: str, run: Runner, whole: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(whole(way) / CALLS, tmp_path)
    draw = random.Random(way)
    for kill in KILLS:
        assert run(Run(str(tmp_path), way, (*kill, draw.uniform(0, 0.95)))) == signal.SIGKILL
        assert torch.load(tmp_path / CHECKPOINT, weights_only=True)["step"] in (kill[0], kill[0] + 1)
    assert run(Run(str(tmp_path), way)) == 0
    assert_same(tmp_path, whole(way))


def test_with_and_without(run: Runner, whole: Callable[[str], Path], tmp_path: Path) -> None:
    """Plain PyTorch goes on where MemScale was killed, and the other way round."""
    shutil.copy(whole("plain") / CALLS, tmp_path)
    for step, way in enumerate(("offloaded", "plain")):
        assert run(Run(str(tmp_path), way, (step + 1, "backward", 0.5))) == signal.SIGKILL
    assert run(Run(str(tmp_path), "offloaded")) == 0
    for way in EXACT:
        assert_same(tmp_path, whole(way))


@pytest.mark.parametrize("way", [way for way in WAYS if way not in EXACT])
def test_plain_pytorch_goes_on(way: str, run: Runner, whole: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(whole(way) / CALLS, tmp_path)
    shutil.copy(whole(way) / CHECKPOINT, tmp_path)
    saved = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    torch.save({**saved, "step": STEPS - 1}, tmp_path / CHECKPOINT)
    assert run(Run(str(tmp_path), "plain")) == 0
    assert [line.split()[0] for line in log(tmp_path)] == [str(STEPS - 1)]
