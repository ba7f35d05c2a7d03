# SPDX-License-Identifier: Apache-2.0
"""Whether a forward treats each row alone: proved on fakes, and checked on real rows.

A row is what lies along the last dimension: a token. The forward runs on fake tensors of shape `[..., n, ...,
width]`, where `n` is a prime that divides no size in the module; `row_proof` follows the rows. Beside what it
refuses, a number in an operator's arguments that differs between two row counts ends the proof.

A proof holds for the operators seen. The code could go another way on another input, which no proof on fakes
can exclude; `rows_are_apart` therefore runs a real module on a few random rows as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memscale.state import model_state
from memscale.state.weight_images import WeightImages
from memscale.techniques.tiles.row_dropout import Drop, called_as, dropouts_of
from memscale.techniques.tiles.row_proof import NotRowWiseError, Proof, storage_key
from memscale.torchkit.quiet_fakes import quiet_fakes

PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107)
"""Row counts to choose from: small, and unlikely to divide a width."""

_SMALL = 1 << 16
"""Elements of weights whose gradients are looked at: large ones would take memory while planning."""

_WIDTHS = 6
"""Most widths of the input that are tried: the smallest sizes found in the parameters."""


@dataclass(frozen=True)
class RowFacts:
    """What is known of a forward that treats each row alone.

    Attributes:
        width: elements of one row of the input.
        outer_bytes: of one row of input and output together, in the dtype of the parameters.
        inner_bytes: what autograd saves for one row in between: neither input nor output nor parameter.
            What dropouts save is not counted.
        dims: numbers of dimensions of the input for which this was proved.
        drops: the calls of dropouts, in order.
        children: names of the module's children that it needs.
        own: it needs tensors that are the module's, and no child's.
    """

    width: int
    outer_bytes: int
    inner_bytes: int
    dims: frozenset[int]
    drops: tuple[Drop, ...] = ()
    children: tuple[str, ...] = ()
    own: bool = False


@dataclass(frozen=True)
class _Seen:
    """What one run under proof has shown: numbers in elementwise operators, dropouts, storages it touched."""

    numbers: list[Any]
    drops: tuple[Drop, ...]
    touched: frozenset[int]


# ---- running a module on fakes -------------------------------------------------------------------------


@contextmanager
def exchanged(module: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[dict[int, Tensor]]:
    """Runs the block with others in place of a module's tensors. Yields them, by the original's id."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, Tensor] = {}
    try:
        for part in module.modules():
            for registry in (part._parameters, part._buffers):
                for name, value in registry.items():
                    if value is not None:
                        undo.append((registry, name, value))
                        if id(value) not in made:
                            made[id(value)] = make(value)
                        registry[name] = made[id(value)]  # type: ignore[assignment]
        yield made
    finally:
        for registry, name, value in undo:
            registry[name] = value


def _faked(module: nn.Module, mode: FakeTensorMode) -> AbstractContextManager[dict[int, Tensor]]:
    """Runs the block with fakes on the CPU in the module's registries. Yields them, by the original's id."""
    return exchanged(module, lambda value: _fake(value, mode))


def alias_of(value: Tensor) -> Tensor:
    """The same values, without the hooks of others; a buffer's copy, which may be written."""
    made = value.detach()
    return nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made.clone()


def _fake(value: Tensor, mode: FakeTensorMode) -> Tensor:
    if type(value) not in (Tensor, nn.Parameter, FakeTensor) or value.layout is not torch.strided:
        raise NotRowWiseError(f"it has a tensor of type {type(value).__name__}")
    with mode, torch.no_grad():
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(made, requires_grad=value.requires_grad)
    return made


@contextmanager
def _flags(module: nn.Module, training: bool) -> Iterator[None]:
    before = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in before:
            part.training = training
        yield
    finally:
        for part, flag in before:
            part.training = flag


