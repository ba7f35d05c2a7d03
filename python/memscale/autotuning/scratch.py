# SPDX-License-Identifier: Apache-2.0
"""Real training steps that leave nothing behind: model, optimizer, gradients and generators are put back.

Weights, gradients and optimizer state change in place while steps run, as they do in the loop, so that the
steps take what the loop will take and no more. Their copies lie in files without names (`optim.mapped`).
Gradients that were there are no part of a step: their storages are emptied meanwhile.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from memscale.optim import is_patched
from memscale.optim.arrays import Empty
from memscale.optim.mapped import mapped_in
from memscale.state.model_state import preserved, training_flags
from memscale.state.tensor_versions import Versions
from memscale.techniques.checkpoint import global_hooks
from memscale.torchkit import sharding
from memscale.trace.empirical import buffer_contents
from memscale.trace.static import has_data
from memscale.uninterrupted import uninterrupted
from memscale.weights.placed_gradients import set_gradient

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def why_no_steps(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> str:
    """Why real steps could not be taken back, or taken at all; "" where they can."""
    if not all(has_data(tensor) for tensor in (*model.parameters(), *model.buffers())):
        return "the model has no data"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "other processes take part in its steps"
    if sharding.has_units(model):
        return "its parameters are sharded"
    if any(getattr(value, "_post_accumulate_grad_hooks", None) for value in model.parameters()):
        return "hooks run as soon as a gradient is there, and what they do cannot be taken back"
    if optimizer is not None and is_patched(optimizer):
        return "the optimizer's state is MemScale's own: memscale.detach first"
    if optimizer is not None and _needs_closure(optimizer):
        return "the optimizer's step needs a closure"
    if torch._C._autograd._profiler_enabled():
        return "PyTorch's profiler runs"
    return ""


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """By its class: a schedule has wrapped the `step` of the object."""
    _, *given = inspect.signature(type(optimizer).step).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(item.default is inspect.Parameter.empty and item.kind in kinds for item in given)


@contextmanager
def scratch_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, directory: str
) -> Iterator[None]:
    """Runs a block that trains the model, and puts everything back, bit by bit and object by object.

    In the block the model is in training mode, has no gradients, and the optimizer no hooks of its own.

    Args:
        model: not wrapped.
        optimizer: trains it, `why_no_steps` of both is "".
        batches: what the model is called with. What objects among them hold is put back, too.
        directory: where copies lie; "" for the folder that the offload engine takes.

    Raises:
        OSError: there is no room for the copies. Nothing has changed.
    """
    empty = mapped_in(directory)
    trained = [value for group in optimizer.param_groups for value in group["params"]]
    weights = list(dict.fromkeys((*model.parameters(), *trained)))
    kept, versions = [_Kept(weight.data, empty) for weight in weights], Versions(weights)
    state = _OptimizerImage(optimizer, empty)
    stack = ExitStack()
    try:
        stack.enter_context(global_hooks.silenced())
        stack.enter_context(preserved(model, contents=True, batch=batches, weights=False))
        stack.enter_context(buffer_contents(model))
        stack.enter_context(training_flags(model, None if model.training else True))
        stack.enter_context(torch.enable_grad())
        stack.callback(state.restore)
        state.set_aside()
        stack.callback(versions.restore)  # for graphs that hold weights and wait for their backward
        stack.callback(_put_back, weights, kept)
        stack.enter_context(_without_gradients(weights, empty))
        for name in _STEP_HOOKS:
            setattr(optimizer, name, OrderedDict())
        yield
    finally:
        with uninterrupted():
            stack.close()


class _Kept:
    """The contents of a tensor that may be written to, or replaced, meanwhile."""

    def __init__(self, tensor: Tensor, empty: Empty) -> None:
        self._tensor = weakref.ref(tensor)  # a technique may let go of it, and then it must be free
        self._form = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self._copy = _copy_of(tensor, empty)

    def restored(self, tensor: Tensor | None = None) -> Tensor:
        """The tensor with its contents; another one where it is gone."""
        tensor = self._tensor() if tensor is None else tensor
        shape, stride, dtype, device = self._form
        if tensor is None or (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        tensor.detach().copy_(self._copy)
        return tensor


def _copy_of(tensor: Tensor, empty: Empty) -> Tensor:
    stride = torch.empty(tensor.shape, device="meta").stride()
    copy: Tensor = empty(tensor.shape, stride, dtype=tensor.dtype)
    return copy.copy_(tensor.detach())


def _put_back(weights: list[Tensor], kept: list[_Kept]) -> None:
    for weight, item in zip(weights, kept, strict=True):
        data = item.restored(weight.data)
        if data.data_ptr() != weight.data_ptr():
            weight.data = data


class _OptimizerImage:
    """State, settings and attributes of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, empty: Empty) -> None:
        def kept(value: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: _Kept(tensor, empty), value)

        self._optimizer = optimizer
        self._attributes = dict(optimizer.__dict__)
        self._state = [(key, own, kept(dict(own))) for key, own in optimizer.state.items()]
        self._groups = [
            (group, group["params"], {name: kept(value) for name, value in group.items() if name != "params"})
            for group in optimizer.param_groups
        ]

    def set_aside(self) -> None:
        """Gives the optimizer a state of its own with the same tensors: nothing here holds them then."""
        own = self._optimizer.state
        self._optimizer.state = defaultdict(dict, {key: dict(values) for key, values in own.items()})
        for values in own.values():
            values.clear()
        own.clear()

    def restore(self) -> None:
        """Puts all of it back."""
        meanwhile = self._optimizer.state  # holds the tensors until they are back where they were
        self._optimizer.__dict__.clear()
        self._optimizer.__dict__.update(self._attributes)
        self._optimizer.state.clear()
        for key, own, values in self._state:
            own.clear()
            own.update(tree_map(_restored, values))
            self._optimizer.state[key] = own
        for group, params, values in self._groups:
            group.clear()
            group.update({name: tree_map(_restored, value) for name, value in values.items()})
            group["params"] = params
        del meanwhile


def _restored(leaf: Any) -> Any:
    return leaf.restored() if isinstance(leaf, _Kept) else leaf


@contextmanager
def _without_gradients(weights: list[Tensor], empty: Empty) -> Iterator[None]:
    """A block in which there are no gradients, and those that were there take no memory."""
    gradients = [(weight, weight.grad) for weight in weights if weight.grad is not None]
    with ExitStack() as stack:
        for storage in _storages([gradient for _, gradient in gradients]):
            stack.callback(_emptied(storage, empty))
        for weight, gradient in gradients:
            stack.callback(set_gradient, weight, gradient)
            weight.grad = None
        stack.callback(_drop_gradients, weights)
        yield


def _drop_gradients(weights: list[Tensor]) -> None:
    for weight in weights:
        weight.grad = None


def _storages(gradients: list[Tensor]) -> list[torch.UntypedStorage]:
    """Storages that can be emptied, each once."""
    found = [value.untyped_storage() for value in gradients if value.layout is torch.strided]
    return list({storage.data_ptr(): storage for storage in found if storage.resizable()}.values())


def _emptied(storage: torch.UntypedStorage, empty: Empty) -> Callable[[], None]:
    """Empties a storage; returns what fills it again."""
    size = storage.nbytes()
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    copy = _copy_of(flat, empty)
    storage.resize_(0)

    def fill() -> None:
        storage.resize_(size)
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(copy)

    return fill
