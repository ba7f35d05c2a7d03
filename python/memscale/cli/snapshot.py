# SPDX-License-Identifier: Apache-2.0
"""`memscale snapshot`: a file of `torch.cuda.memory._dump_snapshot`, summed up without PyTorch or a GPU."""

from __future__ import annotations

import json
from typing import Any, Final

from memscale import __version__, _core
from memscale.cli.arguments import Options
from memscale.cli.problems import FITS, UsageError, one_line
from memscale.cli.progress import Progress
from memscale.cli.text import safe, table
from memscale.errors import MemScaleError
from memscale.units import format_bytes

__all__ = ["SNAPSHOT_VERSION", "run"]

SNAPSHOT_VERSION: Final = 1

_SITES, _ALL_SITES = 8, 100

_DUMP: Final = 'pickle.dump(torch.load(path), open("snapshot.pickle", "wb"))'
_RECORD: Final = "torch.cuda.memory._dump_snapshot(path) writes what is read here"
_FORMATS: Final = (
    (b"\x1f\x8b", "is compressed by gzip: gunzip it first"),
    (b"BZh", "is compressed by bzip2: bunzip2 it first"),
    (b"\xfd7zXZ\x00", "is compressed by xz: unxz it first"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd: unzstd it first"),
    (b"PK\x03\x04", f"is a file of torch.save, or a zip archive: write it again with {_DUMP}"),
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", f"is a file of torch.save: write it again with {_DUMP}"),
    (b"{", f"is JSON: {_RECORD}"),
    (b"<", f"is HTML, or another page: {_RECORD}"),
)
"""How files begin that are given in place of a snapshot, and what to do about each."""


def run(options: Options) -> int:
    """Prints the summary.

    Raises:
        UsageError: the file cannot be read or is no snapshot.
    """
    path = options.model
    with Progress() as progress:
        progress.say(f"reading {path}")
        try:
            snapshot = _core.Snapshot(path)
        except OSError as error:
            raise UsageError(error.strerror or one_line(error)) from error
        except (ValueError, MemoryError, MemScaleError) as error:
            raise UsageError(f"{path!r}: {_other_format(path) or one_line(error)}") from error
        progress.say("replaying")
        found = _document(path, snapshot, _ALL_SITES if options.verbose or options.as_json else _SITES)
    print(json.dumps(found, indent=2) if options.as_json else safe(_text(found)))
    return FITS


def _other_format(path: str) -> str:
    """What a file is that is no pickle, and what to do; "" for one that may be."""
    with open(path, "rb") as file:
        begin = file.read(32)
    if not begin:
        return f"is empty: {_RECORD}"
    return next((words for magic, words in _FORMATS if begin.startswith(magic)), "")


def _document(path: str, snapshot: _core.Snapshot, sites: int) -> dict[str, Any]:
    """Everything that is shown, as plain data; sizes in bytes."""
    return {
        "format": "memscale-snapshot",
        "version": SNAPSHOT_VERSION,
        "memscale": __version__,
        "file": path,
        "settings": dict(snapshot.settings),
        "devices": [_device(snapshot, dict(device), sites) for device in snapshot.devices],
    }


def _device(snapshot: _core.Snapshot, sums: dict[str, Any], sites: int) -> dict[str, Any]:
    number = sums["device"]
    segments = snapshot.segments(number)
    free = [
        size for segment in segments for _, size, requested, state in segment["blocks"] if state == "inactive"
    ]
    return {
        **sums,
        "cached_bytes": sums["reserved_bytes"] - sums["active_bytes"],
        "rounding_bytes": sums["active_bytes"] - sums["requested_bytes"],
        "largest_free_block_bytes": max(free, default=0),
        "unused_segment_bytes": sum(
            segment["total_bytes"] for segment in segments if not segment["active_bytes"]
        ),
        "events": snapshot.events(number),
        "replay": _replay(snapshot, number),
        "live_at_end": _sites(snapshot, number, False, sites),
        "live_at_peak": _sites(snapshot, number, True, sites) if sums["event_count"] else [],
    }


def _replay(snapshot: _core.Snapshot, device: int) -> dict[str, Any]:
    try:
        return {**snapshot.replay(device), "refused": None}
    except (ValueError, MemScaleError) as error:
        return {"refused": one_line(error)}


def _sites(snapshot: _core.Snapshot, device: int, at_peak: bool, count: int) -> list[dict[str, Any]]:
    names = ("file", "line", "function", "requested_bytes", "allocation_count")
    rows = snapshot.top_frames(device, at_peak=at_peak, count=count)
    return [dict(zip(names, row, strict=True)) for row in rows]


# ---- text ------------------------------------------------------------------------------------------


def _text(found: dict[str, Any]) -> str:
    settings = found["settings"]
    conf = (settings["conf"] or "defaults") if settings["recorded"] else "not recorded"
    parts = [f"file      {found['file']}\nsettings  {conf}"]
    if not found["devices"]:
        parts.append("no device has any memory in it")
    for device in found["devices"]:
        parts += [part for part in _device_text(device) if part]
    return "\n\n".join(parts)


def _device_text(device: dict[str, Any]) -> list[str]:
    rows = [
        ("reserved", format_bytes(device["reserved_bytes"]), f"in {device['segment_count']} segments"),
        ("in use", format_bytes(device["active_bytes"]),
         f"of them {format_bytes(device['requested_bytes'])} asked for"),
        ("cached", format_bytes(device["cached_bytes"]),
         f"largest free block {format_bytes(device['largest_free_block_bytes'])}"),
        ("unused", format_bytes(device["unused_segment_bytes"]),
         "whole segments that empty_cache would give back"),
    ]  # fmt: skip
    if device["event_count"]:
        rows.append(("peak", format_bytes(device["reserved_peak_bytes"]), "reserved, in the trace"))
        at = f"asked for, at event {device['requested_peak_event']}"
        rows.append(("", format_bytes(device["requested_peak_bytes"]), at))
    return [
        f"device {device['device']}\n" + table(rows, right=(1,)),
        _trace_text(device),
        _sites_text("live at the end, by the line that allocated", device["live_at_end"]),
        _sites_text("live at the peak", device["live_at_peak"]),
    ]


def _trace_text(device: dict[str, Any]) -> str:
    counts = ", ".join(
        f"{name.replace('_', ' ')} {count}" for name, count in device["events"].items() if count
    )
    if not counts:
        return "trace\n  no events: record some with torch.cuda.memory._record_memory_history()"
    return f"trace of {device['event_count']} events\n  {counts}\n  {_replay_text(device['replay'])}"


def _replay_text(replay: dict[str, Any]) -> str:
    if replay["refused"] is not None:
        return f"not replayed: {replay['refused']}"
    played = f"{replay['replayed_count']} events replayed in the allocator simulator"
    if replay["exact"]:
        return f"{played}: every segment and peak as recorded"
    difference = replay["difference"]
    return (
        f"{played}: {replay['difference_count']} differences, the first at event {difference['event']} "
        f"({difference['kind']})"
    )


def _sites_text(title: str, sites: list[dict[str, Any]]) -> str:
    if not sites:
        return ""
    rows = [
        (
            format_bytes(site["requested_bytes"]),
            f"{site['allocation_count']} ×",
            f"{site['file']}:{site['line']}" if site["file"] else "no stack",
            site["function"],
        )
        for site in sites
    ]
    return f"{title}\n" + table(rows, right=(0, 1))
