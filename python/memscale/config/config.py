# SPDX-License-Identifier: Apache-2.0
"""The configuration: `Config`, its modes, and the settings of the asynchronous engine.

A mode is a starting point and explicit fields override it. So a `Config` remembers which fields were given:

    Config(mode=AGGRESSIVE)                       enable_tiling reads True: the mode says so
    Config(mode=AGGRESSIVE, enable_tiling=False)  enable_tiling reads False: the caller says so

Every field reads as the value that applies, after the mode has spoken. The memory of what was explicit
matters in three places only: contradictions are judged between explicit fields, `replace` lets a new mode
speak again for the fields that were not given, and files hold the explicit fields alone.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias, TypeVar, cast

from memscale.config import checks
from memscale.config import text as config_text
from memscale.units import parse_bytes

__all__ = ["CONFIG_VERSION", "AsyncOffloadConfig", "Config", "EffectiveConfig", "OptimizationMode"]

CONFIG_VERSION: Final = 1
"""Version of the dict, JSON and YAML form. A change that an older reader would misread raises it."""

EIGHT_BIT_BACKENDS: Final = ("auto", "memscale", "bitsandbytes", "torchao")
"""Where 8-bit optimizer state may come from."""

RECOMPUTE_CHECKS: Final = ("always", "first", "off")
"""How often a recompute is compared with its forward by value."""

OOM_ACTIONS: Final = ("report", "survive")
"""What happens when a step runs out of memory."""

TIERS: Final = ("pinned", "pageable", "file")
"""Where the offload engine may put bytes, fastest first."""

_T = TypeVar("_T")
_C = TypeVar("_C", bound="Config")
_A = TypeVar("_A", bound="AsyncOffloadConfig")


class OptimizationMode(str, enum.Enum):
    """How far MemScale goes unless explicit fields say otherwise."""

    CONSERVATIVE = "conservative"
    """Checkpointing only."""
    BALANCED = "balanced"
    """Checkpointing; offload too, where `async_offload` is on."""
    AGGRESSIVE = "aggressive"
    """The full stack: plus offload, tiling, mixed precision and 8-bit optimizer state."""


ModeName: TypeAlias = Literal["conservative", "balanced", "aggressive"]
"""A mode as text. A configuration always has the `OptimizationMode` of it."""

_MODE_VALUES: Final[Mapping[OptimizationMode, Mapping[str, bool]]] = {
    OptimizationMode.CONSERVATIVE: {"enable_offloading": False},
    OptimizationMode.BALANCED: {},
    OptimizationMode.AGGRESSIVE: {
        "enable_tiling": True,
        "use_mixed_precision": True,
        "use_8bit_optimizer": True,
        "async_offload": True,
    },
}
"""Where a mode differs from the defaults of the fields."""

_TECHNIQUES: Final = (
    "enable_checkpointing",
    "enable_offloading",
    "enable_tiling",
    "use_mixed_precision",
    "use_8bit_optimizer",
)

_INEXACT: Final = ("enable_tiling", "use_8bit_optimizer")
"""Techniques that round differently from plain PyTorch at the same precision."""


def _check_mode(field: str, value: object) -> OptimizationMode:
    """A mode, or its name in any case."""
    try:
        return OptimizationMode(value.lower() if isinstance(value, str) else value)
    except ValueError:
        names = ", ".join(repr(mode.value) for mode in OptimizationMode)
        raise checks.refuse(field, value, f"give an OptimizationMode or one of {names}") from None


def _check_async(field: str, value: object) -> object:
    """The engine's settings, or None."""
    if value is None or isinstance(value, AsyncOffloadConfig):
        return value
    raise checks.refuse(field, value, f"give an AsyncOffloadConfig or None, not {type(value).__name__}")


def _check_choice(field: str, value: object) -> bool | None:
    """True, False, or None to let MemScale decide."""
    return None if value is None else checks.check_bool(field, value)


