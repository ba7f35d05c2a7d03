# SPDX-License-Identifier: Apache-2.0
"""The loss tile: the full logits of a language model are never allocated.

Stands in for the forward of the head, which is the module that makes scores of many classes out of few
numbers, whatever its class. While a model trains the head returns logits that are put off
(deferred_logits.py); a cross-entropy on them computes them in tiles (tiled_loss.py), anything else computes
them as the head does.

Rounds differently from plain PyTorch, as products of other shapes do; see tiled_loss.py for the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.dropout import _DropoutNd

from memscale.techniques.checkpoint.call_kinds import runs_plain
from memscale.techniques.left_out import NOTHING_LEFT_OUT, LeftOut
from memscale.techniques.tiles.deferred_logits import defer
from memscale.techniques.tiles.head_call import HeadCall
from memscale.techniques.tiles.head_products import own_saves
from memscale.techniques.tiles.logit_steps import is_plain
from memscale.techniques.tiles.row_facts import alias_of, exchanged
from memscale.techniques.tiles.tiled_loss import autocast_now
from memscale.torchkit.forward_slot import ForwardSlot, StandIn, beneath_stand_ins

_FEWEST_CLASSES = 1024
"""A head that nobody has named has at least so many, and more than twice its width."""

_PROBED_ROWS = 3
"""What a head of unknown code is tried on."""

_SMALL = 1 << 16
"""Elements of weights whose gradients are tried: those that count rows are scales and steps."""

Form = tuple[int, torch.dtype]
"""Of logits: number of classes, and dtype."""


class TiledHeadForward(StandIn):
    """Stands in for the forward of a head.

    Attributes:
        used: a loss has been computed in tiles.
        reason: why the last call was plain; "" if it was not.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__(module, original)
        self.used = False
        self.reason = ""
        self._forms: dict[Any, Form | str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The logits, put off; or as they are, where that is not safe."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        if self.passive or runs_plain() or not self.module.training or torch._C._get_tracing_state():
            return self.original(*args, **kwargs)
        call = self._call(args, kwargs)
        if isinstance(call, str):
            self.reason = call
            return self.original(*args, **kwargs)
        return defer(call, args[0])

    def _call(self, args: Any, kwargs: Any) -> HeadCall | str:
        """The call as it is to be run later, or why it is not."""
        module, original = self.module, self.original
        if len(args) != 1 or kwargs or not is_plain(args[0]):
            return "the head is not called with one tensor"
        hidden: Tensor = args[0]
        if hidden.dim() < 2 or hidden.numel() == 0 or not hidden.is_floating_point():
            return "the head's input is not rows of numbers"
        reason = _why_not(module, hidden)
        if reason:
            return reason
        linear = _linear(module, original, hidden)
        if linear is None:
            form = self._form(hidden)
            if isinstance(form, str):
                return form
        else:
            form = len(linear[0]), _product_dtype(hidden)
        return HeadCall(module, original, linear, *form, hidden.requires_grad, self._has_tiled)

    def _has_tiled(self) -> None:
        self.used, self.reason = True, ""

    def _form(self, hidden: Tensor) -> Form | str:
        """What a head of unknown code makes of rows, or why it cannot be run on some of them alone."""
        flags = tuple(part.training for part in self.module.modules())
        key = hidden.shape[-1], hidden.dtype, hidden.device, autocast_now(), flags
        if isinstance(hidden, FakeTensor):
            # A trace's answer rests on shapes alone: not to be kept.
            return _probe(self.module, self.original, hidden)
        if key not in self._forms:
            self._forms[key] = _probe(self.module, self.original, hidden)
        return self._forms[key]


def _why_not(module: nn.Module, hidden: Tensor) -> str:
    """Why a head is to run as it is; "" if it need not."""
    if _has_hooks(module):
        return "the head has hooks, which want its whole output"
    tensors = [*module.parameters(), *module.buffers()]
    if not all(is_plain(tensor) and tensor.device == hidden.device for tensor in tensors):
        return "the head's weights are not ordinary tensors on the device of its input"
    if any(tensor.dtype == torch.float16 for tensor in tensors):
        return "the head has FP16 weights: sums of their gradients leave FP16's range"
    if not hidden.requires_grad and not any(tensor.requires_grad for tensor in tensors):
        return "nothing below the loss needs a gradient"
    if any(isinstance(part, _DropoutNd) and part.p > 0 and part.training for part in module.modules()):
        return "the head draws random numbers, which tiles would draw in another order"
    return ""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Registries of a module; PyTorch has the same ones for all modules."""


def _has_hooks(module: nn.Module) -> bool:
    """Whether somebody watches, or works around, calls in the head (FSDP, accelerate)."""
    everywhere = torch.nn.modules.module
    if any(getattr(everywhere, f"_global{name}") for name in _HOOKS):
        return True
    return any(
        any(getattr(part, name) for name in _HOOKS) or hasattr(part, "_hf_hook") for part in module.modules()
    )


def _linear(
    module: nn.Module, original: Callable[..., Any], hidden: Tensor
) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a head that is `nn.Linear`, whatever its class is called."""
    if not _is_product(original):
        return None
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        return None
    if bias is None and getattr(module, "bias", None) is not None:
        return None
    autocast = torch.is_autocast_enabled(hidden.device.type)
    same = all(tensor.dtype == hidden.dtype for tensor in (weight, bias) if tensor is not None)
    double = torch.float64 in (weight.dtype, hidden.dtype)
    return (weight, bias) if same or (autocast and not double) else None


def reads_weights_in_place(module: nn.Module) -> bool:
    """Whether a module is a head in tiles that is nothing but a product: its own forward is not called."""
    above = module.forward
    while isinstance(above, StandIn) and not isinstance(above, TiledHeadForward):
        above = above.original
    return isinstance(above, TiledHeadForward) and _is_product(above.original)


def _is_product(forward: Callable[..., Any]) -> bool:
    return getattr(beneath_stand_ins(forward), "__func__", None) is nn.Linear.forward


def _product_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _probe(module: nn.Module, original: Callable[..., Any], hidden: Tensor) -> Form | str:
    """Runs a head on a few rows, together and one of them alone."""
    rows = hidden.detach().reshape(-1, hidden.shape[-1])[:_PROBED_ROWS]
    rows = rows.expand(_PROBED_ROWS, -1) if len(rows) == 1 else rows
    fake = isinstance(hidden, FakeTensor)
    before = None if fake else _generators(hidden)
    try:
        with torch.no_grad(), own_saves():
            together, alone = original(rows), original(rows[1:2])
    except Exception as error:
        return f"the head cannot be run on some rows alone: {type(error).__name__}"
    finally:
        drew = before is not None and _put_back(hidden, before)
    if drew:
        return "the head draws random numbers, which tiles would draw in another order"
    if not is_plain(together) or together.shape[:-1] != rows.shape[:-1] or not together.is_floating_point():
        return "the head does not make one row of logits of each row"
    if before is not None:
        scale = together.float().abs().max()
        if not torch.allclose(together[1:2].float(), alone.float(), rtol=0.02, atol=0.02 * float(scale)):
            return "the head makes a row of logits of more than its own row"
        try:
            add_up = _add_up(module, original, rows)
        except Exception as error:
            return f"the head has no gradients for some rows alone: {type(error).__name__}"
        finally:
            _put_back(hidden, before)
        if not add_up:
            return "gradients of the head's weights are no sums over rows"
    return together.shape[-1], together.dtype


def _add_up(module: nn.Module, original: Callable[..., Any], rows: Tensor) -> bool:
    """Whether gradients of a head's weights for some rows are the sums of those for each of them."""

    def of_weights(some: Tensor) -> list[Tensor]:
        trained = [value for value in module.parameters() if value.requires_grad and value.numel() <= _SMALL]
        logits = original(some)
        made = torch.autograd.grad(logits.float().square().sum(), trained, allow_unused=True)
        return [torch.zeros_like(own) if one is None else one for own, one in zip(trained, made, strict=True)]

    with torch.enable_grad(), own_saves(), exchanged(module, alias_of):
        if not any(value.requires_grad and value.numel() <= _SMALL for value in module.parameters()):
            return True
        whole, alone = of_weights(rows), [of_weights(row) for row in rows.split(1)]
    sums = [torch.stack([one.double() for one in parts]).sum(0) for parts in zip(*alone, strict=True)]
    near = [
        (one.double() - other).norm() <= 0.1 * one.double().norm()
        for one, other in zip(whole, sums, strict=True)
    ]
    return all(map(bool, near))


def _generators(hidden: Tensor) -> list[Tensor]:
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(hidden.device)] if hidden.is_cuda else [])


