# SPDX-License-Identifier: Apache-2.0
"""The public functions; `core/wrapping.py` continues a `wrap` call."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from memscale import log
from memscale.config.config import AsyncOffloadConfig, Config, OptimizationMode
from memscale.core.arguments import (
    effective_config,
    loss_function,
    merged,
    model_of,
    optimizer_of,
    require_sample,
)
from memscale.core.devices import resolve_device
from memscale.core.eight_bit_state import (
    counted_in_8bit,
    eight_bit_state,
    give_back_of,
    may_have_our_state,
    settled_state,
)
from memscale.core.executor import Executor
from memscale.core.planner import make_plan
from memscale.core.predictor import bare, evaluation_step, may_run, predict_step
from memscale.core.profiler import normalize_sample
from memscale.core.savings_build import Asked, Terms, savings_of
from memscale.core.verification import VerifyReport, compare
from memscale.core.wrapped import OBSERVERS, PLAN_OBSERVERS
from memscale.core.wrapping import begin, executor_of
from memscale.hardware.detect import Hardware
from memscale.observability import metrics
from memscale.optim import is_patched
from memscale.optim.eight_bit import with_8bit_state
from memscale.optim.patched import is_held
from memscale.plans.plan import Plan, Prediction
from memscale.plans.savings import Savings
from memscale.recording import follower
from memscale.techniques.left_out import require_matches
from memscale.techniques.step_facts import StepFacts
from memscale.telemetry import observer as telemetry
from memscale.torchkit.replicas import wrapped_one
from memscale.uninterrupted import uninterrupted

OBSERVERS.extend((metrics, follower))
PLAN_OBSERVERS.append(telemetry.plan_attached)

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


def wrap(
    target: T,
    config: Config | None = None,
    sample_input: Any = None,
    async_offload: bool | None = None,
    async_config: AsyncOffloadConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], Any] | None = None,
    **fields: Any,
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
        optimizer: trains the model; makes the plan count its state (without it an AdamW is assumed), and
            lets mixed precision compute in FP16 on cards that have no BF16, and with `exact=False` make
            weights BF16 on the CPU, with their FP32 masters in its state. With
            `config.use_8bit_optimizer` it gets 8-bit state, on the CPU or a card, until `detach`. A trainer
            brings its own, and that gets the state as soon as the trainer has made it.
        loss: what the loop makes of the model's output, where the model does not return its loss: a function
            that is given the output and returns the loss. The plan then counts what it takes; without it,
            what usual losses take, unless `config.learn_loss` has the first steps show the loop's own. It is
            called while the step is traced, on tensors without data, and never in training. The loop is taken
            to hold the output until the step is over; return `(loss, held)` where it holds something else,
            `(loss, None)` where nothing. It is for one forward a backward: of several, usual losses count.
        **fields: fields of `Config`, as keywords: `wrap(model, memory_budget="8GiB")`.

    Returns:
        `target`, the same object.

    Raises:
        TypeError: `target` is neither, `config`, `sample_input`, `optimizer` or `loss` is of a wrong type, or
            there is an optimizer or a loss beside a trainer.
        ValueError: contradictory settings, or `optimizer` trains no parameter of the model.
        BudgetError: the budget cannot be met and `config.strict_budget` is set.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> memscale.wrap(model, memory_budget="1GiB") is model
        True
    """
    settings = effective_config(merged(config, fields), async_offload, async_config)
    integration = _integration_of(target)
    if integration is None:
        model = model_of(target)
        loss = loss_function(loss)
        with eight_bit_state(model, settings, optimizer) as known:
            begin(model, settings, sample_input, known, loss=loss)
    elif optimizer is not None or loss is not None:
        what = "loss" if optimizer is None else "optimizer"
        raise TypeError(f"{what} is given beside a trainer, which brings its own")
    else:
        integration.begin(target, settings, sample_input)
    return target


@contextmanager
def optimize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
    loss: Callable[[Any], Any] | None = None,
    **fields: Any,
) -> Iterator[Executor]:
    """`wrap` for the time of a block; the model is as before at its end, also after an exception.

    Args:
        model: the module.
        optimizer: as for `wrap`.
        config: as for `wrap`.
        sample_input: as for `wrap`.
        loss: as for `wrap`.
        **fields: as for `wrap`.

    Yields:
        The executor; its `plan` is None until the plan has been made.

    Example:
        >>> with memscale.optimize(model, optimizer, sample_input=batch) as executor:
        ...     print(executor.plan.explain())
    """
    settings = effective_config(merged(config, fields))
    module, loss = model_of(model), loss_function(loss)
    with eight_bit_state(module, settings, optimizer) as known:
        executor = begin(module, settings, sample_input, known, loss=loss)
    try:
        yield executor
    finally:
        if executor_of(module) is executor:  # not if it was wrapped anew or detached inside
            detach(model)


