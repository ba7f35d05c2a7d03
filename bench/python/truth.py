# SPDX-License-Identifier: Apache-2.0
"""Is the predicted peak the measured one? Over models of many kinds, plain and under each mode.

Each workload of `truth_workloads.py` runs in a process of its own (`truth_run.py`): built and trained for two
steps plain, then under each mode with a budget that forces a plan. PyTorch's profiler tells every allocation
and release of tensor memory; the highest sum is the truth. It includes building the model.

    error = predicted - measured, in percent of measured; a negative one is an under-estimate
    inside: the truth lies in the prediction's error band
    violation: the plan said that it fits, and the truth is above the budget
    peer: torch's MemTracker on fake tensors, for the plain step only: it knows no plans

Workloads marked "tuned" were looked at while rules and error band were made; the rest are held out.
"dropped": the loop keeps the loss alone (`loss = model(**batch).loss`). The prediction takes the output to
live until the step is over, and so is high by it there; the summary gives both kinds.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Table, median, parser, rows_of
from truth_workloads import WORKLOADS

QUICK = ("gpt2-autocast", "llama-lora", "convnet-sgd", "unet", "lstm", "recommender")

COLUMNS = (
    "model",
    "precision",
    "share_pct",
    "budget_bytes",
    "measured_bytes",
    "predicted_bytes",
    "error_pct",
    "fits",
    "violation",
    "checkpointed",
    "plain_measured_bytes",
    "plain_error_pct",
    "profile",
    "mode",
    "split",
    "output",
    "low_bytes",
    "high_bytes",
    "inside",
    "peer_bytes",
    "peer_error_pct",
)

Row = dict[str, Any]
"""A `truth_run.Row` as a dictionary, with what is derived from it."""


def measure(name: str) -> list[Row]:
    """The rows of one workload; a single one with "failed" where it could not run."""
    rows = rows_of("truth_run.py", name)
    if "failed" in rows[0]:
        return [{"workload": name, **rows[0]}]
    return [derive(row, rows[0]) for row in rows]


def _percent(value: int, truth: int) -> float:
    return 100 * (value - truth) / truth


def derive(row: Row, plain: Row) -> Row:
    """Adds errors in percent, whether the truth is inside the band, and the plain step's figures."""
    if "failed" in row:
        return row
    truth = row["measured_bytes"]
    return {
        **row,
        "error_pct": _percent(row["predicted_bytes"], truth),
        "inside": row["low_bytes"] <= truth <= row["high_bytes"],
        "violation": bool(row["budget_bytes"]) and row["fits"] and truth > row["budget_bytes"],
        "width_pct": 100 * (row["high_bytes"] - row["low_bytes"]) / truth,
        "peer_error_pct": _percent(row["peer_bytes"], truth) if row["peer_bytes"] > 0 else None,
        "plain_measured_bytes": plain["measured_bytes"],
        "plain_error_pct": _percent(plain["predicted_bytes"], plain["measured_bytes"]),
    }


def _cells(row: Row) -> list[Any]:
    budget, plain = row["budget_bytes"], row["plain_measured_bytes"]
    peer = row["peer_error_pct"]
    return [
        row["workload"],
        WORKLOADS[row["workload"]].precision,
        round(100 * budget / plain) if budget else "",
        budget or "",
        row["measured_bytes"],
        row["predicted_bytes"],
        f"{row['error_pct']:.3f}",
        row["fits"],
        row["violation"],
        row["checkpointed"],
        plain,
        f"{row['plain_error_pct']:.3f}",
        row["method"],
        row["mode"],
        row["split"],
        "kept" if row["keeps"] else "dropped",
        row["low_bytes"],
        row["high_bytes"],
        row["inside"],
        row["peer_bytes"] if peer is not None else "",
        f"{peer:.3f}" if peer is not None else "",
    ]


# ---- summary ---------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that at least `share` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(-(-len(ordered) * share // 100) - 1, 0)]


