# SPDX-License-Identifier: Apache-2.0
"""A small transformers `Trainer` run, with and without MemScale, and data that is easily disturbed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import memscale
from memscale.core.executor import Executor
from zoo.models import case
from zoo.training import built

GPT2 = case("gpt2")
STEPS = 3


def line(index: int) -> dict[str, Tensor]:
    return {key: value[0] for key, value in GPT2.batch(index).items()}


class Lines(Dataset[dict[str, Tensor]]):
    """The same line for the same number."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return line(index)


class Stream(IterableDataset[dict[str, Tensor]]):
    """Can be read once: whoever takes a line takes it from training."""

    def __init__(self) -> None:
        self.lines = iter(range(10_000))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (line(number) for number in self.lines)


class Own(Lines):
    """Lines that depend on generators of the data's own, and on how many were read before.

    Args:
        kind: 1 for torch's generator and a counter, 2 for Python's.
    """

    def __init__(self, kind: int) -> None:
        self.torch = torch.Generator().manual_seed(3)
        self.python = random.Random(3)
        self.kind = kind
        self.read = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.kind == 1:
            noise = int(torch.randint(0, 50, (), generator=self.torch)) + self.read
            self.read += 1
        else:
            noise = self.python.randrange(50) + random.randrange(5)
        return line(index + noise)


def arguments(folder: Path, **settings: Any) -> Any:
    from transformers import TrainingArguments

    usual: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 8, "report_to": [], "seed": 3, "use_cpu": True,
        "save_strategy": "no", "logging_strategy": "steps", "logging_steps": 1, "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**usual, **settings})


@dataclass
class Trained:
    """A trainer after its run.

    Attributes:
        losses: (loss, gradient norm) of each logged step.
        metrics: what `train()` returned.
        plan_at_wrap: the plan right after `wrap`.
    """

    trainer: Any
    losses: list[tuple[float, float]]
    metrics: dict[str, float]
    plan_at_wrap: memscale.Plan | None

    @property
    def model(self) -> nn.Module:
        model = self.trainer.model
        assert isinstance(model, nn.Module)
        return model

    @property
    def executor(self) -> Executor:
        return memscale.executor_of(self.model)


def weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value.detach()) for name, value in (*model.named_parameters(), *model.named_buffers())]


def trained(
    folder: Path,
    config: memscale.Config | None,
    *,
    kind: type[Any] | None = None,
    data: Any = None,
    model: nn.Module | None = None,
    prepare: Callable[[Any], None] | None = None,
    prepare_first: bool = False,
    on_run: Callable[[], None] | None = None,
    resume: Path | None = None,
    trainer: dict[str, Any] | None = None,
    **settings: Any,
) -> Trained:
    """Trains GPT-2.

    Args:
        folder: for checkpoints.
        config: wraps the trainer; None trains plain.
        kind: the trainer's class.
        data: to train on.
        model: to train.
        prepare: done to the trainer after the wrap, or before it if `prepare_first`.
        prepare_first: see `prepare`.
        on_run: called right before `train()`.
        resume: checkpoint to go on from.
        trainer: more arguments of the trainer.
        settings: of `TrainingArguments`.
    """
    from transformers import Trainer

    more = dict(trainer or {})
    if "model_init" not in more:
        more["model"] = built(GPT2) if model is None else model
    if settings.get("eval_strategy"):
        more["eval_dataset"] = Lines()
    made = (kind or Trainer)(
        args=arguments(folder, **settings), train_dataset=Lines() if data is None else data, **more
    )
    if prepare is not None and prepare_first:
        prepare(made)
    if config is not None:
        assert memscale.wrap(made, config) is made
    plan = memscale.executor_of(made.model).plan if config is not None else None
    if prepare is not None and not prepare_first:
        prepare(made)
    if on_run is not None:
        on_run()
    result = made.train(resume_from_checkpoint=None if resume is None else str(resume))
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    losses = [(entry["loss"], entry.get("grad_norm", 0.0)) for entry in logged]
    return Trained(made, losses, dict(result.metrics), plan)


def _counted() -> type[Any]:
    try:
        from transformers import Trainer
    except ImportError:  # its tests are skipped
        return object

    class Counted(Trainer):  # type: ignore[misc]
        """Runs out of memory for batches of more than six."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.batch_sizes: list[int] = []

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            size = len(inputs["input_ids"])
            self.batch_sizes.append(size)
            loss = super().training_step(model, inputs, *args, **kwargs)
            if size > 6:
                raise RuntimeError("CUDA out of memory.")
            return loss  # type: ignore[no-any-return]

    return Counted


Counted = _counted()
