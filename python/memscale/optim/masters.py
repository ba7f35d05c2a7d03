# SPDX-License-Identifier: Apache-2.0
"""Weights that become BF16 while they are trained, and lose nothing of their FP32 value.

    master = weight, its upper 16 bits rounded │ rest, what the weight lacks of it

The parameter stays the same object; its data changes. The rest of 16 bits is kept here until the optimizer
steps the parameter, and goes into the optimizer's state then: as it is, or rounded to 8 bits beside moments
in 8 bits. So up to that step every bit of the FP32 weight is there, and afterwards what was trained.

While a weight is BF16, whoever saves or copies it gets the master: `state_dict`, `pickle`, `copy.deepcopy`.
`load_state_dict` sets the master. `optimizer.state_dict()` has no rest of such weights: the model's has it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from memscale.optim.arrays import FORM, core, rest_of
from memscale.optim.away_state import brought_back
from memscale.optim.kinds import gradient_refusal, group_refusal, parameter_refusal
from memscale.optim.pieces import AWAY
from memscale.optim.saved import KEY
from memscale.optim.steps import entry_of

if TYPE_CHECKING:
    from memscale.optim.taken import _Taken

_MARK: Final = "_memscale_master"
_WHOLE: Final = "master_rest16"
_NARROW: Final = "master_rest8"
_CHUNK: Final = 1 << 14  # elements that are rounded at a time


class _Master:
    """What belongs to one BF16 weight. It lies on the parameter, and goes with it.

    Attributes:
        waiting: the rest of 16 bits, until the optimizer's next step takes it.
    """

    def __init__(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer, waiting: Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._optimizer = weakref.ref(optimizer)
        self.waiting: Tensor | None = waiting
        self._shown: weakref.ref[Tensor] | None = None
        self._shown_at = (0, 0)

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self._parameter()
        assert parameter is not None  # it holds this
        return parameter

    def rest(self) -> Tensor | None:
        """The rest, wherever it lies; None where there is none: then the weight is its own master."""
        if self.waiting is not None:
            return self.waiting
        optimizer = self._optimizer()
        entry = {} if optimizer is None else optimizer.state.get(self.parameter, {})
        if AWAY in entry:
            entry = brought_back(entry)
        return rest_of(entry) if FORM in entry else None

    def value(self) -> Tensor:
        """The master, in FP32."""
        parameter, rest = self.parameter, self.rest()
        if rest is None or parameter.dtype is not torch.bfloat16 or rest.shape != parameter.shape:
            return parameter.detach().float()
        if rest.stride() != parameter.stride():
            rest = torch.empty_like(parameter, dtype=rest.dtype).copy_(rest)
        whole = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
        form = _WHOLE if rest.dtype is torch.int16 else _NARROW
        core().join(form, _span(parameter), _span(rest), _span(whole))
        return whole

    def shown(self) -> Tensor:
        """The master for a state dict: the same tensor until something changes, as tied weights are one."""
        known = None if self._shown is None else self._shown()
        if known is None or self._shown_at != (self.parameter._version, known._version):
            known = self.value()
            self._shown, self._shown_at = weakref.ref(known), (self.parameter._version, known._version)
        return known

    def set(self, value: Tensor) -> None:
        """Sets the master, and the weight with it."""
        parameter = self.parameter
        whole = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False).copy_(value.detach())
        weight, self.waiting = _split(whole)
        with torch.no_grad():
            parameter.copy_(weight)

    def wait(self) -> None:
        """Takes the rest out of the optimizer's state, which is about to be exchanged."""
        rest = self.rest()
        if self.waiting is None and rest is not None:
            wide = torch.empty_like(self.parameter, dtype=torch.int16, requires_grad=False)
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


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _split(whole: Tensor) -> tuple[Tensor, Tensor]:
    """An FP32 tensor without gaps as weight and rest of 16 bits."""
    weight = torch.empty_like(whole, dtype=torch.bfloat16, requires_grad=False)
    rest = torch.empty_like(whole, dtype=torch.int16, requires_grad=False)
    core().split(_WHOLE, _span(whole), _span(weight), _span(rest))
    return weight, rest


def _master_of(parameter: Tensor) -> _Master | None:
    return vars(parameter).get(_MARK)


def is_half(parameter: Tensor) -> bool:
    """Whether a parameter has become BF16 here."""
    return _MARK in vars(parameter)


