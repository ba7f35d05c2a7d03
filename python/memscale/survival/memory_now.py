# SPDX-License-Identifier: Apache-2.0
"""What is in memory at this moment, measured: by category, who else has it, and where the limits are."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from memscale.hardware.host import host_memory, private_bytes, process_bytes
from memscale.optim.spent import SpentGradient
from memscale.torchkit.leaves import storage_bytes, tensors_of

_REST = "interpreter, activations and all else"

_UNLIMITED = (resource.RLIM_INFINITY, -1)


@dataclass(frozen=True)
class MemoryNow:
    """Bytes.

    Attributes:
        total: of the device.
        free: that the device still has.
        allocated: by live tensors; on a CPU, which does not count them, the process's resident memory.
        reserved: by PyTorch's allocator; on a CPU as `allocated`.
        limit: of private memory of this process (RLIMIT_DATA); 0: none, and on a card.
        private: what counts for that limit.
        by_category: of tensors that are known. What else is allocated is "activations and temporaries".
    """

    device: torch.device
    total: int
    free: int
    allocated: int
    reserved: int
    limit: int = 0
    private: int = 0
    by_category: dict[str, int] = field(default_factory=dict)

    @property
    def available(self) -> int:
        """What tensors could have in all, if there were none but those that are known: these and the free.

        On a card all that PyTorch holds is theirs.
        """
        if self.device.type == "cuda":
            return self.reserved + self.free
        free = min(self.free, self.limit - self.private) if self.limit else self.free
        return max(0, free) + sum(size for name, size in self.by_category.items() if name != _REST)


def memory_now(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], device: torch.device
) -> MemoryNow:
    """Measures.

    Args:
        model: whose weights and gradients are counted by themselves.
        optimizers: whose state is.
        device: which memory.
    """
    categories: dict[str, list[Tensor]] = {
        "parameters": [*model.parameters()],
        "buffers": [*model.buffers()],
        "gradients": [value.grad for value in model.parameters() if value.grad is not None],
        "optimizer state": [
            tensor
            for optimizer in optimizers
            for entry in [*optimizer.state.values()]
            for tensor in tensors_of([*entry.values()] if isinstance(entry, dict) else entry)
        ],
    }
    sizes = {name: _bytes_on(tensors, device) for name, tensors in categories.items()}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        sizes["activations and temporaries"] = max(0, allocated - sum(sizes.values()))
        return MemoryNow(device, total, free, allocated, reserved, by_category=sizes)
    host, resident = host_memory(), process_bytes()
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    sizes[_REST] = max(0, resident - sum(sizes.values()))
    return MemoryNow(
        device,
        host.total_bytes,
        host.available_bytes,
        resident,
        resident,
        0 if limit in _UNLIMITED else limit,
        private_bytes(),
        sizes,
    )


def _bytes_on(tensors: Iterable[Tensor], device: torch.device) -> int:
    there = (tensor for tensor in tensors if tensor.device.type == device.type)
    return storage_bytes(tensor for tensor in there if not isinstance(tensor, SpentGradient))
