# SPDX-License-Identifier: Apache-2.0
"""Is the predicted peak the measured one, and does the budget hold? Over all models, FP32 and BF16 autocast.

For each model the plain training run is measured (profiler memory events: everything, from building the model
on, is counted). Then it is trained under 90, 75, 60 and 50 % of that peak, planned at the first batch, and
measured again. error = predicted - measured; a negative one is an under-estimate. "violation": the plan said
that it fits and the measured peak is above the budget. At the end: the worst of each, and whether a lower
budget ever raised a peak.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from common import Table, measure_peak, parser

import memscale
from zoo import ZOO, Entry, call

SHARES = (90, 75, 60, 50)
QUICK = ("gpt2", "llama", "convnet", "lstm", "mlp")


def train(entry: Entry, autocast: bool, budget: int | None, steps: int = 3) -> Any:
    """Builds and trains; returns the plan under a budget."""
    torch.manual_seed(0)
    model = entry.build().train()
    batch = entry.batch()
    if budget is not None:
        memscale.wrap(model, memscale.Config(memory_budget=budget, enable_logging=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = call(model, batch)
            loss = output.loss if entry.loss is None else entry.loss(output)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del output, loss
    return None if budget is None else model._memscale_executor.plan  # type: ignore[union-attr]


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
)


def main() -> None:
    """Measures the chosen models."""
    options = parser(__doc__)
    options.add_argument("models", nargs="*", help=f"of {', '.join(ZOO)} (all)")
    options.add_argument("--quick", action="store_true", help="five models, two budgets: under two minutes")
    arguments = options.parse_args()
    shares = (75, 50) if arguments.quick else SHARES
    table = Table("truth", COLUMNS, arguments.dry)
    errors: list[tuple[float, str]] = []
    violations, rises, began = 0, 0, time.monotonic()
    for name in arguments.models or (QUICK if arguments.quick else ZOO):
        for autocast in (False, True):
            precision = "bf16" if autocast else "fp32"
            entry = ZOO[name]
            try:
                plain = measure_peak(lambda: train(entry, autocast, None))  # noqa: B023
                last = None
                for share in shares:
                    budget, plans = plain * share // 100, []
                    measured = measure_peak(lambda: plans.append(train(entry, autocast, budget)))  # noqa: B023
                    plan = plans[0]
                    predicted, expected = plan.predicted.allocated_peak_bytes, plan.plain.allocated_peak_bytes
                    error = 100 * (predicted - measured) / measured
                    violation = plan.fits and measured > budget
                    violations += violation
                    rises += last is not None and measured > last
                    last = measured
                    errors.append((error, f"{name} {precision} {share} %"))
                    table.add(
                        name,
                        precision,
                        share,
                        budget,
                        measured,
                        predicted,
                        f"{error:.2f}",
                        plan.fits,
                        violation,
                        len(plan.active),
                        plain,
                        f"{100 * (expected - plain) / plain:.2f}",
                        plan.profile,
                    )
            except Exception as error:
                print(f"# {name} {precision}: {type(error).__name__}: {error}", file=sys.stderr)
    if errors:
        print(
            f"errors from {min(errors)} to {max(errors)}; {violations} violations; "
            f"{rises} peaks rose under a lower budget"
        )
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
