# SPDX-License-Identifier: Apache-2.0
"""Parts that tiles share: saves that are dropped and recomputed, generators, sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.errors import RecomputeError
from memscale.techniques.checkpoint import card_check
from memscale.techniques.checkpoint.checkpoint_state import check_version
from memscale.techniques.checkpoint.kept_outputs import detached
from memscale.techniques.checkpoint.recompute import form_text, is_parameter
from memscale.techniques.checkpoint.recompute_check import (
    OTHER_ON_CARD,
    OTHER_WAY,
    UNCHECKED,
    Fingerprint,
    RecomputeCheck,
    SavedFlow,
    fingerprint,
    is_scratch_on_card,
)


class _Enough(BaseException):
    """Ends a tile's recompute. Not an `Exception`, so that no forward's own `except` swallows it."""


class _Form(NamedTuple):
    """What is known of a save of the first run."""

    shape: torch.Size
    dtype: torch.dtype
    fingerprint: Fingerprint
    is_sampled: bool


class Saves:
    """What the recompute of a tile has found, for the saves of the first: by number, with versions.

    The autograd graph of the tile holds this object, so it must not lead back to the graph.

    Args:
        path: of the module.
        check: of its recomputes.
        is_checked: whether this call's are compared with its forward.
    """

    __slots__ = ("check", "flow", "forms", "found", "is_checked", "path")

    def __init__(self, path: str, check: RecomputeCheck = UNCHECKED, is_checked: bool = False) -> None:
        self.path = path
        self.check = check
        self.is_checked = is_checked
        self.flow: SavedFlow | None = None
        self.forms: list[_Form] = []
        self.found: dict[int, tuple[Tensor, int]] = {}

    def follow(self, rows: Tensor) -> None:
        """Before the first run, on `rows`: records which saves are computed from which, unless known."""
        self.flow = SavedFlow((rows,)) if self.is_checked and not self.check.knows_flow else None

    def first_is_over(self) -> None:
        """After the first run."""
        if self.is_checked:
            self.check.learn(self.flow, len(self.forms))
            self.flow = None

    def pack(self, tensor: Tensor) -> object:
        """First run: a number in place of the tensor."""
        if is_parameter(tensor):
            return tensor
        number = len(self.forms)
        is_sampled = self.check.is_sampled(number)
        is_compared = self.is_checked and not (tensor.is_cuda and is_scratch_on_card(tensor))
        value = fingerprint(tensor, is_sampled) if is_compared else None
        self.forms.append(_Form(tensor.shape, tensor.dtype, value, is_sampled))
        if self.flow is not None:
            self.flow.add(tensor)
        return number

    def unpack(self, saved: Any) -> Tensor:
        """Backward of the tile: what the recompute has found."""
        if isinstance(saved, Tensor):
            return saved
        tensor, version = self.found.pop(saved)
        check_version(tensor, version, self.path)
        return tensor

    def find(self, run: Callable[[], object]) -> None:
        """Recompute, up to the last save.

        Raises:
            RecomputeError: it went another way than the first, or made other values.
        """
        count = 0
        difference = ""
        self.found.clear()
        if not self.forms:
            return

        def pack(tensor: Tensor) -> object:
            nonlocal count, difference
            if is_parameter(tensor):
                return tensor
            value = detached(tensor)
            difference = _difference(self.forms[count], value) or self._on_card(count, value)
            if difference:
                raise _Enough
            self.found[count] = value, value._version
            count += 1
            if count == len(self.forms):
                raise _Enough
            return value

        try:
            with saved_tensors_hooks(pack, lambda value: value):
                run()
        except (_Enough, Exception):  # PyTorch may lose the former on its way: see checkpointing.Region
            if not difference and count < len(self.forms):
                raise
        if difference:
            raise self.check.fail(_error(self.path, count, difference, OTHER_WAY))
        if count < len(self.forms):
            made = f"{count} tensors of a tile instead of {len(self.forms)}"
            what = f"the recompute of module {self.path!r} saved {made}"
            raise self.check.fail(RecomputeError(what, self.path, None, OTHER_WAY))

    def _on_card(self, number: int, value: Tensor) -> str:
        """As `_difference`, for what is compared on a card. In a backward it is known at the end of it."""
        kept = self.forms[number].fingerprint
        if kept is None or isinstance(kept, int):
            return ""
        check, path, differs = self.check, self.path, _other_values(value)
        known = card_check.compare(
            kept, value, lambda: check.fail(_error(path, number, differs, OTHER_ON_CARD))
        )
        return differs if known else ""


def _error(path: str, number: int, differs: str, cause: str) -> RecomputeError:
    tensor = f"saved tensor {number} of a tile"
    return RecomputeError(f"{tensor} of the recompute of module {path!r} {differs}", path, tensor, cause)


def _other_values(value: Tensor) -> str:
    return f"has other values than in its forward ({form_text(value.shape, value.dtype)})"


def _difference(form: _Form, value: Tensor) -> str:
    """In words what of a tensor differs from the save that it stands for; "" if nothing does."""
    if (value.shape, value.dtype) != (form.shape, form.dtype):
        return f"is {form_text(value.shape, value.dtype)}, in its forward {form_text(form.shape, form.dtype)}"
    if isinstance(form.fingerprint, int) and fingerprint(value, form.is_sampled) != form.fingerprint:
        return _other_values(value)
    return ""


class _SameOperators(TorchDispatchMode):
    """Does nothing. Under any mode some composite functions are made of other operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def under_mode_as_before(before: bool) -> Iterator[None]:
    """Runs the block under some dispatch mode, if the first run was under one.

    Args:
        before: whether it was.
    """
    if before and torch._C._len_torch_dispatch_stack() == 0:
        with _SameOperators():  # type: ignore[no-untyped-call]
            yield
    else:
        yield


