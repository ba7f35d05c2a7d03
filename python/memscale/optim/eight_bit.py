# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in 8 bits: our own in the caller's optimizer, or one of `bitsandbytes` or `torchao`.

                               parameters on the CPU or a card    where our own cannot be
    torch.optim.AdamW, Adam    our own                            bitsandbytes, else torchao
    torch.optim.SGD, Lion      our own                            bitsandbytes

Our own state (`memscale.optim`) is put into the optimizer that there is, with all its options, hooks and
schedulers, whether it has stepped or not. Its steps run where the parameters are: on a card by kernels that
are compiled when it is first used, which fails without NVIDIA's compiler.

Both packages keep each moment as one byte per element and a scale per 256 elements, and compute the update
in FP32. They are optional. What they cannot take over stays with the standard optimizer, and the reason is
said: a step taken differently from what the caller configured would be worse than state in 32 bits. So an
option that the 8-bit class would silently leave out (`nesterov`, `maximize`, weight decay as part of the
gradient) is a reason, as is state that is there already, or somebody who holds the old optimizer (a
scheduler, a hook). Whether an implementation works on this device is found out by letting it step on a small
parameter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from memscale.optim import moments_of, take_over

OWN: Final = "memscale"
"""Name of our own state among the backends."""

_PROBE_ELEMENTS: Final = 4096
"""The smallest parameter whose state both packages keep in 8 bits."""

_IGNORED: Final = frozenset({"params", "param_names", "foreach", "fused"})
"""Of a group: its parameters, and how PyTorch's own optimizers loop over them."""

_CARRIED: Final = {
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "sgd": ("lr", "momentum", "weight_decay"),
    "lion": ("lr", "betas", "weight_decay"),
}
"""What of a group decides the step, by kind of optimizer."""

_SWITCHES: Final = (
    "amsgrad", "maximize", "capturable", "differentiable", "nesterov", "dampening",
)  # fmt: skip
"""Options of PyTorch's groups that are off by default, and that no 8-bit implementation has."""


class _UnsupportedError(Exception):
    """The reason why an optimizer stays as it is."""


@dataclass(frozen=True)
class _Source:
    """The caller's optimizer as the conversions see it.

    Attributes:
        optimizer: itself.
        kind: "adam", "sgd" or "lion".
        decoupled: weight decay acts on the weights and not through the gradient (AdamW, Lion).
    """

    optimizer: torch.optim.Optimizer
    kind: str
    decoupled: bool

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.groups for parameter in group["params"]]

    def any(self, name: str) -> bool:
        """Whether an option is on in some group."""
        return any(bool(group.get(name)) for group in self.groups)


def with_8bit_state(
    optimizer: torch.optim.Optimizer, backend: str = "auto"
) -> tuple[torch.optim.Optimizer, str]:
    """The optimizer to use in place of the caller's.

    Args:
        optimizer: any. With our own state it is patched in place; state that it has is converted by
            `memscale.optim.convert_state` or its next step. Otherwise it is not changed, and a new one has
            the same parameters in the same groups with the same settings, frozen parameters included.
        backend: "memscale" for our own state, "bitsandbytes", "torchao", or "auto" for the first that can;
            our own is among these where all parameters are on the CPU or on cards.

    Returns:
        The optimizer to use, the given one where nothing could be done; and one line that says which and why.
        Never raises for a package, a device or an optimizer that does not go together with the others.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> optimizer, line = with_8bit_state(optimizer)
    """
    name = type(optimizer).__name__
    if is_8bit(optimizer):
        return optimizer, f"8-bit optimizer state: {name} has it already"
    reasons: list[str] = []
    backends = backends_of(optimizer) if backend == "auto" else (backend,)
    if OWN in backends:
        reason = take_over(optimizer, convert=False)
        if not reason:
            return optimizer, f"8-bit optimizer state: {OWN}'s, {name} goes on with it"
        reasons.append(f"{OWN}: {reason}")
    made = _from_package(optimizer, [package for package in backends if package != OWN], reasons)
    if made is None:
        return optimizer, f"8-bit optimizer state: not used, {name} stays as it is ({'; '.join(reasons)})"
    line = f"8-bit optimizer state: {package_of(made)}'s {type(made).__name__} in place of {name}"
    return made, f"{line} ({'; '.join(reasons)})" if reasons else line