def apply_all_optimizations(
    model: M,
    optimizer: torch.optim.Optimizer,
    config: Config | None = None,
    sample_input: Any = None,
    loss: Callable[[Any], Any] | None = None,
    **fields: Any,
) -> tuple[M, torch.optim.Optimizer]:
    """The full stack: checkpoints, offload, tiles, mixed precision, and optimizer state in 8 bits.

    That is your optimizer itself, with its parameters on the CPU or a card: it gets 8-bit state of our own,
    with the settings, hooks and schedulers that it has, also if it has stepped; `detach` gives it its own
    state back. Where it cannot have that, as on a card without NVIDIA's compiler, it is a new one from
    `bitsandbytes` or `torchao`, whichever is installed and can (see `Config.eight_bit_backend`), with the
    same parameters in the same groups with the same settings: make schedulers afterwards, on the optimizer
    that is returned, and load only checkpoints of its state that come from the same package. Where none can,
    the optimizer is returned as it is; one log line says why. All of them round the state, so weights differ
    a little from those of 32-bit state.

    Args:
        model: the module; it is wrapped.
        optimizer: AdamW, Adam, SGD with momentum or Lion; for one of the packages before its first step.
        config: what to do. Where it names no `mode` that is "aggressive", and fields that were given override
            that: `Config(memory_budget="8GiB")` is the full stack within 8 GiB.
        sample_input: as for `wrap`.
        loss: as for `wrap`.
        **fields: as for `wrap`.

    Returns:
        `model`, the same object, and the optimizer to train it with.

    Raises:
        TypeError: `optimizer` is no optimizer, and as `wrap`.
        ValueError: as `wrap`.
        BudgetError: as `wrap`; then model and optimizer are as they were.

    Example:
        >>> model, optimizer = memscale.apply_all_optimizations(model, optimizer, sample_input=batch)
    """
    module, loss = model_of(model), loss_function(loss)
    settings = effective_config(_full_stack(merged(config, fields)))
    if optimizer_of(optimizer, module) is None:
        raise TypeError("optimizer is None; allowed: a torch.optim.Optimizer")
    require_matches(module, settings)
    log.setup(settings)
    used, fresh = optimizer, not is_patched(optimizer) or is_held(optimizer)
    if settings.use_8bit_optimizer:
        used, line = with_8bit_state(optimizer, settings.eight_bit_backend)
        log.LOGGER.info("%s", line)
    with settled_state(module, settings, used, fresh) as known:
        begin(module, settings, sample_input, known, loss=loss)
    return model, used


def _full_stack(config: Config | None) -> Config | None:
    """Starts from AGGRESSIVE, unless the caller has named a mode."""
    if isinstance(config, Config) and "mode" not in config.explicit:
        return config.replace(mode=OptimizationMode.AGGRESSIVE)
    return Config(OptimizationMode.AGGRESSIVE) if config is None else config


def detach(model: Any) -> None:
    """Takes everything back: the model is as it was before `wrap`, bit for bit.

    An optimizer that was given 8-bit state in place goes on with state in its own precision, made of that;
    one that trains several wrapped models, when the last of them is detached.

    Args:
        model: what was given to `wrap`. A model that is not wrapped gives a logged warning.
    """
    integration = _integration_of(model)
    if integration is not None and integration.end(model):
        return
    executor = executor_of(model)
    if executor is None:
        log.LOGGER.warning("detach: this model is not wrapped")
        return
    with uninterrupted():
        try:
            executor.stop()
        finally:
            give_back_of(model_of(model))


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
    device: str | torch.device | None = None,
    loss: Callable[[Any], Any] | None = None,
    **fields: Any,
) -> Plan:
    """The plan that `wrap` would attach, without attaching it.

    Args:
        model: the module. A wrapped one is looked at bare.
        optimizer: as for `optimize`.
        config: as for `wrap`.
        sample_input: as for `wrap`, but required.
        device: as for `predict`: a card by name or memory, to plan for one that is not here.
        loss: as for `wrap`.
        **fields: as for `wrap`.

    Raises:
        TypeError: no `sample_input`, or one of a wrong type; or a `loss` that is no function.
        ValueError: an unknown device.
        ProfileError: `loss` returns no loss.
        Exception: the model rejects the sample.

    Example:
        >>> print(memscale.plan(model, sample_input=batch, device="RTX 3090", memory_budget="8GiB").explain())
    """
    module, settings = model_of(model), effective_config(merged(config, fields))
    require_sample(sample_input, "plan")
    require_matches(module, settings)
    hardware = None if device is None else resolve_device(device, module)
    args, kwargs = normalize_sample(sample_input)
    step = _step_of(module, optimizer_of(optimizer, module), loss)
    taken = optimizer if hardware is None or may_have_our_state(hardware) else None
    runs = hardware is None or may_run(module, (args, kwargs))
    with counted_in_8bit(settings, taken), bare(module):
        return make_plan(module, settings, args, kwargs, step, hardware, runs).plan


