# SPDX-License-Identifier: Apache-2.0
"""Overrides implementations of PyTorch operators, on one thread, during a trace.

Whether an operator is one kernel or made of several is decided inside PyTorch by the device of its arguments.
The trace's tensors are fakes on the CPU, so the decisions that a card would lead to are put in from outside:
an implementation that is registered for CPU tensors above autograd (or for CPU autocast) is found by every
caller, Python or C++. Calls from other threads get what they would have got without it.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch


def operator(name: str) -> Any:
    """The overload by its name in the dispatcher, such as "aten::sum.dim_IntList"; None if there is none."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def plain(overload: Any) -> Callable[..., Any]:
    """PyTorch's own C++ implementation of a composite operator; `decompose` may be another one, in Python."""
    return functools.partial(overload._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


class Overrides:
    """A set of implementations, in force inside a `with` block.

    Args:
        key: dispatch key to register for, such as "AutogradCPU".
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.own: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._library: Any = None

    def add(self, name: str, run: Callable[..., Any], otherwise: Callable[..., Any]) -> None:
        """Adds an implementation.

        Args:
            name: in the dispatcher; without an overload, the default one.
            run: takes the operator's arguments.
            otherwise: the same, for calls from other threads.
        """
        if operator(name) is not None:
            self.own[name] = (run, otherwise)

    def __enter__(self) -> Overrides:
        owner = threading.get_ident()
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "overriding a previously registered kernel": that is the point
            for name, choices in self.own.items():
                self._library.impl(
                    name.removeprefix("aten::"), functools.partial(_call, owner, *choices), self.key
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library._destroy()
        self._library = None


def _call(
    owner: int, run: Callable[..., Any], otherwise: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return (run if threading.get_ident() == owner else otherwise)(*args, **kwargs)
