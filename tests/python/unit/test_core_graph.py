# SPDX-License-Identifier: Apache-2.0
"""`_core.Graph`: what goes in comes out, by every way in and out."""

from __future__ import annotations

import inspect
import pickle
import re
import threading
from pathlib import Path

import pytest

from core_samples import chain
from memscale import _core


def test_counts_and_state_follow_the_building() -> None:
    g = _core.Graph()
    assert (g.op_count, g.buffer_count, g.save_count, g.module_count, g.call_count) == (0, 0, 0, 0, 0)
    assert not g.finished
    assert g.digest == "0" * 16
    assert [g.add_module("", "Net"), g.add_module("a", "Block", 0)] == [0, 1]
    assert [g.begin_call(0), g.begin_call(1)] == [0, 1]
    assert [g.add_op("x", 1, 2), g.add_op("y", 3, 4)] == [0, 1]
    assert [g.add_buffer(8, _core.CATEGORY_ACTIVATION), g.add_resident(8, _core.CATEGORY_PARAMETER)] == [0, 1]
    assert [g.add_save(0), g.add_save(0)] == [0, 1]
    assert (g.op_count, g.buffer_count, g.save_count, g.module_count, g.call_count) == (2, 2, 2, 2, 2)
    g.finish()
    assert g.finished
    assert re.fullmatch("[0-9a-f]{16}", g.digest)


def test_records_are_read_back_as_given() -> None:
    g = _core.Graph()
    g.add_module("", "Net", -1, _core.MODULE_ROOT)
    g.add_module("a.b", "Größe", parent=0, structure=2**64 - 1, state_bytes=5)
    g.mark_module(1, _core.MODULE_PYTHON_STATE, state_bytes=7)
    weight = g.add_resident(100, _core.CATEGORY_BUFFER)
    call = g.begin_call(1)
    g.add_input(call, weight)
    g.add_op("first", 2**63, 11, scratch_bytes=12, flags=_core.OP_RANDOM, work=_core.WORK_RANDOM)
    out = g.add_buffer(200, _core.CATEGORY_TEMPORARY)
    g.set_category(out, _core.CATEGORY_ACTIVATION)
    save = g.add_save(out)
    g.end_buffer(out)
    g.end_call(call)
    g.set_phase(_core.PHASE_BACKWARD)
    g.unpack(save)
    g.add_op(name="second", flops=1, moved_bytes=2)
    g.add_write(weight)
    g.release(save)
    g.finish()

    assert g.modules() == [
        ("", "Net", -1, _core.MODULE_ROOT, 0, 0),
        ("a.b", "Größe", 0, _core.MODULE_PYTHON_STATE, 2**64 - 1, 5 + 7),
    ]
    assert g.calls() == [(1, -1, 0, 1)]
    assert g.ops() == [
        ("first", 0, _core.PHASE_FORWARD, _core.OP_RANDOM, 2**63, 11, 12, _core.WORK_RANDOM),
        ("second", -1, _core.PHASE_BACKWARD, 0, 1, 2, 0, _core.WORK_OTHER),
    ]
    assert g.buffers() == [
        (100, 0, 3, _core.CATEGORY_BUFFER, True),
        (200, 0, 1, _core.CATEGORY_ACTIVATION, False),
    ]
    assert g.saves() == [(1, 0, 1, 1, 2)]


def test_text_and_file_keep_everything(tmp_path: Path) -> None:
    g = chain()
    path = tmp_path / "größe.graph"
    g.save(path)
    copies = [
        _core.Graph.load(path),
        _core.Graph.load(str(path)),
        _core.Graph.load(bytes(path)),
        _core.Graph.parse(g.to_text()),
        _core.Graph.parse(g.to_text().encode()),
        _core.Graph.parse(text=path.read_bytes()),
    ]
    for copy in copies:
        assert copy.finished
        assert copy.digest == g.digest
        assert copy.to_text() == g.to_text()
        for read in ("ops", "buffers", "saves", "modules", "calls"):
            assert getattr(copy, read)() == getattr(g, read)()


def test_equal_graphs_have_equal_digests_and_others_do_not() -> None:
    assert chain().digest == chain().digest
    assert chain(2).digest != chain(3).digest


def test_a_finished_graph_refuses_changes() -> None:
    g = chain()
    before = g.to_text()
    changes = [
        lambda: g.add_module("x", "X"),
        lambda: g.mark_module(0, 1),
        lambda: g.set_phase(_core.PHASE_OPTIMIZER),
        lambda: g.begin_call(0),
        lambda: g.end_call(0),
        lambda: g.add_input(0, 0),
        lambda: g.add_op("x", 0, 0),
        lambda: g.add_buffer(1, 0),
        lambda: g.add_resident(1, 0),
        lambda: g.set_category(0, 0),
        lambda: g.set_size(0, 1),
        lambda: g.end_buffer(0),
        lambda: g.add_write(0),
        lambda: g.add_save(0),
        lambda: g.unpack(0),
        lambda: g.release(0),
        g.finish,
    ]
    for change in changes:
        with pytest.raises(RuntimeError) as caught:
            change()
        assert caught.value.status == "ESTATE"  # type: ignore[attr-defined]
    assert g.to_text() == before


def test_an_open_graph_has_no_text(tmp_path: Path) -> None:
    g = chain(finish=False)
    with pytest.raises(RuntimeError):
        g.to_text()
    with pytest.raises(RuntimeError):
        g.save(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_every_method_shows_its_signature() -> None:
    for name in dir(_core.Graph):
        member = getattr(_core.Graph, name)
        if not name.startswith("_") and callable(member):
            inspect.signature(member)
    signature = str(inspect.signature(_core.Graph.add_op))
    assert signature == "(self, /, name, flops, moved_bytes, scratch_bytes=0, flags=0, work=0)"
    assert "allow_checkpoint=True, allow_selective=True, force=False" in str(inspect.signature(_core.decide))


def test_the_type_is_closed() -> None:
    with pytest.raises(TypeError):
        type("Sub", (_core.Graph,), {})
    with pytest.raises(TypeError):
        type.__setattr__(_core.Graph, "extra", 1)
    with pytest.raises(TypeError):
        _core.Graph(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        pickle.dumps(chain())


def test_repr_says_what_it_is() -> None:
    assert repr(chain(1, finish=False)) == "<Graph: 7 ops, 9 buffers, 2 saves, open>"
    assert repr(chain(1)).endswith("finished>")


def test_threads_build_their_own_graphs() -> None:
    want = chain(8).digest
    got: list[str] = []

    def work() -> None:
        for _ in range(20):
            got.append(chain(8).digest)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [want] * 80


def test_constants_match_the_names() -> None:
    for i, name in enumerate(_core.CATEGORY_NAMES):
        assert getattr(_core, f"CATEGORY_{name.upper()}") == i
    phases = (_core.PHASE_FORWARD, _core.PHASE_BACKWARD, _core.PHASE_OPTIMIZER)
    assert phases == (0, 1, 2)
    flags = [value for name, value in vars(_core).items() if name.startswith("MODULE_")]
    assert sorted(flags) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    works = {value: name[5:].lower() for name, value in vars(_core).items() if name.startswith("WORK_")}
    assert works.pop(_core.WORK_COUNT) == "count"
    full = tuple(works[i] for i in range(_core.WORK_COUNT))
    assert full + tuple(f"{name}_half" for name in full) == _core.RATE_NAMES