def predict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
    device: str | torch.device | None = None,
    *,
    training: bool = True,
    loss: Callable[[Any], Any] | None = None,
    **fields: Any,
) -> Prediction:
    """What one training step takes: peak bytes, where they go, time, whether it fits, what would make it fit.

    Or, with `training=False`, one forward without gradients.

    The step is traced on tensors without data. The model may lie on any device, also on "meta" or made of
    fake tensors, so that one larger than this machine can be predicted; it is left as it was. One on "meta"
    or the CPU touches no card; of one on a card, small integer tensors are computed there, and kernels for
    8-bit state compiled, where that is asked for. A model on the CPU whose way is decided by computed values
    is run for a real step instead (`method` is "empirical").

    Args:
        model: the module. A wrapped one is looked at bare.
        optimizer: makes the prediction count this optimizer's state, in 8 bits where the configuration asks
            for them; without it an AdamW is assumed.
        config: the prediction is that of its plan, under its budget; None for the defaults (85 % of the
            device's memory). What the step takes without a plan is `prediction.plain`.
        sample_input: one training batch, as for `wrap`, but required. Tensors on "meta" will do, and a
            callable may have parameters `batch` and `sequence`, which `largest_batch` then asks for others.
        device: name of a card ("RTX 3090", "a100-40gb"), its memory ("24GiB"), "cuda" for the card that is
            present, "cpu" for this machine; None for where the model is.
        training: False: of one forward under `torch.no_grad()`, after `model.eval()`. It counts the gradients
            that the parameters have, and the state of `optimizer`; without one there is none. A forward that
            saves nothing needs no plan. What a wrapped model's plan leaves changed between steps counts,
            where `device` names no other: streamed weights, BF16 weights, optimizer state in a file.
        loss: as for `wrap`. `largest_batch` and `largest_sequence` call it for outputs of other sizes, too.
        **fields: as for `wrap`.

    Raises:
        TypeError: no `sample_input`, or an argument of a wrong type.
        ValueError: an unknown device; the message names the closest.
        ProfileError: the model has no data and cannot be traced without; or `loss` returns no loss.
        Exception: the model rejects the sample, or `loss` the output.

    Example:
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4096, 4096)
        >>> memscale.predict(model, sample_input=torch.empty(8, 4096, device="meta"), device="RTX 3090").fits
        True
    """
    module, settings = model_of(model), effective_config(merged(config, fields))
    require_sample(sample_input, "predict")
    if not isinstance(training, bool):
        raise TypeError(f"training is {training!r}; allowed: True or False")
    require_matches(module, settings)
    hardware = resolve_device(device, module)
    step = _step_of(module, optimizer_of(optimizer, module), loss)
    if not training:
        step = evaluation_step(module, step, here=device is None)
    taken = optimizer if may_have_our_state(hardware) else None
    around = functools.partial(counted_in_8bit, settings, taken)
    return predict_step(module, settings, sample_input, step, hardware, around)


def _step_of(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, loss: Callable[[Any], Any] | None
) -> StepFacts:
    training = None if module.training else True
    return StepFacts(optimizer=optimizer, training=training, loss=loss_function(loss))


