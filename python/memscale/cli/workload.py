# SPDX-License-Identifier: Apache-2.0
"""Resolves MODEL on the command line to a factory of a model and batches of any size.

Three kinds: a Hugging Face configuration, a function of the user's, and the file of a memory graph, which is
one step of one size already and goes its own way (`graph_file`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memscale.cli import hf
from memscale.cli.adapters import Adapter
from memscale.cli.hub import find_config
from memscale.cli.optimizers import make_optimizers
from memscale.cli.problems import UsageError, one_line, quoted
from memscale.cli.quantized import quantization_of
from memscale.hardware.host import host_memory
from memscale.units import format_bytes

__all__ = ["Case", "Request", "Workload", "open_workload"]

WEIGHTS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
AUTOCAST: Final = {"bf16-amp": torch.bfloat16, "fp16-amp": torch.float16}

_STEP_SHARE: Final = 4
"""Weights, gradients and two moments: what a real step takes beside activations, in sizes of the weights."""

_FUNCTION: Final = re.compile(r"(?P<place>.+):(?P<name>[A-Za-z_][\w.]*)")
_BATCH_NAMES: Final = ("batch", "batch_size")
_LENGTH_NAMES: Final = ("seq", "sequence", "seq_len", "sequence_length")


@dataclass(frozen=True)
class Request:
    """What the command line says about the step.

    Attributes:
        model: MODEL as written.
        batches: batch sizes; empty: not given.
        lengths: sequence lengths; empty: not given.
        dtype: one of `arguments.DTYPES`; None: not given.
        optimizer: one of `arguments.OPTIMIZERS`.
        task: one of `arguments.TASKS`; None: not given.
        adapter: to train on the frozen model; None: not asked for.
        accumulate: micro-batches per step.
        checkpointing: one of `arguments.CHECKPOINTING`.
    """

    model: str
    batches: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    dtype: str | None = None
    optimizer: str = "adamw"
    task: str | None = None
    adapter: Adapter | None = None
    accumulate: int = 1
    checkpointing: str = "none"


@dataclass(frozen=True)
class Case:
    """One step to predict: a model, a batch for it, an optimizer.

    Attributes:
        model: the module, usually on "meta".
        sample: the batch, or a function of `batch` and `sequence` that makes one of another size.
        optimizers: over the model's trainable weights, no weight in two of them.
        batch: its size; None if the model's function decides.
        length: of its sequences; None if there is none or the model's function decides.
        accumulate: micro-batches per step.
    """

    model: nn.Module
    sample: Any
    optimizers: tuple[torch.optim.Optimizer, ...]
    batch: int | None
    length: int | None
    accumulate: int = 1

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The first of them, whose state plans may change; None if nothing is trained."""
        return self.optimizers[0] if self.optimizers else None


@dataclass
class Workload:
    """A model that can be asked for steps of several sizes.

    Attributes:
        name: of the model, for people.
        origin: what kind of thing it came from, in a few words.
        sizes: (batch, length) of every case that was asked for.
        make: makes the case of one of them.
        measure: what the length counts; "" where there is none.
        parameters: number of the model's weights, without adapters.
        trained: number of weights that are trained.
        adapter: that is trained; None: the model itself.
        quantization: format of the frozen weights; "" where they are not quantised.
        dtype: how it computes, one of `arguments.DTYPES`, or "as built".
        notes: what the user should know, a line each.
        with_data: makes the case anew with real weights, for a step that cannot be traced without; None if
            there is no way to.
    """

    name: str
    origin: str
    sizes: Sequence[tuple[int | None, int | None]]
    make: Callable[[int | None, int | None], Case]
    measure: str
    parameters: int
    trained: int
    dtype: str
    adapter: Adapter | None = None
    quantization: str = ""
    notes: list[str] = field(default_factory=list)
    with_data: Callable[[int | None, int | None], Case] | None = None


def open_workload(request: Request) -> Workload:
    """Finds out what MODEL is and builds it.

    Raises:
        UsageError: there is no such model, or it cannot do what was asked.
    """
    function = _function(request.model)
    return _from_hub(request) if function is None else _from_function(request, function)


# ---- Hugging Face ----------------------------------------------------------------------------------


def _from_hub(request: Request) -> Workload:
    found = find_config(request.model)
    adapter = _adapter_of(request, found.adapter)
    quantization = quantization_of(found.values, adapter is not None)
    dtype = request.dtype or ("fp32" if quantization is None else "bf16")
    notes = [found.note] if found.note else []
    if quantization is not None and request.dtype is None:
        notes.append("no --dtype: weights that are not quantised in BF16 assumed")

    def build(with_data: bool = False) -> tuple[hf.Built, int]:
        """The model and its number of weights, before adapters and formats change it."""
        built = hf.build(found, request.task, WEIGHTS.get(dtype, torch.float32), with_data)
        count = _weights(built.model)
        if quantization is not None:
            quantization.apply(built.model)
        _prepare(built.model, adapter, request.checkpointing)
        _autocast(built.model, dtype)
        return built, count

    built, count = build()
    lengths = _checked_lengths(request, built, notes)

    @functools.cache
    def real() -> Callable[[int | None, int | None], Case]:
        """Cases with random weights; built when the first step turns out to need data."""
        _require_room(built.model)
        notes.append("built with random weights: the step cannot be traced on the meta device")
        return _cases(build(with_data=True)[0], request)

    return Workload(
        name=request.model if found.adapter else found.name,
        origin=f"{type(built.model).__name__}, {built.task}",
        sizes=[(batch, length) for batch in request.batches or (1,) for length in lengths],
        make=_cases(built, request),
        measure=built.measure,
        parameters=count,
        trained=_trained(built.model),
        dtype=dtype,
        adapter=adapter,
        quantization="" if quantization is None else quantization.label,
        notes=notes,
        with_data=lambda batch, length: real()(batch, length),
    )