def _put_back(hidden: Tensor, before: list[Tensor]) -> bool:
    """Sets the generators back. Whether they have moved."""
    moved = not all(map(torch.equal, before, _generators(hidden)))
    if moved:
        torch.set_rng_state(before[0])
        if hidden.is_cuda:
            torch.cuda.set_rng_state(before[1], hidden.device)
    return moved


class LossTileAttachment:
    """The loss tile on one head, as the executor attaches it.

    Args:
        module: the head.
        path: its qualified name.
    """

    name = "loss_tile"

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module = module
        self.path = path
        self.beneath: StandIn | None = None
        self._slot: ForwardSlot | None = None
        self._forward: TiledHeadForward | None = None

    @property
    def used(self) -> bool:
        """A loss has run in tiles since it was attached."""
        return self._forward is not None and self._forward.used

    @property
    def reason(self) -> str:
        """Why none has; "" if one has."""
        if self._forward is None or self._forward.used:
            return ""
        return self._forward.reason or "no cross-entropy over the classes of a row follows the head"

    def attach(self) -> None:
        """Replaces `module.forward`.

        Raises:
            AttachError: the module does not let its forward be replaced.
        """
        slot = ForwardSlot(self.module, self.path, self.beneath)
        forward = TiledHeadForward(self.module, slot.present)
        slot.put(forward)
        self._slot, self._forward = slot, forward

    def undo(self) -> None:
        """Restores `module.forward`."""
        slot, self._slot = self._slot, None
        assert slot is not None
        slot.remove()


