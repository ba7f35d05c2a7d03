# SPDX-License-Identifier: Apache-2.0
"""Limits of offload: how many bytes, to which tiers, and how fast.

On a card saved tensors go to host memory, pinned first. On the CPU the device is the host's memory
itself, so the file is the only tier that saves any.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memscale.hardware.measured_rates import is_on
from memscale.offload.engine import Offload, OffloadSettings, why_not
from memscale.offload.link import OffloadLink
from memscale.offload.tier_room import TierRoom

if TYPE_CHECKING:
    from memscale.config.config import EffectiveConfig
    from memscale.hardware.detect import Hardware

_LOGGER = logging.getLogger("memscale")

_OCTAL = re.compile(r"\\([0-7]{3})")
"""How a mount point spells blanks and the like."""

_WINDOW_SHARE, _WINDOW_MOST = 32, 64 << 20
_PREFETCH_SHARE, _PREFETCH_MOST = 16, 256 << 20
"""Of a file: what waits for its copy, or is back early, is at most such a part of the budget. A plan counts
all of it, but how much it is depends on the disk: so far may the step stay below its predicted peak."""

_AHEAD_MOST = 1024
"""Storages that an engine brings back ahead at most: MSC__OFFLOAD_AHEAD_MOST."""

_STAGING_COUNT = 4
_CHUNK_LEAST, _CHUNK_MOST = 64 << 10, 2 << 20
STAGING_BYTES = 2 * _STAGING_COUNT * _CHUNK_MOST
"""Buffers that copies pass through, of both directions: the defaults of the engine. On a card they count for
the limits of host memory. On the CPU they are the budget's own memory, and as large as that allows."""

_STAGING_SHARE = 100
"""Of an engine on the CPU: its staging is at most such a part of the budget, as long as that leaves 64 KiB a
buffer. `bench_offload --sweep` has the rates."""

_EVENTS_SHARE, _EVENTS_LEAST, _EVENTS_MOST = 100_000, 1024, 16384
"""An event that is kept per so many bytes of the budget."""

_RESERVE = 0.2
"""Share of free host memory and disk space that is left to others where no limit is given."""

_FILE_BYTES_PER_US = 400
"""Of a disk that was not measured: a SATA drive's."""

_PROBE_CHUNKS = 32
_PROBE_BLOCKS = 16
"""What a disk is measured with: as many of the engine's chunks, in as many tensors."""


@dataclass(frozen=True)
class Link:
    """The way off the device and back.

    Attributes:
        settings: of the engine.
        out_bytes_per_us: from the device, beside a running step.
        in_bytes_per_us: back.
        limit_bytes: what may be offloaded at once, over all tiers.
        weights_bytes: beside it, for weights of a card: of pinned and pageable memory, and of a file.
        state_bytes: likewise, for optimizer state of a card, what copies pass through included.
    """

    settings: OffloadSettings
    out_bytes_per_us: int
    in_bytes_per_us: int
    limit_bytes: int
    weights_bytes: tuple[int, int, int] = (0, 0, 0)
    state_bytes: tuple[int, int, int] = (0, 0, 0)

    @property
    def for_decision(self) -> OffloadLink:
        """As the decision counts with it."""
        return OffloadLink(
            self.out_bytes_per_us,
            self.in_bytes_per_us,
            least_bytes=self.settings.least_bytes,
            limit_bytes=self.limit_bytes,
            window_out_bytes=self.settings.window_bytes,
            window_in_bytes=self.settings.prefetch_bytes if self.settings.prefetch_count else 0,
            staging_bytes=self.settings.own_bytes() if self.settings.device.type == "cpu" else 0,
            tiers=self._tiers(),
        )

    def _tiers(self) -> tuple[TierRoom, ...]:
        """Where blocks lie. Of the first tier of host memory a card's staging buffers take their part."""
        rooms = [self.settings.pinned_bytes, self.settings.host_bytes]
        first = 0 if rooms[0] > 0 else 1
        if self.settings.device.type != "cpu":
            rooms[first] = max(0, rooms[first] - STAGING_BYTES)
        tiers = [TierRoom(room, has_slabs=True) for room in rooms if room > 0]
        if self.settings.file_bytes > 0:
            tiers.append(TierRoom(self.settings.file_bytes, has_slabs=False))
        return tuple(tiers)

    def why_no_file_room(self, needed_bytes: int) -> str:
        """Why so many bytes cannot lie in a file; "" if they can."""
        room = self.settings.file_bytes
        return f"the file may take {room} bytes, less than {needed_bytes}" if needed_bytes > room else ""

    def engine_bytes(self, hardware: Hardware, block_count: int = 0) -> int:
        """Memory of the device that an engine of these settings takes for itself; on a card, none.

        Args:
            hardware: what is planned for.
            block_count: as in `OffloadSettings.own_bytes`.
        """
        is_host = hardware.device_kind == "cpu" and self.settings.device.type == "cpu"
        return self.settings.own_bytes(block_count) if is_host else 0


