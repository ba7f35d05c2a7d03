# SPDX-License-Identifier: Apache-2.0
"""A model whose weights alone are twice the budget trains under it, with a real limit by the system.

    python weight_stream.py [--directory FOLDER] [--blocks N] [--width N] [--share PERCENT] [--steps N]

The model is loaded from a checkpoint that is mapped (`torch.load(mmap=True)`), trained with AdamW by one call
of `memscale.wrap`, and compared with plain PyTorch, which has all of it in memory. Each run is a process of
its own, and the streamed one has a limit on its data segment (RLIMIT_DATA): what it had before the model was
there, the budget, and SLACK for the heap's own needs. Mappings of files do not count for such a limit, so
resident memory is measured, too, both kinds; and where the system lets this process make control groups, it
is run once more in one that may have the budget and SLACK in all, pages of files among them.

    anon    most resident memory without a file, beyond what was there before the model
    file    most resident pages of files, likewise: the system takes these back when it needs them
    same    losses, and the digest of all weights and of the optimizer's state, are those of the plain run
    plain_under_limit   what becomes of the plain run under the same limit
    group_bytes, group_to_plain   most memory of all kinds in a control group that has no more, and the time

Exit status 1 where the limit was not held, or anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from common import Table, median, parser
from memory_group import MemoryGroup
from torch import Tensor, nn

import memscale
from memscale import AsyncOffloadConfig, Config

COLUMNS = (
    "parameters",
    "weight_bytes",
    "budget_bytes",
    "limit_bytes",
    "predicted_bytes",
    "anon_bytes",
    "file_bytes",
    "plain_anon_bytes",
    "blocks",
    "read_bytes",
    "ms",
    "plain_ms",
    "to_plain",
    "steps",
    "same",
    "plain_under_limit",
    "group_bytes",
    "group_to_plain",
    "plain_in_group",
)

SLACK = 48 << 20
WORDS, ROWS, LENGTH, HEADS = 4096, 2, 64, 8
_CHECKPOINT = "weights.pt"


class LanguageModel(nn.Module):
    """Transformer blocks between an embedding and a head."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Its loss on a batch."""
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def batch(number: int) -> Tensor:
    """Tokens of a step."""
    return torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))


# ---- memory of this process --------------------------------------------------------------------------


def resident() -> dict[str, int]:
    """Bytes by kind, as the system counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.partition(":")[0]: line.partition(":")[2].split() for line in lines}
    return {name: 1024 * int(found[name][0]) for name in ("RssAnon", "RssFile", "RssShmem", "VmData")}


class Watch:
    """Looks at resident memory every few milliseconds."""

    def __init__(self) -> None:
        self.before = resident()
        self.most = dict(self.before)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.005):
            now = resident()
            self.most = {name: max(value, now[name]) for name, value in self.most.items()}

    def end(self) -> dict[str, int]:
        """Most bytes beyond those at the beginning."""
        self._over.set()
        self._thread.join()
        more = {name: self.most[name] - self.before[name] for name in self.most}
        return {"anon_bytes": more["RssAnon"], "file_bytes": more["RssFile"] + more["RssShmem"]}


# ---- one run -----------------------------------------------------------------------------------------


def loaded(given: argparse.Namespace) -> LanguageModel:
    """The model on the mapped checkpoint."""
    with torch.device("meta"):
        model = LanguageModel(given.width, given.blocks)
    torch.serialization.set_default_mmap_options(mmap.MAP_SHARED)
    state = torch.load(given.checkpoint, mmap=True)
    model.load_state_dict(state, assign=True)
    return model.train()


def in_memory(given: argparse.Namespace) -> LanguageModel:
    """The same, all of it in memory."""
    model = loaded(given)
    for value in model.parameters():
        value.data = value.data.clone()
    return model


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of weights and of moments."""
    found = hashlib.blake2b(digest_size=8)
    memscale.detach(model)
    state = optimizer.state_dict()["state"]
    moments = (value for _, entry in sorted(state.items()) for _, value in sorted(entry.items()))
    tensors = [*model.parameters(), *moments]
    for value in tensors:
        found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def settings(budget: int, directory: str) -> Config:
    """With the file as the only tier."""
    away = AsyncOffloadConfig(tiers=("file",), directory=directory)
    return Config(memory_budget=budget, enable_logging=False, async_config=away, enable_tiling=False)


