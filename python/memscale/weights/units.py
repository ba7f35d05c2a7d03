# SPDX-License-Identifier: Apache-2.0
"""Finds the weights of a model that can be streamed, and groups them into units.

block of a list   one unit: a child of `nn.ModuleList` or `nn.Sequential`, at any depth
module            one unit, where it is in no such block
shared weight     a unit of its own, where modules of several units have it
embedding         the same; a forward reads the rows that it needs in the file
the rest          stays: what is small, what is no plain tensor, what somebody else holds

On a card no operation reads the backing store. There a block's weights are resident while any module in it
runs. Weights of several blocks, of embeddings and of modules around others stay on the card; so do trained
weights, unless their optimizer steps them in pieces.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch import nn

from memscale.torchkit.extents import fills_memory
from memscale.weights.gradients import is_watched
from memscale.weights.unit import is_held, places_of

_LISTS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

_WORTH_PARTING: Final = 8
"""Times the bytes that a unit must have, from which on a block is parted into the lists inside it."""

_Owners = list[tuple[str, str, nn.Module]]

_NONE_TRAINED: Final[Mapping[int, str]] = {}
_TRAINED: Final = "it is trained, and the step of what is trained runs on the card"


@dataclass(frozen=True)
class Owner:
    """A module whose forward uses weights of a unit.

    Attributes:
        path: the module's.
        name: of one of its own weights; "inner.weight": of one in a module below it.
        parameters: those that are in memory while it runs: its own, and those of modules below it, which it
            may use without calling them, as attention does.
    """

    path: str
    name: str
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True)
class UnitFound:
    """A unit that could be streamed.

    Attributes:
        path: of the block; of a shared weight, its name.
        names: of the parameters, as `named_parameters` has them.
        parameters: the same.
        owners: modules whose forwards need a block; none where a few rows are read in the file.
    """

    path: str
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    owners: tuple[Owner, ...]

    def nbytes(self, half: frozenset[str] = frozenset()) -> int:
        """Bytes of a block, with weights of these names in 16 bits."""
        sizes = [
            2 * value.numel() if name in half else value.nbytes
            for name, value in zip(self.names, self.parameters, strict=True)
        ]
        return places_of(sizes)[1]


def units_of(
    model: nn.Module,
    least_bytes: int,
    streamed: frozenset[int] = frozenset(),
    card: torch.device | None = None,
    trained: Mapping[int, str] = _NONE_TRAINED,
) -> tuple[list[UnitFound], dict[str, str]]:
    """The units of a model in module order, and why parameters stay that could be worth it: name → reason.

    Args:
        model: any.
        least_bytes: of a unit.
        streamed: ids of parameters that are streamed now; they are found again.
        card: that the model lies on; None: the CPU.
        trained: on a card, id of a trained parameter → "" if its optimizer steps it in pieces, or why not.
    """
    if reason := _unseen_writes(model):
        return [], {"": reason}
    blocks = _blocks(model, least_bytes)
    having: dict[int, _Owners] = {}
    for path, module in model.named_modules():
        for name, value in module._parameters.items():
            if value is not None:
                having.setdefault(id(value), []).append((path, name, module))
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    left: dict[str, str] = {}
    for name, value in model.named_parameters():
        owners = having[id(value)]
        places = {blocks.get(path, path) for path, _, _ in owners}
        reason = "" if id(value) in streamed else _refusal(value, owners, card)
        if card is not None:
            reason = reason or _refusal_on_card(value, owners, blocks, trained)
        if reason:
            left[name] = reason
        else:
            groups.setdefault(places.pop() if len(places) == 1 else name, []).append((name, value))
    units = [_unit(path, members, having) for path, members in groups.items()]
    if card is not None:
        units = [_with_all_around(unit, model, blocks) for unit in units]
    return [unit for unit in units if unit.nbytes() >= least_bytes], left


def _unit(path: str, members: list[tuple[str, nn.Parameter]], having: dict[int, _Owners]) -> UnitFound:
    owners: dict[str, tuple[str, dict[int, nn.Parameter]]] = {}
    mine = {id(value): value for _, value in members}
    for _, value in members:
        for place, name, module in having[id(value)]:
            inside = list(module.parameters())
            if _uses_all(module, mine, inside):
                owners.setdefault(place, (name, {id(item): item for item in inside if id(item) in mine}))
    return UnitFound(
        path,
        tuple(name for name, _ in members),
        tuple(value for _, value in members),
        tuple(Owner(place, name, tuple(used.values())) for place, (name, used) in owners.items()),
    )


def _uses_all(module: nn.Module, mine: Mapping[int, nn.Parameter], inside: list[nn.Parameter]) -> bool:
    """Whether a module's forward is to have a block of the unit; an embedding reads a few rows of it."""
    if type(module) is nn.Embedding:
        return False
    # A module around others would have its block in memory beside theirs all the time.
    is_around = any(next(child.parameters(), None) is not None for child in module.children())
    return not is_around or 2 * len(mine.keys() & set(map(id, inside))) >= len(inside)


