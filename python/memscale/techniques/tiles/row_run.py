# SPDX-License-Identifier: Apache-2.0
"""One call of a module in tiles of rows: forward, and what backward does for it.

    caller's graph    x ──► Hold  ──► held ──┐      and what dropouts drop
                      x, parameters ─────────┴──► _Tiled ──► y          one node
    a tile's graph    leaf ──► _Enter ──► the module's own operators ──► _Leave
                      leaf, and stand-ins for the parameters, end here; saves are numbers

A tile's graph is made by its first run and has no memory: what it would save is dropped, its leaf is one
number in the shape of the rows, and what ends it is one too. Backward runs the forward again for
what was dropped, up to the last of it, and then goes through that same graph.

Nothing in a tile's graph leads back to the call. A cycle through autograd's nodes is never collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memscale.techniques.checkpoint import global_hooks
from memscale.techniques.checkpoint.checkpoint_state import Body, State, all_below
from memscale.techniques.checkpoint.recompute_check import UNCHECKED, RecomputeCheck
from memscale.techniques.tiles.row_dropout import Dropping
from memscale.techniques.tiles.tile_parts import GradientSum, Saves, Sums, under_mode_as_before
from memscale.techniques.tiles.tile_products import Hold, held_by, layers_of, summed_inside
from memscale.torchkit.exchange_lock import lock_of


@dataclass(frozen=True)
class Work:
    """What runs in tiles.

    Attributes:
        roots: modules that it reads, with all that is in them.
        run: a forward, rows → rows.
        path: name for messages.
        dropping: what its dropouts do in this call.
        check: of its recomputes.
    """

    roots: tuple[nn.Module, ...]
    run: Callable[..., Any]
    path: str
    dropping: Dropping
    check: RecomputeCheck = UNCHECKED


# ---- one tile ------------------------------------------------------------------------------------------


class _Enter(torch.autograd.Function):
    """Puts rows of x into a tile's graph, whose leaf is a tensor of their shape without their memory."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, rows: Tensor) -> Tensor:
        return rows.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Tile:
    """Some rows of one call."""

    __slots__ = ("end", "rows", "values")

    def __init__(self, rows: slice, values: Saves) -> None:
        self.rows = rows
        self.values = values
        self.end: Tensor | None = None


# ---- one call ------------------------------------------------------------------------------------------


