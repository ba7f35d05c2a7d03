# SPDX-License-Identifier: Apache-2.0
"""Backward on S times the loss, with every leaf's gradient divided by S before anybody sees it.

    loss.backward()   what it is given for its roots is multiplied by S
                      each leaf of its graph gets, for this one backward, a hook in front of all others that
                      divides by S what has come together for it
    autograd.grad     the same; results for tensors that are no leaves are divided by S in the end

All of the backward is scaled, whatever the loss is made of: a penalty on a weight's norm, another model, a
tensor that the loop got out of the middle of this one. That is why S is put in where backward begins, and not
at the model's outputs. A backward carries its own S, so S may change between any two. Second derivatives are
right: with `create_graph` the division is part of the graph.

A backward inside of another one (`torch.utils.checkpoint` with `use_reentrant=True`) is given gradients that
are scaled already, and is not scaled again. What it adds to weights is divided. What it adds to other leaves
is not: those are the checkpoint's own copies of its inputs, and the gradients go on through the outer one.

As with `GradScaler`, hooks on tensors between loss and leaves see scaled gradients, and so does their
`retain_grad`. Hooks on leaves see true ones.

A gradient that is infinite anywhere becomes NaN there: clamping (`clip_grad_value_`) would hide an infinity
from the step's check, and another process of a data parallel run would never hear of it.

Every backward goes through one function of PyTorch's (`torchkit.backward_calls`). One that begins in C++ does
not pass it: not scaled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from memscale.techniques.precision.loss_scale import active
from memscale.torchkit import backward_calls
from memscale.torchkit.backward_calls import Backward, run_backward
from memscale.torchkit.graph_task import in_backward

_running: dict[int, _Scaled] = {}
"""Number of a graph task, which is what PyTorch calls one backward → its factor."""


class _Scaled:
    """One backward on S times its roots.

    Args:
        scale: the factor S.
        outer: the backward that runs this one, and has given it S times the gradients.
    """

    def __init__(self, scale: float, outer: _Scaled | None = None) -> None:
        self.scale = scale
        self.outer = outer
        self.task = -1
        self.passing: list[weakref.ref[Tensor]] = []  # leaves of inner ones that were left scaled
        self._undo: list[Callable[[], None]] = []

    def watch(self, roots: Sequence[Tensor | GradientEdge], leaves: Sequence[Tensor]) -> None:
        """Puts hooks on the graph for this backward, until `end`."""
        for node in filter(None, map(_node_of, roots)):
            self._undo.append(node.register_prehook(self._begin).remove)
        first = {id(root) for root in roots}
        for leaf in leaves:
            if not leaf.requires_grad:  # PyTorch drops the gradient
                continue
            if self.outer is not None and not _is_weight(leaf):
                self.outer.pass_on(leaf)
                continue
            self._undo.append(_in_front(leaf, self._of_root if id(leaf) in first else self._of_leaf))

    def pass_on(self, leaf: Tensor) -> None:
        """A leaf's gradient stays scaled, for somebody who hands it on and drops the leaf."""
        if self.outer is not None:
            self.outer.pass_on(leaf)
        else:
            self.passing.append(weakref.ref(leaf))

    def check(self) -> None:
        """Raises RuntimeError where a gradient has been left scaled that somebody may look at."""
        alive = [leaf for leaf in (ref() for ref in self.passing) if leaf is not None]
        if any(leaf.grad is not None for leaf in alive):
            raise RuntimeError(
                "a backward inside of another one has left a gradient with a tensor that is no nn.Parameter, "
                "and it is still multiplied by the loss scale. Make the tensor an nn.Parameter, use "
                "torch.utils.checkpoint with use_reentrant=False, or switch use_mixed_precision off"
            )

    def end(self) -> None:
        """Takes them off."""
        for undo in self._undo:
            undo()
        _running.pop(self.task, None)

    def roots(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients to start from."""
        if self.outer is not None:
            return tuple(grads)
        return tuple(None if grad is None else grad * self.scale for grad in grads)

    def _begin(self, *unused: Any) -> None:
        self.task = torch._C._current_graph_task_id()
        _running[self.task] = self

    def _of_root(self, grad: Tensor) -> Tensor | None:
        self._begin()
        return self._of_leaf(grad)

    def _of_leaf(self, grad: Tensor) -> Tensor | None:
        if torch._C._current_graph_task_id() != self.task:  # another thread's, or one inside of this
            return None
        made = grad * (1 / self.scale)
        if not torch.is_grad_enabled():
            values = made._values() if made.is_sparse else made
            values = torch.view_as_real(values) if values.is_complex() else values
            nan = float("nan")
            values.nan_to_num_(nan, nan, nan)
        return made


def _run_scaled(original: Backward, roots: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
    """Runs a backward, scaled where a scale in force concerns it."""
    if not active() or len(args) < _ARGUMENTS or torch._C._functorch.peek_interpreter_stack() is not None:
        return original(roots, *args, **kwargs)
    grads, keep, create, inputs, *rest = args
    accumulates = bool(kwargs.get("accumulate_grad"))
    leaves, opaque = leaves_of(roots)
    scaled = _inner(roots, accumulates) if in_backward() else _outer(leaves, opaque, inputs, accumulates)
    if scaled is None:
        return original(roots, *args, **kwargs)
    grads = scaled.roots(grads)
    try:
        scaled.watch(roots, leaves)
        found = original(roots, grads, keep, create, inputs, *rest, **kwargs)
    finally:
        scaled.end()
    scaled.check()
    if accumulates:
        return found
    return tuple(
        grad if grad is None or _is_leaf(value) else grad * (1 / scaled.scale)
        for value, grad in zip(inputs, found, strict=True)
    )


_ARGUMENTS: Final = 4  # gradients of the roots, retain_graph, create_graph, inputs


def _outer(leaves: Sequence[Tensor], opaque: bool, inputs: Any, accumulates: bool) -> _Scaled | None:
    """A backward of the loop's; None: not one to scale."""
    if accumulates and not all(map(_is_leaf, inputs)):
        return None  # PyTorch adds to `.grad` of what is no leaf, where nothing can be put in between
    scales = [scale for scale in active() if scale.armed and (opaque or scale.concerns(leaves))]
    if not scales:
        return None
    if accumulates and not any(isinstance(leaf, FakeTensor) for leaf in leaves):
        for scale in scales:
            scale.count_backward()
    return _Scaled(min(scale.value for scale in scales))


def _inner(roots: Sequence[Tensor | GradientEdge], accumulates: bool) -> _Scaled | None:
    """A backward that a node of another one runs; None: nothing to divide."""
    outer = _running.get(torch._C._current_graph_task_id())
    if outer is None or not accumulates:
        return None
    if all(isinstance(root, Tensor) and root.numel() == 1 for root in roots):
        raise RuntimeError(
            "a backward of a single number inside of another backward: whether it is scaled already is "
            "unknown. Use torch.utils.checkpoint with use_reentrant=False, or autograd.grad, or switch "
            "use_mixed_precision off"
        )
    return _Scaled(outer.scale, outer)


def _is_weight(leaf: Tensor) -> bool:
    return isinstance(leaf, nn.Parameter) or any(scale.concerns([leaf]) for scale in active())


def _node_of(root: Tensor | GradientEdge) -> Any:
    return root.node if isinstance(root, GradientEdge) else root.grad_fn


def _is_leaf(value: Tensor | GradientEdge) -> bool:
    if isinstance(value, GradientEdge):
        return hasattr(value.node, "variable")
    return value.grad_fn is None


def leaves_of(roots: Sequence[Tensor | GradientEdge]) -> tuple[list[Tensor], bool]:
    """Leaves of a graph, each once, and whether it has checkpoints, which may hide others."""
    leaves = {id(root): root for root in roots if isinstance(root, Tensor) and root.grad_fn is None}
    pending = [node for node in map(_node_of, roots) if node is not None]
    seen = set(pending)
    opaque = False
    while pending:
        node = pending.pop()
        following = node.next_functions
        if not following:
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                leaves[id(leaf)] = leaf
        elif isinstance(node, BackwardCFunction) and "Checkpoint" in type(node).__name__:
            opaque = True
        for child, _ in following:
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)
    return list(leaves.values()), opaque


def _in_front(leaf: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Callable[[], None]:
    """Puts a hook before all others of a leaf. Returns what takes it off."""
    before = leaf._backward_hooks
    handle = leaf.register_hook(hook)
    hooks = leaf._backward_hooks
    assert hooks is not None
    if len(hooks) > 1:  # PyTorch runs them in the order in which they were entered
        others = [(key, value) for key, value in hooks.items() if key != handle.id]
        own = hooks[handle.id]
        hooks.clear()
        hooks[handle.id] = own
        hooks.update(others)

    def remove() -> None:
        handle.remove()
        if before is None and not hooks:
            leaf._backward_hooks = None

    return remove


def is_possible() -> bool:
    """Whether this PyTorch has the function."""
    return run_backward is not None


def install() -> None:
    """Has every backward go through here; called before each forward, in case somebody has put it back."""
    backward_calls.add(_run_scaled)


def uninstall() -> None:
    """Takes it out of the way of backwards, where no scale is in force any more."""
    if not active():
        backward_calls.remove(_run_scaled)
