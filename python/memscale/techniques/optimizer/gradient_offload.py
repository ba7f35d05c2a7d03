# SPDX-License-Identifier: Apache-2.0
"""Gradient release: a gradient leaves the device when it is complete, and comes back when it is used.

    backward    a hook on each parameter: its gradient is complete, and its bytes go out beside what follows.
                Those on their way take at most the window; when backward ends, all are offloaded
    then        `p.grad` is a tensor that gets its bytes when somebody looks (`optim/release/gradient.py`):
                clipping, a scaler, accumulation and the optimizer's step have one gradient at a time
    zero_grad   as ever: the tensor dies, or is zero

Nothing is rounded, and nothing is computed otherwise. Gradients stay where they are if they are small or
sparse, differentiable (`create_graph`), views of something larger, held by somebody else, or if the link has
no room.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils import _foreach_utils

from memscale.errors import MemScaleError
from memscale.offload.engine import Offload
from memscale.optim.kinds import inner_of
from memscale.optim.masters import planned_dtypes
from memscale.optim.release.gradient import ReleasedGradient, as_ordinary, release
from memscale.optim.release.window import ReleaseWindow
from memscale.techniques.base import Part
from memscale.techniques.optimizer.step_in_backward import takes_place
from memscale.torchkit import sharding
from memscale.torchkit.replicas import replicas_of
from memscale.torchkit.step_hooks import after_steps, before_steps
from memscale.weights.placed_gradients import on_its_device, set_gradient

if TYPE_CHECKING:
    from memscale.hardware.detect import Hardware
    from memscale.offload.limits import Link
    from memscale.techniques.base import PathAttachment, Surroundings
    from memscale.techniques.step_facts import StepFacts
    from memscale.torchkit.forward_slot import StandIn

_LOGGER = logging.getLogger("memscale")

NAME: Final = "gradient_offload"

_SHARDED = "gradients of sharded parameters belong to FSDP's own schedule"
_REPLICATED = "DistributedDataParallel holds all gradients in its buckets"
_NONE_LARGE = "no gradient has {} bytes or more"


def find(model: nn.Module, around: Surroundings) -> Sequence[GradientOffload]:
    """The technique for a model, if it can have it."""
    if isinstance(around.link, str) or _reason(model, around.link) or takes_place(model, around):
        return ()
    resident = around.resident.get(NAME, frozenset()) | around.left_out.parameters
    return (GradientOffload(model, around.link, around.hardware, around.offload, resident, around.optimizer),)


def why_not(model: nn.Module, around: Surroundings) -> str:
    """Why a model cannot have it; "" where nobody asked."""
    if isinstance(around.link, str):
        return around.link
    return "" if takes_place(model, around) else _reason(model, around.link)


def _reason(model: nn.Module, link: Link) -> str:
    if replicas_of(model):
        return _REPLICATED
    if any(sharding.is_sharded(parameter) for parameter in model.parameters()):
        return _SHARDED
    if not names_of(model, link.settings.least_bytes):
        return _NONE_LARGE.format(link.settings.least_bytes)
    return ""


def names_of(
    model: nn.Module, least_bytes: int, half: frozenset[str] | None = None
) -> dict[str, tuple[nn.Parameter, int]]:
    """Parameters whose gradients are worth it, and the bytes of these.

    Args:
        model: whose.
        least_bytes: that are worth it.
        half: names of parameters that are BF16 in a traced step; None: parameters are what they are now.
    """
    dtypes = {} if half is None else planned_dtypes(model, half)
    found = {}
    for name, parameter in model.named_parameters():
        size = parameter.numel() * dtypes.get(id(parameter), parameter.dtype).itemsize
        if parameter.requires_grad and parameter.layout is torch.strided and size >= least_bytes:
            found[name] = parameter, size
    return found


class GradientOffload:
    """Gradient release for a model, as planner and executor attach it.

    Args:
        model: whose gradients leave.
        link: the way off its device.
        hardware: the device, for what a copy costs.
        offload: the executor's engine; None for one of its own.
        resident: names of parameters whose gradients stay.
        optimizer: knows the parameters' groups; None: they are one.
    """

    name = NAME
    path = ""
    reason = ""
    stays = False
    apart_from: frozenset[str] = frozenset()
    beneath: StandIn | None = None

    def __init__(
        self,
        model: nn.Module,
        link: Link,
        hardware: Hardware,
        offload: Callable[[], Offload] | None = None,
        resident: frozenset[str] = frozenset(),
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._model = weakref.ref(model)  # the model owns the executor, which owns this
        self._optimizer = None if optimizer is None else weakref.ref(inner_of(optimizer))
        self.resident = resident
        self._offload = offload
        self.link = link
        self.hardware = hardware
        self.used = False
        self.window: ReleaseWindow | None = None
        self._half: frozenset[str] = frozenset()
        self._hooks: dict[str, Any] = {}
        self._handles: list[Any] = []

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self._model()
        assert model is not None
        return model

    def traced(self, step: StepFacts) -> StepFacts:
        """The step with complete gradients gone."""
        settings = self.link.settings
        self._half = step.path.half
        names = frozenset(names_of(self.model, settings.least_bytes, self._half))
        self.used = bool(names - self.resident)
        if not self.used:  # such as of weights that are BF16 in this step
            self.reason = "" if names else _NONE_LARGE.format(settings.least_bytes)
            return step
        path = replace(
            step.path,
            gradient_window_bytes=max(1, settings.window_bytes),
            released=names - self.resident,
            link_moves=self._moves,
            engine_bytes=self.link.engine_bytes(self.hardware),
        )
        return replace(step, path=path)

    @property
    def _moves(self) -> tuple[int, int]:
        """As in `OptimizerPath`. Copies do not always hide, so all of them count."""
        rate = self.hardware.cost.bytes_of("move")
        return 1024 * rate // self.link.out_bytes_per_us, 1024 * rate // self.link.in_bytes_per_us

    def attach(self) -> None:
        """Puts a hook on each parameter, in front of all others."""
        settings = self.link.settings
        offload = Offload(settings) if self._offload is None else self._offload()
        window = self.window = ReleaseWindow(offload, settings.window_bytes)
        _allow_in_lists()
        for name, (parameter, _) in names_of(self.model, settings.least_bytes).items():
            if name not in self.resident:
                self._hooks[name] = _hook_in_front(parameter, _Completed(window))
        self._handles += before_steps(window, _step_begins), after_steps(window, _step_ends)

    def parts(self) -> list[Part]:
        """The gradient of each parameter."""
        optimizer, link = None if self._optimizer is None else self._optimizer(), self.link
        groups = [] if optimizer is None else optimizer.param_groups
        numbers = {id(value): number for number, group in enumerate(groups) for value in group["params"]}
        return [
            Part(NAME, name, size, _pass_ns(size, link), numbers.get(id(parameter), 0))
            for name, (parameter, size) in names_of(self.model, link.settings.least_bytes, self._half).items()
        ]

    def become(self, other: PathAttachment) -> None:
        """Spares what another one does; see `base.PartialAttachment`."""
        assert isinstance(other, GradientOffload) and self.window is not None
        self.resident = other.resident
        coming = []
        for name, (parameter, _) in names_of(self.model, self.link.settings.least_bytes).items():
            if name in self.resident and name in self._hooks:
                self._hooks.pop(name).remove()
                coming.append(parameter)
            elif name not in self.resident and name not in self._hooks:
                hook = _Completed(self.window)
                self._hooks[name] = _hook_in_front(parameter, hook)
                hook.put(parameter)
        self.window.clear()
        for parameter in coming:
            _bring_back(parameter)

    def undo(self) -> None:
        """Takes the hooks off, and makes every gradient an ordinary one.

        One that cannot be read back stays as it is, and raises whenever it is read.
        """
        for handle in (*self._hooks.values(), *self._handles):
            handle.remove()
        self._hooks, self._handles = {}, []
        self.window = None
        model = self._model()
        for parameter in () if model is None else model.parameters():
            _bring_back(parameter)


def _pass_ns(size: int, link: Link) -> int:
    """Time of a copy out and one back."""
    return 1000 * size // link.out_bytes_per_us + 1000 * size // link.in_bytes_per_us


def _bring_back(parameter: Tensor) -> None:
    """Makes a released gradient an ordinary one."""
    if isinstance(parameter.grad, ReleasedGradient):
        try:
            set_gradient(parameter, as_ordinary(parameter.grad))
        except (OSError, MemScaleError) as error:
            _LOGGER.warning("a released gradient is lost: %s", error)


class _Completed:
    """What happens when a parameter's gradient is complete."""

    def __init__(self, window: ReleaseWindow) -> None:
        self.window = window

    def __call__(self, parameter: Tensor) -> None:
        window = self.window
        window.begin_backward()
        self.put(parameter)
        with window.lock:
            window.trim()

    def put(self, parameter: Tensor) -> None:
        """Puts a released gradient in place of an ordinary one, which nothing here has any more then."""
        gradient = on_its_device(parameter)
        made = None if gradient is None else release(gradient, self.window)
        if made is not None:
            set_gradient(parameter, made)
            with self.window.lock:
                self.window.note(made.memscale_bytes)


def _step_begins(window: ReleaseWindow, *unused: Any) -> None:
    _set_in_step(window, True)


def _step_ends(window: ReleaseWindow, *unused: Any) -> None:
    _set_in_step(window, False)


def _set_in_step(window: ReleaseWindow, in_step: bool) -> None:
    if detect_fake_mode() is not None:
        return  # a trace steps on fakes, of another model perhaps: no byte of a gradient moves there
    window.in_step = in_step
    window.clear()  # when it begins, of what clipping used last


def _allow_in_lists() -> None:
    """Lets PyTorch clip by lists, as it clips plain gradients: on a card other kernels round otherwise."""
    allowed = getattr(_foreach_utils, "_foreach_supported_types", None)
    if isinstance(allowed, list) and ReleasedGradient not in allowed:
        allowed.append(ReleasedGradient)


def _hook_in_front(parameter: Tensor, hook: Any) -> Any:
    """A post-accumulate hook that is called before those that are there: all see the same gradient."""
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    before = dict(hooks or {})
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks = parameter._post_accumulate_grad_hooks
    if before and hooks is not None:
        own = {key: value for key, value in hooks.items() if key not in before}
        hooks.clear()
        hooks.update(own)
        hooks.update(before)
    return handle
