# SPDX-License-Identifier: Apache-2.0
"""A forward of the whole model that can be repeated until its backward is over.

What the model computes is a graph of its own, which only a `Replay` holds. What the loop gets are the same
values behind one node, the boundary:

    loss ─► … ─► boundary ┆ ─► the model's graph ─► weights
                          ┆ cut: when memory runs out, all to the right of it can go

    backward      outer graph first; the boundary takes the gradients of the outputs, and the model's graph
                  runs when the outer one is through (`backward_calls`), from these
    no memory     the model's graph goes, a tighter plan comes, the forward is repeated in the world that it
                  had (`State.restored`) and backward starts again from the same gradients
    gradients     of weights that had theirs already are kept: their second ones are dropped as they come
    shared        a weight that the loss uses, too, gets one sum: what the outer graph has for it goes into
                  the inner one

Weights get the same sums in the same order as in one graph, so every bit is that of an undisturbed step. If
an input needs a gradient, the model's graph runs inside of the boundary's backward, which has to return it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from memscale.errors import RecomputeError
from memscale.survival.world import rewind
from memscale.techniques.checkpoint import card_check
from memscale.techniques.checkpoint.checkpoint_state import State, all_below, check_version, version_of
from memscale.techniques.checkpoint.recompute_check import Fingerprint, fingerprint
from memscale.torchkit.compiled import never_compiled
from memscale.torchkit.leaves import gradient_of, tensors_of

if TYPE_CHECKING:
    from memscale.techniques.checkpoint.checkpoint_state import Body

_KINDS = (Tensor, nn.Parameter)


class CannotCutError(Exception):
    """The model's graph cannot be parted from the loop's; the message says why."""


class Run(NamedTuple):
    """How the outer backward is run.

    Attributes:
        call: PyTorch's own function.
        defer: is given what to run after the outer graph; None: run it at once.
        accumulates: False: only gradients of the sources are wanted (`torch.autograd.grad`).
    """

    call: Callable[..., Any]
    defer: Callable[[Callable[[], object]], None] | None
    accumulates: bool = True


class Replay:
    """One forward, from its start until its backward is over.

    Args:
        body: what is known of the forward.
        model: whose forward it is.
        run: the forward, with whatever is attached.
        call: its arguments, positional and by name.
        again: is called when memory has run out in backward, with the error, outside of its handler; makes
            room, or raises.
        how: tells how the backward that is under way is run.
    """

    def __init__(
        self,
        body: Body,
        model: nn.Module,
        run: Callable[..., Any],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        again: Callable[[Exception], None],
        how: Callable[[], Run],
    ) -> None:
        self._body, self._run = body, run
        self._again, self._how = again, how
        self._leaves, self._spec = tree_flatten(call)
        self._versions = [
            (place, version_of(leaf)) for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)
        ]
        self.sources = [leaf for leaf in self._leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._copies: list[Tensor] = []  # of the sources, for the inner graph
        self._edges: tuple[GradientEdge, ...] = ()
        self._values: list[Fingerprint] = []
        self._weights = [value for value in model.parameters() if value.requires_grad]
        self.number = 0  # of the boundary, in the order in which autograd's nodes were made
        self.from_outside: dict[Tensor, Tensor] = {}  # gradients of weights that the loss uses, too
        self._done: dict[Tensor, Tensor | None] = {}  # weights that have their gradients, and these
        self._state = State.before(body, all_below((model,)), self._leaves)

    # ---- forward -----------------------------------------------------------------------------------

    def first(self) -> Any:
        """Runs the forward and returns its output behind the boundary.

        Raises:
            CannotCutError: it has something in it that cannot be put behind one. It is over all the same.
        """
        args, kwargs = self._inputs()
        output = self._run(*args, **kwargs)
        leaves, spec = tree_flatten(output)
        made = self._made(leaves)
        self._values = [fingerprint(tensor.detach(), sampled=False) for tensor in made]
        self._state.after()
        if not made:
            return output
        self._edges = tuple(map(get_gradient_edge, made))
        begun = self.sources or [torch.empty(0, requires_grad=True)]
        behind: Any = _Boundary.apply(self, made, *begun)  # type: ignore[no-untyped-call]
        handed = dict(zip(map(id, made), behind, strict=True))
        return tree_unflatten([handed.get(id(leaf), leaf) for leaf in leaves], spec)

    def plain(self) -> Any:
        """Runs the forward as it is, without a boundary, in the world that it began with."""
        rewind(self._state)
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        return self._run(*args, **kwargs)

    def rewind(self) -> None:
        """After a forward that failed: it can begin anew.

        Raises:
            NotAsItWasError: it has changed what cannot be put back.
        """
        self._copies = []
        rewind(self._state)

    def _inputs(self) -> tuple[Any, Any]:
        """The arguments, with leaves of the inner graph in place of what needs a gradient."""
        for place, version in self._versions:
            check_version(self._leaves[place], version, self._body.path)
        copies = {id(source): source.detach().requires_grad_() for source in self.sources}
        self._copies = [copies[id(source)] for source in self.sources]
        leaves = [copies.get(id(leaf), leaf) for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs

    def _made(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The outputs that have a graph, each once."""
        found: dict[int, Tensor] = {}
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                if any(part.grad_fn is not None for part in tensors_of(leaf)):
                    raise CannotCutError(f"the output has tensors in a {type(leaf).__name__}")
            elif leaf.grad_fn is not None or any(leaf is copy for copy in self._copies):
                if type(leaf) not in _KINDS or leaf.layout is not torch.strided:
                    raise CannotCutError(f"an output is a {type(leaf).__name__}, {leaf.layout}")
                found[id(leaf)] = leaf
        return list(found.values())

    @property
    def weight_ids(self) -> set[int]:
        """The ids of the weights that the model trains."""
        return set(map(id, self._weights))

    # ---- backward ----------------------------------------------------------------------------------

    def backward(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The boundary's: the gradients of the outputs have come.

        Returns:
            Gradients of the sources.
        """
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        how = self._how()
        if how.defer is not None and not self.sources:
            how.defer(partial(self._backward, list(grads), keep, how))
            return ()
        return self._backward(list(grads), keep, how)

    def _backward(self, grads: list[Tensor | None], keep: bool, how: Run) -> tuple[Tensor | None, ...]:
        """Runs the inner backward, as often as it takes."""
        self._done = {}
        given_outside = list(self.from_outside.items())
        self.from_outside = {}
        while True:
            before = [gradient_of(weight) for weight in self._weights]
            try:
                with self._kept_gradients():
                    given = self._run_engine(grads, keep, how, given_outside)
                if not keep:
                    self._edges = ()
                return given
            except Exception as error:
                failure = error
            self._note_done(before)
            self._edges = ()
            for copy in self._copies:
                copy.grad = None
            self._repeat(failure)
            del failure

    def _run_engine(
        self,
        grads: list[Tensor | None],
        keep: bool,
        how: Run,
        outside: Sequence[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor | None, ...]:
        # What the loss has for a weight comes first, as in one graph, whose later nodes run earlier.
        roots = [(get_gradient_edge(weight), grad) for weight, grad in outside]
        roots += [(edge, grad) for edge, grad in zip(self._edges, grads, strict=True) if grad is not None]
        edges, given = tuple(edge for edge, _ in roots), tuple(grad for _, grad in roots)
        if not how.accumulates:
            wanted = tuple(self._copies)
            return tuple(
                how.call(edges, given, keep, False, wanted, allow_unreachable=True, accumulate_grad=False)
            )
        how.call(edges, given, keep, False, (), allow_unreachable=True, accumulate_grad=True)
        found = tuple(copy.grad for copy in self._copies)
        for copy in self._copies:
            copy.grad = None
        return found

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

    def _repeat(self, failure: Exception) -> None:
        """Makes room and runs the forward again, until there is a graph to run backward through."""
        while True:
            self._again(failure)
            _drain()
            try:
                with self._state.restored(), torch.enable_grad():
                    args, kwargs = self._inputs()
                    output = self._state.run(self._run, *args, **kwargs)
                    made = self._made(tree_flatten(output)[0])
                    self._compare(made)
                    self._edges = tuple(map(get_gradient_edge, made))
                return
            except Exception as error:
                failure = error
            args = kwargs = output = made = None  # type: ignore[assignment]

    def _compare(self, made: Sequence[Tensor]) -> None:
        """The loop has computed with the first outputs: the second ones must be the same, bit for bit."""
        if len(made) != len(self._values):
            raise self._differs(f"{len(made)} outputs instead of {len(self._values)}")
        for place, (tensor, value) in enumerate(zip(made, self._values, strict=True)):
            plain = tensor.detach()
            if isinstance(value, int):
                if fingerprint(plain, sampled=False) != value:
                    raise self._differs(f"output {place} has other values")
            elif value is not None:
                failed = partial(self._differs, f"output {place} has other values")
                if card_check.compare(value, plain, failed):
                    raise failed()

    def _differs(self, what: str) -> RecomputeError:
        return RecomputeError(f"a forward that was repeated after memory had run out made {what}")


class _Boundary(torch.autograd.Function):
    """Parts the model's graph from the loop's."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, made: list[Tensor], *sources: Tensor) -> tuple[Tensor, ...]:
        """The same values, memory and versions, with another node behind them."""
        ctx.replay = replay
        ctx.sources = len(sources)
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in made)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Hands the gradients to the model's graph."""
        found = ctx.replay.backward(grads)
        return (None, None, *(found or (None,) * ctx.sources))


