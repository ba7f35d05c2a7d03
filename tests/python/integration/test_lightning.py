# SPDX-License-Identifier: Apache-2.0
"""`MemScaleCallback` in a fit of PyTorch Lightning: every bit as without it, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memscale
from lightning_samples import (
    BUDGET,
    PACKAGES,
    WIDTH,
    assert_same_run,
    fitted,
    loader,
    module_class,
    package_of,
    quiet,
    trainer_of,
)
from memscale.errors import BudgetError, ConfigError
from memscale.integrations.lightning import MemScaleCallback

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")


def manual(package: Any) -> type[Any]:
    class Manual(module_class(package)):  # type: ignore[misc]
        """Gradients over two batches, clipped by hand; a scheduler by hand."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss / 2)
            if batch_idx % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

    return Manual


def adversarial(package: Any) -> type[Any]:
    class Adversarial(module_class(package)):  # type: ignore[misc]
        """Two optimizers, two backward calls in a step, one of them in a closure."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.judge = torch.nn.Linear(WIDTH, 1)

        def training_step(self, batch: Any, number: int) -> None:
            first, second = self.optimizers()

            def closure() -> None:
                first.zero_grad()
                self.manual_backward(super(Adversarial, self).training_step(batch, number))

            with first.toggle_model():
                first.step(closure=closure)
            second.zero_grad()
            self.manual_backward(self.judge(self.net.blocks(batch[0]).detach()).square().mean())
            second.step()
            second.param_groups[0]["lr"] *= 0.9

        def configure_optimizers(self) -> Any:
            parts = (self.net, self.judge)
            return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts]

    return Adversarial


def called(package: Any) -> type[Any]:
    class Called(module_class(package)):  # type: ignore[misc]
        """Calls its forward, validates, and returns more than the loss."""

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

        def training_step(self, batch: Any) -> Any:
            logits = self(batch[0])
            loss = F.cross_entropy(logits, batch[1])
            self.log_dict({"loss": loss, "rate": self.trainer.optimizers[0].param_groups[0]["lr"]})
            self.logger.experiment.add_scalar("loss", loss)
            return {"loss": loss, "logits": logits}

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("valid", F.cross_entropy(self(batch[0]), batch[1]))

    return Called


class Recording:
    """A logger's experiment: what it was given."""

    def __init__(self) -> None:
        self.given: list[float] = []

    def add_scalar(self, name: str, value: Any) -> None:
        self.given.append(float(value))


def with_logger(package: Any) -> tuple[Any, Recording]:
    """A logger that records."""
    recording = Recording()
    base = __import__(f"{package.__name__}.loggers.logger", fromlist=["DummyLogger"]).DummyLogger

    class Logger(base):  # type: ignore[misc,valid-type]
        experiment = recording

    return Logger(), recording


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "automatic": (module_class, {}),
    "accumulated and clipped": (module_class, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "bf16-mixed": (module_class, {"precision": "bf16-mixed"}),
    "manual": (manual, {}),
    "manual, bf16-mixed": (manual, {"precision": "bf16-mixed"}),
    "two optimizers": (adversarial, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_bit_of_a_fit(name: str, tmp_path: Path) -> None:
    kind, settings = CASES[name]
    plain = fitted(tmp_path, kind=kind, **settings)
    callback = MemScaleCallback(**BUDGET)
    planned = fitted(tmp_path, [callback], kind=kind, **settings)
    assert_same_run(plain, planned)
    assert callback.plan is not None and callback.plan.active


def test_fp16_with_a_scaler_on_the_cpu(tmp_path: Path) -> None:
    """Lightning itself takes BF16 in place of "16-mixed" there; a plugin of one's own does FP16."""
    from lightning.pytorch.plugins import MixedPrecision

    def plugins() -> list[Any]:
        return [MixedPrecision("16-mixed", device="cpu")]

    plain = fitted(tmp_path, plugins=plugins(), gradient_clip_val=0.1)
    callback = MemScaleCallback(**BUDGET)
    assert_same_run(plain, fitted(tmp_path, [callback], plugins=plugins(), gradient_clip_val=0.1))
    assert callback.plan is not None and callback.plan.active


def test_a_step_that_calls_forward_logs_validates_and_returns_more(tmp_path: Path) -> None:
    runs = []
    for callbacks in ([], [MemScaleCallback(**BUDGET)]):
        logger, recording = with_logger(package_of())
        settings = {"logger": logger, "val_check_interval": 3, "limit_val_batches": 2}
        module, trainer = fitted(tmp_path, callbacks, kind=validated, **settings)
        runs.append((module, trainer, recording.given))
    assert_same_run(runs[0][:2], runs[1][:2])
    assert runs[0][2] == runs[1][2] and len(runs[0][2]) == 6, "planning has logged"


def validated(package: Any) -> type[Any]:
    class Validated(called(package)):  # type: ignore[misc]
        def val_dataloader(self) -> Any:
            return loader()

    return Validated


@pytest.mark.parametrize("name", PACKAGES)
def test_the_class_is_that_of_the_trainers_package(name: str, tmp_path: Path) -> None:
    package = package_of(name)
    callback = MemScaleCallback(**BUDGET)
    assert isinstance(callback, package.Callback) and callback.state_key == "MemScaleCallback"
    _, trainer = fitted(tmp_path, [callback], package=package, max_steps=1)
    assert callback.plan is not None and trainer.callbacks[0] is callback


def test_gradients_are_freed_before_the_next_forward_unless_somebody_looks(tmp_path: Path) -> None:
    """Lightning frees them between forward and backward; a plan for that would count them in both."""
    present: list[bool] = []

    class Watching(module_class(package_of())):  # type: ignore[misc]
        def loss_of(self, batch: Any) -> Tensor:
            if memscale.executor_of(self).idle is False:
                present.append(self.net.head.weight.grad is not None)
            return super().loss_of(batch)  # type: ignore[no-any-return]

    class Looking(Watching):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            present.append(self.net.head.weight.grad is not None)

    fitted(tmp_path, [MemScaleCallback(**BUDGET)], kind=lambda package: Looking, max_steps=2)
    assert present == [False, False, True, True]
    present.clear()


_counts = {"steps": 0}


def test_planning_leaves_no_trace_outside_of_the_module(tmp_path: Path) -> None:
    """No code of the program's own names `training_step`: it is known that Lightning calls it."""
    global _latest

    class Counting(module_class(package_of())):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            global _latest
            _counts["steps"] += 1
            _latest = batch_idx
            return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]

    for callbacks in ([], [MemScaleCallback(**BUDGET)]):
        _counts["steps"], _latest = 0, -1
        fitted(tmp_path, callbacks, kind=lambda package: Counting)
        assert (_counts["steps"], _latest) == (6, 5)


_latest = -1


def test_a_sample_brings_the_plan_before_the_first_step(tmp_path: Path) -> None:
    plans = []

    class First(module_class(package_of())):  # type: ignore[misc]
        def on_train_start(self) -> None:
            plans.append(memscale.executor_of(self).plan)

    batch = next(iter(loader()))
    callback = MemScaleCallback(sample=lambda: batch, **BUDGET)
    fitted(tmp_path, [callback], kind=lambda package: First)
    assert plans[0] is not None and callback.plan is plans[0]


def test_an_error_in_a_step_leaves_module_and_trainer_as_they_were(tmp_path: Path) -> None:
    class Failing(module_class(package_of())):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise torch.OutOfMemoryError("no room")
            return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]

    modules = []
    for callbacks in ([], [MemScaleCallback(**BUDGET)]):
        package = package_of()
        torch.manual_seed(0)
        module, trainer = Failing(), trainer_of(package, tmp_path, callbacks)
        with quiet(), pytest.raises(torch.OutOfMemoryError, match="no room"):
            trainer.fit(module, loader())
        assert trainer.callbacks[: len(callbacks)] == callbacks
        modules.append(module)
    assert vars(modules[0]).keys() == vars(modules[1]).keys()
    assert all(map(torch.equal, modules[0].state_dict().values(), modules[1].state_dict().values()))


