# SPDX-License-Identifier: Apache-2.0
"""Detects the hardware of a training step (`detect`), and how much memory it may use (`budget_bytes`).

The device is a CUDA card or, without one, the host's own memory. `detect` gives the rates of tables (see
`hardware/rates`, `cost_rates`); `calibration.calibrated` replaces them by what was once measured. Either way
the same machine gives the same plan on every run. Only `free_bytes`, `host_available_bytes` and
`process_bytes` are of the moment; nothing in a plan may depend on them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from memscale.errors import MemScaleError
from memscale.hardware import host
from memscale.hardware.cost_rates import CostRates, card_cost, host_cost
from memscale.hardware.rates import Rates, cpu_rates, gpu_rates
from memscale.hardware.target import CPU, Target
from memscale.units import format_bytes

if TYPE_CHECKING:
    import torch

    from memscale.config.config import Config

__all__ = ["Budget", "Hardware", "budget_bytes", "card_hardware", "detect"]

# What a process holds on a card beside PyTorch's allocator: context, kernels, libraries. Seen with an A100:
# 0.47 GiB when kernels are loaded as they are needed (the default since CUDA 12.2), 0.92 GiB when all are
# loaded at the start. With an H100, CUDA 13.0 and driver 580 (`bench/results/gpu_card.csv`): 527 MiB before
# the first kernel, 767 MiB with kernels of all kinds, cuBLAS and cuDNN, 1.33 GiB when all are loaded at once.
# What is rounded up holds what MemScale has there: fingerprints of saved tensors, a page of 2 MiB.
_LAZY_CONTEXT_BYTES: Final = 512 << 20
_LAZY_HOPPER_CONTEXT_BYTES: Final = 800 << 20
_EAGER_CONTEXT_BYTES: Final = 1 << 30
_EAGER_HOPPER_CONTEXT_BYTES: Final = 1536 << 20
_HOPPER: Final = (9, 0)

_BF16_CPU_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_FP16_CPU_FLAGS: Final = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})


@dataclass(frozen=True)
class Hardware:
    """Facts about one device and its host. All plain values, so that it can be written down and compared.

    Args:
        device_kind: "cuda" or "cpu".
        device_index: Ordinal of the card; 0 for the host.
        name: Name of the card, or a description of the host.
        total_bytes: Memory of the device; on a CPU the host's, within the limits of its control group.
        free_bytes: What of it is free at the moment.
        compute_capability: Major and minor, None on a CPU.
        supports_bf16: Whether BF16 is computed by the hardware.
        supports_fp16: Whether FP16 is.
        host_total_bytes: Host memory within the limits of the control group; 0 if unknown.
        host_available_bytes: What of it can be had at the moment.
        pinned_limit_bytes: `ulimit -l`; None: unlimited or unknown.
        is_wsl: Linux under Windows.
        cpu_threads: Threads that PyTorch computes with.
        link_bytes_per_us: Copies between device and host, one direction.
        cost: Rates per class of work, FP32 products as PyTorch is set at the moment (with TF32 if that is
            allowed).
        context_bytes: What the process takes from the card outside the allocator; 0 on a CPU, where the
            interpreter's memory cannot be separated from the tensors'.
        process_bytes: Resident memory of this process at the moment, tensors included.
        multiprocessors: Of a card that is present; 0: as many as a usual card of its capability has.
    """

    device_kind: str
    device_index: int
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None
    supports_bf16: bool
    supports_fp16: bool
    host_total_bytes: int
    host_available_bytes: int
    pinned_limit_bytes: int | None
    is_wsl: bool
    cpu_threads: int
    link_bytes_per_us: int
    cost: CostRates
    context_bytes: int
    process_bytes: int
    multiprocessors: int = 0

    @property
    def target(self) -> Target:
        """What a trace has to know of the device."""
        if self.compute_capability is None:
            return CPU
        return Target.cuda(self.compute_capability, self.multiprocessors)


@dataclass(frozen=True)
class Budget:
    """How many bytes a plan may use, and where that number comes from, in words."""

    bytes: int
    source: str


def detect(device: torch.device) -> Hardware:
    """Describes a device and its host.

    CUDA is initialised only if `device` is a CUDA device.

    Args:
        device: A "cpu" or "cuda" device; a CUDA device without an index means the current one.

    Raises:
        MemScaleError: Another kind of device, or a CUDA device that is not there.

    Example:
        >>> import torch
        >>> detect(torch.device("cpu")).device_kind
        'cpu'
    """
    if device.type == "cpu":
        return _detect_cpu()
    if device.type == "cuda":
        return _detect_cuda(device.index)
    raise MemScaleError(f"cannot plan for device {str(device)!r}: MemScale knows cpu and cuda")


def budget_bytes(config: Config, hardware: Hardware) -> Budget:
    """The budget: `memory_budget` if there is one, else `target_gpu_utilization` of the device's memory.

    On a card an absolute budget is capped at the card's memory. On a CPU it is not, so that a plan can be
    made on a small machine for a larger one.

    Raises:
        MemScaleError: No `memory_budget` and the system does not say how much memory there is.
    """
    asked = config.memory_budget_bytes
    if asked is not None:
        source = f"memory_budget={config.memory_budget!r}"
        if hardware.device_kind == "cuda" and asked > hardware.total_bytes:
            there_are = format_bytes(hardware.total_bytes)
            return Budget(hardware.total_bytes, f"{source}, capped at the {there_are} there are")
        return Budget(asked, source)
    if hardware.total_bytes <= 0:
        raise MemScaleError(f"cannot tell the memory of {hardware.name}: give memory_budget, such as '8GiB'")
    # In millionths, so that the budget is an exact function of what was written.
    share_ppm = max(1, round(config.target_gpu_utilization * 1_000_000))
    source = f"{share_ppm / 10_000:g} % of {format_bytes(hardware.total_bytes)}"
    return Budget(max(1, hardware.total_bytes * share_ppm // 1_000_000), source)


def _detect_cpu() -> Hardware:
    import torch

    memory = host.host_memory()
    threads = torch.get_num_threads()
    flags = host.cpu_flags()
    rates = cpu_rates(threads, wide="avx512f" in flags)
    has_half = not flags.isdisjoint(_BF16_CPU_FLAGS)
    return Hardware(
        device_kind="cpu",
        device_index=0,
        name=f"CPU host, {threads} thread{'s' if threads != 1 else ''}",
        total_bytes=memory.total_bytes,
        free_bytes=memory.available_bytes,
        compute_capability=None,
        supports_bf16=has_half,
        supports_fp16=not flags.isdisjoint(_FP16_CPU_FLAGS),
        host_total_bytes=memory.total_bytes,
        host_available_bytes=memory.available_bytes,
        pinned_limit_bytes=host.pinned_limit_bytes(),
        is_wsl=host.is_wsl(),
        cpu_threads=threads,
        link_bytes_per_us=rates.link_bytes_per_us,
        cost=host_cost(rates, threads, has_half),
        context_bytes=0,
        process_bytes=host.process_bytes(),
    )


def _detect_cuda(wanted: int | None) -> Hardware:
    import torch

    if not torch.cuda.is_available():
        raise MemScaleError("cannot plan for a CUDA device: torch.cuda.is_available() is False")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if wanted is None else wanted
    if not 0 <= index < count:
        raise MemScaleError(f"cannot plan for device 'cuda:{index}': PyTorch sees {count} CUDA device(s)")
    free, total = torch.cuda.mem_get_info(index)
    card = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    units = torch.cuda.get_device_properties(index).multi_processor_count
    return replace(card_hardware(*card, total, free_bytes=free, index=index), multiprocessors=units)


def card_hardware(
    name: str, capability: tuple[int, int], total_bytes: int, free_bytes: int | None = None, index: int = 0
) -> Hardware:
    """Describes a card in this host. The card itself is not asked; it need not be there.

    Args:
        name: As the driver reports it; decides the rates.
        capability: CUDA compute capability, major and minor.
        total_bytes: As `cudaMemGetInfo` reports it.
        free_bytes: What of it is free; None: all.
        index: Ordinal of the card.
    """
    import torch

    memory = host.host_memory()
    rates = gpu_rates(name, capability)
    return Hardware(
        device_kind="cuda",
        device_index=index,
        name=name,
        total_bytes=total_bytes,
        free_bytes=total_bytes if free_bytes is None else free_bytes,
        compute_capability=capability,
        supports_bf16=capability >= (8, 0),
        supports_fp16=capability >= (7, 0),
        host_total_bytes=memory.total_bytes,
        host_available_bytes=memory.available_bytes,
        pinned_limit_bytes=host.pinned_limit_bytes(),
        is_wsl=host.is_wsl(),
        cpu_threads=torch.get_num_threads(),
        link_bytes_per_us=rates.link_bytes_per_us,
        cost=card_cost(rates, _fp32_rate(rates)),
        context_bytes=_cuda_context_bytes(capability),
        process_bytes=host.process_bytes(),
    )


def _fp32_rate(rates: Rates) -> int:
    """The FP32 rate under PyTorch's present setting for TF32."""
    import torch

    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # PyTorch refuses to answer once its old and new settings have been mixed
        precision = "highest"
    return rates.flops_per_us if precision == "highest" else rates.tf32_flops_per_us


def _cuda_context_bytes(capability: tuple[int, int]) -> int:
    """What the CUDA context takes, by the card's generation and the way its kernels are loaded."""
    eager = os.environ.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"
    if capability >= _HOPPER:
        return _EAGER_HOPPER_CONTEXT_BYTES if eager else _LAZY_HOPPER_CONTEXT_BYTES
    return _EAGER_CONTEXT_BYTES if eager else _LAZY_CONTEXT_BYTES
