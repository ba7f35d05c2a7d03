# SPDX-License-Identifier: Apache-2.0
"""`memscale.wrap(trainer)` for the `Trainer` of Hugging Face transformers 5.x.

    wrap             the trainer says what a step is: its model, its optimizer, its first batch, its autocast.
                     The plan is made from that, outside the time that the trainer measures.
                     `auto_find_batch_size` is settled by plans, see `trainer_batch`.
    train            the model is wrapped anew if `model_init` made another one
    end of training  if planning fell into the measured time all the same, the rates without it are logged

The model is wrapped in place: `trainer.model_wrapped` stays what it would be. Where a batch cannot be drawn
without a trace (a stream, a loader or loss of the user's own), or the model will be another one by the time
it trains, the plan waits for the first batch.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from memscale import log
from memscale.config.checks import refuse
from memscale.config.config import Config
from memscale.core.eight_bit_state import change_to_8bit, eight_bit_state
from memscale.core.wrapping import begin as wrap_model
from memscale.core.wrapping import executor_of
from memscale.integrations.trainer_batch import Part, Settled, fitting_part
from memscale.recording.current import CURRENT, record_logged
from memscale.state.model_state import preserved
from memscale.techniques.step_facts import StepFacts

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


class Follower:
    """Follows a wrapped trainer's runs, as one of its callbacks. Added by `begin`, removed by `end`.

    Attributes:
        config: what the model is wrapped with.
        optimizer: stands in for the trainer's own until that has been created; None where it has been, or
            cannot be known before.
        drops_output: see `StepFacts`.
        settled: the batch that `auto_find_batch_size` would have looked for.
    """

    settled: Settled | None = None

    def __init__(
        self,
        config: Config,
        optimizer: torch.optim.Optimizer | None,
        drops_output: bool = False,
    ) -> None:
        self.config = config
        self.drops_output = drops_output
        self.optimizer = optimizer
        self._before = 0.0
        self._batch_size: int | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Wraps the model if it is a new one, made by `model_init`; the optimizer is known from here on."""
        if model is None:
            return
        executor = executor_of(model)
        if executor is None:
            executor = wrap_model(model, self.config, None, drops_output=self.drops_output)
            self.optimizer = None
        if self._batch_size not in (None, state.train_batch_size):  # auto_find_batch_size goes on
            executor.forget_plans(f"batches of {state.train_batch_size}")
        self._batch_size = state.train_batch_size
        inner = _inner(optimizer)
        change_to_8bit(model, self.config, inner)
        if inner is not None and self.optimizer is not None:
            executor.in_force.hand_over(inner, executor.planned)
        elif inner is not None:
            executor.note_optimizer(inner)
        self.optimizer = None
        self._before = executor.planning_seconds
        if CURRENT.run is not None:
            CURRENT.run.go_on_from(state.global_step - 1)
            CURRENT.run.has_loss = True  # the trainer's own, as it logs it

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds to the rates of training what they are without planning, and records what is logged."""
        executor = None if model is None else executor_of(model)
        if executor is None or logs is None:
            return
        record_logged(logs, max(state.global_step - 1, 0))
        added = rates_without_planning(logs, executor.planning_seconds - self._before)
        logs.update(added)
        if added and state.log_history:
            state.log_history[-1].update(added)


@functools.cache
def callback_type() -> type[Follower]:
    """`Follower` as transformers wants its callbacks."""
    from transformers import TrainerCallback

    return type("MemScaleCallback", (Follower, TrainerCallback), {"__module__": __name__})


def rates_without_planning(figures: dict[str, float], planning_seconds: float) -> dict[str, float]:
    """Rates of training as if no step had been planned while the clock ran.

    Args:
        figures: what the trainer logs. Only with `train_runtime` there is something to add.
        planning_seconds: how much of it went into planning.

    Returns:
        The seconds, and each `train_…_per_second` anew; nothing if no planning fell into the run. The
        trainer's own figures stay what they are, time on the clock.
    """
    runtime = figures.get("train_runtime", 0.0)
    if not 0.0 < planning_seconds < runtime:
        return {}
    factor = runtime / (runtime - planning_seconds)
    rates = {
        f"{name}_without_planning": round(value * factor, 3)
        for name, value in figures.items()
        if name.startswith("train_") and name.endswith("_per_second")
    }
    return {"train_planning_seconds": round(planning_seconds, 4), **rates}


def begin(trainer: Trainer, config: Config, sample_input: Any) -> None:
    """Wraps a trainer's model with what the trainer knows of its steps.

    Args:
        trainer: any `Trainer`, before or between runs.
        config: for the model.
        sample_input: a batch as the model gets it; None to draw one.

    Raises:
        TypeError: the trainer would put its model into `nn.DataParallel`.
        ConfigError: `step_in_backward`, a promise that a trainer does not keep.
        Exception: as `memscale.wrap`.
    """
    _refuse_what_cannot_be(trainer, config)
    optimizer = _optimizer_of(trainer)
    model = trainer.model
    assert isinstance(model, nn.Module)
    accumulates = trainer.args.gradient_accumulation_steps > 1
    drops_output = _is_own(trainer, "compute_loss", "training_step") and not (
        trainer.compute_loss_func or trainer.label_smoother
    )
    part, before = None, _settled(trainer)
    if sample_input is None and (before is not None or trainer.args.auto_find_batch_size):
        part = _fitting_part(trainer, config, optimizer, accumulates, drops_output, before)
    if part is not None:
        sample_input, accumulates = part.sample, accumulates or part.count > 1
    elif sample_input is None:
        sample_input = _first_batch(trainer)
    with _autocast(trainer):
        if optimizer is None:  # it comes with the training, and its state with it
            wrap_model(model, config, sample_input, None, accumulates, drops_output)
        else:
            with eight_bit_state(model, config, optimizer) as known:
                executor = wrap_model(model, config, sample_input, known, accumulates, drops_output)
    if trainer.optimizer is None and optimizer is not None:
        # A checkpoint may be loaded before the trainer's own acts: its state is cast to what the weights are.
        executor.in_force.await_optimizer()
    _remove_callbacks(trainer)
    follower = callback_type()(config, None if trainer.optimizer is not None else optimizer, drops_output)
    follower.settled = None if part is None else Settled(trainer, part)
    # In front: what reports figures elsewhere shall report these too.
    trainer.callback_handler.callbacks.insert(0, follower)


def _refuse_what_cannot_be(trainer: Trainer, config: Config) -> None:
    if trainer.args.n_gpu > 1 and not getattr(trainer, "is_model_parallel", False):
        raise TypeError(
            f"this Trainer sees {trainer.args.n_gpu} GPUs in one process and would put its model into "
            "nn.DataParallel, whose replicas a plan does not reach. Start one process per GPU (torchrun, "
            "accelerate launch), or let it see one (CUDA_VISIBLE_DEVICES=0)"
        )
    if config.step_in_backward:
        why = "a Trainer takes the norm of all gradients before each step: train with a loop of your own"
        raise refuse("step_in_backward", True, f"{why}, or leave it out")


def concerns(trainer: Trainer) -> bool:
    """Whether this knows what a step is: of every Trainer."""
    return True


def end(trainer: Trainer) -> bool:
    """Takes the callback off again. False: the model is to be detached yet."""
    _remove_callbacks(trainer)
    return False


def _remove_callbacks(trainer: Trainer) -> None:
    settled, callbacks = _settled(trainer), trainer.callback_handler.callbacks
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, Follower)]
    if settled is not None:
        settled.restore()


def _settled(trainer: Trainer) -> Settled | None:
    """The batch that an earlier `wrap` has settled."""
    followers = [item for item in trainer.callback_handler.callbacks if isinstance(item, Follower)]
    return followers[0].settled if followers else None


def _autocast(trainer: Trainer) -> AbstractContextManager[Any]:
    accelerator = trainer.accelerator
    lowers = accelerator.mixed_precision in ("fp16", "bf16")
    autocast: AbstractContextManager[Any] = accelerator.autocast() if lowers else nullcontext()
    return autocast


def _fitting_part(
    trainer: Trainer,
    config: Config,
    optimizer: torch.optim.Optimizer | None,
    accumulates: bool,
    drops_output: bool,
    before: Settled | None,
) -> Part | None:
    """What `auto_find_batch_size` is to run at a time; of the batch that was asked for at first."""
    lines = trainer.args.per_device_train_batch_size
    asked = lines if before is None else before.asked["per_device_train_batch_size"]
    facts = StepFacts(optimizer, grads_present=accumulates, training=True, drops_output=drops_output)
    with _autocast(trainer):
        return fitting_part(trainer, config, facts, functools.partial(_first_batch, trainer), asked)


def _is_own(trainer: Trainer, *names: str) -> bool:
    """Whether the trainer runs transformers' own methods of these names."""
    from transformers import Trainer

    own = all(getattr(type(trainer), name) is getattr(Trainer, name) for name in names)
    return own and not any(name in vars(trainer) for name in names)


