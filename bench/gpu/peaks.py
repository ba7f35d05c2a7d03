# SPDX-License-Identifier: Apache-2.0
"""The five benchmark models on a CUDA card: plain against MemScale, peaks and step times.

Per model and precision: the plain run first, then MemScale at shares of the plain reserved peak, then with a
budget that nothing meets (the smallest plan there is). Every variant trains from the same start. Each gives
one row, written and flushed at once, so that a run that is cut off leaves what it has done. The order is by
importance; what does not fit into `--minutes` any more is left out and said so.

Measured: `torch.cuda.max_memory_allocated` and `max_memory_reserved` over the training steps (the first step
creates the optimizer's state; the peak is over all), and, sampled after the last step, what the card says the
process holds outside the allocator. "parity": the losses of all steps are the plain run's, bit for bit;
kernels here are the default ones, whose sums on a card may differ from run to run in plain PyTorch too
(`--deterministic` takes the deterministic ones).
"""

# ruff: noqa: I001 - the path to the other scripts has to be set first

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts; for --deterministic

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from common import RESULTS, Table, parser
from architectures import bert, gpt2

import memscale

MiB = 1 << 20


@dataclass(frozen=True)
class Model:
    """A benchmark model and its batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: int
    length: int
    words: int


MODELS = (
    Model("gpt2-medium", gpt2(24, 1024, 16, 50257), 4, 512, 50257),
    Model("bert-base", bert(12, 768, 12, 30522), 16, 128, 30522),
    Model("gpt2-large", gpt2(36, 1280, 20, 50257), 2, 512, 50257),
    Model("bert-large", bert(24, 1024, 16, 30522), 16, 128, 30522),
    Model("gpt2-xl", gpt2(48, 1600, 25, 50257), 1, 512, 50257),
)


@dataclass
class Outcome:
    """What one variant gave."""

    allocated: int = 0
    reserved: int = 0
    outside: int = 0
    plan: Any = None
    wrap_ms: float = 0.0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    error: str = ""


def empty_card() -> None:
    """Frees all that can be freed, and starts the counters anew."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def train(model: Model, bf16: bool, budget: int | None, steps: int) -> Outcome:
    """One variant from a fixed start."""
    outcome = Outcome()
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = model.build().train()
        ids = torch.randint(0, model.words, (model.batch, model.length))
    batch = {"input_ids": ids, "labels": ids}
    if budget is not None:
        began = time.perf_counter()
        config = memscale.Config(memory_budget=budget, enable_logging=False)
        memscale.wrap(module, config, sample_input=batch)
        outcome.wrap_ms = (time.perf_counter() - began) * 1e3
        outcome.plan = module._memscale_executor.plan  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    torch.manual_seed(1)
    torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            output = module(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.detach().clone())
        del output
        torch.cuda.synchronize()
        outcome.seconds.append(time.perf_counter() - began)
    outcome.losses = [loss.item() for loss in losses]
    outcome.allocated, outcome.reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    outcome.outside = total - free - torch.cuda.memory_reserved()
    if budget is not None:  # a plan that was made anew during training is the one that counts
        outcome.plan = module._memscale_executor.plan  # type: ignore[union-attr]
    return outcome


def attempt(model: Model, bf16: bool, budget: int | None, steps: int) -> Outcome:
    """`train`, with a failure as a result."""
    empty_card()
    try:
        return train(model, bf16, budget, steps)
    except Exception as error:
        return Outcome(
            error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        )


class Report:
    """Writes the rows."""

    COLUMNS = (
        "model", "precision", "variant", "budget_mib", "allocated_mib", "reserved_mib", "outside_mib",
        "predicted_allocated_mib", "predicted_reserved_mib", "plain_predicted_allocated_mib",
        "plain_predicted_reserved_mib", "smallest_mib", "fits", "holds", "checkpointed", "step_ms",
        "of_plain", "predicted_of_plain", "wrap_ms", "parity", "profile", "error",
    )  # fmt: skip

    def __init__(self, dry: bool, folder: Path) -> None:
        self.table = Table("peaks", self.COLUMNS, dry, folder)

    def add(self, label: tuple[str, str, str], budget: int | None, made: Outcome, plain: Outcome) -> None:
        """One variant beside the plain run."""
        plan = made.plan

        def mib(value: int | None) -> str:
            return "" if value is None else f"{value / MiB:.1f}"

        def step(outcome: Outcome) -> float:
            return statistics.median(outcome.seconds[1:]) if len(outcome.seconds) > 1 else 0.0

        context = plan.predicted.context_bytes if plan else 0
        holds = "" if plan is None else made.reserved + context <= plan.budget_bytes
        self.table.add(
            *label,
            mib(budget),
            mib(made.allocated),
            mib(made.reserved),
            mib(made.outside),
            mib(plan and plan.predicted.allocated_peak_bytes),
            mib(plan and plan.predicted.reserved_peak_bytes),
            mib(plan and plan.plain.allocated_peak_bytes),
            mib(plan and plan.plain.reserved_peak_bytes),
            mib(plan and plan.smallest_peak_bytes),
            "" if plan is None else plan.fits,
            holds,
            "" if plan is None else len(plan.active),
            1e3 * step(made),
            step(made) / step(plain) if step(plain) else "",
            "" if plan is None else plan.slowdown,
            made.wrap_ms,
            made.losses == plain.losses,
            "" if plan is None else plan.profile,
            made.error,
        )


def main() -> None:
    """All models, most important first."""
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=RESULTS, help="folder for peaks.csv")
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--shares", default="75,60,50,40", help="budgets, in %% of the plain reserved peak")
    options.add_argument("--models", nargs="*", default=[model.name for model in MODELS])
    options.add_argument("--precisions", default="fp32,bf16")
    options.add_argument(
        "--deterministic", action="store_true", help="deterministic kernels: slower, equal sums"
    )
    arguments = options.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch.cuda.is_available() is False: no CUDA device")
        return
    if arguments.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    from memscale.core.hardware import detect

    context = detect(torch.device("cuda")).context_bytes
    print(f"context assumed: {context / MiB:.0f} MiB")
    report, end = Report(arguments.dry, arguments.out), time.monotonic() + 60 * arguments.minutes
    for model in (model for model in MODELS if model.name in arguments.models):
        for precision in arguments.precisions.split(","):
            plain: Outcome | None = None
            for variant in ("plain", *arguments.shares.split(","), "smallest"):
                if time.monotonic() > end:
                    print(f"time is up before {model.name} {precision} {variant}")
                    return
                reference = plain.reserved if plain else 0
                share = int(variant) if variant.isdigit() else 0
                budget = (
                    None if plain is None else context + reference * share // 100 + (MiB if not share else 0)
                )
                made = attempt(model, precision == "bf16", budget, arguments.steps)
                plain = plain or made
                report.add((model.name, precision, variant), budget, made, plain)
                if plain.error:
                    break


if __name__ == "__main__":
    main()
