# SPDX-License-Identifier: Apache-2.0
"""Predicts a case with the PyTorch at hand, for a card that is not here.

predict.py CASE OUT [--capability 8.0] [--expandable] [--events]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import Case

from memscale import _core
from memscale.hardware.target import Target
from memscale.observability.step_view import core_plan
from memscale.plans.plan import Plan
from memscale.techniques.step_facts import StepFacts
from memscale.trace.static import trace_static


def events_of(graph: _core.Graph) -> list[tuple[str, int, int, str]]:
    """Allocations and releases of the plain step in order: what, bytes, buffer, operation."""
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    buffers, ops = graph.buffers(), graph.ops()
    last = [end for _, _, end, _, _ in buffers]
    for buffer, _, _, _, release in graph.saves():
        last[buffer] = max(last[buffer], release)
    for number, (_, begin, _, _, resident) in enumerate(buffers):
        if not resident:
            begins.setdefault(begin, []).append(number)
        ends.setdefault(last[number], []).append(number)
    events: list[tuple[str, int, int, str]] = []
    sources = {op: text for op, _, text in graph.op_notes()}
    for position in range(len(ops) + 1):
        events += [("free", buffers[number][0], number, "") for number in ends.get(position, ())]
        if position < len(ops):
            where = f"{ops[position][0]} | {sources.get(position, '')}"
            events += [("alloc", buffers[number][0], number, where) for number in begins.get(position, ())]
    return events


def predict(
    case: Case, capability: tuple[int, int], expandable: bool, plan: Plan | None
) -> tuple[_core.Graph, dict[str, Any]]:
    """The graph of the case and what its replay under a plan says."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # the stand-in has no cuDNN
    model, batch = case.build()
    optimizer = case.make_optimizer(model)
    step = StepFacts(optimizer=optimizer, target=Target.cuda(capability))
    began = time.perf_counter()
    with case.autocast("cpu"):
        trace = trace_static(model, (), batch, step)
    seconds = time.perf_counter() - began
    sim = {"kind": "cuda", "expandable_segments": expandable}
    replay = _core.replay(trace.graph, None if plan is None else core_plan(plan, trace.graph), sim=sim)
    stats = replay["stats"]
    return trace.graph, {
        "torch": torch.__version__,
        "allocated": stats["allocated_peak_bytes"],
        "reserved": stats["reserved_peak_bytes"],
        "start": sum(-(-size // 512) * 512 for size, _, _, _, resident in trace.graph.buffers() if resident),
        "peak_op": trace.graph.ops()[min(replay["peak_op"], trace.graph.op_count - 1)][0],
        "seconds": seconds,
        "notes": trace.notes,
    }


def main() -> None:
    """One case."""
    reader = argparse.ArgumentParser()
    reader.add_argument("case")
    reader.add_argument("out")
    reader.add_argument("--capability", default="8.0")
    reader.add_argument("--expandable", action="store_true")
    reader.add_argument("--plan", help="file of the plan that was in force, as JSON")
    reader.add_argument("--events", action="store_true")
    options = reader.parse_args()
    major, minor = map(int, options.capability.split("."))
    plan = None if options.plan is None else Plan.from_json(Path(options.plan).read_text())
    graph, result = predict(Case.parse(options.case), (major, minor), options.expandable, plan)
    if options.events:
        result["events"] = events_of(graph)
    Path(options.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
