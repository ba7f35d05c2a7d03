# SPDX-License-Identifier: Apache-2.0
"""The rules for cuDNN against what an H100 took: rows of `bench/gpu/scratch.py` in `bench/results`."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memscale.cuda import recurrent, scratch
from memscale.cuda.card import card_of
from memscale.hardware.target import Target

MIB = 1 << 20
FILE = Path(__file__).resolve().parents[3] / "bench" / "results" / "gpu_scratch.csv"
CARD = card_of(Target.cuda((9, 0), 132))
CONV = re.compile(
    r"conv n(?P<n>\d+) c(?P<c>\d+) (?P<size>[\dx]+) o(?P<o>\d+) k(?P<k>[\dx]+) "
    r"s(?P<s>\d+) p(?P<p>\d+) d(?P<d>\d+) g(?P<g>\d+)(?P<t> t)?"
)
RECURRENT = re.compile(
    r"(?P<kind>LSTM|GRU) layers(?P<layers>\d) n(?P<n>\d+) t(?P<t>\d+) w(?P<w>\d+)(?P<both> both)?"
)


def rows(pattern: re.Pattern[str], part: str) -> list[tuple[dict[str, str], dict[str, str]]]:
    """What a call was, and its row."""
    with FILE.open(newline="") as file:
        found = [(pattern.fullmatch(row["call"]), row) for row in csv.DictReader(file)]
    return [(match.groupdict(), row) for match, row in found if match and row["part"] == part]


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split("x")]


def operands(call: dict[str, str], row: dict[str, str]) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
    """Input, weight and output without data, and the arguments after the bias."""
    size, kernel, stride, padding = numbers(call["size"]), numbers(call["k"]), int(call["s"]), int(call["p"])
    channels, out, groups = int(call["c"]), int(call["o"]), int(call["g"])
    layout = torch.channels_last if row["layout"] == "channels_last" else torch.contiguous_format
    like = {"dtype": getattr(torch, row["dtype"]), "device": "meta"}
    first, second = (channels, out) if call["t"] else (out, channels)
    source = torch.empty(int(call["n"]), channels, *size, **like).contiguous(memory_format=layout)
    weight = torch.empty(first, second // groups, *kernel, **like).contiguous(memory_format=layout)
    each = [[value] * len(size) for value in (stride, padding, int(call["d"]))]
    rest = (*each, bool(call["t"]), [0] * len(size), groups)
    return source, weight, torch.ops.aten.convolution(source, weight, None, *rest), rest


def predicted(call: dict[str, str], row: dict[str, str]) -> int:
    source, weight, made, rest = operands(call, row)
    if row["part"] == "forward":
        blocks = scratch.blocks("aten::convolution", (source, weight, None, *rest), [made], CARD)
    else:
        wanted = [row["part"] == "of input", row["part"] == "of weight", False]
        args = (made, source, weight, [made.shape[1]], *rest, wanted)
        blocks = scratch.blocks("aten::convolution_backward", args, [source], CARD)
    return sum(size for size, _, _ in blocks)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("part", ["forward", "of input", "of weight"])
def test_convolutions(part: str, layout: str) -> None:
    """A bound that one call in five passes, and by how much the usual call is above what it takes."""
    measured = [
        (call, row) for call, row in rows(CONV, part) if row["layout"] == layout and int(row["scratch"]) >= 0
    ]
    pairs = [(predicted(call, row), int(row["scratch"])) for call, row in measured]
    low = [pair for pair in pairs if pair[0] < pair[1] - MIB]
    assert len(pairs) > 60 and len(low) <= len(pairs) // 5, low
    above = statistics.median(max(0, rule - taken) / MIB for rule, taken in pairs)
    assert above <= 13


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_recurrent_layers(part: str) -> None:
    found = rows(RECURRENT, part)
    assert len(found) == 20
    for call, row in found:
        layers, batch, steps, width = (int(call[name]) for name in ("layers", "n", "t", "w"))
        both = 2 if call["both"] else 1
        like = {"dtype": getattr(torch, row["dtype"]), "device": "meta"}
        output = torch.empty(batch, steps, both * width, **like)
        gates, kind = (4, 2) if call["kind"] == "LSTM" else (3, 3)
        weights = [
            torch.empty(gates * width, columns, **like)
            for layer in range(layers)
            for columns in both * (width if layer == 0 else both * width, width, 1, 1)
        ]
        sizes = [int(size) for size in re.findall(r"(\d+)(?!\+|\d)", row["blocks"])]
        workspace = scratch.recurrent_workspace(weights, output, layers, both == 2)
        assert max(sizes) <= workspace + 512 <= 2 * max(sizes), row["call"]
        if part == "forward":
            reserve = int(row["blocks"].split()[-1].removesuffix("+"))
            assert recurrent.reserve_bytes(kind, output, layers) == reserve, row["call"]
