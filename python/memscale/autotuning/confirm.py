# SPDX-License-Identifier: Apache-2.0
"""Real steps of a candidate: what they take and how long, inside a guard.

    peak    two global steps, each of at most two micro-batches: without and with gradients of an earlier one
    time    the same again without the profiler, until medians are worth something

The loop is that of `TuningResult.snippet`, and the plan is that of its `memscale.wrap`.
On a CPU host tensor bytes are counted as PyTorch's profiler reports them, from before the model is wrapped.
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memscale.api import optimize
from memscale.autotuning.candidate import Candidate, Confirmed
from memscale.autotuning.scratch import scratch_state
from memscale.config.config import Config
from memscale.core.profiler import normalize_sample
from memscale.core.wrapping import executor_of
from memscale.hardware.detect import Hardware
from memscale.hardware.host import host_memory
from memscale.observability.tensor_peak import TensorPeak
from memscale.trace.loss import loss_of, own_loss
from memscale.units import format_bytes

Guard = Callable[[], AbstractContextManager[None]]

_STATUS = Path("/proc/self/status")

_ROOM_BYTES: Final = 256 << 20
"""What a guard leaves beside tensors: for stacks of threads, libraries, the profiler's rows."""

_FRAGMENTATION: Final = 2
"""Memory that malloc takes for tensors of many sizes, as a multiple of theirs: up to 1.8 was seen."""

_GUARD: Final = 4
"""Of the predicted peak: what takes more is not fragmentation."""

_QUIETLY: Final[dict[str, Any]] = {
    "enable_logging": False,
    "log_file": None,
    "observability_port": None,
    "record": None,
    "strict_budget": False,
    "verify_correctness": False,
}
"""What is of no use to a few steps, or would be seen outside of them."""

_PEAK_STEPS: Final = 2
_LEAST_STEPS, _MOST_STEPS, _SECONDS = 3, 20, 1.0

_NO_MEMORY: Final = ("can't allocate memory", "not enough memory", "out of memory")


@dataclass
class Times:
    """Seconds of parts of steps.

    Attributes:
        micro: of a forward and its backward.
        update: of an optimizer's step.
    """

    micro: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)

    def step_ns(self, accumulation: int) -> int:
        """Of a global step, from medians."""
        seconds = accumulation * statistics.median(self.micro) + statistics.median(self.update)
        return max(1, round(seconds * 1e9))


@dataclass(frozen=True)
class Confirmation:
    """Runs candidates for real and leaves the loop's state as it was.

    Attributes:
        model: wrapped or not.
        optimizer: trains it; None: an AdamW of the time.
        hardware: where the model is.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    hardware: Hardware

    def guarded_bytes(self, candidate: Candidate) -> int:
        """What steps of a candidate may take: far more than predicted, and less than the machine has."""
        there = host_memory().available_bytes
        return min(_GUARD * candidate.highest_bytes + _ROOM_BYTES, self._present_bytes() + there)

    def why_not(self, candidate: Candidate) -> str:
        """Why this candidate is not run: this machine has no room for it; "" where it has."""
        if self.hardware.device_kind != "cpu":
            return ""
        needed = _FRAGMENTATION * candidate.highest_bytes + _ROOM_BYTES - self._present_bytes()
        there = host_memory().available_bytes
        if needed <= there:
            return ""
        return f"{format_bytes(needed)} might be needed, and {format_bytes(there)} are free"

    def run(self, candidate: Candidate, samples: Sequence[Callable[[], Any]], config: Config) -> Confirmed:
        """Runs steps of a candidate.

        Args:
            candidate: fits by prediction.
            samples: each makes a worst batch of its size.
            config: has the budget, and is not to log.

        Raises:
            Exception: the model's own, but for running out of memory.
        """
        optimizer = self.optimizer
        if optimizer is None:
            optimizer = torch.optim.AdamW([value for value in self.model.parameters() if value.requires_grad])
        directory = config.async_config.directory if config.async_config is not None else None
        with _unwrapped(self.model), scratch_state(self.model, optimizer, (), directory or ""):
            steps = _Steps(self.model, optimizer, samples, min(candidate.accumulation, 2))
            retries = _retries(self.hardware)
            try:
                peak, times = self._measured(steps, config, self._guard(candidate))
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                return Confirmed(0, 0, steps.taken, _retries(self.hardware) - retries, out_of_memory=True)
            finally:
                steps.release()
            return Confirmed(
                peak,
                times.step_ns(candidate.accumulation),
                steps.taken,
                _retries(self.hardware) - retries,
                loss=steps.loss,
            )

    def _measured(self, steps: _Steps, config: Config, guard: Guard) -> tuple[int, Times]:
        with (
            self._peak() as peak,
            optimize(self.model, self.optimizer, config.replace(**_QUIETLY), steps.samples[0]),
        ):
            with guard():
                for _ in range(_PEAK_STEPS):
                    peak.mark()  # a plan may have let go of weights and state, at once or in a step
                    steps.run()
            found, _ = peak.end()  # takes memory of its own
            times = Times()
            with guard():
                began = time.perf_counter()
                while len(times.update) < _MOST_STEPS:
                    if len(times.update) >= _LEAST_STEPS and time.perf_counter() - began > _SECONDS:
                        break
                    steps.run(times)
        return found, times

    def _guard(self, candidate: Candidate) -> Guard:
        if self.hardware.device_kind != "cpu":
            return nullcontext
        return functools.partial(data_limit, self.guarded_bytes(candidate) - self._present_bytes())

    def _peak(self) -> TensorPeak | _CudaPeak:
        if self.hardware.device_kind == "cuda":
            return _CudaPeak(self.hardware)
        return TensorPeak(self._present())

    def _present_bytes(self) -> int:
        storages = [value.untyped_storage() for value in self._present() if value.layout is torch.strided]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _present(self) -> list[Tensor]:
        """What a step finds: weights, buffers, gradients, the optimizer's state."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [value.grad for value in self.model.parameters() if value.grad is not None]
        if self.optimizer is not None:
            leaves = tree_leaves(list(self.optimizer.state.values()))
            tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return tensors


