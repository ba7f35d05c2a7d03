# SPDX-License-Identifier: Apache-2.0
"""Snapshot and restore of PyTorch's scoped settings: what kernels run, in which dtype, on which device.

A forward runs inside `sdpa_kernel(...)`, `torch.device(...)`, `torch.backends.mkldnn.flags(...)`,
`parametrize.cached()` or a mode of the user's; its backward, and with it a recompute, often does not. Each of
these decides what the forward computes. Reading all of them takes a few microseconds.

    flags       of the process: attention backends, default dtype, determinism, TF32, oneDNN, threads, …
    modes       of the thread: `TorchFunctionMode` (the default device is one) and `TorchDispatchMode`
    cached      `torch.nn.utils.parametrize.cached()`: whether it is on, and what it has

Autocast and generators are not here: they have values per device, see `checkpoint_state`.
"""

from __future__ import annotations

import functools
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch.utils import _python_dispatch

_c: Any = torch._C
_dispatch: Any = _python_dispatch


class _Flag(NamedTuple):
    """One setting of the process."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


_PAIRS = (
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("_get_deterministic_fill_uninitialized_memory", "_set_deterministic_fill_uninitialized_memory"),
    ("_get_cpu_allow_fp16_reduced_precision_reduction", "_set_cpu_allow_fp16_reduced_precision_reduction"),
    ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("_get_nnpack_enabled", "_set_nnpack_enabled"),
)
"""Getters and setters in `torch._C`; what a version of PyTorch does not have is left out."""

_CARD_PAIRS = (
    ("_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
    ("_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
    ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    (
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
    ),
    (
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_bf16_reduced_precision_reduction",
    ),
    ("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
    ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
)
"""The same, of settings that only a card's kernels read."""

