# SPDX-License-Identifier: Apache-2.0
"""Steps of `include/memscale/optim.h` by its C functions, on host cores and on a card, to compare their bits.

The library is the one that ``MEMSCALE_LIBRARY`` names: the Python package has no public way to these kernels.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from ctypes import c_char, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64
from ctypes import c_void_p as address
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

UNSUPPORTED = 5
BLOCK = 128
CUDA = 1

WEIGHT_BYTES = (4, 2, 2, 2)
MASTER_BYTES = (0, 4, 2, 1)
MOMENT_BYTES = (4, 2, 1)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KINDS = {"adamw": 0, "adam": 1, "sgd": 2, "momentum": 2, "nesterov": 2, "lion": 3}

Empty = Callable[[int], torch.Tensor]
"""Bytes in the memory of whoever works on them, all zero."""


class Refused(RuntimeError):
    """A call of the library failed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Error(ctypes.Structure):
    _fields_ = (("status", c_int), ("driver_code", c_int32), ("message", c_char * 512))


class Faults(ctypes.Structure):
    _fields_ = (
        ("seed", c_uint64),
        ("delay_most_ns", c_int64),
        ("bytes_per_second", c_uint64),
        ("split_ppm", c_uint32),
        ("fail_ppm", c_uint32),
        ("pin_limit_bytes", c_uint64),
        ("refuse_pins", c_uint32),
        ("pin_delay_us", c_uint32),
    )


class DeviceOptions(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", c_size_t),
        ("kind", c_int),
        ("ordinal", c_uint32),
        ("library", c_char_p),
        ("compiler", c_char_p),
        ("faults", Faults),
    )


class Options(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", c_size_t),
        ("thread_count", c_uint32),
        ("isa", c_int),
        ("device", address),
        ("stream", address),
    )


