# SPDX-License-Identifier: Apache-2.0
"""The facts that decide a step's memory beside model and batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale.hardware.target import CPU, Target
from memscale.techniques.left_out import NOTHING_LEFT_OUT, LeftOut
from memscale.techniques.optimizer.path import AS_IT_IS, OptimizerPath
from memscale.techniques.precision.loss_scale_outputs import evaluated
from memscale.torchkit.forward_slot import StandIn
from memscale.torchkit.output_use import LossBytes, OutputUse


@dataclass
class StepFacts:
    """What decides a step's memory beside model and batch.

    Attributes:
        optimizer: the optimizer in use, or None: AdamW is assumed.
        others: further optimizers that step parameters of the model, each others than the rest.
        grads_present: gradients exist before forward (accumulation, or `zero_grad(set_to_none=False)`).
        carried_bytes: storages of the previous step's output that are still referenced.
        kept: what the model holds of the previous step, see `step.Trace`.
        holds_gradients: those of the outputs live until backward is over, so that it can be repeated.
        training: None leaves every module's flag; otherwise `train(training)` for the trace.
        target: the device that the step is traced for.
        forward: what runs the model; None for calling it. In the middle of a call, its own forward:
            wrappers and hooks above it have seen this batch, and must not see it twice.
        watch: the executor's stand-in for the model's forward; None where there is none.
        may_change_optimizer: the caller has named it, for techniques that change how it steps.
        path: what the optimizer-side techniques change that the step is traced with.
        staying: names of optimizer-side techniques that are in force, and are not to be taken off for
            another plan.
        forwards: of the model, before the one backward. All of them are traced with the batch at hand.
        differed: paths of modules whose recompute has differed from its forward in this run.
        left_out: what techniques leave alone, `differed` included.
        use: what the loop does with the outputs; None: not known, see `output_use`.
        loss: what the loop makes of the output of its one forward; None: not known, see `trace.loss`.
        loss_bytes: what the loop's loss has taken, where that is not what traces assume.
        differentiates_twice: the loss goes through gradients, see `trace.step_loss`.
        drops_output: the loop has the loss alone when backward begins, as transformers' Trainer.
        held: which outputs of its one forward the loop holds then, a flag per tensor; None: not known, all
            unless it `drops_output`.
        beside: what a loss outside of the model holds beside the outputs, as a share of their bytes.
        gradients: False: one forward without gradients, and no optimizer but those named here.
    """

    optimizer: torch.optim.Optimizer | None = None
    others: tuple[torch.optim.Optimizer, ...] = ()
    grads_present: bool = False
    carried_bytes: tuple[int, ...] = ()
    kept: tuple[tuple[int, int], ...] = ()
    holds_gradients: bool = False
    training: bool | None = None
    target: Target = CPU
    forward: Callable[..., Any] | None = None
    watch: StandIn | None = None
    may_change_optimizer: bool = True
    path: OptimizerPath = AS_IT_IS
    staying: frozenset[str] = frozenset()
    forwards: int = 1
    differed: frozenset[str] = frozenset()
    left_out: LeftOut = NOTHING_LEFT_OUT
    use: OutputUse | None = None
    loss: Callable[[Any], Any] | None = None
    loss_bytes: LossBytes | None = None
    differentiates_twice: bool = False
    drops_output: bool = False
    held: tuple[bool, ...] | None = None
    beside: float = 0.0
    gradients: bool = True

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward."""
        forward = model if self.forward is None else self.forward
        if self.gradients:
            return forward(*args, **kwargs)
        with torch.no_grad():
            if self.path.half:
                return evaluated(self.target.kind, forward, args, kwargs)
            return forward(*args, **kwargs)