def backends_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """What can be asked, the best first. Our own step runs on the CPU and on cards."""
    devices = {value.device.type for group in optimizer.param_groups for value in group["params"]}
    return (OWN, *_PACKAGES) if devices and devices <= {"cpu", "cuda"} else tuple(_PACKAGES)


def _from_package(
    optimizer: torch.optim.Optimizer, packages: Iterable[str], reasons: list[str]
) -> torch.optim.Optimizer | None:
    """An optimizer of the first package that can; otherwise why none can, in `reasons`."""
    wanted = list(packages)
    if not wanted:
        return None
    try:
        source = _source(optimizer)
    except _UnsupportedError as reason:
        reasons.append(f"{' and '.join(wanted)}: {reason}" if reasons else str(reason))
        return None
    for package in wanted:
        try:
            made = _PACKAGES[package](source)
            _check_steps(made, source.parameters)
        except _UnsupportedError as reason:
            reasons.append(f"{package}: {reason}")
        except Exception as error:  # an untried combination of package, PyTorch and device
            reasons.append(f"{package}: {type(error).__name__}: {_first_line(error)}")
        else:
            return made
    return None


def package_of(optimizer: torch.optim.Optimizer) -> str | None:
    """The package that an optimizer's class comes from, "bitsandbytes" or "torchao"; None for any other."""
    for kind in type(optimizer).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in _PACKAGES:
            return package
    return None


