# SPDX-License-Identifier: Apache-2.0
"""Trains a case on the CUDA build of PyTorch and writes what its allocator did, as JSON. Run by the stand-in.

Usage: oracle.py CASE OUT [--steps 3] [--events] ; CASE as `cases.Case.parse` reads it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import Case

_OPERATOR = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)")


def _operator_of(frames: list[dict[str, Any]]) -> str:
    """The outermost ATen operator below the Python call, and the function that allocated."""
    names = [frame["name"] for frame in frames]
    inner = next(
        (
            name
            for name in names
            if not name.startswith(
                ("c10::", "torch::unwind", "at::detail::empty", "at::empty", "at::_ops::empty")
            )
            and "empty" not in name[:60]
        ),
        names[0] if names else "",
    )
    operators = [match[1] for name in names if (match := _OPERATOR.match(name))]
    operators = [name for name in reversed(operators) if not name.startswith(("empty", "resize_"))]
    node = next((name for name in names if "Backward" in name and "::apply" in name), "")
    python = next(
        (f"{Path(f['filename']).name}:{f['line']}" for f in frames if f["filename"].endswith(".py")), ""
    )
    backward = node.split("(")[0].rpartition("::")[0][-40:]
    return f"{operators[0] if operators else '-'} | {backward} | {inner[:70]} | {python}"


def _events() -> list[tuple[str, int, int, str]]:
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    kept = []
    for event in trace:
        if event["action"] in ("alloc", "free_completed", "segment_alloc"):
            where = _operator_of(event["frames"]) if event["action"] == "alloc" else ""
            kept.append((event["action"], event["size"], event["addr"], where))
    return kept


def _answer_all() -> None:
    """`tensor.all()` says True.

    Nothing is computed here, so a model that asks "is anything padded?" would read rubbish. The batches of
    the cases are full, and a card would say True.
    """
    plain = torch.Tensor.all

    def answered(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = plain(tensor, *args, **kwargs)
        return result.copy_(torch.tensor(True)) if result.is_cuda and result.numel() == 1 else result

    torch.Tensor.all = answered  # type: ignore[method-assign,assignment]


def main() -> None:
    """Runs the steps."""
    _answer_all()
    reader = argparse.ArgumentParser()
    reader.add_argument("case")
    reader.add_argument("out")
    reader.add_argument("--steps", type=int, default=3)
    reader.add_argument("--events", action="store_true")
    options = reader.parse_args()
    torch.backends.cudnn.enabled = False  # the stand-in has no cuDNN
    torch.backends.cuda.enable_cudnn_sdp(False)
    case = Case.parse(options.case)
    model, batch = case.build()
    model.cuda()
    batch = {key: value.cuda() for key, value in batch.items()}
    result: dict[str, Any] = {"torch": torch.__version__, "steps": []}
    if case.share:
        import memscale

        plain = int(os.environ["STANDIN_PLAIN_PEAK"])
        config = memscale.Config(memory_budget=plain * case.share // 100, enable_logging=False)
        memscale.wrap(model, config, sample_input=batch)
    optimizer = case.make_optimizer(model)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    result["start"] = torch.cuda.memory_allocated()
    for step in range(options.steps):
        if options.events and step == options.steps - 1:
            torch.cuda.memory._record_memory_history(stacks="all", max_entries=2_000_000)
        before = torch.cuda.memory_allocated()
        with case.autocast("cuda"):
            out = model(**batch)
        forward = torch.cuda.max_memory_allocated()
        loss = out["loss"]
        loss.backward()
        backward = torch.cuda.max_memory_allocated()
        optimizer.step()
        done = torch.cuda.max_memory_allocated()
        optimizer.zero_grad()
        del out, loss
        result["steps"].append(
            {
                "before": before,
                "forward": forward,
                "backward": backward,
                "optimizer": done,
                "reserved": torch.cuda.max_memory_reserved(),
            }
        )
    result["allocated"] = torch.cuda.max_memory_allocated()
    result["reserved"] = torch.cuda.max_memory_reserved()
    if case.share:  # the plan in force: autocast, and the real optimizer, have made the first one anew
        plan = memscale.executor_of(model).plan
        result["checkpointed"] = len(plan.active)
        result["plan"] = plan.to_json()
    if options.events:
        result["events"] = _events()
    Path(options.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
