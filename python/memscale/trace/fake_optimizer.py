# SPDX-License-Identifier: Apache-2.0
"""The optimizer's part of a traced step: its state before the step, its temporaries in the step.

A copy of the real optimizer (or an AdamW, when none is known yet) works on fake parameters. Optimizers that
go through parameters one by one are run on one representative of each pair of shapes that follow each other,
and the others' state is counted; the peak is the same and a model with a thousand parameters is traced as
fast as one with ten.

Optimizers with 8-bit state, and all with our own, are not run at all: `eight_bit_layout` tells what they
take.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale import _core
from memscale.optim.arrays import FORM
from memscale.optim.kinds import inner_of
from memscale.optim.offload.attach import is_offloaded, plain_copy
from memscale.optim.offload.pieces import OFFLOADED
from memscale.optim.patched_base import base_of
from memscale.optim.twins import apart, twin_of
from memscale.techniques.optimizer.eight_bit_layout import Layout, OwnLayout, layout_of
from memscale.techniques.optimizer.offload_layout import OffloadLayout
from memscale.techniques.optimizer.path import OptimizerPath
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale.techniques.step_facts import StepFacts
    from memscale.trace.recorder import GraphRecorder

_IDLE_WORTH_A_NOTE: Final = 1 << 20  # bytes

FakeOf = Callable[[Tensor], Tensor | None]
"""The fake of a real tensor, or None."""


def _or(fake: Tensor | None, real: Tensor) -> Tensor:
    return real if fake is None else fake


def _fake_state(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The fake of a state tensor. A step counter keeps its value: optimizers read it."""
    known = not (tensor.is_meta or isinstance(tensor, FakeTensor))
    if tensor.numel() == 1 and (tensor.device.type == "cpu" or not known):
        with unset_fake_temporarily():
            value = tensor.item() if known else 1
        return torch.tensor(value, dtype=tensor.dtype)
    if not known:
        with parameter.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    fake: Tensor = parameter.fake_mode.from_tensor(tensor)  # type: ignore[attr-defined]
    return fake


def _chooses_foreach(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of PyTorch's that take all parameters at once where the device can."""
    modules = [
        kind.__module__ for kind in type(optimizer).__mro__ if kind.__module__ != "torch.optim.optimizer"
    ]
    own = [sys.modules.get(name) for name in modules if name.startswith("torch.optim.")]
    return modules[0].startswith("torch.optim.") and any(
        hasattr(module, "_default_to_fused_or_foreach") for module in own
    )


def free_switches(optimizer: torch.optim.Optimizer | None, by_default: bool) -> tuple[str, ...]:
    """Switches that an optimizer could be made with otherwise, and take less in its step.

    Only PyTorch's own have them: another package's may take the arguments and ignore them.

    Args:
        optimizer: None for the AdamW that is assumed.
        by_default: on the target it works on all parameters at once by default.

    Returns:
        "fused", if it could be on; "foreach", if it is on; "8bit", if its state could be ours.
    """
    if optimizer is None:
        return ("fused", "foreach", "8bit") if by_default else ("fused", "8bit")
    known = ("8bit",) * (type(optimizer) in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD))
    groups = optimizer.param_groups
    own = type(optimizer).__module__.startswith("torch.optim.")
    if not own or any(group.get("fused") for group in groups):
        return known
    chosen = [group.get("foreach", False) for group in groups]
    at_once = any(by_default if choice is None else choice for choice in chosen)
    return ("fused",) * ("fused" in optimizer.defaults) + ("foreach",) * at_once + known


def each_pair(keys: Sequence[Any]) -> set[int]:
    """Positions that show every pair of neighbouring keys once, as neighbours.

    In a loop over parameters, local variables still hold temporaries of one while the next is worked on.
    """
    seen: set[Any] = set()
    chosen: set[int] = set()
    for index, pair in enumerate(zip([None, *keys], keys, strict=False)):
        if pair not in seen:
            seen.add(pair)
            chosen.update((max(index - 1, 0), index))
    return chosen


class _AnyNumber(TorchDispatchMode):
    """Makes up numbers that an optimizer reads, as Adafactor its norms; memory does not depend on them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, or makes up its number."""
        if func is torch.ops.aten._local_scalar_dense.default:
            tensor = args[0]
            if isinstance(tensor, FakeTensor) and tensor.constant is None:
                return 1.0 if tensor.is_floating_point() else 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _DeclaredStep:
    """The declared step of one parameter: name, sizes of its scratch, bytes moved."""

    parameter: Tensor
    name: str
    scratch: list[int]
    moved_bytes: int
    link_bytes: int = 0  # that are moved in memory in the time of its copies
    by_core: bool = False


