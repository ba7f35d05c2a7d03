# SPDX-License-Identifier: Apache-2.0
"""Deferred logits: computed when their values are read, or in tiles for a cross-entropy.

    hidden ─► head ─► L0 ─► [:, :-1] ─► L1 ─► float() ─► L2 ─► cross_entropy ─► loss      all L are deferred
      ▲        ▲      │                                            │
      │        │      └─► anything else: the head's own forward, then what was asked, as plain PyTorch
      └────────┴──────── kept gradients ◄── (D2 ◄ D1 ◄ D0) ◄───────┘                      all D are deferred

A `DeferredLogits` is a tensor with shape, dtype and device and without memory. It follows through operations
that keep rows whole: shapes of the leading dimensions, and what works on each element by itself. A
cross-entropy at the end runs in tiles (tiled_loss.py). At anything else the logits are computed by the head's
own forward, once, and the operations on the way are run on them: every bit is plain PyTorch's.

The graph is that of plain PyTorch, a node for each operation, so hooks, `retain_grad` and gradients of
deferred tensors work as ever. Through the nodes comes either an ordinary gradient, which each passes on as
plain PyTorch does, or a `DeferredGrad`, which stands for the gradient of the logits and carries those of
hidden states and parameters, computed in the forward. Who looks at it, adds to it or changes it gets the
ordinary gradient, computed then, and the nodes go on with that.

What is computed later needs what was there when the head ran. Parameters, training flags and autocast are put
back; contents that have been changed since are noticed by their version, and are an error, as for any
tensor that autograd has saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale.techniques.tiles import logit_steps
from memscale.techniques.tiles.deferred_graph import (
    BridgeNode,
    DeferredGrad,
    HeadNode,
    LossJob,
    NextNode,
    Place,
    TiledCrossEntropy,
    apply,
    loss_dtype,
)
from memscale.techniques.tiles.deferred_tensor import (
    QUESTIONS,
    DeferredTensor,
    getters,
    is_in_place,
    name_of,
    run_computed,
)
from memscale.techniques.tiles.head_call import HeadCall
from memscale.techniques.tiles.tiled_loss import LossArguments
from memscale.torchkit.graph_task import in_backward


def defer(call: HeadCall, hidden: Tensor) -> Tensor:
    """The logits of a head's call, not computed.

    Args:
        call: the call.
        hidden: its argument, [..., width].
    """
    call.hidden_version = hidden._version
    with torch._C._DisableTorchDispatch():
        meta = torch.empty((*hidden.shape[:-1], call.classes), dtype=call.dtype, device="meta")
    place = Place(call, hidden.detach(), (), meta, hidden.device)
    made: Tensor = apply(HeadNode, lambda: DeferredLogits.made(place, None), call, hidden, *call.params)
    return made


class DeferredLogits(DeferredTensor):
    """Logits that nobody has looked at, or that look as if.

    Attributes:
        place: where in the chain.
        parent: the tensor before the last operation; None for the head's logits.
        computed: the computed tensor, once there is one; from then on everything goes to it.
        bridged: `computed` passes its gradients on through this tensor's node.
        noded: gradients may pass through this tensor's node.
    """

    owner = ("logits", "loss tile")

    place: Place
    parent: DeferredLogits | None
    computed: Tensor | None
    bridged: bool
    noded: bool

    @classmethod
    def made(cls, place: Place, parent: DeferredLogits | None) -> DeferredLogits:
        """One without a graph, which it gets from the function that returns it."""
        made: DeferredLogits = place.wrapper(cls)
        made.place, made.parent, made.computed = place, parent, None
        made.bridged = made.noded = False
        return made

    @classmethod
    def on_computed(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """See `DeferredTensor`."""
        return _on_real(func, args, kwargs)

    def value_beneath(self) -> Tensor:
        """See `DeferredTensor`."""
        return real_of(self, through_node=True)

    def lineage(self) -> list[DeferredLogits]:
        """This tensor and those that it was made from, the head's logits last."""
        found, tensor = [], self
        while tensor is not None:
            found.append(tensor)
            tensor = tensor.parent  # type: ignore[assignment]
        return found

    def note_node(self) -> None:
        """Gradients will come through this tensor's node, so they come through all before it as well."""
        for tensor in self.lineage():
            tensor.noded = True


