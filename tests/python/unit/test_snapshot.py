# SPDX-License-Identifier: Apache-2.0
"""`_core.Snapshot`: real snapshots in every protocol, cut anywhere, replayed; hostile pickles refused."""

from __future__ import annotations

import os
import pickle
import pickletools
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from memscale import _core
from memscale.errors import MemScaleError

DATA = Path(__file__).parents[2] / "data/snapshots"
NAMES = sorted(path.stem for path in DATA.glob("*.pickle"))
GIB = 1 << 30
MACHINERY = ("torch::unwind", "torch::CapturedTraceback", "torch::cuda::", "c10::", "at::detail::")


def raw(name: str) -> dict[str, Any]:
    """A file of the test data, as Python reads it."""
    snapshot: dict[str, Any] = pickle.loads((DATA / f"{name}.pickle").read_bytes())
    return snapshot


def limits(name: str) -> dict[str, int | None]:
    """What the file does not say; see workloads.py."""
    found: dict[str, int | None] = {"device_total_bytes": 8 * GIB}
    if name.split("-")[0] in ("oom", "gc"):
        found["allowed_bytes"] = 200 << 20
    return found


def written(folder: Path, value: object, protocol: int = 4) -> Path:
    """A file with the pickle of a value."""
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


def test_the_data_is_there() -> None:
    assert len(NAMES) == 15


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_pickle(name: str) -> None:
    snapshot, wanted = _core.Snapshot(DATA / f"{name}.pickle"), raw(name)
    segments = snapshot.segments()
    assert [s["address"] for s in segments] == sorted(s["address"] for s in wanted["segments"])
    by_address = {s["address"]: s for s in wanted["segments"]}
    for segment in segments:
        other = by_address[segment["address"]]
        assert segment["total_bytes"] == other["total_size"]
        assert segment["active_bytes"] == other["active_size"]
        assert segment["stream"] == other["stream"] % 2**64
        assert segment["pool"] == other["segment_pool_id"]
        assert segment["is_large"] == (other["segment_type"] == "large")
        assert segment["is_expandable"] == other["is_expandable"]
        keys = ("address", "size", "requested_size", "state")
        assert segment["blocks"] == [tuple(block[key] for key in keys) for block in other["blocks"]]
    counts = snapshot.events()
    assert sum(counts.values()) == len(wanted["device_traces"][0])
    for action in {event["action"] for event in wanted["device_traces"][0]}:
        assert counts[action] == sum(event["action"] == action for event in wanted["device_traces"][0])
    (device,) = snapshot.devices
    assert device["reserved_bytes"] == sum(s["total_size"] for s in wanted["segments"])
    assert snapshot.settings["conf"] == wanted["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]


@pytest.mark.parametrize("name", NAMES)
def test_replay_is_exact(name: str) -> None:
    result = _core.Snapshot(DATA / f"{name}.pickle").replay(0, limits=limits(name))
    assert result["difference"] is None and result["exact"] and result["map_compared"]
    assert result["reserved_peak_bytes"] == result["recorded_reserved_peak_bytes"]
    assert result["requested_peak_bytes"] == result["recorded_requested_peak_bytes"]


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_that_lost_its_beginning_replays_too(name: str, tmp_path: Path) -> None:
    snapshot = raw(name)
    trace = snapshot["device_traces"][0]
    for first in range(1, len(trace), max(1, len(trace) // 12)):
        path = written(tmp_path, {**snapshot, "device_traces": [trace[first:]]})
        result = _core.Snapshot(path).replay(0, limits=limits(name))
        assert result["exact"], (first, result["difference"])


@pytest.mark.parametrize("name", ["streams", "ring-expandable"])
def test_a_changed_trace_differs(name: str, tmp_path: Path) -> None:
    snapshot = raw(name)
    event = next(e for e in snapshot["device_traces"][0] if e["action"] in ("segment_alloc", "segment_map"))
    event["size"] += 512
    difference = _core.Snapshot(written(tmp_path, snapshot)).replay(0, limits=limits(name))["difference"]
    assert difference is not None and difference["kind"] == "segment"
    assert difference["expected"] is not None and difference["expected"][2] == event["size"]


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol(protocol: int, tmp_path: Path) -> None:
    wanted = _core.Snapshot(DATA / "pool.pickle")
    plain = written(tmp_path, raw("pool"), protocol)
    assert _core.Snapshot(plain).segments() == wanted.segments()
    plain.write_bytes(pickletools.optimize(plain.read_bytes()))
    again = _core.Snapshot(plain)
    assert again.segments() == wanted.segments()
    assert again.events() == wanted.events()
    assert again.top_frames() == wanted.top_frames()


def test_top_frames(tmp_path: Path) -> None:
    snapshot = raw("train")
    stacks: dict[tuple[str, int, str], int] = {}
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                python = [f for f in block["frames"] if f["filename"].endswith(".py")]
                native = [f for f in block["frames"] if not f["name"].startswith(MACHINERY)]
                frame = (python or native)[0]  # autograd's own threads have no Python stack
                key = (frame["filename"], frame["line"], frame["name"])
                stacks[key] = stacks.get(key, 0) + block["requested_size"]
    found = _core.Snapshot(DATA / "train.pickle").top_frames(count=1000)
    assert {row[:3]: row[3] for row in found} == stacks
    assert [row[3] for row in found] == sorted(stacks.values(), reverse=True)
    assert _core.Snapshot(DATA / "train.pickle").top_frames(count=2) == found[:2]


def test_the_peak_holds_what_was_live_then() -> None:
    snapshot = _core.Snapshot(DATA / "train.pickle")
    rows = snapshot.top_frames(at_peak=True, count=1000)
    assert sum(row[3] for row in rows) == snapshot.devices[0]["requested_peak_bytes"]


def test_unknown_keys_and_newer_fields_are_ignored(tmp_path: Path) -> None:
    snapshot = raw("pool")
    snapshot["something_new"] = {"a": [1, 2.5, None, (1,), {2}, b"x", frozenset({"y"})]}
    for event in snapshot["device_traces"][0]:
        event["pool_id"] = (0, 1)
        event["user_metadata"] = {"not": "a string"}
    path = written(tmp_path, snapshot)
    assert _core.Snapshot(path).segments() == _core.Snapshot(DATA / "pool.pickle").segments()


def test_older_files_lack_much(tmp_path: Path) -> None:
    snapshot = raw("churn")
    for key in ("allocator_settings", "external_annotations"):
        del snapshot[key]
    for segment in snapshot["segments"]:
        for key in ("segment_pool_id", "is_expandable", "frames"):
            del segment[key]
        for block in segment["blocks"]:
            del block["frames"], block["address"]
    for event in snapshot["device_traces"][0]:
        for key in ("time_us", "compile_context", "user_metadata", "frames"):
            event.pop(key, None)
    result = _core.Snapshot(written(tmp_path, snapshot)).replay(0, limits={"device_total_bytes": 8 * GIB})
    assert result["exact"]


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_executed(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    path = written(tmp_path, {"segments": [], "device_traces": [[_Evil(mark)]]}, protocol)
    with pytest.raises(ValueError, match="is refused, since a snapshot is plain data"):
        _core.Snapshot(path)
    assert not mark.exists()
    pickle.loads(path.read_bytes())  # the file is armed indeed
    assert mark.exists()


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        [],
        {},
        {"segments": 5},
        {"segments": [1]},
        {"segments": [], "device_traces": 1},
        OrderedDict(),
    ],
)
def test_other_pickles_are_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at offset"):
        _core.Snapshot(written(tmp_path, value))


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cp", DATA / "pool.pickle", pipe]) as writer:
        segments = _core.Snapshot(pipe).segments()
        assert writer.wait(10) == 0
    assert segments == _core.Snapshot(DATA / "pool.pickle").segments()


def test_arguments() -> None:
    snapshot = _core.Snapshot(os.fsencode(DATA / "ring.pickle"))
    assert repr(snapshot) == "<Snapshot: 1 devices, 150 events>"
    with pytest.raises(ValueError, match="no device 1, it has 1"):
        snapshot.segments(1)
    with pytest.raises(ValueError, match="no key 'x'"):
        snapshot.replay(0, limits={"x": 1})
    with pytest.raises(TypeError):
        _core.Snapshot(3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        _core.Snapshot("/no/such/file")


def test_what_cannot_be_replayed_says_why(tmp_path: Path) -> None:
    snapshot = raw("churn")
    snapshot["segments"] = []
    snapshot["device_traces"] = [[e for e in snapshot["device_traces"][0] if e["action"].startswith("free")]]
    with pytest.raises(MemScaleError, match="state at the beginning of the trace cannot be derived"):
        _core.Snapshot(written(tmp_path, snapshot)).replay()