def summary(rows: Sequence[Row], title: str) -> Row:
    """Figures over some rows."""
    errors = [abs(row["error_pct"]) for row in rows]
    worst = min(rows, key=lambda row: row["error_pct"])
    return {
        "rows": title,
        "count": len(rows),
        "median_pct": median(errors),
        "p90_pct": percentile(errors, 90),
        "p95_pct": percentile(errors, 95),
        "max_pct": max(errors),
        "worst_under_pct": min(worst["error_pct"], 0.0),
        "worst_under": f"{worst['workload']} {worst['mode']}" if worst["error_pct"] < 0 else "",
        "inside_pct": 100 * sum(row["inside"] for row in rows) / len(rows),
        "band_width_pct": sum(row["width_pct"] for row in rows) / len(rows),
        "violations": sum(row["violation"] for row in rows),
        "rises": rises(rows),
    }


def rises(rows: Sequence[Row]) -> int:
    """How often a workload's measured peak was higher under a lower budget."""
    plans = [row for row in rows if row["mode"] != "plain"]
    return sum(
        after["workload"] == before["workload"] and after["measured_bytes"] > before["measured_bytes"]
        for before, after in itertools.pairwise(plans)
    )


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    groups = [
        ("all", list(rows)),
        ("output kept", [row for row in rows if row["keeps"]]),
        ("output dropped", [row for row in rows if not row["keeps"]]),
        ("plain", [row for row in rows if row["mode"] == "plain"]),
        ("plans", [row for row in rows if row["mode"] != "plain"]),
        ("tuned", [row for row in rows if row["split"] == "tuned"]),
        ("held out", [row for row in rows if row["split"] == "held out"]),
    ]
    return [(title, chosen) for title, chosen in groups if chosen]


def peer_summary(rows: Sequence[Row]) -> Row:
    """The peer's figures beside ours, over the plain rows where it runs."""
    both = [row for row in rows if row.get("peer_error_pct") is not None]
    plain = [row for row in rows if row["mode"] == "plain"]
    if not both:
        return {"peer_runs": 0, "of": len(plain)}
    theirs, ours = [abs(row["peer_error_pct"]) for row in both], [abs(row["error_pct"]) for row in both]
    return {
        "peer_runs": len(both),
        "of": len(plain),
        "peer_median_pct": median(theirs),
        "peer_p95_pct": percentile(theirs, 95),
        "peer_worst_under_pct": min(0.0, *[row["peer_error_pct"] for row in both]),
        "our_median_pct": median(ours),
        "our_p95_pct": percentile(ours, 95),
        "our_worst_under_pct": min(0.0, *[row["error_pct"] for row in both]),
    }


def _line(figures: Row) -> str:
    shown = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in figures.values()]
    return "  ".join(f"{name} {text}" for name, text in zip(figures, shown, strict=True) if text)


def main() -> None:
    """Measures the chosen workloads."""
    options = parser(__doc__)
    options.add_argument("models", nargs="*", help=f"of {', '.join(WORKLOADS)} (all)")
    options.add_argument("--quick", action="store_true", help="six workloads")
    options.add_argument("--json", metavar="FILE", help="write rows and summary to a JSON file as well")
    arguments = options.parse_args()
    names = arguments.models or (QUICK if arguments.quick else list(WORKLOADS))
    table = Table("truth", COLUMNS, arguments.dry)
    rows: list[Row] = []
    failed: list[Row] = []
    began = time.monotonic()
    for index, name in enumerate(names, 1):
        print(f"# {index}/{len(names)} {name}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        for row in measure(name):
            if "failed" in row:
                failed.append({**row, "workload": name})
                print(f"# {name} failed: {row['failed']}", file=sys.stderr)
                continue
            rows.append(row)
            table.add(*_cells(row))
    figures = [summary(chosen, title) for title, chosen in _groups(rows)]
    peer = peer_summary(rows)
    for item in [*figures, peer]:
        print(_line(item))
    print(f"{len(names)} workloads, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    if arguments.json:
        content = {"rows": rows, "failed": failed, "summary": figures, "peer": peer}
        Path(arguments.json).write_text(json.dumps(content, indent=1) + "\n")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