def dtype_of(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter without this module."""
    return torch.float32 if is_half(parameter) else parameter.dtype


# ---- to BF16 and back --------------------------------------------------------------------------------


@torch.no_grad()
def to_bf16(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Makes an FP32 weight BF16. A gradient that is there becomes BF16, too.

    Args:
        optimizer: steps it, and has our state by its next step.
        parameter: of the optimizer; without gaps in memory.
    """
    weight, rest = _split(parameter)
    _exchange(parameter, weight)
    master = _Master(parameter, optimizer, rest)
    for name, value in zip(_OWN, (master, master.copied, master.reduced), strict=True):
        vars(parameter)[name] = value


@torch.no_grad()
def to_fp32(parameter: nn.Parameter) -> None:
    """Makes it FP32 again: its master, bit for bit. Its rest in the optimizer's state means nothing then."""
    master = _master_of(parameter)
    if master is None:
        return
    if parameter.dtype is torch.bfloat16:  # not if somebody has converted the model
        _exchange(parameter, master.value())
    for name in _OWN:
        del vars(parameter)[name]


def _exchange(parameter: nn.Parameter, data: Tensor) -> None:
    """Gives a parameter other data. A graph that has saved it raises PyTorch's own error in its backward."""
    gradient = parameter.grad
    parameter.data = data
    torch.autograd.graph.increment_version(parameter)
    if gradient is not None and type(gradient) is Tensor:
        gradient.data = gradient.data.to(data.dtype)


# ---- in the optimizer --------------------------------------------------------------------------------


def prepare(optimizer: _Taken, group: dict[str, Any]) -> None:
    """Makes the weights of a group ready for a step: rests that wait go into the optimizer's state.

    What PyTorch has to step (sparse gradients, a switch of the group) becomes FP32: it would lose the master.
    """
    waits = False
    for parameter in group["params"]:
        master = _master_of(parameter)
        if master is not None and parameter.grad is not None:
            waits |= master.waiting is not None
            if not _is_ours(optimizer, group, parameter):
                to_fp32(parameter)
    if waits:
        _settle_all(optimizer)


def _is_ours(optimizer: _Taken, group: dict[str, Any], parameter: Tensor) -> bool:
    """Whether our step does a parameter that has a gradient."""
    return parameter.grad is not None and not (
        group_refusal(optimizer._memscale_kind, group)
        or parameter_refusal(parameter)
        or gradient_refusal(parameter, parameter.grad)
    )


def _settle_all(optimizer: _Taken) -> None:
    """The largest first: while one is at it, its rest is there twice, and those of the others still once."""
    found = [
        (parameter, master)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (master := _master_of(parameter)) is not None
        and master.waiting is not None
        and _is_ours(optimizer, group, parameter)
    ]
    for parameter, master in sorted(found, key=lambda pair: -pair[0].numel()):
        _settle(optimizer, parameter, master)


def _settle(optimizer: _Taken, parameter: nn.Parameter, master: _Master) -> None:
    if parameter.dtype is not torch.bfloat16:  # somebody has converted the model: the weight is all there is
        to_fp32(parameter)
        return
    if AWAY in optimizer.state.get(parameter, {}):  # its step sends it away again
        optimizer.state[parameter] = brought_back(optimizer.state[parameter])
    rest = rest_of(entry_of(optimizer, parameter))
    assert rest is not None and master.waiting is not None
    if rest.dtype is torch.int16:
        rest.copy_(master.waiting)
    else:
        _round(parameter, master.waiting, rest)
    master.waiting = None


def _round(parameter: nn.Parameter, waiting: Tensor, rest: Tensor) -> None:
    """Weights with a rest of 16 bits become such with 8, to nearest, a part at a time."""
    if waiting.stride() != parameter.stride():
        waiting = torch.empty_like(parameter, dtype=torch.int16).copy_(waiting)
    flat = [_flat(tensor) for tensor in (parameter.detach(), waiting, rest)]
    whole = torch.empty(min(_CHUNK, parameter.numel()))
    for weight, wide, narrow in zip(*(tensor.split(_CHUNK) for tensor in flat), strict=True):
        part = whole[: weight.numel()]
        core().join(_WHOLE, _span(weight), _span(wide), _span(part))
        core().split(_NARROW, _span(part), _span(weight), _span(narrow))


def _flat(tensor: Tensor) -> Tensor:
    """A tensor without gaps in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _masters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, _Master]]:
    """Masters of an optimizer's weights, with their places among its parameters."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    for place, parameter in enumerate(parameters):
        master = _master_of(parameter)
        if master is not None:
            yield place, master


def keep_rests(optimizer: torch.optim.Optimizer) -> None:
    """Takes rests out of an optimizer's state, which is about to be replaced by a saved one."""
    for _, master in _masters(optimizer):
        master.wait()


def without_rests(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict without rests of weights that the model's state dict has in FP32."""
    beside = state_dict.get(KEY)
    places = {place for place, _ in _masters(optimizer)}
    if beside is None or not places:
        return state_dict
    state = {
        place: {name: value for name, value in part.items() if name != "rest" or place not in places}
        for place, part in beside["state"].items()
    }
    return {**state_dict, KEY: {**beside, "state": state}}


# ---- in the model's state dict -----------------------------------------------------------------------


class _ModuleHook:
    """Lies on a module in front of one of its methods. Saved with the module, it is that method."""

    name = ""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.before = vars(module).get(self.name)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    def put(self) -> None:
        """From now on it is called."""
        vars(self.module)[self.name] = self

    def remove(self) -> None:
        """As before, unless somebody else's lies on top."""
        module = self._module()
        if module is None or vars(module).get(self.name) is not self:
            return
        if self.before is None:
            del vars(module)[self.name]
        else:
            vars(module)[self.name] = self.before

    def original(self, *args: Any) -> Any:
        """Calls the method."""
        if self.before is not None:
            return self.before(*args)
        return getattr(type(self.module), self.name)(self.module, *args)

    def masters(self, prefix: str) -> Iterator[tuple[str, _Master]]:
        """Masters of the module's own weights, by their keys."""
        for name, parameter in self.module._parameters.items():
            master = None if parameter is None else _master_of(parameter)
            if master is not None:
                yield prefix + name, master

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModuleHook:
        return type(self)(copy.deepcopy(self.module, memo))  # whose weights are FP32: it does nothing

    def __reduce__(self) -> Any:
        return getattr, (self.module, self.name)


class _Saves(_ModuleHook):
    name = "_save_to_state_dict"

    def __call__(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.original(destination, prefix, keep_vars)
        for key, master in self.masters(prefix):
            if not keep_vars and key in destination:
                destination[key] = master.shown()


class _Loads(_ModuleHook):
    name = "_load_from_state_dict"

    def __call__(self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, *args: Any) -> None:
        self.original(state_dict, prefix, metadata, *args)
        for key, master in self.masters(prefix):  # those that were assigned to are other parameters now
            value = state_dict.get(key)
            if isinstance(value, Tensor) and value.shape == master.parameter.shape and not value.is_meta:
                master.set(value)


def hooks_for(parameters: Iterable[nn.Parameter], model: nn.Module) -> list[_ModuleHook]:
    """What makes a model's state dict have the masters of some parameters; not put yet."""
    wanted = {id(parameter) for parameter in parameters}
    owners = [
        module
        for module in model.modules()
        if any(id(parameter) in wanted for parameter in module._parameters.values())
    ]
    return [kind(module) for module in owners for kind in (_Saves, _Loads)]


# ---- in a trace --------------------------------------------------------------------------------------


def told_dtypes(model: nn.Module, half: frozenset[str]) -> dict[int, torch.dtype]:
    """Dtypes in a traced step, by id, of parameters that have another one at present.

    Args:
        model: with its real parameters.
        half: names of those that are BF16 in the step.
    """
    told = {}
    for name, parameter in model.named_parameters():
        dtype = torch.bfloat16 if name in half else dtype_of(parameter)
        if dtype is not parameter.dtype:
            told[id(parameter)] = dtype
    return told


@contextmanager
def as_told(model: nn.Module, half: frozenset[str]) -> Iterator[None]:
    """Runs the block, a real step that is thrown away, with parameters of the dtypes that are told."""
    told = told_dtypes(model, half)
    before = [(value, value.data) for value in model.parameters() if id(value) in told]
    try:
        for parameter, data in before:
            master = _master_of(parameter)
            parameter.data = data.to(told[id(parameter)]) if master is None else master.value()
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
