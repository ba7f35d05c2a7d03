# SPDX-License-Identifier: Apache-2.0
"""Tiles over the sequence: a module that treats each row alone runs on some rows at a time.

A transformer's feed-forward part makes tensors several times as wide as its input, for every token. Here they
exist for one tile of tokens at a time:

    forward    x ═╦═ rows 0…R   ──► forward ──► y rows 0…R       what autograd would save is dropped:
                  ╠═ rows R…2R  ──► forward ──► y rows R…2R      only x is held
                  ╚═ …
    backward   for each tile: forward again up to the last tensor that is saved, then backward;
               gradients of the weights add up, those of x go to their rows

Each tile's autograd graph is the one of its first run, whose saves are numbers. the recompute therefore need
not reach the end: it stops as soon as the last number has its tensor, and the last product of an MLP, which
nobody saves, is not computed again. Gradients of weights are added up inside the products that make them
(tile_products.py); what dropouts drop is drawn for all rows beforehand (row_dropout.py).

Inside a checkpointed block all this happens once per block and step. x and the dropouts' masks are saved
before the first tile runs. In the block's recompute they are the last things that backward wants, so the run
ends there; they go to the tiles, which then run for the second time, and nothing runs a third time.

It does where the block saves something behind the module. A norm of the module's output needs that output
before its gradient is known, so the block's recompute must pass through the tiles, whose intermediates are
dropped again; their own, shortened run is one more. To keep the output from the first run would cost what the
checkpoint holds for the block once more, for every block. The trace sees the third run, so a plan counts its
time. The search takes the largest part that treats rows alone, which leaves less behind it: a norm behind the
residual of a BERT block is inside.

Not bit-equal to the plain module. Gradients of the weights are sums over tiles (about 3e-7 from plain's at
width 768 in float32); for weights in half precision they are summed in float32. Products of 128 or 256 rows
gave the bits of the whole product on the CPU, so output and gradient of x were mostly equal, but a short last
tile may take another kernel, which rounds differently. Dropout drops
what it drops in the plain step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_globals

from memscale.errors import AttachError
from memscale.techniques.checkpoint.call_kinds import stands_aside
from memscale.techniques.checkpoint.checkpoint_state import all_below
from memscale.techniques.checkpoint.recompute_check import UNCHECKED
from memscale.techniques.tiles.row_dropout import Dropping, OtherDropoutError, dropouts_of
from memscale.techniques.tiles.row_facts import RowFacts
from memscale.techniques.tiles.row_run import Work, run_in_tiles
from memscale.techniques.tiles.tile_parts import RandomState
from memscale.torchkit import plain_copies
from memscale.torchkit.exchange_lock import lock_of
from memscale.torchkit.forward_slot import ForwardSlot, StandIn

NAME = "mlp_tile"

FEWEST_ROWS = 352
"""Rows of a tile, at least. Products of few rows are slower: on Llama's block of width 768 with 2,048 tokens,
tiles of 256, 352 and 512 rows took 1.03, 1.02 and 1.00 to 1.02 of a checkpointed block's processor time and
saved 69, 64 and 56 % of the intermediates (bench/python/mlp_tile.py)."""

_FEWEST_TILES, _MOST_TILES = 8, 16
"""In between, twice as many tiles as the module is wider inside: a tile then has half of the bytes of input
and output, and with more tiles that would not show beside those."""

_ORDINARY = (Tensor, nn.Parameter, FakeTensor)
"""Tensors whose memory is where it seems to be."""


def tile_rows(rows: int, facts: RowFacts) -> int:
    """Rows per tile.

    A batch with fewer rows never has larger tiles, so that it never needs more memory.

    Args:
        rows: of the whole input.
        facts: of the module. The wider it is inside, the more tiles.
    """
    tiles = min(_MOST_TILES, max(_FEWEST_TILES, round(2 * facts.inner_bytes / max(1, facts.outer_bytes))))
    return max(FEWEST_ROWS, -(-rows // tiles))


class _Done:
    """What a stand-in has done. Apart from it, so that nobody who compares attributes sees a change."""

    __slots__ = ("reason", "used")

    def __init__(self, used: bool = False, reason: str = "") -> None:
        self.used = used
        self.reason = reason


class TiledForward(StandIn):
    """Stands in for a forward, or another method, that treats each row alone.

    Attributes:
        done: whether it has run in tiles since it was attached; and why it did not, the last time that it
            stood aside, "" if it never did.
    """

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        what: RowTiles,
        parts: Sequence[nn.Module],
    ) -> None:
        super().__init__(module, original)
        self.path, self.facts = what.path, what.facts
        self.argument, self.method, self.check = what.argument, what.method, what.check
        self.parts = [weakref.ref(part) for part in parts]
        self.done = _Done()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward tile by tile, or as it is where that cannot be."""
        if torch.compiler.is_compiling() or self.passive or stands_aside():
            return self.original(*args, **kwargs)
        x = self._input(args, kwargs)
        reason = "it is called with other arguments" if x is None else self.why_not(x)
        if reason or x is None:
            return self._aside(reason, *args, **kwargs)
        del args, kwargs
        return self._in_tiles(x)

    def _aside(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Runs as it is, but not beside another thread's tiles: its graph would end at their stand-ins."""
        self.done.reason = reason
        with lock_of(list(all_below(roots_of(self.module, self.facts, self.method)))):
            return self.original(*args, **kwargs)

    def _in_tiles(self, x: Tensor) -> Any:
        roots = roots_of(self.module, self.facts, self.method)
        dropouts = dropouts_of(self.module) if self.facts.drops else {}
        called = {drop.path: dropouts[drop.path] for drop in self.facts.drops}
        dropping = Dropping(called, self.facts.drops, x)
        reason = dropping.why_not(x)
        if reason:
            return self._aside(reason, x)
        before = RandomState(x.device) if dropping.calls else None
        try:
            rows = tile_rows(x.numel() // x.shape[-1], self.facts)
            work = Work(roots, self.original, self.path, dropping, self.check)
            output = run_in_tiles(work, x, rows)
        except OtherDropoutError as error:
            assert before is not None
            before.set()
            return self._aside(str(error), x)
        if output is None:
            return self.original(x)
        self.done.used = True
        return output

    def _input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) + len(kwargs) != 1:
            return None
        return args[0] if args else kwargs.get(self.argument)

    def why_not(self, x: Any) -> str:
        """What of this call, or of what the module has become, was not part of the proof; "" if nothing."""
        if type(x) not in _ORDINARY or x.layout is not torch.strided or not x.is_floating_point():
            return "its input is not an ordinary tensor"
        if x.dim() not in self.facts.dims or x.shape[-1] != self.facts.width or x.numel() == 0:
            return f"its input has the shape {tuple(x.shape)}"
        parts = all_below(roots_of(self.module, self.facts, self.method))
        if len(parts) != len(self.parts) or any(
            part is not known() for part, known in zip(parts, self.parts, strict=True)
        ):
            return "its parts are not those that it had"
        return hooked(parts[1:] if self.method == "forward" else parts)


def roots_of(module: nn.Module, facts: RowFacts, method: str) -> tuple[nn.Module, ...]:
    """What a forward runs: the module; of another method, the children that it needs."""
    if method == "forward":
        return (module,)
    return tuple(child for name, child in module.named_children() if name in facts.children)


_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)

