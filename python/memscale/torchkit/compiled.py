# SPDX-License-Identifier: Apache-2.0
"""Interoperability with `torch.compile`.

Compiled code calls ordinary Python: hooks on saved tensors, for instance, while its outputs are packed. The
compiler watches every frame that starts meanwhile and would compile those too, again for each shape, and
MemScale's bookkeeping is nothing to compile. And a compiled part of a model is traced as it was written:
under fake tensors the compiler would compile for fakes, and what it made would be used in training.

The compiler's switches are private to PyTorch. Where one is missing, compiled models still train right, but
with compilations that nobody needs.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch._compile import _disable_dynamo

_SWITCHES: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Runs the block, and all compiled code that it calls, as if nothing were compiled."""
    if "torch._dynamo" not in sys.modules or not hasattr(_SWITCHES, "set_eval_frame"):
        yield  # nothing has been compiled in this process
        return
    before = _SWITCHES.set_eval_frame(None)
    try:
        with ExitStack() as stack:
            if hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        _SWITCHES.set_eval_frame(before)


@_disable_dynamo
def outside_compiler(function: Callable[..., Any], *args: Any) -> None:
    """Calls a function for real, from code that is being traced: a graph break.

    Only from there: it loads the compiler.
    """
    function(*args)


_DIFFERENTIATING = ("inductor", "aot_eager", "aot_eager_decomp_partition", "cudagraphs")
"""Backends that are given forward and backward. They know a checkpoint as a mark on what to compute again.

Others are given the forward as it stands, and run `torch.utils.checkpoint` in it with random numbers that are
not replayed: wrong gradients (seen with backend "eager" and dropout, PyTorch 2.13).
"""

_warned: set[str] = set()


def checkpoints_when_compiled() -> bool:
    """Whether the backend that a forward is being traced for can checkpoint. A constant to the compiler."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        backend = str(getattr(InstructionTranslator.current_tx().output.compiler_fn, "__name__", "unknown"))
    except Exception:  # private to PyTorch
        backend = "unknown"
    if backend in _DIFFERENTIATING:
        return True
    if backend not in _warned:
        _warned.add(backend)
        logging.getLogger("memscale").warning(
            "torch.compile backend %r: parts that it compiles are not checkpointed, since it would not "
            "replay their random numbers",
            backend,
        )
    return False


checkpoints_when_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called, not traced


def never_compiled(*owners: Any) -> None:
    """Makes the compiler leave functions alone, whatever is on the stack when they start.

    Args:
        owners: functions, or classes for all of their own methods; nested functions are included. What they
            call may be compiled.
    """
    for owner in owners:
        members = vars(owner).values() if inspect.isclass(owner) else (owner,)
        for member in members:
            function = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", None) or member))
            if hasattr(function, "__code__"):
                _skip(function.__code__)


def follows_weak_references() -> bool:
    """Whether the compiler gets from a stand-in to its module. PyTorch 2.4's does not, and fails on the way.

    Told from the compiler's text: importing it takes seconds, which nobody else need spend.
    """
    text = Path(torch.__file__).parent / "_dynamo" / "variables" / "__init__.py"
    try:
        return "WeakRefVariable" in text.read_text(encoding="utf-8")
    except OSError:  # another way to install it
        return True


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that the compiler breaks its graph at, and leaves alone with all that it calls.

    What was compiled by a call of its own stays compiled there.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with uncompiled():
            return function(*args, **kwargs)

    left_alone: Any = call
    left_alone._torchdynamo_disable = True
    _skip(left_alone.__code__)
    return call


def _skip(code: CodeType) -> None:
    if hasattr(_SWITCHES, "skip_code"):  # until PyTorch 2.6
        _SWITCHES.skip_code(code)
    elif hasattr(_SWITCHES, "set_code_exec_strategy"):
        action = _SWITCHES._FrameAction
        strategy = _SWITCHES._FrameExecStrategy(action.SKIP, action.DEFAULT)
        _SWITCHES.set_code_exec_strategy(code, strategy)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _skip(constant)