@contextmanager
def _by_itself() -> Iterator[None]:
    """Without the caller's autocast, inference or gradient mode."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


# ---- the proof -----------------------------------------------------------------------------------------


def prove(module: nn.Module, run: Callable[..., Any]) -> RowFacts:
    """Runs a forward on fakes. Leaves the module as it was.

    Args:
        module: any module; its parameters may be on any device, or have no data.
        run: its forward, or another method that takes one tensor.

    Raises:
        NotRowWiseError: it does not treat each row alone, or nobody can tell.
    """
    sizes = {size for value in module.parameters() if value.dim() >= 1 for size in value.shape}
    dtype = next((value.dtype for value in module.parameters() if value.is_floating_point()), torch.float32)
    rows = [prime for prime in PRIMES if all(size % prime for size in sizes)][:2]
    if len(rows) < 2:
        raise NotRowWiseError("its sizes leave no row count to tell rows by")
    reason = "it does not run on rows alone"
    with model_state.preserved(module) as changes, quiet_fakes(), _flags(module, training=True):
        for width in sorted(sizes - {1})[:_WIDTHS]:
            try:
                facts = _prove_width(module, run, width, dtype, rows)
            except NotRowWiseError as error:
                reason = str(error)  # the error itself would hold all frames that call this
            except Exception:  # the module's own: this is no input for it
                continue
            else:
                break
        else:
            raise NotRowWiseError(reason)
    if changes.attributes or changes.buffers or changes.python_random:
        raise NotRowWiseError("it changes its own state")
    return facts


def _prove_width(
    module: nn.Module, run: Callable[..., Any], width: int, dtype: torch.dtype, rows: Sequence[int]
) -> RowFacts:
    seen = [_run(module, run, _shape(3, 1, count, width), dtype, 1) for count in rows]
    if seen[0].numbers != seen[1].numbers:
        raise NotRowWiseError("it computes with the number of its rows")
    proved = set()
    for dims in (3, 2, 4):
        try:
            shapes = [(_shape(dims, axis, rows[0], width), axis) for axis in range(dims - 1)]
            again = [_run(module, run, shape, dtype, axis) for shape, axis in shapes]
        except Exception:
            if dims == 3:
                raise
            continue
        if all(one.drops == seen[0].drops for one in again):
            proved.add(dims)
    outer, inner = _saved(module, run, _shape(3, 1, rows[0], width), dtype)
    touched, drops = seen[0].touched, seen[0].drops
    own = any(id(value) in touched for value in (*module._parameters.values(), *module._buffers.values()))
    sizes = outer // rows[0], inner // rows[0]
    return RowFacts(width, *sizes, frozenset(proved), drops, _needed(module, touched), own)


def _shape(dims: int, axis: int, rows: int, width: int) -> list[int]:
    shape = [1] * (dims - 1) + [width]
    shape[axis] = rows
    return shape


def _run(
    module: nn.Module, run: Callable[..., Any], shape: list[int], dtype: torch.dtype, axis: int
) -> _Seen:
    """One forward under proof."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    drops: list[Drop] = []
    with _faked(module, mode) as fakes, _by_itself(), torch.no_grad(), mode:
        x = torch.empty(shape, dtype=dtype)
        proof = Proof(shape[axis], [*fakes.values(), x])
        proof.carries(x, axis)
        weights = WeightImages(module)

        def drop(path: str, part: nn.Dropout, source: Tensor) -> Tensor:
            if source.shape[:-1] != x.shape[:-1] or proof.axis(source) != axis:
                raise NotRowWiseError(f"its dropout {path!r} does not get one row for each row")
            if source.dtype != dtype or not source.is_contiguous():
                raise NotRowWiseError(f"its dropout {path!r} gets another dtype or layout")
            if any(path == known.path for known in drops):
                raise NotRowWiseError(f"its dropout {path!r} is called more than once")
            drops.append(Drop(path, source.shape[-1]))
            return source  # the same memory: stricter than a copy, where something is written in place

        with called_as(dropouts_of(module), drop), proof:
            y = run(x)
        if weights.exchanged():
            raise NotRowWiseError("it exchanges its weights")
        if not isinstance(y, Tensor) or y.shape[:-1] != x.shape[:-1] or proof.axis(y) != axis:
            raise NotRowWiseError("it does not return one row for each row")
        if y.dtype != dtype or storage_key(y) == storage_key(x):
            raise NotRowWiseError("it returns its input, or another dtype")
    touched = {original for original, fake in fakes.items() if storage_key(fake) in proof.touched}
    return _Seen(proof.numbers, tuple(drops), frozenset(touched))


def _needed(module: nn.Module, touched: frozenset[int]) -> tuple[str, ...]:
    """Names of the children that hold what a forward touches, or that hold no tensors at all."""
    children = {
        name: {id(value) for value in (*child.parameters(), *child.buffers())}
        for name, child in module.named_children()
    }
    return tuple(name for name, own in children.items() if not own or own & touched)