class Call:
    """One forward in tiles, until its graph is gone.

    Args:
        work: what runs.
        x: the input, `[..., width]`.
        rows: per tile.
    """

    def __init__(self, work: Work, x: Tensor, rows: int) -> None:
        self.work = work
        self.path = work.path
        self.is_checked = work.check.of_call()
        self.shape = x.shape
        self.count = x.numel() // x.shape[-1]
        self.needs_x = x.requires_grad
        self.rows = rows
        self.state = State.before(Body(work.path), all_below(work.roots), ())
        self.state.cpu_rng = None  # nothing in a tile draws
        self.under_mode = torch._C._len_torch_dispatch_stack() > 0
        self.places: list[tuple[dict[str, Any], str, int]] = []  # registry, name, number of the parameter
        self.parameters: list[Tensor] = []
        self.aliases: list[Tensor] = []
        self.leaves: dict[int, Tensor] = {}  # rows of a tile → leaf of its graph
        self.tiles: list[_Tile] = []
        self.sums = Sums()
        self._note_parameters()
        self.weights = {id(alias) for alias in self.aliases}
        self.modules = [module for module, _ in self.state.flags]
        self.layers = layers_of(self.modules)

    def _note_parameters(self) -> None:
        numbers: dict[int, int] = {}
        for registry, name, tensor, _, requires_grad in self.state.tensors:
            if not requires_grad:
                continue
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(self.parameters)
                self.parameters.append(tensor)
                self.aliases.append(nn.Parameter(tensor.detach()))
            self.places.append((registry, name, numbers[id(tensor)]))

    @contextmanager
    def aliased(self) -> Iterator[None]:
        """Runs the block with stand-ins for the parameters, whose gradients end with this call.

        Hooks on the parameters, and whatever they were made of, see the sum over all tiles alone.
        """
        before = [(registry, name, registry[name]) for registry, name, _ in self.places]
        try:
            for registry, name, number in self.places:
                registry[name] = self.aliases[number]
            yield
        finally:
            for registry, name, value in before:
                registry[name] = value

    def first_run(self, x: Tensor, masks: Sequence[Tensor]) -> Tensor:
        """All tiles' forward. Returns the output, `[..., width]`, without a graph.

        Args:
            x: the input.
            masks: what dropouts keep of all rows.
        """
        flat = x.detach().reshape(self.count, -1)
        output: Tensor | None = None
        with self.aliased(), torch.enable_grad():
            for start in range(0, self.count, self.rows):
                saves = Saves(self.path, self.work.check, self.is_checked)
                tile = _Tile(slice(start, min(self.count, start + self.rows)), saves)
                result = self.run_first(tile, flat, masks)
                self.tiles.append(tile)
                if output is None:
                    output = result if self._is_all(tile) else result.new_empty(self.count, result.shape[-1])
                if not self._is_all(tile):
                    output[tile.rows] = result.reshape(-1, result.shape[-1])
                del result
        self.state.written.after()
        assert output is not None
        # No view: what follows may write to it in place, and autograd forbids that for views from here.
        shape = [*self.shape[:-1], output.shape[-1]]
        whole: Tensor = torch.ops.aten._unsafe_view.default(output, shape)
        return whole

    def _is_all(self, tile: _Tile) -> bool:
        return bool(tile.rows.stop - tile.rows.start == self.count)

    def run_first(self, tile: _Tile, flat: Tensor, masks: Sequence[Tensor]) -> Tensor:
        """The output of the first tile, which shows what the part saves."""
        hooks = saved_tensors_hooks(tile.values.pack, tile.values.unpack)
        rows = self._rows_of(tile, flat)
        with self._as_in_tiles(tile, masks, first=True), hooks:
            result = self._run(rows, tile.values)
        tile.values.first_is_over()
        if result.shape[:-1] != rows.shape[:-1]:
            raise RuntimeError(
                f"module {self.path!r} gave {tuple(result.shape)} for {tuple(rows.shape)}: it does not treat "
                "each row alone, as it seemed to; switch enable_tiling off"
            )
        tile.end = _Leave.apply(result) if result.requires_grad else None  # type: ignore[no-untyped-call]
        return result.detach()

    @contextmanager
    def _as_in_tiles(self, tile: _Tile, masks: Sequence[Tensor], first: bool = False) -> Iterator[None]:
        """A tile's dropouts and products: in its runs, and in backward, where checkpoints in it recompute."""
        products = summed_inside(self.layers, self.weights, self.sums)
        with self.work.dropping.applied(masks, tile.rows, first), products:
            yield

    def _run(self, rows: Tensor, first: Saves | None = None) -> Tensor:
        """The forward of a tile, on rows that its graph begins with. `first`: of its first run."""
        if self.needs_x:
            rows = _Enter.apply(self._leaf(rows), rows)  # type: ignore[no-untyped-call]
        if first is not None:
            first.follow(rows)
        result: Tensor = self.work.run(rows)
        return result

    def _rows_of(self, tile: _Tile, flat: Tensor) -> Tensor:
        """Rows of a tile, with as many dimensions as the input has."""
        part = flat[tile.rows]
        return part.view(*(1 for _ in self.shape[:-2]), *part.shape)

    def _leaf(self, rows: Tensor) -> Tensor:
        count = rows.shape[-2]
        if count not in self.leaves:
            leaf = torch.empty((), dtype=rows.dtype, device=rows.device).expand(rows.shape)
            self.leaves[count] = leaf.requires_grad_()
        return self.leaves[count]

    def backward(self, x: Tensor, masks: Sequence[Tensor], grad: Tensor) -> list[Tensor | None]:
        """Gradients of x (None if it needs none) and of the parameters, tile by tile.

        Args:
            x: the input again.
            masks: what dropouts keep of all rows, again.
            grad: of the output.
        """
        flat, flat_grad = x.detach().reshape(self.count, -1), grad.reshape(self.count, -1)
        into = flat.new_empty(flat.shape) if self.needs_x and len(self.tiles) > 1 else None
        held = {tensor.untyped_storage()._cdata for tensor in (flat, flat_grad, *self.aliases)}
        sums = [GradientSum(alias, len(self.tiles), held) for alias in self.aliases]
        self.sums.by_alias = {id(alias): part for alias, part in zip(self.aliases, sums, strict=True)}
        hooks = [alias.register_hook(part.add) for alias, part in zip(self.aliases, sums, strict=True)]
        try:
            with (
                self.state.restored(),
                self.aliased(),
                under_mode_as_before(self.under_mode),
                global_hooks.silenced(),
            ):
                for tile in self.tiles:
                    part = self.backward_of(tile, flat, masks, flat_grad)
                    if into is None:
                        whole = part
                    elif part is None:
                        into[tile.rows].zero_()
                    else:
                        into[tile.rows] = part.reshape(-1, part.shape[-1])
                    del part
        finally:
            self.sums.by_alias = {}
            for tile in self.tiles:
                tile.values.found.clear()
            for hook in hooks:
                hook.remove()
        whole = into if into is not None else whole
        of_x = whole.reshape(self.shape) if self.needs_x and whole is not None else None
        return [of_x, *(part.take() for part in sums)]

    def backward_of(
        self, tile: _Tile, flat: Tensor, masks: Sequence[Tensor], flat_grad: Tensor
    ) -> Tensor | None:
        """Recomputes a tile and runs its backward; the gradient of its rows."""
        if tile.end is None:
            return None
        rows = self._rows_of(tile, flat)

        def run() -> None:
            with torch.enable_grad():
                self._run(rows)

        leaves = [self._leaf(rows)] if self.needs_x else []
        with self._as_in_tiles(tile, masks):
            tile.values.find(run)
            grads = torch.autograd.grad(
                [tile.end],
                [*leaves, *self.aliases],
                [self._rows_of(tile, flat_grad)],
                retain_graph=True,  # the graph has no memory, and may be asked again
                allow_unused=True,
            )
        return grads[0] if self.needs_x else None


