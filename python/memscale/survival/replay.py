# SPDX-License-Identifier: Apache-2.0
"""A forward of the whole model that can be repeated until its backward is over.

What the model computes is a graph of its own, which only a `Replay` holds. What the loop gets are the same
values behind one node, the boundary:

    loss ─► … ─► boundary ┆ ─► the model's graph ─► weights
                          ┆ cut: when memory runs out, all to the right of it can go

    backward      outer graph first; boundaries take the gradients of the outputs. Then one more run of the
                  engine goes through the graphs of all forwards that the outer one has led to, from these
    no memory     these graphs go, a tighter plan comes, the forwards are repeated in the worlds that they
                  had (`State.restored`) and backward starts again from the same gradients
    gradients     of weights that had theirs already are kept: their second ones are dropped as they come

Autograd runs nodes in the reverse order in which they were made, and all of the loop's that lead to a
forward were made after it. So weights get the same sums in the same order as in one graph, and every bit is
that of an undisturbed step. What that does not hold for gets no boundary: see `Replay._parted` and
`OuterGraph.why_not`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from memscale.errors import RecomputeError
from memscale.state.attribute_tables import AttributeTables
from memscale.survival.arguments import Arguments
from memscale.survival.oom_errors import who_ran_out
from memscale.survival.outer_graph import Window, leads_beside, next_number
from memscale.survival.outputs import (
    CannotCutError,
    Path,
    check_holders,
    check_own_memory,
    exchanged,
    graph_outputs,
)
from memscale.survival.world import rewind, why_no_repeat
from memscale.techniques.checkpoint import card_check
from memscale.techniques.checkpoint.checkpoint_state import State, all_below
from memscale.techniques.checkpoint.recompute_check import Fingerprint, fingerprint
from memscale.techniques.checkpoint.written_tensors import WrittenTensors
from memscale.torchkit import python_generators
from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.leaves import gradient_of, has_gradient_hooks
from memscale.torchkit.torch_settings import has_modes, without_modes

if TYPE_CHECKING:
    from memscale.techniques.checkpoint.checkpoint_state import Body

_EARLIER = "it reads, or may read, a tensor with a graph, or one to be trained, that is no parameter"

_NESTED = "a backward runs within its backward, and may have added to gradients more than once"
_HOOKED = "a weight has a hook on its gradient, which would fire twice"

Cut = tuple["Replay", tuple[Tensor | None, ...]]
"""A forward that a backward has come to, and the gradients of its outputs."""


class Replay:
    """One forward, from its start until its backward is over.

    Args:
        body: what is known of the forward.
        model: whose forward it is.
        run: the forward, with whatever is attached.
        arguments: its arguments.
        again: is called when memory has run out in backward, outside of the error's handler, with the error
            and the reason why the step cannot be repeated, if there is one; makes room, or raises.
        come_to: is given this forward, the gradients of its outputs and whether its graph is to be kept, when
            a backward comes to its boundary.

    Attributes:
        reason: after `first`: why its backward cannot be repeated; "": it can.
        window: after `first`: the forward's nodes.
        weights: that the model trains.
    """

    def __init__(
        self,
        body: Body,
        model: nn.Module,
        run: Callable[..., Any],
        arguments: Arguments,
        again: Callable[[Exception, str], None],
        come_to: Callable[[Replay, tuple[Tensor | None, ...], bool], None],
    ) -> None:
        self._run, self._arguments = run, arguments
        self.again, self.come_to = again, come_to
        self._edges: tuple[GradientEdge | None, ...] = ()  # None: a repetition has not made this output
        self._values: dict[Path, Fingerprint] = {}
        self.weights = [value for value in model.parameters() if value.requires_grad]
        self.reason = ""
        begin, weight_ids = next_number(), frozenset(map(id, self.weights))
        self.window = Window(threading.get_ident(), begin, begin, frozenset(), weight_ids)
        self._parts, self._kept = all_below((model,)), body.kept
        self._state = State.before(body, self._parts, arguments.leaves)
        self._had_graph = self._state.written.have_graph
        self._is_over = False
        self._attributes: AttributeTables | None = None  # as the backward found them
        self._written = WrittenTensors(())

    # ---- forward -----------------------------------------------------------------------------------

    def first(self, cuts: bool) -> Any:
        """Runs the forward and returns its output.

        Args:
            cuts: put it behind a boundary, where that goes; `reason` says why it does not.
        """
        args, kwargs = self._arguments.given()
        output = self._run(*args, **kwargs)
        self.window = self.window._replace(end=next_number())
        with without_modes() if has_modes() else nullcontext():
            return self._behind(output, cuts)

    def _behind(self, output: Any, cuts: bool) -> Any:
        try:
            found = self._parted(output, looks=not cuts)
        except CannotCutError as error:
            self.reason = str(error)
            return output
        made = list(found.values())
        if not made or not cuts:
            self.window = self.window._replace(outputs=frozenset(_number(tensor) for tensor in made))
            return output
        self._values = {path: fingerprint(item.detach(), sampled=False) for path, item in found.items()}
        self._edges = tuple(map(get_gradient_edge, made))
        behind: Any = _Boundary.apply(self, made, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
        return exchanged(output, dict(zip(map(id, made), behind, strict=True)))

    def _parted(self, output: Any, looks: bool) -> dict[Path, Tensor]:
        """The outputs that a boundary can be put before.

        Args:
            output: of the forward.
            looks: at what takes long, too.

        Raises:
            CannotCutError: it would change what the loop sees, or the forward cannot be repeated.
        """
        if self._arguments.needs_gradient:
            raise CannotCutError("an input needs a gradient")
        reason = self._arguments.changed() or why_no_repeat(self._state)
        if self._had_graph:
            reason = _EARLIER
        if any(map(has_gradient_hooks, self.weights)):
            reason = _HOOKED
        self._state.after()
        if reason:
            raise CannotCutError(reason)
        found = graph_outputs(output)
        check_own_memory(found.values(), (*self._arguments.leaves, *self._state.read_tensors()))
        if looks:
            check_holders(output, found)
            if leads_beside(list(found.values()), self.window):
                raise CannotCutError(_EARLIER)
            outputs = set(map(id, found.values()))
            left = AttributeTables(self._parts, self._kept).tensors
            if any(self._is_mine(tensor) and id(tensor) not in outputs for tensor in left):
                raise CannotCutError("it leaves a tensor with its graph on the model")
        return found

    @property
    def is_cut(self) -> bool:
        """Whether it has a boundary."""
        return bool(self._edges)

    @property
    def is_over(self) -> bool:
        """Whether its backward has been."""
        return self._is_over

    def _is_mine(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the graph of this forward."""
        return tensor.grad_fn is not None and self.window.has(_number(tensor))

    def rewind(self) -> str:
        """After a forward that failed: it can begin anew, or what it has changed that cannot be put back."""
        reason = self._arguments.changed() or why_no_repeat(self._state)
        if not reason:
            self._arguments.put_back()
            rewind(self._state)
        return reason

    # ---- backward ----------------------------------------------------------------------------------

    def roots(self, grads: Sequence[Tensor | None]) -> list[tuple[GradientEdge, Tensor]]:
        """Where the engine begins in this graph, and with which gradients."""
        pairs = zip(self._edges, grads, strict=True)
        return [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]

    def note_attributes(self) -> None:
        """A backward begins: what it changes on the model, it would change once more."""
        self._attributes = tables = AttributeTables(self._parts, self._kept)
        buffers = [value for part in self._parts for value in part._buffers.values() if value is not None]
        self._written = WrittenTensors([*tables.tensors, *buffers])
        tables.tensors, tables.referred = [], []

    def has_run(self, grads: Sequence[Tensor | None], keep: bool) -> None:
        """A backward has gone through the graph. What only a repetition needs may go."""
        if not keep and all(grad is not None for grad in grads):
            self._is_over = True
            del self._state, self._arguments, self._values
        self._attributes, self._written = None, WrittenTensors(())

    def let_go(self) -> None:
        """Of the graph."""
        self._edges = ()

    def why_no_repeat(self) -> str:
        """After a backward that failed: why it cannot be repeated; "": it can."""
        attributes, self._attributes = self._attributes, None
        if any(map(has_gradient_hooks, self.weights)):
            return _HOOKED
        if self._is_over:
            return "this forward has had its backward"
        if (attributes is not None and attributes.differing()) or self._written.present():
            return "its backward changes attributes or buffers (a function, a checkpoint of the model's own)"
        return self._arguments.changed()

    def repeat(self, grads: Sequence[Tensor | None]) -> None:
        """Runs the forward again.

        A tighter plan may have it make less than before: no key/value cache.

        Args:
            grads: of the outputs.

        Raises:
            RecomputeError: it has made something else, or lacks an output that has a gradient.
        """
        args, kwargs = self._arguments.again()
        with self._state.restored(), torch.enable_grad():
            made = graph_outputs(self._state.run(self._run, *args, **kwargs))
            for (path, value), grad in zip(self._values.items(), grads, strict=True):
                self._compare(path, value, made.get(path), grad is not None)
            edges = [made.get(path) for path in self._values]
            self._edges = tuple(None if item is None else get_gradient_edge(item) for item in edges)

    def _compare(self, path: Path, value: Fingerprint, made: Tensor | None, is_needed: bool) -> None:
        """The loop has computed with the first output: the second one must be the same, bit for bit."""
        failed = partial(_differs, path, "has other values")
        if made is None:
            if is_needed:
                raise _differs(path, "has no graph any more")
        elif isinstance(value, int):
            if fingerprint(made.detach(), sampled=False) != value:
                raise failed()
        elif value is not None and card_check.compare(value, made.detach(), failed):
            raise failed()


