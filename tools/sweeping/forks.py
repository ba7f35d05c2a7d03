# SPDX-License-Identifier: Apache-2.0
"""A fresh process for each piece of work.

MemScale has to come first in a process: caches that an earlier model filled would hide faults. Importing
PyTorch and a library takes seconds, though, and there are thousands of models. So a parent per library
imports, runs nothing, and forks for each piece of work. It has one thread: PyTorch starts its own with the
first operation that is divided among them, which is in a child, and there is one thread only. What such a
child finds wrong is confirmed in a process that was started anew.

    driver ── pipe ── parent (imports only) ── fork ── child: one call, one answer in a file
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[1]

_MEMORY = 8 << 30
"""Bytes of data a child may have; a model that asks for more is not tiny."""

_SLOW_TO_IMPORT = (
    "sympy",
    "torch.profiler",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.proxy_tensor",
    "memscale.api",
    "sweeping.trial",
)

_PATIENCE = 10
"""A limit is of processor time; by the clock a child has so many times more, for a busy machine."""

_POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Answer:
    """What a child said.

    Attributes:
        value: of the call; None if there is none.
        failure: why, in one line; "" if there is a value.
        seconds: that the child lived.
        late: whether it had not done after its time.
    """

    value: Any
    failure: str
    seconds: float
    late: bool = False


def environment(packages: Path | None) -> dict[str, str]:
    """Of every process of a sweep: one thread, no network, the same hashes and plans everywhere."""
    path = [str(TOOLS), *(item for item in [os.environ.get("PYTHONPATH", "")] if item)]
    fixed = {
        "PYTHONPATH": os.pathsep.join([*path, *([str(packages)] if packages else [])]),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MEMSCALE_CALIBRATION": "off",
        "PYTHONWARNINGS": "ignore",
    }
    return {**os.environ, **fixed}


class Parent:
    """The process that forks, as its driver sees it. Not for use by several threads at once."""

    def __init__(self, library: str, packages: Path | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sweeping.forks", library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(packages),
        )

    def call(self, function: str, limit: float, **arguments: Any) -> Answer:
        """Calls `function` of `sweeping.trial` with the library in a child."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, limit, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks has ended")
        return Answer(*json.loads(line))

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=10)


def call_anew(library: str, packages: Path | None, function: str, limit: float, **arguments: Any) -> Answer:
    """The same in a process that has imported nothing before."""
    parent = Parent(library, packages)
    try:
        return parent.call(function, limit, **arguments)
    finally:
        parent.close()


def _serve(name: str) -> None:
    """Answers calls until the driver closes the pipe."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not end up among answers
    library = _imported(name)
    for line in sys.stdin:
        function, limit, arguments = json.loads(line)
        out.write(json.dumps(_in_child(library, function, limit, arguments)) + "\n")
        out.flush()


def _imported(name: str) -> Any:
    """The library and all that is slow to import; nothing of it is used here."""
    import torch

    torch.set_num_threads(1)
    library = importlib.import_module(f"sweeping.libraries.{name}")
    for module in (*_SLOW_TO_IMPORT, *getattr(library, "PARTS", ())):
        importlib.import_module(module)
    import gc

    gc.collect()
    gc.freeze()  # children look for their own objects only
    return library


def _in_child(library: Any, function: str, limit: float, arguments: dict[str, Any]) -> list[Any]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        place = Path(folder)
        child = os.fork()
        if child == 0:
            _run(library, function, limit, arguments, place)
        status = _waited(child, start + _PATIENCE * limit)
        seconds = round(time.monotonic() - start, 2)
        answer = place / "answer"
        if status == 0 and answer.is_file():
            return [json.loads(answer.read_text()), "", seconds]
        late = status is None or status == -signal.SIGXCPU
        return [None, _failure(status, limit, place / "said"), seconds, late]


def _run(library: Any, function: str, limit: float, arguments: dict[str, Any], place: Path) -> None:
    """The child's life."""
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 1))
        said = os.open(place / "said", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.chdir(place)
        from sweeping import trial

        own = getattr(library, function, None)  # a library may do it in its own way
        value = own(**arguments) if own else getattr(trial, function)(library, **arguments)
        (place / "partial").write_text(json.dumps(value))
        (place / "partial").rename(place / "answer")
    except BaseException as error:
        os.write(2, f"\n{type(error).__name__}: {error}".encode(errors="replace"))
        os._exit(1)
    os._exit(0)


def _waited(child: int, deadline: float) -> int | None:
    """Exit status; below 0 for a signal; None for a child that had to be ended."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(_POLL_SECONDS)


def _failure(status: int | None, limit: float, said: Path) -> str:
    if status is None or status == -signal.SIGXCPU:
        return f"not done after {limit:g} s"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = said.read_text(errors="replace").strip().splitlines() if said.is_file() else []
    return lines[-1][:300] if lines else f"exit status {status}"


if __name__ == "__main__":
    _serve(sys.argv[1])