def _saved(
    module: nn.Module, run: Callable[..., Any], shape: list[int], dtype: torch.dtype
) -> tuple[int, int]:
    """Bytes of input and output, and of what autograd saves in between.

    Raises:
        NotRowWiseError: a parameter from elsewhere takes part.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    saved: dict[int, Tensor] = {}
    with _faked(module, mode) as fakes, _by_itself(), torch.enable_grad(), mode:
        x = torch.empty(shape, dtype=dtype, requires_grad=True)

        def pack(tensor: Tensor) -> Tensor:
            saved[storage_key(tensor)] = tensor.detach()
            return tensor.detach()

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            called_as(dropouts_of(module), lambda path, part, source: source),
        ):
            y = run(x)
        known = {id(tensor) for tensor in (x, *fakes.values())}
        if any(id(leaf) not in known for leaf in _leaves(y)):
            raise NotRowWiseError("it uses parameters of another module")
        outside = {storage_key(tensor) for tensor in (x, y, *fakes.values())}
        inner = sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in outside)
        return x.untyped_storage().nbytes() + y.untyped_storage().nbytes(), inner


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that collect gradients below one."""
    pending, seen = [tensor.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise NotRowWiseError(f"it has a backward of its own ({type(node).__name__})")
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        pending += [following for following, _ in node.next_functions]


# ---- a look at real rows -------------------------------------------------------------------------------


def rows_are_apart(module: nn.Module, run: Callable[..., Any], facts: RowFacts) -> bool:
    """Whether a real module on the CPU gives the same for some random rows together and in two parts.

    True also where there is no data to look at. Dropout is off for that; random generators stay as they are.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.device.type != "cpu" or isinstance(tensor, FakeTensor) for tensor in tensors):
        return True
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    generator = torch.Generator().manual_seed(0)
    with model_state.preserved(module), _flags(module, training=False), _by_itself(), torch.enable_grad():
        x = torch.randn(2, 3, facts.width, generator=generator).to(dtype)
        rows = x.reshape(1, 6, -1)
        with exchanged(module, alias_of):
            whole = _with_gradients(module, run, [x])
            parts = _with_gradients(module, run, [rows[:, :2], rows[:, 2:]])
    if len(whole) != len(parts):
        return False
    return all(_is_near(one, other) for one, other in zip(whole, parts, strict=True))


def _with_gradients(module: nn.Module, run: Callable[..., Any], parts: Sequence[Tensor]) -> list[Tensor]:
    """Rows of output and input gradient, and the gradients of the parameters, summed over the parts."""
    inputs = [part.detach().clone().requires_grad_() for part in parts]
    outputs = [run(part) for part in inputs]
    trained = [value for value in module.parameters() if value.requires_grad and value.numel() <= _SMALL]
    joined = [torch.cat([value.reshape(-1, value.shape[-1]) for value in outputs])]
    # No sum of squares: behind a norm that is nearly the same for any input.
    by_row = torch.randn(joined[0].shape, generator=torch.Generator().manual_seed(1)).to(joined[0].dtype)
    made = torch.autograd.grad(joined[0], [*inputs, *trained], by_row, allow_unused=True)
    of_rows, of_weights = made[: len(inputs)], made[len(inputs) :]
    joined[0] = joined[0].detach()
    if all(value is not None for value in of_rows):
        joined.append(torch.cat([value.reshape(-1, value.shape[-1]) for value in of_rows]))
    return [*joined, *(value for value in of_weights if value is not None)]


def _is_near(whole: Tensor, parts: Tensor) -> bool:
    if not bool(torch.isfinite(whole).all()):
        return not bool(torch.isfinite(parts).all())
    scale = float(whole.abs().max()) or 1.0
    return float((whole - parts).abs().max()) <= 64 * torch.finfo(whole.dtype).eps * scale


def takes_one(run: Callable[..., Any]) -> str:
    """Name of the argument of a function that needs exactly one; "" for any other."""
    try:
        parameters = list(inspect.signature(run).parameters.values())
    except (TypeError, ValueError):
        return ""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(needed) != 1 or needed[0] is not parameters[0] or needed[0].kind not in kinds:
        return ""
    return needed[0].name
