# SPDX-License-Identifier: Apache-2.0
"""The public functions. The life of a `wrap` call is `_begin`, from top to bottom."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from memscale.core.config import AsyncOffloadConfig, Config
from memscale.core.devices import resolve_device
from memscale.core.executor import EXECUTOR, Executor
from memscale.core.plan import Plan
from memscale.core.planner import make_plan
from memscale.core.prediction import Prediction
from memscale.core.predictor import predict_step
from memscale.core.profiler import normalize_sample
from memscale.core.tracer import StepFacts
from memscale.core.verification import VerifyReport, compare
from memscale.errors import ConfigError
from memscale.observability import logs

T = TypeVar("T")

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def wrap(
    target: T,
    config: Config | None = None,
    sample_input: Any = None,
    async_offload: bool | None = None,
    async_config: AsyncOffloadConfig | None = None,
) -> T:
    """Makes a model's training steps fit a memory budget. Loss and gradients keep every bit.

    The training loop stays as it is. Without `sample_input` the plan is made when the first training batch
    arrives, before it runs. If anything cannot be attached, all is undone and the model is as before.
    Wrapping a wrapped model replaces its plan.

    Args:
        target: an `nn.Module`, or a trainer that has `.model` and `.train` (its model is wrapped).
        config: what to do; None for the defaults (85 % of the device's memory).
        sample_input: one training batch to plan for: a tensor, a tuple of arguments, a dict of keyword
            arguments (with labels, if the model computes its loss), or a callable that returns one of these.
        async_offload: overrides the environment variable `MEMSCALE_ASYNC_OFFLOAD`, which overrides
            `config.async_offload`.
        async_config: overrides `config.async_config`.

    Returns:
        `target`, the same object.

    Raises:
        TypeError: `target` is neither, or `config` or `sample_input` is of a wrong type.
        ValueError: contradictory settings.
        BudgetError: the budget cannot be met and `config.strict_budget` is set.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> memscale.wrap(model, memscale.Config(memory_budget="1GiB")) is model
        True
    """
    _begin(_model_of(target), _resolve(config, async_offload, async_config), sample_input)
    return target


@contextmanager
def optimize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
) -> Iterator[Executor]:
    """`wrap` for the time of a block; the model is as before at its end, also after an exception.

    Args:
        model: the module.
        optimizer: makes the plan count this optimizer's state; without it an AdamW is assumed.
        config: as for `wrap`.
        sample_input: as for `wrap`.

    Yields:
        The executor; its `plan` is None until the plan has been made.

    Example:
        >>> with memscale.optimize(model, optimizer, sample_input=batch) as executor:
        ...     print(executor.plan.explain())
    """
    executor = _begin(_model_of(model), _resolve(config), sample_input, optimizer)
    try:
        yield executor
    finally:
        if model.__dict__.get(EXECUTOR) is executor:  # not if it was wrapped anew or detached inside
            detach(model)


def detach(model: Any) -> None:
    """Takes everything back: the model is as it was before `wrap`, bit for bit.

    Args:
        model: what was given to `wrap`. A model that is not wrapped gives a logged warning.
    """
    executor = _model_of(model).__dict__.get(EXECUTOR)
    if executor is None:
        logs.LOGGER.warning("detach: this model is not wrapped")
        return
    executor.stop()


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
) -> Plan:
    """The plan that `wrap` would attach, without attaching it.

    Args:
        model: the module. A wrapped one is looked at bare.
        optimizer: as for `optimize`.
        config: as for `wrap`.
        sample_input: as for `wrap`, but required.

    Raises:
        TypeError: no `sample_input`, or one of a wrong type.
        Exception: the model rejects the sample.
    """
    module, settings = _model_of(model), _resolve(config)
    if sample_input is None:
        raise TypeError("plan needs sample_input: one training batch, or a callable that makes one")
    args, kwargs = normalize_sample(sample_input)
    step = StepFacts(optimizer=optimizer, training=None if module.training else True)
    executor = module.__dict__.get(EXECUTOR)
    if executor is None:
        return make_plan(module, settings, args, kwargs, step).plan
    with executor.bare():
        return make_plan(module, settings, args, kwargs, step).plan


def predict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
    device: str | torch.device | None = None,
) -> Prediction:
    """What one training step takes: peak bytes, where they go, time, whether it fits, what would make it fit.

    Nothing is computed and no device is touched: the step is traced on tensors without data. The model may
    lie on any device, also on "meta" or made of fake tensors, so that one larger than this machine can be
    predicted. It is left as it was.

    Args:
        model: the module. A wrapped one is looked at bare.
        optimizer: makes the prediction count this optimizer's state; without it an AdamW is assumed.
        config: the prediction is that of its plan, under its budget; None for the defaults (85 % of the
            device's memory). What the step takes without a plan is `prediction.plain`.
        sample_input: one training batch, as for `wrap`, but required. Tensors on "meta" will do, and a
            callable may have parameters `batch` and `sequence`, which `largest_batch` then asks for others.
        device: name of a card ("RTX 3090", "a100-40gb"), its memory ("24GiB"), "cuda" for the card that is
            present, "cpu" for this machine; None for where the model is.

    Raises:
        TypeError: no `sample_input`, or an argument of a wrong type.
        ValueError: an unknown device; the message names the closest.
        ProfileError: the model has no data and cannot be traced without.
        Exception: the model rejects the sample.

    Example:
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4096, 4096)
        >>> memscale.predict(model, sample_input=torch.empty(8, 4096, device="meta"), device="RTX 3090").fits
        True
    """
    module, settings = _model_of(model), _resolve(config)
    if sample_input is None:
        raise TypeError("predict needs sample_input: one training batch, or a callable that makes one")
    hardware = resolve_device(device, module)
    step = StepFacts(optimizer=optimizer, training=None if module.training else True)
    executor = module.__dict__.get(EXECUTOR)
    if executor is None:
        return predict_step(module, settings, sample_input, step, hardware)
    with executor.bare():
        return predict_step(module, settings, sample_input, step, hardware)


def verify(
    model: nn.Module,
    sample_input: Any,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
) -> VerifyReport:
    """Compares loss, every gradient and every buffer of one step with and without the plan.

    A wrapped model is verified with its own plan. Another one is wrapped for the comparison, with a plan
    that checkpoints something even if nothing need be. The model is left as it was.

    Args:
        model: the module.
        sample_input: one training batch, as for `wrap`.
        optimizer: as for `optimize`.
        config: as for `wrap`; ignored for a wrapped model.

    Returns:
        The report: `.equal`, `.first_difference`, `.table()`.
    """
    module = _model_of(model)
    args, kwargs = normalize_sample(sample_input)
    facts = StepFacts(training=None if module.training else True)
    executor = module.__dict__.get(EXECUTOR)
    if executor is not None and executor.plan is not None:
        return compare(executor, args, kwargs, facts)
    settings = _resolve(config).replace(force_optimize=True, enable_logging=False, strict_budget=False)
    with optimize(module, optimizer, settings, sample_input) as temporary:
        return compare(temporary, args, kwargs, facts)


def _begin(
    model: nn.Module, config: Config, sample_input: Any, optimizer: torch.optim.Optimizer | None = None
) -> Executor:
    """The pipeline, in order: sample, old plan off, log, new executor (profile → decide → attach)."""
    sample = None if sample_input is None else normalize_sample(sample_input)
    wrapped: Executor | None = model.__dict__.get(EXECUTOR)
    if wrapped is not None:
        wrapped.stop()
    logs.setup(config)
    executor = Executor(model, config, optimizer)
    try:
        executor.start(sample)
    except BaseException:
        if wrapped is not None:
            wrapped.resume()
        raise
    return executor


def _model_of(target: Any) -> nn.Module:
    if isinstance(target, nn.Module):
        return target
    inner = getattr(target, "model", None)
    if isinstance(inner, nn.Module) and callable(getattr(target, "train", None)):
        return inner
    raise TypeError(
        f"target is a {type(target).__name__}; allowed: an nn.Module, or a trainer with .model (a module) "
        "and .train"
    )


def _resolve(
    config: Config | None, async_offload: bool | None = None, async_config: AsyncOffloadConfig | None = None
) -> Config:
    """The configuration with the arguments and the environment applied; the caller's object stays."""
    if config is None:
        config = Config()
    if not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}; allowed: a memscale.Config or None")
    if async_offload is None:
        async_offload = _environment_switch("MEMSCALE_ASYNC_OFFLOAD")
    if async_config is not None:
        config = config.replace(async_config=async_config)
    if async_offload is None or async_offload == config.async_offload:
        return config
    if not isinstance(async_offload, bool):
        raise TypeError(f"async_offload is {async_offload!r}; allowed: True, False or None")
    return config.replace(async_offload=async_offload, **({} if async_offload else {"async_config": None}))


def _environment_switch(name: str) -> bool | None:
    text = os.environ.get(name)
    if text is None:
        return None
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ConfigError(
        f"environment variable {name} is {text!r}; allowed: {', '.join(_TRUE + _FALSE[:-1])}", name
    )