class RandomState:
    """State of the random generators that a tile may draw from. Not tensors: it is no tensor memory."""

    __slots__ = ("cpu", "cuda", "device")

    def __init__(self, device: torch.device) -> None:
        with torch._C._DisableTorchDispatch():
            self.cpu = torch.get_rng_state().numpy().tobytes()
            self.device = device if device.type == "cuda" and torch.cuda.is_initialized() else None
            self.cuda = (
                None if self.device is None else torch.cuda.get_rng_state(self.device).numpy().tobytes()
            )

    def same(self, other: RandomState) -> bool:
        """Whether nothing was drawn between the two."""
        return self.cpu == other.cpu and self.cuda == other.cuda

    def set(self) -> None:
        """Makes it the present state."""
        with torch._C._DisableTorchDispatch():
            torch.set_rng_state(torch.frombuffer(bytearray(self.cpu), dtype=torch.uint8))
            if self.cuda is not None and self.device is not None:
                state = torch.frombuffer(bytearray(self.cuda), dtype=torch.uint8)
                torch.cuda.set_rng_state(state, self.device)


class Sums:
    """Where the products of a tile find the sums of the backward that is running. Leads to no graph."""

    __slots__ = ("by_alias",)

    def __init__(self) -> None:
        self.by_alias: dict[int, GradientSum] = {}


class GradientSum:
    """Adds up the gradients of one parameter over the tiles, as soon as each is there.

    Args:
        parameter: for shape, dtype and layout.
        tiles: number of parts to come. With more than one, half precision is summed in float32.
        held: addresses of storages that nothing may be added to: those of the gradients and values that come
            from outside, and of sums. The first gradient on any other memory is the sum itself.
    """

    __slots__ = ("dtype", "held", "stride", "total", "wide")

    def __init__(self, parameter: Tensor, tiles: int, held: set[int]) -> None:
        self.held = held
        self.dtype = parameter.dtype
        self.stride = parameter.stride()
        self.wide = tiles > 1 and parameter.dtype in (torch.float16, torch.bfloat16)
        self.total: Tensor | None = None

    def add(self, grad: Tensor | None) -> Tensor | None:
        """Hook on the parameter. What goes on to the engine in place of the gradient has no memory."""
        if grad is None:  # all of it went into products
            return None
        with torch.no_grad():
            if self.total is not None:
                self.total.add_(grad)
            elif self.wide:
                self.total = grad.float()
            elif grad.stride() == self.stride and self._is_free(grad):
                self.total = grad.detach()
            else:
                self.total = torch.empty_strided(
                    grad.shape, self.stride, dtype=grad.dtype, device=grad.device
                )
                self.total.copy_(grad)
            return grad.new_zeros(()).expand(grad.shape)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Adds a product of matrices, in the product's own kernel where there is something to add to."""
        with torch.no_grad():
            if self.total is None:
                self.add(torch.mm(left, right))
            else:
                torch.addmm(self.total, left, right, out=self.total)

    def _is_free(self, grad: Tensor) -> bool:
        """Whether a gradient's memory is its own, and nobody's afterwards. Takes it, if so."""
        storage = grad.untyped_storage()
        if storage._cdata in self.held or storage.nbytes() != grad.numel() * grad.element_size():
            return False
        self.held.add(storage._cdata)
        return True

    def take(self) -> Tensor | None:
        """The sum, which is let go of."""
        total, self.total = self.total, None
        return total if total is None or total.dtype == self.dtype else total.to(self.dtype)
