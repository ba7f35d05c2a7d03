# SPDX-License-Identifier: Apache-2.0
"""The autograd graph of deferred logits (deferred_logits.py), and the gradients that come through it.

    forward     hidden ─► HeadNode ─► L0 ─► NextNode ─► L1 ─► TiledCrossEntropy ─► loss
                              │       BridgeNode └─► computed logits ─► anything else
    backward    kept ◄────────┴─ D0 ◄─────────────── D1 ◄───┘

A node gets an ordinary gradient and passes on what plain PyTorch's node would, by running its operation
again under autograd; or it gets a `DeferredGrad` and passes one on, until the head's node takes the gradients
out that it carries. Where both kinds meet, their sum is an ordinary gradient.

What a node needs of the hidden states it saves as any node does, so that hooks on saved tensors (a
checkpoint's, a trace's) see it, and nothing stays in memory that they drop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_map_only

from memscale.techniques.tiles.head_call import HeadCall
from memscale.techniques.tiles.head_products import own_saves
from memscale.techniques.tiles.logit_steps import Step
from memscale.techniques.tiles.tiled_loss import (
    LossArguments,
    TiledLoss,
    autocast_as,
    autocast_now,
    tiled_cross_entropy,
)


@dataclass(frozen=True)
class Place:
    """Where in a chain of operations a deferred tensor is.

    Attributes:
        call: of the head.
        hidden: what the head was called with, without its graph.
        steps: from the head's logits to here.
        meta: shape, strides and dtype.
        device: of the logits.
    """

    call: HeadCall
    hidden: Tensor
    steps: tuple[Step, ...]
    meta: Tensor
    device: torch.device

    def wrapper(self, kind: Any) -> Any:
        """An empty tensor subclass that looks like the tensor here."""
        return Tensor._make_wrapper_subclass(
            kind,
            self.meta.shape,
            strides=self.meta.stride(),
            dtype=self.meta.dtype,
            device=self.device,
            storage_size=0,
        )

    def without_data(self) -> Callable[[Any], Place]:
        """The place, to be made again of the hidden states."""
        call, steps, meta, device = self.call, self.steps, self.meta, self.device
        return lambda hidden: Place(call, hidden, steps, meta, device)

    def empty(self) -> Tensor:
        """A tensor like the one here, whatever is in it."""
        meta = self.meta
        return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=self.device)

    def check(self) -> None:
        """Raises RuntimeError if the hidden states have been changed in place since the head was called."""
        if self.hidden._version != self.call.hidden_version:
            raise RuntimeError(
                "a head's input was changed in place before its logits were computed, which MemScale's "
                "loss tile puts off; change a copy, or set enable_tiling=False"
            )

    def value(self) -> Tensor:
        """The tensor here."""
        with own_saves():
            made = self.call.run(self.hidden)
            for step in self.steps:
                made = step.run(made)
        return made


class LossJob:
    """One cross-entropy on deferred logits."""

    def __init__(self, arguments: LossArguments, dtype: torch.dtype) -> None:
        self.arguments = arguments
        self.dtype = dtype
        self.autocast = autocast_now()

    def run(self, place: Place, target: Tensor) -> TiledLoss:
        """In tiles."""
        hidden = place.hidden.reshape(-1, place.hidden.shape[-1])
        index = torch.arange(len(hidden), device=hidden.device).view(place.hidden.shape[:-1])
        for step in place.steps:
            index = step.rows(index)
        chain = [step.each for step in place.steps if step.each is not None]
        wants = place.call.wants_rows
        target = target.reshape(-1)
        with autocast_as(tuple((kind, dtype, False, False) for kind, dtype, _, _ in self.autocast)):
            return tiled_cross_entropy(
                place.call, hidden, index.reshape(-1), target, chain, self.arguments, wants
            )

    def plain(self, logits: Tensor, target: Tensor) -> Tensor:
        """As a whole."""
        given = self.arguments
        with autocast_as(self.autocast):
            return F.cross_entropy(
                logits,
                target,
                weight=given.weight,
                ignore_index=given.ignore_index,
                reduction=given.reduction,
                label_smoothing=given.label_smoothing,
            )


def loss_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """What `cross_entropy` of logits of a dtype returns under the autocast in force."""
    if dtype not in (torch.bfloat16, torch.float16) or not torch.is_autocast_enabled(device):
        return dtype
    if device != "cpu":
        return torch.float32
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return F.cross_entropy(torch.zeros(1, 2, dtype=dtype), torch.zeros(1, dtype=torch.int64)).dtype


# ---- the graph ---------------------------------------------------------------------------------------


def apply(node: type[torch.autograd.Function], *args: Any) -> Any:
    """The result of a node's function, in the graph."""
    return node.apply(*args)


