# SPDX-License-Identifier: Apache-2.0
"""What `test_resume` runs, kills and resumes: a training loop with all that a checkpoint has to have.

Started as a process of its own, it reads runs from its input, a line of JSON each, and forks for each of
them: importing takes longer than training. A run begins where the checkpoint in its folder ends, or at the
start, and writes a line for each step: number, loss, digest of all states.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
import processors
from memscale import AsyncOffloadConfig, Config
from memscale.techniques.step_table import STEP_TECHNIQUES
from patched import use_disk_of, use_techniques

STEPS = 3
WIDTH = 144
LEAST = 64 << 10  # a layer's weight has more: its gradient is offloaded, as its state is

CHECKPOINT, LOG, CALLS = "run.pt", "log", "calls.json"


@dataclass(frozen=True)
class Run:
    """One process that trains.

    Attributes:
        folder: of checkpoint and log.
        way: a row of `WAYS`.
        kill: (step, phase, share): dies in that phase of that step, when that share of its calls of Python
            are done. None: comes to its end.
    """

    folder: str
    way: str
    kill: tuple[int, str, float] | None = None

    def line(self) -> str:
        """As the process reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> Run:
        """What `line` returned."""
        known = json.loads(line)
        return cls(known["folder"], known["way"], known["kill"] and tuple(known["kill"]))


class Network(nn.Module):
    """Layers with dropout, of which one is frozen in the middle of the run, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(160, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, words: Tensor, classes: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = x + layer(x)
        x = self.norm(x.mean(dim=1))
        return nn.functional.cross_entropy(self.head(x).float(), classes)


def _config(folder: Path, **more: Any) -> Config:
    plain = {"memory_budget": 1, "use_mixed_precision": False, "enable_offloading": False}
    return Config(**{**plain, "enable_checkpointing": False, "enable_logging": False, **more})


def _offloaded(folder: Path, **more: Any) -> Config:
    engine = AsyncOffloadConfig(tiers=("file",), directory=str(folder))
    return _config(folder, enable_offloading=True, async_config=engine, **more)


WAYS: dict[str, Any] = {
    "plain": None,
    "checkpoints": lambda folder: _config(folder, enable_checkpointing=True),
    "bf16": lambda folder: _config(folder, use_mixed_precision=True, exact=False),
    "fp16": lambda folder: _config(folder, use_mixed_precision=True, exact=False),
    "offloaded": _offloaded,
    "8 bit offloaded": lambda folder: _offloaded(folder, use_8bit_optimizer=True),
}

CHANGES = ("plain", "offloaded")
"""Ways that freeze a layer and add a group after the first step."""

TECHNIQUES: dict[str, set[str]] = {
    "bf16": {"autocast", "bf16_weights"},
    "fp16": {"autocast"},
    "offloaded": {"state_offload", "gradient_offload"},
    "8 bit offloaded": {"state_offload", "gradient_offload"},
}
"""The step techniques of a way. There are no others, which would have to be tried, and its plan has them."""

if "decoupled_weight_decay" not in torch.optim.AdamW([torch.zeros(1)]).defaults:  # PyTorch before 2.7
    TECHNIQUES["bf16"].discard("bf16_weights")


# ---- dying -------------------------------------------------------------------------------------------


class Phases:
    """Counts calls in the phases of a step, and dies in one of them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        path = Path(run.folder, CALLS)
        self.known: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        self.seen: dict[str, int] = {}

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """A part of a step."""
        count, last = 0, 0
        if self.run.kill is not None and self.run.kill[:2] == (step, name):
            last = max(1, int(self.run.kill[2] * self.known[f"{step} {name}"]))

        def called(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            if event in ("call", "c_call"):
                count += 1
                if count == last:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(called)
        try:
            yield
        finally:
            sys.setprofile(None)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)  # there were fewer calls than in the run that was counted
        self.seen[f"{step} {name}"] = count

    def write(self) -> None:
        """For runs that are to be killed."""
        Path(self.run.folder, CALLS).write_text(json.dumps(self.seen))


# ---- training ----------------------------------------------------------------------------------------