def _adapter_of(request: Request, there: Adapter | None) -> Adapter | None:
    """The adapter to train: what a folder has, or what the command line asks for."""
    if there is None:
        return request.adapter
    if request.adapter is not None:
        raise UsageError(
            f"--lora: {request.model!r} is an adapter of rank {there.rank} already; leave it out"
        )
    return there


def _prepare(model: nn.Module, adapter: Adapter | None, checkpointing: str) -> None:
    """Makes a model what a training script makes of it: adapters, the model's own checkpoints."""
    if adapter is not None:
        adapter.attach(model)
    if checkpointing == "none":
        return
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the latter in older ones
    enable = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if enable is None:
        raise UsageError(
            f"--checkpointing {checkpointing}: a {type(model).__name__} is none of transformers' models; "
            "checkpoint it in the function that builds it"
        )
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise UsageError(f"--checkpointing {checkpointing}: {one_line(error)}") from error


def _require_room(model: nn.Module) -> None:
    """Refuses to run a model for real whose step would not fit this machine."""
    needed = _STEP_SHARE * sum(weight.nbytes for weight in model.parameters())
    there = host_memory().available_bytes
    if needed > there:
        raise UsageError(
            "the step cannot be traced without data, and a real one takes "
            f"{format_bytes(needed)} and more of the {format_bytes(there)} that this machine has free"
        )


def _cases(built: hf.Built, request: Request) -> Callable[[int | None, int | None], Case]:
    """Makes cases of a model whose batches are known; all of them share the model."""
    made = make_optimizers(request.optimizer, built.model)

    def make(batch: int | None, length: int | None) -> Case:
        size = 1 if batch is None else batch
        tokens = None if not built.measure else built.usual if length is None else length
        sample = _scalable(built, size, tokens)
        return Case(built.model, sample, made, size, tokens, request.accumulate)

    return make


def _scalable(built: hf.Built, size: int, tokens: int | None) -> Callable[..., Any]:
    if tokens is None:

        def images(batch: int = size) -> Any:
            return built.make(batch, 0)

        return images

    def texts(batch: int = size, sequence: int = tokens) -> Any:
        return built.make(batch, sequence)

    return texts


def _checked_lengths(request: Request, built: hf.Built, notes: list[str]) -> tuple[int | None, ...]:
    """The lengths to predict, held against what the model takes."""
    if not built.measure:
        if request.lengths:
            raise UsageError(f"--seq: {type(built.model).__name__} takes images; its input has no length")
        return (None,)
    lengths = request.lengths or (built.usual,)
    for length in lengths:
        if built.longest is not None and length > built.longest:
            raise UsageError(
                f"--seq {length}: {type(built.model).__name__} has positions for {built.longest} "
                f"{built.measure}; give at most {built.longest}"
            )
        if built.trained is not None and length > built.trained:
            notes.append(
                f"{length} is beyond the {built.trained} {built.measure} that the model was made for"
            )
    if not request.lengths:
        notes.append(f"no --seq: {built.usual} {built.measure} assumed")
    return lengths


# ---- a function of the user's ----------------------------------------------------------------------


def _function(text: str) -> re.Match[str] | None:
    match = _FUNCTION.fullmatch(text)
    return None if match is None or Path(text).exists() else match


def _from_function(request: Request, where: re.Match[str]) -> Workload:
    function = _load(where["place"], where["name"])
    notes: list[str] = []
    builder = _Builder(function, request, notes)
    if request.task is not None:
        raise UsageError("--task: the function decides what the model is trained for")
    sizes: list[tuple[int | None, int | None]] = [
        (batch, length) for batch in request.batches or (None,) for length in request.lengths or (None,)
    ]
    first = builder.case(*sizes[0])
    made = {sizes[0]: first}  # the others are built when they are asked for

    def make(batch: int | None, length: int | None) -> Case:
        return made.pop((batch, length), None) or builder.case(batch, length)

    return Workload(
        name=request.model,
        origin=type(first.model).__name__,
        sizes=sizes,
        make=make,
        measure="tokens",
        parameters=builder.parameters,
        trained=_trained(first.model),
        dtype=request.dtype or "as built",
        adapter=request.adapter,
        notes=notes,
        with_data=builder.with_data if builder.on_meta else None,
    )


