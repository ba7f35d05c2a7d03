# SPDX-License-Identifier: Apache-2.0
"""The cases that do what models should not, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.blocks import (
    WIDTH,
    Block,
    ChangesItsInput,
    Complex,
    Custom,
    DataDependent,
    InPlaceResidual,
    InPlaceViews,
    InsideCheckpoint,
    LayerDrop,
    Lazy,
    NoisySlope,
    OldWeightNorm,
    Parametrized,
    PythonRandom,
    Scripted,
    Shared,
    Sparse,
    Stack,
    Structured,
    TakesKeywords,
    UsesCheckpoint,
    Vectorized,
    inputs,
)
from zoo.models import Case, generator, mean_square, numbers
from zoo.settling import FIRST_CALLS, Exchanges, FirstCall, PartCounts
from zoo.stateful import (
    ChangesBatch,
    Counting,
    Decays,
    Hidden,
    OwnGenerator,
    Statistic,
    WrittenByParent,
    counting_class,
)


def ids(step: int) -> tuple[Tensor]:
    return (torch.randint(0, 60, (8, 32), generator=generator(step)),)


def ids_and_numbers(step: int) -> tuple[Tensor, Tensor]:
    return (*ids(step), *numbers(8, 32, WIDTH)(step))


def _case(name: str, build: Callable[[], nn.Module], **settings: Any) -> Case:
    settings.setdefault("batch", inputs)
    settings.setdefault("loss", lambda out: out["loss"] if isinstance(out, dict) else mean_square(out))
    return Case(name, build, profile=settings.pop("profile", None), **settings)


ODD = (
    _case("dropout", lambda: Stack(functools.partial(Block, 0.2)), profile="static"),
    _case("autograd-function", lambda: Stack(Custom)),
    _case("in-place-and-views", lambda: Stack(InPlaceViews)),
    _case("changes-its-input", lambda: Stack(ChangesItsInput), checkpoints=False),
    _case("in-place-residual", InPlaceResidual, checkpoints=False),
    _case("shared-three-times", Shared),
    _case("data-dependent", DataDependent, profile="empirical"),
    _case("structured-outputs", Structured),
    _case("keywords", TakesKeywords, checkpoints=False),
    _case("parametrizations", lambda: Stack(Parametrized)),
    _case("old-weight-norm", lambda: Stack(OldWeightNorm), checkpoints=False),
    _case("layer-drop", LayerDrop, checkpoints=False),
    _case("python-random", lambda: Stack(PythonRandom)),
    _case("checkpoint-inside", lambda: Stack(lambda: UsesCheckpoint(False)), checkpoints=False),
    _case("checkpoint-inside-reentrant", lambda: Stack(lambda: UsesCheckpoint(True)), checkpoints=False),
    _case("checkpoint-outside", lambda: InsideCheckpoint(False), checkpoints=False),
    _case("checkpoint-outside-reentrant", lambda: InsideCheckpoint(True), checkpoints=False),
    _case("complex", lambda: Stack(Complex)),
    _case("noise-saved-before-it-is-drawn", lambda: Stack(NoisySlope), checkpoints=False),
    _case("vmap", lambda: Stack(Vectorized), profile="static"),
    _case("scripted-part", lambda: Stack(Scripted)),
    *(_case(f"statistic-{kind}", lambda kind=kind: Stack(lambda: Statistic(kind)), checkpoints=False)
      for kind in ("buffer", "rebound", "plain", "plain-rebound", "held", "held-rebound", "listed",
                   "listed-rebound", "slots")),
    _case("counts-in-class", lambda: Stack(counting_class()), checkpoints=False),
    _case("buffer-written-by-parent", WrittenByParent, checkpoints=False),
    *(_case(f"counts-in-{kind}", lambda kind=kind: Stack(lambda: Counting(kind)), checkpoints=False)
      for kind in ("number", "object", "counter", "nested", "deep", "iterator", "closure", "method")),
    *(_case(f"counts-by-{kind}", lambda kind=kind: Stack(lambda: PartCounts(kind)), checkpoints=False)
      for kind in ("method-of-part", "hidden-method", "hidden-call")),
    *(_case(f"exchanges-{kind}", lambda kind=kind: Stack(lambda: Exchanges(kind)), checkpoints=False)
      for kind in ("norm", "decay", "weight", "part")),
    *(_case(f"first-call-{kind}", lambda kind=kind: Stack(lambda: FirstCall(kind)), checkpoints=False)
      for kind in FIRST_CALLS),
    _case("decays-its-weights", lambda: Stack(Decays), checkpoints=False),
    _case("hidden-statistics", lambda: Stack(Hidden), checkpoints=False),
    *(_case(f"own-generator-{kind}", lambda kind=kind: Stack(lambda: OwnGenerator(kind)), checkpoints=False)
      for kind in ("torch", "numpy", "python")),
    _case("changes-its-batch", lambda: ChangesBatch(False), batch=ids_and_numbers, checkpoints=False),
    _case("changes-its-batch-if-large", lambda: ChangesBatch(True), batch=ids_and_numbers, checkpoints=False),
)  # fmt: skip

LAZY = _case("lazy", Lazy)
SPARSE = _case("sparse-gradients", Sparse, batch=ids, checkpoints=True)
