# SPDX-License-Identifier: Apache-2.0
"""Predictions for many devices from as few traces as possible.

What a step does depends on what kind of device it runs on, not on how large that is: cards of the same
semantics share a trace, and each gets its own replay, plan and prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from memscale import _core
from memscale.cli.problems import NoTraceError, UsageError, one_line, quoted
from memscale.cli.workload import Case
from memscale.config.config import Config
from memscale.core.advice import advice_of
from memscale.core.decision_engine import DecisionEngine
from memscale.core.devices import resolve_device
from memscale.core.eight_bit_state import counted_in_8bit, may_have_our_state
from memscale.core.planner import Planner
from memscale.core.predictor import may_run
from memscale.core.profiler import normalize_sample
from memscale.core.scaling import Scaling
from memscale.errors import MemScaleError, ProfileError
from memscale.hardware.detect import Budget, Hardware, budget_bytes
from memscale.observability.report_detail import Detail, detail_of
from memscale.plans.plan import Plan, Prediction
from memscale.state.model_state import Changes
from memscale.techniques.base import StepAttachment
from memscale.techniques.left_out import require_matches
from memscale.techniques.step_facts import StepFacts
from memscale.trace.step import Trace

__all__ = ["Predicted", "predict_case", "predict_graph", "resolve"]


@dataclass(frozen=True)
class Predicted:
    """A prediction and what charts need beside it.

    Attributes:
        prediction: the step on one device; its plan and the plain step are inside.
        plain_trace: of the plain step.
        planned_trace: the one that the plan was made for.
        engine: what decided.
    """

    prediction: Prediction
    plain_trace: Trace
    planned_trace: Trace
    engine: DecisionEngine

    @property
    def plan(self) -> Plan:
        """The plan of the prediction."""
        assert self.prediction.plan is not None
        return self.prediction.plan

    def detail(self, about: Sequence[tuple[str, str]] = ()) -> Detail:
        """What a report and a trace show of it."""
        return detail_of(self.plan, (self.plain_trace, self.planned_trace), self.engine, about)


def resolve(devices: Iterable[str]) -> list[Hardware]:
    """The hardware of some device names; none: the present card, else this machine.

    Raises:
        UsageError: an unknown name.
    """
    import torch

    names = list(devices) or ["cuda" if torch.cuda.is_available() else "cpu"]
    try:
        found = [resolve_device(name) for name in names]
    except (ValueError, MemScaleError) as error:
        raise UsageError(one_line(error)) from error
    return found


def predict_case(
    case: Case, devices: Iterable[Hardware], config: Config, progress: Callable[[str], None] = lambda _: None
) -> list[Predicted]:
    """Predicts one step on several devices.

    Args:
        case: the step.
        devices: what it may run on.
        config: the same for all.
        progress: called with what is being done.

    Raises:
        NoTraceError: the model decides by values that it does not have on "meta".
        UsageError: the model rejects the batch.
    """
    traces: dict[Any, Trace] = {}
    found = []
    try:
        batch = normalize_sample(case.sample)
    except Exception as error:
        raise UsageError(f"the batch cannot be made: {quoted(error)}") from error
    for hardware in devices:
        progress(f"predicting {_size(case)}for {hardware.name}")
        try:
            found.append(_predict(case, batch, hardware, config, traces))
        except ProfileError as error:
            cause = "" if error.__cause__ is None else f"\n  {quoted(error.__cause__)}"
            raise NoTraceError(f"{one_line(error)}{cause}") from error
        except MemScaleError as error:
            raise UsageError(one_line(error)) from error
        except Exception as error:
            raise UsageError(f"the model raised {quoted(error)}") from error
    return found


def _size(case: Case) -> str:
    sizes = [str(size) for size in (case.batch, case.length) if size is not None]
    return f"{' × '.join(sizes)} " if sizes else ""


Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _SharingPlanner(Planner):
    """A planner that does not trace again what another device of the same kind has traced.

    Attributes:
        batch: the arguments whose traces are shared; those of other sizes are not kept.
        traces: (target, whether the key/value cache is off) → trace.
    """

    batch: Batch = ((), {})
    traces: dict[Any, Trace] = field(default_factory=dict)

    def trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cache_off: bool,
        attachments: Sequence[StepAttachment] = (),
    ) -> Trace:
        """See `Planner.trace`."""
        if args is not self.batch[0] or kwargs is not self.batch[1] or attachments:
            return super().trace(args, kwargs, cache_off, attachments)
        key = (self.hardware.target, cache_off)
        if key not in self.traces:
            self.traces[key] = super().trace(args, kwargs, cache_off)
        return self.traces[key]


def _predict(
    case: Case, batch: Batch, hardware: Hardware, config: Config, traces: dict[Any, Trace]
) -> Predicted:
    require_matches(case.model, config)
    step = StepFacts(
        optimizer=case.optimizer,
        others=case.optimizers[1:],
        grads_present=case.accumulate > 1,
        training=None if case.model.training else True,
    )
    runnable = may_run(case.model, batch)
    planner = _SharingPlanner(case.model, config, step, hardware, runnable, batch=batch, traces=traces)
    around = partial(counted_in_8bit, config, case.optimizer if may_have_our_state(hardware) else None)
    with around():
        planned = planner.plan_and_plain(*batch)
    others = replace(planner, may_run=False)  # a step of another size may not fit into this machine
    scaling = Scaling(others, case.sample, batch, planned.plan, around)
    plain_trace = traces[hardware.target, False]
    plain_trace = plain_trace.larger or plain_trace
    return _predicted(planned.plan, scaling, (plain_trace, planned.trace), planner.engine)


def _predicted(
    plan: Plan, scaling: Scaling | None, traces: tuple[Trace, Trace], engine: DecisionEngine
) -> Predicted:
    prediction = replace(plan.predicted, advice=advice_of(plan), plan=plan, plain=plan.plain, scaling=scaling)
    return Predicted(prediction, *traces, engine)


def predict_graph(path: str, devices: Iterable[Hardware], config: Config) -> list[Predicted]:
    """Predicts the step of a graph file on several devices.

    Raises:
        UsageError: the file cannot be read or is no graph, or modules are to be left out, which a graph says
            by its own flags.
    """
    if config.exclude or config.only:
        raise UsageError("--exclude and --only need a model: modules of a graph file have flags for that")
    try:
        graph = _core.Graph.load(path)
    except (OSError, ValueError, MemScaleError) as error:
        raise UsageError(f"cannot read the graph {path!r}: {one_line(error)}") from error
    modules = [(module[0], module[1]) for module in graph.modules()]
    trace = Trace(graph, modules, {}, {}, frozenset(), Changes(), "graph file")
    found = []
    for hardware in devices:
        engine = DecisionEngine(config.effective(), hardware, _budget(config, hardware))
        found.append(_predicted(engine.decide(trace), None, (trace, trace), engine))
    return found


def _budget(config: Config, hardware: Hardware) -> Budget:
    try:
        return budget_bytes(config, hardware)
    except MemScaleError as error:
        raise UsageError(one_line(error)) from error
