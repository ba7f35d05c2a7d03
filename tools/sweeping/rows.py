# SPDX-License-Identifier: Apache-2.0
"""One row per model, appended to a file of JSON lines as they come; the last one of a model counts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from sweeping import digests

ROOT = Path(__file__).resolve().parents[2]

EQUAL, FAILED, UNREPEATABLE, NOT_SWEPT = "equal", "FAILED", "unrepeatable", "not swept"

BITS, EXCEPTION, LEFT, FAKE, CRASH = "bits", "exception", "leftover", "fake", "crash"
BUDGET, LOW, HIGH, UNPLANNED = "budget", "predicted too low", "predicted too high", "not planned"
BAR = (BITS, EXCEPTION, LEFT, FAKE, CRASH)
"""Kinds of problems that fail a model. The others are told beside it."""

_LOW, _HIGH = 1.0, 1.05
"""A prediction may be this much of what is measured; a thousandth for what Python's own scalars take."""
_TOLERANCE = 1.001

_SHOWN = 3


@dataclass
class Row:
    """What came of one model.

    Attributes:
        library: its name here.
        name: of the model.
        commit: of this repository.
        versions: of torch and the library.
        status: one of the four above.
        reason: why it is not swept.
        problems: (kind, stage, one line).
        confirmed: whether a failure was seen again in a process started anew; None if there is none.
        seconds: of all its processes.
    The rest is as in `trial.Planned` and `trial.Plain`.
    """

    library: str
    name: str
    commit: str
    versions: dict[str, str]
    status: str = NOT_SWEPT
    reason: str = ""
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    confirmed: bool | None = None
    seconds: float = 0.0
    finite: bool = True
    deferred: bool = False
    plain_peak: int = 0
    budget: int = 0
    peak: int = 0
    predicted: int | None = None
    predicted_plain: int | None = None
    fits: bool | None = None
    method: str = ""
    active: int = 0
    predict_seconds: float = 0.0
    plan_seconds: float = 0.0
    log: list[str] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.library, self.name

    def kinds(self) -> set[str]:
        return {kind for kind, _, _ in self.problems}


def judge(row: Row, plain: dict[str, Any], planned: dict[str, Any]) -> None:
    """Fills the row with what the two processes said."""
    for name in [
        "budget",
        "peak",
        "predicted",
        "predicted_plain",
        "fits",
        "method",
        "active",
        "log",
        "deferred",
    ]:
        setattr(row, name, planned[name])
    row.predict_seconds, row.plan_seconds = (
        round(planned["predict_seconds"], 3),
        round(planned["plan_seconds"], 3),
    )
    row.problems = []
    _add(row, EXCEPTION, planned["errors"])
    _add(row, LEFT, planned["left"])
    _add(row, FAKE, planned["fakes"])
    if not plain["unrepeatable"]:
        for number, (expected, got) in enumerate(zip(plain["steps"], planned["steps"], strict=False)):
            wrong = digests.different(expected, got)
            if wrong:
                stage = f"step {number}" if number < len(plain["steps"]) - 1 else "step after detach"
                row.problems.append(
                    (BITS, stage, f"{len(wrong)} of {len(expected)} differ: {wrong[:_SHOWN]}")
                )
    if planned["remains"]:
        _add(row, LEFT, [("trained and detached", line) for line in _left_on_model(plain, planned)])
    _judge_bytes(row)
    unrepeatable = bool(plain["unrepeatable"])
    row.reason = f"plain PyTorch itself: {plain['unrepeatable'][:_SHOWN]}" if unrepeatable else ""
    row.status = FAILED if row.kinds() & set(BAR) else UNREPEATABLE if unrepeatable else EQUAL


def _left_on_model(plain: dict[str, Any], planned: dict[str, Any]) -> list[str]:
    """What the trained models differ in, by training: the first model of a class may be built otherwise."""
    from sweeping import remains

    moved = [
        name
        for run in (plain, planned)
        for name in run["remains"]
        if name in plain["remains"] or name not in plain["built"]
        if run["remains"][name] != run["built"].get(name)
    ]
    gone = [name for name in plain["remains"] if name not in planned["remains"]]
    kept = [
        {name: run["remains"][name] for name in {*moved, *gone} & run["remains"].keys()}
        for run in (plain, planned)
    ]
    return remains.changed(*kept)


def _add(row: Row, kind: str, found: Iterable[Any]) -> None:
    """The first lines of each stage, and how many more there are."""
    by_stage: dict[str, list[str]] = {}
    for stage, line in found:
        by_stage.setdefault(stage, []).append(line)
    for stage, lines in by_stage.items():
        row.problems += [(kind, stage, line) for line in lines[:_SHOWN]]
        if len(lines) > _SHOWN:
            row.problems.append((kind, stage, f"and {len(lines) - _SHOWN} more"))


def _judge_bytes(row: Row) -> None:
    if row.predicted is None:
        if not row.method and not any(kind == EXCEPTION for kind, _, _ in row.problems):
            row.problems.append((UNPLANNED, "wrap", (row.log or ["without a word"])[-1]))
        return
    if row.fits and row.peak > row.budget * _TOLERANCE:
        row.problems.append((BUDGET, "measured", f"{row.peak} bytes, budget {row.budget}"))
    pairs = [("plan", row.predicted, row.peak), ("plain", row.predicted_plain, row.plain_peak)]
    for stage, predicted, measured in pairs:
        if predicted is None or not measured:
            continue
        line = f"{predicted} predicted, {measured} measured: {100 * (predicted / measured - 1):+.1f} %"
        if predicted * _TOLERANCE < measured * _LOW:
            row.problems.append((LOW, stage, line))
        elif predicted > measured * _HIGH:
            row.problems.append((HIGH, stage, line))


def read(path: Path) -> dict[tuple[str, str], Row]:
    """Rows of earlier runs; fields that are no longer known are left out."""
    known = {item.name for item in fields(Row)}
    rows = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            data = {name: value for name, value in json.loads(line).items() if name in known}
            data["problems"] = [tuple(item) for item in data.get("problems", [])]
            row = Row(**data)
            rows[row.key] = row
    return rows


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def commit() -> str:
    """The last one that changed the package; with a "+" if its sources differ from it."""
    sources = ("--", "python", "src", "include")
    git = ["git", "-C", str(ROOT)]
    try:
        name = _said([*git, "log", "-1", "--format=%h", *sources])
        changes = _said([*git, "status", "--porcelain", *sources])
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changes else "")


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def versions(distributions: Iterable[str], packages: Path | None) -> dict[str, str]:
    """Of installed distributions; those of the sweep lie in a folder of their own."""
    found = {}
    for name in distributions:
        own = list(metadata.distributions(name=name, path=[str(packages)])) if packages else []
        try:
            found[name] = own[0].version if own else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
