# SPDX-License-Identifier: Apache-2.0
"""Rates of this machine, measured once and cached; `calibrated` puts them into a `Hardware`.

    memory of this process ─ miss ─► cache file ─ miss ─► measure (about a second) ─► cache file

The file is `$XDG_CACHE_HOME/memscale/rates.json`, or below `~/.cache`. An entry holds for one device,
version of PyTorch, number of threads and processor; another combination is measured anew. Rates are rounded
to steps of 9 %, so that what differs between two measurements of one machine seldom changes a plan, and what
is in the file gives the same plan every time.

`MEMSCALE_CALIBRATION=off` switches all of this off: then the rates of tables count, which depend on nothing
but the name of the device and the number of threads. What cannot be measured or kept is no error either: a
machine that is too busy to be measured gets the table's rates, and a file that cannot be written is done
without.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memscale.hardware import host
from memscale.hardware.cost_rates import CLASSES, KINDS, MEASURED, NEVER, PRODUCTS, CostRates, fresh_from
from memscale.hardware.measured_rates import is_on, quantised

if TYPE_CHECKING:
    import torch

    from memscale.hardware.detect import Hardware

__all__ = [
    "Patience",
    "Rates",
    "cache_file",
    "calibrated",
    "forget",
    "measured",
    "read_entries",
    "write_entry",
]

_FORMAT: Final = 2
_DISTURBED_SHARE: Final = 0.4
_HOPELESS_SHARE: Final = 0.75  # of the measurements so far: the rest can be resident
_CUDA_SCALE: Final = 4
_CUDA_FILL: Final = 8


@dataclass(frozen=True)
class Patience:
    """How long measuring may take, and how much it may be disturbed.

    Attributes:
        repeats: runs of one operator, at most.
        limit_s: after so long a machine is too busy. Undisturbed, all of it takes a second or so.
        spread: a measurement's middle time over its shortest, from which on it is disturbed.
    """

    repeats: int = 9
    limit_s: float = 4.0
    spread: float = 1.6


class Rates:
    """What a process knows of its devices, with the file behind it.

    Args:
        measure: a device's rates, or None where they cannot be measured.
    """

    def __init__(self, measure: Callable[[Hardware], CostRates | None] | None = None) -> None:
        self._measure = measured if measure is None else measure
        self._known: dict[str, CostRates | None] = {}
        self._lock = threading.Lock()

    def calibrated(self, hardware: Hardware) -> Hardware:
        """See the function of that name."""
        import torch

        if not is_on() or (hardware.device_kind == "cuda" and not torch.cuda.is_initialized()):
            return hardware
        rates = self._of(hardware)
        return hardware if rates is None else replace(hardware, cost=rates)

    def forget(self) -> None:
        """The next call reads the file. The file stays."""
        with self._lock:
            self._known.clear()

    def _of(self, hardware: Hardware) -> CostRates | None:
        key = _key(hardware)
        with self._lock:  # two threads must not measure at once: each would disturb the other
            if key not in self._known:
                found = read_entries(cache_file()).get(key)
                if found is None:
                    found = self._measure(hardware)
                    if found is not None:
                        write_entry(cache_file(), key, found)
                self._known[key] = found
            return self._known[key]


def calibrated(hardware: Hardware) -> Hardware:
    """The hardware with the measured rates of the device that is there, or as it is.

    Measures, if no one has before; that takes about a second. A CUDA device is measured only if this process
    uses CUDA already.

    Args:
        hardware: of a device of this machine, as `detect` describes it.
    """
    return _RATES.calibrated(hardware)


def forget() -> None:
    """Drops what this process knows, so that the next call reads the file. The file stays."""
    _RATES.forget()


def cache_file() -> Path:
    """Where measured rates are kept."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # By the standard, a relative path there is to be ignored.
    folder = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "memscale" / "rates.json"


def _key(hardware: Hardware) -> str:
    import torch

    setting = torch.get_float32_matmul_precision() if hardware.device_kind == "cuda" else ""
    device = hardware.name if hardware.device_kind == "cuda" else "cpu"
    parts = (device, setting, torch.__version__, torch.get_num_threads(), host.processor_name())
    return " | ".join(str(part) for part in parts if part != "")


# ---- the file ------------------------------------------------------------------------------------------


