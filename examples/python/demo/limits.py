# SPDX-License-Identifier: Apache-2.0
"""Runs a program under a memory limit that the operating system enforces.

The limit is `RLIMIT_DATA`: Linux refuses every further private writable page beyond it, and counts exactly
what `VmData` in /proc/self/status shows. PyTorch's allocator then gets no memory and says so. Nothing in the
program can lift the limit.

    limit = baseline + budget + slack

Baseline is what the interpreter and the libraries take: `VmData` at the end of a dry run, in which the
training script takes two steps with a model that is next to nothing. Budget is for the tensors. Slack is for
what lies between tensors and pages: rounding to pages, oneDNN's scratch memory, Python objects of a trace.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ENVIRONMENT = {
    # glibc keeps freed memory for itself if it may; these give large blocks back at once, so that the limit
    # counts what is in use. All programs of the demo run with them, plain or wrapped, limited or not.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1024 * 1024),
    "MALLOC_TRIM_THRESHOLD_": str(1024 * 1024),
    # Waiting threads sleep instead of spinning: steps then do not crawl where other programs want the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
}


@dataclass(frozen=True)
class Run:
    """How a program ended.

    Attributes:
        code: exit status; negative for a signal.
        output: stdout and stderr, as they came.
        seconds: duration.
    """

    code: int
    output: str
    seconds: float

    def line_with(self, *words: str) -> str | None:
        """The last line of the output that contains one of the words."""
        lines = [line.strip() for line in self.output.splitlines()]
        found = [line for line in lines if any(word in line for word in words)]
        return found[-1] if found else None


def limits_work() -> bool:
    """Whether this system counts and limits data pages (Linux 4.7 or later)."""
    program = [sys.executable, "-c", "bytearray(2**28)"]
    return run(program, limit_bytes=2**27).code != 0 and run(program).code == 0


def run(
    command: Sequence[str], limit_bytes: int | None = None, on_line: Callable[[str], None] | None = None
) -> Run:
    """Runs a program to its end.

    Args:
        command: program and arguments.
        limit_bytes: hard limit for its data pages; None for none.
        on_line: is given each line of the output as it comes.
    """

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    start = time.perf_counter()
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **ENVIRONMENT},
        preexec_fn=limit,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if on_line is not None:
            on_line(line.rstrip())
    code = process.wait()
    return Run(code, "".join(lines), time.perf_counter() - start)
