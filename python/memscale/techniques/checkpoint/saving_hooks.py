# SPDX-License-Identifier: Apache-2.0
"""Hooks on saved tensors that are not ours: `save_on_cpu`, one's own compression.

They are given what plain PyTorch saves, and may change it. A technique that saves other tensors, or saves
them behind hooks of its own, would keep that from them: so a module that is called under such hooks, or where
hooks are disabled, runs as it is. Those of `torch.utils.checkpoint` only drop what they are given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from memscale.torchkit.compiled import never_compiled
from memscale.uninterrupted import uninterrupted

_AUTOGRAD: Final[Any] = torch._C._autograd

_NEEDED: Final = (
    "_top_saved_tensors_default_hooks",
    "_push_saved_tensors_default_hooks",
    "_pop_saved_tensors_default_hooks",
    "_saved_tensors_hooks_is_enabled",
    "_saved_tensors_hooks_enable",
    "_saved_tensors_hooks_disable",
    "_saved_tensors_hooks_get_disabled_error_message",
)
_HAS_HOOK_STACK: Final = all(hasattr(_AUTOGRAD, name) for name in _NEEDED)
"""Private to PyTorch, all of them there since 2.4 at least. Without them nobody's hooks are known of."""

_AROUND: Final = "memscale_around"
"""Attribute of a `pack` of ours (`weights/saves.py`) that calls the hooks around it: these."""


class _Told:
    """Whether the log has said so."""

    once = False


def under_foreign_hooks() -> bool:
    """Whether hooks are in force here that are not ours, or hooks are refused. The log says so once."""
    if not _HAS_HOOK_STACK or not _are_foreign():
        return False
    if not _Told.once:
        _Told.once = True
        logging.getLogger("memscale").warning(
            "a module runs under hooks on saved tensors that are not MemScale's (saved_tensors_hooks, "
            "save_on_cpu), or where hooks are refused: the plan is not in force there, modules run as they "
            "are, and take the memory that they take without a plan"
        )
    return True


def runs_under_saving_hooks() -> bool:
    """Whether any hooks on saved tensors are in force here, or hooks are refused."""
    return (
        not _HAS_HOOK_STACK
        or _AUTOGRAD._top_saved_tensors_default_hooks(False) is not None
        or not _AUTOGRAD._saved_tensors_hooks_is_enabled()
    )


def _are_foreign() -> bool:
    hooks = _AUTOGRAD._top_saved_tensors_default_hooks(False)
    while hooks is not None and any(map(_is_known, hooks)):
        hooks = getattr(hooks[0], _AROUND, None)
    return hooks is not None or not _AUTOGRAD._saved_tensors_hooks_is_enabled()


def _is_known(hook: Any) -> bool:
    """Whether it is ours, or a checkpoint's of PyTorch's, which leaves all values as they are."""
    module = str(getattr(hook, "__module__", None) or type(getattr(hook, "__self__", None)).__module__)
    return module.partition(".")[0] == "memscale" or module == "torch.utils.checkpoint"


@contextmanager
def without_saving_hooks() -> Iterator[None]:
    """No hooks on saved tensors, and none refused, for a block: planning is nothing that they are for."""
    if not _HAS_HOOK_STACK:
        yield
        return
    refused = _AUTOGRAD._saved_tensors_hooks_get_disabled_error_message()
    hooks: list[tuple[Any, Any]] = []
    try:
        if refused is not None:
            _AUTOGRAD._saved_tensors_hooks_enable()
        while (top := _AUTOGRAD._top_saved_tensors_default_hooks(True)) is not None:
            hooks.append(top)
            _AUTOGRAD._pop_saved_tensors_default_hooks()
        yield
    finally:
        with uninterrupted():
            for pair in reversed(hooks):
                _AUTOGRAD._push_saved_tensors_default_hooks(*pair)
            if refused is not None:
                _AUTOGRAD._saved_tensors_hooks_disable(refused)


never_compiled(under_foreign_hooks, _are_foreign, _is_known)
