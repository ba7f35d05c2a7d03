# SPDX-License-Identifier: Apache-2.0
"""Computes the answers of `memscale estimate` from its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memscale.cli.arguments import Options
from memscale.cli.problems import NoTraceError, UsageError

if TYPE_CHECKING:
    import torch

    from memscale.cli.adapters import Adapter
    from memscale.cli.predicting import Predicted
    from memscale.cli.workload import Request, Workload
    from memscale.config.config import Config
    from memscale.hardware.detect import Hardware

__all__ = ["Answer", "Subject", "answers_for", "config_of", "is_graph", "request_of", "subject_of"]

_GRAPH_MAGIC: Final = b"memscale-graph "
_EIGHT_BIT: Final = "8-bit optimizer state, as memscale.apply_all_optimizations makes it, in all figures"


@dataclass(frozen=True)
class Subject:
    """What was asked about, for the head of an answer.

    Attributes:
        name: of the model or file.
        origin: what it is, in a few words.
        parameters: number of the model's weights; None for a graph, which does not know.
        trained: number of weights that are trained; None for a graph.
        lora: `rank` and `targets` of the adapters that are trained; None: there are none.
        quantization: format of the frozen weights; "": they are not quantised.
        dtype: how it computes.
        optimizer: its name; "" for a graph, which has it inside.
        accumulate: micro-batches per step.
        checkpointing: the model's own, "hf" or "none".
        measure: what lengths count; "" where there are none.
        notes: what the user should know, a line each.
    """

    name: str
    origin: str
    parameters: int | None
    dtype: str
    optimizer: str
    measure: str
    notes: tuple[str, ...]
    trained: int | None = None
    lora: dict[str, Any] | None = None
    quantization: str = ""
    accumulate: int = 1
    checkpointing: str = "none"


@dataclass(frozen=True)
class Answer:
    """One step on one device."""

    batch: int | None
    length: int | None
    hardware: Hardware
    predicted: Predicted

    @property
    def verdict(self) -> str:
        """One of "plain" (fits without a plan), "plan" (fits with one), "no"."""
        if not self.predicted.prediction.fits:
            return "no"
        return "plan" if self.predicted.plan.does_something else "plain"


def answers_for(options: Options, say: Callable[[str], None]) -> tuple[Subject, list[Answer]]:
    """Predicts everything that a command line asks for; sizes in the outer loop, devices in the inner.

    Raises:
        UsageError: it cannot be carried out.
    """
    from memscale.cli.predicting import predict_graph, resolve

    say("loading PyTorch")
    hardware = resolve(options.devices)
    config = config_of(options)
    if is_graph(options.model):
        _refuse_sizes(options)
        found = predict_graph(options.model, hardware, config)
        answers = [Answer(None, None, *pair) for pair in zip(hardware, found, strict=True)]
        return _graph_subject(options, found[0]), answers
    return _answers_of_model(options, hardware, config, say)


def _answers_of_model(
    options: Options, hardware: Sequence[Hardware], config: Config, say: Callable[[str], None]
) -> tuple[Subject, list[Answer]]:
    from memscale.cli.predicting import predict_case
    from memscale.cli.workload import open_workload

    say(f"building {options.model}")
    workload = open_workload(request_of(options))
    answers = []
    for sizes in workload.sizes:
        case = workload.make(*sizes)
        try:
            found = predict_case(case, hardware, config, say)
        except NoTraceError:
            if workload.with_data is None:
                raise
            say("building with data")
            case = workload.with_data(*sizes)
            found = predict_case(case, hardware, config, say)
        answers += [
            Answer(case.batch, case.length, device, item)
            for device, item in zip(hardware, found, strict=True)
        ]
    return subject_of(options, workload, case.optimizer), answers


def request_of(options: Options) -> Request:
    """What a command line says about the step."""
    from memscale.cli.workload import Request

    return Request(
        model=options.model,
        batches=options.batches,
        lengths=options.lengths,
        dtype=options.dtype,
        optimizer=options.optimizer or "adamw",
        task=options.task,
        adapter=_adapter(options),
        accumulate=options.accumulate or 1,
        checkpointing=options.checkpointing or "none",
    )


def subject_of(options: Options, workload: Workload, optimizer: torch.optim.Optimizer | None) -> Subject:
    """The head of an answer about a model."""
    adapter = workload.adapter
    return Subject(
        name=workload.name,
        origin=workload.origin,
        parameters=workload.parameters,
        dtype=workload.dtype,
        optimizer=options.optimizer or "adamw",
        measure=workload.measure,
        notes=(*workload.notes, *_of_the_recipe(options), *_of_the_mode(options, optimizer)),
        trained=workload.trained,
        lora=None if adapter is None else {"rank": adapter.rank, "targets": list(adapter.targets)},
        quantization=workload.quantization,
        accumulate=options.accumulate or 1,
        checkpointing=options.checkpointing or "none",
    )


def _adapter(options: Options) -> Adapter | None:
    from memscale.cli.adapters import ALL_LINEAR, Adapter

    return None if options.lora is None else Adapter(options.lora, options.lora_targets or (ALL_LINEAR,))


def _of_the_recipe(options: Options) -> list[str]:
    """What the figures are of, where the words of an answer do not say."""
    notes = []
    if options.checkpointing == "hf":
        notes.append("plain: with transformers' own checkpoints; a plan decides in their place")
    if (options.accumulate or 1) > 1:
        notes.append("times are those of the last micro-batch and the optimizer's step")
    if options.optimizer == "muon":
        notes.append("muon for the matrices of hidden layers, adamw for the rest")
    return notes


def config_of(options: Options) -> Config:
    """The configuration that a command line asks for."""
    from memscale.config.config import Config

    given: dict[str, Any] = {"enable_logging": False}
    if options.mode is not None:
        given["mode"] = options.mode
    if options.budget is not None:
        given["memory_budget"] = options.budget
    given |= {name: value for name in ("exclude", "only") if (value := getattr(options, name))}
    return Config(**given)


def _of_the_mode(options: Options, optimizer: torch.optim.Optimizer | None) -> list[str]:
    """What a mode that was asked for does beside the plan, and what this version does not have of it."""
    from memscale.core.plan_log import fields_without_effect
    from memscale.optim.cards import assume_data
    from memscale.optim.patched import why_not

    if options.mode is None:
        return []
    config = config_of(options)
    fields = fields_without_effect(config)
    lines = [f"no effect in this version: {', '.join(fields)}"] if fields else []
    if config.use_8bit_optimizer and optimizer is not None:
        with assume_data():
            reason = why_not(optimizer)
        lines.append(f"no 8-bit optimizer state: {reason}" if reason else _EIGHT_BIT)
    return lines


def is_graph(name: str) -> bool:
    """Whether MODEL is the file of a memory graph.

    Raises:
        UsageError: it should be by its name, and cannot be read.
    """
    path = Path(name).expanduser()
    try:
        with path.open("rb") as file:
            return file.read(len(_GRAPH_MAGIC)) == _GRAPH_MAGIC
    except (OSError, ValueError):
        if path.suffix == ".graph":
            raise UsageError(f"cannot read {name!r}") from None
        return False


def _refuse_sizes(options: Options) -> None:
    given = {
        "--batch": options.batches,
        "--seq": options.lengths,
        "--dtype": options.dtype,
        "--optimizer": options.optimizer,
        "--task": options.task,
        "--lora": options.lora,
        "--accumulate": options.accumulate,
        "--checkpointing": options.checkpointing,
    }
    for name, value in given.items():
        if value:
            raise UsageError(f"{name}: {options.model!r} is a graph, which is one step of one size already")


def _graph_subject(options: Options, predicted: Predicted) -> Subject:
    graph = predicted.plain_trace.graph
    modules = graph.modules()
    kind = modules[0][1] if modules else "step"
    origin = f"graph of {kind}: {graph.op_count} operations, {graph.buffer_count} buffers"
    return Subject(options.model, origin, None, "as recorded", "", "", tuple(_of_the_mode(options, None)))
