# SPDX-License-Identifier: Apache-2.0
"""What `memscale.predict` costs, beside PyTorch's own MemTracker on the same model.

Each case runs in a fresh process, on "meta", so that no weights blur the figures:

    memscale   `predict` for a card of 24 GiB, with AdamW; of it the milliseconds spent in the C core
    tracker    `torch.distributed._tools.MemTracker` under `FakeTensorMode`: forward, loss, backward and
               AdamW, twice, since the state appears in the first step only. It gives allocated bytes, by
               module and category, and neither reserved bytes nor a plan

Building the model is not counted. `cpu_s` is processor time, `wall_s` the clock, and `peak_mib` the largest
resident set of the process, PyTorch and transformers included (`start_mib` before).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from common import Table, parser

MODELS: dict[str, dict[str, Any]] = {
    "gpt2-medium": {
        "kind": "gpt2",
        "batch": 4,
        "sequence": 512,
        "config": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    },
    "llama-70b": {
        "kind": "llama",
        "batch": 1,
        "sequence": 2048,
        "config": {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    },
}
TARGETS = {"gpt2-medium": (3.0, 1024), "llama-70b": (20.0, 1024)}
CORE_CALLS = ("decide", "frontier", "replay", "op_times_ns", "step_events")


def build(name: str, device: str = "meta") -> tuple[Any, Any]:
    """A model and its token ids: without weights on "meta", or under a fake mode."""
    import torch
    import transformers

    facts = MODELS[name]
    kinds = {
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    config, model = kinds[facts["kind"]]
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if facts["kind"] == "llama" else usual)
    try:
        with torch.device(device):
            made = model(config(**facts["config"]))
    finally:
        torch.set_default_dtype(usual)
    return made.train(), torch.zeros(facts["batch"], facts["sequence"], dtype=torch.long)


def run_memscale(name: str) -> dict[str, float]:
    """`predict`, with the time inside the core."""
    import torch

    import memscale
    from memscale import _core

    spent = [0.0]

    def timed(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += (time.perf_counter() - began) * 1e3

        return call

    model, ids = build(name)
    optimizer = torch.optim.AdamW(model.parameters())
    sample = {"input_ids": ids, "labels": ids}
    memscale.predict  # noqa: B018 - loads the package
    for call in CORE_CALLS:
        setattr(_core, call, timed(getattr(_core, call)))
    with Meter() as meter:
        prediction = memscale.predict(model, optimizer, sample_input=sample, device="24GiB")
    plain = prediction.plain
    assert plain is not None
    return {**meter.figures(), "core_ms": spent[0], "allocated_bytes": plain.allocated_peak_bytes}


def run_tracker(name: str) -> dict[str, float]:
    """Two steps under MemTracker and FakeTensorMode."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, ids = build(name, device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tracker = MemTracker()
        with Meter() as meter:
            tracker.track_external(model, optimizer, ids)
            with tracker:
                for _ in range(2):
                    tracker.reset_mod_stats()
                    model(input_ids=ids, labels=ids).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    peaks = tracker.get_tracker_snapshot("peak")
    return {
        **meter.figures(),
        "core_ms": 0.0,
        "allocated_bytes": max(device["Total"] for device in peaks.values()),
    }


class Meter:
    """Processor time, clock and resident set around a block."""

    def __enter__(self) -> Meter:
        self.start_mib = _resident_mib()
        self.cpu, self.wall = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *unused: object) -> None:
        self.cpu, self.wall = time.process_time() - self.cpu, time.perf_counter() - self.wall

    def figures(self) -> dict[str, float]:
        """What was measured; the peak is that of the process so far."""
        return {
            "cpu_s": self.cpu,
            "wall_s": self.wall,
            "start_mib": self.start_mib,
            "peak_mib": _resident_mib(),
        }


def _resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Runs every case in a process of its own, in turn."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", choices=sorted(MODELS), action="append")
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--one", choices=("memscale", "tracker"), help="run one case here, print JSON")
    options = arguments.parse_args()
    models = options.model or list(MODELS)
    if options.one:
        run = run_memscale if options.one == "memscale" else run_tracker
        print(json.dumps(run(models[0])))
        return
    columns = ("model", "tool", "run", "cpu_s", "wall_s", "core_ms", "start_mib", "peak_mib")
    table = Table("predict", [*columns, "allocated_bytes", "target_s", "target_mib"], options.dry)
    for name in models:
        for number in range(options.runs):
            for tool in ("memscale", "tracker"):
                figures = _in_process(name, tool)
                values = [figures[column] for column in columns[3:]]
                table.add(name, tool, number, *values, int(figures["allocated_bytes"]), *TARGETS[name])


def _in_process(name: str, tool: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--model", name, "--one", tool]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        raise SystemExit(f"{tool} on {name} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