class InnerBackward:
    """The backward through the graphs of all forwards that one outer backward has led to.

    Args:
        call: PyTorch's own function.
        cuts: these forwards.
        keep: keep their graphs.
        nested: tells how many backwards have run within others so far.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        cuts: Sequence[Cut],
        keep: bool,
        nested: Callable[[], int],
    ) -> None:
        self._call, self._cuts, self._keep, self._nested = call, cuts, keep, nested
        self._weights = list({id(value): value for replay, _ in cuts for value in replay.weights}.values())
        self._done: dict[Tensor, Tensor | None] = {}  # weights that have their gradients, and these

    def run(self) -> None:
        """Runs it, as often as it takes."""
        while True:
            before = [gradient_of(weight) for weight in self._weights]
            generators = Generators()
            for replay, _ in self._cuts:
                replay.note_attributes()
            nested = self._nested()
            try:
                with self._kept_gradients():
                    self._run_engine()
                for replay, grads in self._cuts:
                    replay.has_run(grads, self._keep)
                return
            except Exception as error:
                if who_ran_out(error) is None:
                    raise
                failure = error
            try:
                self._note_done(before)
                self._repeat(failure, _NESTED if self._nested() != nested else "")
                generators.put_back()
            finally:
                del failure

    def _run_engine(self) -> None:
        roots = [root for replay, grads in self._cuts for root in replay.roots(grads)]
        edges, given = tuple(edge for edge, _ in roots), tuple(grad for _, grad in roots)
        if roots:
            self._call(edges, given, self._keep, False, (), allow_unreachable=True, accumulate_grad=True)

    def _note_done(self, before: Sequence[tuple[int, int]]) -> None:
        """Of weights that have got their gradients in what has failed, these are the gradients."""
        for weight, was in zip(self._weights, before, strict=True):
            if weight not in self._done and gradient_of(weight) != was:
                self._done[weight] = weight.grad

    @contextmanager
    def _kept_gradients(self) -> Iterator[None]:
        """Has gradients that were complete come again when their weight gets its second one.

        Until then the weight has none, so that nothing is added to them.
        """
        handles = []
        try:
            for weight in self._done:
                handles.append(weight.register_post_accumulate_grad_hook(self._give_back))
                weight.grad = None
            yield
        finally:
            for handle in handles:
                handle.remove()
            for weight, gradient in self._done.items():
                weight.grad = gradient

    def _give_back(self, weight: Tensor) -> None:
        weight.grad = self._done[weight]

    def _repeat(self, failure: Exception, reason: str) -> None:
        """Makes room and runs the forwards again, until there are graphs to run backward through."""
        while True:
            for replay, _ in self._cuts:
                replay.let_go()
            reasons = [reason, *(replay.why_no_repeat() for replay, _ in self._cuts)]
            for again in dict.fromkeys(replay.again for replay, _ in self._cuts):  # once for each model
                again(failure, next(filter(None, reasons), ""))
            _drain()
            try:
                for replay, grads in sorted(self._cuts, key=lambda cut: cut[0].window.begin):
                    replay.repeat(grads)
                return
            except RecomputeError as error:
                reason = str(error)
            except Exception as error:
                failure = error


class _Boundary(torch.autograd.Function):
    """Parts the model's graph from the loop's."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, made: list[Tensor], unused: Tensor) -> tuple[Tensor, ...]:
        """The same values, memory and versions, with another node behind them."""
        ctx.replay = replay
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in made)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        """Notes the gradients for the model's graph."""
        ctx.replay.come_to(ctx.replay, grads, torch._C._autograd._get_current_graph_task_keep_graph())
        return None, None, None


