# SPDX-License-Identifier: Apache-2.0
"""Parameters, buffers and flags of modules, name by name: for what differs from what a call has noted."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from memscale.state.module_notes import ModuleNotes, Stamp


class Registered:
    """What was registered on modules, name by name.

    Attributes:
        registries: those of parameters and of buffers, with their names.
        vacant: names without a tensor.
        tensors: (registry, name, tensor, stamp, requires_grad) of every parameter and buffer.
    """

    __slots__ = ("registries", "tensors", "vacant")

    def __init__(self, notes: ModuleNotes) -> None:
        self.registries: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.vacant: list[tuple[dict[str, Any], str]] = []
        self.tensors: list[tuple[dict[str, Any], str, Tensor, Stamp, bool]] = []
        facts = zip(notes.stamps, notes.graded, strict=True)
        for registry, held in notes.registries():
            self.registries.append((registry, tuple(held)))
            for name, value in held.items():
                if value is None:
                    self.vacant.append((registry, name))
                else:
                    self.tensors.append((registry, name, value, *next(facts)))


class PresentModules:
    """What modules have before a recompute: flags, what is registered, and who requires gradients."""

    def __init__(self, notes: ModuleNotes, registered: Registered) -> None:
        self._flags = [(module, module.training, type(module)) for module in notes.modules]
        # A scripted module's registry gives other objects each time.
        self._registries = [
            (registry, dict(registry)) for registry, _ in registered.registries if isinstance(registry, dict)
        ]
        self._leaves = [(tensor, tensor.requires_grad) for tensor in notes.tensors if tensor.is_leaf]

    def put_back(self) -> None:
        """Makes them have it again."""
        for module, training, kind in self._flags:
            set_flags(module, training, kind)
        for registry, before in self._registries:
            if registry.keys() != before.keys() or any(registry[name] is not before[name] for name in before):
                refill(registry, before)
        for tensor, requires_grad in self._leaves:
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)


def set_flags(module: nn.Module, training: bool, kind: type[nn.Module]) -> None:
    """Gives a module its mode and its class, where it has others."""
    if module.training != training:
        module.training = training
    if type(module) is not kind:
        module.__class__ = kind


def bound(registry: dict[str, Any], name: str) -> Any:
    """What a name of a registry is bound to. A scripted module's has no `get`."""
    return registry[name] if name in registry else None  # noqa: SIM401


def refill(registry: dict[str, Any], values: dict[str, Any]) -> None:
    """Makes a registry hold these, in this order."""
    registry.clear()
    registry.update(values)
