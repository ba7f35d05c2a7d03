# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning: a callback that plans the steps of a LightningModule for the time of a fit.

    on_fit_start     what does not go together is refused
    on_train_start   attached: what is planned and watched is `training_step`, which includes the loss; the
                     optimizer has the state of its checkpoint by now. `validation_step` and the like are
                     looked at before they run, as every forward without gradients
    first batch      planned, before it runs
    on_train_end     detached, before Lightning moves model and state to the CPU; also after an error

`training_step` is what Lightning calls; it never calls the module itself.
"""

from __future__ import annotations

import functools
import importlib
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

import memscale
from memscale import log
from memscale.config.checks import refuse
from memscale.config.config import Config
from memscale.core.arguments import effective_config, merged
from memscale.core.eight_bit_state import eight_bit_state, give_back_of
from memscale.core.executor import Executor
from memscale.core.watched_forward import WatchedForward
from memscale.core.wrapping import begin as wrap_model
from memscale.core.wrapping import executor_of
from memscale.integrations.lightning_step import PACKAGES, LightningStep
from memscale.recording.current import CURRENT, record_logged, resume_from, state_to_save
from memscale.torchkit.forward_slot import ForwardSlot
from memscale.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from memscale.plans.plan import Plan

__all__ = ["MemScaleCallback"]

_STEP: Final = "training_step"

_EVALUATIONS: Final = ("validation_step", "test_step", "predict_step")

_STATE_VERSION: Final = 1


class MemScaleCallback:
    """Makes a LightningModule's training steps fit a memory budget, from the start of a fit to its end.

    It is a callback of the package that is imported, `lightning.pytorch` or `pytorch_lightning`, or of both.
    Import the one whose Trainer it is for first.

    Args:
        config: what to do; None for the defaults (85 % of the device's memory).
        sample: one training batch as `training_step` gets it, or a callable that returns one, to plan for
            before the first step; None plans for the first batch.
        **fields: fields of `Config`, as keywords.

    Attributes:
        config: what it plans with.
        plan: the latest plan, also after the fit; None before the first.
        restored: what a checkpoint had of an earlier run: its plan, and what was not recomputed.

    Raises:
        ImportError: neither package is installed.
        ConfigError: contradictory settings, or `step_in_backward`, a promise that Lightning does not keep.

    Example:
        >>> trainer = lightning.pytorch.Trainer(callbacks=[MemScaleCallback(memory_budget="8GiB")])
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of a class that is a callback, too."""
        kind: Any = cls
        return super().__new__(_callback_class(kind, _packages()))

    def __init__(self, config: Config | None = None, sample: Any = None, **fields: Any) -> None:
        self.config = effective_config(merged(config, fields))
        if self.config.step_in_backward:
            why = "Lightning gives each step of an optimizer a closure: train with a loop of your own"
            raise refuse("step_in_backward", True, f"{why}, or leave it out")
        self.sample = sample
        self.plan: Plan | None = None
        self.restored: dict[str, Any] = {}
        self.is_guest = False
        self._differed: set[str] = set()
        self._module: nn.Module | None = None
        self._undo = ExitStack()
        self._has_warned = False

    def __reduce__(self) -> Any:
        kept = {name: self.__dict__[name] for name in ("sample", "is_guest", "restored", "_differed")}
        return _made_again, (_plain_class(type(self)), self.config, kept)

    # ---- Lightning's hooks -----------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses what does not go together, before anything runs."""
        self._check(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Takes the module over, and its optimizers with the state that they go on from."""
        self.attach(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Frees gradients that Lightning frees in the middle of this step, before anything reads them."""
        if self._module is None or not self._frees_early(trainer, pl_module, batch_idx):
            return
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the plan, and records what is logged, as often as loggers are given it."""
        self._note_plan()
        if CURRENT.run is not None and (batch_idx + 1) % max(trainer.log_every_n_steps, 1) == 0:
            record_logged(trainer.logged_metrics, max(trainer.global_step - 1, 0))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Records what validation has logged."""
        if CURRENT.run is not None and not trainer.sanity_checking:
            record_logged(trainer.logged_metrics, max(trainer.global_step - 1, 0))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Takes everything back."""
        self.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Takes everything back."""
        self.detach()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Takes everything back, where nothing has yet."""
        self.detach()
        if self.is_guest:  # another list: Lightning walks this one
            trainer.callbacks = [item for item in trainer.callbacks if item is not self]

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: plan, settings, and what is not recomputed any more. Plain data."""
        self._note_plan()
        plan = self.plan
        if plan is None:
            return dict(self.restored)
        return {
            "version": _STATE_VERSION,
            "memscale": memscale.__version__,
            "config": self.config.to_json(indent=None),
            "digest": plan.digest,
            "plan": plan.to_json(),
            "peak_bytes": plan.predicted.device_used_peak_bytes,
            "not_recomputed": sorted(self._differed),
            **({} if (recording := state_to_save()) is None else {"recording": recording}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What an earlier run has learned: recomputes that differed are not tried again."""
        self.restored = dict(state_dict)
        self._differed = set(self.restored.get("not_recomputed", ()))

    # ---- the module ------------------------------------------------------------------------------

    def attach(self, trainer: Any, module: Any) -> None:
        """Wraps a module for its trainer's steps. Either all of it succeeds or the module is as it was."""
        self.detach()
        with ExitStack() as stack:
            self._put(stack, module, _STEP)
            executor = self._wrap(trainer, module)
            stack.callback(give_back_of, module)
            stack.callback(_stop, module, executor)
            for optimizer in trainer.optimizers:
                executor.note_optimizer(optimizer)
            resume_from(self.restored.get("recording"))
            for name in _EVALUATIONS:
                if _is_overridden(module, name):
                    self._put(stack, module, name, executor)
            for path in sorted(self._differed):
                executor.keep_module(path, "a recompute of it has differed before")
            self._undo, self._module = stack.pop_all(), module

    def detach(self) -> bool:
        """Takes everything back: module, optimizers and trainer are as they would be.

        Returns:
            Whether there was anything to take back.
        """
        if self._module is None:
            return False
        self._note_plan()
        self._module = None
        with uninterrupted():
            self._undo.close()
        return True

    def is_of(self, module: nn.Module) -> bool:
        """Whether it is attached to this module."""
        return self._module is module

    def _wrap(self, trainer: Any, module: Any) -> Executor:
        """Wraps a module with what its trainer knows of its steps."""
        optimizers = list(trainer.optimizers)
        numbered = len(_parameters_of(module)) > 1
        sample = None if self.sample is None else _as_arguments(self.sample, numbered)
        accumulates = trainer.accumulate_grad_batches > 1
        wrapped = functools.partial(wrap_model, method=_STEP, numbered=numbered)
        with trainer.precision_plugin.train_step_context():
            if len(optimizers) == 1:
                with eight_bit_state(module, self.config, optimizers[0]) as known:
                    return wrapped(module, self.config, sample, known, accumulates)
            if self.config.use_8bit_optimizer:
                log.LOGGER.info("8-bit optimizer state: not used, there are %d optimizers", len(optimizers))
            return wrapped(module, self.config, sample, None, accumulates)

    def _put(self, stack: ExitStack, module: Any, name: str, executor: Executor | None = None) -> None:
        """Lets a step of the module be traced without side effects; with an executor, watched as well."""
        kinds: list[Any] = [LightningStep]
        if executor is not None:
            kinds.append(functools.partial(_watch, executor))
        for kind in kinds:
            slot = ForwardSlot(module, "", method=name)
            slot.put(kind(module, slot.present))
            stack.callback(slot.remove)

    def _note_plan(self) -> None:
        executor = None if self._module is None else executor_of(self._module)
        if executor is not None and executor.planned is not None:
            self.plan = executor.planned.plan
            self._differed |= executor.planned.left_out.differed

    def _frees_early(self, trainer: Any, module: Any, batch_idx: int) -> bool:
        """Whether Lightning zeroes gradients in this step, and nobody looks at them before."""
        executor = executor_of(module)
        if executor is None or executor.planned is None or executor.planned.trace.changes.uses_gradients:
            return False
        if not module.automatic_optimization or trainer.strategy.handles_gradient_accumulation:
            return False
        if batch_idx % trainer.accumulate_grad_batches:
            return False
        hooks = [(module, "optimizer_zero_grad"), (module, "on_before_zero_grad")]
        hooks += [(callback, "on_before_zero_grad") for callback in trainer.callbacks]
        return not any(_is_overridden(*hook) for hook in hooks)

    def _check(self, trainer: Any, module: Any) -> None:
        asked = "use_mixed_precision" in self.config.explicit and self.config.use_mixed_precision
        if asked and trainer.precision != "32-true":
            other = f"the Trainer has precision={trainer.precision!r}: leave one of the two out"
            raise refuse("use_mixed_precision", True, other)
        if "dataloader_iter" in _parameters_of(module):
            raise TypeError(
                f"{type(module).__name__}.{_STEP}(dataloader_iter) draws its own batches, and a plan would "
                "take one from the training. Take a batch as an argument, or wrap the module that it trains"
            )
        if self._has_warned or not any(type(it).__name__ == "BatchSizeFinder" for it in trainer.callbacks):
            return
        self._has_warned = True
        log.LOGGER.warning(
            "BatchSizeFinder tries batches without a plan, until one does not fit: "
            "memscale.autotuning.AutoTuner finds the fastest batch that fits, and runs none that does not"
        )


# ---- memscale.wrap(self) inside a LightningModule ----------------------------------------------------


def concerns(module: Any) -> bool:
    """Whether a trainer is about to train this module, or does: else it is wrapped as any other."""
    trainer = vars(module).get("_trainer")
    return trainer is not None and vars(module).get("_fabric") is None and bool(trainer.training)


def begin(module: Any, config: Config, sample_input: Any) -> None:
    """Plans the steps of a module's trainer until the end of this fit, as with the callback.

    Args:
        module: a LightningModule in a fit: in `configure_model`, `setup`, `on_fit_start` or later.
        config: what to do.
        sample_input: a batch as `training_step` gets it; None for the first one.

    Raises:
        ConfigError: as the callback.
    """
    trainer = module.trainer
    end(module)
    callback = MemScaleCallback(config, sample_input)
    callback.is_guest = True
    others = [item for item in trainer.callbacks if not _is_guest(item)]
    trainer.callbacks = [callback, *others]
    if trainer.strategy.model is not None and trainer.optimizers:  # `on_fit_start` of callbacks is over
        callback.on_fit_start(trainer, module)
        callback.attach(trainer, module)


def end(module: Any) -> bool:
    """Detaches a module from its callback. Returns whether there was one."""
    trainer = vars(module).get("_trainer")
    found = [] if trainer is None else [it for it in trainer.callbacks if isinstance(it, MemScaleCallback)]
    ended = [callback.detach() for callback in found if callback.is_of(module)]
    if any(map(_is_guest, found)):
        trainer.callbacks = [item for item in trainer.callbacks if not _is_guest(item)]
    return any(ended)


def _is_guest(callback: Any) -> bool:
    return isinstance(callback, MemScaleCallback) and callback.is_guest


# ---- what Lightning has ------------------------------------------------------------------------------


def _packages() -> tuple[str, ...]:
    """Lightning's packages that are imported; else the first that is installed."""
    present = tuple(name for name in PACKAGES if name in sys.modules)
    if present:
        return present
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return (name,)
    raise ImportError("MemScaleCallback needs Lightning: pip install 'lightning>=2.6.4'")


@functools.cache
def _callback_class(kind: type, packages: tuple[str, ...]) -> type:
    """A class that is a callback of each of the packages."""
    bases = tuple(importlib.import_module(name).Callback for name in packages)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, *bases), {**names, "_memscale_plain": kind})


def _plain_class(kind: type) -> type:
    plain: type = getattr(kind, "_memscale_plain", kind)
    return plain


def _made_again(kind: type, config: Config, kept: dict[str, Any]) -> Any:
    """A callback in another process, which attaches there by itself."""
    callback = kind(config)
    vars(callback).update(kept)
    return callback


def _watch(executor: Executor, module: nn.Module, original: Any) -> WatchedForward:
    return WatchedForward(executor, original)


def _stop(module: nn.Module, executor: Executor) -> None:
    """Stops an executor, if nobody has yet, or wrapped the module anew."""
    if executor_of(module) is executor:
        executor.stop()


def _is_overridden(item: Any, name: str) -> bool:
    """Whether a module or callback has a method of its own, and not Lightning's."""
    own = getattr(type(item), name, None)
    home = getattr(own, "__module__", "")
    return name in vars(item) or (own is not None and not home.startswith(PACKAGES))


def _parameters_of(module: Any) -> list[str]:
    code = getattr(getattr(module, _STEP), "__code__", None)
    return [] if code is None else list(code.co_varnames[1 : code.co_argcount])


def _as_arguments(sample: Any, numbered: bool) -> tuple[Any, ...]:
    """A batch as the arguments of `training_step`: the number of the batch is the second."""
    batch = sample() if callable(sample) and not isinstance(sample, torch.Tensor) else sample
    return (batch, 0) if numbered else (batch,)
