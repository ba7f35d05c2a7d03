# SPDX-License-Identifier: Apache-2.0
"""Whole training steps: predicted by the CPU build, against PyTorch's CUDA build on a stand-in runtime.

Each row is one case for one card: what `torch.cuda.max_memory_allocated` and `max_memory_reserved` said after
three steps, and what was predicted for them, in bytes. The stand-in computes nothing, but every allocation is
the CUDA build's own; cuDNN is off on both sides.

    steps.py [CASE ...] [--capability 8.0 ...] [--expandable] [--dry]
"""

from __future__ import annotations

import argparse
import csv
import datetime
import subprocess
from typing import Any

from cases import MODELS, PRECISIONS
from sides import ROOT, SideError, run_prediction, run_real

RESULTS = ROOT / "bench/results/standin.csv"
COLUMNS = (
    "date", "commit", "judge", "predicted_with", "case", "capability", "expandable", "checkpointed",
    "allocated_bytes",
    "predicted_allocated_bytes", "allocated_error_bytes", "reserved_bytes", "predicted_reserved_bytes",
    "reserved_error_bytes", "reserved_error_pct", "error",
)  # fmt: skip

_NO_CUDNN = ("conv", "lstm", "gru")
"""Models whose real kernels are cuDNN's, which the stand-in has not."""


def every_case() -> list[str]:
    """Every model in every precision, and the optimizers and plans on some."""
    cases = [f"{name}:{precision}" for name in MODELS if name not in _NO_CUDNN for precision in PRECISIONS]
    optimizers = ("adamw-fused", "adamw-loop", "sgd", "momentum", "adam", "rmsprop", "adagrad", "adafactor")
    cases += [f"gpt2:fp32:{optimizer}" for optimizer in optimizers]
    cases += [f"llama:{precision}:adamw:{share}" for precision in PRECISIONS for share in (80, 65)]
    return cases + [f"gpt2:{precision}:adamw:{share}" for precision in PRECISIONS for share in (80, 65)]


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip()


def compare(case: str, capability: str, expandable: bool) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {"case": case, "capability": capability, "expandable": expandable, "error": ""}
    try:
        plain = 0
        if case.count(":") == 3:
            plain = run_real(case.rpartition(":")[0], capability, expandable)[
                "reserved"
            ]  # budgets are shares of it
        real = run_real(case, capability, expandable, plain=plain)
        ours = run_prediction(case, capability, expandable, plan=real.get("plan", ""))
    except SideError as error:
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("USDT")]
        return row | {"error": lines[-1][:160]}
    row["judge"] = f"PyTorch {real['torch']} CUDA build on a stand-in runtime"
    row["predicted_with"] = f"PyTorch {ours['torch']}"
    for name in ("allocated", "reserved"):
        row[f"{name}_bytes"], row[f"predicted_{name}_bytes"] = real[name], ours[name]
        row[f"{name}_error_bytes"] = ours[name] - real[name]
    row["reserved_error_pct"] = round(100 * row["reserved_error_bytes"] / real["reserved"], 3)
    row["checkpointed"] = real.get("checkpointed", 0)
    return row


def _write(rows: list[dict[str, Any]]) -> None:
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Runs the cases."""
    reader = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    reader.add_argument("cases", nargs="*")
    reader.add_argument("--capability", nargs="*", default=["8.0"])
    reader.add_argument("--expandable", action="store_true")
    reader.add_argument("--dry", action="store_true", help="print only")
    options = reader.parse_args()
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    for capability in options.capability:
        for case in options.cases or every_case():
            row = {"date": now, "commit": _commit()} | compare(case, capability, options.expandable)
            print(
                f"{case:32} {capability} {'exp' if options.expandable else '   '} "
                f"allocated {row.get('allocated_bytes', 0):>13,} "
                f"{row.get('allocated_error_bytes', 0):>+13,}   "
                f"reserved {row.get('reserved_bytes', 0):>13,} {row.get('reserved_error_bytes', 0):>+13,} "
                f"{row.get('reserved_error_pct', 0):>+7.3f} %  {row['error']}",
                flush=True,
            )
            if not options.dry:
                _write([row])


if __name__ == "__main__":
    main()
