# SPDX-License-Identifier: Apache-2.0
"""The steps of a LightningModule, run by a plan's trace without a trace of it in the trainer.

A trace runs `training_step` on fakes. Meanwhile the module's `log`, its loggers and, in manual optimization,
its optimizers and schedulers are replaced on the instance:

    log, log_dict, print        do nothing
    trainer.loggers             dummies of Lightning's own
    optimizers(), lr_schedulers()   look like the real ones; `step` and `zero_grad` do nothing
    manual_backward(loss)       notes the loss; backward of all of them follows at the end of the step

So a step with several backward calls is planned as if their graphs were there at the same time.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from memscale.core.wrapping import executor_of
from memscale.errors import ProfileError
from memscale.torchkit.forward_slot import StandIn

PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
"""Names under which Lightning is imported, each with classes of its own."""

_SILENT: Final = ("log", "log_dict", "print")
"""What a step writes to the trainer with."""

_MANUAL: Final = ("toggle_optimizer", "untoggle_optimizer", "clip_gradients")
"""What a step of manual optimization does with optimizers beside stepping them."""


def is_lightning(module: object) -> bool:
    """Whether this is a LightningModule, of either package."""
    names = {f"{package}.core.module" for package in PACKAGES}
    return any(
        kind.__name__ == "LightningModule" and kind.__module__ in names for kind in type(module).__mro__
    )


class LightningStep(StandIn):
    """Lies beneath the executor's watch, before a step of a LightningModule."""

    calls_through = stays_when_rebound = True
    _had_no_loss = False

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__(module, original)
        # With `self`: Lightning looks at the parameters of what a watched step has as `__wrapped__`, but the
        # first.
        self.__signature__ = inspect.signature(getattr(original, "__func__", original))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; where a plan asks for it, without side effects."""
        executor = executor_of(self.module)
        if executor is None or not executor.idle:
            output = self.original(*args, **kwargs)
            if output is None and self._had_no_loss and executor is not None:
                executor.forget_failure()  # a batch that the step skips says nothing of the next one
            self._had_no_loss = False
            return output
        with unseen(self.module) as losses:
            output = self.original(*args, **kwargs)
        if not torch.is_grad_enabled():  # evaluation
            return output
        if not self.module.automatic_optimization:
            return _sum_of(losses)
        self._had_no_loss = output is None
        if output is None:
            raise ProfileError("training_step has returned no loss for this batch")
        return output


def _sum_of(losses: list[Tensor]) -> Tensor:
    """The loss of a step of manual optimization."""
    if not losses:
        raise ProfileError(
            "training_step of manual optimization has called backward by itself, or not at all: call "
            "self.manual_backward(loss), or wrap the module that it trains, such as memscale.wrap(self.net)"
        )
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


@contextmanager
def unseen(module: nn.Module) -> Iterator[list[Tensor]]:
    """Runs the block without side effects on the module's trainer.

    Yields:
        The losses that `manual_backward` is given inside the block.
    """
    losses: list[Tensor] = []
    trainer: Any = module.trainer
    with ExitStack() as stack:
        for part in filter(is_lightning, module.modules()):
            for name in _SILENT:
                stack.enter_context(_replaced(vars(part), name, _nothing))
        loggers = trainer.loggers
        stack.callback(setattr, trainer, "loggers", loggers)
        trainer.loggers = [_dummy_logger(module) for _ in loggers]
        for optimizer in trainer.optimizers:
            hook = getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(_refuse_step)
            stack.callback(hook.remove)
        if not module.automatic_optimization:
            for name, value in _of_manual_steps(module, losses).items():
                stack.enter_context(_replaced(vars(module), name, value))
        yield losses


def _of_manual_steps(module: Any, losses: list[Tensor]) -> dict[str, Callable[..., Any]]:
    """What takes the place of the methods that manual optimization calls."""
    optimizers, schedulers = module.optimizers, module.lr_schedulers

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss)

    return {
        "manual_backward": backward,
        "optimizers": lambda *args, **kwargs: _stilled(optimizers(*args, **kwargs)),
        "lr_schedulers": lambda: _stilled(schedulers()),
        **dict.fromkeys(_MANUAL, _nothing),
    }


def _stilled(items: Any) -> Any:
    if isinstance(items, (list, tuple)):
        return [_Still(item) for item in items]
    return None if items is None else _Still(items)


class _Still:
    """An optimizer or a scheduler that is looked at, and does nothing.

    Args:
        real: the one that it looks like.
    """

    def __init__(self, real: Any) -> None:
        self._real = real

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Copies: a step may set a learning rate there."""
        return [dict(group) for group in self._real.param_groups]

    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Calls a closure, which is a part of the step; a scheduler's metric is none."""
        return closure() if callable(closure) else None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    @contextmanager
    def toggle_model(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Gradients of the parameters of all optimizers are counted."""
        yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _refuse_step(*args: Any) -> NoReturn:
    raise ProfileError(
        "training_step steps an optimizer that it has not from self.optimizers(), and a step cannot be "
        "planned that does: use self.optimizers(), or wrap the module that it trains"
    )


def _dummy_logger(module: nn.Module) -> Any:
    """A logger of the package that the module comes from."""
    kinds = [kind.__module__ for kind in type(module).__mro__ if kind.__name__ == "LightningModule"]
    package = next(name for name in PACKAGES if any(kind.startswith(f"{name}.") for kind in kinds))
    return importlib.import_module(f"{package}.loggers.logger").DummyLogger()


@contextmanager
def _replaced(place: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Has an attribute of an instance replaced inside the block."""
    before = place.get(name, _nothing)
    is_there = name in place
    place[name] = value
    try:
        yield
    finally:
        if is_there:
            place[name] = before
        else:
            del place[name]