def _is_deferred(value: Any) -> bool:
    """Whether a value is a deferred tensor whose chain has not been computed.

    A checkpoint's recompute, in backward, has to go the first one's way: if that ran a loss in tiles before
    somebody looked, so does this one.
    """
    if not isinstance(value, DeferredLogits):
        return False
    looked = [tensor for tensor in value.lineage() if tensor.computed is not None]
    if not looked:
        return True
    again = value.place.call.tiled and in_backward()
    return again and all(tensor.bridged and not _changed(tensor.computed) for tensor in looked)


# ---- computing them after all ------------------------------------------------------------------------


def _changed(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor._version != 0


def real_of(tensor: DeferredLogits, through_node: bool = False) -> Tensor:
    """The logits, computed. They are a part of the graph.

    A view becomes a view of what it was made from, as in plain PyTorch. Where gradients may have come through
    the tensor's own node (tiles, hooks, C++), they all have to: hooks see their sum. Then the values alone
    are those of a view.

    Args:
        tensor: deferred.
        through_node: gradients have to come through the tensor's node.
    """
    if tensor.computed is not None:
        return tensor.computed
    parent = tensor.parent
    if parent is not None and not (tensor.noded or through_node):
        with torch.enable_grad():
            tensor.computed = tensor.place.steps[-1].run(real_of(parent))
        return tensor.computed
    if parent is not None and (
        _changed(parent.computed) or any(_changed(t.computed) for t in parent.lineage())
    ):
        raise RuntimeError(
            "logits were changed in place after a loss or a hook on a view of them, which MemScale's "
            "loss tile cannot follow; change a copy, or set enable_tiling=False"
        )
    with torch.no_grad():
        if parent is None:
            tensor.place.check()
            value = tensor.place.value()
        else:
            value = tensor.place.steps[-1].run(real_of(parent, through_node).detach())
    tensor.note_node()
    tensor.bridged = True
    with torch.enable_grad():
        tensor.computed = apply(BridgeNode, tensor, tensor.place.call, [value])
    assert tensor.computed is not None
    return tensor.computed


def _on_real(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function on computed logits."""
    in_place = is_in_place(func, kwargs)

    def computed(tensor: DeferredLogits) -> Tensor:
        # Without grad mode this may be inside a function of the caller's own, whose node comes from ours.
        real = real_of(tensor, through_node=not torch.is_grad_enabled() and not in_place)
        if in_place and tensor.parent is not None and tensor.bridged and tensor.place.steps[-1].is_view:
            raise RuntimeError(
                f"{name_of(func)} on a view of logits after a loss or a hook on it, which MemScale's loss "
                "tile cannot follow; use it on a copy, or set enable_tiling=False"
            )
        return real

    return run_computed(DeferredLogits, computed, func, args, kwargs)


# ---- the loss ----------------------------------------------------------------------------------------


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    return _cross_entropy_of(*args, **kwargs)


def _cross_entropy_of(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy` with its own parameters, in tiles if it is one over whole rows."""
    if not _is_deferred(input) or not torch.is_grad_enabled():
        return NotImplemented
    place = input.place
    turned = bool(place.steps) and place.steps[-1].turns
    shape = torch.Size((place.meta.shape[0], *place.meta.shape[2:]))
    tensors = [target] if weight is None else [target, weight]
    if (
        size_average is not None
        or reduce is not None
        or reduction not in ("mean", "sum")
        or not (turned or place.meta.dim() == 2)
        or not all(map(logit_steps.is_plain, tensors))
        or target.dtype != torch.int64
        or target.shape != shape
        or any(tensor.device != place.device for tensor in tensors)
        or (weight is not None and (weight.requires_grad or weight.shape != (place.call.classes,)))
        or not 0 <= label_smoothing <= 1
    ):
        return NotImplemented
    arguments = LossArguments(weight, ignore_index, reduction, label_smoothing)
    job = LossJob(arguments, loss_dtype(place.meta.dtype, place.device.type))
    if not _in_range(target, ignore_index, place.call.classes):
        return NotImplemented  # plain PyTorch's own error follows
    place.check()
    input.note_node()
    place.call.tiled = True
    loss = apply(TiledCrossEntropy, input, place, target.detach(), job)
    place.call.has_tiled()
    return loss


def _in_range(target: Tensor, ignored: int, classes: int) -> bool:
    """Whether labels are classes. On a card that is not asked: it would wait for it."""
    if type(target) is not Tensor or target.device.type != "cpu":
        return True
    return bool(((target == ignored) | ((target >= 0) & (target < classes))).all())


# ---- operations that are put off ---------------------------------------------------------------------


def _put_off(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation that keeps rows whole."""
    tensor, step = logit_steps.step_of(func, args, kwargs, _is_deferred, lambda logits: logits.place.meta)
    if tensor is None:
        return NotImplemented
    if step is None:
        return tensor  # it changes nothing, and plain PyTorch returns the tensor itself
    before = tensor.place
    if before.steps and before.steps[-1].turns:
        return NotImplemented
    if not torch.is_grad_enabled():
        return NotImplemented
    place = Place(before.call, before.hidden, (*before.steps, step), step.after, before.device)
    return apply(NextNode, tensor, before, step, lambda: DeferredLogits.made(place, tensor))


def _known(func: Any, args: Any, kwargs: Any) -> Any:
    """A question that needs no values."""
    logits = args[0]
    if not isinstance(logits, DeferredLogits) or logits.computed is not None:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _of_graph(func: Any, args: Any, kwargs: Any) -> Any:
    """Something with a tensor's node: hooks, its gradient."""
    logits = args[0]
    if not isinstance(logits, DeferredLogits):
        return NotImplemented
    if logits.computed is not None and (not logits.bridged or _changed(logits.computed)):
        return NotImplemented
    if func not in _LOOKS:
        logits.note_node()
        logits.place.call.watched = True
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _new(func: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor, of another's dtype on its device."""
    logits, *rest = args
    if not isinstance(logits, DeferredLogits) or any(
        isinstance(x, DeferredLogits) for x in tree_leaves(rest)
    ):
        return NotImplemented
    return func(torch.empty((), dtype=logits.dtype, device=logits.device), *rest, **kwargs)


def _storage(func: Any, args: Any, kwargs: Any) -> Any:
    """What memory the tensor holds: that of the hidden states."""
    logits = args[0]
    return logits.place.hidden.untyped_storage() if _is_deferred(logits) else NotImplemented


def _gradient(func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.autograd.grad`, of or by logits."""

    def in_graph(logits: DeferredLogits) -> Tensor:
        if logits.computed is not None and (not logits.bridged or _changed(logits.computed)):
            return logits.computed
        logits.note_node()
        logits.place.call.watched = True
        return logits

    with torch._C.DisableTorchFunctionSubclass():
        made = func(
            *tree_map_only(DeferredLogits, in_graph, args), **tree_map_only(DeferredLogits, in_graph, kwargs)
        )
    return tree_map_only(DeferredGrad, lambda grad: grad.value, made)


def _retained(func: Any, args: Any, kwargs: Any) -> Any:
    """`logits.grad`, after `retain_grad`."""
    grad = _of_graph(func, args, kwargs)
    return grad.value if isinstance(grad, DeferredGrad) else grad


_LOOKS = frozenset(getters("grad_fn", "is_leaf", "requires_grad", "output_nr", "retains_grad", "grad"))
"""Questions about the node, after which it is as it was."""

_GRAD: Any = Tensor.grad

DeferredLogits.handlers = {
    **dict.fromkeys(QUESTIONS, _known),
    **dict.fromkeys([*_LOOKS, Tensor.register_hook, Tensor.retain_grad], _of_graph),
    **dict.fromkeys([Tensor.register_post_accumulate_grad_hook], _of_graph),
    _GRAD.__get__: _retained,
    **dict.fromkeys((_GRAD.__set__, _GRAD.__delete__), _of_graph),
    **dict.fromkeys(
        [Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor], _new
    ),
    Tensor.untyped_storage: _storage,
    torch.autograd.grad: _gradient,
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys(logit_steps.FUNCTIONS, _put_off),
}
