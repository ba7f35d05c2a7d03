# SPDX-License-Identifier: Apache-2.0
"""Verifies a plan on the user's model: one step without it, one with it, every bit compared.

    plain step      no technique but what sets the precision (autocast), so that every bit counts
    planned step    as it will be trained
    float64         only where the plan has a technique that rounds differently: the planned step may then err
                    by 1.5 times what the plain step errs, over all gradients and in each of them

All of them start from the same state, and the model is left in it. With DistributedDataParallel each is a
step of this process alone. Where parameters are sharded (FSDP2) gradients are reduced over all processes, and
all of them have to verify.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memscale.core.double_run import BOUND, Errors, double_batch, errors_of, errors_of_each, in_double
from memscale.errors import VerificationError
from memscale.state import model_state
from memscale.state.model_state import training_flags
from memscale.techniques.checkpoint import global_hooks
from memscale.techniques.step_facts import StepFacts
from memscale.torchkit import sharding
from memscale.torchkit.earlier_graphs import check_apart, nodes_of
from memscale.torchkit.scripted import uncounted_scripts
from memscale.trace.ddp import silent
from memscale.trace.empirical import buffer_contents, copied_batch
from memscale.trace.loss import loss_of

if TYPE_CHECKING:
    from memscale.core.wrapped import Wrapped

PRECISION = ("autocast", "bf16_weights")
"""Step techniques that choose the precision. The plain step has them too."""

_LOOSE_ROUNDINGS = 32
"""What plain and planned step may differ by, where there is no float64 to measure both against."""

_MOST_NAMED = 12
"""Tensors that a table names."""

_NO_GRADIENT = "; no parameter got a gradient, so none was compared"

_PLURALS = {"loss": "loss", "gradient": "gradients", "buffer": "buffers", "generator": "generators"}

Step = dict[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Difference:
    """One compared tensor.

    Attributes:
        kind: "loss", "gradient", "buffer" or "generator" (of random numbers, after the step).
        name: of the parameter, buffer or device; "" for the loss.
        equal: bit for bit.
        largest: largest absolute difference, 0.0 when equal; infinite when only one of the two exists.
        relative: the norm of the difference over that of the plain tensor, 0.0 when equal.
    """

    kind: str
    name: str
    equal: bool
    largest: float
    relative: float = 0.0


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """Outcome of `memscale.verify`.

    Attributes:
        rows: the loss, every gradient, every buffer, in model order, and the random generators.
        checkpointed: number of modules that the compared plan checkpoints.
        techniques: names of the plan's step techniques.
        inexact: those among them that round differently.
        baseline: what the planned step was compared with.
        errors: where the plan rounds differently: losses and gradients against float64.
        each: the same of every gradient.
        no_float64: why it could not be computed in float64, "" where it could or need not be.
    """

    rows: tuple[Difference, ...]
    checkpointed: int
    techniques: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    baseline: str = "plain PyTorch"
    errors: tuple[Errors, ...] = ()
    each: tuple[Errors, ...] = ()
    no_float64: str = ""

    def __repr__(self) -> str:
        return f"<VerifyReport: {self.summary()}; `table()` tells more>"

    @property
    def equal(self) -> bool:
        """Everything equal, bit for bit."""
        return all(row.equal for row in self.rows)

    @property
    def passed(self) -> bool:
        """The plan does what it promises: every bit, or with techniques that round differently, the bound."""
        if self.equal:
            return True
        exact_rows = all(row.equal for row in self.rows if row.kind not in _ROUNDED)
        return bool(self.errors) and exact_rows and all(item.within for item in (*self.errors, *self.each))

    @property
    def first_difference(self) -> Difference | None:
        """The first row that differs, in model order."""
        return next((row for row in self.rows if not row.equal), None)

    def summary(self) -> str:
        """One line."""
        counts = {kind: sum(row.kind == kind for row in self.rows) for kind in ("gradient", "buffer")}
        loss = "loss, " if any(row.kind == "loss" for row in self.rows) else ""
        what = f"{loss}{counts['gradient']} gradients and {counts['buffer']} buffers"
        return self._verdict(what) + ("" if counts["gradient"] else _NO_GRADIENT)

    def _verdict(self, what: str) -> str:
        """The summary, but for what was not there to be compared."""
        done = ", ".join(filter(None, (f"{self.checkpointed} modules checkpointed", *self.techniques)))
        first = self.first_difference
        if first is None:
            beside = "" if self.baseline == "plain PyTorch" else f" to {self.baseline}"
            return f"verified: {what} bit-equal{beside} with {done}"
        if self.passed:
            return f"verified: {what} within {self._bound()} with {done}"
        if self.errors:
            wrong = [item for item in self.errors if not item.within] or self._wrong
            if wrong:
                worst = max(wrong, key=lambda item: item.excess)
                who = f"gradient {worst.name!r} errs" if worst.name else f"{_PLURALS[worst.kind]} err"
                error = f"{worst.planned:.1e}, allowed {worst.bound:.1e}"
                return f"NOT WITHIN BOUNDS: {who} by {error} (of {what}; {self._bound()})"
        return f"NOT EQUAL: {first.kind} {first.name!r} differs by up to {first.largest:g} (of {what})"

    def _bound(self) -> str:
        if self.no_float64:
            return f"{_LOOSE_ROUNDINGS} roundings of {self.baseline}"
        return f"{BOUND:g} × the error of {self.baseline} against float64"

    def table(self) -> str:
        """The summary, a row per kind with those that differ first, and which tensors differ."""
        from memscale.log import table

        kinds = sorted(_by_kind(self.rows), key=lambda kind: all(row.equal for row in kind))
        headers = ("what", "compared", "equal", "largest difference", "relative", "where")
        parts = [self.summary(), table([_kind_row(kind) for kind in kinds], headers)]
        if self.errors:
            parts.append(self._error_table())
        wrong = [row for row in self.rows if not row.equal and row.name]
        if wrong and not self.passed:
            named = [
                (row.kind, row.name, f"{row.largest:g}", f"{row.relative:.1e}") for row in wrong[:_MOST_NAMED]
            ]
            parts.append(table(named, ("kind", "name", "largest", "relative")))
            if len(wrong) > _MOST_NAMED:
                parts.append(f"and {len(wrong) - _MOST_NAMED} more")
        return "\n\n".join(parts)

    def _error_table(self) -> str:
        from memscale.log import table

        what = f"{' and '.join(self.inexact)} {'rounds' if len(self.inexact) == 1 else 'round'} differently"
        if self.no_float64:
            head = f"{what}. The step cannot be computed in float64: {self.no_float64}"
            headers: tuple[str, ...] = ("relative to plain", "difference", "allowed", "")
        else:
            head = f"{what}, so both steps are measured against float64"
            headers = ("relative error of", "plain", "planned", "allowed", "")
        rows = []
        for item in (*self.errors, *self._worst):
            own = () if self.no_float64 else (f"{item.plain:.1e}",)
            verdict = "within" if item.within else "TOO LARGE"
            what = item.name or _PLURALS[item.kind]
            rows.append((what, *own, f"{item.planned:.1e}", f"{item.bound:.1e}", verdict))
        return f"{head}\n{table(rows, headers)}"

    @property
    def _worst(self) -> list[Errors]:
        """The gradients that are furthest beyond their bound, or the one that is closest to it."""
        ranked = sorted(self.each, key=lambda item: item.planned / (item.bound or 1.0), reverse=True)
        return sorted(self._wrong, key=lambda item: item.excess, reverse=True)[:_MOST_NAMED] or ranked[:1]

    @property
    def _wrong(self) -> list[Errors]:
        return [item for item in self.each if not item.within]

    def require(self) -> None:
        """Raises VerificationError unless the plan does what it promises."""
        if not self.passed:
            raise VerificationError(self.summary())


_ROUNDED = ("loss", "gradient")
"""Kinds that a technique may round differently."""


def _by_kind(rows: tuple[Difference, ...]) -> list[list[Difference]]:
    kinds: dict[str, list[Difference]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    return list(kinds.values())


def _kind_row(rows: list[Difference]) -> tuple[object, ...]:
    equal = sum(row.equal for row in rows)
    worst = max(rows, key=lambda row: (not row.equal, row.largest))
    if worst.equal:
        return _PLURALS[worst.kind], len(rows), equal, "0", "0", ""
    largest = max(row.relative for row in rows)
    return _PLURALS[worst.kind], len(rows), equal, f"{worst.largest:g}", f"{largest:.1e}", worst.name


@uncounted_scripts()
def compare(
    executor: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any], facts: StepFacts
) -> VerifyReport:
    """Runs the step twice from the same state, bare and as planned, and compares.

    The model, its gradients, its buffers and all random generators are left as they were.

    Args:
        executor: has a plan in force.
        args: positional part of one training batch.
        kwargs: keyword part.
        facts: how to run the model, and in which mode.

    Raises:
        VerificationError: parameters are sharded, and their gradients cannot be computed twice now.
    """
    reason = sharding.why_no_backward(executor.model, inside=facts.forward is not None)
    if reason:
        raise VerificationError(f"this cannot be verified: {reason}")
    steps = () if executor.plan is None else executor.plan.steps
    names = tuple(step.technique for step in steps)
    inexact = tuple(step.technique for step in steps if not step.exact)
    with executor.bare(keep=PRECISION):
        plain = one_step(executor, args, kwargs, facts)
    idle, executor.idle = executor.idle, True
    try:
        planned = one_step(executor, args, kwargs, facts)
    finally:
        executor.idle = idle
    keys = list(plain) + [key for key in planned if key not in plain]
    rows = tuple(_difference(key, plain.get(key), planned.get(key)) for key in keys)
    errors: tuple[Errors, ...] = ()
    each: tuple[Errors, ...] = ()
    no_float64 = ""
    if inexact and not all(row.equal for row in rows) and plain.keys() == planned.keys():
        truth, no_float64 = _truth(executor, args, kwargs, facts, plain)
        errors = _errors(truth, plain, planned, bool(set(names) & set(PRECISION)))
        each = _errors_of_gradients(truth, plain, planned, errors)
    return VerifyReport(
        rows,
        checkpointed=len(executor.plan.active) if executor.plan is not None else 0,
        techniques=names,
        inexact=inexact,
        baseline=_baseline(executor, names),
        errors=errors,
        each=each,
        no_float64=no_float64,
    )


def _baseline(executor: Wrapped, names: tuple[str, ...]) -> str:
    """What the plain step is, in words: its precision is that of the planned one."""
    if "bf16_weights" in names:
        return "plain PyTorch with the same BF16 weights under autocast"
    kind = next((value.device.type for value in executor.model.parameters()), "cpu")
    if torch.is_autocast_enabled(kind):
        return f"plain PyTorch under {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')} autocast"
    return "plain PyTorch under the same autocast" if set(names) & set(PRECISION) else "plain PyTorch"


def _truth(
    executor: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any], facts: StepFacts, plain: Step
) -> tuple[Step | None, str]:
    """The step in float64; None, and why, where that cannot be or is another step."""
    model = executor.model
    if sharding.has_units(model):
        return None, "its parameters are sharded"
    try:
        with executor.bare(), in_double(model):
            wide_args, wide_kwargs = double_batch((args, kwargs))
            truth = one_step(executor, wide_args, wide_kwargs, facts)
    except Exception as error:  # a kernel without float64, not enough memory: nothing that concerns the plan
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    if truth.keys() != plain.keys():
        return None, "the float64 step computes other gradients"
    if any(item.is_other_step for item in _errors(truth, plain, plain, False)):
        return None, "the float64 step is another one: it draws other random numbers, or takes another way"
    return truth, ""


def _errors(truth: Step | None, plain: Step, planned: Step, lowered: bool) -> tuple[Errors, ...]:
    """Errors of losses and of gradients; without the truth, differences from the plain step."""
    made = []
    for kind in _ROUNDED:
        mine, theirs = _of_kind(plain, kind), _of_kind(planned, kind)
        if not mine:
            continue
        if truth is not None:
            made.append(errors_of(kind, _of_kind(truth, kind), mine, theirs))
            continue
        item = errors_of(kind, {key: value.double() for key, value in mine.items()}, mine, theirs)
        low = lowered or torch.is_autocast_enabled(next(iter(mine.values())).device.type)
        unit = max(item.unit, torch.finfo(torch.bfloat16).eps if low else 0.0)
        made.append(replace(item, unit=_LOOSE_ROUNDINGS * unit / BOUND))
    return tuple(made)


def _errors_of_gradients(
    truth: Step | None, plain: Step, planned: Step, errors: tuple[Errors, ...]
) -> tuple[Errors, ...]:
    whole = next((item for item in errors if item.kind == "gradient"), None)
    if whole is None:
        return ()
    right = None if truth is None else _of_kind(truth, "gradient")
    return errors_of_each(right, _of_kind(plain, "gradient"), _of_kind(planned, "gradient"), whole)


def _of_kind(step: Mapping[tuple[str, str], Tensor], kind: str) -> Step:
    return {key: value for key, value in step.items() if key[0] == kind}


def one_step(executor: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any], facts: StepFacts) -> Step:
    """Forward and backward of one batch with what is attached now."""
    model = executor.model
    if facts.forward is not None and facts.watch is not None:
        # Techniques of the model itself lie beneath the watch, so what it calls has changed.
        facts = replace(facts, forward=facts.watch.original)
    result: Step = {}
    with ExitStack() as stack:
        stack.enter_context(global_hooks.silenced())
        stack.enter_context(model_state.preserved(model, contents=True, batch=(args, kwargs)))
        stack.enter_context(silent(model))
        stack.enter_context(buffer_contents(model))
        stack.enter_context(training_flags(model, facts.training))
        stack.enter_context(torch.enable_grad())
        trainable = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        args, kwargs = copied_batch(args, kwargs)
        earlier = nodes_of((args, kwargs))
        loss = loss_of(facts.run(model, args, kwargs))
        if loss is not None and trainable:
            result["loss", ""] = loss.detach().clone()
            check_apart(loss, earlier, [value for _, value in trainable])
            gradients = _gradients(model, loss, [value for _, value in trainable])
            for (name, _), gradient in zip(trainable, gradients, strict=True):
                if gradient is not None:
                    result["gradient", name] = gradient.detach()
        for name, buffer in model.named_buffers():
            result["buffer", name] = buffer.detach().clone()
        result["generator", "cpu"] = torch.get_rng_state()
        for device in {value.device for _, value in trainable if value.is_cuda}:
            result["generator", str(device)] = torch.cuda.get_rng_state(device)
    return result


def _gradients(model: nn.Module, loss: Tensor, parameters: list[nn.Parameter]) -> Sequence[Tensor | None]:
    """Gradients of a loss. `.grad` is put back by the caller."""
    if not sharding.has_units(model):
        return torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter in parameters:
        parameter.grad = None
    loss.backward()
    return [None if value.grad is None else sharding.local(value.grad) for value in parameters]


def _difference(key: tuple[str, str], plain: Tensor | None, planned: Tensor | None) -> Difference:
    kind, name = key
    if plain is None or planned is None or plain.shape != planned.shape:
        return Difference(kind, name, False, float("inf"), float("inf"))
    if _same_bits(plain, planned):
        return Difference(kind, name, True, 0.0)
    if plain.layout is not torch.strided:
        plain, planned = plain.to_dense(), planned.to_dense()
    wide = torch.complex128 if plain.is_complex() else torch.float64
    a, b = plain.to(wide), planned.to(wide)
    largest = float((a - b).abs().max())
    norm = float(torch.linalg.vector_norm(a)) or 1.0
    relative = float(torch.linalg.vector_norm(a - b)) / norm
    return Difference(kind, name, False, largest, relative if not math.isnan(relative) else float("inf"))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal values, with NaN equal to NaN: a diverged model is not the plan's fault."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
