# SPDX-License-Identifier: Apache-2.0
"""`memscale snapshot`: the summary of real snapshots, refusals of hostile ones."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_samples import Runner

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus" / "snapshot"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys)


def segment(blocks: list[tuple[int, int, str]], address: int = 1 << 21) -> dict[str, Any]:
    """A segment as torch.cuda.memory_snapshot shows it: (size, requested, state) per block."""
    total = sum(size for size, _, _ in blocks)
    active = sum(size for size, _, state in blocks if state != "inactive")
    rows, at = [], address
    for size, requested, state in blocks:
        rows.append({"address": at, "size": size, "requested_size": requested, "state": state, "frames": []})
        at += size
    requested = sum(size for _, size, state in blocks if state != "inactive")
    return {
        "device": 0, "address": address, "total_size": total, "allocated_size": active, "active_size": active,
        "requested_size": requested, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": rows,
    }  # fmt: skip


def test_sums_are_those_of_the_file(run: Runner, tmp_path: Path) -> None:
    mib = 1 << 20
    segments = [
        segment([(8 * mib, 8 * mib - 100, "active_allocated"), (12 * mib, 0, "inactive")]),
        segment([(20 * mib, 0, "inactive")], address=1 << 30),
    ]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [[]]}))
    (device,) = run("snapshot", path, "--json").document["devices"]
    assert device["reserved_bytes"] == 40 * mib
    assert device["cached_bytes"] == 32 * mib
    assert device["rounding_bytes"] == 100
    assert device["largest_free_block_bytes"] == device["unused_segment_bytes"] == 20 * mib
    said = run("snapshot", path)
    assert said.code == 0
    assert "40.00 MiB  in 2 segments" in said.out
    assert "no events" in said.out


@pytest.mark.parametrize(
    ("begin", "texts"),
    [
        (gzip.compress(b"anything"), ["gzip", "gunzip"]),
        (lzma.compress(b"anything"), ["xz", "unxz"]),
        (bz2.compress(b"anything"), ["bzip2"]),
        (b"{}", ["JSON", "_dump_snapshot"]),
        (b"<!DOCTYPE html>", ["HTML"]),
        (b"", ["is empty", "_dump_snapshot"]),
    ],
    ids=["gzip", "xz", "bzip2", "JSON", "HTML", "empty"],
)
def test_other_formats_are_named(run: Runner, tmp_path: Path, begin: bytes, texts: list[str]) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(begin)
    run("snapshot", path).refused(*texts)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save_is_named(run: Runner, tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "snapshot.pt"
    torch.save({"segments": [], "device_traces": [[]]}, path, _use_new_zipfile_serialization=zipped)
    run("snapshot", path).refused("torch.save", "torch.load(path)")
    again = tmp_path / "snapshot.pickle"
    with again.open("wb") as file:
        pickle.dump(torch.load(path), file)
    assert run("snapshot", again).code == 0


@pytest.mark.parametrize("name", ["real-ring", "real-late", "real-ring-expandable"])
def test_real_traces_are_reproduced(run: Runner, name: str) -> None:
    said = run("snapshot", CORPUS / name)
    assert said.code == 0
    assert "every segment and peak as recorded" in said.out
    assert "workloads.py" in said.out
    found = run("snapshot", CORPUS / name, "--json").document
    assert (found["format"], found["version"]) == ("memscale-snapshot", 1)
    (device,) = found["devices"]
    assert device["replay"]["exact"] is True
    assert device["replay"]["reserved_peak_bytes"] == device["reserved_peak_bytes"]
    sizes = [site["requested_bytes"] for site in device["live_at_peak"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == device["requested_peak_bytes"]


@pytest.mark.parametrize("name", ["evil-global", "evil-length", "evil-nest", "evil-self", "empty-dict"])
def test_hostile_files_are_one_line(run: Runner, name: str) -> None:
    run("snapshot", CORPUS / name).refused("offset")


def test_a_file_that_is_not_there(run: Runner, tmp_path: Path) -> None:
    run("snapshot", tmp_path / "nothing").refused("nothing", "No such file")


def test_pytorch_is_not_imported() -> None:
    code = (
        "import sys\nfrom memscale.cli.main import main\n"
        f"assert main(['snapshot', {str(CORPUS / 'real-ring')!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
