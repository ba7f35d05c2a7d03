# SPDX-License-Identifier: Apache-2.0
"""What a situation is, and what it is given: a model, a batch for each step, a place for what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sweeping import digests
from sweeping.digests import Digests
from sweeping.libraries.around_models import KINDS, Kind, loss
from sweeping.subject import seed

STEPS = 3

Wrap = Callable[[nn.Module], object]
"""What a run does with the model before it trains: `memscale.wrap`, or nothing."""


@dataclass
class Loop:
    """One run of a situation.

    Attributes:
        kind: which model.
        wrap: see `Wrap`.
        model: the first that was built.
        steps: bits, one table for each `keep`.
    """

    kind: Kind
    wrap: Wrap
    model: nn.Module | None = None
    steps: list[Digests] = field(default_factory=list)

    def built(self, prepare: Callable[[nn.Module], object] = lambda model: None) -> nn.Module:
        """A model in training mode, prepared and then wrapped."""
        seed(0)
        model = self.kind.build().train()
        prepare(model)
        self.wrap(model)
        self.model = self.model or model
        return model

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule(self.kind.block).children())

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets; generators are at the start of the step."""
        seed(1000 + number)
        return self.kind.batch(number)

    def loss(
        self, model: nn.Module, number: int, around: AbstractContextManager[Any] | None = None
    ) -> Tensor:
        """Forward of a step, in a context."""
        inputs, target = self.batch(number)
        with around or nullcontext():
            return loss(model(inputs), target)

    def keep(self, model: nn.Module, **values: Tensor | None) -> None:
        """Notes values, every gradient and buffer, and the generators."""
        named = digests.of_named("value", values.items())
        named |= digests.of_named("gradient", ((name, p.grad) for name, p in model.named_parameters()))
        named |= digests.of_named("weight", model.named_parameters())
        self.steps.append(named | digests.of_named("buffer", model.named_buffers()) | digests.of_generators())

    def train(
        self,
        model: nn.Module,
        around: Callable[[int], AbstractContextManager[Any]] = lambda number: nullcontext(),
        steps: int = STEPS,
        first: int = 0,
    ) -> None:
        """The usual loop; `around` is entered for each forward, and left before backward."""
        optimizer = sgd(model)
        for number in range(first, first + steps):
            value = self.loss(model, number, around(number))
            value.backward()
            self.keep(model, loss=value)
            optimizer.step()
            optimizer.zero_grad()


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """For the parameters that train."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2, **settings)


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            yield name, module


@dataclass(frozen=True)
class Situation:
    """Something that loops or libraries do around a model.

    Attributes:
        name: of the function, with dashes.
        run: does it.
        kinds: names of models that it is done with.
        needs: a package without which it is not run.
    """

    name: str
    run: Callable[[Loop], None]
    kinds: tuple[str, ...]
    needs: str = ""


SITUATIONS: dict[str, Situation] = {}


def situation(*kinds: str, needs: str = "") -> Callable[[Callable[[Loop], None]], Callable[[Loop], None]]:
    """Registers a function as a situation."""
    assert set(kinds) <= KINDS.keys()

    def register(run: Callable[[Loop], None]) -> Callable[[Loop], None]:
        name = run.__name__.replace("_", "-")
        SITUATIONS[name] = Situation(name, run, kinds, needs)
        return run

    return register
