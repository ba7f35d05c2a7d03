# SPDX-License-Identifier: Apache-2.0
"""A draw on the device is one on the host whose seed is the device generator's seed and offset.

So a program that puts the generator's state back draws the same numbers again, and one that does not draws
others. The original kernel advances the offset as it does on a card.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.RLock()  # the host's default generator is lent to one operator at a time


def _device_generator(args: Any, kwargs: Any) -> torch.Generator:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    return torch.cuda.default_generators[torch.cuda.current_device()]


def mixed(seed: int, offset: int) -> int:
    """A seed of 63 bits for the host, which differs wherever one of both does."""
    made = (seed ^ (offset * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF
    made = ((made ^ (made >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return (made ^ (made >> 31)) & 0x7FFFFFFFFFFFFFFF


def seed_and_offset(args: Any, kwargs: Any) -> tuple[int, int]:
    """Where the device's generator stands."""
    state = _device_generator(args, kwargs).get_state().view(torch.int64)
    return int(state[0]), int(state[1])


def seed_of(args: Any, kwargs: Any) -> int:
    """The seed for a draw that an operator is about to make."""
    return mixed(*seed_and_offset(args, kwargs))


@contextmanager
def host_generator(seed: int) -> Iterator[torch.Generator]:
    """The host's default generator with that seed; afterwards as it was."""
    with _lock:
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield generator
        finally:
            generator.set_state(before)


def with_generator(generator: torch.Generator, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, with the host's generator where the device's was."""

    def changed(value: Any) -> Any:
        return generator if isinstance(value, torch.Generator) else value

    return type(args)(changed(value) for value in args), {
        name: changed(value) for name, value in kwargs.items()
    }