def _named_fields(cls: type[_T]) -> type[_T]:
    """Makes `cls(...)` refuse unknown fields by name and remember which fields were given.

    Wraps the `__init__` that `dataclass` wrote, so that type checkers and `help` still see its signature. The
    names end up in `_explicit`, set before `__post_init__` runs.
    """
    plain_init = cls.__init__
    known = [field.name for field in dataclasses.fields(cast(Any, cls))]

    @functools.wraps(plain_init)
    def __init__(self: _T, *args: Any, **given: Any) -> None:  # noqa: N807 - it becomes the class's own
        for name, value in given.items():
            if name not in known:
                raise checks.unknown_field(cls.__name__, name, value, known)
        object.__setattr__(self, "_explicit", frozenset(known[: len(args)]) | frozenset(given))
        plain_init(self, *args, **given)

    cls.__init__ = __init__  # type: ignore[assignment]
    return cls


def _normalise(instance: object, field_checks: Mapping[str, checks.Check]) -> None:
    """Replaces every field by its checked, plain form. Only for an object still under construction."""
    for name, check in field_checks.items():
        object.__setattr__(instance, name, check(name, getattr(instance, name)))


@_named_fields
@dataclass(frozen=True)
class AsyncOffloadConfig:
    """Settings of the asynchronous offload engine.

    Args:
        pinned_pool_bytes: Pinned host memory to use at most, as bytes or "2GiB"; None: what the machine
            allows, within `max_cpu_offload_gb`.
        prefetch_depth: How many saved tensors are brought back ahead of their use; 0 loads on demand.
        tiers: Where bytes may go, in order of preference, out of "pinned", "pageable" and "file".
        directory: Folder of the file tier; required with it, refused without it.
        debug: Freed places are overwritten, blocks have checksums, and any in-place write to a saved tensor
            is refused, at a cost in time.

    Raises:
        ConfigError: A field is unknown, of the wrong type, out of range or contradicts another.

    Example:
        >>> AsyncOffloadConfig(tiers=("pinned", "file"), directory="/tmp").prefetch_depth
        2
    """

    pinned_pool_bytes: int | str | None = None
    prefetch_depth: int = 2
    tiers: tuple[str, ...] = ("pinned", "pageable")
    directory: str | None = None
    debug: bool = False

    CHECKS: ClassVar[Mapping[str, checks.Check]] = {
        "pinned_pool_bytes": checks.check_size,
        "prefetch_depth": checks.check_int(0),
        "tiers": checks.check_names(TIERS),
        "directory": checks.check_path,
        "debug": checks.check_bool,
    }

    def __post_init__(self) -> None:
        _normalise(self, self.CHECKS)
        if "file" in self.tiers and self.directory is None:
            allowed = "the tier 'file' needs directory=..., the folder to write to"
            raise checks.refuse("tiers", self.tiers, allowed)
        if self.directory is not None and "file" not in self.tiers:
            allowed = f"a directory is used by the tier 'file' only: add it to tiers={self.tiers!r}"
            raise checks.refuse("directory", self.directory, allowed)

    @property
    def pinned_pool_limit_bytes(self) -> int | None:
        """`pinned_pool_bytes` as a number, or None."""
        return _size(self.pinned_pool_bytes)

    def to_dict(self) -> dict[str, object]:
        """All fields as plain values."""
        return {**dataclasses.asdict(self), "tiers": list(self.tiers)}

    @classmethod
    def from_dict(cls: type[_A], data: Mapping[str, object]) -> _A:
        """Reads what `to_dict` wrote. Raises `ConfigError` for anything that the constructor refuses."""
        return cls(**checks.keywords(cls.__name__, data))

    def replace(self: _A, **changes: Any) -> _A:
        """A copy with some fields changed; this object stays as it is."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class EffectiveConfig:
    """What applies once mode and explicit fields are combined: plain values, sizes in bytes, nothing open.

    None remains only where it has a meaning of its own: no limit, no file, no port.
    """

    mode: OptimizationMode
    enable_checkpointing: bool
    enable_offloading: bool
    enable_tiling: bool
    use_mixed_precision: bool
    use_8bit_optimizer: bool
    eight_bit_backend: str
    max_cpu_offload_bytes: int | None
    target_gpu_utilization: float
    memory_budget_bytes: int | None
    strict_budget: bool
    force_optimize: bool
    step_in_backward: bool
    step_on_host: bool | None
    exclude: tuple[str, ...]
    only: tuple[str, ...]
    check_recompute: str
    on_oom: str
    oom_snapshot: str | None
    guard: bool
    learn_loss: bool
    exact: bool
    use_static_profiling: bool
    use_empirical_fallback: bool
    warmup_steps: int
    enable_logging: bool
    log_file: str | None
    observability_port: int | None
    record: str | None
    verify_correctness: bool
    async_offload: bool
    async_config: AsyncOffloadConfig
    auto_policy: bool

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of the technique switches that are on, in a fixed order."""
        return tuple(name for name in _TECHNIQUES if getattr(self, name))


