# SPDX-License-Identifier: Apache-2.0
"""Lightning's longer ways: resumed fits, checkpoints, `wrap(self)`, budgets, Fabric."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memscale
from engine_samples import peak_bytes
from lightning_samples import (
    BUDGET,
    Net,
    assert_same_run,
    assert_same_state,
    fitted,
    loader,
    module_class,
    package_of,
    quiet,
)
from memscale import AsyncOffloadConfig
from memscale.core import variants
from memscale.integrations.lightning import MemScaleCallback
from memscale.offload.engine import why_not
from memscale.optim.offload.attach import offloaded_bytes
from patched import use_disk_of, use_techniques
from zoo.training import SMALLEST, same_bits, seed

pytest.importorskip("lightning")


def saved(folder: Path, callbacks: list[Any], resume: Path | None = None) -> tuple[Any, Any]:
    """A fit that writes a checkpoint after three of its six steps."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    keeper = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    return fitted(folder, [*callbacks, keeper], enable_checkpointing=True, resume=resume)


MIDDLE = "step=3.ckpt"


def test_a_resumed_fit_and_what_its_checkpoint_holds(tmp_path: Path) -> None:
    callback = MemScaleCallback(**BUDGET)
    saved(tmp_path / "plain", [])
    saved(tmp_path / "planned", [callback])
    plain, planned = (
        torch.load(tmp_path / name / MIDDLE, weights_only=True) for name in ("plain", "planned")
    )
    held = planned["callbacks"].pop("MemScaleCallback")
    assert held["digest"] == callback.plan.digest and held["memscale"] == memscale.__version__
    assert memscale.Plan.from_json(held["plan"]).digest == held["digest"]
    assert memscale.Config.from_json(held["config"]) == callback.config
    assert_same_state(plain["state_dict"], planned["state_dict"])
    for index, state in plain["optimizer_states"][0]["state"].items():
        assert_same_state(state, planned["optimizer_states"][0]["state"][index])

    again = MemScaleCallback(**BUDGET)
    expected = saved(tmp_path / "resumed", [], tmp_path / "plain" / MIDDLE)
    assert_same_run(expected, saved(tmp_path / "again", [again], tmp_path / "planned" / MIDDLE))
    assert again.restored["digest"] == held["digest"] and again.plan is not None


def test_what_was_not_recomputed_is_not_tried_again(tmp_path: Path) -> None:
    """A checkpoint has what a run has learned of recomputes that differ."""

    class Learning(module_class(package_of())):  # type: ignore[misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            if batch_idx == 1:
                memscale.executor_of(self).keep_module("net.blocks.0", "for the test")

    first = MemScaleCallback(**BUDGET)
    fitted(tmp_path, [first], kind=lambda package: Learning)
    assert first.plan is not None and "net.blocks.0" not in [choice.module for choice in first.plan.active]
    second = MemScaleCallback(**BUDGET)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert "net.blocks.0" in second.restored["not_recomputed"]
    fitted(tmp_path, [second], max_steps=1)
    assert second.plan is not None and second.plan.active
    assert "net.blocks.0" not in [choice.module for choice in second.plan.active]


@pytest.mark.parametrize("hook", ["setup", "configure_model", "on_fit_start", "on_train_start"])
def test_wrap_of_itself_plans_the_whole_step(hook: str, tmp_path: Path) -> None:
    plans: list[Any] = []

    class Wrapping(module_class(package_of())):  # type: ignore[misc]
        def on_train_epoch_end(self) -> None:
            plans.append(memscale.executor_of(self).plan)

    def wrap(module: Any, **stage: Any) -> None:
        assert memscale.wrap(module, **BUDGET) is module

    setattr(Wrapping, hook, wrap)
    plain = fitted(tmp_path)
    planned = fitted(tmp_path, kind=lambda package: Wrapping)
    assert_same_run(plain, planned)
    assert len(plans) == 1 and plans[0].active
    assert planned[1].callbacks == [], "the callback of wrap has stayed"


def test_detached_in_the_middle_it_goes_on_as_the_plain_one(tmp_path: Path) -> None:
    class Leaving(module_class(package_of())):  # type: ignore[misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            if batch_idx == 2:
                memscale.detach(self)
                assert "training_step" not in vars(self) and memscale.executor_of(self) is None

    callback = MemScaleCallback(**BUDGET)
    assert_same_run(fitted(tmp_path), fitted(tmp_path, [callback], kind=lambda package: Leaving))
    assert callback.plan is not None


def test_outside_of_a_fit_a_module_is_wrapped_as_any_other() -> None:
    module = module_class(package_of())()
    memscale.wrap(module, SMALLEST)
    assert "forward" in vars(module) and "training_step" not in vars(module)
    memscale.detach(module)
    assert "forward" not in vars(module)


