# SPDX-License-Identifier: Apache-2.0
"""Differences between a CUDA build of PyTorch and a CPU build, for a trace without CUDA.

A trace runs on fake CPU tensors. When it is made for a card, everything that depends on the device is put
right here, from above to below:

    Python and C++ code      composites   which operators a function is made of        composites
                             autocast     which of them run in half precision          autocast
    operators                attention    which implementation, and what it saves      attention
                             results      sizes that a CPU kernel returns otherwise    scratch.mended
    kernels                  scratch      what is allocated inside, and freed          scratch,
                                                                                       reduce, probe
                             workspaces   what cuBLAS takes once per thread, and keeps matrix, here

The last three hold for fake CUDA tensors as well, which a trace on a CUDA build has.

What stays as on a CPU: Python code that asks `tensor.is_cuda` or `tensor.device`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from memscale import _core
from memscale.cuda import matrix, probe
from memscale.cuda import scratch as cuda_scratch
from memscale.cuda.autocast import CudaAutocast
from memscale.cuda.card import card_of
from memscale.cuda.composites import composites
from memscale.cuda.scratch import Block

if TYPE_CHECKING:
    from torch import nn

    from memscale.hardware.target import Target

_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_addmm_activation")
)
"""Operators that need a cuBLAS handle."""

_WITH_BIAS = frozenset({"aten::addmm", "aten::_addmm_activation"})


class CudaKernels:
    """Memory that CUDA kernels take beside their results, over one traced step.

    Args:
        target: a card.
        measure: as for `probe.blocks`.
    """

    def __init__(self, target: Target, measure: probe.Measure | None = None) -> None:
        self.target, self.measure = target, measure
        self.card = card_of(target)
        self._taken: set[tuple[str, bool]] = set()

    def scratch(
        self, func: Any, schema_name: str, args: Sequence[Any], outputs: Sequence[Tensor]
    ) -> Sequence[Block]:
        """Blocks that an operation allocates and frees inside: measured on a card that is there, or by rule.

        Args:
            func: the operator overload.
            schema_name: of the operator.
            args: of the call.
            outputs: the tensors that it returned.
        """
        if schema_name in probe.PROBED and args[0].is_cuda:
            measured = probe.blocks(func, args, outputs, self.measure)
            if measured is not None:
                return measured
        return cuda_scratch.blocks(schema_name, args, outputs, self.card)

    def workspaces(self, schema_name: str, args: Sequence[Any], in_backward: bool) -> list[int]:
        """Blocks that the operation makes cuBLAS take and keep, bytes: the first one in each thread.

        Args:
            schema_name: of the operator.
            args: of the call.
            in_backward: autograd's thread runs it, which has a handle of its own.
        """
        if schema_name not in _PRODUCTS:
            return []
        wanted = {"blas": matrix.workspace_bytes(self.target)}
        if schema_name in _WITH_BIAS and args[0].dim() == 1:
            wanted["lt"] = matrix.LT_WORKSPACE_BYTES
        new = [(kind, size) for kind, size in wanted.items() if (kind, in_backward) not in self._taken]
        self._taken.update((kind, in_backward) for kind, _ in new)
        return [size for _, size in new if size]

    @property
    def rerun_bytes(self) -> int:
        """What cuBLAS takes and keeps as soon as the forward traced so far runs a second time.

        That is in autograd's thread: a linear layer adds its bias there, as backward itself never does.
        """
        only_forward = ("lt", False) in self._taken and ("lt", True) not in self._taken
        return matrix.LT_WORKSPACE_BYTES if only_forward else 0

    @staticmethod
    def in_order(schema_name: str, fresh: list[Tensor]) -> list[Tensor]:
        """New results in the order in which the kernel allocates them."""
        return fresh[::-1] if schema_name == "aten::native_dropout" else fresh

    @staticmethod
    def host_outputs(schema_name: str, outputs: Any) -> list[Tensor]:
        """Results that lie in host memory."""
        return [outputs[index] for index in cuda_scratch.HOST_OUTPUTS.get(schema_name, ())]


class Emulation:
    """CUDA's ways with CPU tensors, in force inside `active`."""

    def __init__(self, target: Target) -> None:
        self._composites = composites(card_of(target))
        self._autocast = CudaAutocast()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Runs the block with CUDA's composite operators and autocast."""
        with ExitStack() as stack:
            stack.enter_context(self._composites)
            stack.enter_context(self._autocast.active())
            yield

    def forward_is_over(self) -> None:
        """Backward begins."""
        self._autocast.forward_is_over()


def emulation_for(target: Target, model: nn.Module) -> Emulation | None:
    """What a trace of a model has to run inside, or None where PyTorch itself does what the target does.

    A model that lies on a card is traced on fake CUDA tensors, by a build that knows CUDA.
    """
    tensors = (*model.parameters(), *model.buffers())
    if target.kind != "cuda" or any(tensor.is_cuda for tensor in tensors):
        return None
    return Emulation(target)


def is_backward(phase: int) -> bool:
    """Whether autograd's thread runs operations of a phase."""
    return phase == _core.PHASE_BACKWARD
