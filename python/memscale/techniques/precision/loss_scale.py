# SPDX-License-Identifier: Apache-2.0
"""The loss scale of a model whose forward runs in FP16, by the rules of `torch.amp.GradScaler`.

Gradients of FP16 activations below 6e-8 are zero. So backward runs on S times the loss, and gradients are
divided by S, in FP32, before anybody sees them. S is a power of two: both are exact. Where something
overflowed all the same, the optimizer's step is skipped and S halved; after 2000 good steps in a row S is
doubled.

    loss_scale_outputs    what the model returns, in FP32
    loss_scale_backward   backward on S times the loss; gradients of leaves divided by S
    loss_scale_step       the steps of optimizers; those with gradients that are not finite are skipped

S belongs to the model, and is saved and loaded with the state of its optimizer.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

_LOGGER = logging.getLogger("memscale")

_INITIAL: Final = 65536.0
GROWTH_INTERVAL: Final = 2000
_LARGEST: Final = 2.0**126  # its reciprocal is the smallest normal FP32 number
_SMALLEST: Final = 2.0**-126

STATE_KEY: Final = "memscale_loss_scale"
"""Under which the scale lies in the state of an optimizer."""


class LossScale:
    """The scale of one model.

    Args:
        model: whose forward runs in FP16.
        optimizer: that trains it.
        growth_interval: good steps until S is doubled.

    Attributes:
        value: the factor S.
        good_steps: since S was changed last.
        armed: the latest forward that was to be differentiated ran under MemScale's autocast. False: under
            one that the loop has opened, and the loop scales.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, growth_interval: int = GROWTH_INTERVAL
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self.value, self.growth_interval = _INITIAL, growth_interval
        self.good_steps = 0
        self.armed = True
        self._backwards = 0
        self._counted = 0  # backwards at the latest good step, and at the latest bad one
        self._lowered = 0
        self._judged: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._saved_with: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()
        self._places = 0
        self._gone: weakref.finalize[Any, Any] | None = None

    # ---- in force while a technique is attached --------------------------------------------------

    def open(self, when_gone: Callable[[], None]) -> None:
        """In force from now on, until `close` has been called as often.

        Args:
            when_gone: called if it goes before, with a model that was never detached.
        """
        self._places += 1
        _in_force[self] = None
        if self._gone is None:
            self._gone = weakref.finalize(self, when_gone)
            self._gone.atexit = False
        optimizer = self._optimizer()
        if optimizer is not None:
            self._save_with(optimizer)

    def close(self) -> None:
        """Undoes one `open`."""
        self._places -= 1
        if not self._places:
            _in_force.pop(self, None)
            if self._gone is not None:
                self._gone.detach()
                self._gone = None
            for handles in self._saved_with.values():
                for handle in handles:
                    handle.remove()
            self._saved_with.clear()

    def take_over(self, other: LossScale | str) -> None:
        """Goes on where another one has got to."""
        if isinstance(other, LossScale):
            self.value, self.good_steps = other.value, other.good_steps

    # ---- what it concerns ------------------------------------------------------------------------

    def concerns(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of these is trained with this scale: a weight of the model or of its optimizer."""
        model, optimizer = self._model(), self._optimizer()
        mine = set() if model is None else {id(value) for value in model.parameters() if value.requires_grad}
        if optimizer is not None:
            mine |= {id(value) for value in weights_of(optimizer)}
        return any(id(tensor) in mine for tensor in tensors)

    # ---- S as it goes ----------------------------------------------------------------------------

    def count_backward(self) -> None:
        """A backward is about to add to gradients."""
        self._backwards += 1

    def is_due(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer is about to use gradients that nobody has looked at."""
        return self._judged.get(optimizer, 0) < self._backwards

    def judge(self, optimizer: Optimizer, finite: bool) -> None:
        """What has been found in the gradients of an optimizer. Several of them count as one step."""
        self._judged[optimizer] = self._backwards
        self._save_with(optimizer)
        first, self._counted = self._counted < self._backwards, self._backwards
        if finite:
            self.good_steps += first
            if self.good_steps == self.growth_interval:
                self.value, self.good_steps = min(2 * self.value, _LARGEST), 0
        elif self._lowered < self._backwards:
            self._lowered, self.good_steps = self._backwards, 0
            self.value = max(self.value / 2, _SMALLEST)
            say = _LOGGER.warning if self.value < 1 else _LOGGER.info
            say("loss scale: a gradient overflowed, the step is skipped; the scale is %g now", self.value)

    # ---- saved and loaded ------------------------------------------------------------------------

    def _save_with(self, optimizer: Optimizer) -> None:
        if optimizer not in self._saved_with:
            self._saved_with[optimizer] = [
                optimizer.register_state_dict_post_hook(self._saved),
                optimizer.register_load_state_dict_pre_hook(self._loaded),
            ]

    def _saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        state[STATE_KEY] = {"scale": self.value, "good_steps": self.good_steps}

    def _loaded(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        known = state.get(STATE_KEY)
        if known is not None:
            self.value, self.good_steps = float(known["scale"]), int(known["good_steps"])


_in_force: weakref.WeakKeyDictionary[LossScale, None] = weakref.WeakKeyDictionary()

NO_OPTIMIZER: Final = (
    "FP16 needs the loss scaled, and steps skipped whose gradients overflow: name the optimizer, as in "
    "memscale.wrap(model, config, optimizer=optimizer)"
)


def active() -> list[LossScale]:
    """The scales in force. Not one that is just going, and another thread may open one meanwhile."""
    return [scale for ref in _in_force.keyrefs() if (scale := ref()) is not None]


_known: weakref.WeakKeyDictionary[nn.Module, LossScale | str] = weakref.WeakKeyDictionary()
"""Model → its scale, or why there is none."""


def weights_of(optimizer: Optimizer) -> list[Tensor]:
    """What an optimizer trains."""
    return [value for group in optimizer.param_groups for value in group["params"]]


def scale_for(model: nn.Module, optimizer: Optimizer | None) -> LossScale | str:
    """A scale for a model that is trained by an optimizer, or why there can be none."""
    if optimizer is None:
        return NO_OPTIMIZER
    return optimizer_refusal(optimizer) or LossScale(model, optimizer)


def scale_of(model: nn.Module) -> LossScale | str:
    """The scale of a model, or why it has none."""
    return _known.get(model, NO_OPTIMIZER)


def enter(model: nn.Module, scale: LossScale | str) -> None:
    """From now on this is the scale of a model, or why it has none."""
    _known[model] = scale


def forget(model: nn.Module) -> None:
    """The model is not wrapped any more."""
    _known.pop(model, None)


@contextmanager
def entered(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Runs the block with a scale for a model that has not been wrapped; a wrapped one keeps what it has."""
    if model in _known:
        yield
        return
    enter(model, scale_for(model, optimizer))
    try:
        yield
    finally:
        forget(model)


def optimizer_refusal(optimizer: Optimizer) -> str:
    """Why steps of this optimizer cannot be skipped; "" if they can."""
    if isinstance(optimizer, LBFGS):
        return "LBFGS computes the loss several times in a step, which cannot be skipped as a whole"
    if not getattr(type(optimizer).step, "hooked", False):
        return f"{type(optimizer).__name__} runs no hooks before a step, so that none could be skipped"
    return ""