@_named_fields
@dataclass(frozen=True)
class Config:
    """How `wrap` and its companions work. Frozen; every field is checked on creation.

    A field that was not given takes the value of the mode: CONSERVATIVE switches offloading off, AGGRESSIVE
    switches it on, and tiling, mixed precision and 8-bit optimizer state. To change a config use `replace`:
    `dataclasses.replace` would pass on what the mode chose as if it had been given.

    Args:
        mode: Starting point that explicit fields override; also accepted as text such as "aggressive".
        enable_checkpointing: Recompute activations in the backward pass.
        enable_offloading: Allow offload, which `async_offload` switches on. On the CPU only a file saves
            memory: `AsyncOffloadConfig(tiers=("file",), directory=...)`.
        enable_tiling: Compute loss, MLP and attention in tiles.
        use_mixed_precision: Run the model's forward under BF16 autocast, where the hardware has BF16 and the
            weights are FP32; on cards with FP16 alone under FP16 autocast with loss scaling, if the optimizer
            is known. Else the plan's notes say why not. A loop that opens autocast keeps its own.
        use_8bit_optimizer: Keep optimizer state in 8 bits. The optimizer that is given to `wrap`, `optimize`
            or `apply_all_optimizations` gets it in place, on the CPU or a card; where it cannot,
            `apply_all_optimizations` may return another optimizer to use.
        eight_bit_backend: Who keeps the state: "memscale" itself, "bitsandbytes" or "torchao", or "auto" for
            the first of them that can. Other than "auto" only with `use_8bit_optimizer`.
        max_cpu_offload_gb: Cap on host memory that offload takes on a card, in GB (1e9 bytes); None: 80 % of
            what is free, rounded down to a power of two. No effect on the CPU.
        target_gpu_utilization: Share of the device's memory to use, above 0 and at most 1.
        memory_budget: Absolute budget, as bytes or a text such as "8GiB"; overrides the share.
        strict_budget: A budget that cannot be met raises `BudgetError` and changes nothing.
        force_optimize: Optimise even if the plain run fits comfortably.
        step_in_backward: A promise that nothing happens to gradients between backward and `optimizer.step()`:
            no clipping, no scaler, no closure, one backward per step, nobody reads `p.grad`. Then each
            parameter is stepped as soon as its gradient is complete, with the settings of that moment, and
            the gradient is freed; `optimizer.step()` finishes. What breaks the promise raises
            `RuntimeError`. Needs the optimizer named, and one that treats parameters independently; else the
            plan's notes say why it is not done.
        step_on_host: Who steps parameters of a card whose 8-bit state has left it. True: the host's cores, on
            state in host memory, with the bits of the card; gradients and weights come down, weights go up.
            False: the card, through which the state passes piece by piece. None: what takes less time on the
            link and the cores. State in PyTorch's form is always stepped by the card.
        exclude: Modules to leave exactly as they are, with everything in them: paths as in `named_modules()`,
            "" for the model itself, or patterns as of `fnmatch` such as "*.adapter" (`*` matches dots, too).
            A text is one pattern. One that no module matches is an error as soon as the model is known.
        only: If given, modules that match, and what is in them, are considered for techniques, and no others;
            `exclude` is taken off these.
        check_recompute: Which recomputes are compared by value with their forward: "always" all of them,
            "first" the first of each module under a plan, "off" none.
        on_oom: What happens when memory runs out: "report", what filled it and what would help, and then the
            exception; "survive", the step is repeated under a tighter plan, with every bit, where that can be
            done exactly, and else the report.
        oom_snapshot: Folder for PyTorch's snapshot of a card's allocator, as it is when a step runs out of
            memory; the report names the file. Recorded from the first forward on, the latest 100,000 events.
        guard: On a CPU host: private memory of this process is limited to what machine and control groups
            have left (RLIMIT_DATA, followed before each forward), so that the kernel's kill becomes an error
            that `on_oom` is for. On a card: retries of the allocator count as memory that has run out, and
            the next step gets a tighter plan.
        learn_loss: Measure in the first steps what a loss outside of the model takes, and re-plan for it.
            False: a usual loss is assumed where `loss=` does not say it.
        exact: True admits only techniques whose loss and gradients are bit-equal to plain PyTorch at the same
            precision. None: False in AGGRESSIVE or once an inexact technique is switched on, else True.
        use_static_profiling: Trace the step without computing it.
        use_empirical_fallback: If the trace fails, record real steps.
        warmup_steps: Passes of the real step; the last one is recorded.
        enable_logging: One block on what was found and done; False leaves only warnings.
        log_file: File that the log is appended to.
        observability_port: Port for Prometheus metrics on 127.0.0.1.
        record: Where the run is recorded: "http://host:port" of a `memscale-server` (a path names the
            project), or a folder. Training never waits for it; what the server cannot take waits on disk.
        verify_correctness: Compare loss and gradients with plain PyTorch before training.
        async_offload: Use the asynchronous tiered engine. Giving `async_config` switches it on.
        async_config: Settings of that engine.
        auto_policy: No effect in this version; the log says so.

    Raises:
        ConfigError: A field is unknown, of the wrong type, out of range or contradicts another. It is also a
            `ValueError`.

    Example:
        >>> config = Config(memory_budget="8GiB")
        >>> config.memory_budget_bytes
        8589934592
        >>> config.replace(mode="aggressive").enable_tiling
        True
    """

    mode: OptimizationMode | ModeName = OptimizationMode.BALANCED
    _: KW_ONLY
    enable_checkpointing: bool = True
    enable_offloading: bool = True
    enable_tiling: bool = False
    use_mixed_precision: bool = False
    use_8bit_optimizer: bool = False
    eight_bit_backend: str = "auto"
    max_cpu_offload_gb: float | None = None
    target_gpu_utilization: float = 0.85
    memory_budget: int | str | None = None
    strict_budget: bool = False
    force_optimize: bool = False
    step_in_backward: bool = False
    step_on_host: bool | None = None
    exclude: tuple[str, ...] | str = ()
    only: tuple[str, ...] | str = ()
    check_recompute: str = "always"
    on_oom: str = "report"
    oom_snapshot: str | None = None
    guard: bool = False
    learn_loss: bool = False
    exact: bool | None = None
    use_static_profiling: bool = True
    use_empirical_fallback: bool = True
    warmup_steps: int = 2
    enable_logging: bool = True
    log_file: str | None = None
    observability_port: int | None = None
    record: str | None = None
    verify_correctness: bool = False
    async_offload: bool = False
    async_config: AsyncOffloadConfig | None = None
    auto_policy: bool = False

    CHECKS: ClassVar[Mapping[str, checks.Check]] = {
        "mode": _check_mode,
        "enable_checkpointing": checks.check_bool,
        "enable_offloading": checks.check_bool,
        "enable_tiling": checks.check_bool,
        "use_mixed_precision": checks.check_bool,
        "use_8bit_optimizer": checks.check_bool,
        "eight_bit_backend": checks.check_choice(EIGHT_BIT_BACKENDS),
        "max_cpu_offload_gb": checks.check_float(1e9, optional=True),  # 1e18 bytes: still a 63-bit count
        "target_gpu_utilization": checks.check_float(1),
        "memory_budget": checks.check_size,
        "strict_budget": checks.check_bool,
        "force_optimize": checks.check_bool,
        "step_in_backward": checks.check_bool,
        "step_on_host": _check_choice,
        "exclude": checks.check_patterns,
        "only": checks.check_patterns,
        "check_recompute": checks.check_choice(RECOMPUTE_CHECKS),
        "on_oom": checks.check_choice(OOM_ACTIONS),
        "oom_snapshot": checks.check_path,
        "guard": checks.check_bool,
        "learn_loss": checks.check_bool,
        "exact": _check_choice,
        "use_static_profiling": checks.check_bool,
        "use_empirical_fallback": checks.check_bool,
        "warmup_steps": checks.check_int(1),
        "enable_logging": checks.check_bool,
        "log_file": checks.check_path,
        "observability_port": checks.check_int(1, 65535, optional=True),
        "record": checks.check_place,
        "verify_correctness": checks.check_bool,
        "async_offload": checks.check_bool,
        "async_config": _check_async,
        "auto_policy": checks.check_bool,
    }

    def __post_init__(self) -> None:
        _normalise(self, self.CHECKS)
        checks.warn_of_few_bytes("memory_budget", self.memory_budget, stacklevel=4)  # who calls Config(...)
        for name, value in self._implied().items():
            if name not in self.explicit:
                object.__setattr__(self, name, value)
        self._refuse_contradictions()

    @property
    def explicit(self) -> frozenset[str]:
        """Names of the fields that were given, as opposed to taken from the mode or the defaults."""
        return cast("frozenset[str]", self.__dict__["_explicit"])

    @property
    def memory_budget_bytes(self) -> int | None:
        """`memory_budget` as a number of bytes, or None."""
        return _size(self.memory_budget)

    def effective(self) -> EffectiveConfig:
        """What applies: every open field resolved, every size a number of bytes."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        cap_gb = values.pop("max_cpu_offload_gb")
        del values["memory_budget"]
        values["max_cpu_offload_bytes"] = None if cap_gb is None else max(1, int(cap_gb * 1e9))
        values["memory_budget_bytes"] = self.memory_budget_bytes
        values["exact"] = self._exact()
        values["async_config"] = self.async_config or AsyncOffloadConfig()
        return EffectiveConfig(**values)

    def replace(self: _C, **changes: Any) -> _C:
        """A copy with some fields changed; this object stays as it is.

        The fields given here count as explicit, those that were explicit stay so, and the rest is chosen anew
        by the (new) mode.

        Raises:
            ConfigError: As on creation.
        """
        return type(self)(**{**self._given(), **changes})

    __replace__ = replace  # copy.replace of Python 3.13

    def to_dict(self) -> dict[str, object]:
        """Version and the explicit fields as plain values, ready for JSON and YAML."""
        data: dict[str, object] = {"version": CONFIG_VERSION}
        for name, value in self._given().items():
            plain = value.value if isinstance(value, OptimizationMode) else value
            if isinstance(plain, AsyncOffloadConfig):
                plain = plain.to_dict()
            data[name] = list(plain) if isinstance(plain, tuple) else plain
        return data

    @classmethod
    def from_dict(cls: type[_C], data: Mapping[str, object]) -> _C:
        """Reads what `to_dict` wrote, or what a user wrote by hand.

        Args:
            data: Field names and values. "version" may be left out and then means 1.

        Raises:
            ConfigError: Not a mapping, a version that this MemScale does not know, or as on creation.
        """
        fields = checks.keywords(cls.__name__, data)
        version = fields.pop("version", 1)
        if type(version) is not int or version != CONFIG_VERSION:
            allowed = f"this MemScale reads version {CONFIG_VERSION}; a newer one may be needed"
            raise checks.refuse("version", version, allowed)
        if isinstance(fields.get("async_config"), Mapping):
            fields["async_config"] = AsyncOffloadConfig.from_dict(fields["async_config"])
        return cls(**fields)

    def to_json(self, indent: int | None = 2) -> str:
        """The dict form as JSON."""
        return config_text.dump_json(self.to_dict(), indent)

    @classmethod
    def from_json(cls: type[_C], text: str | bytes) -> _C:
        """Reads JSON text (not a path). Raises `ConfigError` if it is broken, and as `from_dict`."""
        return cls.from_dict(cast("Mapping[str, object]", config_text.load_json(text)))

    def to_yaml(self) -> str:
        """The dict form as YAML. Needs PyYAML; raises `MemScaleError` without it."""
        return config_text.dump_yaml(self.to_dict())

    @classmethod
    def from_yaml(cls: type[_C], text: str | bytes) -> _C:
        """Reads YAML text (not a path). Raises `ConfigError` if it is broken, and as `from_dict`."""
        return cls.from_dict(cast("Mapping[str, object]", config_text.load_yaml(text)))

    def _given(self) -> dict[str, Any]:
        """The explicit fields and their values, in the order of declaration."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name in self.explicit}

    def _implied(self) -> dict[str, bool]:
        """Values that the mode and other fields give to those fields that were not given."""
        implied = dict(_MODE_VALUES[OptimizationMode(self.mode)])
        if self.exact:
            implied.update(dict.fromkeys(_INEXACT, False))
        if self.async_config is not None:
            implied["async_offload"] = True
        elif not self.enable_offloading and "enable_offloading" in self.explicit:
            implied.pop("async_offload", None)
        return implied

    def _exact(self) -> bool:
        """`exact` resolved. An inexact technique that was asked for ends exactness where `exact` is open."""
        if self.exact is not None:
            return self.exact
        asked_for = any(getattr(self, name) for name in _INEXACT)
        return self.mode is not OptimizationMode.AGGRESSIVE and not asked_for

    def _refuse_contradictions(self) -> None:
        for name in _INEXACT:
            if self.exact and getattr(self, name):
                reason = f"it contradicts {name}=True, which rounds differently from plain PyTorch"
                raise checks.refuse("exact", True, f"{reason}: give exact=False, or switch {name} off")
        if self.eight_bit_backend != "auto" and not self.use_8bit_optimizer:
            allowed = "a backend is used with use_8bit_optimizer=True only: switch it on, or leave this out"
            raise checks.refuse("eight_bit_backend", self.eight_bit_backend, allowed)
        if self.async_config is not None and not self.async_offload:
            allowed = "it contradicts async_config=...: leave one of the two out"
            raise checks.refuse("async_offload", False, allowed)
        switched_off = not self.enable_offloading and "enable_offloading" in self.explicit
        if self.async_config is not None and switched_off:
            allowed = "it contradicts async_config=...: leave one of the two out"
            raise checks.refuse("enable_offloading", False, allowed)
        if self.force_optimize and not any(getattr(self, name) for name in _TECHNIQUES):
            mode = OptimizationMode(self.mode).value
            allowed = f"no technique is switched on in mode {mode!r}: switch one on first"
            raise checks.refuse("force_optimize", True, allowed)
        if not (self.use_static_profiling or self.use_empirical_fallback):
            allowed = "with use_static_profiling=False too there is no way to profile: switch one of them on"
            raise checks.refuse("use_empirical_fallback", False, allowed)


def _size(value: int | str | None) -> int | None:
    """A checked size field as a number."""
    return parse_bytes(value) if isinstance(value, str) else value
