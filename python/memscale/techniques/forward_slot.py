# SPDX-License-Identifier: Apache-2.0
"""Standing in for a module's `forward`, and leaving without a trace.

The stand-in lies in the instance's `__dict__`, in front of the class's method. It holds the module weakly:
a module that refers to itself through its own `forward` would be freed only by the garbage collector, and
with it all of its weights.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from memscale.errors import AttachError


class StandIn:
    """A callable in place of a module's forward. Subclasses implement `__call__`.

    Copies with the module, and pickles as the module's own forward, so that a saved model does not depend
    on MemScale.

    Attributes:
        passive: true after `remove` when somebody else had wrapped the stand-in: it then only passes on.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        own = isinstance(original, MethodType) and original.__self__ is module
        self._original = weakref.WeakMethod(original) if own else lambda: original
        self.passive = False
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(self, name, getattr(original, name, None))
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(original)  # trainers look at a forward's parameters

    @property
    def module(self) -> nn.Module:
        """The module, which is alive: it is being called, copied or pickled."""
        module = self._module()
        assert module is not None
        return module

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that was there before."""
        original = self._original()
        assert original is not None
        return original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward."""
        return self.original(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")  # when loaded: the class's own forward, bound

    def copied_original(self, memo: dict[int, Any]) -> tuple[nn.Module, Callable[..., Any]]:
        """The copied module and its original forward, for a subclass's `__deepcopy__`."""
        return copy.deepcopy(self.module, memo), copy.deepcopy(self.original, memo)


class ForwardSlot:
    """Puts a stand-in before a module's forward and takes it away again."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self._module = weakref.ref(module)  # weakly, as the stand-in
        self.path = path
        self._before: Any = None
        self._stand_in: StandIn | None = None

    @property
    def module(self) -> nn.Module:
        """The module, which is alive while anybody attaches or detaches."""
        module = self._module()
        assert module is not None
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardSlot:
        twin = ForwardSlot(copy.deepcopy(self.module, memo), self.path)
        memo[id(self)] = twin
        twin._before = copy.deepcopy(self._before, memo)
        twin._stand_in = copy.deepcopy(self._stand_in, memo)
        return twin

    def put(self, stand_in: StandIn) -> None:
        """Replaces `module.forward`.

        Raises:
            AttachError: the module does not let its forward be replaced (a scripted one, for instance).
        """
        self._before = self.module.__dict__.get("forward")
        try:
            self.module.forward = stand_in
        except (AttributeError, RuntimeError, TypeError) as error:
            raise AttachError(f"cannot replace the forward of module {self.path!r}: {error}") from error
        self._stand_in = stand_in

    def remove(self) -> None:
        """Restores what was there. What somebody else has put on top stays, and the stand-in passes on."""
        stand_in, self._stand_in = self._stand_in, None
        assert stand_in is not None
        if self.module.__dict__.get("forward") is not stand_in:
            stand_in.passive = True
        elif self._before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.forward = self._before
