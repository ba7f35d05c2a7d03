# SPDX-License-Identifier: Apache-2.0
"""Who switches PyTorch's recording of an allocator on and off, and what becomes of the snapshot's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memscale.survival.allocator_history import AllocatorHistory


class Recording:
    """Stands for PyTorch's: there is no card here."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.on, self.calls, self.error = False, 0, None
        patch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        patch.setattr(torch.cuda.memory, "_dump_snapshot", self.dump)
        patch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.on, raising=False)

    def record(self, enabled: str | None = "all", **settings: Any) -> None:
        self.on, self.calls = enabled is not None, self.calls + 1

    def dump(self, path: str) -> None:
        Path(path).write_bytes(b"half")
        if self.error is not None:
            raise self.error
        Path(path).write_bytes(b"whole")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    return Recording(monkeypatch)


def test_it_is_on_while_one_wants_it(recording: Recording) -> None:
    history = AllocatorHistory()
    history.put()
    history.put()
    history.remove()
    assert recording.on and recording.calls == 1
    history.remove()
    assert not recording.on
    history.put()
    assert recording.on


def test_what_the_program_records_itself_goes_on(recording: Recording) -> None:
    recording.on = True
    history = AllocatorHistory()
    history.put()
    history.remove()
    assert recording.on and recording.calls == 0


def test_one_file_a_process_and_never_half_of_one(recording: Recording, tmp_path: Path) -> None:
    history, folder = AllocatorHistory(), tmp_path / "new" / "folder"
    path = history.write(str(folder))
    assert [str(item) for item in folder.iterdir()] == [path] and Path(path).read_bytes() == b"whole"
    recording.error = OSError("No space left on device")
    assert history.write(str(folder)) == "not written: OSError: No space left on device"
    assert Path(path).read_bytes() == b"whole"
    assert [str(item) for item in folder.iterdir()] == [path]


def test_a_folder_that_cannot_be(recording: Recording, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert (
        AllocatorHistory().write(str(tmp_path / "file" / "folder")).startswith("not written: NotADirectory")
    )
