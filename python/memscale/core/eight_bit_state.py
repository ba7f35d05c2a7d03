# SPDX-License-Identifier: Apache-2.0
"""8-bit state of an optimizer (`use_8bit_optimizer`), for as long as a model that it trains is wrapped.

eight_bit_state      around the `begin` of `wrap` and `optimize`: state in place, where that is possible
settled_state        of `apply_all_optimizations`: the optimizer may be another one, patched already
change_to_8bit       an optimizer that a trainer has made since
give_back_of         `detach`, or a `wrap` without 8-bit state
counted_in_8bit      `plan`, `predict`: counted, and not a bit of it changed
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from memscale import log
from memscale.config.config import Config
from memscale.core.arguments import optimizer_of
from memscale.core.wrapping import executor_of
from memscale.hardware.detect import Hardware
from memscale.optim import cards, convert_state, give_back, is_patched, take_over
from memscale.optim.eight_bit import OWN, is_8bit, with_8bit_state
from memscale.optim.kinds import inner_of
from memscale.optim.patched import is_held
from memscale.techniques.left_out import require_matches
from memscale.uninterrupted import uninterrupted

_PATCHED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[torch.optim.Optimizer]] = (
    weakref.WeakKeyDictionary()
)
"""Optimizers that have our state as long as their model is wrapped."""


@contextmanager
def eight_bit_state(
    model: nn.Module, config: Config, optimizer: torch.optim.Optimizer | None
) -> Iterator[torch.optim.Optimizer | None]:
    """A block that wraps a model: its optimizer gets 8-bit state, if that is asked for and can be in place.

    If the block fails, the optimizer is as it was.

    Yields:
        The optimizer itself, without wrappers.
    """
    optimizer = optimizer_of(optimizer, model)
    require_matches(model, config)  # before the optimizer's state is touched
    log.setup(config)
    fresh = optimizer is not None and (not is_patched(optimizer) or is_held(optimizer))
    with _patched_or_given_back(optimizer, fresh):
        _take(optimizer, config)
        with settled_state(model, config, optimizer, fresh) as inner:
            yield inner


@contextmanager
def settled_state(
    model: nn.Module, config: Config, optimizer: torch.optim.Optimizer | None, fresh: bool
) -> Iterator[torch.optim.Optimizer | None]:
    """A block that wraps a model with an optimizer that may have been patched, `fresh`: for this model."""
    optimizer = inner_of(optimizer)
    if optimizer is not None and not config.use_8bit_optimizer and _patched_for(model) is optimizer:
        give_back_of(model)  # first: the plan counts the state that it finds
    with _patched_or_given_back(optimizer, fresh):
        yield optimizer
        try:
            _settle_state(model, config, optimizer, fresh)
        except BaseException:
            executor = executor_of(model)
            if executor is not None:
                executor.stop()
            raise


def change_to_8bit(model: nn.Module, config: Config, optimizer: torch.optim.Optimizer | None) -> None:
    """Gives an optimizer 8-bit state, if that is asked for, that has come after its model was wrapped."""
    if optimizer is not None and config.use_8bit_optimizer and not is_patched(inner_of(optimizer)):
        with _patched_or_given_back(optimizer, fresh=True):
            _take(optimizer, config, says=_patched_for(model) is None)
            _settle_state(model, config, inner_of(optimizer), fresh=True)


@contextmanager
def _patched_or_given_back(optimizer: torch.optim.Optimizer | None, fresh: bool) -> Iterator[None]:
    """If the block fails or is interrupted, an optimizer that it has patched is its own again."""
    optimizer = inner_of(optimizer)
    try:
        yield
    except BaseException:
        with uninterrupted():
            if fresh and optimizer is not None and is_patched(optimizer) and not is_held(optimizer):
                give_back(optimizer)
        raise


def _take(optimizer: torch.optim.Optimizer | None, config: Config, says: bool = True) -> None:
    """Gives an optimizer 8-bit state in place, where that is asked for and possible; else says why not."""
    if optimizer is None:
        if config.use_8bit_optimizer:
            log.LOGGER.info(
                "8-bit optimizer state: not used, no optimizer was named: pass optimizer=..., "
                "or use memscale.apply_all_optimizations"
            )
    elif config.eight_bit_backend not in ("auto", OWN):
        if not is_8bit(optimizer):
            say_where_8bit_is(config)
    elif config.use_8bit_optimizer and not is_8bit(optimizer):
        line = with_8bit_state(optimizer, OWN)[1]
        hint = "" if is_patched(optimizer) else "; memscale.apply_all_optimizations may know another"
        if says or hint:
            log.LOGGER.info("%s%s", line, hint)


def _settle_state(
    model: nn.Module, config: Config, optimizer: torch.optim.Optimizer | None, fresh: bool
) -> None:
    """The model is wrapped: an optimizer of an earlier `wrap` is given back, the present one's state made."""
    with uninterrupted():
        if optimizer is not None or not config.use_8bit_optimizer:
            give_back_of(model, unless=optimizer)
        if optimizer is not None and is_patched(optimizer) and not is_held(optimizer):
            if fresh:
                convert_state(optimizer)
            if fresh or _is_held_for_a_model(optimizer):
                _PATCHED[model] = weakref.ref(optimizer)


@contextmanager
def counted_in_8bit(config: Config, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """For the time of a block, plans count an optimizer's state as `wrap` makes it. No bit of it changes."""
    with cards.assume_data():
        taken = (
            optimizer is not None
            and config.use_8bit_optimizer
            and config.eight_bit_backend in ("auto", OWN)
            and not is_held(optimizer)
            and not take_over(optimizer, convert=False)
        )
        try:
            yield
        finally:
            if taken and optimizer is not None:
                give_back(optimizer)


def may_have_our_state(hardware: Hardware) -> bool:
    """Whether an optimizer may have our state on a device, as far as is known without asking a card."""
    return hardware.device_kind == "cpu" or not cards.has_refused()


def give_back_of(model: nn.Module, unless: torch.optim.Optimizer | None = None) -> None:
    """Ends what `begin_with` began: the optimizer of a model is as it was, but for what it has learned."""
    optimizer = _patched_for(model)
    if optimizer is unless and optimizer is not None:
        return
    _PATCHED.pop(model, None)
    if optimizer is not None and not _is_held_for_a_model(optimizer):
        give_back(optimizer)


def say_where_8bit_is(config: Config) -> None:
    """What `wrap` and `optimize` cannot do: the loop goes on with the optimizer that it has."""
    if config.use_8bit_optimizer:
        log.LOGGER.info(
            "8-bit optimizer state: not used, the loop keeps its own optimizer; "
            "memscale.apply_all_optimizations returns one with 8-bit state"
        )


def _patched_for(model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer that has our state for this model's sake, if there is one."""
    held = _PATCHED.get(model)
    return None if held is None else held()


def _is_held_for_a_model(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has our state for the sake of a model, which may be one of several."""
    return any(held() is optimizer for held in _PATCHED.values())