class _Steps:
    """The loop."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        samples: Sequence[Callable[[], Any]],
        micros: int,
    ) -> None:
        self.samples = samples
        self.taken = 0
        self.loss = ""
        self._model, self._optimizer, self._micros = model, optimizer, micros

    def run(self, times: Times | None = None) -> None:
        """One step of the optimizer, of at most two micro-batches of the next worst batch."""
        args, kwargs = normalize_sample(self.samples[self.taken % len(self.samples)])
        for number in range(self._micros):
            began = _now()
            output = self._model(*args, **kwargs)
            loss = loss_of(output)
            self.loss = _form_of(output)
            del output
            if loss is None:
                raise RuntimeError("nothing that the model returns requires a gradient, so there is no step")
            (loss / self._micros).backward()
            del loss
            if times is not None and number == self._micros - 1:  # those before may find no gradients
                times.micro.append(_now() - began)
        began = _now()
        self._optimizer.step()
        if times is not None:
            times.update.append(_now() - began)
        self._optimizer.zero_grad()
        self.taken += 1

    def release(self) -> None:
        """Lets go of what a step that failed has left."""
        self._optimizer.zero_grad()
        gc.collect()


def _form_of(output: Any) -> str:
    if own_loss(output) is None:
        return "criterion"
    if isinstance(output, Tensor):
        return ""
    if getattr(output, "loss", None) is not None:
        return ".loss"
    return '["loss"]' if isinstance(output, dict) else "[0]"


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def _unwrapped(model: nn.Module) -> Iterator[None]:
    """Takes the plan of a wrapped model off for a block."""
    executor = executor_of(model)
    if executor is None:
        yield
        return
    executor.stop()
    try:
        yield
    finally:
        executor.resume()


# ---- peaks -----------------------------------------------------------------------------------------


class _CudaPeak:
    """What the card holds from `mark` to `end`: reserved memory and the context."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._marked = False

    def __enter__(self) -> _CudaPeak:
        gc.collect()
        torch.cuda.empty_cache()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.empty_cache()

    def mark(self) -> None:
        """What is reserved now counts, and what comes."""
        torch.cuda.synchronize()
        if not self._marked:
            torch.cuda.reset_peak_memory_stats(self._hardware.device_index)
        self._marked = True

    def end(self) -> tuple[int, int]:
        """The peak, and nothing of what was before."""
        torch.cuda.synchronize()
        index = self._hardware.device_index
        return torch.cuda.max_memory_reserved(index) + self._hardware.context_bytes, 0


def _retries(hardware: Hardware) -> int:
    if hardware.device_kind != "cuda":
        return 0
    return int(torch.cuda.memory_stats(hardware.device_index).get("num_alloc_retries", 0))


# ---- the guard -------------------------------------------------------------------------------------


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    words = str(error).lower()
    return any(sign in words for sign in _NO_MEMORY)


@contextmanager
def data_limit(room_bytes: int) -> Iterator[None]:
    """Holds this process to so many bytes more than it has: an error to catch, and no kill by the kernel.

    Memory over files does not count. Where the system has no such limit the block runs without.
    """
    try:
        import resource

        size = _data_bytes()
    except (ImportError, OSError):
        size = 0
    if not size or sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = size + max(room_bytes, 0)
    known = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """Private memory of this process that can be written to."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0
