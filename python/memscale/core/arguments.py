# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of the public functions: the model, its optimizer, the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memscale.config.checks import refuse
from memscale.config.config import AsyncOffloadConfig, Config
from memscale.errors import ConfigError
from memscale.optim.kinds import inner_of

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def model_of(target: Any) -> nn.Module:
    """The module that was given, or that of a trainer.

    Raises:
        TypeError: `target` is neither.
    """
    if isinstance(target, nn.Module):
        return target
    inner = getattr(target, "model", None)
    if isinstance(inner, nn.Module) and callable(getattr(target, "train", None)):
        return inner
    raise TypeError(
        f"target is a {type(target).__name__}; allowed: an nn.Module, or a trainer with .model (a module) "
        "and .train"
    )


def optimizer_of(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer that was given, out of its wrapper; None where none was.

    Raises:
        TypeError: it is no optimizer.
        ValueError: it trains no parameter of the model.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = optimizer.__name__ if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise TypeError(f"optimizer is {kind}; allowed: a torch.optim.Optimizer, or None")
    inner: torch.optim.Optimizer = inner_of(optimizer)
    mine = {id(parameter) for parameter in model.parameters()}
    if mine and not any(id(value) in mine for group in inner.param_groups for value in group["params"]):
        raise ValueError(
            f"optimizer is {type(optimizer).__name__} of other parameters: it trains none of this "
            f"{type(model).__name__}'s; make it from model.parameters()"
        )
    return inner


def loss_function(loss: Any) -> Callable[[Any], Any] | None:
    """The function of the model's output that was given as the loss; None where none was.

    Raises:
        TypeError: it is no function.
    """
    if loss is None or (callable(loss) and not isinstance(loss, torch.Tensor)):
        return loss
    raise TypeError(
        f"loss is a {type(loss).__name__}; allowed: a function of the model's output that returns the loss, "
        "or None. A loss that the model returns itself is found there"
    )


def require_sample(sample_input: Any, function: str) -> None:
    """Refuses a call without a batch, where no first training batch can bring one.

    Args:
        sample_input: what the public function was given.
        function: its name.

    Raises:
        TypeError: there is none.
    """
    if sample_input is None:
        raise TypeError(f"{function} needs sample_input: one training batch, or a callable that makes one")


def merged(config: Config | None, fields: Mapping[str, Any]) -> Config | None:
    """The configuration that was given, with the fields that were given beside it as keywords.

    Raises:
        ConfigError: there is no such field, or the configuration has it already.
    """
    if not fields:
        return config
    if config is None:
        return Config(**fields)
    if not isinstance(config, Config):
        return config  # which `effective_config` refuses
    for name, value in fields.items():
        if name in config.explicit:
            allowed = f"config has {name}={getattr(config, name)!r}: leave one of the two out"
            raise refuse(name, value, allowed)
    return config.replace(**fields)


def effective_config(
    config: Config | None, async_offload: bool | None = None, async_config: AsyncOffloadConfig | None = None
) -> Config:
    """The configuration with the arguments and the environment applied; the caller's object stays.

    Args:
        config: as it was given; None for the defaults.
        async_offload: overrides the environment variable `MEMSCALE_ASYNC_OFFLOAD`, which overrides `config`.
        async_config: overrides `config.async_config`.

    Raises:
        TypeError: `config` or `async_offload` is of a wrong type.
        ConfigError: the environment variable is no switch, or fields contradict each other.
    """
    if config is None:
        config = Config()
    if not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}; allowed: a memscale.Config or None")
    if isinstance(async_offload, torch.Tensor):
        raise TypeError(
            "async_offload is a Tensor; allowed: True, False or None. A batch of several arguments is one "
            "sample_input: (x, y), or a dict of keyword arguments"
        )
    if not isinstance(async_offload, bool | None):
        raise TypeError(f"async_offload is {async_offload!r}; allowed: True, False or None")
    if async_offload is None:
        async_offload = _environment_switch("MEMSCALE_ASYNC_OFFLOAD")
    if async_config is not None:
        config = config.replace(async_config=async_config)
    recorded = os.environ.get("MEMSCALE_RECORD")
    if recorded is not None and (config.record is not None or "record" not in config.explicit):
        config = config.replace(record=None if recorded.strip().lower() in _FALSE else recorded.strip())
    if async_offload is None or async_offload == config.async_offload:
        return config
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