def _optimizer_of(trainer: Trainer) -> torch.optim.Optimizer | None:
    """The trainer's optimizer, or one like it, without state; None if it cannot be known."""
    if trainer.optimizer is not None:
        return _inner(trainer.optimizer)
    if trainer.model_init is not None or not _is_own(trainer, "create_optimizer"):
        return None
    try:
        kind = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(
            trainer.args, trainer.model
        )
        if not kind[0].__module__.startswith("torch.optim"):  # others register hooks as they are made
            return None
        probe = copy.copy(trainer)
        probe.optimizer = None
        return probe.create_optimizer()
    except Exception as error:  # the trainer's own, which it will raise again when it trains
        log.LOGGER.debug("wrap: no optimizer from the trainer: %s: %s", type(error).__name__, error)
        return None


def _inner(optimizer: Any) -> torch.optim.Optimizer | None:
    """What accelerate's shell, or none, is around."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


# ---- the first batch -------------------------------------------------------------------------------


class _Caught(BaseException):
    """Carries the arguments of a forward out of `compute_loss`."""


def _catch(*args: Any, **kwargs: Any) -> Any:
    raise _Caught(args, kwargs)


def _why_not(trainer: Trainer) -> str:
    """Why no batch can be drawn before training; "" if one can."""
    dataset = trainer.train_dataset
    if trainer.model_init is not None:
        return "model_init makes another model"
    if dataset is None:
        return "there is no training data"
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not len(dataset):
        return "the training data is a stream"
    if trainer.args.world_size > 1:
        return "processes count their tokens together"
    if trainer.args.activation_checkpointing:
        return "the trainer switches the model's own checkpoints on as it begins"
    names = ("get_train_dataloader", "_get_dataloader", "get_batch_samples", "_prepare_inputs",
             "training_step", "compute_loss", "compute_loss_context_manager")  # fmt: skip
    if not _is_own(trainer, *names):
        return "this Trainer has methods of its own"
    return ""


def _first_batch(trainer: Trainer, lines: int | None = None) -> Any:
    """The first batch as the model will get it, or one of so many lines; or None."""
    reason = _why_not(trainer)
    if not reason:
        try:
            with _undisturbed(trainer):
                trainer._train_batch_size = lines or trainer._train_batch_size
                return _drawn(trainer)
        except Exception as error:  # the user's data or code, which will raise again in training
            reason = f"{type(error).__name__}: {error}"
    log.LOGGER.debug("wrap: the plan waits for the first batch: %s", reason)
    return None


def _drawn(trainer: Trainer) -> Any:
    loader: Any = trainer.get_train_dataloader()
    indices = next(iter(loader.batch_sampler))
    several = getattr(loader.dataset, "__getitems__", None)
    rows = several(indices) if several is not None else [loader.dataset[index] for index in indices]
    batch = loader.collate_fn(rows)
    _, items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
    inputs = trainer._prepare_inputs(batch)
    try:
        trainer.compute_loss(_catch, inputs, num_items_in_batch=items)  # type: ignore[arg-type]
    except _Caught as caught:
        args, kwargs = caught.args
        return kwargs if not args else None
    return None


@contextmanager
def _undisturbed(trainer: Trainer) -> Iterator[None]:
    """Puts back what drawing a batch changes: random generators, the trainer's and the data's attributes."""
    accelerator = trainer.accelerator
    loaders = list(accelerator._dataloaders)
    undo = [_image(trainer)]
    for value in (trainer.train_dataset, trainer.data_collator):
        for _ in range(4):  # a subset of a set of ...
            if value is None:
                break
            undo.append(_image(value))
            value = getattr(value, "dataset", None)
    model = trainer.model
    assert isinstance(model, nn.Module)
    try:
        with preserved(model):
            yield
    finally:
        for restore in undo:
            restore()
        accelerator._dataloaders[:] = loaders


def _image(value: Any) -> Callable[[], None]:
    """What puts an object's attributes back, and random generators among them."""
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    before = dict(attributes)
    generators = [_generator_image(item) for item in before.values()]

    def restore() -> None:
        for name in [name for name in attributes if name not in before]:
            del attributes[name]
        attributes.update(before)
        for restore_one in generators:
            restore_one()

    return restore


def _generator_image(value: Any) -> Callable[[], None]:
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: void(value.set_state(state))
    if isinstance(value, random.Random):
        numbers = value.getstate()
        return lambda: value.setstate(numbers)
    inner = getattr(value, "bit_generator", None)  # NumPy's
    if inner is not None and hasattr(inner, "state"):
        kept = copy.deepcopy(inner.state)
        return lambda: setattr(inner, "state", kept)
    return lambda: None


def void(_: object) -> None:
    """Drops a result."""
