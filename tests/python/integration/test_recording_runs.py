# SPDX-License-Identifier: Apache-2.0
"""Training that is recorded: the same bits, all that was promised is there, and `detach` leaves nothing."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale import _core, events
from memscale.core.arguments import effective_config
from memscale.core.wrapped import FORWARD_OBSERVERS
from memscale.recording import follower
from memscale.recording.current import CURRENT
from memscale.recording.losses import Losses, loss_in
from memscale.recording.places import spool_folder
from memscale.recording.run_folder import run_folders
from memscale.recording.sync import sync
from record_server import TOKEN, Kept, Store, broken, serving, silent

STEPS = 12


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MEMSCALE_TOKEN", TOKEN)
    for name in ("MEMSCALE_RECORD", "MEMSCALE_RUN", "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    left = CURRENT.run
    while CURRENT.run is not None:  # one test's trouble is not the next one's
        CURRENT.release()
    assert left is None


class Net(nn.Module):
    """Returns its loss, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Dropout(0.1)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x**2).mean()


def trained(record: str | None, steps: int = STEPS, **fields: Any) -> tuple[list[float], nn.Module, Any]:
    """Losses of a run, and the model with its optimizer, still wrapped unless `record` is None."""
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if record is not None:
        fields = {"memory_budget": 1, "enable_logging": False, **fields}
        memscale.wrap(model, memscale.Config(record=record, **fields), optimizer=optimizer)
    torch.manual_seed(4)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(256, 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model, optimizer


def kept_in(root: Path) -> Kept:
    """A folder's only run, as a server would have it."""
    (folder,) = run_folders(root)
    kept = Kept({"id": folder.info().id})
    for client in folder.clients():
        for number in folder.segments(client):
            spool = _core.Spool(folder.segment(client, number))
            while (batch := spool.next()) is not None:
                kept.batches[client, batch["sequence"]] = json.loads(spool.body(client))
                kept.state = {1: "finished", 2: "failed"}.get(batch["end_state"], kept.state)
    return kept


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def test_a_run_has_all_that_was_promised(tmp_path: Path) -> None:
    plain, bare, _ = trained(None)
    losses, model, optimizer = trained(str(tmp_path / "runs"))
    executor = memscale.executor_of(model)
    assert executor is not None and executor.plan is not None and executor.plan.active
    plan = executor.plan
    memscale.record("accuracy", 0.5)
    memscale.detach(model)
    assert losses == plain and same(model, bare)
    kept = kept_in(tmp_path / "runs")
    assert kept.state == "finished"
    assert kept.points("loss") == [*enumerate(losses)]
    assert kept.points("accuracy") == [(STEPS - 1, 0.5)]
    assert [step for step, _ in kept.points("time/step")] == [step for step in range(1, STEPS) if step != 2]
    assert all(value > 0 for _, value in kept.points("time/step"))
    assert kept.points("memory/predicted")[0] == (0, plan.predicted.device_used_peak_bytes)
    assert kept.points("memory/budget")[0] == (0, 1)
    categories = {
        name: kept.points(f"memory/predicted/category/{name}") for name in plan.predicted.by_category
    }
    assert sum(points[0][1] for points in categories.values()) == plan.predicted.device_used_peak_bytes
    for phase in ("forward", "backward", "optimizer"):
        assert kept.points(f"memory/predicted/phase/{phase}")
    ((step, peak),) = kept.points("memory/peak")
    assert step == 2 and 0.8 < peak / plan.predicted.device_used_peak_bytes < 1.2
    state = sum(
        value.nbytes for entry in optimizer.state.values() for value in entry.values() if value.dim() > 0
    )
    assert kept.points("memory/category/optimizer_state")[0][1] >= state
    assert [event["kind"] for event in kept.events] == ["plan"]
    assert kept.events[0]["data"]["digest"] == plan.digest
    assert {"plan", "config", "environment", "report"} <= {*kept.documents}
    assert kept.documents["plan"]["digest"] == plan.digest
    lines = "\n".join(kept.documents["report"]["lines"])
    assert f"steps      {STEPS}" in lines and "measured" in lines


def test_no_paths_and_no_environment_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "hunter2-hunter2")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "secret_folder" / "train.py")])
    _, model, _ = trained(str(tmp_path / "runs"), 3, log_file=str(tmp_path / "secret_folder_log"))
    memscale.detach(model)
    files = [*(tmp_path / "runs").rglob("*.spool"), *(tmp_path / "runs").rglob("run.json")]
    text = b"".join(path.read_bytes() for path in files)
    assert b"train" in text
    for word in (b"secret_folder", b"hunter2", str(tmp_path).encode(), TOKEN.encode(), b"/home/", b"/root/"):
        assert word not in text


def test_detach_leaves_no_trace(tmp_path: Path) -> None:
    def open_files() -> set[str]:
        return {
            os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_there(name)
        }

    def threads() -> set[str]:
        found = set()
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended meanwhile
                found.add((task / "comm").read_text())
        return found

    with serving(Store()) as server:
        assert not any("msc record" in name for name in threads()), "a recorder of another test is open"
        _, model, _ = trained(server.url, 4)
        assert any("msc record" in name for name in threads())
        executor = memscale.executor_of(model)
        memscale.detach(model)
        ours = str(spool_folder())
        assert not [name for name in open_files() if name.startswith(ours)]
        for _ in range(1000):  # the kernel lists a thread for a moment after it was joined
            if not any("msc record" in name for name in threads()):
                break
            threading.Event().wait(0.01)
        assert not any("msc record" in name for name in threads())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("memscale")]
    assert not FORWARD_OBSERVERS and not events.LISTENERS and executor is not None
    assert follower.follower_of(executor) is None


