# SPDX-License-Identifier: Apache-2.0
"""`DistributedDataParallel` (DDP) in a traced step: the memory of its reducer, and none of its communication.

    from its construction on    buckets: one element per element of every gradient that it reduces
    beginning of forward        the module's buffers, flattened, for the broadcast
    end of forward              a copy of every output, where DDP looks for unused parameters
    gradients of backward       in `.grad`, and copied into the buckets; with `gradient_as_bucket_view=True`
                                `.grad` then becomes a view of the bucket
    end of backward             gradients that only other processes have, where DDP looks for unused ones

DDP is around the model, if MemScale wraps the module that DDP was given: then it is known by the forward
that it is running. Or it is in the model, if MemScale wraps DDP. A trace, and a comparison, is a step of this
process alone: DDP must neither wait for the others nor have the fakes for its gradients. `silent` sees to
that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from memscale import _core
from memscale.torchkit.replicas import replica_around, replicas_of
from memscale.trace.recorder import GraphRecorder

_MOST_BROADCAST_BYTES = 2 * 250 * 1024 * 1024
"""DDP flattens buffers 250 MiB at a time, and the next piece while the last one is under way."""

HOOK_NOTE = "DistributedDataParallel has a communication hook: what the hook allocates is not planned for"

State = tuple[bool, bool, bool]
"""Facts of a DDP that each add to a step's memory: gradients stay beside the buckets; there are gradients
from before, beside the buckets; outputs are copied."""


def states_of(model: nn.Module) -> tuple[State, ...]:
    """The present state of every DDP in and around a model."""
    return tuple(_state(ddp) for ddp in replicas_of(model))


def _state(ddp: DistributedDataParallel) -> State:
    views = ddp.gradient_as_bucket_view
    apart = not views or any(_is_apart(parameter) for parameter in _reduced(ddp))
    return not (views and _reduces_at_once(ddp)), apart, _copies_outputs(ddp)


def _is_apart(parameter: nn.Parameter) -> bool:
    """Whether its gradient is there and no view of a bucket (accumulated under `no_sync`)."""
    return parameter.grad is not None and not parameter.grad._is_view()


def _reduces_at_once(ddp: DistributedDataParallel) -> bool:
    """Whether every gradient goes into its bucket as it comes: not under `no_sync`, not bucket by bucket."""
    return bool(ddp.require_backward_grad_sync) and not getattr(ddp, "batched_grad_copy", False)


def _looks_for_unused(ddp: DistributedDataParallel) -> bool:
    return bool(ddp.find_unused_parameters or ddp.static_graph)


def _copies_outputs(ddp: DistributedDataParallel) -> bool:
    if ddp.static_graph:  # in the first step
        return not getattr(ddp, "_static_graph_delay_allreduce_enqueued", False)
    return bool(ddp.find_unused_parameters)


def _reduced(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    named = ddp.module.named_parameters()
    left_out = ddp.parameters_to_ignore
    return [value for name, value in named if value.requires_grad and name not in left_out]


def refusal(model: nn.Module) -> str:
    """Why a step under DDP cannot be traced; "" if it can, or there is no DDP."""
    for ddp in replicas_of(model):
        if getattr(ddp, "mixed_precision", None) is not None:
            return (
                "DistributedDataParallel(mixed_precision=...) exchanges parameters in its own hooks; use "
                "torch.autocast, or Config(use_mixed_precision=True)"
            )
        if getattr(ddp, "_delay_all_reduce_params", None):
            return "DistributedDataParallel(delay_all_reduce_named_params=...) is not supported"
    return ""


# ---- without communication --------------------------------------------------------------------------


@contextmanager
def silent(model: nn.Module) -> Iterator[None]:
    """Runs the block with every DDP in a model doing what it does to tensors, without other processes."""
    inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    for ddp in inside:
        ddp.__dict__["_pre_forward"] = _Before(ddp)
        ddp.__dict__["_post_forward"] = _After(ddp)
    try:
        yield
    finally:
        for ddp in inside:
            del ddp.__dict__["_pre_forward"], ddp.__dict__["_post_forward"]


@dataclass(frozen=True)
class _Before:
    """What DDP does before its module's forward."""

    ddp: DistributedDataParallel

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        ddp = self.ddp
        _flatten_buffers(ddp)
        if not ddp.device_ids:
            return args, kwargs
        device = torch.device(ddp.device_type, ddp.device_ids[0])
        moved: tuple[Any, Any] = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        return moved


@dataclass(frozen=True)
class _After:
    """What it does behind it."""

    ddp: DistributedDataParallel

    def __call__(self, output: Any) -> Any:
        return _copied(output) if _copies_outputs(self.ddp) else output


def _flatten_buffers(ddp: DistributedDataParallel) -> None:
    """Takes, for a moment, the memory in which buffers are broadcast."""
    if ddp.require_forward_param_sync and getattr(ddp, "forward_sync_buffers", True):
        buffers = list(ddp.module.buffers())
        size = min(sum(buffer.numel() * buffer.element_size() for buffer in buffers), _MOST_BROADCAST_BYTES)
        if size:
            torch.empty(size, dtype=torch.uint8, device=buffers[0].device)


def _copied(output: Any) -> Any:
    """An output with copies of what has a graph. All of it is copied before anything is dropped."""
    leaves, form = tree_flatten(output)
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    chosen = [
        copy if isinstance(leaf, Tensor) and leaf.grad_fn is not None else leaf
        for leaf, copy in zip(leaves, copies, strict=True)
    ]
    return tree_unflatten(chosen, form)