def test_a_strict_budget_ends_the_fit_before_the_first_step(tmp_path: Path) -> None:
    package = package_of()
    module = module_class(package)()
    before = set(vars(module))
    callback = MemScaleCallback(strict_budget=True, **BUDGET)
    with quiet(), pytest.raises(BudgetError):
        trainer_of(package, tmp_path, [callback]).fit(module, loader())
    assert not [name for name in set(vars(module)) - before if "step" in name or "memscale" in name]


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="closure"):
        MemScaleCallback(step_in_backward=True)
    callback = MemScaleCallback(use_mixed_precision=True)
    with pytest.raises(ConfigError, match="bf16-mixed"):
        fitted(tmp_path, [callback], precision="bf16-mixed")

    class Drawing(module_class(package_of())):  # type: ignore[misc]
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            return self.loss_of(batch)  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match="draws its own batches"):
        fitted(tmp_path, [MemScaleCallback(**BUDGET)], kind=lambda package: Drawing)


def test_steps_that_cannot_be_planned_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(manual(package_of())):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.trainer.optimizers[0]
            loss = self.loss_of(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.log("loss", loss)

    plain = fitted(tmp_path, kind=lambda package: Own)
    callback = MemScaleCallback(**BUDGET)
    assert_same_run(plain, fitted(tmp_path, [callback], kind=lambda package: Own))
    assert callback.plan is None
    assert "self.optimizers()" in caplog.text and "the model runs unchanged" in caplog.text


def test_wrapped_before_the_fit_a_warning_names_the_callback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning calls its `training_step`, and never the forward that is planned there."""
    module = memscale.wrap(module_class(package_of())(), **BUDGET)
    with quiet():
        trainer_of(package_of(), tmp_path).fit(module, loader())
    assert caplog.text.count("no plan was made") == 1 and "MemScaleCallback" in caplog.text


def test_a_batch_that_is_skipped_says_nothing_of_the_next(tmp_path: Path) -> None:
    class Skipping(module_class(package_of())):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            executor = memscale.executor_of(self)
            if executor is not None and not executor.idle:
                planned.append(executor.plan is not None)
            return None if batch_idx == 0 else loss

    planned: list[bool] = []
    plain = fitted(tmp_path, kind=lambda package: Skipping)
    assert_same_run(plain, fitted(tmp_path, [MemScaleCallback(**BUDGET)], kind=lambda package: Skipping))
    assert planned == [False, True, True, True, True, True]


def test_batch_size_finder_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from lightning.pytorch.callbacks import BatchSizeFinder

    class Sized(module_class(package_of())):  # type: ignore[misc]
        batch_size = 8

        def train_dataloader(self) -> Any:
            return loader(self.batch_size)

    callback = MemScaleCallback(**BUDGET)
    package = package_of()
    finder = BatchSizeFinder(max_trials=2, steps_per_trial=1, init_val=8)
    trainer, module = trainer_of(package, tmp_path, [finder, callback], max_steps=2), Sized()
    with quiet():
        trainer.fit(module)
    assert module.batch_size > 8 and callback.plan is not None
    assert caplog.text.count("memscale.autotuning.AutoTuner") == 1