def _with_all_around(unit: UnitFound, model: nn.Module, blocks: Mapping[str, str]) -> UnitFound:
    """A unit whose weights are there while any module of its block runs that has some of them inside."""
    if unit.path not in blocks:
        return unit
    top, owners = model.get_submodule(unit.path), {owner.path: owner for owner in unit.owners}
    mine = {id(value) for value in unit.parameters}
    for path, module in top.named_modules(prefix=unit.path):
        inside = {id(value): (name, value) for name, value in module.named_parameters() if id(value) in mine}
        if inside and path not in owners and _has_forward(module):
            names, values = zip(*inside.values(), strict=True)
            owners[path] = Owner(path, names[0], values)
    return replace(unit, owners=tuple(owners.values()))


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


# ---- blocks ------------------------------------------------------------------------------------------


def _blocks(model: nn.Module, least_bytes: int) -> dict[str, str]:
    """Path of a module → path of the block that it is in, of those that are in one."""
    found: dict[str, str] = {}
    for path, module in _tops(model, "", least_bytes):
        for inner, _ in module.named_modules(prefix=path):
            found.setdefault(inner, path)
    return found


def _tops(module: nn.Module, path: str, least_bytes: int) -> Iterator[tuple[str, nn.Module]]:
    """The blocks in a module: outermost children of lists, but parted where that leaves large ones."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        is_parted = isinstance(child, _LISTS) or _has_blocks(child, least_bytes)
        if isinstance(module, _LISTS) and not is_parted:
            yield inner, child
        else:
            yield from _tops(child, inner, least_bytes)


def _has_blocks(module: nn.Module, least_bytes: int) -> bool:
    """Whether most of a module is in a list of several, and worth parting."""
    total = _bytes(module)
    return total >= _WORTH_PARTING * least_bytes and any(
        isinstance(inner, _LISTS) and len(inner) > 1 and 2 * _bytes(inner) >= total
        for inner in module.modules()
        if inner is not module
    )


def _bytes(module: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in module.parameters())


# ---- what stays --------------------------------------------------------------------------------------


def _refusal(value: nn.Parameter, owners: _Owners, card: torch.device | None) -> str:
    if type(value) is not nn.Parameter or value.layout is not torch.strided or value.is_complex():
        return "it is no plain tensor"
    if value.device.type != ("cpu" if card is None else card.type):
        return "it lies on another device"
    whole = value.untyped_storage().nbytes() == value.nbytes
    if value.numel() == 0 or not fills_memory(value) or not whole or (card is None and value.is_shared()):
        return "it shares its memory with others"
    if is_held(value):
        return "somebody else holds its memory"
    for _, _, module in owners:
        if isinstance(module, torch.jit.ScriptModule):
            return "a scripted module has it"
    return ""


def _refusal_on_card(
    value: nn.Parameter, owners: _Owners, blocks: Mapping[str, str], trained: Mapping[int, str]
) -> str:
    if value.requires_grad and (reason := trained.get(id(value), _TRAINED)):
        return reason
    if value.requires_grad and is_watched(value):
        return "somebody has hooks on its gradient"
    if len({blocks.get(path, path) for path, _, _ in owners}) > 1:
        return "several blocks share it"
    for path, _, module in owners:
        if isinstance(module, nn.Embedding):
            return "it is an embedding's"
        if path not in blocks and next(module.children(), None) is not None:
            return "its module has others inside"
    return ""


def _unseen_writes(model: nn.Module) -> str:
    """Why weights may be written to in the middle of a forward with no version to show it; "" if not.

    Whose forward, or whose hooks, name `data` may write to any weight of the model.
    """
    for module in model.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        kind: Any = type(module)
        if writes_past_versions(kind) or any(_names_data(hook, kind) for hook in hooks):
            return f"the forward of a {kind.__name__}, or a hook on it, may write to weights through `.data`"
    return ""


@functools.cache
def writes_past_versions(kind: type[Any]) -> bool:
    """Whether a forward, or what it calls, names `data`: writes to that change no version."""
    return _names_data(getattr(kind, "forward", None), kind)


def _names_data(function: Any, kind: type[Any]) -> bool:
    """Whether a function names `data`, or one that it names: a method of the class, or of its own module."""
    seen: set[CodeType] = set()
    waiting: list[Any] = [function]
    while waiting:
        found = waiting.pop()
        found = inspect.unwrap(getattr(found, "__func__", found)) if callable(found) else None
        code = getattr(found, "__code__", None)
        if not isinstance(code, CodeType) or code in seen or _is_torchs(found):
            continue
        seen.add(code)
        names = set(_names(code))
        if "data" in names:
            return True
        around = getattr(found, "__globals__", {})
        waiting += [getattr(kind, name, None) for name in names]
        waiting += [around[name] for name in names if isinstance(around.get(name), FunctionType)]
    return False


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


def _names(code: CodeType) -> Iterator[str]:
    inner = (item for item in code.co_consts if isinstance(item, CodeType))
    return itertools.chain(code.co_names, *map(_names, inner))
