# SPDX-License-Identifier: Apache-2.0
"""The optimizers that a command line can name, over a model's trainable weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from memscale.cli.problems import UsageError
from memscale.optim import take_over
from memscale.optim.cards import assume_data

__all__ = ["Lion", "make_optimizers"]

_MAKERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "adamw": ("AdamW", {}),
    "adamw-fused": ("AdamW", {"fused": True}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "adafactor": ("Adafactor", {}),
    "adagrad": ("Adagrad", {}),
    "adamax": ("Adamax", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "rmsprop": ("RMSprop", {}),
}


def make_optimizers(name: str, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of a name over a model's trainable weights; none if there are none.

    Args:
        name: one of `arguments.OPTIMIZERS`.
        model: the module.

    Raises:
        UsageError: this PyTorch does not have it, or it cannot train this model.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return ()
    return _SPECIAL[name](model, trained) if name in _SPECIAL else (_of_torch(name, *_MAKERS[name], trained),)


def _of_torch(
    name: str, kind: str, settings: dict[str, Any], trained: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    maker = getattr(torch.optim, kind, None)
    if maker is None:
        raise UsageError(f"--optimizer {name}: PyTorch {torch.__version__} has no {kind}")
    optimizer: torch.optim.Optimizer = maker(trained, **settings)
    return optimizer


def _adamw_8bit(_: nn.Module, trained: Sequence[nn.Parameter]) -> tuple[torch.optim.Optimizer, ...]:
    """AdamW with MemScale's 8-bit state, as `Config(use_8bit_optimizer=True)` makes it."""
    optimizer = torch.optim.AdamW(trained)
    with assume_data():
        reason = take_over(optimizer, convert=False)
    if reason:
        raise UsageError(f"--optimizer adamw8bit: {reason}; allowed for this model: adamw")
    return (optimizer,)


def _lion(_: nn.Module, trained: Sequence[nn.Parameter]) -> tuple[torch.optim.Optimizer, ...]:
    return (Lion(trained),)


def _muon(model: nn.Module, trained: Sequence[nn.Parameter]) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of hidden layers, AdamW for the rest: embeddings, the output head, vectors."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [module for module in model.modules() if module is output or isinstance(module, nn.Embedding)]
    kept = {id(weight) for module in outer for weight in module.parameters()}
    matrices = [weight for weight in trained if weight.dim() == 2 and id(weight) not in kept]
    if not matrices:
        raise UsageError("--optimizer muon: no trained weight is a matrix of a hidden layer; give adamw")
    hidden = {id(weight) for weight in matrices}
    rest = [weight for weight in trained if id(weight) not in hidden]
    muon = _of_torch("muon", "Muon", {}, matrices)
    return (muon, torch.optim.AdamW(rest)) if rest else (muon,)


_SPECIAL: Final[
    dict[str, Callable[[nn.Module, Sequence[nn.Parameter]], tuple[torch.optim.Optimizer, ...]]]
] = {"adamw8bit": _adamw_8bit, "lion": _lion, "muon": _muon}


class Lion(torch.optim.Optimizer):
    """Lion, which PyTorch does not have: the sign of a momentum, kept in the weight's own precision.

    Settings and state are those of lion-pytorch, so that 8-bit state and plans treat both alike.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        moment = state["exp_avg"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        update = moment.clone().mul_(first).add_(gradient, alpha=1 - first).sign_()
        parameter.add_(update, alpha=-group["lr"])
        moment.mul_(second).add_(gradient, alpha=1 - second)
