# SPDX-License-Identifier: Apache-2.0
"""The exceptions of MemScale. All derive from `MemScaleError`.

Running out of device memory is not among them: that stays `torch.OutOfMemoryError`, so that code which
already catches it goes on working.
"""

from __future__ import annotations

from collections.abc import Sequence

from memscale.units import format_bytes

__all__ = [
    "AttachError",
    "BudgetError",
    "ConfigError",
    "EmptyCacheError",
    "MemScaleError",
    "PolicyFallbackNeeded",
    "ProfileError",
    "RecomputeError",
    "VerificationError",
]


class MemScaleError(Exception):
    """Base of every exception that MemScale raises on its own account.

    Raised directly when the core reports a failure that has no narrower class. Catch it to go on without
    MemScale: whatever was attached has been taken off again by the time it reaches the caller.
    """


class ConfigError(MemScaleError, ValueError):
    """A `Config` field is unknown, of the wrong type, out of range, or contradicts another field.

    Raised when a `Config` or `AsyncOffloadConfig` is created or read from JSON or YAML. The message names the
    field, the value and what is allowed: correct that field. It is also a `ValueError`.

    Attributes:
        field: Name of the offending field, or None when the text as a whole could not be read.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class BudgetError(MemScaleError):
    """No plan fits the budget, and `Config(strict_budget=True)` asked for an error in that case.

    Raised before anything is attached: the model is as it was. Raise the budget to at least
    `smallest_peak_bytes`, follow one of the lines of `advice`, or leave `strict_budget` off to train with the
    smallest plan there is.

    Attributes:
        budget_bytes: What the peak was not to exceed.
        smallest_peak_bytes: The lowest peak that any plan reaches.
        advice: What would make it fit, best first.
    """

    def __init__(self, budget_bytes: int, smallest_peak_bytes: int, advice: Sequence[str] = ()) -> None:
        self.budget_bytes = int(budget_bytes)
        self.smallest_peak_bytes = int(smallest_peak_bytes)
        self.advice: list[str] = list(advice)
        super().__init__(self._message())

    def _message(self) -> str:
        missing_bytes = self.smallest_peak_bytes - self.budget_bytes
        text = (
            f"no plan fits the budget of {format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes): "
            f"the smallest peak is {format_bytes(self.smallest_peak_bytes)} "
            f"({self.smallest_peak_bytes} bytes), {format_bytes(missing_bytes)} too much"
        )
        if not self.advice:
            return f"{text}. Raise memory_budget to at least the smallest peak"
        return "\n".join([f"{text}. What would help:", *(f"  - {line}" for line in self.advice)])

    def __reduce__(self) -> tuple[type[BudgetError], tuple[int, int, list[str]]]:
        # The default would call the class with the message alone; a worker process must be able to send this.
        return type(self), (self.budget_bytes, self.smallest_peak_bytes, self.advice)


class ProfileError(MemScaleError):
    """The training step could not be traced or recorded, so there is nothing to plan from.

    Raised when the static trace failed and the empirical fallback is switched off, has failed too, or has no
    batch to run. Give `sample_input`, or leave `use_empirical_fallback` on so that the first real batches are
    recorded instead.
    """


class AttachError(MemScaleError):
    """A technique of the plan could not be attached to the model.

    Raised by `wrap` and `optimize` after every technique attached so far has been undone: the model is as it
    was. The message names the module and the technique; switch that technique off in the `Config`, or take
    off whatever already changed the module's `forward`.
    """


class EmptyCacheError(MemScaleError):
    """A key/value cache was read that keeps nothing.

    While modules of a model are checkpointed, caches that its training forwards make for themselves keep
    nothing. Raised where one is read after it was filled, or passed to another forward. Call the model with
    `use_cache=True`, or with a cache of your own: those keep what they are given, and modules that fill them
    are not checkpointed.
    """


class PolicyFallbackNeeded(MemScaleError):  # noqa: N818 - the name is part of the contract
    """The learned policy cannot decide, and the rules must.

    Raised by nothing in this version: it is reserved for the policy.
    """


class RecomputeError(MemScaleError, RuntimeError):
    """A recomputed module did not do the same as in its forward, or cannot.

    Raised in backward instead of a wrong gradient. The module depends on something that MemScale cannot put
    back (a file, a clock, a foreign library's random numbers, a tensor that was changed in place since): make
    its forward repeatable, or leave it out as the message says. Gradients of this step are incomplete: drop
    them (`zero_grad`) before another one. It is also a `RuntimeError`, as autograd's own errors are.

    Attributes:
        module: path of the module, or "net.0 to net.3" for children of a chain that are recomputed as one;
            None where it is not known.
        tensor: what differed, such as "saved tensor 3"; None where that is no single tensor.
        cause: the likely cause; None where nothing is known of it.
    """

    def __init__(
        self, what: str, module: str | None = None, tensor: str | None = None, cause: str | None = None
    ) -> None:
        self.what = what
        self.module = module
        self.tensor = tensor
        self.cause = cause
        super().__init__(self._message())

    def _message(self) -> str:
        text = self.what if self.cause is None else f"{self.what}. Likely cause: {self.cause}"
        if self.module is None:
            return text
        return f"{text}. To train without recomputing it: {exclude_text(modules_of_run(self.module))}"

    def __reduce__(self) -> tuple[type[RecomputeError], tuple[str, str | None, str | None, str | None]]:
        # The default would call the class with the whole message; a worker process must be able to send this.
        return type(self), (self.what, self.module, self.tensor, self.cause)


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to another's error. Before Python 3.11 it comes behind the message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def exclude_text(paths: Sequence[str]) -> str:
    """What a user writes to leave modules out."""
    listed = ", ".join(f'"{path}"' for path in paths)
    return f"Config(exclude=({listed}{',' if len(paths) == 1 else ''}))"


def modules_of_run(module: str) -> tuple[str, ...]:
    """The paths in `RecomputeError.module`; of children that have no numbers, the chain around them."""
    first, is_run, last = module.partition(" to ")
    if not is_run:
        return (module,)
    chain, _, start = first.rpartition(".")
    end = last.rpartition(".")[2]
    if not (start.isdecimal() and end.isdecimal()):
        return (chain,)
    head = f"{chain}." if chain else ""
    return tuple(f"{head}{number}" for number in range(int(start), int(end) + 1))


class VerificationError(MemScaleError):
    """The plan changes a result of the model that it is attached to.

    Raised by `Config(verify_correctness=True)` before training, and by `VerifyReport.require`. The message
    names the first tensor that differs. Please report it together with the model: it is a bug.
    """
