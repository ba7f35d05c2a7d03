# SPDX-License-Identifier: Apache-2.0
"""Which forwards of a model can begin anew, and which get a boundary before their outputs.

    each plan      what the model is and does (`conditions.why_not`)
    first backward what the loop does with outputs: it is watched, and nothing is behind a boundary yet
    each forward   its arguments, and the modes that it runs under

What is refused runs as it is, and gets the report when memory runs out. The log says why, once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memscale import log
from memscale.survival.arguments import Arguments
from memscale.survival.conditions import why_not
from memscale.techniques.checkpoint.saving_hooks import runs_under_saving_hooks
from memscale.torchkit import cached_casts
from memscale.torchkit.graph_task import in_backward

if TYPE_CHECKING:
    from memscale.survival.facts import Facts
    from memscale.survival.outer_graph import Window
    from memscale.trace.step import Trace


class Eligibility:
    """Of one wrapped model.

    Args:
        facts: tells what is in force.

    Attributes:
        observed: forwards that are to show what the loop does with them.
    """

    def __init__(self, facts: Callable[[], Facts]) -> None:
        self._facts = facts
        self.observed: list[Window] = []
        self._known: list[weakref.ref[Trace]] = []
        self._judged: Trace | None = None
        self._of_plan = ""  # why steps under the plan of `_judged` cannot be repeated
        self._has_looked, self._of_loop = False, ""  # at a backward, and why there is no boundary
        self._of_forward = ""  # why the latest had none
        self._cast: Tensor | None = None  # a weight that autocast casts
        self._said: set[str] = set()

    @property
    def reason(self) -> str:
        """Why steps cannot be repeated, as far as is known; "": they can."""
        return self._of_plan or self._of_loop or self._of_forward

    @property
    def cuts(self) -> bool:
        """Whether forwards get a boundary."""
        return self._has_looked and not self._of_loop

    def arguments(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Those of a forward that can begin anew; None: this one runs as it is."""
        if self._why_not(model) or in_backward():
            return None
        if runs_under_saving_hooks():
            self.say("it runs under hooks on saved tensors (a checkpoint around it, save_on_cpu)")
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        if not all(map(_is_real, model.parameters())):
            return None
        arguments = Arguments(args, kwargs)
        if any(isinstance(leaf, FakeTensor) for leaf in arguments.leaves):
            return None
        reason = arguments.refusal
        if self._cast is not None and cached_casts.is_open() and cached_casts.has_any([self._cast]):
            reason = self._of_loop = "two forwards in one block of autocast share the casts of weights"
        self.say(reason)
        return None if reason else arguments

    def note(self, model: nn.Module, window: Window) -> None:
        """A forward has run without a boundary that could have one.

        Args:
            model: the model.
            window: its nodes.
        """
        if not self._has_looked:
            self.observed.append(window)
        if self._cast is None and cached_casts.is_open():
            self._cast = cached_casts.first(model.parameters())

    def note_refused(self, reason: str) -> None:
        """A forward has run; why its backward cannot be repeated.

        A first forward may do what no other does: register hooks, say. The log has it from the second on.
        """
        if reason and self._of_forward:
            self.say(self._of_forward)
            self.say(reason)
        self._of_forward = reason

    def has_seen(self, windows: Sequence[Window], reason: str) -> None:
        """A backward has come to observed forwards.

        While later ones wait for theirs there is no boundary yet: one backward may go through both kinds.

        Args:
            windows: these forwards.
            reason: why it could not be repeated; "": it could.
        """
        latest = max(window.end for window in windows)
        self.observed = [window for window in self.observed if window.begin >= latest]
        self._has_looked, self._of_loop = not self.observed, reason
        self.say(reason)

    def why_not_now(self, model: nn.Module) -> str:
        """After a failure: whether what was found when the plan was made still holds."""
        facts = self._facts()
        return "there is no plan" if facts.trace is None else self._found(model, facts)

    def _why_not(self, model: nn.Module) -> str:
        """Why the step cannot be repeated; found once for each plan, said once."""
        facts = self._facts()
        if facts.trace is None:
            return "there is no plan"
        if facts.trace is not self._judged:
            self._judged = facts.trace
            if self._is_new(facts.trace) and self._of_loop:
                self.observed, self._has_looked, self._of_loop = [], False, ""
            self._of_plan = self._found(model, facts)
            self.say(self._of_plan)
        return self._of_plan

    def _found(self, model: nn.Module, facts: Facts) -> str:
        assert facts.trace is not None
        foreign = [ref() for ref in facts.trace.foreign_reads.get("", ())]
        reads = [tensor for tensor in foreign if isinstance(tensor, Tensor)]
        return why_not(model, facts.trace, facts.path, reads, facts.is_whole_step)

    def _is_new(self, trace: Trace) -> bool:
        """Whether this is the first forward under a plan; plans may take turns."""
        known = [ref for ref in self._known if ref() is not None]
        is_new = all(ref() is not trace for ref in known)
        self._known = [*known, weakref.ref(trace)] if is_new else known
        return is_new

    def say(self, reason: str) -> None:
        """Has the log say why a step cannot be repeated, if there is a reason that it has not said."""
        if reason and reason not in self._said:
            self._said.add(reason)
            log.LOGGER.warning("on_oom='survive': a step cannot be repeated exactly: %s", reason)


def _is_real(weight: Tensor) -> bool:
    """Whether this is a weight of the program's, and none that a function call has put in its place."""
    return weight.is_leaf and not isinstance(weight, FakeTensor)
