# SPDX-License-Identifier: Apache-2.0
"""What CUDA operators allocate: our rules against what PyTorch's CUDA build did, as data.

The data come from `bench/standin/operators.py`. Calls are described there too; here their tensors are fakes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memscale.cuda import scratch
from memscale.cuda.card import CardFacts
from memscale.trace.recorder import tensors_of

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench/standin"))

from operator_calls import CALLS, Call, T

ROWS = json.loads((Path(__file__).parent / "cuda_operators.json").read_text())

BOUNDS = {"sort", "topk", "cumsum", "randperm", "argsort"}
"""Operators whose rules are upper bounds, of at most half and 128 KiB more than the truth."""

DATA_DEPENDENT = {"nonzero", "masked_select", "unique_consecutive", "bincount"}
"""Operators that fakes cannot run; `index` with a mask likewise."""


def _round(size: int) -> int:
    return -(-size // 512) * 512


def _made(spec: Any) -> Any:
    if isinstance(spec, T):
        return spec.make("cpu")
    if isinstance(spec, (list, tuple)):
        return type(spec)(_made(item) for item in spec)
    return spec


def predicted(call: Call, card: CardFacts) -> int:
    """Highest rounded bytes of results and scratch together."""
    packet, overload = call.name.split(".")
    func = getattr(getattr(torch.ops.aten, packet), overload)
    name = func._schema.name
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        args = _made(call.args)
        kwargs = {key: "cpu" if value == "cuda" else value for key, value in call.kwargs.items()}
        before = {tensor.untyped_storage()._cdata for tensor in tensors_of(args)}
        result = scratch.mended(name, args, func(*args, **kwargs))
        on_host = {result[index].untyped_storage()._cdata for index in scratch.HOST_OUTPUTS.get(name, ())}
        outputs: list[Tensor] = tensors_of(result)
        storages = {item.untyped_storage()._cdata: item.untyped_storage().nbytes() for item in outputs}
        blocks = scratch.blocks(name, args, outputs, card)
    results = sum(_round(size) for key, size in storages.items() if key not in before | on_host)
    phases = [sum(_round(size) for size, first, last in blocks if first <= at <= last) for at in (0, 1)]
    return results + max(phases)


def measured(row: dict[str, Any]) -> int:
    """Highest sum of the rounded sizes, without what the allocator left unsplit."""
    return int(row["requested_peak"])


def _cases() -> list[Any]:
    cases = []
    for row in ROWS:
        call = CALLS[row["index"]]
        name = call.name.split(".")[0]
        masked = name == "index" and any(isinstance(i, T) and i.dtype is torch.bool for i in call.args[1])
        if name not in DATA_DEPENDENT and not masked:
            label = f"{row['capability'][0]}{row['capability'][1]}-{row['index']}-{name}"
            cases.append(pytest.param(row, call, id=label))
    return cases


@pytest.mark.parametrize(("row", "call"), _cases())
def test_peak_of_a_call(row: dict[str, Any], call: Call) -> None:
    assert row["name"] == call.name, "the data are of another list of calls: measure again"
    if not hasattr(torch.ops.aten, call.name.split(".")[0]):
        pytest.skip("this PyTorch has no such operator")
    ours = predicted(call, CardFacts.of_capability(tuple(row["capability"]), row["units"]))
    real = measured(row)
    if call.name.split(".")[0] in BOUNDS:
        assert real <= ours <= real * 1.5 + 131072
    else:
        assert ours == real