def train(run: Run) -> None:
    """Trains from the checkpoint on, or from the start."""
    folder = Path(run.folder)
    random.seed(0)
    torch.manual_seed(0)
    model = Network()
    groups = [{"params": model.words.parameters(), "lr": 3e-3}, {"params": model.layers.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=run.way != "fp16")
    _host(run.way)
    sample = batch()
    if WAYS[run.way] is not None:
        memscale.wrap(model, WAYS[run.way](folder), sample_input=sample, optimizer=optimizer)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    begin = _load(folder / CHECKPOINT, parts)
    phases = Phases(run)
    for step in range(begin, STEPS):
        if step >= 1 and run.way in CHANGES:
            model.layers[1].requires_grad_(False)
            if len(optimizer.param_groups) == 2:
                optimizer.add_param_group({"params": [*model.norm.parameters(), *model.head.parameters()]})
        loss = model(*batch())
        with phases.phase(step, "backward"):
            scaler.scale(loss).backward()
        if step == 1:  # overflows, and is skipped
            assert model.words.weight.grad is not None
            model.words.weight.grad[0] = float("nan")
        with phases.phase(step, "step"):
            scaler.unscale_(optimizer)
            trained = [value for group in optimizer.param_groups for value in group["params"]]
            nn.utils.clip_grad_norm_(trained, 0.5)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            model.zero_grad()  # what is not trained yet has gradients, too
        note(folder, step, loss, parts)
        with phases.phase(step, "save"):
            _save(folder / CHECKPOINT, parts, step + 1)
    _check(run, model)
    phases.write()


def batch() -> tuple[Tensor, Tensor]:
    """Drawn from PyTorch's generator and Python's, which a checkpoint has to have, too."""
    return torch.randint(160, (3, 6)), torch.tensor([random.randrange(8) for _ in range(3)])


def _save(path: Path, parts: dict[str, Any], step: int) -> None:
    states = {name: part.state_dict() for name, part in parts.items()}
    python = random.getstate()
    generators = {"torch": torch.get_rng_state(), "python": [python[0], list(python[1]), python[2]]}
    groups = len(parts["optimizer"].param_groups)
    memscale.save({**states, "generators": generators, "step": step, "groups": groups}, path)


def _load(path: Path, parts: dict[str, Any]) -> int:
    """The step to go on with."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True, mmap=True)
    model, optimizer = parts["model"], parts["optimizer"]
    if saved["groups"] == 3:
        optimizer.add_param_group({"params": [*model.norm.parameters(), *model.head.parameters()]})
    for name, part in parts.items():
        if saved[name]:  # a scaler that is not needed has no state
            part.load_state_dict(saved[name])
    torch.set_rng_state(saved["generators"]["torch"])
    version, numbers, gauss = saved["generators"]["python"]
    random.setstate((version, tuple(numbers), gauss))
    return int(saved["step"])


def note(folder: Path, step: int, loss: Tensor, parts: dict[str, Any]) -> None:
    """Writes what a step has come to."""
    digest = hashlib.sha256()
    for part in parts.values():
        _digest(part.state_dict(), digest)
    with Path(folder, LOG).open("a", encoding="utf-8") as file:
        file.write(f"{step} {loss.item().hex()} {digest.hexdigest()}\n")


def _digest(value: Any, digest: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for name, item in sorted(value.items(), key=str):
            digest.update(str(name).encode())
            _digest(item, digest)
    else:
        digest.update(repr(value).encode())


def _host(way: str) -> None:
    """The same plans on processors with and without BF16 instructions, and on any disk."""
    from memscale.offload import limits
    from memscale.offload.engine import OffloadSettings

    patch = pytest.MonkeyPatch()
    processors.use_bf16(patch)
    use_disk_of(patch)
    patch.setattr(limits, "OffloadSettings", functools.partial(OffloadSettings, least_bytes=LEAST))
    patch.setattr(OffloadSettings, "own_bytes", lambda *_: 0)  # more than all state of this model, else
    wanted = TECHNIQUES.get(way, set())
    use_techniques(patch, tuple(row for row in STEP_TECHNIQUES if row.name in wanted))
    if way == "fp16":
        processors.use_fp16(patch)


def _check(run: Run, model: nn.Module) -> None:
    if WAYS[run.way] is not None:
        plan = memscale.executor_of(model).plan
        techniques = {choice.technique for choice in plan.steps}
        assert techniques == TECHNIQUES.get(run.way, set()), plan.explain()


# ---- the process -------------------------------------------------------------------------------------


def serve() -> None:
    """Runs what its input says, and answers with the status of each run."""
    torch.set_num_threads(1)
    if not torch.backends.cuda.is_built():  # whose autograd has threads for devices, and they do not fork
        memscale.plan(Network(), sample_input=batch())  # imports what every run needs
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                train(Run.read(line))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    serve()