def warm(directory: str) -> None:
    """Has threads and heaps exist before memory is looked at."""
    torch.manual_seed(0)
    model = LanguageModel(64, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memscale.wrap(model, settings(1, directory), sample_input=(batch(0),), optimizer=optimizer)
    model(batch(0)).backward()
    optimizer.step()
    memscale.detach(model)


def child(given: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    warm(given.directory)
    group = None
    if given.limit == "group":
        group = MemoryGroup(given.group)
        group.join(given.budget + SLACK)
    watch = Watch()
    limit = 0
    if given.limit == "data":
        limit = watch.before["VmData"] + given.budget + SLACK
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    streams = given.run == "streamed"
    model = loaded(given) if streams else in_memory(given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if streams:
        config = settings(given.budget, given.directory)
        memscale.wrap(model, config, sample_input=(batch(0),), optimizer=optimizer)
    losses, seconds = [], []
    for step in range(given.steps):
        begin = time.perf_counter()
        loss = model(batch(step))
        loss.backward()
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    found: dict[str, Any] = {
        "losses": losses,
        "ms": 1e3 * median(seconds[1:]),
        "limit_bytes": limit,
        **watch.end(),
    }
    if streams:
        executor: Any = memscale.executor_of(model)
        plans = [planned.plan for planned in executor._known.values()]
        stream = memscale.weights.stream.stream_of(model)
        found["predicted_bytes"] = max(plan.predicted.device_used_peak_bytes for plan in plans)
        found["fits"] = all(plan.fits for plan in plans)
        found["techniques"] = [choice.technique for choice in plans[-1].steps]
        found["blocks"] = 0 if stream is None else len(stream.units)
        found["read_bytes"] = 0 if stream is None else stream.window.counters["read_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if group is not None:
        found["group_bytes"] = group.lift()
    return {**found, "digest": digest(model, optimizer)}


def run(given: argparse.Namespace, way: str, budget: int, limit: str) -> dict[str, Any]:
    """One run, in a process of its own; what it said where it failed."""
    group = f"memscale-{os.getpid()}-{way}"
    words = [sys.executable, __file__, "--run", way, "--budget", str(budget), "--directory", given.directory]
    words += ["--width", str(given.width), "--blocks", str(given.blocks), "--steps", str(given.steps)]
    # A copy: weights that stay where they are mapped are trained in it.
    with tempfile.NamedTemporaryFile(dir=given.directory) as checkpoint:
        shutil.copyfile(Path(given.directory) / _CHECKPOINT, checkpoint.name)
        words += ["--limit", limit, "--group", group, "--checkpoint", checkpoint.name]
        done = subprocess.run(words, capture_output=True, text=True, env=_environment())
    MemoryGroup(group, make=False).remove()
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        killed = done.returncode == -signal.SIGKILL
        return {"run": way, "failed": "killed by the system" if killed else lines[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def can_group() -> bool:
    """Whether this process may make control groups."""
    try:
        MemoryGroup(f"memscale-{os.getpid()}-try").remove()
    except OSError:
        return False
    return True


def _environment() -> dict[str, str]:
    # The C library keeps what is freed of its heap, which counts for a limit. Tensors go past it so.
    heap = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    return {**os.environ, **heap, "MEMSCALE_CALIBRATION": "off"}


# ---- all of it ---------------------------------------------------------------------------------------


def save(given: argparse.Namespace) -> tuple[int, int]:
    """Writes the checkpoint; number of parameters, and their bytes."""
    torch.manual_seed(0)
    model = LanguageModel(given.width, given.blocks)
    torch.save(model.state_dict(), Path(given.directory) / _CHECKPOINT)
    values = list(model.parameters())
    return sum(value.numel() for value in values), sum(value.nbytes for value in values)


def compare(given: argparse.Namespace, table: Table) -> list[str]:
    """Runs all, adds a row; returns what is wrong."""
    count, size = save(given)
    budget = size * given.share // 100
    plain = run(given, "plain", budget, "none")
    ours = run(given, "streamed", budget, "data")
    refused = run(given, "plain", budget, "data")
    grouped, refused_grouped = (
        run(given, way, budget, "group") if can_group() else {"failed": "not possible here"}
        for way in ("streamed", "plain")
    )
    if "failed" in plain or "failed" in ours:
        return [f"{item['run']}: {item['failed']}" for item in (plain, ours) if "failed" in item]
    runs = [ours, *([] if "failed" in grouped else [grouped])]
    same = all((item["losses"], item["digest"]) == (plain["losses"], plain["digest"]) for item in runs)
    row = {
        "parameters": count,
        "weight_bytes": size,
        "budget_bytes": budget,
        **{f"plain_{name}": plain[name] for name in ("anon_bytes", "ms")},
        **{name: ours[name] for name in COLUMNS if name in ours},
        "to_plain": ours["ms"] / plain["ms"],
        "steps": given.steps,
        "same": same,
        "plain_under_limit": _outcome(refused),
        "group_bytes": grouped.get("group_bytes", _outcome(grouped)),
        "group_to_plain": grouped["ms"] / plain["ms"] if "ms" in grouped else "",
        "plain_in_group": _outcome(refused_grouped),
    }
    table.add(*(row[name] for name in COLUMNS))
    wrong = [] if same else ["the streamed run differs from the plain one"]
    wrong += [] if ours["fits"] else ["the plan does not fit its budget"]
    wrong += [] if ours["anon_bytes"] <= budget + SLACK else ["more resident memory than the budget"]
    if "failed" in grouped and can_group():
        wrong.append(f"in a control group: {grouped['failed']}")
    return wrong


def _outcome(found: dict[str, Any]) -> str:
    return str(found["failed"]).split(":")[0] if "failed" in found else "trains"


def main() -> int:
    """Runs the benchmark."""
    made = parser(__doc__)
    made.add_argument("--directory", default="")
    made.add_argument("--width", type=int, default=1024)
    made.add_argument("--blocks", type=int, default=12)
    made.add_argument("--share", type=int, default=50, help="budget, in percent of the weights")
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--run", choices=("plain", "streamed"), help=argparse.SUPPRESS)
    made.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    made.add_argument("--limit", choices=("none", "data", "group"), default="none", help=argparse.SUPPRESS)
    made.add_argument("--group", default="", help=argparse.SUPPRESS)
    made.add_argument("--checkpoint", default="", help=argparse.SUPPRESS)
    given = made.parse_args()
    if given.run:
        print(json.dumps(child(given)))
        return 0
    table = Table("weight_stream", COLUMNS, given.dry)
    with tempfile.TemporaryDirectory(dir=given.directory or None) as folder:
        given.directory = folder
        wrong = compare(given, table)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