class OuterGraph:
    """The loop's part of the graph of some roots.

    Attributes:
        replays: what is behind its boundaries.
        uses: id of a leaf → (leaf, lowest sequence number of what uses it there).
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.replays: list[Replay] = []
        self.uses: dict[int, tuple[Tensor, int]] = {}
        pending = [getattr(root, "node", None) or getattr(root, "grad_fn", None) for root in roots]
        seen = set(pending)
        while pending:
            node = pending.pop()
            if node is None:
                continue
            replay = getattr(node, "replay", None) if isinstance(node, BackwardCFunction) else None
            if isinstance(replay, Replay):
                self.replays.append(replay)
                replay.number = node._sequence_nr()
                continue  # what is behind it are inputs, or nothing
            for child, _ in node.next_functions:
                self._note_use(child, node)
                if child is not None and child not in seen:
                    seen.add(child)
                    pending.append(child)

    def _note_use(self, child: Any, node: Any) -> None:
        leaf = getattr(child, "variable", None)
        if leaf is not None:
            number = min(node._sequence_nr(), self.uses.get(id(leaf), (leaf, node._sequence_nr()))[1])
            self.uses[id(leaf)] = (leaf, number)


def _drain() -> None:
    """Runs a backward of nothing: the thread's queue may hold tasks, with tensors, of the one that failed."""
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).clone().backward()


never_compiled(Replay, OuterGraph, _Boundary, _drain)
