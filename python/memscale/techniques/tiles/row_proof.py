# SPDX-License-Identifier: Apache-2.0
"""Follows rows through a forward on fakes, operator by operator, and ends where they could meet.

Memory that carries rows is known by one number, the stride from one row to the next:

    storage of x      row stride = width       every view of it has exactly one dimension of size n with
    mm(x, w)          row stride = out         that stride, or it does not carry rows one by one

Every operator that reads such memory must be one that keeps rows apart, with the rows in the same place in
all its operands. What is not known to do so ends the proof. So does a tensor made of nothing whose size
follows the number of rows (positions), a write to anything that the forward did not make itself, and a random
number (a tile would draw others than the whole: another training, not another rounding). The modules that
`row_dropout` can run on tiles are not entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memscale.ops import op_facts


class NotRowWiseError(Exception):
    """The proof has ended; the message says where."""


_ELEMENTWISE = frozenset(
    {
        "_to_copy", "clone", "copy_", "empty_like", "fill_.Scalar", "full_like", "gelu", "ones_like",
        "where.self", "zero_", "zeros_like",
    }
)  # fmt: skip
"""Operators without the tag `pointwise` that work on each element alone."""

_ALONG_DIMS = frozenset(
    {
        "_log_softmax", "_softmax", "amax", "amin", "glu", "linalg_vector_norm", "logsumexp", "mean.dim",
        "std.correction", "sum.dim_IntList", "var.correction", "var_mean.correction",
    }
)  # fmt: skip
"""Operators that combine elements along the dimensions that they are given."""

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "linear": (0, 1)}
"""Matrix products: positions of the two factors."""


class Proof(TorchDispatchMode):
    """Follows the rows through a forward, and ends it where they could meet.

    Args:
        rows: their number.
        own: parameters and buffers, and the input.

    Attributes:
        numbers: arguments of the elementwise operators.
        touched: storages that operators have read or written.
    """

    def __init__(self, rows: int, own: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.strides: dict[int, int] = {}  # storage that carries rows → elements from one to the next
        self.outside = {storage_key(tensor) for tensor in own}
        self.alive: list[Tensor] = list(own)  # no address is given to a second storage
        self.numbers: list[Any] = []
        self.touched: set[int] = set()

    def carries(self, tensor: Tensor, axis: int) -> None:
        """Enters a tensor whose dimension `axis` are the rows."""
        self.strides[storage_key(tensor)] = tensor.stride(axis)
        self.alive.append(tensor)

    def axis(self, tensor: Tensor) -> int | None:
        """The dimension that the rows are in; None for a tensor that carries none.

        Raises:
            NotRowWiseError: some of its memory is that of rows, but no dimension is theirs.
        """
        stride = self.strides.get(storage_key(tensor))
        if stride is None:
            return None
        found = [
            place
            for place in range(tensor.dim())
            if tensor.shape[place] == self.rows and tensor.stride(place) == stride
        ]
        if len(found) != 1:
            raise NotRowWiseError("it takes its rows apart")
        return found[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator, if rows stay apart in it."""
        kwargs = kwargs or {}
        info = op_facts.facts(func)
        operands = tensors_of((args, kwargs))
        self.touched.update(map(storage_key, operands))
        axes = [(tensor, self.axis(tensor)) for tensor in operands]
        result = func(*args, **kwargs)
        outputs = tensors_of(result)
        if not outputs and info.schema.startswith("prim::"):  # which device?
            return result
        self.alive += outputs
        if info.draws(args, kwargs):
            raise NotRowWiseError(f"it draws random numbers, other ones tile by tile ({info.name})")
        names = [func._schema.arguments[index].name for index in info.writes]
        written = [
            args[index] if index < len(args) else kwargs.get(name)
            for index, name in zip(info.writes, names, strict=True)
        ]
        if any(isinstance(target, Tensor) and storage_key(target) in self.outside for target in written):
            raise NotRowWiseError(f"it writes to what it did not make ({info.name})")
        carrying = [(tensor, axis) for tensor, axis in axes if axis is not None]
        if not carrying:
            self._without_rows(info, outputs)
            self._note_numbers(info, (args, kwargs))
        elif not info.is_view and info.name != "_unsafe_view":
            axis = self._follow(func, (args, kwargs), carrying)
            for output in outputs:
                self._note_output(info, output, axis)
        for output in outputs:
            if self.axis(output) is None and carrying:  # a view must still carry its rows
                raise NotRowWiseError(f"{info.name} copies its rows")
        return result

    def _without_rows(self, info: op_facts.OpFacts, outputs: Sequence[Tensor]) -> None:
        if any(size % self.rows == 0 for output in outputs for size in output.shape if size):
            raise NotRowWiseError(f"it makes something of the number of its rows ({info.name})")
        if info.foreign:
            raise NotRowWiseError(f"it uses {info.name}, which is not known to keep rows apart")

    def _note_numbers(self, info: op_facts.OpFacts, call: tuple[Any, Any]) -> None:
        """A step size that is divided by the number of elements has no rows, and its gradient knows them."""
        if info.pointwise or info.name in _ELEMENTWISE:
            values = [value for value in tree_leaves(call) if isinstance(value, (int, float))]
            self.numbers.append((info.name, values))

    def _note_output(self, info: op_facts.OpFacts, output: Tensor, axis: int) -> None:
        """Rows of an output are counted from the right, as broadcasting does."""
        place = output.dim() + axis
        if place < 0 or output.shape[place] != self.rows:
            raise NotRowWiseError(f"{info.name} does not keep its rows")
        known = self.strides.get(storage_key(output))
        if known is None:
            self.strides[storage_key(output)] = output.stride(place)
        elif known != output.stride(place):
            raise NotRowWiseError(f"{info.name} writes rows across others")

    def _follow(self, func: Any, call: tuple[Any, Any], carrying: list[tuple[Tensor, int]]) -> int:
        """Where the rows are in the outputs, from the right (negative).

        Raises:
            NotRowWiseError: they may meet.
        """
        info, (args, kwargs) = op_facts.facts(func), call
        name = info.name
        places = {axis - tensor.dim() for tensor, axis in carrying}
        if len(places) != 1 and name not in _PRODUCTS:
            raise NotRowWiseError(f"{name} brings rows together that lie differently")
        place = places.pop()
        if name in _PRODUCTS:
            return self._product(name, args, carrying)
        if info.pointwise or name in _ELEMENTWISE:
            self._note_numbers(info, (args, kwargs))
            return place
        tensor, axis = carrying[0]
        if name in _ALONG_DIMS:
            return _after_dims(func, call, tensor, axis)
        if name in ("native_layer_norm", "_fused_rms_norm") and carrying[0][0] is args[0]:
            if axis < tensor.dim() - len(args[1]):
                return place
        elif name == "cat" and len(carrying) == len(args[0]):
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            if dim % tensor.dim() != axis:
                return place
        raise NotRowWiseError(f"it uses {name}, which is not known to keep rows apart")

    def _product(self, name: str, args: Any, carrying: list[tuple[Tensor, int]]) -> int:
        left, right = (args[place] for place in _PRODUCTS[name])
        if len(carrying) == 1:
            tensor, axis = carrying[0]
            if tensor is left and axis != tensor.dim() - 1:
                return int(axis - tensor.dim())
            if tensor is right and name in ("mm", "bmm") and axis == tensor.dim() - 1:
                return -1
        raise NotRowWiseError(f"{name} multiplies rows with one another")


def _after_dims(func: Any, call: tuple[Any, Any], tensor: Tensor, axis: int) -> int:
    """Where the rows are, from the right, once some dimensions have been combined."""
    info, (args, kwargs) = op_facts.facts(func), call
    values = {
        argument.name: args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        for index, argument in enumerate(func._schema.arguments)
    }
    dims = values["dim"]
    if dims is None or dims == []:
        raise NotRowWiseError(f"{info.name} combines all rows")
    reduced = {dim % tensor.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
    if axis in reduced:
        raise NotRowWiseError(f"{info.name} combines its rows")
    place = axis - tensor.dim()
    lost = 0 if values.get("keepdim", True) else sum(dim > axis for dim in reduced)
    return place + lost


def storage_key(tensor: Tensor) -> int:
    """Address of a tensor's storage; its own for as long as the storage is alive."""
    address: int = tensor.untyped_storage()._cdata
    return address


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
