# SPDX-License-Identifier: Apache-2.0
"""Warns about a loop that trains a wrapped model without calling its forward.

A plan is made where the model's forward runs, so such a loop would silently train without one. Its first step
of the optimizer tells.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from memscale import log


class UnseenForward:
    """Watches for steps without a forward before them.

    Attributes:
        has_run: the model's forward has run with gradients.
    """

    has_run = _has_warned = False

    def stepping(self, model: nn.Module, optimizer: Optimizer) -> None:
        """An optimizer is about to step. Says once where there is no plan for what it steps."""
        if self.has_run or self._has_warned:
            return
        stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        trained = [
            name
            for name, child in model.named_children()
            if any(id(weight) in stepped and weight.grad is not None for weight in child.parameters())
        ]
        if not trained:
            return
        self._has_warned = True
        log.LOGGER.warning(
            "no plan was made: an optimizer steps weights of %s, but the forward of the wrapped %s has not "
            "run. %s, such as %s",
            ", ".join(map(repr, trained[:3])) + (" …" if len(trained) > 3 else ""),
            type(model).__name__,
            *_instead(model, trained[0]),
        )


def _instead(model: nn.Module, child: str) -> tuple[str, str]:
    """What to do about it, and an example."""
    if any(kind.__name__ == "LightningModule" for kind in type(model).__mro__):
        example = "Trainer(callbacks=[memscale.integrations.lightning.MemScaleCallback(memory_budget=...)])"
        return "Give Lightning's Trainer a callback that plans training_step", example
    return "Call the model itself, or wrap what the loop calls", f"memscale.wrap(model.{child})"
