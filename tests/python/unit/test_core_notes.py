# SPDX-License-Identifier: Apache-2.0
"""Notes on operations and buffers, and what is alive at the peak, through the extension."""

from __future__ import annotations

import pytest

from core_samples import chain, noted
from memscale import _core


def test_notes_come_back_in_order() -> None:
    graph = noted()
    assert graph.op_notes() == [(0, -1, "model.py:7")]
    assert graph.buffer_notes() == [(0, 1, "float32[32, 32] layer.weight"), (1, -1, "float32[256]")]


def test_a_noted_graph_is_text_of_version_2_and_reads_back() -> None:
    graph = noted()
    text = graph.to_text()
    assert text.startswith("memscale-graph 2\n")
    again = _core.Graph.parse(text)
    assert again.to_text() == text
    assert again.buffer_notes() == graph.buffer_notes()
    assert chain().to_text().startswith("memscale-graph 1\n")


def test_notes_do_not_change_the_digest() -> None:
    graph = noted()
    lines = [line for line in graph.to_text().splitlines() if "-note " not in line]
    lines[0] = "memscale-graph 1"
    lines[1] = " ".join(lines[1].split(" ")[:-2])
    bare = _core.Graph.parse("\n".join([*lines, ""]))
    assert bare.op_notes() == [] and bare.digest == graph.digest


def test_a_later_note_replaces_an_earlier_one() -> None:
    g = _core.Graph()
    g.add_module("", "Model")
    buffer = g.add_resident(8, _core.CATEGORY_PARAMETER)
    g.note_buffer(buffer, -1, "first")
    g.note_buffer(buffer, 0, "second")
    g.finish()
    assert g.buffer_notes() == [(0, 0, "second")]


def test_refused() -> None:
    g = _core.Graph()
    with pytest.raises(ValueError, match="there is none yet"):
        g.note_op(-1, "x")
    with pytest.raises(ValueError, match="no module 0"):
        g.note_buffer(0, 0, "x")
    with pytest.raises(ValueError, match="no buffer 0"):
        g.note_buffer(0, -1, "x")
    with pytest.raises(ValueError, match="module must be -1 or an id"):
        g.note_buffer(0, -2, "x")


def test_what_is_alive_at_the_peak() -> None:
    replay = _core.replay(noted())
    assert replay["peak_live"] == [
        (4096, 0, 1, 1, _core.CATEGORY_PARAMETER, False),
        (1024, 1, 0, 1, _core.CATEGORY_ACTIVATION, False),
    ]


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_what_is_alive_adds_up_to_the_categories(kind: str) -> None:
    graph = chain()
    plan = _core.Plan.build([(1, "checkpoint", "chosen", 1, 10, 10)], {"budget_bytes": 1})
    for replay in (_core.replay(graph, sim={"kind": kind}), _core.replay(graph, plan, sim={"kind": kind})):
        sizes = dict.fromkeys(_core.CATEGORY_NAMES, 0)
        for size, _, _, _, category, _ in replay["peak_live"]:
            sizes[_core.CATEGORY_NAMES[category]] += size
        assert sizes == replay["category_peak_bytes"]