class HeadNode(torch.autograd.Function):
    """The node of the head's logits."""

    @staticmethod
    def forward(
        ctx: Any, make: Callable[[], Tensor], call: HeadCall, hidden: Tensor, *params: Tensor
    ) -> Tensor:
        """Logits that nobody has computed."""
        ctx.call = call
        ctx.save_for_backward(hidden)
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of hidden states and parameters."""
        wanted = ctx.needs_input_grad[2:]
        if isinstance(grad, DeferredGrad):
            return None, None, *grad.carried
        (hidden,) = ctx.saved_tensors
        again = torch.is_grad_enabled()  # the gradients are to be differentiated themselves
        with torch.enable_grad(), own_saves():
            if not again:
                hidden = hidden.detach().requires_grad_(wanted[0])
            stand_ins = ctx.call.stand_ins()
            logits = ctx.call.run(hidden, stand_ins)
            tensors = zip((hidden, *stand_ins), wanted, strict=True)
            inputs = [tensor for tensor, want in tensors if want]
            found = torch.autograd.grad(logits, inputs, grad, allow_unused=True, create_graph=again)
        made = iter(found)
        return None, None, *(next(made) if want else None for want in wanted)


class NextNode(torch.autograd.Function):
    """The node of one operation of a chain."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, before: Place, step: Step, make: Callable[[], Tensor]) -> Tensor:
        """The result of the operation, not computed."""
        ctx.before = before.without_data()
        ctx.step = step
        if step.needs_value:
            ctx.save_for_backward(before.hidden)
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradient before the operation."""
        if isinstance(grad, DeferredGrad):
            return grad.before(), None, None, None
        again, step = torch.is_grad_enabled(), ctx.step
        value = ctx.before(ctx.saved_tensors[0]).value() if step.needs_value else ctx.before(None).empty()
        with torch.enable_grad(), own_saves():
            value = value.detach().requires_grad_()
            (made,) = torch.autograd.grad(step.run(value), value, grad, create_graph=again)
        return once_only(made) if again and step.needs_value else made, None, None, None


class BridgeNode(torch.autograd.Function):
    """From deferred logits to the computed ones."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: HeadCall, value: list[Tensor]) -> Tensor:
        """The computed logits."""
        ctx.call = call
        return value.pop().data  # no view of anything, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Their gradient."""
        ctx.call.bridged = torch._C._current_graph_task_id()
        return grad, None, None


class TiledCrossEntropy(torch.autograd.Function):
    """A cross-entropy in tiles. Its gradients are ready when it returns."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, place: Place, target: Tensor, job: LossJob) -> Tensor:
        """The loss, and in the same pass its gradients."""
        made = job.run(place, target)
        ctx.job = job
        ctx.place = place.without_data()
        ctx.rows = made.rows is not None
        kept = made.params if made.rows is None else [made.rows.view(place.hidden.shape), *made.params]
        factor = [] if made.factor is None else [made.factor]
        ctx.factors = len(factor)
        ctx.save_for_backward(place.hidden, target, *factor, *kept)
        return made.loss.to(job.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradient of the logits, which carries those of everything before."""
        hidden, target, *kept = ctx.saved_tensors
        recipe, place = _Recipe(ctx.job, target, grad), ctx.place(hidden)
        again = torch.is_grad_enabled()
        # Somebody looks, or it meets another one: the node of logits that were computed after this loss has
        # run before this one. Here the computation is seen by who records the step.
        if again or place.call.watched or place.call.bridged == torch._C._current_graph_task_id():
            made = recipe.gradient(place, place.steps)
            return once_only(made) if again else made, None, None, None
        factor = grad
        if ctx.factors:
            factor = kept.pop(0) * grad
        kept = [_times(tensor, factor) for tensor in kept]
        carried: list[Tensor | None] = [*kept] if ctx.rows else [None, *kept]
        return DeferredGrad.made(place, (_Part(recipe, place.steps),), carried), None, None, None