def is_8bit(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps its state in 8 bits or less."""
    if moments_of(optimizer) == "code8":
        return True
    package = package_of(optimizer)
    if package == "bitsandbytes":
        return int(getattr(getattr(optimizer, "args", None), "optim_bits", 32)) == 8
    return package == "torchao" and hasattr(optimizer, "block_size")


# ---- what the caller has -----------------------------------------------------------------------------


def _source(optimizer: torch.optim.Optimizer) -> _Source:
    kind, decoupled = _kind(optimizer)
    if any(optimizer.state.values()):
        raise _UnsupportedError("it has stepped already, and its state would be lost")
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        raise _UnsupportedError("a learning-rate scheduler holds it; make the scheduler afterwards")
    if any(hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks")):
        raise _UnsupportedError("hooks are registered on it; register them afterwards")
    if "step" in vars(optimizer):
        raise _UnsupportedError("its step has been replaced")
    source = _Source(optimizer, kind, decoupled)
    for name in _SWITCHES:
        if source.any(name):
            raise _UnsupportedError(f"no 8-bit implementation has {name}")
    for parameter in source.parameters:
        if type(parameter.data) is not Tensor or parameter.layout is not torch.strided:
            raise _UnsupportedError("its parameters are not ordinary tensors")
    return source


def _kind(optimizer: torch.optim.Optimizer) -> tuple[str, bool]:
    """Kind of optimizer, and whether its weight decay is decoupled. Subclasses may step differently."""
    kind = type(optimizer)
    if kind is torch.optim.AdamW:
        return "adam", True
    if kind is torch.optim.Adam:
        decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
        if len(decoupled) > 1:
            raise _UnsupportedError("its groups decay weights in different ways")
        return "adam", True in decoupled
    if kind is torch.optim.SGD:
        if not all(group["momentum"] for group in optimizer.param_groups):
            raise _UnsupportedError("without momentum there is no state")
        return "sgd", False
    # Not PyTorch's; that of lion-pytorch has these settings and no others.
    if kind.__name__ == "Lion" and set(optimizer.defaults) == set(_CARRIED["lion"]):
        if getattr(optimizer, "decoupled_wd", False):
            raise _UnsupportedError("its decoupled_weight_decay is not in 8-bit implementations")
        return "lion", True
    raise _UnsupportedError("only AdamW, Adam, SGD with momentum and Lion have an 8-bit counterpart")


# ---- the packages ------------------------------------------------------------------------------------


def _bitsandbytes(source: _Source) -> torch.optim.Optimizer:
    names = {"adam": "AdamW8bit" if source.decoupled else "Adam8bit", "sgd": "SGD8bit", "lion": "Lion8bit"}
    kind = _imported("bitsandbytes", "bitsandbytes.optim", names[source.kind])
    if source.kind == "adam" and not source.decoupled and source.any("weight_decay"):
        raise _UnsupportedError("its Adam decays weights as AdamW does")
    for name in _CARRIED[source.kind]:
        if any(isinstance(group[name], Tensor) for group in source.groups):
            raise _UnsupportedError(f"{name} is a tensor")
    groups = _groups(source)
    if source.kind != "sgd":
        return _with_names(kind(groups), source)
    # Its groups know the momentum as the first of `betas`, which the constructor sets for all of them.
    for group in groups:
        group["betas"] = (group.pop("momentum"), 0.0)
    first = groups[0]
    return _with_names(kind(groups, lr=first["lr"], momentum=first["betas"][0]), source)


def _torchao(source: _Source) -> torch.optim.Optimizer:
    if source.kind != "adam":
        raise _UnsupportedError("only AdamW and Adam")
    if any(isinstance(beta, Tensor) for group in source.groups for beta in group["betas"]):
        raise _UnsupportedError("the betas are tensors")
    kind = _imported("torchao", "torchao.optim", "AdamW8bit" if source.decoupled else "Adam8bit")
    return _with_names(kind(_groups(source)), source)


_PACKAGES: Final[Mapping[str, Callable[[_Source], torch.optim.Optimizer]]] = {
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
}
"""In the order in which "auto" asks them. bitsandbytes steps without compiling anything."""


def _imported(package: str, module: str, name: str) -> Any:
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == package:
            raise _UnsupportedError("not installed") from None
        raise
    if found is None:
        raise _UnsupportedError(f"the installed version has no {name}")
    return found


def _groups(source: _Source) -> list[dict[str, Any]]:
    """Groups for a constructor: parameters, settings, and what the caller keeps there beside them."""
    known = _IGNORED.union(_CARRIED[source.kind], _SWITCHES, {"decoupled_weight_decay"})
    groups = []
    for group in source.groups:
        settings = {name: group[name] for name in _CARRIED[source.kind]}
        own = {name: value for name, value in group.items() if name not in known}
        groups.append({**own, **settings, "params": list(group["params"])})
    return groups


def _with_names(made: torch.optim.Optimizer, source: _Source) -> torch.optim.Optimizer:
    """Gives groups their parameters' names back: constructors of other packages do not take them."""
    for group, before in zip(made.param_groups, source.groups, strict=True):
        if "param_names" in before:
            group["param_names"] = list(before["param_names"])
    return made


# ---- does it work here -------------------------------------------------------------------------------


def _check_steps(made: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Lets an optimizer like `made` step on a parameter of every device and dtype that it is to train."""
    group = {name: value for name, value in made.param_groups[0].items() if name not in _IGNORED}
    for device, dtype in sorted({(str(item.device), item.dtype) for item in parameters}, key=str):
        if not dtype.is_floating_point:
            raise _UnsupportedError(f"parameters of {dtype}")
        trial = torch.nn.Parameter(torch.ones(_PROBE_ELEMENTS, dtype=dtype, device=device))
        settings = {**group, "params": [trial], "lr": 0.01}
        twin = type(made)([settings], **_required(made))
        for _ in range(2):
            trial.grad = torch.ones_like(trial)
            twin.step()
        state = [item for item in twin.state[trial].values() if isinstance(item, Tensor)]
        if not any(type(item) is not Tensor or item.dtype == torch.uint8 for item in state):
            raise _UnsupportedError(f"it keeps no 8-bit state on {device} for {dtype}")
        if not (trial.isfinite().all() and (trial < 1).all()):
            raise _UnsupportedError(f"its step on {device} for {dtype} goes wrong")


def _required(made: torch.optim.Optimizer) -> dict[str, Any]:
    """What a constructor wants beside its groups."""
    if type(made).__name__ != "SGD8bit":
        return {}
    return {"lr": 0.01, "momentum": made.param_groups[0]["betas"][0]}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else ""
