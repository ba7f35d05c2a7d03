# SPDX-License-Identifier: Apache-2.0
"""`wrap` on a Hugging Face `Trainer`, and on anything that looks like one."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from calls import beside
from memscale.core.planner import make_plan
from memscale.errors import ConfigError
from trainer_samples import GPT2, Counted, Lines, Own, Stream, Trained, arguments, trained, weights
from zoo.blocks import WIDTH, Block, Stack
from zoo.models import VOCABULARY
from zoo.training import SMALLEST, built, same_bits, seed


class FakeTrainer:
    """Has `.model` and `.train`, and its own loop."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def train(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for step in range(3):
            self.model(**GPT2.batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


class Small(nn.Module):
    """A language model of few operations: the compiler takes twelve seconds for GPT-2; see test_compile."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = Stack(functools.partial(Block, 0.1))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.blocks(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def assert_equal(plain: nn.Module, planned: nn.Module) -> None:
    pairs = list(zip(weights(plain), weights(planned), strict=True))
    wrong = [name for (name, a), (_, b) in pairs if not same_bits(a, b)]
    assert pairs and not wrong, f"{len(wrong)} of {len(pairs)} differ, first {wrong[:2]}"


def assert_same_run(plain: Trained, planned: Trained) -> None:
    """Weights, losses and gradient norms, bit for bit."""
    assert_equal(plain.model, planned.model)
    assert plain.losses == planned.losses and plain.losses


def test_a_trainer_comes_back_and_its_model_is_wrapped() -> None:
    plain, trainer = FakeTrainer(built(GPT2)), FakeTrainer(built(GPT2))
    assert memscale.wrap(trainer, SMALLEST) is trainer
    assert memscale.executor_of(trainer.model) is memscale.executor_of(trainer)
    assert memscale.executor_of(trainer).plan is None
    torch.manual_seed(1)
    plain.train()
    torch.manual_seed(1)
    trainer.train()
    assert memscale.executor_of(trainer.model).plan.active
    assert_equal(plain.model, trainer.model)
    memscale.detach(trainer)
    assert memscale.executor_of(trainer.model) is None


@pytest.mark.parametrize("bad", [{"model": 3}, {"model": None}, {}])
def test_a_trainer_without_a_model(bad: dict[str, Any]) -> None:
    trainer = type("Trainer", (), {"train": lambda self: None, **bad})()
    for function in (memscale.wrap, memscale.executor_of):
        with pytest.raises(TypeError, match="trainer"):
            function(trainer)


@pytest.mark.usefixtures("transformers_trainer")
class TestTransformers:
    """Every run is compared with the same run without MemScale."""

    @pytest.fixture(name="transformers_trainer")
    def needs_accelerate(self) -> None:
        pytest.importorskip("accelerate")  # requirements/test.txt has it; transformers alone runs without

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"gradient_accumulation_steps": 2},
            {"gradient_accumulation_steps": 3, "max_steps": 4},  # 9 batches: an epoch ends in the middle
            {"bf16": True},
            {"bf16": True, "gradient_accumulation_steps": 2},
            {"label_smoothing_factor": 0.1},
            {"neftune_noise_alpha": 5.0},
            {"optim": "sgd"},
            {"optim": "adafactor"},
            {"max_grad_norm": 0.0, "train_sampling_strategy": "sequential"},
            {"eval_strategy": "steps", "eval_steps": 1},
            {"include_num_input_tokens_seen": "all"},
        ],
        ids=str,
    )
    @pytest.mark.long
    def test_trains_equal_and_is_planned_before(self, settings: dict[str, Any], tmp_path: Path) -> None:
        plain = trained(tmp_path, None, **settings)
        planned = trained(tmp_path, SMALLEST, **settings)
        assert_same_run(plain, planned)
        assert planned.executor.plan is not None and planned.executor.plan.active
        assert planned.plan_at_wrap is not None
        if "optim" not in settings and "neftune_noise_alpha" not in settings:
            assert planned.executor.plan.digest == planned.plan_at_wrap.digest
            if "eval_strategy" not in settings:  # a first evaluation is traced when it comes
                assert planned.executor.planning_seconds == 0.0
                assert not [key for key in planned.metrics if "planning" in key]

    def test_steps_in_backward_are_refused(self, tmp_path: Path) -> None:
        """It looks at gradients between backward and step, whether or not it clips."""
        for norm in (1.0, 0.0):
            with pytest.raises(ConfigError, match=r"step_in_backward=True.*a Trainer takes the norm"):
                trained(tmp_path, SMALLEST.replace(step_in_backward=True), max_grad_norm=norm)

    def test_in_place(self, tmp_path: Path) -> None:
        run = trained(tmp_path, SMALLEST)
        assert run.trainer.model_wrapped is run.trainer.model is run.model
        memscale.detach(run.trainer)
        assert not any(memscale.executor_of(module) is not None for module in run.model.modules())
        assert not any("forward" in module.__dict__ for module in run.model.modules())
        names = [type(callback).__name__ for callback in run.trainer.callback_handler.callbacks]
        assert "MemScaleCallback" not in names
        run.model.train()(**GPT2.batch(0)).loss.backward()

    def test_wrapping_twice_leaves_one_callback(self, tmp_path: Path) -> None:
        def prepare(trainer: Any) -> None:
            memscale.wrap(trainer, SMALLEST)

        run = trained(tmp_path, SMALLEST, prepare=prepare)
        names = [type(callback).__name__ for callback in run.trainer.callback_handler.callbacks]
        assert names.count("MemScaleCallback") == 1
        assert_same_run(trained(tmp_path, None), run)

    @pytest.mark.parametrize(
        "source",
        [Stream, functools.partial(Own, 1), functools.partial(Own, 2)],
        ids=["stream", "own", "own2"],
    )
    def test_drawing_a_batch_disturbs_nothing(self, source: Callable[[], Any], tmp_path: Path) -> None:
        """Streams, data with generators of its own, and counters see what they see without MemScale."""
        plain = trained(tmp_path, None, data=source())
        planned = trained(tmp_path, SMALLEST, data=source())
        assert_same_run(plain, planned)
        assert planned.executor.plan is not None and planned.executor.plan.active

    def test_evaluation_in_the_middle(self, tmp_path: Path) -> None:
        settings = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
        more = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1}
        plain = trained(tmp_path / "plain", None, **settings, **more)
        planned = trained(tmp_path / "planned", SMALLEST, **settings, **more)
        assert_same_run(plain, planned)
        figures = [
            [entry["eval_loss"] for entry in run.trainer.state.log_history if "eval_loss" in entry]
            for run in (plain, planned)
        ]
        assert figures[0] == figures[1] and len(figures[0]) == 3

    @pytest.mark.parametrize("wrapped", ["both", "first", "second"])
    def test_resuming_from_a_checkpoint(self, wrapped: str, tmp_path: Path) -> None:
        settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        plain = trained(tmp_path / "plain", None, **settings)
        first = SMALLEST if wrapped != "second" else None
        trained(tmp_path / "cut", first, **settings)
        second = SMALLEST if wrapped != "first" else None
        resumed = trained(tmp_path / "cut", second, resume=tmp_path / "cut" / "checkpoint-2", **settings)
        assert_equal(plain.model, resumed.model)
        assert plain.losses[2:] == resumed.losses[-2:]

    def test_auto_find_batch_size(self, tmp_path: Path) -> None:
        def run(config: memscale.Config | None) -> Trained:
            return trained(tmp_path, config, kind=Counted, auto_find_batch_size=True)

        plain, planned = run(None), run(SMALLEST)
        assert planned.trainer.batch_sizes == plain.trainer.batch_sizes
        assert len(set(plain.trainer.batch_sizes)) == 3
        assert_same_run(plain, planned)
        assert planned.trainer.model_wrapped is planned.trainer.model
        assert planned.executor.plan.active
        forwards = [module for module in planned.model.modules() if "forward" in module.__dict__]
        memscale.detach(planned.trainer)
        assert forwards and not any("forward" in module.__dict__ for module in planned.model.modules())

    def test_a_smaller_batch_that_was_found_is_planned_for(self, tmp_path: Path) -> None:
        """The plan of the first, too large one would cover it, and recompute what need not be."""
        config = memscale.Config(memory_budget="6MiB", enable_logging=False)
        settings = {"auto_find_batch_size": True, "per_device_train_batch_size": 24}
        run = trained(tmp_path, config, kind=Counted, **settings)
        assert run.trainer.batch_sizes[-1] == 6
        assert run.executor.plan.fits and not run.executor.plan.active

    def test_a_loss_of_the_users_own(self, tmp_path: Path) -> None:
        from transformers import Trainer

        calls: list[str] = []

        class Scaled(Trainer):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                calls.append("loss")
                labels = inputs.pop("labels")
                logits = model(**inputs).logits.float()
                return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) * 0.5

        plain = trained(tmp_path, None, kind=Scaled)
        count = len(calls)
        planned = trained(tmp_path, SMALLEST, kind=Scaled)
        assert len(calls) == 2 * count  # not called to look at it
        assert_same_run(plain, planned)
        assert planned.executor.plan.active

    def test_compute_loss_func(self, tmp_path: Path) -> None:
        def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            logits = outputs["logits"].float()
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

        plain = trained(tmp_path, None, trainer={"compute_loss_func": loss})
        planned = trained(tmp_path, SMALLEST, trainer={"compute_loss_func": loss})
        assert_same_run(plain, planned)
        assert planned.plan_at_wrap is not None and planned.executor.planning_seconds == 0.0

    def test_model_init_makes_a_model_that_is_wrapped_too(self, tmp_path: Path) -> None:
        def run(config: memscale.Config | None) -> Trained:
            return trained(tmp_path, config, trainer={"model_init": lambda: built(GPT2)})

        plain, planned = run(None), run(SMALLEST)
        assert_same_run(plain, planned)
        assert planned.executor.plan.active

    @pytest.mark.parametrize("moment", ["arguments", "before", "after"])
    def test_the_models_own_checkpointing_is_not_doubled(
        self, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each block runs twice in a step: once in forward, once in backward."""
        runs: list[int] = []
        block = type(built(GPT2).transformer.h[0].mlp)
        forward = block.forward
        monkeypatch.setattr(block, "forward", lambda self, x: (runs.append(1), forward(self, x))[1])

        def count(config: memscale.Config | None) -> tuple[Trained, int]:
            settings = {"activation_checkpointing": True} if moment == "arguments" else {}
            prepare = None if moment == "arguments" else lambda t: t.model.activation_checkpointing_enable()
            runs.clear()
            run = trained(
                tmp_path,
                config,
                prepare=prepare,
                prepare_first=moment == "before",
                on_run=runs.clear,
                **settings,
            )
            return run, len(runs)

        (plain, once), (planned, now) = count(None), count(SMALLEST)
        assert_same_run(plain, planned)
        assert once == 3 * 3 * 2  # steps × blocks × (forward, recompute)
        assert now <= once + 2 * 3  # a trace, and one on a second look, at most

    @pytest.mark.parametrize("sample", [True, False], ids=["drawn", "deferred"])
    def test_torch_compile(self, sample: bool, tmp_path: Path) -> None:
        def run(config: memscale.Config | None) -> Trained:
            torch._dynamo.reset()
            data, model = Lines() if sample else Stream(), Small().train()
            compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
            return trained(tmp_path, config, data=data, model=model, **compiled)

        plain, planned = run(None), run(SMALLEST)
        assert_same_run(plain, planned)
        assert planned.executor.plan.active

    def test_a_smart_skip_touches_nothing(self, tmp_path: Path) -> None:
        plain = trained(tmp_path, None)
        planned = trained(tmp_path, memscale.Config(memory_budget="64GiB", enable_logging=False))
        assert_same_run(plain, planned)
        assert not planned.executor.plan.active

    def test_a_strict_budget_is_an_error_at_wrap(self, tmp_path: Path) -> None:
        from transformers import Trainer

        config = SMALLEST.replace(strict_budget=True)
        trainer = Trainer(model=built(GPT2), args=arguments(tmp_path), train_dataset=Lines())
        before = list(trainer.callback_handler.callbacks)
        with pytest.raises(memscale.errors.BudgetError):
            memscale.wrap(trainer, config)
        assert trainer.callback_handler.callbacks == before
        assert not any("forward" in module.__dict__ for module in trainer.model.modules())

    def test_many_gpus_in_one_process_are_refused(self, tmp_path: Path) -> None:
        from transformers import Trainer

        trainer = Trainer(model=built(GPT2), args=arguments(tmp_path), train_dataset=Lines())
        trainer.args._n_gpu = 2
        with pytest.raises(TypeError, match="torchrun"):
            memscale.wrap(trainer, SMALLEST)


@pytest.mark.usefixtures("slow_plans")
class TestRates:
    """What is logged as samples per second."""

    @pytest.fixture
    def slow_plans(self) -> Iterator[None]:
        pytest.importorskip("accelerate")
        with beside({make_plan: lambda *unused: time.sleep(2.0)}):
            yield

    def test_a_plan_at_wrap_costs_no_rate(self, tmp_path: Path) -> None:
        run = trained(tmp_path, SMALLEST)
        assert run.metrics["train_runtime"] > 0 and "train_planning_seconds" not in run.metrics

    def test_a_plan_in_training_is_told_apart(self, tmp_path: Path) -> None:
        run = trained(tmp_path, SMALLEST, data=Stream())
        figures = run.metrics
        assert 2.0 < figures["train_planning_seconds"] < figures["train_runtime"]
        rest = figures["train_runtime"] - figures["train_planning_seconds"]
        for name in ("samples", "steps"):
            whole = figures[f"train_{name}_per_second"] * figures["train_runtime"]
            told = figures[f"train_{name}_per_second_without_planning"] * rest
            assert told == pytest.approx(whole, rel=0.02)
        assert "train_samples_per_second_without_planning" in run.trainer.state.log_history[-1]

    def test_only_this_runs_planning_counts(self, tmp_path: Path) -> None:
        run = trained(tmp_path, SMALLEST, data=Stream())
        again = run.trainer.train().metrics
        assert "train_planning_seconds" not in again


@pytest.mark.parametrize("seconds", [0.0, -1.0, 10.0, 11.0])
def test_rates_that_nothing_is_known_of(seconds: float) -> None:
    pytest.importorskip("accelerate")
    from memscale.integrations.trainer import rates_without_planning

    assert rates_without_planning({"train_runtime": 10.0, "train_samples_per_second": 3.0}, seconds) == {}
    assert rates_without_planning({"loss": 1.0}, 1.0) == {}
