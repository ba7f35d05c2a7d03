# SPDX-License-Identifier: Apache-2.0
"""What all benchmark scripts share: the machine's description, tables, CSV rows, and how memory is measured.

Rows are appended to `bench/results/<name>.csv` and never overwritten, so that a number in the documentation
can name the row it comes from. Every row says with which commit, on which machine and with which versions.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from memscale.hardware.host import processor_name
from memscale.observability.tensor_peak import quiet

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"

_PROVENANCE = ("date", "commit", "machine", "cores", "python", "torch", "transformers")


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the option that all scripts have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--dry", action="store_true", help="print only; append nothing to bench/results")
    return made


# ---- where a number comes from -----------------------------------------------------------------------


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    if given := os.environ.get("MEMSCALE_COMMIT"):  # of a copy without a repository
        return given

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):  # a source archive
        return ""


def provenance() -> dict[str, str]:
    """The columns that every row begins with. A "+" after the commit: the tree had changes."""
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else processor_name()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _commit(),
        "machine": machine,
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
    }


class Table:
    """Rows of one benchmark: printed as they come, appended to a CSV file as they come.

    Args:
        name: of the CSV file in `folder`.
        columns: of the benchmark's own.
        dry: print only.
        folder: where the file lies.
    """

    def __init__(self, name: str, columns: Sequence[str], dry: bool, folder: Path = RESULTS) -> None:
        self.columns = list(columns)
        self.widths = [max(len(column), 9) for column in columns]
        self.path = folder / f"{name}.csv"
        self.dry = dry
        self.provenance = provenance()
        self.started = False
        if not dry:
            self._check_header()

    def _header(self) -> list[str]:
        return [*_PROVENANCE, *self.columns]

    def _check_header(self) -> None:
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(self._header())
            return
        with self.path.open(newline="") as file:
            present = next(csv.reader(file), [])
        if present != self._header():
            raise SystemExit(
                f"{self.path} has other columns than this script writes; move it away or use --dry"
            )

    def add(self, *values: Any) -> None:
        """Prints a row and appends it, flushed at once."""
        texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        if not self.started:
            print(
                "  ".join(
                    column.rjust(width) for column, width in zip(self.columns, self.widths, strict=True)
                )
            )
            self.started = True
        print(
            "  ".join(text.rjust(width) for text, width in zip(texts, self.widths, strict=True)), flush=True
        )
        if self.dry:
            return
        row = [self.provenance[name] for name in _PROVENANCE] + texts
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)
            file.flush()
            os.fsync(file.fileno())


# ---- a process of its own ------------------------------------------------------------------------------


def rows_of(script: str, *words: str, timeout_s: float = 600) -> list[dict[str, Any]]:
    """What a script beside this one prints when it runs in a process of its own: a JSON object per line.

    Returns:
        The objects; a single one with "failed" where the script took too long or printed none.
    """
    command = [sys.executable, str(Path(__file__).with_name(script)), *words]
    # Threads that wait actively slow each other down where the machine is shared; memory is the same.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired:
        return [{"failed": f"took more than {timeout_s:.0f} s"}]
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    if rows:
        return rows
    last = run.stderr.strip().splitlines()[-1:] or ["nothing"]
    return [{"failed": f"exit status {run.returncode}: {last[0]}"}]


def print_rows(made: Callable[[], Sequence[dict[str, Any]]]) -> None:
    """Prints objects as `rows_of` reads them, or why they could not be made."""
    with quiet():
        try:
            texts = [json.dumps(row) for row in made()]
        except Exception as error:
            failed = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            texts = [json.dumps(failed)]
    print("\n".join(texts))


# ---- measuring -----------------------------------------------------------------------------------------


def calibrate() -> None:
    """Lets MemScale measure this machine's rates now, so that no later measurement contains that.

    Says so where the machine is too busy: then the plans rest on the rates of a table.
    """
    from memscale.core.calibration import calibrated
    from memscale.hardware.detect import detect
    from memscale.hardware.measured_rates import is_on

    found = detect(torch.device("cpu"))
    if is_on() and calibrated(found).cost is found.cost:
        print("# this machine is too busy to be calibrated: plans rest on a table's rates", file=sys.stderr)


def memory_events(run: Callable[[], object]) -> list[tuple[int, int]]:
    """(time, bytes) of each allocation and, negative, each release of tensor memory on the CPU in `run`."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with quiet():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run()
        events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda event: event[0]
    )


def measure_peak(run: Callable[[], object]) -> int:
    """Highest number of tensor bytes that `run` has at once, beyond what there was before it."""
    live = peak = 0
    for _, size in memory_events(run):
        live += size
        peak = max(peak, live)
    return peak


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number, the mean of the two in the middle."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
