# SPDX-License-Identifier: Apache-2.0
"""Is the predicted peak of a forward without gradients the measured one? Over the models of `truth.py`.

Each model runs in a process of its own (`evaluation_run.py`), on the CPU, after `model.eval()`: alone, and in
training, where the optimizer's state and the last step's gradients are there. PyTorch's profiler tells every
allocation and release of tensor memory; the highest sum during one forward is the truth.

    error = predicted - measured, in bytes; a negative one is an under-estimate

Exits with 1 where a model fails or a prediction is too low.
"""

from __future__ import annotations

import sys

from common import Table, parser, rows_of
from truth_workloads import WORKLOADS

QUICK = ("gpt2-autocast", "llama-lora", "convnet-sgd", "unet", "lstm", "recommender")

COLUMNS = (
    "model",
    "when",
    "measured_bytes",
    "predicted_bytes",
    "error_bytes",
    "error_pct",
    "predict_s",
    "forward_s",
    "profile",
)


def main() -> None:
    """Measures the chosen models."""
    options = parser(__doc__)
    options.add_argument("models", nargs="*", help=f"of {', '.join(WORKLOADS)} (all)")
    options.add_argument("--quick", action="store_true", help="six models")
    arguments = options.parse_args()
    table = Table("evaluation", COLUMNS, arguments.dry)
    errors: list[int] = []
    failed = 0
    for name in arguments.models or (QUICK if arguments.quick else list(WORKLOADS)):
        for row in rows_of("evaluation_run.py", name):
            if "failed" in row:
                failed += 1
                print(f"# {name} failed: {row['failed']}", file=sys.stderr)
                continue
            error = row["predicted_bytes"] - row["measured_bytes"]
            errors.append(error)
            table.add(
                name,
                row["when"],
                row["measured_bytes"],
                row["predicted_bytes"],
                error,
                f"{100 * error / row['measured_bytes']:.3f}",
                row["predict_s"],
                row["forward_s"],
                row["method"],
            )
    low = sum(error < 0 for error in errors)
    print(f"{len(errors)} forwards: {errors.count(0)} equal to the byte, {low} too low; {failed} failed")
    if failed or low:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
