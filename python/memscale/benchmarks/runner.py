# SPDX-License-Identifier: Apache-2.0
"""Runs jobs, each in a fresh process. A job that crashes or hangs gives a result, too."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from memscale.benchmarks.job import Job

__all__ = ["run_job"]

COMMAND: Final = (sys.executable, "-m", "memscale.benchmarks.child")


def run_job(job: Job, log: Path | None = None, command: tuple[str, ...] = COMMAND) -> dict[str, Any]:
    """Measures a job in a process of its own.

    Args:
        job: what to measure.
        log: file for what the process prints, stdout and stderr.
        command: the process; it gets the path of its result and our process id as arguments,
            and the job on its input.

    Returns:
        What the process found, with "status": "ok", "oom", "failed" or "timeout", and a "reason" where it
        is not "ok".

    Raises:
        KeyboardInterrupt: the process has been ended, with all that it started.
    """
    with tempfile.TemporaryDirectory(prefix="memscale-bench-") as folder:
        target, printed = Path(folder) / "result.json", log or Path(folder) / "log"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
        request = Path(folder) / "job.json"
        request.write_text(json.dumps(job.to_dict()), encoding="utf-8")
        # Files, not pipes: a pipe ends only when the last process that holds it does.
        with request.open("rb") as asked, printed.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(target), str(os.getpid())],
                stdin=asked,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            late = False
            try:
                process.wait(job.deadline_s)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                _end(process)
        text = printed.read_text(encoding="utf-8", errors="replace")
        if log is not None:
            log.write_text(f"{job.label}: exit status {process.returncode}\n{text}", encoding="utf-8")
        found: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    return found | _judged(found, process.returncode, text, late, job)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, and whatever it has started: that would take memory and time from the next one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _judged(found: dict[str, Any], code: int, text: str, late: bool, job: Job) -> dict[str, Any]:
    """Status and reason."""
    if code == 0 and found.get("status") == "ok":
        return {"status": "ok", "reason": ""}
    if late:
        return {"status": "timeout", "reason": f"not done after {job.deadline_s:.0f} s"}
    if "reason" in found:
        return {"status": found["status"], "reason": found["reason"]}
    if code == -signal.SIGKILL:
        return {"status": "oom", "reason": "the system ended the process (SIGKILL): out of memory"}
    lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    last = (named or lines)[-1].strip()
    return {"status": "failed", "reason": f"exit status {code}: {last}"[:300]}
