# SPDX-License-Identifier: Apache-2.0
"""Deferred attention scores: computed when their values are read.

While an attention's forward runs, the product of queries and keys returns such a tensor. It knows its shape
and dtype, and notes the steps (attention_steps.py) that are taken with it. The product with the values runs
in tiles (attention_run.py). Anything else that looks at the scores computes them as plain PyTorch does: the
same functions on the same tensors, and a part of the graph like any other.

Python functions come to `__torch_function__`. What passes it by (an autograd function of the caller's own)
sees a tensor with a node, whose backward computes the scores again and passes the gradient on.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memscale.techniques.tiles import attention_products, attention_steps
from memscale.techniques.tiles.attention_products import product_dtype, product_of
from memscale.techniques.tiles.attention_run import Recipe, attend
from memscale.techniques.tiles.attention_source import CHANGED, Report, Source, saving_hooks
from memscale.techniques.tiles.attention_steps import Form, step_of, without_data
from memscale.techniques.tiles.deferred_tensor import (
    QUESTIONS,
    DeferredTensor,
    getters,
    name_of,
    run_computed,
)
from memscale.techniques.tiles.head_products import own_saves
from memscale.techniques.tiles.logit_steps import is_plain
from memscale.techniques.tiles.tiled_loss import autocast_as, autocast_now


def defer(func: Any, args: Any, kwargs: Any, report: Report) -> Tensor | None:
    """A product of queries and keys that is not computed; None if it is none, or has to be.

    Args:
        func: one of `attention_products.FUNCTIONS`.
        args: its arguments.
        kwargs: by keyword.
        report: gets to know what becomes of it.
    """
    made = product_of(func, args, kwargs)
    if made is None:
        return None
    operands = [tensor for tensor in (made.left, made.right, made.added) if tensor is not None]
    if not all(is_plain(tensor) and tensor.is_floating_point() for tensor in operands):
        return None
    if any(tensor.device != made.left.device or tensor.numel() == 0 for tensor in operands):
        return None
    if 2 * made.right.shape[-1] < made.left.shape[-1]:  # not as large as its operands: no scores
        return None
    dtype = product_dtype(made.left.dtype, made.right.dtype, made.left.device)
    try:
        lead = torch.broadcast_shapes(made.left.shape[:-2], made.right.shape[:-2])
    except RuntimeError:
        return None  # plain PyTorch's own error follows
    if dtype is None:
        return None
    if made.added is not None and made.beta == 0:  # its memory may go
        func, args = torch.baddbmm, (without_data(made.added), made.left, made.right)
        kwargs = {"beta": 0, "alpha": made.alpha}
    shape = torch.Size((*lead, made.left.shape[-2], made.right.shape[-1]))
    form = Form(shape, dtype, made.left.device)
    source = Source(func, args, kwargs, autocast_now(), saving_hooks(), report)
    scores = _new(Recipe(form), (made.left, made.right), source, [])
    if made.alpha != 1:
        scores = _stepped(torch.mul, (scores, made.alpha), scores)
    if made.added is not None and made.beta != 0:
        scores = _stepped(torch.add, (scores, made.added), scores, {"alpha": made.beta})
    if scores is None:
        return None
    scores.plain = ()
    return scores


def _stepped(func: Any, args: Any, scores: Any, kwargs: Any = None) -> Any:
    """What an operation makes of deferred scores; None if it is no step."""
    if scores is None:
        return None
    found = step_of(func, args, kwargs or {}, scores, scores.recipe.after)
    return (
        None if found is None or isinstance(found, str) else _after(scores, found, func, args, kwargs or {})
    )


class DeferredScores(DeferredTensor):
    """Scores that nobody has looked at.

    Attributes:
        recipe: how tiles of them are made.
        tensors: that take part: q, kᵀ, and what the steps take.
        source: how the product was asked for.
        plain: how the functions after it were: (function, arguments, by keyword, autocast), None in place of
            the scores.
        versions: of `tensors`.
        family: deferred tensors on the same memory, this one among them.
        computed: the computed tensor, once there is one; from then on everything goes to it.
    """

    owner = ("scores", "attention tile")

    recipe: Recipe
    tensors: tuple[Tensor, ...]
    source: Source
    plain: tuple[Any, ...]
    versions: tuple[int, ...]
    family: list[weakref.ref[DeferredScores]]
    computed: Tensor | None

    @classmethod
    def on_computed(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """See `DeferredTensor`."""
        return _on_real(func, args, kwargs)

    def value_beneath(self) -> Tensor:
        """See `DeferredTensor`."""
        return real_of(self, "an operator")

    def check(self) -> None:
        """Raises RuntimeError if what the scores are made of was changed in place since."""
        if tuple(tensor._version for tensor in self.tensors) != self.versions:
            raise RuntimeError(CHANGED)

    def values(self) -> Tensor:
        """The scores, by the functions that were called."""
        made = self.source.run()
        for func, args, kwargs, autocast in self.plain:
            with autocast_as(autocast):
                made = func(
                    *(made if value is None else value[0] for value in args),
                    **{name: made if value is None else value[0] for name, value in kwargs.items()},
                )
        return made


class _Node(torch.autograd.Function):
    """The node of deferred scores, for who takes them past `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, make: Any, scores: Tensor | None, *tensors: Tensor) -> Tensor:
        ctx.recipe = recipe
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.versions = [tensor._version for tensor in tensors]
        if scores is not None:
            ctx.mark_dirty(scores)
            return scores
        made: Tensor = make()
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wanted, grad = ctx.needs_input_grad[3:], grads[0]
        if grad is None:
            return (None, None, None, *(None for _ in wanted))
        again, tensors = torch.is_grad_enabled(), list(ctx.saved_tensors)
        if [tensor._version for tensor in tensors] != ctx.versions:
            raise RuntimeError(CHANGED)
        form = ctx.recipe.form
        with torch.enable_grad(), own_saves():
            if not again:
                tensors = [
                    tensor.detach().requires_grad_(want) for tensor, want in zip(tensors, wanted, strict=True)
                ]
            left, right = (tensor.to(form.dtype) for tensor in tensors[:2])
            scores = ctx.recipe.stepped(torch.matmul(left, right), tensors, slice(None))
            inputs = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]
            found = iter(torch.autograd.grad(scores, inputs, grad, allow_unused=True, create_graph=again))
        return (None, None, None, *(next(found) if want else None for want in wanted))


def _new(recipe: Recipe, tensors: tuple[Tensor, ...], source: Source, family: Any) -> DeferredScores:
    form = recipe.after

    def make() -> Tensor:
        with torch.no_grad():
            shell: Tensor = Tensor._make_wrapper_subclass(
                DeferredScores, form.shape, dtype=form.dtype, device=form.device, storage_size=0
            )
        return shell

    with torch._C.DisableTorchFunctionSubclass(), own_saves():
        made: DeferredScores = _Node.apply(recipe, make, None, *tensors)  # type: ignore[no-untyped-call]
    made.recipe, made.tensors, made.source, made.family = recipe, tensors, source, family
    made.versions = tuple(tensor._version for tensor in tensors)
    made.plain, made.computed = (), None
    family.append(weakref.ref(made))
    return made


def _after(scores: DeferredScores, found: attention_steps.Found, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Deferred scores after a step."""
    first = len(scores.tensors)
    numbers = tuple(range(first, first + len(found.tensors)))
    recipe = replace(scores.recipe, steps=(*scores.recipe.steps, (found.step, numbers)))
    tensors = (*scores.tensors, *found.tensors)

    def kept(value: Any) -> Any:
        return None if value is scores else (value,)

    plain = (
        found.step.func if found.in_place else func,
        tuple(map(kept, args)),
        {name: kept(value) for name, value in kwargs.items()},
        autocast_now(),
    )
    if found.in_place:
        with torch._C.DisableTorchFunctionSubclass(), own_saves():
            _Node.apply(recipe, None, scores, *tensors)  # type: ignore[no-untyped-call]
        scores.versions += tuple(tensor._version for tensor in found.tensors)
        scores.recipe, scores.tensors = recipe, tensors
        scores.plain += (plain, (Tensor.to, (None, (recipe.after.dtype,)), {}, plain[3]))
        return scores
    made = _new(recipe, tensors, scores.source, scores.family if found.step.is_view else [])
    made.versions = scores.versions + made.versions[first:]
    made.plain = (*scores.plain, plain)
    return made


# ---- computing them after all ------------------------------------------------------------------------


def real_of(scores: DeferredScores, why: str) -> Tensor:
    """The scores, computed. They are a part of the graph.

    Args:
        scores: deferred.
        why: what looks at them.
    """
    if scores.computed is not None:
        return scores.computed
    scores.check()
    if scores.recipe.steps and not scores.source.tiled:
        scores.source.report.reason = why
    # A checkpoint that begins after the product must not count what belongs before it.
    same = saving_hooks() == scores.source.hooks
    with torch._C.DisableTorchFunction(), torch.enable_grad(), nullcontext() if same else own_saves():
        made = scores.values()
        for one in scores.family:
            member = one()
            if member is not None:
                member.computed = made if member is scores else made.view(member.recipe.after.shape)
    return made


def _on_real(func: Any, args: Any, kwargs: Any, why: str = "") -> Any:
    """Runs a function on computed scores."""
    name = name_of(func)

    def computed(scores: DeferredScores) -> Tensor:
        if scores.source.tiled and name in _OF_GRADIENTS:
            raise RuntimeError(
                f"{name}: an attention ran in tiles, so the gradient of its scores is never there; ask "
                "before the product with the values, or set enable_tiling=False"
            )
        return real_of(scores, why or f"{name} looks at the scores")

    return run_computed(DeferredScores, computed, func, args, kwargs)


_OF_GRADIENTS = frozenset(
    ("register_hook", "retain_grad", "grad", "register_post_accumulate_grad_hook", "backward")
)


# ---- what can be done with them ------------------------------------------------------------------------


def _is_deferred(value: Any) -> bool:
    return isinstance(value, DeferredScores) and value.computed is None


def _noted(func: Any, args: Any, kwargs: Any) -> Any:
    """A step."""
    if func is Tensor.type_as and len(args) == 2 and all(isinstance(x, DeferredScores) for x in args):
        func, args = Tensor.to, (args[0], args[1].dtype)
    several = [value for value in (*args, *kwargs.values()) if isinstance(value, DeferredScores)]
    if len(several) != 1 or not _is_deferred(several[0]) or not torch.is_grad_enabled():
        return NotImplemented
    (scores,) = several
    found = step_of(func, args, kwargs, scores, scores.recipe.after)
    if found is None:
        return scores
    if isinstance(found, str):
        return _on_real(func, args, kwargs, found)
    if found.in_place and sum(member() is not None for member in scores.family) > 1:
        return NotImplemented  # what shares the memory changes as well
    return _after(scores, found, func, args, kwargs)


def _multiplied(func: Any, args: Any, kwargs: Any) -> Any:
    """The product with the values."""
    scores = next((value for value in args if isinstance(value, DeferredScores)), None)
    if scores is None and func is torch.einsum and len(args) == 2 and len(args[1]) == 2:
        scores = args[1][0]
    if not _is_deferred(scores) or not torch.is_grad_enabled():
        return NotImplemented
    assert scores is not None
    made = product_of(func, args, kwargs, left=scores)
    if made is None or made.added is not None or not is_plain(made.right):
        return NotImplemented
    right, form = made.right, scores.recipe.after
    dtype = product_dtype(form.dtype, right.dtype, form.device)
    if dtype is None or right.device != form.device or not right.is_floating_point():
        return NotImplemented
    if not any(tensor.requires_grad for tensor in (right, *scores.tensors)):
        return NotImplemented
    scores.check()
    output = attend(scores.recipe, right, scores.tensors, dtype)
    scores.source.tiled = scores.source.report.used = True
    return output if made.order is None else output.permute(made.order)


def _known(func: Any, args: Any, kwargs: Any) -> Any:
    """A question that needs no values."""
    if not args or not _is_deferred(args[0]):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _storage(func: Any, args: Any, kwargs: Any) -> Any:
    """What memory the tensor holds: that of the queries."""
    return args[0].tensors[0].untyped_storage() if _is_deferred(args[0]) else NotImplemented


DeferredScores.handlers = {
    **dict.fromkeys(attention_steps.FUNCTIONS, _noted),
    **dict.fromkeys(attention_products.FUNCTIONS, _multiplied),
    **dict.fromkeys([*QUESTIONS, *getters("requires_grad", "is_leaf")], _known),
    Tensor.untyped_storage: _storage,
}
