# SPDX-License-Identifier: Apache-2.0
"""Weights in BF16 under BF16 autocast; the optimizer keeps the residuals of their FP32 masters.

    bytes per parameter    weight   its BF16 copy in a graph   rest                       gradient
    autocast alone         4        2                          –                          4
    with this              2        –                          2; with 8-bit moments 1    2

What is computed is what `model.to(torch.bfloat16)` under autocast computes with these weights; what is
learned goes into the master. Converted are weights with two dimensions or more that are trained and stepped
by our optimizer state. Biases and norms stay FP32: they are small, and their sums are where BF16 hurts.

Goes together with autocast, which lets operators have inputs of both dtypes. Evaluation, which autocast
leaves alone, runs under autocast as well while weights are BF16, and returns FP32.

`optim/masters.py` has the weights, and what of them `state_dict` and copies see.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from memscale.optim import master_hooks, masters
from memscale.optim.kinds import group_refusal, inner_of, kind_of, parameter_refusal
from memscale.optim.offload.attach import is_offloaded
from memscale.optim.offload.pieces import HOST
from memscale.optim.patched import hold, let_go
from memscale.optim.patched import why_not as why_not_patched
from memscale.optim.patched_base import is_patched, moments_of
from memscale.techniques.precision import mixed_precision
from memscale.techniques.precision.loss_scale_outputs import evaluated
from memscale.torchkit import sharding
from memscale.torchkit.replicas import replicas_of

if TYPE_CHECKING:
    from memscale.techniques.base import Surroundings
    from memscale.techniques.step_facts import StepFacts
    from memscale.torchkit.forward_slot import StandIn

NAME: Final = "bf16_weights"

UNKNOWN: Final = "the optimizer is not known: pass it to wrap, or use optimize"


class Bf16Weights:
    """Weights of a model in BF16, for as long as it is attached.

    Args:
        model: the model.
        optimizer: steps them.
        names: of the weights.
        kind: of the device that the step is for, "cpu" or "cuda".
    """

    name = NAME
    path = ""
    stays = True  # a graph may have saved a weight as it is
    apart_from: frozenset[str] = frozenset()

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, names: frozenset[str], kind: str
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self.names = names
        self.kind = kind
        self.beneath: StandIn | None = None
        self.used = False
        self.reason = ""
        self._weights: list[weakref.ref[nn.Parameter]] = []
        self._hooks: list[Any] = []

    @property
    def what(self) -> str:
        """What it does, for people."""
        optimizer = self._optimizer()
        in_8bit = optimizer is not None and moments_of(optimizer) == "code8"
        master = "24 bits" if in_8bit else "FP32"
        return f"BF16 weights: {len(self.names)} of them, with masters of {master} in the optimizer's state"

    def traced(self, step: StepFacts) -> StepFacts:
        """The step with these weights in BF16. A loop that opens autocast itself keeps its weights, too."""
        if torch.is_autocast_enabled(self.kind) and NAME not in step.staying:
            self.reason = "the training loop opens autocast itself, and keeps its weights"
            return step
        self.used = True
        return replace(step, path=replace(step.path, half=self.names))

    def attach(self) -> None:
        """Makes the weights BF16.

        Raises:
            RuntimeError: the optimizer cannot be patched any more.
        """
        model, optimizer = self._model(), self._optimizer()
        assert model is not None and optimizer is not None
        weights = [value for name, value in model.named_parameters() if name in self.names]
        reason = hold(optimizer)
        if reason:
            raise RuntimeError(f"weights cannot become BF16: the optimizer cannot be patched ({reason})")
        self._hooks = master_hooks.hooks_for(weights, model)
        for hook in self._hooks:
            hook.put()
        try:
            with _placed_back(weights) as device:
                for weight in weights:
                    masters.to_bf16(optimizer, weight, device)
                    self._weights.append(weakref.ref(weight))
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Makes them FP32 again. Where no step has been done since `attach`, every bit is as it was.

        Raises:
            torch.OutOfMemoryError: a card has no room for all of them. Those for which it has none lie in
                host memory then, in FP32; all else is undone.
        """
        weights = [weight for weight in (held() for held in self._weights) if weight is not None]
        try:
            with _placed_back(weights) as device:
                for weight in weights:
                    masters.to_fp32(weight, device)
        finally:
            for hook in reversed(self._hooks):
                hook.remove()
            self._weights, self._hooks = [], []
            optimizer = self._optimizer()
            if optimizer is not None:
                let_go(optimizer)

    def evaluate(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward that is not trained, where nobody has opened autocast: as this would compute it."""
        return evaluated(self.kind, forward, args, kwargs)


@contextmanager
def _placed_back(weights: Sequence[nn.Parameter]) -> Iterator[torch.device | None]:
    """Weights of a card get other data in host memory meanwhile, and are brought back one behind the other.

    What they leave behind is free by then, all of it, and PyTorch's allocator has the new ones as if the
    model had been made with them: the memory that a plan counts.

    Yields:
        Where their data is to be until the end of the block; None: where it is.
    """
    places = [(weight, weight.device) for weight in weights if weight.device.type != "cpu"]
    if not places:
        yield None
        return
    try:
        yield HOST
    finally:
        torch.cuda.empty_cache()
        for weight, device in places:
            if weight.device != device:
                weight.data = weight.data.to(device)


def find(model: nn.Module, around: Surroundings) -> list[Bf16Weights]:
    """The weights that could be BF16.

    Args:
        model: the model. In one whose weights are BF16 already, these are found.
        around: has the optimizer.
    """
    optimizer = inner_of(around.optimizer)
    if optimizer is None:
        return []
    present = frozenset(name for name, value in model.named_parameters() if masters.is_half(value))
    if not present and _why_not(model, around):
        return []
    names = present or frozenset(_names(model, optimizer)) - around.left_out.parameters
    return [Bf16Weights(model, optimizer, names, around.hardware.device_kind)]


def why_not(model: nn.Module, around: Surroundings) -> str:
    """Why there are none; "" if there are, or if mixed precision has said it.

    Args:
        model: the model.
        around: has the optimizer.
    """
    return "" if mixed_precision.why_not(model, around.hardware) else _why_not(model, around)


def _why_not(model: nn.Module, around: Surroundings) -> str:
    hardware, optimizer = around.hardware, around.optimizer
    if mixed_precision.why_not(model, hardware) or mixed_precision.dtype_for(hardware) is not torch.bfloat16:
        return "only with BF16 autocast"
    if optimizer is None:
        return UNKNOWN
    reason = "its state is elsewhere already" if is_offloaded(optimizer) else why_not_patched(optimizer)
    if reason:
        return f"{type(inner_of(optimizer)).__name__} stays as it is: {reason}"
    if replicas_of(model):
        return "DistributedDataParallel holds buckets for gradients in FP32"
    if sharding.has_units(model):
        return "weights are sharded by fully_shard, which keeps their dtype"
    if around.left_out.parameters.issuperset(_names(model, optimizer)):
        return "no trained FP32 weight of two dimensions that the optimizer could keep a master of"
    return ""


# ---- which weights -----------------------------------------------------------------------------------

_ONE_DTYPE: Final = (
    nn.LayerNorm,
    nn.Bilinear,
    nn.EmbeddingBag,
    *filter(None, [getattr(nn, "RMSNorm", None)]),
)
"""Modules whose operators want all they get in one dtype, and that autocast leaves alone."""


def _names(model: nn.Module, optimizer: Any) -> Iterator[str]:
    """Names of the weights that can be BF16."""
    optimizer = inner_of(optimizer)
    kind: Any = optimizer._memscale_kind if is_patched(optimizer) else kind_of(optimizer)
    stepped = {
        id(value)
        for group in optimizer.param_groups
        if not group_refusal(kind, group)
        for value in group["params"]
    }
    barred = {id(value) for module in model.modules() if _is_barred(module) for value in _own(module)}
    shared = _shared_storages(model)
    for name, value in model.named_parameters():
        if (
            id(value) in stepped
            and id(value) not in barred
            and type(value) is nn.Parameter
            and value.requires_grad
            and value.dim() >= 2
            and value.dtype is torch.float32
            and value.numel()
            and not parameter_refusal(value)
            and value.untyped_storage().nbytes() == 4 * value.numel()  # no part of something larger
            and value.untyped_storage()._cdata not in shared
        ):
            yield name


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return (value for value in module._parameters.values() if value is not None)


def _is_barred(module: nn.Module) -> bool:
    """Whether a module does more with its weights than an operator that autocast knows."""
    if isinstance(module, (torch.jit.ScriptModule, *_ONE_DTYPE)):
        return True
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return True  # what it makes of them is the weight
    if isinstance(module, nn.Embedding):
        return bool(module.sparse) or module.max_norm is not None  # PyTorch steps or changes these itself
    # weight_norm and spectral_norm of old keep the weight that they have made beside its parts.
    return any(isinstance(value, Tensor) and value.requires_grad for value in vars(module).values())


def _shared_storages(model: nn.Module) -> set[int]:
    """Memory that more than one tensor of the model's lies on."""
    seen: dict[int, int] = {}
    shared: set[int] = set()
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    for tensor in tensors:
        if tensor.layout is torch.strided and not sharding.is_sharded(tensor):
            key = tensor.untyped_storage()._cdata
            if seen.setdefault(key, id(tensor)) != id(tensor):
                shared.add(key)
    return shared