_PRECISIONS = (
    ("generic", "all"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)

_CARD_PRECISIONS = (("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))


def _read_determinism() -> tuple[bool, bool]:
    return _c._get_deterministic_algorithms(), _c._get_deterministic_algorithms_warn_only()


def _read_warnings() -> tuple[Any, ...]:
    """The filters of Python's warnings: one that raises an error would do so in backward."""
    return tuple(warnings.filters)


def _write_warnings(value: tuple[Any, ...]) -> None:
    warnings.filters[:] = value  # type: ignore[index]  # a list, whatever its stub says
    mutated: Any = vars(warnings).get("_filters_mutated") or vars(warnings).get("_filters_mutated_lock_held")
    if mutated is not None:
        mutated()


def _read_anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _write_anomaly(value: tuple[bool, bool]) -> None:
    torch.set_anomaly_enabled(*value)


def _write_determinism(value: tuple[bool, bool]) -> None:
    _c._set_deterministic_algorithms(value[0], warn_only=value[1])


def _pair(read: str, write: str) -> _Flag:
    put = getattr(_c, write)
    if "reduced_precision_reduction" in write:  # newer versions have a second switch, for split-k
        return _Flag(getattr(_c, read), lambda value: put(*value) if isinstance(value, tuple) else put(value))
    return _Flag(getattr(_c, read), put)


def _precision(backend: str, op: str) -> _Flag:
    return _Flag(
        functools.partial(_c._get_fp32_precision_getter, backend, op),
        functools.partial(_c._set_fp32_precision_setter, backend, op),
    )


def _of_einsum(name: str) -> _Flag:
    from torch.backends import opt_einsum

    return _Flag(functools.partial(getattr, opt_einsum, name), functools.partial(setattr, opt_einsum, name))


def _present_flags() -> tuple[_Flag, ...]:
    flags = [
        _Flag(torch.get_default_dtype, _c._set_default_dtype),
        _Flag(_read_determinism, _write_determinism),
        _Flag(torch.get_num_threads, torch.set_num_threads),
        _Flag(_read_anomaly, _write_anomaly),
        _Flag(_read_warnings, _write_warnings),
    ]
    cards = torch.backends.cuda.is_built()
    pairs = _PAIRS + _CARD_PAIRS * cards
    flags += [_pair(read, write) for read, write in pairs if hasattr(_c, read) and hasattr(_c, write)]
    if hasattr(_c, "_get_fp32_precision_getter"):
        flags += [_precision(*names) for names in _PRECISIONS + _CARD_PRECISIONS * cards]
    if torch.backends.opt_einsum.is_available():
        flags += [_of_einsum("enabled"), _of_einsum("strategy")]
    return tuple(flag for flag in flags if _read(flag) is not _UNREADABLE)


_UNREADABLE: Final = object()
"""Stands for a setting that PyTorch refuses to tell, as it does where an older way to set it and a newer one
disagree."""


def _read(flag: _Flag) -> Any:
    try:
        return flag.read()
    except RuntimeError:
        return _UNREADABLE


_FLAGS = _present_flags()
_READS = tuple(flag.read for flag in _FLAGS)


def _read_all() -> list[Any]:
    try:
        return [read() for read in _READS]
    except RuntimeError:
        return [_read(flag) for flag in _FLAGS]


def _write_flags(wanted: list[Any]) -> None:
    if _read_all() == wanted:
        return
    for flag, value in zip(_FLAGS, wanted, strict=True):  # read once more: one may change with another
        if value is not _UNREADABLE and _read(flag) not in (value, _UNREADABLE):
            flag.write(value)


class TorchSettings:
    """The settings that a call found."""

    __slots__ = ("_cached", "_dispatch", "_flags", "_functions")

    _functions: _Modes
    _dispatch: _Modes

    def __init__(self) -> None:
        self._flags = _read_all()
        self._functions = self._dispatch = ()
        if has_modes():
            self._functions, self._dispatch = _function_modes(), _dispatch_modes()
        self._cached = _cached_parametrizations()

    def restore(self, stack: ExitStack) -> None:
        """Puts these in force, and those of the present back when `stack` closes.

        Args:
            stack: of the recompute. What it entered before this keeps what is in force now.
        """
        present = _read_all()
        stack.callback(_write_flags, present)  # a recompute that ends early has not put back what it set
        if present != self._flags:
            _write_flags(self._flags)
        if self._functions or self._dispatch or has_modes():
            _exchange(stack, self._functions, *_FUNCTIONS)
            _exchange(stack, self._dispatch, *_DISPATCH)
        self._restore_cached(stack)

    def _restore_cached(self, stack: ExitStack) -> None:
        present = _cached_parametrizations()
        if self._cached[0] or present[0]:
            stack.callback(_write_cached, *present)
            count, tensors = self._cached
            _write_cached(count, dict(tensors))  # a copy: another recompute starts from the same


_Modes = tuple[Any, ...]


def _function_modes() -> _Modes:
    return tuple(map(_c._get_function_stack_at, range(_c._len_torch_function_stack())))


def _dispatch_modes() -> _Modes:
    if not _c._len_torch_dispatch_stack():
        return ()
    return tuple(_dispatch._get_current_dispatch_mode_stack())


_FUNCTIONS: Final = _function_modes, _c._push_on_torch_function_stack, _c._pop_torch_function_stack
_DISPATCH: Final = _dispatch_modes, _dispatch._push_mode, _dispatch._pop_mode
"""How each stack of modes is read and changed."""


def _is_users(mode: Any) -> bool:
    """Whether a mode is a program's own, and not part of how PyTorch or MemScale look at a step."""
    return not type(mode).__module__.startswith(("memscale.", "torch._", "torch.fx."))


_OBSERVERS: Final = ("torch.utils.flop_counter", "torch.utils._debug_mode", "torch.distributed._tools")
"""Modules of PyTorch whose modes count or write down what runs, and change nothing of it."""


def _only_looks_on(mode: Any) -> bool:
    return type(mode).__module__.startswith(_OBSERVERS)


def has_modes() -> bool:
    """Whether any mode is in force."""
    return bool(_c._len_torch_function_stack() or _c._len_torch_dispatch_stack())


def users_modes() -> list[Any]:
    """The modes in force that are a program's own."""
    if not has_modes():
        return []
    modes = *_function_modes(), *_dispatch_modes()
    return [mode for mode in modes if _is_users(mode) and not type(mode).__module__.startswith("torch.")]


class PresentModes:
    """The modes that are in force when this is made."""

    def __init__(self) -> None:
        self._functions, self._dispatch = _function_modes(), _dispatch_modes()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Has them in force for a block, but for those that only look on: it is no part of their step."""
        with ExitStack() as stack:
            _exchange(stack, self._functions, *_FUNCTIONS)
            _exchange(stack, self._dispatch, *_DISPATCH)
            yield


def without_modes() -> ExitStack:
    """Takes all modes off for a block, if they are a program's: it runs nothing of the program."""
    stack = ExitStack()
    _exchange(stack, (), *_FUNCTIONS)
    _exchange(stack, (), *_DISPATCH)
    return stack


def _exchange(
    stack: ExitStack,
    wanted: _Modes,
    read: Callable[[], _Modes],
    push: Callable[[Any], Any],
    pop: Callable[[], Any],
) -> None:
    """Exchanges the thread's modes until `stack` closes, but for those in which a step is looked at.

    Those that only look on are taken off.
    """
    present = read()
    if wanted and any(map(_only_looks_on, wanted)):
        wanted = tuple(mode for mode in wanted if not _only_looks_on(mode))
    if len(present) == len(wanted) and all(map(operator.is_, present, wanted)):
        return
    if not all(map(_is_users, present + wanted)):
        return
    stack.callback(_put, present, read, push, pop)
    _put(wanted, read, push, pop)


def _put(
    modes: _Modes, read: Callable[[], _Modes], push: Callable[[Any], Any], pop: Callable[[], Any]
) -> None:
    for _ in read():
        pop()
    for mode in modes:
        push(mode)


_Cached = tuple[int, dict[Any, Any]]
"""How often `parametrize.cached()` was entered, and what it has."""


def _cached_parametrizations() -> _Cached:
    module: Any = sys.modules.get("torch.nn.utils.parametrize")
    if module is None or not module._cache_enabled:
        return 0, {}
    return module._cache_enabled, dict(module._cache)


def _write_cached(count: int, tensors: dict[Any, Any]) -> None:
    module: Any = sys.modules["torch.nn.utils.parametrize"]
    module._cache_enabled, module._cache = count, tensors
