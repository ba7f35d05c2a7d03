# SPDX-License-Identifier: Apache-2.0
"""Does a budget hold? Models of many kinds at 90, 75, 60, 50, 40, 30 and 25 % of what the plain step takes.

Each workload (of `truth_workloads.py`) runs in a process of its own, `budgets_run.py`: two steps plain, then
under each budget. PyTorch's profiler tells every allocation and release of tensor memory; the highest sum,
building the model included, is what was measured. Three things are checked. The exit status is 1 if one
fails:

    held        where the plan says that the budget is met, the measured peak is not above it
    falling     a lower budget never gives a higher measured peak
    predicted   the predicted peak is within 2 % of the measured one, also for plans that do not fit

Cells that the planner refused ("fits" False) run the smallest plan there is; its peak stands beside them.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from common import Table, median, parser, rows_of
from truth_workloads import WORKLOADS

KINDS = {
    "decoders": ("gpt2", "llama-bf16", "llama-lora", "mistral-accumulate", "neox-bf16-adafactor"),
    "encoders": ("bert-frozen", "deberta"),
    "both": ("t5-adafactor", "bart-autocast"),
    "pictures": ("vit", "swin", "segformer", "mixer"),
    "sound": ("hubert", "whisper", "wavenet"),
    "experts": ("mixtral",),
    "state space": ("mamba",),
    "convolutions": ("convnet-sgd", "convnext-autocast", "grouped-conv", "unet", "video", "two-heads"),
    "recurrent": ("lstm", "gru"),
    "plain modules": ("mlp-autocast", "recommender", "in-place", "siamese", "graph"),
    "depends on the data": ("early-exit",),
}
ARCHITECTURES = [name for names in KINDS.values() for name in names]
QUICK = ("gpt2", "convnet-sgd", "lstm", "siamese")

COLUMNS = (
    "model",
    "share_pct",
    "budget_bytes",
    "fits",
    "measured_bytes",
    "predicted_bytes",
    "error_pct",
    "of_budget_pct",
    "plain_bytes",
    "smallest_bytes",
    "predicted_slowdown",
    "checkpointed",
    "selective",
    "measured_again",
)

TOLERANCE_PCT = 2.0

Row = dict[str, Any]
"""A `budgets_run.Cell` as a dictionary."""


def error_pct(row: Row) -> float:
    """Of the prediction, in percent of what was measured."""
    return 100 * (row["predicted_bytes"] - row["measured_bytes"]) / row["measured_bytes"]


def _cells(row: Row) -> list[Any]:
    return [
        row["workload"],
        row["share"],
        row["budget_bytes"],
        row["fits"],
        row["measured_bytes"],
        row["predicted_bytes"],
        f"{error_pct(row):.3f}",
        f"{100 * row['measured_bytes'] / row['budget_bytes']:.1f}",
        row["plain_bytes"],
        row["smallest_bytes"],
        row["step_ns"] / max(row["plain_step_ns"], 1),
        row["checkpointed"],
        row["selective"],
        not row["again"],
    ]


# ---- what must hold --------------------------------------------------------------------------------------


def broken(rows: Sequence[Row]) -> list[Row]:
    """Cells whose peak is above a budget that the plan says it meets."""
    return [row for row in rows if row["fits"] and row["measured_bytes"] > row["budget_bytes"]]


def rising(rows: Sequence[Row]) -> list[Row]:
    """Cells whose peak is above that of a higher budget."""
    return [
        after
        for before, after in itertools.pairwise(rows)
        if after["workload"] == before["workload"] and after["measured_bytes"] > before["measured_bytes"]
    ]


def missed(rows: Sequence[Row]) -> list[Row]:
    """Cells whose prediction is too far off."""
    return [row for row in rows if abs(error_pct(row)) > TOLERANCE_PCT]


CHECKS: dict[str, tuple[str, Callable[[Sequence[Row]], list[Row]]]] = {
    "held": ("a budget that the plan says is met is met", broken),
    "falling": ("a lower budget never raises the peak", rising),
    "predicted": (f"the prediction is within {TOLERANCE_PCT:g} %", missed),
}


def check(rows: Sequence[Row]) -> bool:
    """Prints each check with what fails it. True: none fails."""
    passed = True
    for name, (claim, find) in CHECKS.items():
        found = find(rows)
        passed = passed and not found
        print(f"{name}: {claim}: {f'{len(found)} of {len(rows)} cells fail' if found else 'passed'}")
        for row in found:
            print(
                f"    {row['workload']} at {row['share']} %: budget {row['budget_bytes']:,}, measured "
                f"{row['measured_bytes']:,}, predicted {row['predicted_bytes']:,} ({error_pct(row):+.2f} %)"
            )
    return passed


def summarise(rows: Sequence[Row]) -> None:
    """Figures over all cells, and which were refused."""
    errors = [abs(error_pct(row)) for row in rows]
    used = [100 * row["measured_bytes"] / row["budget_bytes"] for row in rows if row["fits"]]
    refused = [row for row in rows if not row["fits"]]
    print(
        f"{len({row['workload'] for row in rows})} architectures, {len(rows)} cells, {len(refused)} refused; "
        f"error median {median(errors):.3f} %, worst {max(errors):.3f} %"
    )
    if used:
        print(
            f"of a budget that is met, a run uses {median(used):.1f} % in the median, "
            f"{max(used):.2f} % at most"
        )
    for name, group in itertools.groupby(refused, key=lambda row: row["workload"]):
        cells = list(group)
        share = 100 * cells[0]["smallest_bytes"] / cells[0]["plain_bytes"]
        print(
            f"    {name} refused at {', '.join(str(row['share']) for row in cells)} %: "
            f"the smallest peak is {share:.1f} % of plain"
        )


def main() -> None:
    """Measures the chosen workloads and checks them."""
    options = parser(__doc__)
    options.add_argument(
        "models", nargs="*", help=f"of {', '.join(WORKLOADS)} ({len(ARCHITECTURES)} of them)"
    )
    options.add_argument("--quick", action="store_true", help=f"{len(QUICK)} workloads")
    arguments = options.parse_args()
    names = arguments.models or (QUICK if arguments.quick else ARCHITECTURES)
    table = Table("budgets", COLUMNS, arguments.dry)
    rows: list[Row] = []
    failed = 0
    began = time.monotonic()
    for index, name in enumerate(names, 1):
        print(f"# {index}/{len(names)} {name}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        for row in rows_of("budgets_run.py", name):
            if "failed" in row:
                failed += 1
                print(f"# {name} failed: {row['failed']}", file=sys.stderr)
                continue
            rows.append(row)
            table.add(*_cells(row))
    if rows:
        summarise(rows)
    passed = check(rows) and not failed
    print(f"{len(names)} workloads, {failed} failed, {time.monotonic() - began:.0f} s")
    if not passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