def test_copies_of_the_callback_plan_for_themselves(tmp_path: Path) -> None:
    callback = MemScaleCallback(**BUDGET)
    fitted(tmp_path, [callback], max_steps=1)
    for twin in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert type(twin) is type(callback) and twin.config == callback.config and twin.plan is None


def wide(package: Any, width: int = 512, depth: int = 10) -> type[Any]:
    """State is much of what it takes."""

    class Wide(module_class(package)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.net(batch[0].new_ones(4, width) * batch[0][0, 0]).square().mean()
            self.log("loss", loss)
            return loss

    return Wide


@pytest.mark.skipif(why_not(torch.device("cpu")) != "", reason="no offload on this machine")
def test_offloaded_state_of_steps_with_a_closure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's closure runs forward and backward inside the optimizer's step; state comes after them."""
    use_disk_of(monkeypatch)
    rows = tuple(item for item in variants.STEP_TECHNIQUES if item.name == "state_offload")
    use_techniques(monkeypatch, rows)
    offloaded: list[int] = []

    class Watching(wide(package_of())):  # type: ignore[misc]
        def on_after_backward(self) -> None:
            offloaded.append(offloaded_bytes(self.trainer.optimizers[0]))

    engine = AsyncOffloadConfig(tiers=("file",), directory=str(tmp_path))
    settings = {"memory_budget": "38MiB", "enable_logging": False, "async_config": engine}
    callback = MemScaleCallback(async_offload=True, **settings)
    plain = fitted(tmp_path, kind=wide, max_steps=3)
    assert_same_run(plain, fitted(tmp_path, [callback], kind=lambda package: Watching, max_steps=3))
    assert callback.plan is not None and callback.plan.fits
    assert [step.technique for step in callback.plan.steps] == ["state_offload"]
    state = 2 * sum(value.nbytes for value in plain[0].parameters())
    assert offloaded[0] == 0 and min(offloaded[1:]) > 0.5 * state


def test_8_bit_state_of_a_fit_and_of_a_resumed_one(tmp_path: Path) -> None:
    asked = {"use_8bit_optimizer": True, **BUDGET}
    _, trainer = saved(tmp_path / "first", [MemScaleCallback(**asked)])
    held = torch.load(tmp_path / "first" / MIDDLE, weights_only=True)["optimizer_states"][0]
    assert "memscale_optim" in held
    assert type(trainer.optimizers[0]) is torch.optim.AdamW, "it is the module's own again"
    saved(tmp_path / "second", [MemScaleCallback(**asked)], tmp_path / "first" / MIDDLE)


def test_evaluation_is_looked_at_before_it_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the sanity check there is no plan yet; of the validation after it there is."""

    class Validated(module_class(package_of())):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("valid", self.loss_of(batch))

        def val_dataloader(self) -> Any:
            return loader(4096)

    plain = fitted(tmp_path, kind=lambda package: Validated, limit_val_batches=1)
    callback = MemScaleCallback(memory_budget="1MiB", enable_logging=False)
    assert_same_run(plain, fitted(tmp_path, [callback], kind=lambda package: Validated, limit_val_batches=1))
    assert caplog.text.count("a forward without gradients does not fit") == 1


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_peak_of_a_fit_is_what_was_predicted(precision: str, tmp_path: Path) -> None:
    runs: list[Any] = []
    run: dict[str, Any] = {"data": loader(4096), "max_steps": 3, "precision": precision}
    plain = peak_bytes(lambda: runs.append(fitted(tmp_path, **run)))
    budget = int(plain * 0.7)
    callback = MemScaleCallback(memory_budget=budget, enable_logging=False)
    planned = peak_bytes(lambda: runs.append(fitted(tmp_path, [callback], **run)))
    assert_same_run(*runs)
    assert callback.plan is not None and callback.plan.fits
    assert planned <= budget < plain
    assert planned - callback.plan.predicted.allocated_peak_bytes <= 1024  # what Lightning logs


# ---- Fabric ------------------------------------------------------------------------------------------


def by_fabric(precision: str, wrapped: bool) -> tuple[list[Tensor], Any]:
    """Two steps of two batches each, by Fabric."""
    from lightning.fabric import Fabric

    with quiet():
        fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    seed(5)
    net = Net()
    if wrapped:
        memscale.wrap(net, SMALLEST)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    found: list[Tensor] = []
    for number, (x, y) in enumerate(list(loader())[:4]):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss / 2)
        found.append(loss.detach())
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
    found += [value.detach().clone() for value in net.state_dict().values()]
    return [*found, torch.get_rng_state()], net


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_needs_no_adapter(precision: str) -> None:
    plain, _ = by_fabric(precision, wrapped=False)
    planned, net = by_fabric(precision, wrapped=True)
    assert all(map(same_bits, plain, planned)) and memscale.executor_of(net).plan.active
