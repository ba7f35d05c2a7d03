# SPDX-License-Identifier: Apache-2.0
"""One recompute of a checkpointed call: hands out its saves, compares them, stops when all are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from memscale.errors import RecomputeError
from memscale.techniques.checkpoint import card_check
from memscale.techniques.checkpoint.kept_outputs import detached
from memscale.techniques.checkpoint.recompute_check import OTHER_ON_CARD, Fingerprint, fingerprint
from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.leaves import is_sparse

if TYPE_CHECKING:
    from memscale._core import KeptFingerprint
    from memscale.techniques.checkpoint.checkpoint_state import Body, State


class _Region(Protocol):
    """One execution of a checkpointed forward: `checkpointing.Region`."""

    @property
    def body(self) -> Body: ...

    @property
    def state(self) -> State: ...

    @property
    def operations(self) -> object: ...


class _Saved(Protocol):
    """Placeholder for one saved tensor: `checkpointing.Saved`."""

    @property
    def index(self) -> int: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def fingerprint(self) -> Fingerprint: ...

    @property
    def is_sampled(self) -> bool: ...


class Stop(BaseException):
    """Ends a recompute once everything that backward needs has been saved.

    Not an `Exception`, so that a forward's own `except Exception` does not swallow it.
    """


def is_parameter(tensor: Tensor) -> bool:
    """Whether a saved tensor is a parameter, or a view of one: it stays, and is not recomputed."""
    kind = type(tensor)
    if kind is nn.Parameter:
        return True
    base = tensor._base
    if kind is Tensor and (base is None or type(base) is Tensor):  # most saves: no question to the metaclass
        return False
    return isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter)


def origin_of(tensor: Tensor) -> str:
    """What made a tensor, in the words of autograd's errors; "" for what has no node."""
    node = tensor.grad_fn
    return "" if node is None else f"which is output {tensor.output_nr} of {node.name()}"


class Recompute:
    """What one recompute has made so far.

    Args:
        region: whose.
        wanted: saves that backward still wants.
        only: compare this save alone, with the fingerprint `expected`, and take none.
        expected: of `only`.
        is_sampled: what `expected` is of.

    Attributes:
        wanted: by number.
        values: what has been made for them, with versions.
        count: saves so far.
        is_over: all is there, or something came out otherwise.
        difference: the number of that save, in words what differs, its fingerprint, and whether that is of a
            sample.
    """

    __slots__ = (
        "_body", "_detach", "_expected", "_is_sampled", "_is_whole", "_last", "_only", "count",
        "difference", "is_over", "values", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        region: _Region,
        wanted: Sequence[_Saved],
        only: int | None = None,
        expected: Fingerprint = None,
        is_sampled: bool = False,
    ) -> None:
        self.wanted = {save.index: save for save in wanted}
        self._body = region.body
        self._is_whole = region.body.is_recomputed_whole(region.state.notes.modules)
        self._last = max(self.wanted) if only is None else only
        self._only, self._expected, self._is_sampled = only, expected, is_sampled
        self._detach = Tensor.detach if region.operations is None else detached
        self.values: dict[int, tuple[Tensor, int]] = {}
        self.count = 0
        self.is_over = False
        self.difference: tuple[int, str, Fingerprint, bool] | None = None

    def pack(self, tensor: Tensor) -> object:
        """Takes what the recompute saves, and ends it when all that is wanted is there."""
        if is_parameter(tensor) or (tensor.layout is not torch.strided and is_sparse(tensor)):
            return tensor
        index = self.count
        self.count += 1
        value = self._detach(tensor)
        save = None if self.is_over else self.wanted.get(index)
        if save is not None:
            if save.fingerprint is not None or value.dtype is not save.dtype or value.shape != save.shape:
                self._compare(save, tensor, value)
            self.values[index] = (value, value._version)
        elif index == self._only and fingerprint(value, self._is_sampled) != self._expected:
            self.difference = index, "", None, False
        if index == self._last or self.difference is not None:
            self.is_over = True
            if not self._is_whole:
                raise Stop
        return value

    def _compare(self, save: _Saved, tensor: Tensor, value: Tensor) -> None:
        if value.shape != save.shape or value.dtype != save.dtype:
            made, before = form_text(value.shape, value.dtype), form_text(save.shape, save.dtype)
            self.difference = save.index, f"is {made}, in its forward {before}", None, False
        elif isinstance(save.fingerprint, int):
            found = fingerprint(value, save.is_sampled)
            if found != save.fingerprint:
                self.difference = save.index, _differs(value, tensor), found, save.is_sampled
        elif save.fingerprint is not None:
            differs = _differs(value, tensor)
            if self._differs_on_card(save.fingerprint, save.index, value, differs):
                self.difference = save.index, differs, None, False

    def _differs_on_card(self, kept: KeptFingerprint, index: int, tensor: Tensor, differs: str) -> bool:
        """Whether that is known already. In a backward it is at the end of it."""
        check, path = self._body.check, self._body.path
        return card_check.compare(
            kept, tensor, lambda: check.fail(error_of(path, index, differs, OTHER_ON_CARD))
        )


def error_of(path: str, index: int, differs: str, cause: str) -> RecomputeError:
    """What to raise for a saved tensor that came out otherwise."""
    tensor = f"saved tensor {index}"
    return RecomputeError(f"{tensor} of the recompute of module {path!r} {differs}", path, tensor, cause)


def _differs(value: Tensor, tensor: Tensor) -> str:
    about = ", ".join(filter(None, (form_text(value.shape, value.dtype), origin_of(tensor))))
    return f"has other values than in its forward ({about})"


def form_text(shape: torch.Size, dtype: torch.dtype) -> str:
    """Such as "float32[4, 8]"."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


never_compiled(Recompute, is_parameter, origin_of, error_of, form_text)
