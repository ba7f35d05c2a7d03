# SPDX-License-Identifier: Apache-2.0
"""Profiles a training step: static where the model allows it, empirical where it does not."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from memscale import _core
from memscale.errors import ProfileError, add_note
from memscale.state.extreme_draws import extreme_draws
from memscale.state.leftovers import LeftoverError
from memscale.techniques.step_facts import StepFacts
from memscale.torchkit import cached_casts, sharding
from memscale.torchkit.compiled import uncompiled
from memscale.torchkit.leaves import tensors_of
from memscale.trace import ddp
from memscale.trace.step import Trace
from memscale.trace.step_loss import LossError

if TYPE_CHECKING:
    from torch import nn

    from memscale.config.config import EffectiveConfig


def normalize_sample(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the arguments of a forward.

    Args:
        sample: a tensor, a tuple or list of arguments, a dict of keyword arguments, or a callable without
            arguments that returns one of these.

    Raises:
        TypeError: it is something else.
    """
    if callable(sample) and not isinstance(sample, torch.Tensor):
        sample = sample()
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    if hasattr(sample, "keys") and hasattr(sample, "__getitem__"):  # dict, BatchEncoding
        return (), {str(key): sample[key] for key in sample}
    raise TypeError(
        f"sample_input is a {type(sample).__name__}; allowed: a tensor, a tuple of arguments, a dict of "
        "keyword arguments, or a callable that returns one of these"
    )


_NO_HOOKS = "saved tensor hooks"
"""From the words in which `torch.func` refuses them."""


_NESTED = "{}, and PyTorch does not run these while operations are recorded"

_IN_NESTED = "NestedTensorImpl"
"""From the words in which nested tensors refuse what recording asks of them."""


class HooksRefusedError(ProfileError):
    """No step of this model can be traced, whatever the batch: hooks on saved tensors are refused inside."""

    def __init__(self) -> None:
        super().__init__(
            "torch.func.grad, or one of its kind, runs inside the forward and refuses hooks on saved "
            "tensors, without which nothing can be planned"
        )


class MemoryProfiler:
    """Makes the memory graph of a model's training step.

    Args:
        config: decides which ways may be taken, and the number of warm-up steps.
        worse: which of two traces to plan for, one with a loss through all outputs, one with one of them.
    """

    def __init__(self, config: EffectiveConfig, worse: Callable[[Trace, Trace], Trace]) -> None:
        self.config = config
        self.worse = worse

    @uncompiled()
    def profile(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        step: StepFacts,
        may_run: bool = True,
    ) -> Trace:
        """Traces one step.

        Args:
            model: the model, real; it is left as it was.
            args: positional part of one training batch.
            kwargs: keyword part.
            step: what else decides the step.
            may_run: the model may be run for real, if the trace on fakes fails.

        Raises:
            ProfileError: both ways are switched off, the trace on fakes fails and the model may not be run,
                or model or batch are of a kind that cannot be traced.
            Exception: the model rejects the batch: its own error, with a note on what was tried.
        """
        reason = sharding.refusal(model) or ddp.refusal(model) or _without_shape(model)
        reason = reason or _nested((args, kwargs))
        if reason:
            raise ProfileError(reason)
        with cached_casts.set_aside(model):
            return self._traced(model, args, kwargs, step, may_run and not sharding.has_units(model))

    def _traced(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], step: StepFacts, may_run: bool
    ) -> Trace:
        refused = ""  # words only: an exception's traceback would keep the caller's tensors alive
        if self.config.use_static_profiling:
            try:
                from memscale.trace.static import trace_static

                traced = functools.partial(trace_static, model, args, kwargs)
                return _in_context(traced, step, self.worse)
            except (LeftoverError, LossError):
                raise  # a real step would not take them away, nor give a loss
            except Exception as error:
                if _NO_HOOKS in str(error):
                    raise HooksRefusedError from None
                if not self.config.use_empirical_fallback:
                    raise
                if not may_run:
                    raise ProfileError(
                        f"the model cannot be traced without data ({_short(error)}), and it is not to be "
                        "run: its tensors have no data, lie on a card, or are sharded. Give it with real "
                        "weights on the CPU, or take out what depends on computed values"
                    ) from error
                refused = _short(error)
        if not self.config.use_empirical_fallback:
            raise ProfileError(
                "use_static_profiling and use_empirical_fallback are both False: nothing to plan from"
            )
        trace = self._by_a_real_step(model, args, kwargs, step)
        if refused:
            trace.notes.append(f"traced by a real step: on fake tensors the model raised {refused}")
        return trace

    def _by_a_real_step(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], step: StepFacts
    ) -> Trace:
        from memscale.trace.empirical import trace_empirical

        try:
            passes = self.config.warmup_steps
            real = functools.partial(trace_empirical, model, args, kwargs, passes=passes)
            return _in_context(real, step, self.worse)
        except Exception as error:
            if _NO_HOOKS in str(error):
                raise HooksRefusedError from None
            if _IN_NESTED in str(error):
                raise ProfileError(_NESTED.format("the model makes nested tensors inside")) from error
            _explain(error, args, kwargs)
            raise


