# SPDX-License-Identifier: Apache-2.0
"""Source lines of operations: found on the stack in forward, by the node's number in backward."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memscale import _core
from memscale.torchkit.sources import NOWHERE, shortened
from memscale.trace.recorder import GraphRecorder

HERE = Path(__file__).name


def recorded(run: Callable[[], object], recorder: GraphRecorder) -> dict[str, str]:
    """Operation → line, of what a function runs."""
    with recorder:
        run()
    recorder.closed = True
    recorder.graph.finish()
    lines = {op: source for op, _, source in recorder.graph.op_notes()}
    return {op[0]: lines.get(number, "") for number, op in enumerate(recorder.graph.ops())}


def test_the_innermost_line_outside_pytorch() -> None:
    line = recorded(lambda: torch.ones(2).relu(), GraphRecorder(_core.Graph()))["relu"]
    assert line.rpartition(":")[0].endswith(HERE) and not line.startswith("/")
    assert line.rpartition(":")[2] == str(test_the_innermost_line_outside_pytorch.__code__.co_firstlineno + 1)


def test_a_module_of_pytorch_counts_where_there_is_no_other() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    first = GraphRecorder(_core.Graph())
    assert HERE in recorded(lambda: layer(x), first)["addmm"]  # the test's own line is better than PyTorch's
    second = GraphRecorder(_core.Graph())
    files = first.origins.lines.files
    second.origins.lines.files = {code: "" for code in files if HERE in code.co_filename}

    def here() -> None:
        layer(x)

    second.origins.lines.files[here.__code__] = ""
    second.origins.lines.files[recorded.__code__] = ""
    frame = sys._getframe()
    while frame.f_back is not None:
        second.origins.lines.files[frame.f_code] = ""
        frame = frame.f_back
    assert "torch/nn/modules/linear.py:" in recorded(here, second)["addmm"]


def test_backward_leads_back_to_forward() -> None:
    recorder = GraphRecorder(_core.Graph())
    x = torch.ones(3, requires_grad=True)
    made: list[Tensor] = []
    lines = recorded(lambda: made.append((x * 2).tanh().sum()), recorder)

    def follow(node: Any) -> str:
        recorder.origins.node_begins(node._sequence_nr())
        return recorder.origins.in_backward().source

    total = made[0].grad_fn
    assert total is not None
    tanh = total.next_functions[0][0]
    assert tanh is not None
    assert follow(total) == lines["sum"] != ""
    assert follow(tanh) == lines["tanh"] != ""
    leaf = tanh.next_functions[0][0].next_functions[0][0]
    assert follow(leaf) == "" and recorder.origins.in_backward() is NOWHERE


class Own(torch.autograd.Function):
    """A custom function of two operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Two operations, one node."""
        return x * 2 + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Its gradient."""
        return gradient * 2


def test_a_custom_function_is_one_node() -> None:
    recorder = GraphRecorder(_core.Graph())
    made: list[Tensor] = []
    recorded(lambda: made.append(Own.apply(torch.ones(3, requires_grad=True))), recorder)
    recorder.origins.node_begins(made[0].grad_fn._sequence_nr())
    assert HERE in recorder.origins.in_backward().source


@pytest.mark.parametrize("folder", ["one", "one/two"])
def test_names_of_files_are_of_no_machine(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / folder / "train.py")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.chdir("/")
    assert not os.path.isabs(shortened(path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "one"), str(tmp_path)])
    assert shortened(str(tmp_path / "one" / "pack" / "m.py")) == "pack/m.py"
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.chdir(tmp_path)
    assert shortened(path) == f"{folder}/train.py"
