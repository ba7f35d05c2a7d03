# SPDX-License-Identifier: Apache-2.0
"""The signature of a step, and whether a plan covers the step that is about to run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from memscale.optim.masters import dtype_of
from memscale.optim.patched import is_held
from memscale.optim.patched_base import base_of
from memscale.state.attribute_tables import has_foreign_hooks
from memscale.state.module_attributes import Attributes, ModuleAttributes
from memscale.techniques.step_facts import StepFacts
from memscale.torchkit.leaves import tensors_of
from memscale.torchkit.output_use import LossBytes, OutputUse
from memscale.trace.ddp import State, states_of


@dataclass(frozen=True)
class StepSignature:
    """Everything seen from outside that decides a step's memory.

    Attributes:
        shapes: shape and dtype of every tensor argument, in order.
        layouts: (contiguous, bytes of the storage) of each of them. Results of operators take their input's
            order of dimensions, and an expanded tensor takes less than its shape says.
        structure: how the arguments nest, and the flags among them. Other numbers count by type alone.
        autocast: (dtype, enabled) per device kind.
        modes: training flag of every module and `requires_grad` of every parameter, as two integers.
        grads_present: gradients exist before forward.
        carried: sizes of storages of the previous output that are still referenced, largest first.
        optimizer: what is known of the optimizers; equal means the same memory.
        weights: bytes of the parameters, in the precision that the caller gave them.
        replicas: what every DistributedDataParallel in and around the model takes.
        forwards: of the model, before the one backward.
        values: whole numbers and words among the arguments, in order: a depth decides memory, see
            `PlainValues`.
        buffers: bytes of the buffers, see `_buffer_bytes`: a bank of earlier samples grows.
        need_gradients: of the tensor arguments, in order. Through frozen layers nothing is saved for one that
            needs none.
        attributes: plain attributes of the modules, see `ModuleAttributes`.
        hooked: modules below the model that have forward hooks, as bits: what is around them runs once.
        use: what the loop does with the outputs, where that is not what traces assume.
        loss: what its loss takes, likewise; True: it goes through gradients.
    """

    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    structure: str
    autocast: tuple[Any, ...]
    modes: tuple[int, int]
    grads_present: bool
    carried: tuple[int, ...] = field(default=())
    optimizer: str = ""
    weights: int = 0
    layouts: tuple[tuple[bool, int], ...] = ()
    replicas: tuple[State, ...] = ()
    forwards: int = 1
    values: tuple[int | str | None, ...] = ()
    need_gradients: tuple[bool, ...] = ()
    buffers: int = 0
    attributes: Attributes = ()
    hooked: int = 0
    use: OutputUse | None = None
    held: tuple[bool, ...] | None = None
    beside: float = 0.0
    loss: LossBytes | bool | None = None

    def covers(self, other: StepSignature) -> bool:
        """True when a plan made for `self` holds for `other`: the same, or smaller in every respect."""
        same = (self.structure, self.autocast, self.modes, self.optimizer, self.weights)
        if same != (other.structure, other.autocast, other.modes, other.optimizer, other.weights):
            return False
        if (self.attributes, self.use, self.held) != (other.attributes, other.use, other.held):
            return False
        if len(self.shapes) != len(other.shapes) or other.grads_present > self.grads_present:
            return False
        if other.beside > self.beside or not _loss_covers(self.loss, other.loss):
            return False
        if other.buffers > self.buffers or other.hooked & ~self.hooked:
            return False
        if other.forwards > self.forwards or other.values != self.values:
            return False
        if any(theirs > mine for mine, theirs in zip(self.need_gradients, other.need_gradients, strict=True)):
            return False
        if sum(other.carried) > sum(self.carried) or not _takes_more(self.replicas, other.replicas):
            return False
        return all(map(shape_covers, self.shapes, other.shapes)) and all(
            mine[0] == theirs[0] and mine[1] >= theirs[1]
            for mine, theirs in zip(self.layouts, other.layouts, strict=True)
        )

    def beyond(self, plan: StepSignature) -> list[str]:
        """What of this step a plan for another one does not cover, in words for the log."""
        found = []
        for names, words in _WORDS:
            step = replace(plan, **{name: getattr(self, name) for name in names})
            if not plan.covers(step):
                found.append(words)
        return found


_WORDS = (
    (("shapes", "layouts", "need_gradients", "structure"), "another batch"),
    (("values",), "other numbers or words among the arguments"),
    (("modes",), "other training flags or trainable weights"),
    (("autocast",), "another autocast"),
    (("attributes",), "attributes of modules"),
    (("use", "held"), "what the loop does with the outputs"),
    (("loss", "beside"), "what the loop's loss takes"),
    (("forwards",), "more forwards before a backward"),
    (("grads_present",), "gradients are kept between forwards"),
    (("carried",), "the last output is still held"),
    (("optimizer",), "another optimizer"),
    (("weights",), "weights of another size"),
    (("buffers",), "larger buffers"),
    (("replicas",), "gradient buckets"),
    (("hooked",), "hooks on modules"),
)
"""What of a signature goes together, and how the log says that it has changed."""

_ALIKE = 2
"""New plans in a row that were the same step, until what they were made for counts no more."""

_MOST_VALUES = 16
"""Values of one argument that plans are made for; lengths of texts have as many as there are steps."""


class PlainValues:
    """Which whole numbers and words among the arguments are part of what a plan is for.

    Each is, until steps traced for other values of it alone were the same step twice in a row: what counts
    the steps, or names files, must not ask for a plan at each of them. Nor may what differs and never
    comes again.

    Attributes:
        numbered: the last argument is the number of the batch, which is no part of it.
    """

    def __init__(self) -> None:
        self.numbered = False
        self._ignored: set[tuple[int, int]] = set()  # (structure, position)
        self._alike: dict[tuple[int, int], int] = {}
        self._plans: dict[tuple[int, int], int] = {}

    def read(self, signature: StepSignature) -> StepSignature:
        """The signature, with what matters of its plain values."""
        if self.numbered:
            signature = replace(signature, values=signature.values[:-1])
        if not self._ignored:
            return signature
        structure = hash(signature.structure)
        values = enumerate(signature.values)
        return replace(
            signature, values=tuple(None if (structure, i) in self._ignored else value for i, value in values)
        )

    def learn(self, before: StepSignature | None, now: StepSignature, is_same_step: bool) -> None:
        """A step was traced anew.

        Args:
            before: of the plan that was in force.
            now: of the new one.
            is_same_step: nothing in it differs from the earlier one.
        """
        if before is None or not replace(before, values=now.values).covers(now):
            return
        structure = hash(now.structure)
        for i, (old, new) in enumerate(zip(before.values, now.values, strict=True)):
            if old == new:
                continue
            place = structure, i
            self._alike[place] = self._alike.get(place, 0) + 1 if is_same_step else 0
            self._plans[place] = self._plans.get(place, 0) + 1
            if self._alike[place] >= _ALIKE or self._plans[place] >= _MOST_VALUES:
                self._ignored.add(place)


def _takes_more(mine: tuple[State, ...], theirs: tuple[State, ...]) -> bool:
    """Whether in every replica all that takes memory in the second is there in the first."""
    return len(mine) == len(theirs) and all(
        one >= other
        for first, second in zip(mine, theirs, strict=True)
        for one, other in zip(first, second, strict=True)
    )


def shape_covers(mine: tuple[tuple[int, ...], Any], theirs: tuple[tuple[int, ...], Any]) -> bool:
    """Whether the first of two shapes with dtypes is the second, or larger."""
    (shape, dtype), (other, other_dtype) = mine, theirs
    return (
        dtype == other_dtype
        and len(shape) == len(other)
        and all(a >= b for a, b in zip(shape, other, strict=True))
    )


def signature_of(
    model: nn.Module, args: Any, kwargs: Any, step: StepFacts, known: ModuleAttributes
) -> StepSignature:
    """Reads the signature of a step that is about to run; `known` reads attributes of the model's modules."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = tensors_of(leaves)
    plain = [leaf if isinstance(leaf, bool) else type(leaf).__name__ for leaf in leaves]
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    autocast = tuple(
        (torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in kinds
    )
    modules = list(model.modules())
    training = [module.training if step.training is None else step.training for module in modules]
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    return StepSignature(
        shapes=shapes_of(tensors),
        layouts=tuple(map(_layout, tensors)),
        need_gradients=tuple(tensor.requires_grad for tensor in tensors),
        structure=f"{plain}{spec}",
        autocast=autocast,
        modes=(_bits(training), _bits(trainable)),
        grads_present=step.grads_present,
        carried=tuple(sorted(step.carried_bytes, reverse=True)),
        optimizer=_optimizers_memory(step, sum(trainable)),
        weights=_weight_bytes(model),
        buffers=_buffer_bytes(model),
        replicas=states_of(model),
        forwards=step.forwards,
        use=step.use,
        held=step.held,
        beside=step.beside,
        loss=step.loss_bytes or step.differentiates_twice or None,
        attributes=known.read(model, modules),
        hooked=_bits(list(map(has_foreign_hooks, modules[1:]))),
        values=tuple(leaf for leaf in leaves if isinstance(leaf, (int, str)) and not isinstance(leaf, bool)),
    )


def shapes_of(tensors: Iterable[Tensor]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of each."""
    return tuple((_shape(tensor), tensor.dtype) for tensor in tensors)


def _loss_covers(mine: LossBytes | bool | None, theirs: LossBytes | bool | None) -> bool:
    if isinstance(mine, LossBytes) and isinstance(theirs, LossBytes):
        return mine.covers(theirs)
    return mine == theirs


def _has_storage(tensor: Tensor) -> bool:
    """Sparse tensors have several, those of oneDNN one of their own."""
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """A nested tensor has a shape per row: all of its elements count."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return tensor.dim(), tensor.numel()
    return (_rounded(tensor.numel()),) if _is_list(tensor) else tuple(tensor.shape)


def _layout(tensor: Tensor) -> tuple[bool, int]:
    if tensor.layout is not torch.strided or not _has_storage(tensor):
        return True, 0
    size = tensor.untyped_storage().nbytes()
    return tensor.is_contiguous(), _rounded(size) if _is_list(tensor) else size


_LONGEST_LIST = 4096
"""Whole numbers in a row that say where sequences of a packed batch begin; each batch has another number."""


def _is_list(tensor: Tensor) -> bool:
    """Whether a tensor is a short list of whole numbers: no plan depends on how many, to a power of two."""
    exact = not (tensor.is_floating_point() or tensor.is_complex())
    return exact and tensor.dim() == 1 and tensor.numel() <= _LONGEST_LIST


def _rounded(number: int) -> int:
    return 1 << max(number - 1, 63).bit_length()


def _bits(flags: list[bool]) -> int:
    number = 1
    for flag in flags:
        number = number << 1 | flag
    return number


def _weight_bytes(model: nn.Module) -> int:
    sizes = (item.numel() * dtype_of(item).itemsize for item in model.parameters() if not is_lazy(item))
    return sum(sizes)


def _buffer_bytes(model: nn.Module) -> int:
    """Rounded up, by an eighth at most: what grows at every step asks for few plans only."""
    size = sum(item.numel() * item.dtype.itemsize for item in model.buffers() if not is_lazy(item))
    grain = 1 << max(size.bit_length() - 3, 16)
    return -(-size // grain) * grain


def _optimizers_memory(step: StepFacts, trained: int) -> str:
    """What of all of them decides memory, in any order. `trained`: parameters that need gradients."""
    first = optimizer_memory(step.optimizer, trained)
    return " + ".join(sorted((first, *(optimizer_memory(other, trained) for other in step.others))))


def optimizer_memory(optimizer: torch.optim.Optimizer | None, trained: int | None = None) -> str:
    """What of an optimizer decides memory. An AdamW with default switches is what is assumed without one.

    Args:
        optimizer: None for the one that is assumed.
        trained: parameters of the model that need gradients; None: the optimizer has all of them.
    """
    if optimizer is None:
        return "AdamW"
    switches = sorted(
        {
            f"{name}={group[name]}"
            for group in optimizer.param_groups
            for name in ("amsgrad", "foreach", "fused", "momentum", "centered", "capturable")
            if group.get(name)
        }
    )
    kind = getattr(type(optimizer), "_memscale_offload_base", type(optimizer))
    kind = base_of(optimizer) if is_held(optimizer) else kind  # held: as large as PyTorch's own
    name = kind.__name__
    covered = sum(
        parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]
    )
    own = kind.__module__.startswith("torch.optim.")  # bitsandbytes has an AdamW, too
    whole = trained is None or trained == covered
    same_as_assumed = own and name in ("Adam", "AdamW") and not switches and whole
    return "AdamW" if same_as_assumed else f"{name} {switches} {covered}"


def output_storages(output: Any) -> list[Any]:
    """Storages of a model's output, each once."""
    storages = {}
    for leaf in filter(_has_storage, tensors_of(output)):
        storage = leaf.untyped_storage()
        storages[storage._cdata] = storage
    return list(storages.values())