def _without_shape(model: nn.Module) -> str:
    """Why a model with lazy modules cannot be traced yet; "" once it has run."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            return f"{name!r} gets its shape when the model first runs: run one forward, then plan"
    return ""


def _nested(batch: Any) -> str:
    """Why a batch of nested tensors cannot be traced: what they do inside cannot be looked at."""
    if not any(tensor.is_nested for tensor in tensors_of(batch)):
        return ""
    return _NESTED.format("the batch has a nested tensor")


def _in_context(
    traced: Callable[..., Trace], step: StepFacts, worse: Callable[[Trace, Trace], Trace]
) -> Trace:
    """The largest trace, in a copy of the context: variables that a forward sets are not set afterwards."""
    return contextvars.copy_context().run(_largest, traced, step, worse)


def _largest(traced: Callable[..., Trace], step: StepFacts, worse: Callable[[Trace, Trace], Trace]) -> Trace:
    """The trace of the worst that a step may turn out to be.

    A loss may go through one of several outputs alone while the loop holds the others, or through all of
    them. Random numbers may drop layers: with high and with low ones.
    """
    trace, larger = traced(step), None
    if trace.kept:
        step = replace(step, kept=trace.kept)
        trace = traced(step)
    if trace.another_use is not None:
        through_one = replace(step, use=trace.another_use)
        both = trace, traced(through_one)
        trace = worse(*both)
        step = step if trace is both[0] else through_one
        larger = max(both, key=_peak)
    traces = [trace]
    if trace.has_drawn:
        traces += _if_it_works(functools.partial(traced, step, draw=0.0))
    if trace.changes.python_random:
        traces += _with_extreme_draws(traced, step)
    trace = max(traces, key=_peak)
    if larger is not None and _peak(larger) > _peak(trace):
        trace.larger = larger
    return trace


def _peak(trace: Trace) -> int:
    return int(_core.replay(trace.graph)["peak_bytes"])


def _with_extreme_draws(traced: Callable[..., Trace], step: StepFacts) -> Iterator[Trace]:
    """Traces in which Python's and NumPy's generators draw the highest and the lowest numbers."""
    for highest in (True, False):
        with extreme_draws(highest):
            found = _if_it_works(functools.partial(traced, step))
        yield from found


def _if_it_works(traced: Callable[[], Trace]) -> list[Trace]:
    """The trace of a step with random numbers that hardly any step draws: a model need not work with them."""
    try:
        return [traced()]
    except LeftoverError:
        raise
    except Exception:  # the model's own
        return []


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__


def _explain(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Adds what was tried to the model's own error."""
    shapes = [_describe(value) for value in args] + [
        f"{key}={_describe(value)}" for key, value in kwargs.items()
    ]
    add_note(error, f"memscale: raised in a profiling step called with ({', '.join(shapes)})")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
