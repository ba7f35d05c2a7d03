# SPDX-License-Identifier: Apache-2.0
"""Facts about the host, read from the operating system: memory and its limits, this process, WSL.

On Linux a process may be confined to a control group. Then it may use the least of what the machine has and
of what every group on the way up allows:

    machine 128 GiB ─ /docker 64 GiB ─ /docker/abc  no limit  ─ this process      → 64 GiB

Version 2 groups and version 1 groups are both read (a machine may have both). Elsewhere the totals come from
`sysconf`. What cannot be found out is 0 or None, never an exception.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True)
class HostMemory:
    """Memory that this process may use, bytes; 0 where the system does not say."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class _GroupFiles:
    """Where one version of control groups keeps its figures."""

    mounts: tuple[str, ...]
    limit: str
    usage: str
    cache_key: str  # of memory.stat: file pages that are dropped before the limit bites


_VERSION_2 = _GroupFiles(
    ("sys/fs/cgroup", "sys/fs/cgroup/unified"), "memory.max", "memory.current", "inactive_file"
)
_VERSION_1 = _GroupFiles(
    ("sys/fs/cgroup/memory",), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)


def host_memory(root: Path = _ROOT) -> HostMemory:
    """Total and available memory of the host, within the limits of the control groups.

    Args:
        root: Folder that holds `proc` and `sys`; the tests give a stand-in.
    """
    fields = _kib_fields(root / "proc/meminfo")
    total = fields.get("MemTotal", 0) or _sysconf_bytes("SC_PHYS_PAGES")
    available = fields.get("MemAvailable", 0) or _sysconf_bytes("SC_AVPHYS_PAGES") or total
    for limit, used in _group_limits(root):  # version 1 says "no limit" by a number near 2^63
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return HostMemory(total, min(available, total))


def process_bytes(root: Path = _ROOT) -> int:
    """Resident memory of this process: interpreter, libraries and tensors together. 0 if unknown."""
    return _kib_fields(root / "proc/self/status").get("VmRSS", 0)


def private_bytes(root: Path = _ROOT) -> int:
    """Private memory of this process that can be written: what RLIMIT_DATA limits. 0 if unknown."""
    return _kib_fields(root / "proc/self/status").get("VmData", 0)


def memory_pressure_percent(root: Path = _ROOT) -> float:
    """Share of the last ten seconds in which some task has waited for memory, in percent. 0 if unknown."""
    match = re.search(r"^some avg10=([0-9.]+)", _text(root / "proc/pressure/memory"), re.MULTILINE)
    return float(match.group(1)) if match else 0.0


def is_wsl(root: Path = _ROOT) -> bool:
    """Whether this is Linux under Windows, where pinned memory is scarcer than the limits say."""
    return "microsoft" in _text(root / "proc/sys/kernel/osrelease").lower()


def processor_name(root: Path = _ROOT) -> str:
    """Model of the first processor, as the system gives it; the kind of machine where it says none."""
    match = re.search(r"^model name\s*:(.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def cpu_flags(root: Path = _ROOT) -> frozenset[str]:
    """Instruction set flags of the first processor; empty if unknown."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def pinned_limit_bytes() -> int | None:
    """How much memory this process may lock (`ulimit -l`), bytes. None: no limit is known."""
    if sys.platform == "win32":
        return None
    import resource

    if not hasattr(resource, "RLIMIT_MEMLOCK"):
        return None
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or soft < 0 else soft


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of every control group with a limit that this process is in."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            files = _VERSION_2
        elif "memory" in controllers.split(","):
            files = _VERSION_1
        else:
            continue
        for mount in files.mounts:
            yield from _limits_upwards(root / mount, path, files)


def _limits_upwards(mount: Path, path: str, files: _GroupFiles) -> Iterator[tuple[int, int]]:
    """The group and all above it. A container may see only the mount itself, which is then its own group."""
    parts = [part for part in path.split("/") if part not in ("", "..", ".")]
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        limit = _text(folder / files.limit).strip()
        if not limit.isdecimal():  # missing, or "max"
            continue
        usage = _text(folder / files.usage).strip()
        match = re.search(rf"^{files.cache_key} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
        cache = int(match.group(1)) if match else 0
        yield int(limit), max(0, (int(usage) if usage.isdecimal() else 0) - cache)


def _kib_fields(path: Path) -> dict[str, int]:
    """The "Name:  123 kB" lines of a file under /proc, in bytes."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", _text(path), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def _sysconf_bytes(name: str) -> int:
    """A number of pages known to `sysconf`, in bytes; 0 if unknown."""
    try:
        return max(0, os.sysconf(name) * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return 0


def _text(path: Path) -> str:
    """A small file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
