# SPDX-License-Identifier: Apache-2.0
"""An optimizer's step, a parameter at a time, inside of backward.

    backward       a parameter's gradient is complete: the parameter is stepped, its gradient freed; `p.grad`
                   is what refuses every use (`spent`)
    step()         finds no gradients but those that stayed, and so only finishes: hooks of the step run,
                   schedulers count. `p.grad` is None
    between them   nothing, by the caller's promise

Steps of the core, which has our state, run beside backward on a thread of their own (`step_queue`), and are
done when backward ends.

What is stepped is what the optimizer would step, by the same code: with offloaded state
(`offload/attach`), with ours (`steps`), or its own class's step on that parameter alone (`alone`). The
bits are those of a step of all.

A record says which parameters have been stepped since `step()` was called last, and whether the backward has
come to its end. Whatever breaks the promise is refused by it, where possible before a weight changes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from memscale.optim import master_residuals, scaled_losses
from memscale.optim.alone import Alone, group_is_on_card, is_usual_on_card
from memscale.optim.offload.attach import (
    await_host_steps,
    held_for_step,
    is_offloaded,
    step_offloaded,
    steps_on_host,
)
from memscale.optim.patched_base import base_of, is_patched
from memscale.optim.spent import SpentGradient
from memscale.optim.step_queue import StepQueue
from memscale.optim.steps import CoreStep, Hand, step_group
from memscale.torchkit.graph_task import in_backward
from memscale.torchkit.leaves import tensors_of
from memscale.torchkit.weak_call import WeakCall

_SAYS: Final = "step_in_backward: "
_INSTEAD: Final = "; give Config(step_in_backward=False) for loops that do"
_MOST_NAMED: Final = 4


def step_one(optimizer: Any, group: dict[str, Any], parameter: Tensor, hand: Hand = CoreStep.run) -> None:
    """Steps one parameter of a group as a step of all of them would.

    Args:
        optimizer: whose state it uses and changes; not a wrapper.
        group: of the parameter, with the settings that count.
        parameter: has a gradient.
        hand: as in `steps.step_group`.

    Raises:
        Exception: whatever the optimizer's own step raises; OSError, where its state is offloaded.
    """
    left, one = [parameter], {**group, "params": [parameter]}
    offloaded = is_offloaded(optimizer)
    later = hand if offloaded and hand is not CoreStep.run and steps_on_host(optimizer) else None
    with (
        held_for_step(optimizer) if offloaded else nullcontext()
    ):  # who saves finds this parameter's state whole
        if offloaded:
            left = step_offloaded(optimizer, one, later)
        if left and is_patched(optimizer):
            master_residuals.prepare(optimizer, one)
            left = step_group(optimizer, one, CoreStep.run if offloaded else hand)
        for value in left:
            Alone(optimizer, base_of(optimizer), group).step_in(value, optimizer.state)


class BackwardStep:
    """Steps parameters of one optimizer as their gradients are reported complete.

    Args:
        optimizer: whose step it is; held weakly.
        names: of its parameters, for refusals: by id.
        window_bytes: of gradients whose steps by the core may run beside backward. None of them is larger.
        settle: is called before each step, and raises what is known by then to be wrong with gradients.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        window_bytes: int = 0,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._settle = settle
        self._names = names
        self.queue = StepQueue(window_bytes)
        weakref.finalize(self, self.queue.end).atexit = False
        self._lock = threading.RLock()  # gradients of several devices are complete in several threads
        self._is_held = False
        self._spent: dict[int, SpentGradient] = {}
        self._stepped: dict[Tensor, str] = {}  # since the optimizer's step, in their order
        self._running: set[int] = set()  # backwards that have begun, and have not come to their end
        self._ordered = len(optimizer.state)  # entries that lie as they should
        self._at = ""  # the parameter whose step was broken off
        self._groups: dict[int, dict[str, Any]] = {}

    # ---- called by hooks -------------------------------------------------------------------------

    def completed(self, parameter: Tensor) -> None:
        """A gradient is complete. Steps its parameter; sparse ones stay for the optimizer's own step.

        Raises:
            RuntimeError: the promise is broken.
            Exception: as `step_one`; RecomputeError, by `settle`.
        """
        optimizer, gradient = self._optimizer(), parameter.grad
        if optimizer is None or gradient is None or gradient.layout is not torch.strided:
            return
        with self._held():
            self._runs()
            self._settle()
            name, differentiable = self._names[id(parameter)], gradient.requires_grad
            on_host = gradient.is_cpu or steps_on_host(optimizer)
            hand = self.queue.put if on_host and self.queue.takes(gradient) else CoreStep.run
            del gradient
            if differentiable:
                raise RuntimeError(f"{_SAYS}the gradient of {name!r} is differentiable{_INSTEAD}")
            if parameter in self._stepped:  # somebody has taken the spent one away
                parameter.grad = self._spent_of(parameter)
                raise RuntimeError(
                    f"{_SAYS}a second backward has a gradient for {name!r}, which has been stepped "
                    f"already: call optimizer.step() after each backward{_INSTEAD}"
                )
            group = self._group_of(optimizer, parameter)
            if group is None:  # it is the optimizer's no more
                return
            _refuse_odd(optimizer, group, parameter, name)
            self._at = name
            with self._looked_after(), torch.no_grad():
                step_one(optimizer, group, parameter, hand)
            self._stepped[parameter], self._at = name, ""
            parameter.grad = self._spent_of(parameter)

    def about_to_run(self) -> None:
        """A forward whose output is to be differentiated is about to run.

        Raises:
            RuntimeError: weights have been stepped, and `optimizer.step()` was not called.
        """
        if in_backward():  # a checkpoint around the model recomputes it
            return
        with self._held():
            if self._running:
                self._refuse_broken(*self._taken())
            if self._stepped:
                raise RuntimeError(
                    f"{_SAYS}a forward runs, and optimizer.step() has not been called since the "
                    f"backward that has stepped {_some(self._stepped.values())}: gradients cannot add up "
                    f"over several backwards{_INSTEAD}"
                )

    def has_run(self, output: Any) -> None:
        """A forward has run: the backward through its output is to be known from its beginning."""
        nodes: set[Any] = {leaf.grad_fn for leaf in tensors_of(output)}
        for node in nodes - {None}:
            node.register_prehook(WeakCall(self.begins))

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The optimizer's own step begins: it finds no gradients of what has been stepped.

        Raises:
            RuntimeError: the promise has been broken. The record is empty then, and training may go on.
        """
        if detect_fake_mode() is not None:
            return
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            raise RuntimeError(f"{_SAYS}optimizer.step() has a closure{_INSTEAD}")
        with self._held():
            self._note_failed()  # waits: steps beside backward make state
            self._put_in_order()
            changed = [
                name for value, name in self._stepped.items() if not isinstance(value.grad, SpentGradient)
            ]
            self._refuse_broken(*self._taken())
            if changed:
                raise RuntimeError(
                    f"{_SAYS}gradients of {_some(changed)} were zeroed or replaced between backward "
                    f"and optimizer.step(), and their weights had been stepped already{_INSTEAD}"
                )

    def give_up(self) -> None:
        """Nothing is stepped in backward any more. Gradients that were used are gone: `p.grad` is None."""
        with self._held():
            self._taken()
            self._spent.clear()
        self.queue.end()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """The record is this thread's.

        Raises:
            RuntimeError: it is already: a signal's handler has come into the middle of a step.
        """
        with self._lock:
            if self._is_held:
                raise RuntimeError(
                    f"{_SAYS}a parameter is being stepped: a signal's handler must not do this now"
                )
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False

    # ---- the record ------------------------------------------------------------------------------

    def begins(self, gradients: tuple[Tensor, ...] = ()) -> None:
        """A backward has come to a graph of the model, and nothing of that has been done yet.

        Raises:
            RuntimeError: it runs on a scaled loss.
        """
        with self._held():
            self._runs()

    def _runs(self) -> None:
        """Notes the backward that runs."""
        if scaled_losses.is_scaled():
            raise RuntimeError(
                f"{_SAYS}the loss was scaled by a GradScaler, which looks at gradients and may skip a "
                f"step when weights have been stepped already{_INSTEAD}"
            )
        task = torch._C._current_graph_task_id()
        if task not in self._running:
            if not self._running and not self._stepped:
                self._groups = {}  # of the last step
            self._running.add(task)
            ended = WeakCall(self.ended, task)
            torch.autograd.Variable._execution_engine.queue_callback(ended)

    def ended(self, task: int) -> None:
        """A backward has come to its end. Weights are as they will be, when the last of several has.

        Raises:
            Exception: of a step that ran beside it.
        """
        with self._held():
            if self._running <= {task}:
                with self._looked_after():
                    self.queue.drain()
                    self._await_card()
            self._running.discard(task)

    @contextmanager
    def _looked_after(self) -> Iterator[None]:
        """Notes, where a step fails that ran beside backward, which it was."""
        try:
            yield
        except BaseException:
            self._note_failed()
            raise

    def _await_card(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            await_host_steps(optimizer)

    def _note_failed(self) -> None:
        failed = self.queue.failed()
        self._await_card()
        if failed is not None:
            self._at = self._names[id(failed)]

    def _taken(self) -> tuple[bool, str, dict[Tensor, str]]:
        """Empties the record; no `p.grad` is spent any more.

        Returns:
            Whether a backward had not come to its end, the parameter that it was at, and what was stepped.
        """
        self._note_failed()
        was = bool(self._running), self._at, self._stepped
        self._running, self._at, self._stepped = set(), "", {}
        for value in was[2]:
            if isinstance(value.grad, SpentGradient):
                value.grad = None
        return was

    def _refuse_broken(self, running: bool, at: str, stepped: Mapping[Tensor, str]) -> None:
        """Raises for a backward that did not come to its end, where it has changed anything."""
        if not running or not (stepped or at):
            return
        done = [name for name in stepped.values() if name != at]
        missing = [name for name in self._names.values() if name != at and name not in set(done)]
        parts = [
            f"a backward was broken off when it had stepped {len(done)} of {len(self._names)} parameters",
            f"stepped: {_some(done)}" if done else "",
            f"perhaps in part: {at!r}" if at else "",
            f"not: {_some(missing)}" if missing else "",
            "load a checkpoint, or go on with the weights as they are: this is said once",
        ]
        raise RuntimeError(f"{_SAYS}{'; '.join(filter(None, parts))}")

    # ---- parameters ------------------------------------------------------------------------------

    def _spent_of(self, parameter: Tensor) -> SpentGradient:
        found = self._spent.get(id(parameter))
        if found is None or not found.is_of(parameter):
            found = self._spent[id(parameter)] = SpentGradient(parameter, self._names[id(parameter)])
        return found

    def _group_of(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any] | None:
        """The group that has a parameter now: groups come and go, and so do parameters in them."""
        if not self._groups:
            groups = optimizer.param_groups
            self._groups = {id(value): group for group in groups for value in group["params"]}
        return self._groups.get(id(parameter))

    def _put_in_order(self) -> None:
        """State that was made in the order of backward, in that of the groups, in which a step makes it."""
        optimizer = self._optimizer()
        if optimizer is None or len(optimizer.state) == self._ordered:
            return
        found = dict(optimizer.state)
        first = [value for group in optimizer.param_groups for value in group["params"] if value in found]
        optimizer.state.clear()
        for value in (*first, *found):
            optimizer.state[value] = found[value]
        self._ordered = len(found)


def works_in_lists(group: Mapping[str, Any]) -> bool:
    """Whether a step of PyTorch takes all of a group at once, by kernels that it has for lists alone."""
    return not group.get("fused") and group.get("foreach") is not False and group_is_on_card(dict(group))


def _refuse_odd(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor, name: str
) -> None:
    """On a card one odd tensor in a list changes the kernel of all, and the others have been stepped.

    Raises:
        RuntimeError: this one is odd.
    """
    if works_in_lists(group) and not is_usual_on_card(parameter, optimizer.state.get(parameter, {})):
        raise RuntimeError(
            f"{_SAYS}gradient or state of {name!r} is in another order or type than its weight, which "
            "changes the bits of the whole list: give the optimizer foreach=False, or step_in_backward=False"
        )


def _some(names: Any) -> str:
    """A few names, and how many more there are."""
    every = list(names)
    text = ", ".join(map(repr, every[:_MOST_NAMED]))
    return text if len(every) <= _MOST_NAMED else f"{text} and {len(every) - _MOST_NAMED} more"