class Rule(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", c_size_t),
        ("kind", c_int),
        ("gradient", c_int),
        ("weights", c_int),
        ("moments", c_int),
        *((name, c_double) for name in ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay")),
        ("momentum", c_double),
        ("dampening", c_double),
        ("nesterov", c_uint32),
        ("maximize", c_uint32),
        ("gradient_scale", c_float),
    )


_ARRAYS = ("gradient", "weight", "master", "moment1", "moment2", "scale1", "scale2")


class Tensor(ctypes.Structure):
    _fields_ = (
        ("count", c_uint64),
        ("first", c_uint64),
        ("step", c_uint64),
        *((name, address) for name in _ARRAYS),
    )


class Array(ctypes.Structure):
    _fields_ = (("values", address), ("count", c_uint64), ("type", c_int))


class Norm(ctypes.Structure):
    _fields_ = (("sum_of_squares", c_double), ("nonfinite_count", c_uint64))


Defaults = TypeVar("Defaults", bound=ctypes.Structure)


class Library:
    """The C library. A failing call raises `Refused`."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def default(self, kind: type[Defaults], name: str, *arguments: Any) -> Defaults:
        made = kind()
        getattr(self._library, name)(*arguments, ctypes.byref(made), c_size_t(ctypes.sizeof(made)))
        return made

    def call(self, name: str, *arguments: Any) -> None:
        error = Error()
        status = getattr(self._library, name)(*arguments, ctypes.byref(error))
        if status != 0:
            raise Refused(status, error.message.decode())

    def end(self, name: str, it: address) -> None:
        getattr(self._library, name)(it)


class Worker:
    """An optimizer, on host cores or on a card."""

    def __init__(
        self, library: Library, empty: Empty, card: DeviceOptions | None = None, stream: int = 0
    ) -> None:
        self.empty = empty
        self.library = library
        self.it, self._context, self._device = address(), address(), address()
        library.call("msc_context_create", None, ctypes.byref(self._context))
        options = library.default(Options, "msc_optim_options_init")
        try:
            if card is not None:
                library.call(
                    "msc_device_create", self._context, ctypes.byref(card), ctypes.byref(self._device)
                )
                options.device, options.stream = self._device, stream
            library.call("msc_optim_create", self._context, ctypes.byref(options), ctypes.byref(self.it))
        except Refused:
            self.close()
            raise

    def close(self) -> None:
        self.library.end("msc_optim_destroy", self.it)
        self.library.end("msc_device_destroy", self._device)
        self.library.end("msc_context_destroy", self._context)


class Case(NamedTuple):
    """What a step deals with."""

    kind: str
    gradient: int
    weights: int
    moments: int


def cases() -> Iterator[Case]:
    """Every combination of optimizer and storage."""
    for kind, gradient, weights, moments in product(KINDS, range(3), range(4), range(3)):
        yield Case(kind, gradient, weights, moments)


def rule_of(library: Library, case: Case) -> Rule:
    rule = library.default(Rule, "msc_optim_rule_init", KINDS[case.kind])
    rule.gradient, rule.weights, rule.moments = case.gradient, case.weights, case.moments
    rule.learning_rate, rule.weight_decay, rule.beta2, rule.gradient_scale = 0.0137, 0.043, 0.97, 0.71
    rule.momentum = 0.85 if case.kind in ("momentum", "nesterov") else 0.0
    rule.nesterov = int(case.kind == "nesterov")
    return rule


def state_of(case: Case, count: int, empty: Empty) -> dict[str, torch.Tensor]:
    """The arrays of a tensor, zero but for weights that are drawn from a seed; a master's rest stays 0."""
    moments = {"sgd": 0, "adam": 2, "adamw": 2}.get(case.kind, 1)
    each = MOMENT_BYTES[case.moments]
    scales = -(-count // BLOCK) if case.moments == 2 else 0
    sizes = {
        "gradient": count * (4 if case.gradient == 0 else 2),
        "weight": count * WEIGHT_BYTES[case.weights],
        "master": count * MASTER_BYTES[case.weights],
        "moment1": count * each if moments else 0,
        "moment2": count * each if moments == 2 else 0,
        "scale1": scales if moments else 0,
        "scale2": scales if moments == 2 else 0,
    }
    state = {name: empty(size) for name, size in sizes.items() if size > 0}
    weights = torch.randn(count, generator=torch.Generator().manual_seed(3))
    stored = weights if case.weights == 0 else weights.bfloat16()
    state["weight"].copy_(stored.view(torch.uint8))
    if case.weights == 1:
        state["master"].copy_(stored.float().view(torch.uint8))
    return state


def run(worker: Worker, case: Case, count: int, steps: int = 3) -> dict[str, torch.Tensor]:
    """State after some steps, on the host. Gradients are the same in every run."""
    rule = rule_of(worker.library, case)
    state = state_of(case, count, worker.empty)
    tensor = Tensor(count=count, **{name: array.data_ptr() for name, array in state.items()})
    for step in range(1, steps + 1):
        gradient = torch.randn(count, generator=torch.Generator().manual_seed(step)) * 10.0 ** -(step % 4)
        state["gradient"].copy_(gradient.to(FLOATS[case.gradient]).view(torch.uint8))
        tensor.step = step
        worker.library.call(
            "msc_optim_step", worker.it, ctypes.byref(rule), ctypes.byref(tensor), c_uint64(1)
        )
    norm_of(worker, state["gradient"], case.gradient)  # waits for what was submitted
    return {name: array.cpu() for name, array in state.items()}


def norm_of(worker: Worker, numbers: torch.Tensor, kind: int) -> tuple[float, int]:
    """Sum of squares, and how many are not finite."""
    array = Array(values=numbers.data_ptr(), count=numbers.numel() // (4 if kind == 0 else 2), type=kind)
    norm = Norm()
    arguments = (worker.it, ctypes.byref(array), c_uint64(1), c_float(0.37), ctypes.byref(norm))
    worker.library.call("msc_optim_norm", *arguments)
    return norm.sum_of_squares, norm.nonfinite_count


def nvrtc() -> str | None:
    """NVIDIA's compiler: what ``MEMSCALE_NVRTC`` names, or the one beside PyTorch; None: the system's."""
    named = os.environ.get("MEMSCALE_NVRTC")
    if named:
        return named
    packages = Path(torch.__file__).parent.parent
    found = [*packages.glob("nvidia/**/libnvrtc*.so*"), *packages.glob("torch/lib/libnvrtc*.so*")]
    usable = [path for path in sorted(found) if "builtins" not in path.name and ".alt" not in path.name]
    return str(usable[0]) if usable else None


def card_options(library: Library, driver: str | None = None) -> DeviceOptions:
    """Card 0, on the machine's driver or a stand-in for it."""
    options = library.default(DeviceOptions, "msc_device_options_init")
    options.kind = CUDA
    options.library = driver.encode() if driver else None
    compiler = nvrtc()
    options.compiler = compiler.encode() if compiler else None
    return options
