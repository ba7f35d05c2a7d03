# SPDX-License-Identifier: Apache-2.0
"""Runs jobs, each in a fresh process. Whatever becomes of one, it gives a result."""

from __future__ import annotations

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
        log: file for what the process prints.
        command: the process; it gets the path of its result as an argument, and the job on its input.

    Returns:
        What the process found, with "status": "ok", "oom", "failed" or "timeout", and a "reason" where it
        is not "ok".

    Raises:
        KeyboardInterrupt: the process has been ended.
    """
    with tempfile.TemporaryDirectory(prefix="memscale-bench-") as folder:
        target = Path(folder) / "result.json"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
        process = subprocess.Popen(
            [*command, str(target)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
        )
        problem = ""
        try:
            _, errors = process.communicate(json.dumps(job.to_dict()), timeout=job.deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            problem = "timeout"
        except BaseException:
            process.kill()
            process.wait()
            raise
        if log is not None:
            log.write_text(f"{job.label}: exit status {process.returncode}\n{errors}", encoding="utf-8")
        found: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    return found | _judged(found, process.returncode, errors, problem, job)


def _judged(found: dict[str, Any], code: int, errors: str, problem: str, job: Job) -> dict[str, Any]:
    """Status and reason."""
    if problem:
        return {"status": problem, "reason": f"not done after {job.deadline_s:.0f} s"}
    if code == 0 and found.get("status") == "ok":
        return {"status": "ok", "reason": ""}
    if "reason" in found:
        return {"status": found["status"], "reason": found["reason"]}
    if code == -signal.SIGKILL:
        return {"status": "oom", "reason": "the system ended the process (SIGKILL): out of memory"}
    lines = [line for line in errors.splitlines() if line.strip()] or ["no message"]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    last = (named or lines)[-1].strip()
    return {"status": "failed", "reason": f"exit status {code}: {last}"[:300]}
