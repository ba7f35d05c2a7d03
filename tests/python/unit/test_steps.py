# SPDX-License-Identifier: Apache-2.0
"""How a group is stepped: what is told at a glance, whose threads work, what autograd is told."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradient_samples import gradient_of
from memscale.optim import take_over
from memscale.optim.kinds import gradient_refusal, is_usual, parameter_refusal


class _Other(nn.Parameter):
    """A parameter of a class of the caller's."""


def _imaginary(size: int) -> Tensor:
    return torch.randn(size, dtype=torch.complex64).conj().imag


PARAMETERS: dict[str, Callable[[], Tensor]] = {
    "fp32": lambda: nn.Parameter(torch.randn(4, 6)),
    "bf16": lambda: nn.Parameter(torch.randn(4, 6).bfloat16()),
    "fp64": lambda: nn.Parameter(torch.randn(4, 6).double()),
    "transposed": lambda: nn.Parameter(torch.randn(6, 4).t()),
    "gaps": lambda: nn.Parameter(torch.randn(4, 12)[:, ::2]),
    "of one": lambda: nn.Parameter(torch.randn(1)),
    "of one, negative": lambda: nn.Parameter(_imaginary(1)),
    "class": lambda: _Other(torch.randn(4, 6)),
    "tensor": lambda: torch.randn(4, 6, requires_grad=True),
    "empty": lambda: nn.Parameter(torch.randn(0, 6)),
    "meta": lambda: nn.Parameter(torch.randn(4, 6, device="meta")),
}

GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp32": lambda like: torch.ones_like(like, dtype=torch.float32),
    "fp16": lambda like: torch.ones_like(like, dtype=torch.float16),
    "transposed": lambda like: torch.ones(like.shape[::-1]).permute(*reversed(range(like.dim()))),
    "negative": lambda like: torch._neg_view(torch.ones(like.shape)),
    "sparse": lambda like: torch.ones(like.shape).to_sparse(),
    "shape": lambda like: torch.ones(*like.shape, 2),
    "meta": lambda like: torch.ones_like(like, device="meta"),
    "parameter": lambda like: nn.Parameter(torch.ones(like.shape)),
}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_what_is_usual_is_refused_by_nothing(parameter: str, gradient: str) -> None:
    """And lies in memory as the parameter does, with the values that it has."""
    weight = PARAMETERS[parameter]()
    slope = GRADIENTS[gradient](weight)
    if is_usual(weight, slope):
        assert not parameter_refusal(weight) and not gradient_refusal(weight, slope)
        assert weight.is_contiguous() and slope.is_contiguous() and weight.shape == slope.shape
        assert not weight.is_neg() and not slope.is_neg()


def test_the_usual_ones_are_told() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = nn.Parameter(torch.randn(3, 5).to(dtype))
        assert is_usual(weight, torch.randn(3, 5)) and is_usual(weight, torch.randn(3, 5).to(dtype))


def _stepped() -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    weights = [nn.Parameter(torch.ones(size)) for size in (70_000, 8)]
    optimizer = torch.optim.AdamW(weights)
    take_over(optimizer, "fp32")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer, weights


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of threads are read from /proc")
@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="PyTorch has no team of threads")
def test_pytorchs_threads_do_the_work() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        _stepped()
        names = []
        for task in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                names.append(task.read_text().strip())
    finally:
        torch.set_num_threads(before)
    assert "memscale-optim" not in names and len(names) >= 5


def test_versions_where_pytorch_takes_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weights = _stepped()
    wanted = [weight._version for weight in weights]
    many = torch.autograd.graph.increment_version

    def one(tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            raise RuntimeError("increment_version expect a Tensor as input")
        many(tensor)

    monkeypatch.setattr(torch.autograd.graph, "increment_version", one)
    _, weights = _stepped()
    assert [weight._version for weight in weights] == wanted and min(wanted) > 0


def test_a_state_that_cannot_be_taken_is_told_before_any_weight_changes() -> None:
    """One of a gradient that may be offloaded, too."""
    small, large = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(20, 31))
    optimizer = torch.optim.SGD([small, large], lr=0.1, momentum=0.9)
    take_over(optimizer, "fp32")
    small.grad = torch.ones(8)
    large.grad, _ = gradient_of(torch.ones(20, 31))
    optimizer.state[large] = {"momentum_buffer": torch.zeros(3)}
    with pytest.raises(ValueError):
        optimizer.step()
    assert torch.equal(small, torch.ones(8))