# ---- in a trace -------------------------------------------------------------------------------------


class GradientBuckets:
    """The buckets in and around a model, and where gradients are, for the trace of one step.

    Args:
        model: with its real parameters: they are looked at here, before a trace exchanges them. Everywhere
            else a parameter is known by its place among the trainable ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self._replicas = replicas_of(model)
        self._around = replica_around(model)
        self._sizes = [size for ddp in self._replicas for size in _bucket_sizes(ddp)]
        self._views: set[int] = set()  # gradients that are views of buckets in the end
        self._becoming: set[int] = set()  # those that become so as soon as they are there
        self._completed: set[int] = set()  # gradients that may come from other processes alone
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        places = {id(parameter): place for place, parameter in enumerate(trainable)}
        for ddp in self._replicas:
            own = {places[id(parameter)] for parameter in _reduced(ddp) if id(parameter) in places}
            self._views |= own if ddp.gradient_as_bucket_view else set()
            self._becoming |= own if ddp.gradient_as_bucket_view and _reduces_at_once(ddp) else set()
            others = ddp.require_backward_grad_sync and ddp.process_group.size() > 1
            self._completed |= own if others and _looks_for_unused(ddp) else set()
        # Gradients of earlier steps that are views of buckets now.
        grads = [parameter.grad for parameter in trainable]
        self._filled = {
            place
            for place, grad in enumerate(grads)
            if place in self._views and grad is not None and grad._is_view()
        }

    @property
    def notes(self) -> list[str]:
        """Remarks for the log."""
        return [HOOK_NOTE] if any(getattr(ddp, "_comm_hooks", ()) for ddp in self._replicas) else []

    def declare(self, recorder: GraphRecorder) -> None:
        """Enters the buckets as there before the step."""
        paused, recorder.paused = recorder.paused, True
        for number, (size, dtype) in enumerate(self._sizes):
            buffer = recorder.graph.add_resident(size, _core.CATEGORY_GRADIENT)
            form = torch.empty(size // dtype.itemsize, dtype=dtype, device="meta")
            recorder.label(buffer, form, f"bucket {number} of DistributedDataParallel")
        recorder.paused = paused

    def forward(self, forward: Callable[[], Any]) -> Any:
        """Runs a forward of the model, with what a DDP around it does before and behind."""
        if self._around is None:
            return forward()
        _flatten_buffers(self._around)
        output = forward()
        return _copied(output) if _copies_outputs(self._around) else output

    def outside(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Of all trainable parameters, those whose earlier gradient would take memory beside the buckets."""
        return [value for place, value in enumerate(parameters) if place not in self._filled]

    def watch(self, recorder: GraphRecorder, parameters: Sequence[nn.Parameter]) -> None:
        """From now on what backward puts into `.grad` becomes a view, as it does in training.

        Args:
            recorder: records the step.
            parameters: all that are trainable, fakes.
        """
        for place, parameter in enumerate(parameters):
            if place in self._filled:
                parameter.grad = _view_like(parameter, recorder)
            elif place in self._becoming:
                parameter.register_post_accumulate_grad_hook(functools.partial(_into_bucket, recorder))

    @contextmanager
    def watched(self, recorder: GraphRecorder, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """The same for gradients that `torch.autograd.grad` returns inside the block, of real parameters."""
        handles = [
            parameter.register_hook(functools.partial(_as_view, recorder))
            for place, parameter in enumerate(parameters)
            if place in self._filled or place in self._becoming
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def completed(
        self, recorder: GraphRecorder, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients when DDP has finished: some that are missing come from other processes."""
        made = list(gradients)
        for place in sorted(self._completed):
            if made[place] is None:
                parameter, is_view = parameters[place], place in self._views
                made[place] = (
                    _view_like(parameter, recorder) if is_view else torch.empty_like(parameter).detach()
                )
        return made


def _into_bucket(recorder: GraphRecorder, parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = _as_view(recorder, parameter.grad)


def _as_view(recorder: GraphRecorder, gradient: Tensor) -> Tensor:
    """A gradient as it is in a bucket."""
    if gradient.layout is not torch.strided:
        return gradient
    view = _view_like(gradient, recorder)
    return view.copy_(gradient)


def _view_like(tensor: Tensor, recorder: GraphRecorder) -> Tensor:
    """A tensor that takes no memory of its own."""
    paused, recorder.paused = recorder.paused, True
    view = torch.empty_like(tensor, requires_grad=False)
    recorder.on_host(view)
    recorder.paused = paused
    return view


def _bucket_sizes(ddp: DistributedDataParallel) -> list[tuple[int, torch.dtype]]:
    """Bytes and dtype of buckets: consecutive gradients of a dtype, from the last parameter to the first.

    Only their sum is exact. DDP reorders gradients, as they come, after the first step.
    """
    embeddings = [
        module for module in ddp.module.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]
    sparse = {id(module.weight) for module in embeddings if module.sparse}  # reduced as they are
    sizes: dict[torch.dtype, list[int]] = {}
    for parameter in reversed(_reduced(ddp)):
        if id(parameter) not in sparse:
            buckets = sizes.setdefault(parameter.dtype, [0])
            if buckets[-1] >= ddp.bucket_bytes_cap:
                buckets.append(0)
            buckets[-1] += parameter.numel() * parameter.element_size()
    return [(size, dtype) for dtype, buckets in sizes.items() for size in buckets]
