# SPDX-License-Identifier: Apache-2.0
"""What MemScale costs before the first step: `import memscale`, and `wrap` on GPT-2 small, 4 x 512.

The import is measured in fresh processes, `import torch` alone and `import torch, memscale` in turn, so that
a busy machine disturbs both alike; the median of the paired differences counts. `wrap` gets a sample with
labels and 60 % of the plain peak as its budget; its time is split into the static trace, the calls into the
C core that decide and replay, and the rest.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import torch
from architectures import gpt2
from common import ROOT, Table, median, parser

import memscale
from memscale import _core
from memscale.trace import static

TARGETS = {"import": 60.0, "wrap": 2500.0, "core": 20.0}
CORE_CALLS = ("decide", "frontier", "replay", "op_times_ns")

_IMPORT = "import time; import torch; a = time.perf_counter(); {}; print((time.perf_counter() - a) * 1e3)"


def import_ms(statement: str) -> float:
    """Milliseconds that a statement takes after `import torch`, in a fresh process."""
    command = [sys.executable, "-c", _IMPORT.format(statement)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return float(done.stdout)


class Stopwatch:
    """Adds up the time spent in functions that it wraps."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    def wrap(self, owner: Any, name: str) -> None:
        """Replaces `owner.name` by a version that is timed."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.ms[name] = self.ms.get(name, 0.0) + (time.perf_counter() - began) * 1e3

        setattr(owner, name, timed)


def measure_imports(table: Table, runs: int) -> None:
    """Fresh processes, the three statements in turn."""
    with_public_names = "import memscale; memscale.wrap; memscale.Config"
    times: dict[str, list[float]] = {"pass": [], "import memscale": [], with_public_names: []}
    for _ in range(runs):
        for statement, values in times.items():
            values.append(import_ms(statement))
    for name, statement in (("import", "import memscale"), ("import and wrap name", with_public_names)):
        extra = [value - base for value, base in zip(times[statement], times["pass"], strict=True)]
        table.add(name, runs, median(extra), min(extra), TARGETS["import"])


def measure_wraps(table: Table, repeats: int, profile: bool) -> None:
    """`wrap` and its parts, several times on one model."""
    torch.manual_seed(0)
    model = gpt2(12, 768, 12, vocabulary=50257)().train()
    ids = torch.randint(0, 50257, (4, 512))
    batch = {"input_ids": ids, "labels": ids}
    settings: dict[str, Any] = {"enable_logging": False}
    plain = memscale.plan(
        model, config=memscale.Config(memory_budget="1TiB", **settings), sample_input=batch
    ).plain
    config = memscale.Config(memory_budget=plain.allocated_peak_bytes * 6 // 10, **settings)
    if profile:
        import cProfile
        import pstats

        with cProfile.Profile() as profiled:
            memscale.wrap(model, config, sample_input=batch)
        pstats.Stats(profiled).sort_stats("tottime").print_stats(25).sort_stats("cumulative").print_stats(45)
        memscale.detach(model)
    watch = Stopwatch()
    for name in CORE_CALLS:
        watch.wrap(_core, name)
    watch.wrap(static, "trace_static")
    parts: dict[str, list[float]] = {
        "wrap": [],
        "trace": [],
        "core": [],
        "rest": [],
        **{name: [] for name in CORE_CALLS},
    }
    for _ in range(repeats):
        watch.ms.clear()
        began = time.perf_counter()
        memscale.wrap(model, config, sample_input=batch)
        total = (time.perf_counter() - began) * 1e3
        memscale.detach(model)
        core = sum(watch.ms.get(name, 0.0) for name in CORE_CALLS)
        trace = watch.ms["trace_static"]
        for name, value in (
            ("wrap", total),
            ("trace", trace),
            ("core", core),
            ("rest", total - trace - core),
        ):
            parts[name].append(value)
        for name in CORE_CALLS:
            parts[name].append(watch.ms.get(name, 0.0))
    for name, values in parts.items():
        label = {"wrap": "wrap", "trace": "  static trace", "core": "  C core", "rest": "  rest"}.get(
            name, f"    {name}"
        )
        table.add(label.strip(), repeats, median(values), min(values), TARGETS.get(name, ""))


def main() -> None:
    """Measures and compares with the targets."""
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=9, help="processes for each import")
    options.add_argument("--wraps", type=int, default=5)
    options.add_argument(
        "--profile", action="store_true", help="show where the time of one wrap goes (cProfile)"
    )
    arguments = options.parse_args()
    table = Table("startup", ("what", "runs", "median_ms", "least_ms", "target_ms"), arguments.dry)

    measure_imports(table, arguments.runs)
    measure_wraps(table, arguments.wraps, arguments.profile)


if __name__ == "__main__":
    main()
