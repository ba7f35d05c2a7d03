# SPDX-License-Identifier: Apache-2.0
"""The state of one parameter: a tensor of bytes in the order of the parameter's memory.

    moment1 │ moment2 │ rest │ scale1 │ scale2      what there is of them, `Form` says

`optimizer.state[parameter]` has the bytes, the number of steps done, and the form, under the three names
below; what others keep there stays beside them. The rest is what BF16 weights lack of their masters.

The bytes lie where the parameter does, on the CPU or on a card; there the core works on them.

A form holds the parameter's strides too: the k-th element of a moment belongs to the k-th element in memory,
so a parameter that gets another order of dimensions (`channels_last`) has its state put in that order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from memscale import _core
from memscale.optim import cards
from memscale.optim.kinds import Kind

STEP: Final = "memscale_step"
BYTES: Final = "memscale_state"
FORM: Final = "memscale_form"

Entry = dict[str, Any]
"""What `optimizer.state` has for a parameter."""

_RESIDUALS: Final = {"master_rest8": torch.int8, "master_rest16": torch.int16}
_MOST_THREADS: Final = 256


class Form(NamedTuple):
    """What the bytes of a parameter's state mean.

    Attributes:
        kind: "adam", "sgd" or "lion".
        weights: "fp32", "master_rest8" or "master_rest16".
        moments: "code8" or "fp32".
        shape: of the parameter.
        stride: of the parameter.
    """

    kind: str
    weights: str
    moments: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def rule(self) -> dict[str, Any]:
        """A rule with these arrays."""
        return _rule(self.kind, self.weights, self.moments)

    @property
    def places(self) -> Places:
        """Where the arrays lie."""
        return places(self.kind, self.weights, self.moments, self.elements)


@dataclass(frozen=True)
class Places:
    """(offset, bytes) of each array among the bytes of a state, and how many bytes these are."""

    moment1: tuple[int, int]
    moment2: tuple[int, int]
    rest: tuple[int, int]
    scale1: tuple[int, int]
    scale2: tuple[int, int]
    total_bytes: int


def form_of(kind: Kind, moments: str, parameter: Tensor) -> Form:
    """The form that the state of a parameter has, or would have."""
    return Form(kind.name, _weights(moments, parameter), moments, tuple(parameter.shape), parameter.stride())


def is_form_of(form: Form, kind: Kind, moments: str, parameter: Tensor) -> bool:
    """Whether that is this one, without making it: this is asked for every parameter in every step."""
    found = (kind.name, _weights(moments, parameter), moments, parameter.shape, parameter.stride())
    return form == found


def _weights(moments: str, parameter: Tensor) -> str:
    if parameter.dtype is not torch.bfloat16:
        return "fp32"
    return "master_rest8" if moments == "code8" else "master_rest16"


def _rule(kind: str, weights: str, moments: str) -> dict[str, Any]:
    rule: dict[str, Any] = {"kind": kind, "weights": weights, "moments": moments}
    return {**rule, "momentum": 0.9} if kind == "sgd" else rule


@functools.lru_cache(maxsize=4096)
def places(kind: str, weights: str, moments: str, count: int) -> Places:
    """Where the arrays of a state of `count` elements lie."""
    sizes = _core.Optim.sizes(_rule(kind, weights, moments), count)
    at = 0
    spans: list[tuple[int, int]] = []
    for name in ("moment1", "moment2", "master", "scale1", "scale2"):
        size = sizes[f"{name}_bytes"]
        spans.append((at, size))
        at += size
    first, second, rest, *scales = spans
    return Places(first, second, rest, scales[0], scales[1], at)


@functools.lru_cache(maxsize=4096)
def _spans(kind: str, weights: str, moments: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Number of elements, then offset and bytes of each array in the core's order."""
    count = math.prod(shape)
    found = places(kind, weights, moments, count)
    return (count, *found.rest, *found.moment1, *found.moment2, *found.scale1, *found.scale2)


@functools.lru_cache(maxsize=3)  # PyTorch counts for each thread of Python: two may step in turn, and a queue
def threads(count: int) -> _core.Optim:
    """The core with so many threads."""
    return _core.Optim(count)


