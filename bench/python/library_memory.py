# SPDX-License-Identifier: Apache-2.0
"""What math libraries take on a CPU host beside the tensors: MKL, oneDNN and OpenMP, by an interposed malloc.

    python library_memory.py [NAME ...] [--threads N ...] [--models | --operators] [--dry]

PyTorch's profiler shows what its own allocator hands out, and so predictions count that. Packing buffers of
matrix products, workspaces per thread and generated code come from the C library and from the system. Here
`bench/c/watch_malloc.c` stands in front of both and notes the library that calls. Each row is a process of
its own: an operator, forward and backward, or two steps of a model, plain and with 60 % of the plain peak as
the budget.

    tensors    measured by the interposer; beside it what the plan predicted
    library    asked for by libraries; code: address space that oneDNN reserves for generated kernels
    touched    of both, pages that were written to: what the process really has more
    mkl        MKL's own account
    again      growth if an operator runs once more: the libraries keep what they have
    over       tensors, engines and touched, less the budget; large where no plan fits

Needs Linux with glibc, and a C compiler (`$CC`, cc).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, Table, parser, rows_of
from library_memory_run import OPERATORS
from truth_workloads import WORKLOADS

COLUMNS = (
    "subject",
    "threads",
    "budget_bytes",
    "predicted_bytes",
    "tensor_bytes",
    "own_bytes",
    "library_bytes",
    "code_bytes",
    "touched_bytes",
    "mkl_bytes",
    "again_bytes",
    "object_bytes",
    "over_bytes",
)

MODELS = (
    "gpt2",
    "gpt2-autocast",
    "llama-lora",
    "llama-bf16",
    "bert-autocast-dropped",
    "vit",
    "swin",
    "convnext-autocast",
    "convnet-sgd",
    "unet",
    "video",
    "lstm",
    "mamba",
    "recommender",
)

_SHARE = 60


def build(folder: Path) -> Path:
    """The interposer, compiled into a folder.

    Raises:
        subprocess.CalledProcessError: the compiler says no.
        FileNotFoundError: there is none.
    """
    made = folder / "watch_malloc.so"
    compiler = os.environ.get("CC", "cc").split()
    words = ["-std=c11", "-O2", "-shared", "-fPIC", "-o", str(made), str(ROOT / "bench/c/watch_malloc.c")]
    subprocess.run([*compiler, *words, "-ldl", "-lpthread"], check=True)
    return made


def measure(name: str, threads: int, budget: int = 0) -> dict[str, Any]:
    """One row, with what is derived from it; "failed" and why, where it could not run."""
    found = rows_of("library_memory_run.py", name, str(threads), str(budget))[0]
    if "failed" in found:
        print(f"# {name}, {threads} threads: {found['failed']}", file=sys.stderr)
        return found
    total = found["tensor_bytes"] + found["own_bytes"] + found["touched_bytes"]
    return {**found, "over_bytes": total - budget if budget else ""}


def main() -> None:
    """Measures operators and models, at each number of threads."""
    options = parser(__doc__)
    options.add_argument("names", nargs="*", help="of operators and of truth_workloads.py")
    options.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="of PyTorch (1 2)")
    options.add_argument("--models", action="store_true", help="models only")
    options.add_argument("--operators", action="store_true", help="operators only")
    arguments = options.parse_args()
    names: Sequence[str] = arguments.names
    if not names:
        names = [*(() if arguments.models else OPERATORS), *(() if arguments.operators else MODELS)]
    table, failed = Table("library_memory", COLUMNS, arguments.dry), False
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LD_PRELOAD"] = str(build(Path(folder)))
        for name in names:
            for threads in arguments.threads:
                rows = [measure(name, threads)]
                if name in WORKLOADS and "failed" not in rows[0]:
                    rows.append(measure(name, threads, rows[0]["tensor_bytes"] * _SHARE // 100))
                for row in rows:
                    failed |= "failed" in row
                    if "failed" not in row:
                        table.add(*(row[column] for column in COLUMNS))
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