_OWN_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooked(parts: Sequence[nn.Module]) -> str:
    """Whether somebody wants to see the parts' calls, which are other ones in tiles; "" if nobody."""
    if any(getattr(module_globals, name, None) for name in _GLOBAL_HOOKS):
        return "there are hooks on all modules"
    for part in parts:
        if any(part.__dict__.get(name) for name in _OWN_HOOKS):
            return f"a {type(part).__name__} in it has hooks"
    return ""


class RowTiles:
    """Tiles over the rows of one module, as planner and executor attach it.

    Args:
        module: which treats each row alone.
        path: its qualified name.
        facts: what is known of it.
        argument: name of its forward's argument.
        method: what is replaced, and what `facts` and `argument` speak of.

    Attributes:
        check: of its recomputes, from the next time that it is attached.
    """

    name = NAME

    def __init__(
        self, module: nn.Module, path: str, facts: RowFacts, argument: str, method: str = "forward"
    ) -> None:
        self.module = module
        self.path = path
        self.facts = facts
        self.argument = argument
        self.method = method
        self.check = UNCHECKED
        self.beneath: StandIn | None = None
        self.slot: ForwardSlot | None = None
        self._stand_in: TiledForward | None = None  # the last one, also after it has been removed

    @property
    def used(self) -> bool:
        """Whether it has run in tiles since it was attached last."""
        return self._stand_in is not None and self._stand_in.done.used

    @property
    def reason(self) -> str:
        """Why it stood aside since then, if it did."""
        return "" if self._stand_in is None else self._stand_in.done.reason

    def parts(self) -> list[nn.Module]:
        """All modules that run in tiles."""
        return all_below(roots_of(self.module, self.facts, self.method))

    def attach(self) -> None:
        """Replaces the forward, or the method.

        Raises:
            AttachError: the module does not let it be replaced.
        """
        slot = ForwardSlot(self.module, self.path) if self.method == "forward" else None
        original = getattr(self.module, self.method) if slot is None else slot.present
        stand_in = TiledForward(self.module, original, self, self.parts())
        if slot is not None:
            slot.put(stand_in)
        elif self.method in self.module.__dict__:
            raise AttachError(f"module {self.path!r}: its {self.method} was replaced by somebody else")
        else:
            self.module.__dict__[self.method] = stand_in
            plain_copies.begin(self.module)
        self.slot, self._stand_in = slot, stand_in

    def undo(self) -> None:
        """Restores what was there."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.remove()
            return
        assert self._stand_in is not None
        self._stand_in.passive = True
        plain_copies.end(self.module)
        if self.module.__dict__.get(self.method) is self._stand_in:  # else somebody else's is on top
            del self.module.__dict__[self.method]
