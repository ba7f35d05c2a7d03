# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers in a trace for a card: shapes, and that nothing of cuDNN or of its dropout is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.cuda import recurrent
from memscale.ops import op_facts
from memscale.ops.fake_results import mode_of_fakes

KINDS = (nn.LSTM, nn.GRU, nn.RNN)


class Recorder(TorchDispatchMode):
    """Runs operators as a trace for a card does, and remembers their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return op_facts.run(func, op_facts.facts(func), args, kwargs or {}, False)


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fakes lie on the CPU, and cuDNN accepts them."""
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)


def shapes(layer: nn.Module, x: Tensor, source: Any) -> list[Any]:
    """Of results and gradients."""
    out, state = layer(source)
    data = out.data if isinstance(out, nn.utils.rnn.PackedSequence) else out
    data.sum().backward()
    states = state if isinstance(state, tuple) else (state,)
    return [value.shape for value in (data, *states, x.grad, *(p.grad for p in layer.parameters()))]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("more", [{}, {"bidirectional": True}, {"num_layers": 2, "dropout": 0.1}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_the_layers_own(kind: type[nn.Module], more: dict[str, Any], batch_first: bool) -> None:
    made = []
    layer, x = kind(8, 16, batch_first=batch_first, **more), torch.randn(4, 10, 8, requires_grad=True)
    made.append(shapes(layer, x, x))
    recorder = Recorder()
    with mode_of_fakes():
        layer, x = kind(8, 16, batch_first=batch_first, **more), torch.empty(4, 10, 8, requires_grad=True)
        with recorder, recurrent.layers_of(layer):
            made.append(shapes(layer, x, x))
    assert made[0] == made[1]
    assert [name for name in recorder.names if "rnn" in name] == [
        "aten::_cudnn_rnn",
        "aten::_cudnn_rnn_backward",
    ]
    assert not any("dropout_state" in name for name in recorder.names)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: type[nn.Module]) -> None:
    """The functions as the layers call them, with the batch's size at each of ten steps."""
    recorder, sizes = Recorder(), torch.tensor([3, 3, 3, 2, 2, 2, 2, 1, 1, 1])
    run = {nn.LSTM: torch._VF.lstm, nn.GRU: torch._VF.gru, nn.RNN: torch._VF.rnn_tanh}[kind]
    with mode_of_fakes():
        layer, data = kind(8, 16), torch.empty(20, 8, requires_grad=True)
        state = torch.empty(1, 3, 16)
        hidden = (state, state) if kind is nn.LSTM else state
        with recorder, recurrent.layers_of(layer):
            out, *states = run(data, sizes, hidden, layer._flat_weights, True, 1, 0.0, True, False)
            out.sum().backward()
    assert out.shape == (20, 16) and all(made.shape == (1, 3, 16) for made in states)
    assert data.grad.shape == data.shape and len(states) == (2 if kind is nn.LSTM else 1)
    assert "aten::_cudnn_rnn_backward" in recorder.names


def test_models_without_such_layers_are_left_alone() -> None:
    assert not isinstance(recurrent.layers_of(nn.Linear(2, 2)), recurrent.Layers)
