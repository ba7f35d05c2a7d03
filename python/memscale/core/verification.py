# SPDX-License-Identifier: Apache-2.0
"""The proof on the user's own model: one step without the plan, one with it, every bit compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memscale.core import model_state
from memscale.core.loss import loss_of
from memscale.core.trace_empirical import buffer_contents, copied_batch
from memscale.core.tracer import StepFacts, training_flags
from memscale.errors import VerificationError

if TYPE_CHECKING:
    from memscale.core.executor import Executor


@dataclass(frozen=True)
class Difference:
    """One compared tensor.

    Attributes:
        kind: "loss", "gradient" or "buffer".
        name: of the parameter or buffer; "" for the loss.
        equal: bit for bit.
        largest: largest absolute difference, 0.0 when equal; infinite when only one of the two exists.
    """

    kind: str
    name: str
    equal: bool
    largest: float


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of `memscale.verify`.

    Attributes:
        rows: the loss, every gradient, every buffer, in model order.
        checkpointed: number of modules that the compared plan checkpoints.
    """

    rows: tuple[Difference, ...]
    checkpointed: int

    @property
    def equal(self) -> bool:
        """Everything equal, bit for bit."""
        return all(row.equal for row in self.rows)

    @property
    def first_difference(self) -> Difference | None:
        """The first row that differs, in model order."""
        return next((row for row in self.rows if not row.equal), None)

    def summary(self) -> str:
        """One line."""
        counts = {kind: sum(row.kind == kind for row in self.rows) for kind in ("gradient", "buffer")}
        what = f"loss, {counts['gradient']} gradients and {counts['buffer']} buffers"
        first = self.first_difference
        if first is None:
            return f"verified: {what} bit-equal with {self.checkpointed} modules checkpointed"
        return f"NOT EQUAL: {first.kind} {first.name!r} differs by up to {first.largest:g} (of {what})"

    def table(self) -> str:
        """Rows that differ, or the summary when none does."""
        from memscale.observability.logs import table

        wrong = [(row.kind, row.name, f"{row.largest:g}") for row in self.rows if not row.equal]
        return (
            self.summary() if not wrong else f"{self.summary()}\n{table(wrong, ('kind', 'name', 'largest'))}"
        )

    def require(self) -> None:
        """Raises VerificationError unless everything is equal."""
        if not self.equal:
            raise VerificationError(self.summary())


Step = dict[tuple[str, str], Tensor]


def compare(
    executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any], facts: StepFacts
) -> VerifyReport:
    """Runs the step twice from the same state, bare and as planned, and compares.

    The model, its gradients, its buffers and all random generators are left as they were.

    Args:
        executor: has a plan in force.
        args: positional part of one training batch.
        kwargs: keyword part.
        facts: how to run the model, and in which mode.
    """
    with executor.bare():
        plain = _step(executor, args, kwargs, facts)
    idle, executor.idle = executor.idle, True
    try:
        planned = _step(executor, args, kwargs, facts)
    finally:
        executor.idle = idle
    names = list(plain) + [key for key in planned if key not in plain]
    rows = tuple(_difference(key, plain.get(key), planned.get(key)) for key in names)
    checkpointed = len(executor.plan.active) if executor.plan is not None else 0
    return VerifyReport(rows, checkpointed)


def _step(executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any], facts: StepFacts) -> Step:
    model = executor.model
    result: Step = {}
    with (
        model_state.preserved(model, contents=True),
        buffer_contents(model),
        training_flags(model, facts.training),
        torch.enable_grad(),
    ):
        trainable = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        args, kwargs = copied_batch(args, kwargs)
        loss = loss_of(facts.run(model, args, kwargs))
        if loss is not None and trainable:
            result["loss", ""] = loss.detach().clone()
            gradients = torch.autograd.grad(loss, [value for _, value in trainable], allow_unused=True)
            for (name, _), gradient in zip(trainable, gradients, strict=True):
                if gradient is not None:
                    result["gradient", name] = gradient.detach()
        for name, buffer in model.named_buffers():
            result["buffer", name] = buffer.detach().clone()
    return result


def _difference(key: tuple[str, str], plain: Tensor | None, planned: Tensor | None) -> Difference:
    kind, name = key
    if plain is None or planned is None:
        return Difference(kind, name, False, float("inf"))
    if _same_bits(plain, planned):
        return Difference(kind, name, True, 0.0)
    if plain.shape != planned.shape:
        return Difference(kind, name, False, float("inf"))
    return Difference(kind, name, False, float((plain.double() - planned.double()).abs().max()))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal values, with NaN equal to NaN: a diverged model is not the plan's fault."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
