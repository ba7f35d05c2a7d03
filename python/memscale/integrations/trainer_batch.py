# SPDX-License-Identifier: Apache-2.0
"""`auto_find_batch_size` of a Hugging Face Trainer, settled by plans before the first step.

    transformers   runs the batch; where memory runs out, it begins again with fewer lines, and trains with
                   another effective batch
    here           the largest part of the batch that a plan makes fit; so many parts are accumulated that the
                   effective batch is the one that was asked for

Where no part fits, or no batch can be drawn beforehand, it stays with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memscale import log
from memscale.config.config import Config
from memscale.core.eight_bit_state import counted_in_8bit
from memscale.core.planner import make_plan
from memscale.core.predictor import bare
from memscale.core.profiler import normalize_sample
from memscale.techniques.step_facts import StepFacts

if TYPE_CHECKING:
    from transformers import Trainer

_FIELDS: Final = ("per_device_train_batch_size", "gradient_accumulation_steps", "auto_find_batch_size")


@dataclass(frozen=True)
class Part:
    """What of a batch is run at a time.

    Attributes:
        sample: one of them.
        lines: in it, on each device.
        count: of them in the batch that was asked for.
    """

    sample: Any
    lines: int
    count: int


class Settled:
    """A trainer that runs parts of its batches, until `restore`.

    Args:
        trainer: whose arguments change.
        part: what it runs at a time.
    """

    def __init__(self, trainer: Trainer, part: Part) -> None:
        self._trainer = trainer
        self.asked = {name: getattr(trainer.args, name) for name in _FIELDS}
        steps = trainer.args.gradient_accumulation_steps * part.count
        self._set((part.lines, steps, False))
        log.LOGGER.info(
            "auto_find_batch_size: superseded by the plan, for which batches of %d fit, %d before each step: "
            "the effective batch stays %d",
            part.lines,
            steps,
            trainer.args.train_batch_size * steps,
        )

    def restore(self) -> None:
        """The arguments are as they were."""
        self._set(tuple(self.asked.values()))

    def _set(self, values: tuple[Any, ...]) -> None:
        for name, value in zip(_FIELDS, values, strict=True):
            setattr(self._trainer.args, name, value)
        self._trainer._train_batch_size = self._trainer.args.train_batch_size


def fitting_part(
    trainer: Trainer,
    config: Config,
    step: StepFacts,
    draw: Callable[[int], Any],
    asked: int,
) -> Part | None:
    """The largest part of a batch that a plan makes fit.

    Args:
        trainer: its model is left as it was.
        config: of the plan.
        step: what is known of the whole batch's step.
        draw: gives a batch of so many lines; None where none can be drawn.
        asked: lines of the whole batch, on each device.

    Returns:
        None where none fits, or no batch can be drawn.
    """
    model: Any = trainer.model
    for count in range(1, asked + 1):
        if asked % count:
            continue
        sample = draw(asked // count)
        if sample is None:
            return None
        step.grads_present |= count > 1
        args, kwargs = normalize_sample(sample)
        with counted_in_8bit(config, step.optimizer), bare(model):
            if make_plan(model, config, args, kwargs, step).plan.fits:
                return Part(sample, asked // count, count)
    return None