def core() -> _core.Optim:
    """The core's threads: as many as PyTorch has."""
    return threads(min(torch.get_num_threads(), _MOST_THREADS))


def core_on(device: torch.device) -> _core.Optim:
    """What works on arrays of a device: the core's threads, or its kernels on the card's current stream."""
    return core() if device.type == "cpu" else cards.worker(device)


class Empty(Protocol):
    """Makes a tensor, as `torch.empty_strided` does."""

    def __call__(self, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """A tensor without gaps, whose elements mean nothing yet."""
        ...


in_memory: Final[Empty] = functools.partial(torch.empty_strided, device="cpu")
"""Makes tensors on the CPU, whatever the default device is."""


def maker_on(device: torch.device) -> Empty:
    """Makes tensors on a device."""
    return in_memory if device.type == "cpu" else functools.partial(torch.empty_strided, device=device)


# ---- bytes -------------------------------------------------------------------------------------------


def empty(form: Form, step: int = 0, make: Empty = in_memory) -> Entry:
    """State as it is before the first step, where `make` makes it."""
    state = make((form.places.total_bytes,), (1,), dtype=torch.uint8).zero_()
    return {STEP: step, BYTES: state, FORM: form}


def tensor_of(entry: Entry, parameter: Tensor | None, gradient: Tensor | None) -> tuple[int, ...]:
    """A parameter with its state as the core takes it, for its next step.

    Args:
        entry: the state.
        parameter: None where only moments are meant.
        gradient: with the parameter's strides; None likewise.
    """
    # Written out: this runs for every parameter in every step.
    kind, weights, moments, shape, _ = entry[FORM]
    at = entry[BYTES].data_ptr()
    count, rest, rest_size, m1, m1_size, m2, m2_size, s1, s1_size, s2, s2_size = _spans(
        kind, weights, moments, shape
    )
    # fmt: off
    return (
        count, 0, entry[STEP] + 1,
        0 if gradient is None else gradient.data_ptr(), 0 if gradient is None else gradient.nbytes,
        0 if parameter is None else parameter.data_ptr(), 0 if parameter is None else parameter.nbytes,
        at + rest, rest_size,
        at + m1, m1_size, at + m2, m2_size,
        at + s1, s1_size, at + s2, s2_size,
    )
    # fmt: on


def residual_of(entry: Entry) -> Tensor | None:
    """What the weights lack of their masters: a view with the parameter's shape, or None.

    Of state that is here; `offloaded_state.residual_of` is of any.
    """
    form: Form = entry[FORM]
    if not has_residual(form):
        return None
    offset, size = form.places.rest
    flat: Tensor = entry[BYTES][offset : offset + size]
    return residual_in(form, flat)


def has_residual(form: Form) -> bool:
    """Whether the weights lack something of their masters."""
    return form.weights in _RESIDUALS


def residual_in(form: Form, flat: Tensor) -> Tensor:
    """The same of its bytes alone, wherever they come from."""
    dtype = _RESIDUALS[form.weights]
    # With moments in FP32 in front of them, rests of 2 bytes are aligned.
    return flat.view(dtype).as_strided(form.shape, form.stride, flat.storage_offset() // dtype.itemsize)


# ---- to and from PyTorch's form ----------------------------------------------------------------------


def _span(tensor: Tensor | None) -> tuple[int, int] | None:
    return None if tensor is None else (tensor.data_ptr(), 4 * tensor.numel())


def _two(tensors: list[Tensor]) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    both: list[Tensor | None] = [*tensors, None]
    return _span(both[0]), _span(both[1])


def read(kind: Kind, entry: Entry, make: Empty | None = None) -> dict[str, Tensor]:
    """The moments in FP32, with the parameter's shape and strides, by PyTorch's names.

    Args:
        kind: of the optimizer.
        entry: the state.
        make: makes the moments; None: where the state is. If that is elsewhere, the state's bytes come there:
            they are fewer.
    """
    form, make = entry[FORM], make or maker_on(entry[BYTES].device)
    found = [make(form.shape, form.stride, dtype=torch.float32) for _ in kind.moments]
    there = _moved(entry, found[0].device)  # held while the core works on it
    core_on(found[0].device).moments_read(form.rule, tensor_of(there, None, None), *_two(found))
    return dict(zip(kind.moments, found, strict=True))


def _moved(entry: Entry, device: torch.device) -> Entry:
    """A state whose bytes are on a device: itself, if they are."""
    return entry if entry[BYTES].device == device else {**entry, BYTES: entry[BYTES].to(device)}


def write(kind: Kind, entry: Entry, moments: Mapping[str, Tensor]) -> None:
    """Sets the moments from PyTorch's, which may have any type and strides.

    Raises:
        ValueError: one has another shape than the parameter.
    """
    form: Form = entry[FORM]
    state: Tensor = entry[BYTES]
    is_here = all(moments[name].device == state.device for name in kind.moments)
    device = state.device if is_here else torch.device("cpu")  # the bytes are fewer than the moments
    given = []
    for name in kind.moments:
        value = moments[name]
        if tuple(value.shape) != form.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; its parameter has shape {tuple(form.shape)}"
            )
        given.append(_as_read(value.detach(), form, device))
    there = _moved(entry, device)
    core_on(device).moments_write(form.rule, tensor_of(there, None, None), *_two(given))
    if there is not entry:
        state.copy_(there[BYTES])


def _as_read(value: Tensor, form: Form, device: torch.device) -> Tensor:
    """A moment as `read` returns it: itself, if it is so already."""
    if (
        type(value) is Tensor
        and (value.dtype, value.device, value.layout) == (torch.float32, device, torch.strided)
        and value.stride() == form.stride
        and not (value.is_neg() or value.data_ptr() % 4)
    ):
        return value
    return maker_on(device)(form.shape, form.stride, dtype=torch.float32).copy_(value)


def from_standard(kind: Kind, form: Form, standard: Mapping[str, Any], make: Empty = in_memory) -> Entry:
    """Our state in place of PyTorch's; what else lies there is taken along.

    Args:
        kind: of the optimizer.
        form: of our state.
        standard: PyTorch's.
        make: makes the bytes, where the parameter is.

    Raises:
        ValueError: it is not PyTorch's, or as `write`.
    """
    names = ("step", *kind.moments) if kind.counts else kind.moments
    own = {name: value for name, value in standard.items() if name not in names}
    lacking = [name for name in names if standard.get(name) is None]
    if lacking and standard and kind.name != "sgd":  # whose momentum may not have begun
        raise ValueError(
            f"state of a parameter has no {lacking[0]}, but {', '.join(map(str, standard))}: "
            "it is of another optimizer, or of another implementation of this one"
        )
    if lacking:
        return {**own, **empty(form, make=make)}
    entry = empty(form, int(standard["step"]) if kind.counts else 1, make)
    write(kind, entry, standard)
    return {**own, **entry}


def to_standard(
    kind: Kind,
    entry: Entry,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    make: Empty | None = None,
) -> dict[str, Any]:
    """PyTorch's state in place of ours; what else lies there is taken along.

    Args:
        kind: of the optimizer.
        entry: our state.
        dtype: of the moments.
        device: of the moments.
        make: makes the moments in FP32; None: where the state is.
    """
    standard = {name: value for name, value in entry.items() if name not in (STEP, BYTES, FORM)}
    if entry[STEP] == 0:
        return standard
    if kind.counts:
        wide = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
        standard["step"] = torch.tensor(float(entry[STEP]), dtype=wide, device="cpu")
    for name, value in read(kind, entry, make).items():
        standard[name] = value.to(device, dtype)
    return standard


def reformed(kind: Kind, entry: Entry, form: Form) -> Entry:
    """State for a parameter that has another dtype or another order of dimensions than before.

    Raises:
        ValueError: it has another shape.
    """
    old: Form = entry[FORM]
    if form.shape != old.shape:
        raise ValueError(
            f"a parameter has shape {tuple(form.shape)}; its optimizer state is for {tuple(old.shape)}: give "
            "the optimizer the new parameter instead, or drop the state of this one"
        )
    made = {**entry, **empty(form, entry[STEP], maker_on(entry[BYTES].device))}
    if entry[STEP]:
        write(kind, made, read(kind, entry))
    before, after = residual_of(entry), residual_of(made)
    if before is not None and after is not None and before.dtype == after.dtype:
        after.copy_(before)
    return made
