# SPDX-License-Identifier: Apache-2.0
"""The stand-in for a wrapped model's forward, which shows each batch to the executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memscale.core.wrapped import FORWARD_OBSERVERS
from memscale.techniques.checkpoint.call_kinds import evaluates, runs_plain
from memscale.torchkit.compiled import outside_compiler
from memscale.torchkit.forward_slot import StandIn

if TYPE_CHECKING:
    from memscale.core.evaluation import Evaluations
    from memscale.core.learned_loop import LearnedLoop
    from memscale.core.unseen_forward import UnseenForward
    from memscale.core.wrapped import Wrapped
    from memscale.survival.watch import OomWatch
    from memscale.techniques.precision.bf16_weights import Bf16Weights
    from memscale.torchkit.open_graph import OpenGraphs

    class _Planning(Wrapped, Protocol):
        """What looks at each batch before it runs: the executor."""

        evaluations: Evaluations
        unseen: UnseenForward
        oom: OomWatch
        learned: LearnedLoop
        open: OpenGraphs

        @property
        def awaits_batch(self) -> bool: ...

        @property
        def half(self) -> Bf16Weights | None: ...

        @property
        def failures(self) -> int: ...

        def forget_failure(self) -> None: ...

        def before_forward(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> None: ...

        def after_forward(self, output: Any) -> None: ...


def _is_exported() -> bool:
    """Whether `torch.export` runs the model, on fakes, which are nothing to plan for."""
    asked = getattr(torch.compiler, "is_exporting", None)
    return asked is not None and asked()


class WatchedForward(StandIn):
    """Stands in for the wrapped model's `forward`."""

    calls_through = stays_when_rebound = True

    def __init__(self, executor: _Planning, original: Callable[..., Any]) -> None:
        super().__init__(executor.model, original)
        self.executor = executor

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original, for accelerate, which finds its way back to a model's own forward by this name."""
        return self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward, planned."""
        if torch.compiler.is_compiling():  # traced: nothing can be looked at here
            waits = self.executor.awaits_batch and not self.passive and not _is_exported()
            if waits and torch.is_grad_enabled():
                outside_compiler(self.executor.before_forward, self.run_original, args, kwargs)
            half = self.executor.half
            if half is not None and not self.passive and not torch.is_grad_enabled():
                return half.evaluate(self.run_original, args, kwargs)
            return self.run_original(*args, **kwargs)
        with self.executor.callers.inside():
            return self._run(args, kwargs)

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward that no plan is for. Without gradients it may be too much for the budget all the same."""
        executor = self.executor
        is_followed = evaluates() and executor.evaluations.before(executor, self.original, args, kwargs)
        output = executor.oom.evaluation(lambda: self._run_evaluation(args, kwargs))
        if is_followed:
            executor.evaluations.after(output)
        return output

    def _run_evaluation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        half = self.executor.half
        if half is None:
            return self.original(*args, **kwargs)
        return half.evaluate(self.original, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.passive or self.executor.idle:
            return self.original(*args, **kwargs)
        if runs_plain():
            self.executor.unseen.has_run |= torch.is_grad_enabled()
            if not self.executor.open.are_there:  # the step before is over, its optimizer's step unseen
                self.executor.learned.rest()
            return self._evaluate(args, kwargs)
        failures = self.executor.failures
        self.executor.before_forward(self.original, args, kwargs)
        for observer in FORWARD_OBSERVERS:
            observer.starts(self.executor, args, kwargs)
        self.executor.learned.measure(self.executor.model, is_first=not self.executor.open.waiting)
        try:
            output = self.executor.oom.forward(self.run_original, args, kwargs)
        except BaseException:
            self.executor.learned.rest()
            if self.executor.failures > failures:  # the batch is at fault, and says nothing of the next one
                self.executor.forget_failure()
            raise
        self.executor.after_forward(output)
        for observer in FORWARD_OBSERVERS:
            observer.returned(self.executor, output)
        return output
