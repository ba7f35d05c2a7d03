# SPDX-License-Identifier: Apache-2.0
"""Checkpoints over several children of a `nn.Sequential`: only the input of the first is held.

    children      0    1    2    3    4    5
    runs               [1 ─────── 3]
    forward       0 ─► ▪ 1 ─► 2 ─► 3 ─► 4 ─► 5        ▪ held
    backward           └ recomputes 1, 2 and 3, once, when the first of their saves is used

The chain's forward is replaced; its children keep theirs, and are called as before, with their hooks. As with
any module inside a checkpointed one, that happens twice for the children of a run.

A chain follows its children as they are now. A run whose children are not there any more, one after another
as when it was attached, is not checkpointed; its children run as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memscale.errors import AttachError
from memscale.offload.engine import Boundary
from memscale.state.process_tables import Kept
from memscale.techniques.checkpoint import data_reads
from memscale.techniques.checkpoint.call_kinds import came_later, stands_aside
from memscale.techniques.checkpoint.checkpoint_state import NO_USES, Body, BufferRef, Uses, all_below
from memscale.techniques.checkpoint.checkpointing import Region
from memscale.techniques.checkpoint.recompute_check import UNCHECKED, RecomputeCheck
from memscale.torchkit.compiled import checkpoints_when_compiled
from memscale.torchkit.forward_slot import ForwardSlot, StandIn


@dataclass(frozen=True)
class ChainRun:
    """Consecutive children that are checkpointed as one.

    Attributes:
        first: name of the first child in the chain, such as "3".
        last: name of the last one.
        buffers: registered buffers that any of them changes.
        uses: what else any of them uses.
        foreign: tensors from outside model and arguments that any of them reads.
        boundary: the input leaves the device until the recompute; None: it stays.
        check: of its recomputes.
        in_process: places of the process that any of them changes.
    """

    first: str
    last: str
    buffers: Sequence[BufferRef] = ()
    uses: Uses = NO_USES
    foreign: Sequence[weakref.ref[Tensor]] = ()
    boundary: Boundary | None = None
    check: RecomputeCheck = UNCHECKED
    in_process: Sequence[Kept] = ()


class _Run:
    """A run with the children that it was attached to."""

    def __init__(self, children: Sequence[nn.Module], body: Body, boundary: Boundary | None = None) -> None:
        self.children = [weakref.ref(child) for child in children]
        self.body = body
        self.boundary = boundary

    def starts_at(self, present: Sequence[tuple[str, nn.Module | None]], index: int) -> bool:
        """Whether the present children from `index` on are those of the run."""
        there = present[index : index + len(self.children)]
        return len(there) == len(self.children) and all(
            child is not None and child is own() for (_, child), own in zip(there, self.children, strict=True)
        )


class ChainForward(StandIn):
    """Stands in for the forward of a `nn.Sequential`.

    Attributes:
        runs: by the name of their first child.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any], runs: dict[str, _Run]) -> None:
        super().__init__(module, original)
        self.runs = runs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the children one after another, some of them checkpointed together."""
        if torch.compiler.is_compiling():
            plain = not torch.is_grad_enabled() or not checkpoints_when_compiled()
        else:
            plain = stands_aside() or came_later(self)
        if self.passive or plain or len(args) + len(kwargs) != 1 or not (args or "input" in kwargs):
            return self.run_original(*args, **kwargs)
        value = args[0] if args else kwargs["input"]
        # What the recompute needs is held by the region alone, not by this frame.
        del args, kwargs
        present: list[tuple[str, nn.Module | None]] = list(self.module._modules.items())
        index = 0
        while index < len(present):
            name, child = present[index]
            run = self.runs.get(name)
            if run is not None and run.children and run.starts_at(present, index):
                children = [child for _, child in present[index : index + len(run.children)]]
                value = _checkpointed(run, children, value)
                index += len(children)
            else:
                value = child(value)  # type: ignore[misc]  # None fails as it does in the chain's own forward
                index += 1
        return value


def _checkpointed(run: _Run, children: list[Any], value: Any) -> Any:
    def through(value: Any) -> Any:
        for child in children:
            value = child(value)
        return value

    if torch.compiler.is_compiling():
        return checkpoint(through, value, use_reentrant=False)
    parts = all_below(children)
    if run.body.has_new_hooks(parts):
        return through(value)
    region = Region(run.body, parts, through, ((value,), {}), boundary=run.boundary)
    return region.first_run((value,), {})


class ChainAttachment:
    """Checkpointing of runs of children of one `nn.Sequential`, as the executor attaches it.

    Args:
        module: the chain.
        path: its qualified name, "" for the model itself.
        runs: of children; they do not overlap.
        beneath: a stand-in of the chain's forward that must stay on top of it: the executor's own. None for
            the one that is in front, if any.
    """

    name = "chain"

    def __init__(
        self, module: nn.Module, path: str, runs: Sequence[ChainRun], beneath: StandIn | None = None
    ) -> None:
        self._module = weakref.ref(module)  # the model itself, maybe, which owns the attachment
        self.path = path
        self.runs = runs
        self._beneath = None if beneath is None else weakref.ref(beneath)
        self.slot: ForwardSlot | None = None

    def attach(self) -> None:
        """Replaces the chain's forward.

        Raises:
            AttachError: the module is not called through `nn.Sequential.forward`, or has no such children.
        """
        module = self._module()
        assert module is not None
        front = module.__dict__.get("forward")
        above = (
            self._beneath() if self._beneath is not None else front if isinstance(front, StandIn) else None
        )
        slot = ForwardSlot(module, self.path, above)
        present = slot.present
        own = isinstance(present, MethodType) and present.__self__ is module
        if not own or present.__func__ is not nn.Sequential.forward:  # type: ignore[attr-defined]
            raise AttachError(f"module {self.path!r} does not run nn.Sequential's own forward")
        if type(module).__iter__ is not nn.Sequential.__iter__:  # type: ignore[attr-defined]
            raise AttachError(f"module {self.path!r} has its own order of children")
        runs = {run.first: _Run(*self._resolved(module, run), run.boundary) for run in self.runs}
        slot.put(ChainForward(module, present, runs))
        self.slot = slot
        data_reads.watch(module)

    def _resolved(self, module: nn.Module, run: ChainRun) -> tuple[list[nn.Module], Body]:
        names = list(module._modules)
        if run.first not in names or run.last not in names or names.index(run.last) < names.index(run.first):
            raise AttachError(f"module {self.path!r} has no children {run.first!r} to {run.last!r} in a row")
        part = names[names.index(run.first) : names.index(run.last) + 1]
        present = module._modules.items()
        children = [child for name, child in present if name in part and child is not None]
        if len(children) != len(part):
            raise AttachError(f"module {self.path!r} has an empty child")
        head = f"{self.path}." if self.path else ""
        path = f"{head}{run.first} to {head}{run.last}"
        facts = run.buffers, run.uses, run.foreign, run.check, run.in_process
        return children, Body(path, *facts)

    def undo(self) -> None:
        """Restores the chain's forward."""
        slot, self.slot = self.slot, None
        assert slot is not None
        slot.remove()
        module = self._module()
        if module is not None:
            data_reads.unwatch(module)
