# SPDX-License-Identifier: Apache-2.0
"""What single CUDA operators allocate, measured on the stand-in runtime, as data for the unit tests.

    rm tests/python/unit/cuda_operators.json
    for card in 8.0 9.0 8.6; do
        STANDIN_CAPABILITY=$card tests/standin_cuda/run.sh bench/standin/operators.py \
            tests/python/unit/cuda_operators.json
    done

Each entry holds a call, the card's facts and the highest sum of what the call had allocated, in bytes as the
allocator rounds them. A card adds the calls whose sum differs from the first card's. "-" instead of a file
prints every block, and whether the operator gave it back; further words choose operators. Workspaces of
cuBLAS exist before a call is measured.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from operator_calls import CALLS, Call, T


def make(spec: Any, device: str) -> Any:
    """Tensors for their descriptions."""
    if isinstance(spec, T):
        return spec.make(device)
    if isinstance(spec, (list, tuple)):
        return type(spec)(make(item, device) for item in spec)
    return spec


def operator(name: str) -> Any:
    """The overload by its name, such as `aten.mm.default`."""
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def measure(call: Call) -> dict[str, Any]:
    """One call."""
    args, kwargs = make(call.args, "cuda"), {key: make(value, "cuda") for key, value in call.kwargs.items()}
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history("all", stacks="python")
    try:
        with torch.no_grad():
            result = operator(call.name)(*args, **kwargs)
    finally:
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
    events = [(event["action"], event["addr"], event["size"]) for event in trace]
    peak = torch.cuda.max_memory_allocated() - before
    left = torch.cuda.memory_allocated() - before
    del result
    allocated: list[list[Any]] = []
    open_blocks: dict[int, list[Any]] = {}
    for action, address, size in events:
        if action == "alloc":
            open_blocks[address] = [size, False]
            allocated.append(open_blocks[address])
        elif action == "free_completed" and address in open_blocks:
            open_blocks.pop(address)[1] = True
    return {"peak": peak, "left": left, "blocks": allocated, "requested_peak": _highest(events)}


def _highest(events: list[tuple[str, int, int]]) -> int:
    """Highest sum of rounded live blocks."""
    live: dict[int, int] = {}
    highest = 0
    for action, address, size in events:
        if action == "alloc":
            live[address] = -(-size // 512) * 512
        elif action == "free_completed":
            live.pop(address, None)
        highest = max(highest, sum(live.values()))
    return highest


def warm_up() -> None:
    """Makes cuBLAS take its workspaces."""
    source = torch.empty(64, 64, device="cuda")
    torch.mm(source, source)
    torch.addmm(source[0], source, source)


def main() -> None:
    """Measures everything, or what is named."""
    torch.backends.cudnn.enabled = False
    warm_up()
    capability = list(torch.cuda.get_device_capability())
    units = torch.cuda.get_device_properties(0).multi_processor_count
    wanted = sys.argv[2:]
    target = Path(sys.argv[1])
    rows = json.loads(target.read_text()) if target.exists() else []
    known = {row["index"]: row["requested_peak"] for row in reversed(rows)}
    for index, call in enumerate(CALLS):
        if wanted and not any(word in call.name for word in wanted):
            continue
        try:
            row = measure(call)
        except Exception as error:
            print(f"{call}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            continue
        if sys.argv[1] == "-":
            print(call, row, flush=True)
        elif known.get(index) != row["requested_peak"]:
            facts = {"index": index, "name": call.name, "capability": capability, "units": units}
            rows.append(facts | {"requested_peak": row["requested_peak"]})
    if sys.argv[1] != "-":
        target.write_text(json.dumps(rows, separators=(",", ":")).replace("},{", "},\n{") + "\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the stand-in has no orderly end
