# SPDX-License-Identifier: Apache-2.0
"""Replaces a module's `forward` by a stand-in, and removes it without a trace.

The stand-in lies in the instance's `__dict__`, in front of the class's method. It holds the module weakly:
a module that refers to itself through its own `forward` would be freed only by the garbage collector, and
with it all of its weights.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from memscale.errors import AttachError
from memscale.torchkit import plain_copies
from memscale.torchkit.compiled import eager, follows_weak_references
from memscale.torchkit.exchange_lock import share_lock

_COMPILER_FOLLOWS = follows_weak_references()

serial_numbers = itertools.count()
"""The order in which stand-ins are made and checkpointed forwards run."""


class StandIn(plain_copies.Ours):
    """A callable in place of a module's forward. Subclasses implement `__call__`.

    Copies of the module are without it. Where somebody else has kept it, a copy or a file has the module's
    own forward instead.

    Attributes:
        passive: true once it has been removed. A wrapper that still calls it gets the original.
        serial: when it was made, in the order of `serial_numbers`.
        calls_through: every call of it is one call of the original, with the same arguments and result.
        stays_when_rebound: `__func__` leads to the stand-in, not past it.
    """

    calls_through = False
    stays_when_rebound = False

    def __init_subclass__(cls) -> None:
        if not _COMPILER_FOLLOWS and "__call__" in vars(cls):
            cls.__call__ = eager(vars(cls)["__call__"])  # type: ignore[method-assign]

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        own = isinstance(original, MethodType) and original.__self__ is module
        # A bound method would hold the module. And torch.compile cannot see through a weakref.WeakMethod.
        self._function: Any = original.__func__ if own else None  # type: ignore[attr-defined]
        self._original: Callable[..., Any] | None = None if own else original
        self._is_inherited = own and all(value is not original for value in vars(module).values())
        self._follows_class = own and getattr(type(module), "forward", None) is self._function
        self.passive = False
        self.serial = next(serial_numbers)
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
        if self._function is not None:
            module = self.module
            bound: Callable[..., Any] = self._function_of(module).__get__(module)
            return bound
        assert self._original is not None
        return self._original

    def _function_of(self, module: nn.Module) -> Any:
        """The class's own, as it is now: a class may get another forward, and a module another class."""
        return type(module).forward if self._follows_class else self._function

    @property
    def __self__(self) -> Any:
        """The module, as a bound method has it.

        Raises:
            AttributeError: the original is no method.
        """
        return self._of_original("__self__")

    @property
    def __func__(self) -> Any:
        """The original's function, or, for what rebinds a model's forward (accelerate does), one like it.

        Raises:
            AttributeError: the original is no method.
        """
        function = self._of_original("__func__")
        return Unbound(self, function) if self.stays_when_rebound else function

    @property
    def __code__(self) -> Any:
        """The original's, for `torch.export`, which reads the names of its arguments there."""
        return self._of_original("__code__")

    def __getattr__(self, name: str) -> Any:
        """What a bound method has of its function: its defaults, and what somebody has set on it."""
        if name in _OF_FUNCTIONS or not name.startswith("_"):
            return self._of_original(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _of_original(self, name: str) -> Any:
        if "_original" not in self.__dict__:  # being made
            raise AttributeError(name)
        return getattr(self._bottom.original, name)

    def run_original(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it. Compiled code must have no bound method: the compiler looks it up by its name again."""
        if self._function is not None:
            module = self.module
            return self._function_of(module)(module, *args, **kwargs)
        assert self._original is not None
        return self._original(*args, **kwargs)

    @property
    def lowest(self) -> StandIn:
        """The last of this and those beneath it, for as long as they call through."""
        beneath = self.original
        return beneath.lowest if isinstance(beneath, StandIn) and beneath.calls_through else self

    def call_instead(self, original: Callable[..., Any]) -> None:
        """Another forward is to be called from now on as the original one."""
        self._function, self._original = None, original
        self._is_inherited = self._follows_class = False

    def call_as(self, other: StandIn) -> None:
        """The original is from now on what it is for `other`."""
        self._function, self._original = other._function, other._original
        self._is_inherited, self._follows_class = other._is_inherited, other._follows_class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward."""
        return self.original(*args, **kwargs)

    @property
    def _bottom(self) -> StandIn:
        """The one beneath which there is no other."""
        beneath = self._original
        return beneath._bottom if isinstance(beneath, StandIn) else self

    def without(self, key: str) -> Any:
        """What was there; nothing, where that is the class's own."""
        bottom = self._bottom
        gone = bottom._is_inherited and hasattr(type(self.module), key)
        return plain_copies.GONE if gone else bottom.original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._bottom.original, memo)

    def __reduce__(self) -> Any:
        return getattr, (self.module, getattr(self, "__name__", None) or "forward")


def is_replaced(module: nn.Module) -> bool:
    """Whether another forward is in place of a module's own. Stand-ins that call through it are not."""
    present = vars(module).get("forward")
    while isinstance(present, StandIn) and present.calls_through:
        if present._is_inherited:
            return False
        present = present._original
    return present is not None


def beneath_stand_ins(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What a forward comes to, past stand-ins that call through."""
    through = isinstance(forward, StandIn) and forward.calls_through
    return forward.lowest.original if through else forward  # type: ignore[attr-defined]


_OF_FUNCTIONS = frozenset(
    ("__defaults__", "__kwdefaults__", "__closure__", "__globals__", "__annotations__", "__type_params__")
)


class Unbound:
    """A stand-in as a function of module and arguments. It is equal to the function that it stands for.

    Bound to a copy of the module it runs the copy's own forward. Copies and files have the function itself.

    Args:
        stand_in: to be called for its own module.
        function: for any other.
    """

    def __init__(self, stand_in: StandIn, function: Callable[..., Any]) -> None:
        self._stand_in, self._own = stand_in, function
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(self, name, getattr(function, name, None))

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of a module."""
        if self._stand_in._module() is module:
            return self._stand_in(*args, **kwargs)
        return getattr(type(module), self.__name__)(module, *args, **kwargs)

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        """Binds it, as a function is bound."""
        return self if module is None else MethodType(self, module)

    def __eq__(self, other: object) -> bool:
        return self._own == (other._own if isinstance(other, Unbound) else other)

    def __hash__(self) -> int:
        return hash(self._own)

    def __getattr__(self, name: str) -> Any:
        if (name in _OF_FUNCTIONS or name == "__code__" or not name.startswith("_")) and (
            "_own" in self.__dict__
        ):
            return getattr(self._own, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._own

    def __reduce__(self) -> Any:
        return getattr, (type(self._stand_in.module), self.__name__)


def watch_of(module: nn.Module) -> StandIn | None:
    """The stand-in that calls through before a module's forward, or before what is watched instead."""
    own = vars(module).values()
    return next((value for value in own if isinstance(value, StandIn) and value.calls_through), None)


class ForwardSlot:
    """Puts a stand-in before a module's forward and takes it away again.

    Or between a stand-in that is there already and what that one calls:

        module.forward ──► beneath this ──► new ──► the module's own

    Args:
        module: whose forward.
        path: its qualified name.
        beneath: the stand-in to go beneath, and beneath those below it that call through; None for the
            front.
        method: what to stand before in place of `forward`, such as Lightning's `training_step`.

    Attributes:
        stand_in: what has been put; None before and after.
    """

    def __init__(
        self, module: nn.Module, path: str, beneath: StandIn | None = None, method: str = "forward"
    ) -> None:
        self._module = weakref.ref(module)  # weakly, as the stand-in
        self.path = path
        self._method = method
        self._before: Any = None
        self.stand_in: StandIn | None = None
        self._above = None if beneath is None else weakref.ref(beneath.lowest)

    @property
    def module(self) -> nn.Module:
        """The module, which is alive while anybody attaches or detaches."""
        module = self._module()
        assert module is not None
        return module

    def is_of(self, module: nn.Module) -> bool:
        """Whether it is this module's."""
        return self._module() is module

    @property
    def present(self) -> Callable[..., Any]:
        """What a stand-in is to call as the original."""
        above = self.above
        present: Callable[..., Any] = getattr(self.module, self._method)
        return present if above is None else above.original

    @property
    def above(self) -> StandIn | None:
        """The stand-in to go beneath, which is there for as long as it is called or undone."""
        return None if self._above is None else self._above()

    def put(self, stand_in: StandIn) -> None:
        """Replaces `module.forward`, or the other method.

        Raises:
            AttachError: the module does not let it be replaced (a scripted one, for instance).
        """
        share_lock(list(self.module.modules()))  # of the whole model, which gets the first stand-in
        above = self.above
        if above is not None:  # whose own slot keeps it out of copies
            above.call_instead(stand_in)
            self.stand_in = stand_in
            return
        self._before = self.module.__dict__.get(self._method)
        try:
            setattr(self.module, self._method, stand_in)
        except (AttributeError, RuntimeError, TypeError) as error:
            what = f"the {self._method} of module {self.path!r}"
            raise AttachError(f"cannot replace {what}: {error}") from error
        try:
            plain_copies.begin(self.module)
        except BaseException:
            self._put_back()
            raise
        self.stand_in = stand_in

    def remove(self) -> None:
        """Restores what was there. What somebody else has put on top stays, and the stand-in passes on.

        A module that another one has replaced, and that is gone, has nothing to restore.
        """
        stand_in, self.stand_in = self.stand_in, None
        assert stand_in is not None
        stand_in.passive = True
        if self._above is not None:
            above = self.above
            if above is not None and above.original is stand_in:
                above.call_as(stand_in)
            return
        if self._module() is None:
            return
        plain_copies.end(self.module)
        if self.module.__dict__.get(self._method) is stand_in:  # else somebody else's is on top
            self._put_back()

    def _put_back(self) -> None:
        if self._before is None:
            del self.module.__dict__[self._method]
        else:
            setattr(self.module, self._method, self._before)
