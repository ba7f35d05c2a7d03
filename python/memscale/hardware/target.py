# SPDX-License-Identifier: Apache-2.0
"""The target of a trace: facts about the device that change the memory of a step.

A trace for a card that the model does not lie on runs on fake CPU tensors, on any machine. Where a card
behaves differently (other attention kernels, matrix workspaces, an optimizer that works on all parameters at
once), the trace asks the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LARGE_WORKSPACE_BYTES: Final = 32 << 20
"""cuBLAS workspace on capability 9.0, 10.x and 12.x."""

SMALL_WORKSPACE_BYTES: Final = 8_519_680
"""cuBLAS workspace on every other NVIDIA card: 2 × 4 MiB and 8 × 16 KiB."""


def gemm_workspace_bytes(capability: tuple[int, int]) -> int:
    """Bytes that PyTorch takes once per cuBLAS handle and stream and keeps.

    Args:
        capability: CUDA compute capability, major and minor.
    """
    return LARGE_WORKSPACE_BYTES if capability[0] >= 9 else SMALL_WORKSPACE_BYTES


@dataclass(frozen=True)
class Target:
    """The device that a step is traced for.

    Attributes:
        kind: "cpu" or "cuda".
        capability: compute capability, major and minor; None on a CPU.
        gemm_workspace_bytes: of one cuBLAS handle; 0 on a CPU.
        foreach: whether PyTorch's optimizers work on all parameters at once unless told otherwise.
        multiprocessors: of the card; 0: as many as a usual card of its capability has.
    """

    kind: str = "cpu"
    capability: tuple[int, int] | None = None
    gemm_workspace_bytes: int = 0
    foreach: bool = False
    multiprocessors: int = 0

    @classmethod
    def cuda(cls, capability: tuple[int, int], multiprocessors: int = 0) -> Target:
        """A card of a compute capability."""
        workspace = gemm_workspace_bytes(capability)
        return cls("cuda", capability, workspace, foreach=True, multiprocessors=multiprocessors)


CPU: Final = Target()
"""The host."""