def link_for(
    config: EffectiveConfig, hardware: Hardware, device: torch.device, budget_bytes: int
) -> Link | str:
    """What a configuration allows on a machine, or why nothing; "" where nobody asked.

    Args:
        config: what applies.
        hardware: of `device`.
        device: whose tensors would leave.
        budget_bytes: of the step on `device`.
    """
    if not config.enable_offloading or not config.async_offload:
        return ""
    if reason := why_not(device):
        return reason
    if device.type == "cpu":
        return _host_link(config, budget_bytes)
    return _card_link(config, hardware, device)


def _host_link(config: EffectiveConfig, budget_bytes: int) -> Link | str:
    wanted = config.async_config
    if "file" not in wanted.tiers or wanted.directory is None:
        return (
            "on the CPU saved tensors can only go to a file: "
            "async_config=AsyncOffloadConfig(tiers=('file',), directory=...)"
        )
    room = _file_room(wanted.directory)
    if isinstance(room, str):
        return room
    settings = OffloadSettings(
        torch.device("cpu"),
        file_bytes=room,
        directory=wanted.directory,
        window_bytes=min(budget_bytes // _WINDOW_SHARE, _WINDOW_MOST),
        prefetch_count=min(wanted.prefetch_depth, _AHEAD_MOST),
        prefetch_bytes=min(budget_bytes // _PREFETCH_SHARE, _PREFETCH_MOST),
        debug=wanted.debug,
        trace_count=max(_EVENTS_LEAST, min(_EVENTS_MOST, budget_bytes // _EVENTS_SHARE)),
        chunk_bytes=chunk_bytes(budget_bytes),
        staging_count=_STAGING_COUNT,
    )
    out, back = _file_rates(settings)
    return Link(settings, out, back, room)


def chunk_bytes(budget_bytes: int) -> int:
    """Size of a staging buffer of an engine on the CPU, a power of two."""
    size = budget_bytes // _STAGING_SHARE // (2 * _STAGING_COUNT)
    return max(_CHUNK_LEAST, min(_CHUNK_MOST, 1 << max(0, size.bit_length() - 1)))


def _card_link(config: EffectiveConfig, hardware: Hardware, device: torch.device) -> Link | str:
    wanted = config.async_config
    cap = config.max_cpu_offload_bytes
    if cap is None:
        cap = _most_of(hardware.host_available_bytes)
    limits = [wanted.pinned_pool_limit_bytes, hardware.pinned_limit_bytes, cap]
    pinned = min(size for size in limits if size is not None) if "pinned" in wanted.tiers else 0
    if pinned < STAGING_BYTES:
        pinned = 0
    pageable = max(0, cap - pinned) if "pageable" in wanted.tiers else 0
    if pageable < STAGING_BYTES:  # staging is there where the driver locks no pages, and would have no room
        pageable = 0
    room = 0
    if "file" in wanted.tiers and wanted.directory is not None:
        found = _file_room(wanted.directory)
        if isinstance(found, str):
            return found
        room = found
    if pinned + pageable + room == 0:
        need = f"the {STAGING_BYTES} bytes that copies pass through"
        return f"max_cpu_offload_gb leaves {cap} bytes, less than {need}"
    settings = OffloadSettings(
        device,
        pinned_bytes=pinned,
        host_bytes=pageable,
        file_bytes=room,
        directory=wanted.directory or "",
        prefetch_count=min(wanted.prefetch_depth, _AHEAD_MOST),
        debug=wanted.debug,
    )
    rate = hardware.link_bytes_per_us
    return Link(settings, rate, rate, max(0, pinned + pageable + room - STAGING_BYTES))


def _most_of(free_bytes: int) -> int:
    """Of what is free, what may be taken: a power of two, so that plans made in turn share an engine."""
    room = int(free_bytes * (1 - _RESERVE))
    return 1 << room.bit_length() - 1 if room > 0 else 0


def _file_room(directory: str) -> int | str:
    """Bytes that a file in a folder may take, or why there can be none."""
    if not os.path.isdir(directory):
        return f"async_config.directory {directory!r} is not a folder"
    if not os.access(directory, os.W_OK):
        return f"async_config.directory {directory!r} cannot be written to"
    _say_if_in_memory(os.path.realpath(directory))
    room = _most_of(shutil.disk_usage(directory).free)
    return room if room > 0 else f"async_config.directory {directory!r} has no room: the disk is full"


@functools.lru_cache(maxsize=64)
def _say_if_in_memory(folder: str) -> None:
    """Warns, once for a folder, of one that lies in memory. It may be wanted: a test, a swap partition."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            kind = file_system_of(folder, file.read())
    except OSError:  # not Linux
        return
    if kind in ("tmpfs", "ramfs"):
        _LOGGER.warning(
            "%r lies in memory (%s): what leaves for a file there takes memory all the same; "
            "AsyncOffloadConfig(directory=...) names another folder",
            folder,
            kind,
        )


def file_system_of(path: str, mounts: str) -> str:
    """The type of the file system that a path lies on; "" where that is not told.

    Args:
        path: a real one, from the root.
        mounts: as in `/proc/self/mountinfo`.
    """
    longest, found = "", ""
    for line in mounts.splitlines():
        about, _, system = line.partition(" - ")
        fields = about.split(" ")
        if len(fields) < 5 or not system:
            continue
        point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), fields[4])
        lies_there = path == point or path.startswith(point.rstrip("/") + "/")
        if lies_there and len(point) >= len(longest):  # of those at one place the last is in force
            longest, found = point, system.split(" ")[0]
    return found


def _file_rates(settings: OffloadSettings) -> tuple[int, int]:
    """Bytes per microsecond to an engine's file, and back; measured once per process, disk and chunk size."""
    if not is_on():
        return _FILE_BYTES_PER_US, _FILE_BYTES_PER_US
    return _measured(settings.directory, os.stat(settings.directory).st_dev, settings.chunk_bytes)


@functools.lru_cache(maxsize=32)
def _measured(directory: str, disk: int, chunk: int) -> tuple[int, int]:
    """The engine's own rates there, with its copies through staging buffers; takes half a second at most.

    What is copied grows with the chunks, which grow with the budget: it has to fit in there.
    """
    size = _PROBE_CHUNKS * chunk
    settings = OffloadSettings(
        torch.device("cpu"),
        file_bytes=2 * size,
        directory=directory,
        window_bytes=size,
        least_bytes=1,
        chunk_bytes=chunk,
        trace_count=0,
    )
    try:
        engine = Offload(settings).engine
    except OSError:
        return _FILE_BYTES_PER_US, _FILE_BYTES_PER_US
    tensors = [torch.ones(size // _PROBE_BLOCKS // 4, device="cpu") for _ in range(_PROBE_BLOCKS)]
    best = [0.0, 0.0]
    for _ in range(2):  # the first reserves disk space
        began = time.perf_counter()
        saved = [engine.pack(tensor.view(-1)) for tensor in tensors]
        engine.settle()
        middle = time.perf_counter()
        for item in reversed(saved):
            engine.unpack(item)
        times = (middle - began, time.perf_counter() - middle)
        del saved
        best = [max(rate, size / 1e6 / seconds) for rate, seconds in zip(best, times, strict=True)]
    engine.close()
    return max(1, int(best[0])), max(1, int(best[1]))
