# SPDX-License-Identifier: Apache-2.0
"""Runs a case on both sides: predicted without a card, and trained on the stand-in runtime.

STANDIN_VENV and STANDIN_LIB say where the CUDA build and the stand-in are (tests/standin_cuda/README.md).
Predictions are made by the same environment without the stand-in, so that both sides are of one version;
STANDIN_PREDICT names another interpreter for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class SideError(RuntimeError):
    """One side failed; the message has the end of what it printed."""


def _run(command: list[str], extra: dict[str, str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **extra})
    if done.returncode:
        raise SideError(f"{' '.join(command)}\n{done.stderr[-1500:]}")


def run_real(
    case: str, capability: str, expandable: bool = False, events: bool = False, plain: int = 0
) -> Any:
    """What the CUDA build did."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "real.json"
        command = [str(ROOT / "tests/standin_cuda/run.sh"), str(HERE / "oracle.py"), case, str(out)]
        extra = {
            "STANDIN_CAPABILITY": capability,
            "STANDIN_PLAIN_PEAK": str(plain),
            "PYTHONPATH": str(ROOT / "python"),
        }
        extra["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{expandable}"
        _run(command + ["--events"] * events, extra)
        return json.loads(out.read_text())


def run_prediction(
    case: str, capability: str, expandable: bool = False, events: bool = False, plan: str = ""
) -> Any:
    """What is predicted under a plan (as JSON; none: without)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ours.json"
        python = os.environ.get("STANDIN_PREDICT", os.environ["STANDIN_VENV"] + "/bin/python")
        command = [python, str(HERE / "predict.py"), case, str(out), "--capability", capability]
        command += ["--expandable"] * expandable + ["--events"] * events
        if plan:
            file = Path(folder) / "plan.json"
            file.write_text(plan)
            command += ["--plan", str(file)]
        _run(command, {"PYTHONPATH": str(ROOT / "python")})
        return json.loads(out.read_text())


def run_both(case: str, capability: str, events: bool = False) -> tuple[Any, Any]:
    """Real, predicted."""
    return run_real(case, capability, events=events), run_prediction(case, capability, events=events)