def read_entries(path: Path) -> dict[str, CostRates]:
    """The entries of a file that can be trusted; none of a file that is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        entries = data["entries"].items() if data["format"] == _FORMAT else ()
        rates = {str(key): _from_json(value) for key, value in entries}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {key: value for key, value in rates.items() if value is not None}


def _from_json(value: Any) -> CostRates | None:
    """Rates that were written before; None where something is missing or is no integer above 0."""
    single = [field.name for field in fields(CostRates) if field.type == "int"]
    try:
        flops = [value["flops_per_us"][kind] for kind in KINDS]
        moved = [value["moved_bytes_per_us"][kind] for kind in KINDS]
        numbers = {name: value[name] for name in single}
    except (KeyError, TypeError):
        return None
    if not all(type(number) is int and 0 < number <= NEVER for number in (*numbers.values(), *flops, *moved)):
        return None
    return CostRates(tuple(flops), tuple(moved), **numbers, source=MEASURED)


def write_entry(path: Path, key: str, rates: CostRates) -> None:
    """Adds an entry. The file is replaced as a whole: a reader sees the old one or the new one."""
    entries = {name: entry.for_core for name, entry in read_entries(path).items()}
    entries[key] = rates.for_core
    text = json.dumps({"format": _FORMAT, "entries": entries}, indent=1, sort_keys=True)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix="rates-", suffix=".tmp")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(temporary, path)
    except OSError:  # no home, no right to write, no room: the rates are measured again by the next process
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


# ---- measuring -----------------------------------------------------------------------------------------


def measured(hardware: Hardware, patience: Patience = Patience()) -> CostRates | None:
    """Measures; None where it fails, or the machine is too busy for the result to mean anything."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    device = torch.device("cuda", hardware.device_index)
    if hardware.device_kind == "cpu":
        device = torch.device("cpu")
    cards = [hardware.device_index] if device.type == "cuda" else []
    try:
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.random.fork_rng(cards))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.autocast(device.type, enabled=False))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                stack.callback(torch.cuda.empty_cache)
            return _measure(device, patience)
    except Exception:  # no operator, no memory: a plan must not fail for want of a stop-watch
        return None


def _measure(device: torch.device, patience: Patience) -> CostRates | None:
    import torch

    from memscale.core.calibration import measures

    clock = measures.Clock(device, patience.repeats)
    scale, fill = (_CUDA_SCALE, _CUDA_FILL) if device.type == "cuda" else (1, 1)
    latest = time.monotonic() + patience.limit_s
    reached: dict[str, float] = {}
    with torch.no_grad():
        for suffix, dtype in (("", torch.float32), ("_half", torch.bfloat16)):
            samples = measures.Samples(device, dtype, scale, fill)
            clock.hold(samples.pool)
            for name, make in samples.by_class():
                best = reached.get(name + suffix, 0.0)
                reached[name + suffix] = max(best, measures.rates_of(make(), clock))
                if time.monotonic() > latest or _is_disturbed(clock.spreads, patience, _HOPELESS_SHARE):
                    return None
        fresh = measures.fresh_bytes_per_us(device, clock) if device.type == "cpu" else 1.0
    with torch.enable_grad():
        launch, recompute, intercept = measures.fixed_costs_ns(device, patience.repeats)
    if _is_disturbed(clock.spreads, patience, _DISTURBED_SHARE):
        return None
    flops, moved = _tables(reached)
    return CostRates(
        flops_per_us=tuple(map(quantised, flops)),
        moved_bytes_per_us=tuple(map(quantised, moved)),
        fresh_from_bytes=fresh_from() if device.type == "cpu" else NEVER,
        fresh_bytes_per_us=quantised(fresh),
        launch_ns=quantised(launch),
        recompute_ns=quantised(recompute),
        intercept_ns=quantised(intercept),
        source=MEASURED,
    )


def _is_disturbed(spreads: Sequence[float], patience: Patience, share: float) -> bool:
    """Whether more than a share of some measurements, at least six, varied too much to be believed."""
    disturbed = sum(spread > patience.spread for spread in spreads)
    return len(spreads) >= 6 and disturbed > share * len(spreads)


def _tables(reached: dict[str, float]) -> tuple[list[float], list[float]]:
    """Rates by kind.

    A product's bytes count at the rate of moves, another class's operations at that of products; what has no
    class counts as a reduction, between the fast and the slow.
    """
    flops: list[float] = []
    moved: list[float] = []
    for suffix in ("", "_half"):
        for name in CLASSES:
            is_product = name in PRODUCTS
            own = reached.get(name + suffix, reached["reduce" + suffix])
            flops.append(own if is_product else reached["matrix" + suffix])
            moved.append(reached["move" + suffix] if is_product else own)
    return flops, moved


_RATES: Final = Rates()
"""Of this process."""
