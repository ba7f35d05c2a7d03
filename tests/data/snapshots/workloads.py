# SPDX-License-Identifier: Apache-2.0
"""Makes the snapshots of this folder with a CUDA build of PyTorch.

``python workloads.py CASE FILE [ENTRIES]`` runs a workload that does nothing but allocate and free, with the
allocator recording up to ENTRIES events, writes the snapshot to FILE and prints the peaks and failures that
``torch.cuda.memory_stats`` shows, as they stand in ``tests/unit/snapshot/test_snapshot_replay.c``.
Only the allocator matters, so a CUDA runtime that computes nothing will do. Settings come from
``PYTORCH_ALLOC_CONF``; the cases ``oom`` and ``gc`` set a memory fraction of 200 MiB.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
LIMIT_BYTES = 200 * MIB
EDGES = (1, 511, 512, 513, MIB, MIB + 1, 10 * MIB, 10 * MIB - 1, 20 * MIB, 20 * MIB + 1, 2 * MIB)
KEPT: list[Any] = []


class Workload:
    """Allocates and frees at random, the same for the same name."""

    def __init__(self, name: str) -> None:
        self.random = random.Random(sum(map(ord, name)))

    def size(self) -> int:
        """Bytes from all the ranges that the allocator treats differently."""
        kind = self.random.randrange(10)
        if kind < 4:
            return self.random.randrange(1, MIB)
        if kind < 7:
            return self.random.randrange(MIB, 10 * MIB)
        if kind < 9:
            return self.random.randrange(10 * MIB, 60 * MIB)
        return self.random.choice(EDGES)

    def churn(
        self,
        count: int,
        streams: tuple[Any, ...] = (None,),
        empty: float = 0.0,
        keep: int = 40,
        recorded: Any = None,
        survive: bool = False,
    ) -> None:
        """``count`` allocations and frees; what is left stays in `KEPT`."""
        live: list[torch.Tensor] = []
        for _ in range(count):
            if live and (len(live) > keep or self.random.random() < 0.45):
                live.pop(self.random.randrange(len(live)))
            else:
                try:
                    with torch.cuda.stream(self.random.choice(streams)):
                        tensor = torch.empty(self.size(), dtype=torch.uint8, device="cuda")
                except torch.OutOfMemoryError:
                    if not survive:
                        raise
                    del live[: len(live) // 2]
                    continue
                if recorded is not None and self.random.random() < 0.3:
                    tensor.record_stream(recorded)
                live.append(tensor)
                del tensor
            if self.random.random() < empty:
                torch.cuda.empty_cache()
        KEPT.extend(live)


def train() -> None:
    """A few steps of a small network."""
    layers = [torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512))]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(64, 512, device="cuda")
    for _ in range(3):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    KEPT.extend((model, optimizer))


def run(case: str, entries: int) -> None:
    """Runs a case by the first part of its name."""
    work, kind = Workload(case), case.split("-")[0]
    if kind in ("oom", "gc"):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total)
        work.churn(250, keep=60 if kind == "oom" else 25, survive=True)
    elif kind == "streams":
        work.churn(200, streams=(None, torch.cuda.Stream(), torch.cuda.Stream()), empty=0.01)
    elif kind == "record":
        stream = torch.cuda.Stream()
        work.churn(150, streams=(None, stream), recorded=stream, empty=0.01)
        torch.cuda.synchronize()
        work.churn(60)
    elif kind == "pool":
        pool = torch.cuda.MemPool()
        work.churn(50)
        with torch.cuda.use_mem_pool(pool):
            work.churn(50, keep=15)
        work.churn(50)
        KEPT.append(pool)
    elif kind == "late":
        torch.cuda.memory._record_memory_history(enabled=None)
        work.churn(150)
        torch.cuda.memory._record_memory_history(max_entries=entries)
        work.churn(120, empty=0.01)
    elif kind == "train":
        train()
    else:
        work.churn(220, empty=0.01)


def stripped(value: Any, seen: dict[int, Any]) -> Any:
    """The snapshot with file names of frames reduced to their last part."""
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, dict):
        seen[id(value)] = value
        for key, item in value.items():
            value[key] = Path(item).name if key == "filename" else stripped(item, seen)
    elif isinstance(value, list):
        seen[id(value)] = value
        value[:] = [stripped(item, seen) for item in value]
    return value


def main() -> None:
    """Runs one case, see above."""
    case, path = sys.argv[1], Path(sys.argv[2])
    entries = int(sys.argv[3]) if len(sys.argv) > 3 else 100000
    torch.cuda.memory._record_memory_history(max_entries=entries)
    run(case, entries)
    snapshot = torch.cuda.memory._snapshot()
    stats = torch.cuda.memory_stats()
    path.write_bytes(pickle.dumps(stripped(snapshot, {})))
    figures = {
        f"{kind}_peak_bytes": stats[f"{kind}_bytes.all.peak"] for kind in ("reserved", "allocated", "active")
    }
    figures["ooms"] = stats["num_ooms"]
    print(json.dumps({case: figures}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
