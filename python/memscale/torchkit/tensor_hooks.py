# SPDX-License-Identifier: Apache-2.0
"""Hooks on tensors, which a forward may register each time it runs: `register_hook` and the like.

On a real weight such a hook would fire in the next backward of the program. On a leaf without data it may be
part of a circle (leaf, hook, node that adds up its gradient, leaf) whose last part the garbage collector does
not see, so that it would never go: that of `register_multi_grad_hook`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def _registries(tensor: Tensor) -> Iterator[tuple[int, dict[int, Any]]]:
    """The present registries of a leaf: before, and after its gradient is added."""
    after: Any = getattr(tensor, "_post_accumulate_grad_hooks", None)
    for place, registry in enumerate((tensor._backward_hooks, after)):
        if registry is not None:
            yield place, registry


class HookImages:
    """Which hooks tensors have.

    Args:
        tensors: parameters and buffers.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._held = [
            (tensor, {place: dict(registry) for place, registry in _registries(tensor)}) for tensor in tensors
        ]

    def restore(self) -> None:
        """Makes them have these, in the same order."""
        for tensor, before in self._held:
            for place, registry in _registries(tensor):
                hooks = before.get(place, {})
                if registry.keys() != hooks.keys() or any(registry[key] is not hooks[key] for key in hooks):
                    registry.clear()
                    registry.update(hooks)


def forget_hooks(tensors: Iterable[Tensor]) -> None:
    """Takes all hooks from tensors that nobody needs any more."""
    for tensor in tensors:
        if tensor.is_leaf:
            for _, registry in _registries(tensor):
                registry.clear()