class FakeOptimizer:
    """One optimizer on fake parameters.

    Attributes:
        notes: remarks for the log.
        alike: parameters that it is run on, each with those that it stands for; empty if steps are declared.
        has_whole_gradients: its steps are declared, and use a gradient that is offloaded as a whole.
    """

    def __init__(
        self, recorder: GraphRecorder, parameters: Sequence[nn.Parameter], step: StepFacts, fake_of: FakeOf
    ) -> None:
        self.recorder = recorder
        self.notes: list[str] = []
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer | None = None
        self._prepared: torch.optim.Optimizer | None = None
        self._late: dict[Tensor | None, list[tuple[int, int]]] = {}  # whose state is new; buffers and sizes
        self._declared: list[_DeclaredStep] | None = None  # in place of running the optimizer
        self._apart = step.path.stepped  # names of those that are stepped alone, each in its place
        self.alike: dict[nn.Parameter, list[nn.Parameter]] = {}
        self.has_whole_gradients = False
        if not self.parameters:
            return
        real = inner_of(step.optimizer)
        layout = layout_of(
            real,
            step.path,
            lambda parameter: _or(fake_of(parameter), parameter),
            lambda parameter: recorder.names.get(id(fake_of(parameter)), ""),
        )
        if layout is not None:
            self._declare_steps(layout, real, fake_of)
            return
        recorder.paused = True
        try:
            self._prepare(self._as_on_target(self._copy(real, fake_of)))
        except Exception as error:
            # An optimizer that cannot work on fakes (one that needs a closure, say) must not end the profile.
            self.notes.append(
                f"{type(real).__name__} cannot be traced ({type(error).__name__}: {error}); AdamW is assumed"
            )
            self._prepare(self._as_on_target(torch.optim.AdamW(self.parameters)))
        finally:
            recorder.paused = False

    @property
    def order(self) -> list[nn.Parameter]:
        """Parameters in the order in which it steps them; none where steps are declared."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def _as_on_target(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Makes an optimizer choose what it chooses on the target: on a card, all parameters at once.

        PyTorch asks the parameters' device, and these are fakes on the CPU.
        """
        if self.recorder.target.foreach and _chooses_foreach(optimizer):
            for group in optimizer.param_groups:
                free = group.get("foreach", False) is None and not group.get("fused")
                by_tensor = isinstance(group.get("lr"), Tensor) and not group.get("capturable")
                if free and not group.get("differentiable") and not by_tensor:
                    group["foreach"] = True
        return optimizer

    def _declare_steps(self, layout: Layout, real: torch.optim.Optimizer, fake_of: FakeOf) -> None:
        """Declares the state of an optimizer that is not run, and what its steps take."""
        recorder, self._declared = self.recorder, []
        self.has_whole_gradients = not isinstance(layout, OffloadLayout)
        on_card = recorder.target.kind == "cuda"
        stepped = any(real.state.values())
        for size in layout.shared():
            self._add_state(size, None, is_late=not stepped)
        for number, group in enumerate(real.param_groups):
            for index, parameter in enumerate(group["params"]):
                fake = fake_of(parameter)
                if fake is None or not parameter.requires_grad:
                    continue
                sizes = layout.state(number, index)
                for size in sizes:
                    buffer = self._add_state(size, fake, is_late=not real.state.get(parameter))
                    recorder.label(buffer, fake, recorder.names.get(id(fake), ""))
                scratch = layout.scratch(number, index, on_card)
                moved, link = 3 * fake.numel() * fake.element_size() + 2 * sum(sizes) + 2 * sum(scratch), 0
                if isinstance(layout, OffloadLayout):
                    moved, link = layout.moved(number, index)
                by_core = (
                    layout.is_on_host(number, index)
                    if isinstance(layout, OffloadLayout)
                    else isinstance(layout, OwnLayout) and layout.is_ours(number, index)
                )
                self._declared.append(_DeclaredStep(fake, layout.name, scratch, moved, link, by_core))

    def _add_state(self, size: int, parameter: Tensor | None, is_late: bool) -> int:
        """`parameter`: whose it is; None: that of all."""
        buffer = self.recorder.graph.add_resident(size, _core.CATEGORY_OPTIMIZER_STATE)
        if is_late:
            self._late.setdefault(parameter, []).append((buffer, size))
        return buffer

    def _appear(self, parameters: Iterable[Tensor | None]) -> None:
        """State of these appears with the next operation, if this is the first step."""
        for parameter in parameters:
            for buffer, _ in self._late.pop(parameter, ()):
                self.recorder.graph.make_late(buffer)

    def _step_as_declared(self, declared: Sequence[_DeclaredStep]) -> None:
        graph = self.recorder.graph
        for part in declared:
            if part.parameter.grad is None:
                continue
            elements = part.parameter.numel()
            graph.add_op(part.name, 16 * elements, part.moved_bytes, 0, 0, _core.WORK_MATH)
            if part.link_bytes:
                graph.add_op("memscale::state_pass", 0, part.link_bytes, 0, 0, _core.WORK_MOVE)
            buffers = [graph.add_buffer(size, _core.CATEGORY_TEMPORARY) for size in part.scratch]
            for buffer in buffers:
                graph.end_buffer(buffer)

    def _copy(self, real: torch.optim.Optimizer | None, fake_of: FakeOf) -> torch.optim.Optimizer:
        if real is None:
            return torch.optim.AdamW(self.parameters)
        twin = plain_copy(real) if is_offloaded(real) else twin_of(real)
        twin.__class__ = base_of(real)  # an optimizer-side technique that is in force may not be in this step
        own = twin.__dict__
        for name in ("step", "zero_grad"):  # learning-rate schedulers wrap these on the instance
            own.pop(name, None)
        for name in [name for name in own if name.endswith("_hooks")]:
            own[name] = OrderedDict()
        groups, twin.param_groups = apart(twin.param_groups), []
        for group in groups:
            fakes = [fake_of(parameter) for parameter in group["params"]]
            twin.param_groups.append({**group, "params": [fake for fake in fakes if fake is not None]})
        states = (
            real.state if is_offloaded(real) else twin.state
        )  # where `__setstate__` has brought it up to date
        twin.state = defaultdict(dict)
        for parameter, state in states.items():
            fake = fake_of(parameter)
            if fake is not None and FORM not in state and OFFLOADED not in state:
                twin.state[fake] = tree_map_only(Tensor, functools.partial(_fake_state, fake), dict(state))
        return twin

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Brings the state into being, unrecorded, and declares it."""
        self._prepared = optimizer
        covered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        covered = [parameter for parameter in covered if parameter.requires_grad]
        self.alike = self._representatives(optimizer, covered)
        try:
            missing = [parameter for parameter in self.alike if not optimizer.state.get(parameter)]
            lacking = set(missing)
            if missing:
                for parameter in missing:
                    parameter.grad = torch.empty_like(parameter)
                with _AnyNumber():
                    optimizer.step()
        finally:
            for parameter in self.parameters:
                parameter.grad = None
        for parameter, stands_for in self.alike.items():
            for leaf in tree_leaves(optimizer.state.get(parameter, {})):
                if isinstance(leaf, Tensor):
                    self._declare(leaf, stands_for, is_late=parameter in lacking)
        self.optimizer = optimizer

    def _declare(self, state: Tensor, parameters: Sequence[nn.Parameter], is_late: bool) -> None:
        """Enters a state tensor of the first parameter, and one like it for each of the others.

        `is_late`: the optimizer makes it when it steps for the first time.
        """
        recorder, size = self.recorder, state.untyped_storage().nbytes()
        if recorder.cuda is not None and state.numel() == 1 and not self._counts_on_card():
            recorder.on_host(state)
            return
        first = recorder.resident(state, _core.CATEGORY_OPTIMIZER_STATE)
        others = [recorder.graph.add_resident(size, _core.CATEGORY_OPTIMIZER_STATE) for _ in parameters[1:]]
        for buffer, parameter in zip((first, *others), parameters, strict=True):
            if is_late:
                self._late.setdefault(parameter, []).append((buffer, size))
            recorder.label(buffer, state, recorder.names.get(id(parameter), ""))

    def _counts_on_card(self) -> bool:
        """Whether step counters lie on the card, as fused and capturable optimizers need it."""
        groups = [] if self._prepared is None else self._prepared.param_groups
        return any(group.get("fused") or group.get("capturable") for group in groups)

    def _representatives(
        self, optimizer: torch.optim.Optimizer, covered: Sequence[nn.Parameter]
    ) -> dict[nn.Parameter, list[nn.Parameter]]:
        """Parameters to run the optimizer on, each with those that it stands for, itself first."""
        one_by_one = type(optimizer).__module__.startswith("torch.optim") and not any(
            group.get("foreach") for group in optimizer.param_groups
        )
        on_card = self.recorder.cuda is not None  # where the order of the state decides what is reserved
        apart = any(self.recorder.names.get(id(parameter)) in self._apart for parameter in covered)
        if not one_by_one or on_card or apart or any(value.device.type != "cpu" for value in covered):
            return {parameter: [parameter] for parameter in covered}
        keys = [(tuple(parameter.shape), parameter.dtype) for parameter in covered]
        chosen = each_pair(keys)
        first: dict[Any, nn.Parameter] = {}
        alike: dict[nn.Parameter, list[nn.Parameter]] = {}
        for index, (parameter, key) in enumerate(zip(covered, keys, strict=True)):
            known = first.setdefault(key, parameter)
            alike.setdefault(parameter if index in chosen else known, []).append(parameter)
        return alike

    def step(self) -> None:
        """Records one step. Gradients must be in place; they stay alive during the step."""
        if self.optimizer is None and self._declared is None:
            return
        self._count_idle()
        self._appear(list(self._late))
        if self._declared is not None:
            self._step_as_declared(self._declared)
            return
        assert self.optimizer is not None
        gradients = {parameter: parameter.grad for parameter in self.parameters}
        elements = sum(parameter.numel() for parameter in self.parameters if parameter.grad is not None)
        shown = sum(parameter.numel() for parameter in self.alike if parameter.grad is not None)
        for parameter in self.parameters:
            if parameter not in self.alike:
                parameter.grad = None
        self.recorder.cost_scale = elements / shown if shown else 1.0
        try:
            with _AnyNumber():
                self.optimizer.step()
        except Exception as error:  # sparse gradients and a dense optimizer, say: the user's own will fit
            self.notes.append(f"the optimizer step is not in the plan ({type(error).__name__}: {error})")
        self.recorder.cost_scale = 1.0
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def _count_idle(self) -> None:
        """State of parameters that have no gradient: PyTorch makes none, but another step may."""
        late = ((value, buffers) for value, buffers in self._late.items() if value is not None)
        idle = [buffers for value, buffers in late if value.grad is None]
        size = sum(size for buffers in idle for _, size in buffers)
        self.recorder.idle_state_bytes += size
        if size >= _IDLE_WORTH_A_NOTE:
            self.notes.append(
                f"counted: {format_bytes(size)} of optimizer state for parameters to which this step gives "
                "no gradient, since another step may; requires_grad_(False) on those that never get one"
            )

    def is_stepped_by_core(self, parameter: nn.Parameter) -> bool:
        """Whether our core steps it on a host: its state is in memory there."""
        return any(part.parameter is parameter and part.by_core for part in self._declared or ())

    def step_alone(self, parameter: nn.Parameter) -> bool:
        """Records the step of one parameter, whose gradient must be in place.

        Returns:
            Whether the optimizer has it. Otherwise nothing is recorded.
        """
        if self._declared is not None:
            declared = [part for part in self._declared if part.parameter is parameter]
            self._appear((None, parameter) if declared else ())
            self._step_as_declared(declared)
            return bool(declared)
        optimizer = self.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        group = next((item for item in groups if any(value is parameter for value in item["params"])), None)
        if optimizer is None or group is None:
            return False
        self._appear((parameter,))
        optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            with _AnyNumber():
                optimizer.step()
        except Exception as error:
            self.notes.append(f"a step in backward is not in the plan ({type(error).__name__}: {error})")
        finally:
            optimizer.param_groups = groups
        return True


def fake_optimizers(
    recorder: GraphRecorder, parameters: Sequence[nn.Parameter], step: StepFacts, fake_of: FakeOf
) -> list[FakeOptimizer]:
    """All that step the model, in this order; what optimizer-side techniques change is the first one's alone.

    Beside a forward without gradients there are those that are known, and none is assumed.
    """
    steps = [step, *(replace(step, optimizer=other, path=OptimizerPath()) for other in step.others)]
    steps = [each for each in steps if step.gradients or each.optimizer is not None]
    return [FakeOptimizer(recorder, parameters, each, fake_of) for each in steps]
