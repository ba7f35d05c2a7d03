# SPDX-License-Identifier: Apache-2.0
"""Convolutions that are measured on the card that is there: the record read, the answer remembered."""

from __future__ import annotations

from typing import Any

import torch

from memscale.cuda import probe
from memscale.cuda.semantics import CudaKernels
from memscale.hardware.target import Target
from memscale.ops.fake_results import mode_of_fakes, on_memory_of_its_own

CONVOLUTION = torch.ops.aten.convolution.default


def event(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size}


def test_a_record_becomes_blocks_with_phases() -> None:
    trace = [
        event("segment_alloc", 0, 2 << 20),
        event("alloc", 0, 1000),  # a result
        event("alloc", 4096, 700),
        event("free_requested", 4096, 700),
        event("free_completed", 4096, 700),
        event("alloc", 8192, 512),  # another result
        event("alloc", 4096, 5000),
        event("alloc", 16384, 1),
        event("free_completed", 4096, 5000),
        event("free_completed", 99, 3),  # from before
        event("free_completed", 16384, 1),
    ]
    assert probe.lives(trace) == ((1024, 0, 0), (5120, 1, 1), (512, 1, 1))


def test_a_signature_is_measured_once() -> None:
    asked = []

    def measured(call: Any, device: torch.device) -> Any:
        asked.append((call.args[0].size, device))
        return ((4096, 0, 0),)

    kernels, mode = CudaKernels(Target.cuda((9, 0), 132), measured), mode_of_fakes()

    def scratch(batch: int, device: str, kernels: CudaKernels = kernels) -> Any:
        def fake(*shape: int) -> torch.Tensor:
            like = torch.empty(shape, device="meta")
            form = (shape, like.stride(), torch.float32, torch.device(device), 0)
            return on_memory_of_its_own(mode, form, like.numel() * 4)

        args = (fake(batch, 8, 6, 6), fake(8, 8, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return kernels.scratch(CONVOLUTION, "aten::convolution", args, [fake(batch, 8, 6, 6)])

    assert scratch(4, "cuda:0") == scratch(4, "cuda:0") == ((4096, 0, 0),)
    scratch(8, "cuda:0")
    assert asked == [((4, 8, 6, 6), torch.device("cuda:0")), ((8, 8, 6, 6), torch.device("cuda:0"))]
    by_rule, refused = scratch(4, "cpu"), CudaKernels(Target.cuda((9, 0), 132), lambda call, device: None)
    assert scratch(16, "cuda:0", refused) != [] and by_rule != [] and by_rule != ((4096, 0, 0),)
