# SPDX-License-Identifier: Apache-2.0
"""The largest batch, or the longest sequence, that fits: found by tracing steps of other sizes.

Memory is nearly linear in the batch, and smooth in the sequence. So a line through two sizes says where the
budget ends, a third trace says how wrong that was, and the answer is proven at both sides: a trace at the
answer fits, a trace at one more does not. Nothing is computed and no device is touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale.core.advice import varying_share
from memscale.core.profiler import normalize_sample
from memscale.errors import ProfileError
from memscale.plans.budget import reserve_bytes
from memscale.trace.static import has_data

if TYPE_CHECKING:
    from memscale.core.planner import Planner
    from memscale.plans.plan import Plan

Batch = tuple[tuple[Any, ...], dict[str, Any]]

DIMENSIONS: Final = ("batch", "sequence")

_MOST: Final = 1 << 24
"""Nobody trains with a larger batch or sequence; where memory does not grow, the search ends here."""

_POSITION_LIMITS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


@dataclass
class Scaling:
    """Sizes of one sample that fit one budget. Each answer is found once.

    Attributes:
        planner: plans for the model and the budget; it must not run the model.
        sample: as the user gave it; a callable is asked for other sizes.
        batch: the sample as arguments.
        plan: what the sample itself got.
        bare: what every trace is made in; takes a wrapped model's techniques off, among others.
    """

    planner: Planner
    sample: Any
    batch: Batch
    plan: Plan
    bare: Callable[[], AbstractContextManager[None]]

    def __post_init__(self) -> None:
        self._answers: dict[tuple[str, bool], int] = {}
        self.traces = 0

    # ---- answers ---------------------------------------------------------------------------------

    def largest(self, what: str, with_plan: bool) -> int:
        """The largest size that fits; 0 if 1 does not.

        Args:
            what: "batch" or "sequence".
            with_plan: under the smallest plan for that size, else without any.

        Raises:
            ValueError: the size cannot be derived from the sample, the model rejects another one, or it
                cannot be traced without data: a real step of another size may not fit into this machine.
        """
        key = what, with_plan
        if key not in self._answers:
            self._answers[key] = self._search(what, with_plan)
        return self._answers[key]

    def lines(self) -> tuple[str, ...]:
        """All answers in words; what cannot be derived is left out."""
        lines = []
        for what in DIMENSIONS:
            try:
                present = size_of(self.sample, self.batch, what)
                sizes = str(self.largest(what, with_plan=False))
                if self.planner.step.gradients:
                    sizes = f"{self.largest(what, with_plan=True)} with a plan, {sizes} without"
            except ValueError:
                continue
            lines.append(f"largest {what}: {sizes} (this sample: {present})")
        return tuple(lines)

    # ---- search ----------------------------------------------------------------------------------

    def _search(self, what: str, with_plan: bool) -> int:
        present = size_of(self.sample, self.batch, what)
        if self.plan.profile != "static":
            raise ValueError(
                f"the largest {what} is unknown: this model cannot be traced without data, and steps of "
                "other sizes are not run"
            )
        most = self._most(what)
        used = {present: self._of_sample(with_plan)}
        low, high = 0, most + 1  # low fits (0 always does), high does not
        size = min(present, most)
        halve = False
        while True:
            if size not in used:
                used[size] = self._trace(what, size, with_plan)
            width = high - low
            low, high = (size, high) if used[size] <= self._limit else (low, size)
            if high - low <= 1:
                return low
            # A line that did not bring the ends much nearer will not do so the next time.
            halve = not halve and high in used and low in used and high - low > width // 2
            size = (low + high) // 2 if halve else self._guess(used, low, high, with_plan)

    def _guess(self, used: dict[int, int], low: int, high: int, with_plan: bool) -> int:
        """Where the line through what is known meets the limit, strictly between `low` and `high`."""
        ends = [size for size in (low, high) if size in used]
        known = ends if len(ends) == 2 else sorted(used, key=lambda size: abs(size - ends[0]))[:2]
        if len(known) == 2:
            first, second = known
            slope = (used[second] - used[first]) / (second - first)
        else:
            step = self.plan.predicted if with_plan else self.plan.plain
            slope = varying_share(step) * used[known[0]] / known[0]
        if slope <= 0:
            return min(2 * low + 1, high - 1)
        guess = known[0] + int((self._limit - used[known[0]]) // slope)
        return min(max(guess, low + 1), high - 1)

    @property
    def _limit(self) -> int:
        return self.plan.budget_bytes - reserve_bytes(self.plan.budget_bytes)

    def _of_sample(self, with_plan: bool) -> int:
        return self.plan.smallest_peak_bytes if with_plan else self.plan.plain.device_used_peak_bytes

    def _trace(self, what: str, size: int, with_plan: bool) -> int:
        """Device-used bytes of a step of another size, under the smallest plan or under none.

        Raises:
            ValueError: the model, or the callable that makes samples, does not take that size.
        """
        self.traces += 1
        try:
            with self.bare():
                return self.planner.used_bytes(*self.sample_of(what, size), with_plan=with_plan)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, ProfileError) and error.__cause__ else error
            line = str(cause).strip().partition("\n")[0][:160]
            raise ValueError(
                f"the largest {what} is unknown: with {size} the model raised {type(cause).__name__}: {line}"
            ) from error

    # ---- samples ---------------------------------------------------------------------------------

    def _most(self, what: str) -> int:
        """A model with learned positions has no longer sequences than those."""
        config = getattr(self.planner.model, "config", None)
        limits = [getattr(config, name, None) for name in _POSITION_LIMITS]
        known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
        return min(known, default=_MOST) if what == "sequence" else _MOST

    def sample_of(self, what: str, size: int) -> Batch:
        """The sample with another batch or sequence."""
        if _takes(self.sample, what):
            return normalize_sample(self.sample(**{what: size}))
        return scaled(self.batch, what, size)


# ---- what a sample's sizes are -------------------------------------------------------------------


def _takes(sample: Any, what: str) -> bool:
    if not callable(sample) or isinstance(sample, Tensor):
        return False
    try:
        return what in inspect.signature(sample).parameters
    except (TypeError, ValueError):
        return False


def _tensors(batch: Batch) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def size_of(sample: Any, batch: Batch, what: str) -> int:
    """The batch or sequence of a sample.

    The batch is dimension 0, common to all tensors. The sequence is dimension 1, common to all integer
    tensors of two dimensions, or of more if there are none of two.

    Raises:
        ValueError: the tensors do not agree, or there are none.
    """
    if _takes(sample, what):
        default = inspect.signature(sample).parameters[what].default
        if isinstance(default, int) and not isinstance(default, bool):
            return default
    tensors = _tensors(batch)
    if what == "batch":
        sizes = {int(tensor.shape[0]) for tensor in tensors}
    else:
        integers = [tensor for tensor in tensors if tensor.dim() > 1 and _is_integer(tensor)]
        flat = [tensor for tensor in integers if tensor.dim() == 2]
        sizes = {int(tensor.shape[1]) for tensor in flat or integers}
    if len(sizes) != 1 or 0 in sizes:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "none"
        kind = "tensors" if what == "batch" else "integer tensors of two dimensions"
        raise ValueError(
            f"the {what} cannot be derived from the sample: its {kind} do not agree (shapes: {shapes}). Give "
            f"a callable sample_input with a parameter {what!r}"
        )
    return sizes.pop()


def scaled(batch: Batch, what: str, size: int) -> Batch:
    """The sample with another batch or sequence.

    Integers are repeated, so that they stay valid ids and masks; other tensors have a shape and no data.
    """
    present = size_of(None, batch, what)

    def other(tensor: Tensor) -> Tensor:
        dims = list(_dims_to_scale(tensor, what, present))
        if not dims:
            return tensor
        if not (_is_integer(tensor) and has_data(tensor)):
            shape = [size if dim in dims else length for dim, length in enumerate(tensor.shape)]
            return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
        tensor = tensor.cpu()
        for dim in dims:
            tensor = tensor.index_select(dim, torch.arange(size, device="cpu") % present)
        return tensor

    result: Batch = tree_map_only(Tensor, other, batch)
    return result


def _dims_to_scale(tensor: Tensor, what: str, present: int) -> Iterator[int]:
    if what == "batch":
        if tensor.dim() > 0:
            yield 0
        return
    for dim in range(1, tensor.dim()):
        # Dimension 1 of embeddings and ids; of a mask over pairs every dimension of that length.
        if tensor.shape[dim] == present and (dim == 1 or _is_integer(tensor)):
            yield dim