class _Leave(torch.autograd.Function):
    """The end of a tile's graph, as a tensor without memory. PyTorch 2.4 takes no gradient edge there."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        return result.new_empty(()).expand(result.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class _Tiled(torch.autograd.Function):
    """All tiles as one node of the caller's graph."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, masks: Sequence[Tensor], held: Tensor, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.call = call
        ctx.held = held
        ctx.set_materialize_grads(False)
        return call.first_run(x, masks)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: Call = ctx.call
        grad = grads[0]
        if grad is None:
            return (None, None, None, None, *(None for _ in call.parameters))
        x, *masks = held_by(ctx.held)
        with torch.no_grad(), lock_of(call.modules):
            results = call.backward(x, masks, grad.detach())
        if torch.is_grad_enabled():  # create_graph
            first = next(tensor for tensor in (grad, x, *call.parameters) if tensor.requires_grad)
            results = [
                None if result is None else _NoSecond.apply(call.path, first, result)  # type: ignore[no-untyped-call]
                for result in results
            ]
        return (None, None, None, *results)


class _NoSecond(torch.autograd.Function):
    """Passes a gradient on, and says of the gradient of that gradient that there is none."""

    @staticmethod
    def forward(ctx: Any, path: str, first: Tensor, grad: Tensor) -> Tensor:
        ctx.path = path
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"module {ctx.path!r} runs in tiles (mlp_tile), which have no second derivative: "
            "switch enable_tiling off for a step that differentiates twice"
        )


def run_in_tiles(work: Work, x: Tensor, rows: int) -> Tensor | None:
    """The output of a forward, computed tile by tile.

    Args:
        work: what runs.
        x: the input, `[..., width]`, on any layout.
        rows: per tile; the last one may have fewer.

    Returns:
        The output, `[..., features]`. None where nothing needs a gradient, so that there is nothing to save.

    Raises:
        OtherDropoutError: by a dropout that is not called as it was when it was looked at.
    """
    # No other thread may take the stand-ins for the parameters.
    with lock_of(list(all_below(work.roots))):
        return _run_in_tiles(work, x, rows)


def _run_in_tiles(work: Work, x: Tensor, rows: int) -> Tensor | None:
    call = Call(work, x, rows)
    anchor = next((tensor for tensor in (x, *call.parameters) if tensor.requires_grad), None)
    if anchor is None:
        return None
    masks = work.dropping.draw(x.device)
    held = Hold.apply(anchor, x, *masks)  # type: ignore[no-untyped-call]
    output: Tensor = _Tiled.apply(call, masks, held, x, *call.parameters)  # type: ignore[no-untyped-call]
    return output
