# SPDX-License-Identifier: Apache-2.0
"""Another forward for one module, which a recompute does not put back: in the module's class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def class_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Has `module`, and no other one of its class, run `forward` in the block."""
    kind: Any = type(module)
    original = kind.forward

    def chosen(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self is module else original(self, *args, **kwargs)

    kind.forward = chosen
    try:
        yield
    finally:
        kind.forward = original