def _is_there(name: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{name}")


def test_a_model_that_goes_without_detach_ends_its_run(tmp_path: Path) -> None:
    _, model, optimizer = trained(str(tmp_path / "runs"), 3)
    del model, optimizer
    import gc

    gc.collect()
    assert CURRENT.run is None and not FORWARD_OBSERVERS
    assert kept_in(tmp_path / "runs").state == "finished"


@pytest.mark.parametrize("fault", [None, silent, broken])
def test_a_server_in_any_state_changes_no_bit(fault: Any) -> None:
    plain, bare, _ = trained(None)
    store = Store()
    with serving(store, fault) as server:
        url = server.url
        losses, model, _ = trained(url)
        memscale.detach(model)
        assert losses == plain and same(model, bare)
    if fault is not None:
        with serving(store, port=int(url.rpartition(":")[2])):
            assert [item.is_there for item in sync(spool_folder(), patience=60)] == [True]
    assert store.run.points("loss") == [*enumerate(losses)]
    assert store.run.state == "finished" and not store.problems


def test_out_of_memory_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, _ = trained(str(tmp_path / "runs"), 2)
    forward = nn.Linear.forward

    def refusing(self: nn.Linear, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    monkeypatch.setattr(nn.Linear, "forward", refusing)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(256, 16))
    monkeypatch.setattr(nn.Linear, "forward", forward)
    memscale.detach(model)
    (event,) = [item for item in kept_in(tmp_path / "runs").events if item["kind"] == "oom"]
    assert event["data"]["asked_bytes"] == 3 << 30 and "where" in event["text"]


def test_a_block_that_raises_has_failed(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Net()
    with pytest.raises(KeyError), memscale.optimize(model, record=str(tmp_path), enable_logging=False):
        memscale.record("x", 1.0)
        raise KeyError("no")
    assert kept_in(tmp_path).state == "failed"


def test_an_autosaved_run_goes_on_as_one(tmp_path: Path) -> None:
    for part in range(2):
        torch.manual_seed(3)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memscale.wrap(model, optimizer=optimizer, record=str(tmp_path / "runs"), enable_logging=False)
        saver = memscale.autosave(tmp_path / "run.pt", every=5, model=model, optimizer=optimizer)
        for _ in range(saver.restore(), 5 * (part + 1)):
            model(torch.randn(256, 16)).backward()
            optimizer.step()
            optimizer.zero_grad()
            saver.step()
        memscale.detach(model)
    kept = kept_in(tmp_path / "runs")
    assert [step for step, _ in kept.points("loss")] == [*range(10)]
    assert [event["kind"] for event in kept.events] == ["plan", "plan", "attempt"]
    assert kept.events[-1]["data"] == {"attempt": 1}


def test_the_environment_overrides_all_but_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_RECORD", str(tmp_path / "runs"))
    assert effective_config(memscale.Config()).record == str(tmp_path / "runs")
    assert effective_config(memscale.Config(record=None)).record is None
    assert effective_config(memscale.Config(record="elsewhere")).record == str(tmp_path / "runs")


class TestLosses:
    def test_where_a_loss_is(self) -> None:
        loss = torch.ones((), requires_grad=True) * 2
        assert loss_in(loss) is loss and loss_in({"loss": loss}) is loss and loss_in((loss, 1)) is loss
        for other in (None, 3.0, torch.ones(()), torch.ones(2, requires_grad=True), {}, (), {"loss": 1.0}):
            assert loss_in(other) is None

    def test_a_step_has_the_mean_of_its_forwards(self) -> None:
        losses = Losses()
        for value in (1.0, 3.0):
            losses.add(torch.full((), value, requires_grad=True) * 1)
        losses.end_step(7)
        losses.end_step(8)
        assert losses.ready() == [(7, 2.0)] and losses.ready() == []


class TestTrainers:
    def test_what_a_trainer_logs_is_there(self, tmp_path: Path) -> None:
        pytest.importorskip("accelerate")
        from trainer_samples import trained as run_trainer

        config = memscale.Config(memory_budget=1, enable_logging=False, record=str(tmp_path / "runs"))
        plain = run_trainer(tmp_path / "plain", None, logging_steps=1)
        recorded = run_trainer(tmp_path / "recorded", config, logging_steps=1)
        memscale.detach(recorded.trainer)
        assert recorded.losses == plain.losses
        kept = kept_in(tmp_path / "runs")
        assert [value for _, value in kept.points("loss")] == [loss for loss, _ in plain.losses]
        assert [step for step, _ in kept.points("loss")] == [*range(len(plain.losses))]
        assert kept.points("learning_rate") and kept.points("grad_norm") and kept.points("train_runtime")
        assert kept.points("time/step")

    def test_what_lightning_logs_is_there(self, tmp_path: Path) -> None:
        pytest.importorskip("lightning")
        from lightning_samples import BATCHES, BUDGET, assert_same_run, fitted
        from memscale.integrations.lightning import MemScaleCallback

        callback = MemScaleCallback(record=str(tmp_path / "runs"), **BUDGET)
        plain = fitted(tmp_path / "plain", log_every_n_steps=2)
        recorded = fitted(tmp_path / "recorded", [callback], log_every_n_steps=2)
        assert_same_run(plain, recorded)
        kept = kept_in(tmp_path / "runs")
        assert kept.state == "finished"
        steps = {step for step, _ in kept.points("loss")}
        assert steps and steps <= {*range(BATCHES)}
        assert all(math.isfinite(value) for _, value in kept.points("loss"))
        assert kept.points("memory/predicted")
