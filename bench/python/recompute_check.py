# SPDX-License-Identifier: Apache-2.0
"""What it costs to compare by value what backward reads with what forward had: share of the step, bytes.

    python recompute_check.py [--rounds N] [--threads N] [NAME ...]

Each model trains in a process of its own, at 60 % of its plain peak, with `check_recompute="off"` and with
"always", one step of each in turn; models of the registry with their real width and few layers, since cost
and step grow with layers alike. Once with recomputes, which are compared with their forwards, and once with
offloading in their place, where what has left is compared while others may write to it. Processor time of
the process, which other programs lengthen little.

    share        (always - off) / off, medians over the rounds
    inside       time inside of the check, over the step's: what the share is without its noise
    looked_at    bytes that fingerprints are taken of in a step, in forward and recompute together
    held         bytes that are kept of them until backward
    choices      modules that are recomputed, or whose saves leave
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from architectures import Entry, bert, call, gpt2, text
from common import Table, median, parser
from torch import Tensor
from truth_workloads import WORKLOADS, Workload

import memscale
from memscale.techniques.checkpoint import recompute_check

COLUMNS = ("model", "way", "threads", "step_ms", "share", "inside", "looked_at_mib", "held_kib", "choices")
WAYS = ("recompute", "offload")

REAL = {
    "bert-base 4 of 12 layers, 4x128": Workload(Entry(bert(4, 768, 12), text(4, 128)), False),
    "bert-large 3 of 24 layers, 4x128": Workload(Entry(bert(3, 1024, 16), text(4, 128)), False),
    "gpt2-medium 3 of 24 layers, 1x512": Workload(Entry(gpt2(3, 1024, 16), text(1, 512)), False),
    "gpt2-large 3 of 36 layers, 1x512": Workload(Entry(gpt2(3, 1280, 20), text(1, 512)), False),
    "gpt2-xl 3 of 48 layers, 1x512": Workload(Entry(gpt2(3, 1600, 25), text(1, 512)), False),
}
SMALL = (
    *("gpt2", "gpt2-autocast", "llama-sgd", "llama-bf16", "bert-frozen", "vit", "swin", "convnext-autocast"),
    *("convnet-sgd", "unet", "wavenet", "mixer", "mlp-dropped", "t5-adafactor", "whisper", "mixtral"),
)
_BUDGET_PERCENT = 60
_WARM = 2

_WHOLE = 65536
"""Bytes of a tensor up to which a sample is all of it (memscale/fingerprint.h)."""


class Watch:
    """Counts what the check does, for as long as it is on."""

    def __init__(self) -> None:
        self.ns = self.bytes = self.calls = 0
        self._fingerprint = recompute_check._fingerprint

    def __call__(self, tensor: Tensor, sampled: bool) -> int:
        begin = time.thread_time_ns()
        value: int = self._fingerprint(tensor, sampled)
        self.ns += time.thread_time_ns() - begin
        size = tensor.numel() * tensor.element_size()
        self.bytes += size // 16 if sampled and size > _WHOLE else size
        self.calls += 1
        return value


class Training:
    """A model under a plan."""

    def __init__(self, work: Workload, way: str, check: str, budget: int) -> None:
        torch.manual_seed(0)
        self.work = work
        self.model = work.entry.build().train()
        self.batch = work.entry.batch()
        if work.precision == "bf16":
            self.model.to(torch.bfloat16)
        if work.adapt is not None:
            work.adapt(self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = work.optimizer(trained)
        self.folder = tempfile.TemporaryDirectory()
        tiers = memscale.AsyncOffloadConfig(tiers=("file",), directory=self.folder.name)
        given = {"enable_checkpointing": False, "async_config": tiers} if way == "offload" else {}
        config = memscale.Config(memory_budget=budget, enable_logging=False, check_recompute=check,
                                 enable_offloading=way == "offload", **given)  # fmt: skip
        memscale.wrap(self.model, config)
        for _ in range(_WARM):
            self.step()

    def step(self) -> int:
        """Forward, backward and optimizer. Returns processor time."""
        begin = time.process_time_ns()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.work.precision == "autocast"):
            loss = self.work.loss(call(self.model, self.batch))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time_ns() - begin


def plain_peak(work: Workload) -> int:
    """Predicted bytes of the plain step."""
    torch.manual_seed(0)
    batch = work.entry.batch()
    sample: Any = ((), batch) if isinstance(batch, dict) else (batch, {})
    model = work.entry.build().train()
    return memscale.predict(model, sample_input=sample[1] or sample[0]).allocated_peak_bytes


def measured(name: str, way: str, rounds: int, threads: int) -> tuple[Any, ...]:
    """One row."""
    torch.set_num_threads(threads)
    work = REAL[name] if name in REAL else WORKLOADS[name]
    budget = plain_peak(work) * _BUDGET_PERCENT // 100
    off, always = Training(work, way, "off", budget), Training(work, way, "always", budget)
    times: dict[str, list[int]] = {"off": [], "always": []}
    watch = Watch()
    recompute_check._fingerprint = watch  # type: ignore[assignment]
    for number in range(rounds):
        for key, training in (("off", off), ("always", always))[:: 1 - 2 * (number % 2)]:
            times[key].append(training.step())
    middle = median(times["off"])
    plan = memscale.executor_of(always.model).plan
    return (
        name, way, threads, middle / 1e6, median(times["always"]) / middle - 1, watch.ns / rounds / middle,
        watch.bytes / rounds / 2**20, watch.calls / rounds / 2 * 8 / 1024, len(plan.active),
    )  # fmt: skip


def main() -> None:
    """Measures the models that are named, or all."""
    if "--child" in sys.argv:
        _, _, name, way, rounds, threads = sys.argv
        print(json.dumps(measured(name, way, int(rounds), int(threads))))
        return
    options = parser(__doc__)
    options.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    table = Table("recompute_check", COLUMNS, given.dry)
    rows = []
    for name in given.names or [*REAL, *SMALL]:
        for way in WAYS:
            child = [sys.executable, __file__, "--child", name, way, str(given.rounds), str(given.threads)]
            done = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                print(f"{name}, {way}: failed")
                continue
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            table.add(*rows[-1])
    for way in WAYS:
        for title, column in (("share", 4), ("inside", 5)):
            found = [row[column] for row in rows if row[1] == way and row[-1]]
            if found:
                about = f"median {median(found):.2%}   worst {max(found):.2%}   of {len(found)} models"
                print(f"{way:10s} {title:8s} {about}")


if __name__ == "__main__":
    main()