class _Builder:
    """Calls the user's function for each size: on the meta device if it can be, else for real."""

    def __init__(self, function: Callable[..., Any], request: Request, notes: list[str]) -> None:
        self.function = function
        self.request = request
        self.notes = notes
        self.on_meta = True
        self.parameters = 0  # of the model, before adapters are put in
        self._why = ""
        names = _parameter_names(function)
        self.batch_name = next((name for name in _BATCH_NAMES if name in names), None)
        self.length_name = next((name for name in _LENGTH_NAMES if name in names), None)
        self._built: hf.Built | None = None

    def case(self, batch: int | None, length: int | None) -> Case:
        """The step of one size."""
        if self._built is not None:
            return self._recognised(self._built, batch, length)
        model, sample = _taken_apart(self._call(batch, length), self.request.model)
        if self.request.dtype is not None:
            model = model.to(WEIGHTS.get(self.request.dtype, torch.float32))
            _autocast(model, self.request.dtype)
        self.parameters = _weights(model)
        _prepare(model, self.request.adapter, self.request.checkpointing)
        if sample is None:
            self._built = _batches_of(model, self.request.model)
            if self._built.measure and length is None and self.length_name is None:
                self.notes.append(f"no --seq: {self._built.usual} {self._built.measure} assumed")
            return self._recognised(self._built, batch, length)
        self._require(batch, self.batch_name, "--batch", _BATCH_NAMES)
        self._require(length, self.length_name, "--seq", _LENGTH_NAMES)
        sample = _fit_for_trace(sample, _dtype_of(self.request.dtype))
        made = make_optimizers(self.request.optimizer, model)
        return Case(model, sample, made, batch, length, self.request.accumulate)

    def with_data(self, batch: int | None, length: int | None) -> Case:
        """The step of one size, built with data from now on."""
        self.on_meta, self._built = False, None
        self._why = "it cannot be traced on the meta device"
        return self.case(batch, length)

    def _recognised(self, built: hf.Built, batch: int | None, length: int | None) -> Case:
        given = () if length is None else (length,)
        _checked_lengths(Request(self.request.model, lengths=given or (built.usual,)), built, [])
        return _cases(built, self.request)(batch, length)

    def _require(self, value: int | None, name: str | None, option: str, names: Sequence[str]) -> None:
        if value is not None and name is None:
            raise UsageError(
                f"{option}: the function of {self.request.model!r} takes no argument {names[0]!r}"
            )

    def _call(self, batch: int | None, length: int | None) -> Any:
        pairs = ((self.batch_name, batch), (self.length_name, length))
        arguments = {name: value for name, value in pairs if name is not None and value is not None}
        if self.on_meta:
            try:
                with torch.device("meta"):
                    return self.function(**arguments)
            except Exception as error:
                self.on_meta = False
                self._why = f"on the meta device it raised {one_line(error, 120)}"
        try:
            made = self.function(**arguments)
        except Exception as error:
            raise UsageError(f"{self.request.model!r} raised {quoted(error)}") from error
        if not any("built with data" in note for note in self.notes):
            self.notes.append(f"built with data: {self._why}")
        return made


def _load(place: str, name: str) -> Callable[..., Any]:
    """The function of MODULE:FUNCTION or PATH.py:FUNCTION."""
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"cannot import {place!r}: {quoted(error)}") from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        public = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        hint = f"; it has {', '.join(sorted(public)[:8])}" if public else ""
        raise UsageError(f"{place!r} has no function {name!r}{hint}")
    function: Callable[..., Any] = found
    return function


def _load_module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"no such file: {str(path)!r}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _parameter_names(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built in
        return set()


def _taken_apart(made: Any, name: str) -> tuple[nn.Module, Any]:
    """Model and batch (None: not given) of what a function returned."""
    if isinstance(made, nn.Module):
        return made, None
    if isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made[0], made[1]
    raise UsageError(f"{name!r} returned a {type(made).__name__}; allowed: a module, or (module, batch)")


def _batches_of(model: nn.Module, name: str) -> hf.Built:
    built = hf.recognise(model) if "transformers" in sys.modules else None
    if built is None:
        raise UsageError(
            f"cannot tell what a batch for a {type(model).__name__} looks like: let {name!r} return "
            "(model, batch)"
        )
    return built


def _dtype_of(asked: str | None) -> torch.dtype | None:
    """What to bring a batch's floating-point tensors to; None: leave them."""
    return None if asked is None else WEIGHTS.get(asked)


def _fit_for_trace(sample: Any, dtype: torch.dtype | None) -> Any:
    """Integers with values, which models decide by; floating-point tensors in the model's dtype."""
    if callable(sample) and not isinstance(sample, Tensor):
        return sample

    def fit(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor if dtype is None else tensor.to(dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.device.type == "meta" else tensor

    return tree_map_only(Tensor, fit, dict(sample) if hasattr(sample, "keys") else sample)


# ---- both ------------------------------------------------------------------------------------------


def _autocast(model: nn.Module, dtype: str) -> None:
    """Puts the forward under autocast, as training loops do, if the dtype asks for it."""
    half = AUTOCAST.get(dtype)
    if half is not None:
        model.forward = torch.autocast("cpu", dtype=half)(model.forward)


def _weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _trained(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