class Generators:
    """Where random generators stand: a function's backward may draw from them."""

    def __init__(self) -> None:
        self._python = python_generators.present()
        with without_modes() if has_modes() else nullcontext():
            self._cpu = python_generators.cpu_state()
            cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
            self._cards = [bytes(state.numpy()) for state in cards]  # where no prediction has to count them

    def are_present(self) -> bool:
        """Whether they stand there now."""
        now = Generators()
        return self._python.are_present() and (now._cpu, now._cards) == (self._cpu, self._cards)

    def put_back(self) -> None:
        """Makes them stand there again."""
        self._python.put_back()
        with without_modes() if has_modes() else nullcontext():
            python_generators.set_cpu(self._cpu)
            if self._cards:
                torch.cuda.set_rng_state_all(list(map(python_generators.cpu_tensor, self._cards)))


def boundary_of(node: Any) -> Replay | None:
    """The forward behind a function's node, if it is a boundary."""
    replay = getattr(node, "replay", None)
    return replay if isinstance(replay, Replay) else None


def _differs(path: Path, what: str) -> RecomputeError:
    place = "".join(f"[{key!r}]" for key in path)
    return RecomputeError(f"a forward that was repeated had another result: output{place} {what}")


def _number(tensor: Tensor) -> int:
    node: Any = tensor.grad_fn
    return int(node._sequence_nr())


def _drain() -> None:
    """Runs a backward of nothing: the thread's queue may hold tasks, with tensors, of the one that failed."""
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).clone().backward()


never_compiled(Replay, InnerBackward, _Boundary, Generators, boundary_of, _drain)
