# SPDX-License-Identifier: Apache-2.0
"""Weights that are BF16 while they are trained; the FP32 value is kept exactly.

    master = weight, its upper 16 bits rounded │ rest, what the weight lacks of it

The parameter stays the same object; its data changes. The rest of 16 bits waits until the optimizer steps the
parameter, and goes into the optimizer's state then: as it is, or rounded to 8 bits beside moments in 8 bits.
So up to that step every bit of the FP32 weight is there, and afterwards what was trained. It waits where a
state dict of the optimizer would be: in host memory, or in files if the optimizer's state is in one.

While a weight is BF16, saving or copying it gives the master: `state_dict`, `pickle`, `copy.deepcopy`.
`load_state_dict` sets the master. `optimizer.state_dict()` has no rest of such weights: the model's has it.

`optim/master_residuals.py` has the rests in the optimizer's state, `master_hooks.py` the model's state dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from memscale.optim.arrays import FORM, core_on, in_memory, maker_on
from memscale.optim.offload.pieces import HOST
from memscale.optim.offload.state import residual_of

if TYPE_CHECKING:
    from memscale.optim.arrays import Empty

_MARK: Final = "_memscale_master"
WHOLE: Final = "master_rest16"
NARROW: Final = "master_rest8"


class Master:
    """What belongs to one BF16 weight. It lies on the parameter, and goes with it.

    Attributes:
        waiting: the rest of 16 bits, until the optimizer's next step takes it.
    """

    def __init__(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer, waiting: Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._optimizer = weakref.ref(optimizer)
        self.waiting: Tensor | None = waiting
        self._shown: weakref.ref[Tensor] | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The weight."""
        parameter = self._parameter()
        assert parameter is not None  # it holds this
        return parameter

    def rest(self) -> Tensor | None:
        """The rest, wherever it lies; None where there is none: then the weight is its own master."""
        if self.waiting is not None:
            return self.waiting
        optimizer = self._optimizer()
        entry = {} if optimizer is None else optimizer.state.get(self.parameter, {})
        return residual_of(entry) if FORM in entry else None

    def empty(self) -> Tensor:
        """What the rest of 16 bits can wait in."""
        parameter = self.parameter
        return self._make()(parameter.shape, parameter.stride(), dtype=torch.int16)

    def _make(self) -> Empty:
        """Makes tensors that take nothing of what the weight lies in and is short of."""
        optimizer: Any = self._optimizer()
        make = getattr(optimizer, "_memscale_empty", None)
        return in_memory if make is None else make()

    def wait_elsewhere(self) -> None:
        """Has the rest wait where the optimizer's state goes from now on.

        Raises:
            OSError: there is no room for it.
        """
        if self.waiting is not None:
            self.waiting = self.empty().copy_(self.waiting)

    def value(self, make: Empty | None = None) -> Tensor:
        """The master, in FP32, in a tensor that `make` makes; None: where the weight is."""
        parameter, rest = self.parameter, self.rest()
        if rest is None or parameter.dtype is not torch.bfloat16 or rest.shape != parameter.shape:
            return parameter.detach().float()
        make = make or maker_on(parameter.device)
        whole = make(parameter.shape, parameter.stride(), dtype=torch.float32)
        form = WHOLE if rest.dtype is torch.int16 else NARROW
        weight, rest = _beside(parameter.detach(), whole), _beside(rest, whole)
        core_on(whole.device).join(form, span(weight), span(rest), span(whole))
        return whole

    def shown(self) -> Tensor:
        """The master for a state dict: the same tensor until something changes, as tied weights are one.

        That of a weight on a card lies in host memory, as the optimizer's state dict does.
        """
        known = None if self._shown is None else self._shown()
        now = self.value(self._make())
        # What is written through `.data` has no version: averages of weights are swapped in like that.
        if known is not None and torch.equal(known.view(torch.int32), now.view(torch.int32)):
            return known
        self._shown = weakref.ref(now)
        return now

    def set(self, value: Tensor) -> None:
        """Sets the master, and the weight with it."""
        parameter = self.parameter
        whole = in_memory(parameter.shape, parameter.stride(), dtype=torch.float32).copy_(value.detach())
        weight, self.waiting = _split(whole, self.empty())
        with torch.no_grad():
            parameter.copy_(weight)

    def wait(self) -> None:
        """Takes the rest out of the optimizer's state, which is about to be exchanged."""
        rest = self.rest()
        if self.waiting is None and rest is not None:
            wide = self.empty()
            self.waiting = wide.copy_(rest) if rest.dtype is torch.int16 else wide.copy_(rest).mul_(256)

    def copied(self, memo: dict[int, Any]) -> nn.Parameter:
        """For `copy.deepcopy`: an FP32 parameter."""
        parameter = self.parameter
        if id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(self.value(), parameter.requires_grad)
        return memo[id(parameter)]  # type: ignore[no-any-return]

    def reduced(self, protocol: Any) -> Any:
        """For `pickle`: an FP32 parameter, with what others have put on this one."""
        parameter = self.parameter
        plain = nn.Parameter(self.value(), parameter.requires_grad)
        plain.__dict__.update({key: value for key, value in vars(parameter).items() if key not in _OWN})
        return plain.__reduce_ex__(protocol)


