# SPDX-License-Identifier: Apache-2.0
"""The optimizer's part of a traced step: its state before the step, its temporaries in the step.

A copy of the real optimizer (or an AdamW, when none is known yet) works on fake parameters. Optimizers that
go through parameters one by one are run on one representative of each shape, and the others' state is
counted; the peak is the same and a model with a thousand parameters is traced as fast as one with ten.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale import _core

if TYPE_CHECKING:
    from memscale.core.graph_builder import GraphRecorder
    from memscale.core.tracer import StepFacts

FakeOf = Callable[[Tensor], Tensor | None]
"""The fake of a real tensor, or None."""


def _fake_state(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The fake of a state tensor. A step counter keeps its value: optimizers read it."""
    if tensor.numel() == 1 and tensor.device.type == "cpu":
        return torch.tensor(tensor.item(), dtype=tensor.dtype)
    fake: Tensor = parameter.fake_mode.from_tensor(tensor)  # type: ignore[attr-defined]
    return fake


class FakeOptimizer:
    """One optimizer on fake parameters.

    Attributes:
        notes: remarks for the log.
    """

    def __init__(
        self, recorder: GraphRecorder, parameters: Sequence[nn.Parameter], step: StepFacts, fake_of: FakeOf
    ) -> None:
        self.recorder = recorder
        self.notes: list[str] = []
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer | None = None
        if not self.parameters:
            return
        recorder.paused = True
        try:
            self._prepare(self._copy(step.optimizer, fake_of))
        except Exception as error:
            # An optimizer that cannot work on fakes (one that needs a closure, say) must not end the profile.
            self.notes.append(
                f"{type(step.optimizer).__name__} cannot be traced ({type(error).__name__}: {error}); "
                "AdamW is assumed"
            )
            self._prepare(torch.optim.AdamW(self.parameters))
        finally:
            recorder.paused = False

    def _copy(self, real: torch.optim.Optimizer | None, fake_of: FakeOf) -> torch.optim.Optimizer:
        if real is None:
            return torch.optim.AdamW(self.parameters)
        twin = copy.copy(real)
        own = twin.__dict__
        for name in ("step", "zero_grad"):  # learning-rate schedulers wrap these on the instance
            own.pop(name, None)
        for name in [name for name in own if name.endswith("_hooks")]:
            own[name] = OrderedDict()
        twin.param_groups = []
        for group in real.param_groups:
            fakes = [fake_of(parameter) for parameter in group["params"]]
            twin.param_groups.append({**group, "params": [fake for fake in fakes if fake is not None]})
        twin.state = defaultdict(dict)
        for parameter, state in real.state.items():
            fake = fake_of(parameter)
            if fake is not None:
                twin.state[fake] = tree_map_only(Tensor, functools.partial(_fake_state, fake), dict(state))
        return twin

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Brings the state into being, unrecorded, and declares it."""
        covered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        covered = [parameter for parameter in covered if parameter.requires_grad]
        self.alike = self._representatives(optimizer, covered)
        try:
            missing = [parameter for parameter in self.alike if not optimizer.state.get(parameter)]
            if missing:
                for parameter in missing:
                    parameter.grad = torch.empty_like(parameter)
                optimizer.step()
        finally:
            for parameter in self.parameters:
                parameter.grad = None
        for parameter, count in self.alike.items():
            for leaf in tree_leaves(optimizer.state.get(parameter, {})):
                if isinstance(leaf, Tensor):
                    self.recorder.resident(leaf, _core.CATEGORY_OPTIMIZER_STATE)
                    for _ in range(count - 1):
                        size = leaf.untyped_storage().nbytes()
                        self.recorder.graph.add_resident(size, _core.CATEGORY_OPTIMIZER_STATE)
        self.optimizer = optimizer

    @staticmethod
    def _representatives(
        optimizer: torch.optim.Optimizer, covered: Sequence[nn.Parameter]
    ) -> dict[nn.Parameter, int]:
        """Parameters to run the optimizer on, each with the number of parameters that it stands for."""
        one_by_one = type(optimizer).__module__.startswith("torch.optim") and not any(
            group.get("foreach") for group in optimizer.param_groups
        )
        if not one_by_one or any(parameter.device.type != "cpu" for parameter in covered):
            return dict.fromkeys(covered, 1)
        first: dict[Any, nn.Parameter] = {}
        counts: dict[nn.Parameter, int] = {}
        for parameter in covered:
            key = (tuple(parameter.shape), parameter.dtype)
            chosen = first.setdefault(key, parameter)
            counts[chosen] = counts.get(chosen, 0) + 1
        return counts

    def step(self) -> None:
        """Records one step. Gradients must be in place; they stay alive during the step."""
        if self.optimizer is None:
            return
        gradients = {parameter: parameter.grad for parameter in self.parameters}
        elements = sum(parameter.numel() for parameter in self.parameters if parameter.grad is not None)
        shown = sum(parameter.numel() for parameter in self.alike if parameter.grad is not None)
        for parameter in self.parameters:
            if parameter not in self.alike:
                parameter.grad = None
        self.recorder.cost_scale = elements / shown if shown else 1.0
        try:
            self.optimizer.step()
        except Exception as error:  # sparse gradients and a dense optimizer, say: the user's own will fit
            self.notes.append(f"the optimizer step is not in the plan ({type(error).__name__}: {error})")
        self.recorder.cost_scale = 1.0
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
