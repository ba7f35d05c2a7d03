# SPDX-License-Identifier: Apache-2.0
"""The same inputs give the same plan: twice in a process, and in another one with another hash seed.

Not in one that has failed to compile: torch.compile leaves its hook on frames then, and Python holds
arguments for longer. A real step does, too: of one of these models 32 bytes live for three operations more.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import memscale
from zoo.models import case
from zoo.training import built

NAMES = ("gpt2", "convnet", "hubert")
SHARE = memscale.Config(memory_budget="3MiB", enable_logging=False)

PROGRAM = """
import warnings; warnings.filterwarnings("ignore")
import logging; logging.disable(logging.CRITICAL)
import torch; torch.set_num_threads(1)
from test_determinism import NAMES, digests
print(*digests(NAMES * {times}))
"""


def digests(names: tuple[str, ...]) -> list[str]:
    made = []
    for name in names:
        plan = memscale.plan(built(case(name)), config=SHARE, sample_input=case(name).batch(0))
        made += [plan.digest, str(plan.predicted.device_used_peak_bytes), str(len(plan.active))]
    return made


def digests_in_a_process(hash_seed: str, openmp_threads: str, times: int = 1) -> list[str]:
    environment = {
        **os.environ,
        "PYTHONHASHSEED": hash_seed,
        "OMP_NUM_THREADS": openmp_threads,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", PROGRAM.format(times=times)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.long
def test_twice_and_in_another_process() -> None:
    """The number of threads is PyTorch's, also where scratch is measured on a thread of its own."""
    made = digests_in_a_process("1", "1", times=2)
    once = digests_in_a_process("4242", "2")
    assert int(once[2]) > 0
    assert made == once * 2


def test_wrap_attaches_what_plan_says() -> None:
    gpt2 = case("gpt2")
    plan = memscale.plan(built(gpt2), config=SHARE, sample_input=gpt2.batch(0))
    model = memscale.wrap(built(gpt2), SHARE, gpt2.batch(0))
    assert memscale.executor_of(model).plan.digest == plan.digest
    assert memscale.plan(model, config=SHARE, sample_input=gpt2.batch(0)).digest == plan.digest
    assert [choice.module for choice in plan.active] == [
        c.module for c in memscale.executor_of(model).plan.active
    ]


def test_json_round_trip() -> None:
    gpt2 = case("gpt2")
    plan = memscale.plan(built(gpt2), config=SHARE, sample_input=gpt2.batch(0))
    again = memscale.Plan.from_json(plan.to_json())
    assert again == plan
    text = plan.explain(verbose=True)
    assert plan.digest in text
    for choice in plan.active:
        assert choice.module in text and choice.reason in text