_OWN: Final = (_MARK, "__deepcopy__", "__reduce_ex__")
"""What lies on a parameter. `copy` and `pickle` look for the last two on the object first."""


def span(tensor: Tensor) -> tuple[int, int]:
    """A tensor without gaps as the core wants it: address and bytes."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _split(whole: Tensor, rest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """An FP32 tensor without gaps, in host memory, as weight and rest of 16 bits."""
    weight = torch.empty_like(whole, dtype=torch.bfloat16, requires_grad=False)
    if rest is None:
        rest = torch.empty_like(whole, dtype=torch.int16, requires_grad=False)
    core_on(whole.device).split(WHOLE, span(whole), span(weight), span(rest))
    return weight, rest


def _beside(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor on the device of another one and with its strides: itself, if it is so."""
    if tensor.device == other.device and tensor.stride() == other.stride():
        return tensor
    return maker_on(other.device)(other.shape, other.stride(), dtype=tensor.dtype).copy_(tensor)


def master_of(parameter: Tensor) -> Master | None:
    """What belongs to a parameter that has become BF16; None for others."""
    return vars(parameter).get(_MARK)


def is_half(parameter: Tensor) -> bool:
    """Whether a parameter has become BF16 here."""
    return _MARK in vars(parameter)


def dtype_of(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter without this module."""
    return torch.float32 if is_half(parameter) else parameter.dtype


# ---- to BF16 and back --------------------------------------------------------------------------------


@torch.no_grad()
def to_bf16(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, device: torch.device | None = None
) -> None:
    """Makes an FP32 weight BF16. A gradient that is there becomes BF16, too.

    Args:
        optimizer: steps it, and has our state by its next step.
        parameter: of the optimizer; without gaps in memory.
        device: of its data then; None: as before.
    """
    weight, rest = _split(parameter.detach().to(HOST))
    _exchange(parameter, weight.to(device or parameter.device))
    master = Master(parameter, optimizer, rest)
    for name, value in zip(_OWN, (master, master.copied, master.reduced), strict=True):
        vars(parameter)[name] = value


@torch.no_grad()
def to_fp32(parameter: nn.Parameter, device: torch.device | None = None) -> None:
    """Makes it FP32 again: its master, bit for bit. Its rest in the optimizer's state means nothing then.

    Args:
        parameter: that is BF16 here; others stay as they are.
        device: of its data then; None: as before.
    """
    master = master_of(parameter)
    if master is None:
        return
    if parameter.dtype is torch.bfloat16:  # not if somebody has converted the model
        _exchange(parameter, master.value(maker_on(device or parameter.device)))
    for name in _OWN:
        del vars(parameter)[name]


def part_from_others(optimizer: torch.optim.Optimizer) -> None:
    """Before a step: weights whose masters another optimizer steps become FP32, or steps in BF16 lose most.

    Not where this one only goes around the other (SAM, Lookahead).
    """
    around = {id(value) for value in vars(optimizer).values()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            master = master_of(parameter)
            if master is None:
                continue
            other = master._optimizer()
            if other is not optimizer and (other is None or id(other) not in around):
                to_fp32(parameter)


def _exchange(parameter: nn.Parameter, data: Tensor) -> None:
    """Gives a parameter other data. A graph that has saved it raises PyTorch's own error in its backward."""
    gradient = parameter.grad
    parameter.data = data
    torch.autograd.graph.increment_version(parameter)
    if gradient is not None and type(gradient) is Tensor:
        gradient.data = gradient.data.to(data.dtype)


# ---- in a trace --------------------------------------------------------------------------------------


def planned_dtypes(model: nn.Module, half: frozenset[str]) -> dict[int, torch.dtype]:
    """Dtypes in a traced step, by id, of parameters that have another one at present.

    Args:
        model: with its real parameters.
        half: names of those that are BF16 in the step.
    """
    dtypes = {}
    for name, parameter in model.named_parameters():
        dtype = torch.bfloat16 if name in half else dtype_of(parameter)
        if dtype is not parameter.dtype:
            dtypes[id(parameter)] = dtype
    return dtypes


@contextmanager
def as_planned(model: nn.Module, half: frozenset[str]) -> Iterator[None]:
    """Runs the block, a real step that is thrown away, with parameters of the dtypes that the step has."""
    dtypes = planned_dtypes(model, half)
    before = [(value, value.data) for value in model.parameters() if id(value) in dtypes]
    try:
        for parameter, data in before:
            master = master_of(parameter)
            parameter.data = data.to(dtypes[id(parameter)]) if master is None else master.value()
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