# ---- where it may attach -----------------------------------------------------------------------------


def find(model: nn.Module, left_out: LeftOut = NOTHING_LEFT_OUT) -> list[LossTileAttachment]:
    """The heads of a model: what it names as such, and products that make many classes of few numbers.

    Args:
        model: bare.
        left_out: modules to leave alone.

    Returns:
        Attachments in module order.
    """
    named = {id(head) for head in _named_heads(model)}
    found: list[LossTileAttachment] = []
    repeated = _repeated_paths(model)
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other.path}.") for other in found)
        if not path or inside or (id(module) not in named and not _looks_like_head(module, path, repeated)):
            continue
        found.append(LossTileAttachment(module, path))
    return [head for head in found if not left_out.bars(head.path)]


def _named_heads(model: nn.Module) -> Iterator[nn.Module]:
    """What models say of themselves, as those of transformers do."""
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        if not callable(ask):
            continue
        try:
            head = ask()
        except Exception:  # somebody else's code, asked out of curiosity
            continue
        if isinstance(head, nn.Module) and not isinstance(head, nn.Embedding):
            yield head


def _looks_like_head(module: nn.Module, path: str, repeated: list[str]) -> bool:
    classes, width = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if type(classes) is not int or type(width) is not int:
        return False
    many = classes >= _FEWEST_CLASSES and classes > 2 * width
    return many and not any(path.startswith(f"{block}.") for block in repeated)


def _repeated_paths(model: nn.Module) -> list[str]:
    """Members of lists of like modules: a model's blocks."""
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = [type(child) for child in module]
        for name, child in module.named_children():
            if kinds.count(type(child)) > 1 and next(child.children(), None) is not None:
                found.append(f"{path}.{name}".lstrip("."))
    return found
