# SPDX-License-Identifier: Apache-2.0
"""Looks through a model for what can run in tiles of rows, and says why the rest cannot.

A candidate is a module's forward, or the method by which a block of Hugging Face's computes its feed-forward
part (`feed_forward_chunk`): one tensor in, one tensor out, each row alone, and much wider inside. In each
branch of the tree the largest candidate is taken: it leaves the least behind it that would be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from memscale.state import model_state
from memscale.techniques.left_out import NOTHING_LEFT_OUT, LeftOut
from memscale.techniques.tiles.row_facts import RowFacts, prove, rows_are_apart, takes_one
from memscale.techniques.tiles.row_proof import NotRowWiseError
from memscale.techniques.tiles.row_tiles import RowTiles, hooked
from memscale.torchkit.forward_slot import is_replaced
from memscale.torchkit.scripted import script_calls, uncounted_scripts

_LEAST_GAIN = 1.5
"""Bytes saved inside, over bytes of input and output, below which tiles are not worth their time."""

_MOST_PARTS = 24
"""Modules in a candidate: a whole block has more, and is for checkpoints."""

_METHODS = ("feed_forward_chunk", "ff_chunk")
"""Methods of Hugging Face's blocks that compute the feed-forward part, made to be called on some rows."""

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


class _Search:
    """Looks through a model. Modules that are built alike are tried once.

    Args:
        model: bare.
        left_out: modules to leave alone.
        known: what has been found out about modules of this model before.

    Attributes:
        reasons: why modules that hold wide layers are no candidates, by path.
    """

    def __init__(
        self, model: nn.Module, left_out: LeftOut = NOTHING_LEFT_OUT, known: dict[Any, Any] | None = None
    ) -> None:
        self.model = model
        self.left_out = left_out
        self.structure = model_state.structure_of(model)
        self.known: dict[Any, RowFacts | str] = {} if known is None else known
        self.reasons: dict[str, str] = {}
        self.seen: set[int] = set()
        self.taken: set[int] = set()  # modules of candidates

    def below(self, module: nn.Module, path: str) -> list[RowTiles]:
        """The largest candidates in a module, itself among them, in order."""
        if id(module) in self.seen:
            return []
        self.seen.add(id(module))
        inside = [
            found
            for name, child in module.named_children()
            for found in self.below(child, f"{path}.{name}".lstrip("."))
        ]
        if module is self.model:
            return inside
        for method in ("forward", *_METHODS):
            found = self._candidate(module, path, method, inside)
            if found is not None:
                self.taken.add(id(module))
                parts = {id(part) for part in found.parts()}
                return [*(other for other in inside if id(other.module) not in parts), found]
        return inside

    def _candidate(
        self, module: nn.Module, path: str, method: str, inside: Sequence[RowTiles]
    ) -> RowTiles | None:
        if self.left_out.bars(path):
            return None
        run = getattr(module, method, None)
        argument = takes_one(run) if callable(run) else ""
        if run is None or not argument or sum(parameter.dim() > 1 for parameter in module.parameters()) < 2:
            return None
        everything = list(module.modules())
        whole = method == "forward"
        if whole and (len(inside) > 1 or not 1 < len(everything) <= _MOST_PARTS):
            return None
        reason = _strange(everything, method)
        facts = reason or self._facts(module, run, method)
        if not isinstance(facts, str) and facts.own and not whole:
            facts = f"its {method} uses tensors beside those of its parts"
        if isinstance(facts, str):
            self.reasons[path] = facts
            return None
        found = RowTiles(module, path, facts, argument, method)
        if self._overlaps(found, inside):
            return None
        self.reasons.pop(path, None)
        return found

    def _overlaps(self, found: RowTiles, inside: Sequence[RowTiles]) -> bool:
        """Whether candidates elsewhere in the model are among its parts, or several that it would replace."""
        parts = {id(part) for part in found.parts()}
        replaced = {id(other.module) for other in inside} & parts
        return len(replaced) > 1 or bool((self.taken - replaced) & parts)

    def _facts(self, module: nn.Module, run: Callable[..., Any], method: str) -> RowFacts | str:
        key = type(module), method, self.structure[module], _attributes(module)
        if key not in self.known:
            self.known[key] = _examined(module, run)
        return self.known[key]


def _strange(parts: Sequence[nn.Module], method: str) -> str:
    """What speaks against a module before anything is run; "" if nothing does."""
    for part in parts:
        if isinstance(part, torch.jit.ScriptModule):
            return "it is scripted"
        if is_replaced(part) and (method == "forward" or part is not parts[0]):
            return f"the forward of a {type(part).__name__} in it was replaced"
    if is_replaced(parts[0]) if method == "forward" else method in parts[0].__dict__:
        return f"its {method} was replaced"
    return hooked(parts[1:])


def _attributes(module: nn.Module) -> tuple[Any, ...]:
    """Python attributes of a module and its parts: functions may differ where all else is equal."""
    return tuple(
        (name, _by_value(value))
        for part in module.modules()
        for name, value in sorted(part.__dict__.items())
        if name not in _OF_EVERY_MODULE
    )


def _by_value(value: Any) -> Any:
    """What tells a value from another module's: itself where it is plain, or a tuple; else its identity."""
    plain = (bool, int, float, str, type(None))
    if isinstance(value, plain) or (isinstance(value, tuple) and all(isinstance(x, plain) for x in value)):
        return value
    return id(value)


def _refuse_script() -> None:
    raise NotRowWiseError("it calls scripted code")


def _examined(module: nn.Module, run: Callable[..., Any]) -> RowFacts | str:
    """What is known of a module, or why tiles are not for it."""
    try:
        with uncounted_scripts(), script_calls(_refuse_script):
            facts = prove(module, run)
        if facts.inner_bytes < _LEAST_GAIN * facts.outer_bytes:
            return "it saves little beside its input and output"
        if not rows_are_apart(module, run, facts):
            return "its rows are not independent of each other"
    except NotRowWiseError as error:
        return str(error)
    except Exception as error:  # of the module's own code, or of a fake
        return f"it cannot be looked at: {type(error).__name__}: {error}"
    return facts


def find(
    model: nn.Module, left_out: LeftOut = NOTHING_LEFT_OUT, known: dict[Any, Any] | None = None
) -> list[RowTiles]:
    """What could run in tiles of rows: in each branch of the tree the largest that qualifies.

    Args:
        model: bare; is left as it was.
        left_out: modules to leave alone.
        known: remembers what was found out about modules, from one look at this model to the next.
    """
    with suppress(Exception):
        return _Search(model, left_out, known).below(model, "")
    return []


def reasons(model: nn.Module) -> dict[str, str]:
    """Why modules with wide layers that take one tensor are no candidates, by path."""
    search = _Search(model)
    with suppress(Exception):
        search.below(model, "")
    return search.reasons