def once_only(grad: Tensor) -> Tensor:
    """A gradient that cannot be differentiated: who tries gets an error."""
    message = "MemScale's loss tile has no second derivatives; set enable_tiling=False"
    refused: Tensor = torch._C._functions.DelayedError(message, 1)(grad.detach().requires_grad_())
    return refused


def _times(kept: Tensor, factor: Tensor) -> Tensor:
    """A kept gradient times a number; in the same memory where the graph is not to be used again."""
    if kept.device.type == "cpu" and type(factor) is Tensor and not _under_modes() and factor.item() == 1:
        keeps = _graph_is_kept()
        return kept if not keeps else kept.clone()
    return kept.mul(factor.to(kept.device)) if _graph_is_kept() else kept.mul_(factor.to(kept.device))


def _under_modes() -> bool:
    return bool(torch._C._len_torch_dispatch_stack())


def _graph_is_kept() -> bool:
    """Whether the running backward keeps its graph (`retain_graph`, `create_graph`)."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


# ---- the gradient of logits --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recipe:
    """How a gradient of logits is computed after all."""

    job: LossJob
    target: Tensor
    grad: Tensor

    def gradient(self, place: Place, steps: Sequence[Step]) -> Tensor:
        """Gradient of the loss by the tensor at a place, from which `steps` lead to the loss."""
        with torch.enable_grad(), own_saves():
            with torch.no_grad():
                value = place.value()
            value = value.detach().requires_grad_()
            logits = value
            for step in steps[len(place.steps) :]:
                logits = step.run(logits)
            loss = self.job.plain(logits, self.target)
            return torch.autograd.grad(loss, value, self.grad)[0]


@dataclass(frozen=True)
class _Part:
    """What comes from one loss, and the operations from the head's logits to it."""

    recipe: _Recipe
    steps: tuple[Step, ...]


class DeferredGrad(Tensor):
    """The gradient of deferred logits: not computed, but what follows from it is.

    Attributes:
        place: of the tensor that it is the gradient of.
        carried: gradients of the hidden states and of the parameters that need one.
    """

    place: Place
    carried: list[Tensor | None]
    _parts: tuple[_Part, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def made(cls, place: Place, parts: tuple[_Part, ...], carried: list[Tensor | None]) -> DeferredGrad:
        """One for the tensor at a place: the sum of what comes from some losses."""
        made: DeferredGrad = place.wrapper(cls)
        made.place, made._parts, made.carried = place, parts, carried
        return made

    def before(self) -> DeferredGrad:
        """The gradient of the tensor that the last operation was applied to."""
        place = self.place
        earlier = Place(place.call, place.hidden, place.steps[:-1], place.steps[-1].before, place.device)
        return DeferredGrad.made(earlier, self._parts, self.carried)

    def plus(self, other: DeferredGrad) -> DeferredGrad:
        """The sum of two gradients of the same tensor."""
        pairs = zip(self.carried, other.carried, strict=True)
        carried = [None if mine is None or theirs is None else mine + theirs for mine, theirs in pairs]
        return DeferredGrad.made(self.place, self._parts + other._parts, carried)

    @functools.cached_property
    def value(self) -> Tensor:
        """The gradient, computed."""
        first, *others = self._parts
        total = first.recipe.gradient(self.place, first.steps)
        for part in others:
            total += part.recipe.gradient(self.place, part.steps)
        return total

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Where two losses meet, their sum; otherwise somebody looks."""
        if func in _SUMS and len(args) == 2 and not kwargs and all(isinstance(x, cls) for x in args):
            return args[0].plus(args[1])

        def computed(grad: DeferredGrad) -> Tensor:
            with enable_reentrant_dispatch():  # it takes autograd, which is over here
                return grad.value

        return func(
            *tree_map_only(DeferredGrad, computed, args),
            **tree_map_only(DeferredGrad, computed, kwargs or {}),
        )


_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
"""The engine's. A trace makes the one of the other where the first sum's memory is nobody else's."""
