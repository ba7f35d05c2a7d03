# SPDX-License-Identifier: Apache-2.0
"""The interposed malloc of `bench/python/library_memory.py`: who asked for memory, to the byte."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMPILER = os.environ.get("CC", "cc")

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from common import measure_peak
from library_memory_run import OPERATORS, Watch, mkl_bytes

torch.set_num_threads(1)
watch, run = Watch(), OPERATORS["linear 64 fp32"]()
at_first = watch.live()
run()
before = watch.live()
watch.reset()
profiled = measure_peak(run)
print(json.dumps({
    "first": {owner: before[owner] - at_first[owner] for owner in before},
    "peak": {owner: size - before[owner] for owner, size in watch.peak().items()},
    "profiled": profiled,
    "mkl": mkl_bytes(),
    "touched": watch.touched("libraries"),
    "libraries": watch.live()["libraries"],
}))
"""


@pytest.mark.long
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or shutil.which(COMPILER.split()[0]) is None,
    reason="the interposer needs glibc and a C compiler",
)
def test_owners_are_told_apart(tmp_path: Path) -> None:
    """Tensors are what PyTorch's profiler counts; a product's buffers are MKL's, once and for all."""
    library = tmp_path / "watch_malloc.so"
    words = ["-std=c11", "-O2", "-shared", "-fPIC", "-o", str(library), str(ROOT / "bench/c/watch_malloc.c")]
    subprocess.run([*COMPILER.split(), *words, "-ldl", "-lpthread"], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "bench/python")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["peak"]["tensors"] == found["profiled"] > 0
    assert (
        found["peak"]["libraries"] == found["peak"]["code"] == 0
    )  # what the first call took serves the next
    if found["mkl"] < 0:
        pytest.skip("this PyTorch has no MKL")
    assert 0 <= found["first"]["libraries"] - found["mkl"] < 4096
    assert found["mkl"] > 10_000
    assert found["touched"] > found["mkl"] // 2