def estimate_savings(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    sample_input: Any = None,
    device: str | torch.device | None = None,
    *,
    compare: str = "same",
    price_per_hour: float | Mapping[str, float] | None = None,
    steps: int | None = None,
    loss: Callable[[Any], Any] | None = None,
    **fields: Any,
) -> Savings:
    """What the plan saves over a plain run in bytes, time and money; below 0 is what it costs.

    Both runs are predicted, nothing is computed: with the batch that was given, and each with the largest
    batch that fits. Takes some ten traces, each as long as `predict`.

    Args:
        model: as for `predict`, like the next four.
        optimizer: of both runs. State in 8 bits that the configuration asks for is the plan's.
        config: whose plan is compared with no plan.
        sample_input: one training batch, required.
        device: what it runs on.
        compare: "same": the plain run is on the same device, whether it fits there or not. "needed": on the
            smallest card of the table that holds it, or on the cheapest of those that have a price.
        price_per_hour: of the device, or several by name: `{"RTX 3090": 0.3, "A100 80GB": 1.6}`. No prices
            are known here: without them there is no money in the answer.
        steps: of the whole run, for its hours and its price.
        loss: as for `predict`.
        **fields: as for `wrap`.

    Raises:
        TypeError: as `predict`.
        ValueError: as `predict`, and a `compare`, price or number of steps that is not allowed.
        ProfileError: as `predict`.
        Exception: the model rejects the sample.

    Example:
        >>> print(memscale.estimate_savings(model, sample_input=batch, device="RTX 3090").explain())
    """
    module, settings = model_of(model), effective_config(merged(config, fields))
    terms = Terms(compare, price_per_hour, steps)
    require_sample(sample_input, "estimate_savings")
    require_matches(module, settings)
    hardware = resolve_device(device, module)
    trained = optimizer_of(optimizer, module)
    step = _step_of(module, trained, loss)

    def on(other: Hardware, settings: Config) -> Prediction:
        return predict_step(module, settings, sample_input, step, other)

    plain = planned = on(hardware, settings)
    if settings.use_8bit_optimizer and trained is not None and may_have_our_state(hardware):
        around = functools.partial(counted_in_8bit, settings, trained)
        planned = predict_step(module, settings, sample_input, step, hardware, around)
    return savings_of(Asked(hardware, settings, plain, planned, on), terms)


def verify(
    model: nn.Module,
    sample_input: Any,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    **fields: Any,
) -> VerifyReport:
    """Compares loss, every gradient and every buffer of one step with and without the plan.

    A wrapped model is verified with its own plan. Another one is wrapped for the comparison, with a plan
    that checkpoints something even if nothing need be. The model is left as it was.

    With `DistributedDataParallel` it is a step of this process alone. With `fully_shard` gradients are those
    over all processes, and every one of them has to call this, between two steps.

    Args:
        model: the module.
        sample_input: one training batch, as for `wrap`.
        optimizer: as for `optimize`.
        config: as for `wrap`; ignored for a wrapped model.
        **fields: as for `wrap`; ignored for a wrapped model.

    Returns:
        The report: `.passed`, `.equal` (every bit), `.first_difference`, `.table()`.

    Raises:
        TypeError: the model is a part of a wrapped one, or an argument is of a wrong type.
        VerificationError: the model is sharded, and accumulates gradients without reducing them.
    """
    module, given = wrapped_one(model_of(model)), merged(config, fields)
    require_sample(sample_input, "verify")
    args, kwargs = normalize_sample(sample_input)
    facts = StepFacts(training=None if module.training else True)
    executor = executor_of(module)
    if executor is not None and executor.plan is not None:
        facts.forward, facts.watch = executor.in_force.own_step, executor.in_force.watch
        return compare(executor, args, kwargs, facts)
    settings = effective_config(given).replace(force_optimize=True, enable_logging=False, strict_budget=False)
    optimizer = optimizer_of(optimizer, module)
    with (
        counted_in_8bit(settings, optimizer),
        optimize(module, optimizer, settings, sample_input) as temporary,
    ):
        return compare(temporary, args, kwargs, facts)


_INTEGRATIONS = {
    ("transformers.trainer", "Trainer"): "memscale.integrations.trainer",
    ("lightning.pytorch.core.module", "LightningModule"): "memscale.integrations.lightning",
    ("pytorch_lightning.core.module", "LightningModule"): "memscale.integrations.lightning",
}
"""Module and name of a trainer class, or of one that knows its trainer → what knows it; imported when such
an object is wrapped."""


def _integration_of(target: Any) -> Any:
    """The module that knows this kind of trainer, or None."""
    for kind in type(target).__mro__:
        name = _INTEGRATIONS.get((kind.__module__, kind.__name__))
        if name is not None:
            known = importlib.import_module(name)
            return known if known.concerns(target) else None
    return None
