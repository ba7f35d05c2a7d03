# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command line ask about: functions for MODULE:FUNCTION, and a runner."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memscale.cli.main import main


class Net(nn.Module):
    """An embedding, blocks and a head; computes its loss."""

    def __init__(self, blocks: int = 3, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width), nn.Tanh())
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def sized(batch: int = 4, seq: int = 64) -> tuple[nn.Module, Tensor]:
    return Net(), torch.randint(0, 100, (batch, seq))


def fixed() -> tuple[nn.Module, Tensor]:
    return nn.Linear(10, 10), torch.randn(3, 10)


def alone() -> nn.Module:
    return nn.Linear(10, 10)


def needs_data() -> tuple[nn.Module, Tensor]:
    assert torch.zeros(3).sum().item() == 0
    return fixed()


def transformer() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50, n_positions=32))


class Decides(nn.Module):
    """Goes one way or the other, by what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y if y.sum() > 0 else 2 * y


def decides() -> tuple[nn.Module, Tensor]:
    return Decides(), torch.randn(3, 10)


def wrong() -> int:
    return 3


def raises() -> nn.Module:
    raise RuntimeError("no\nway\x1b[31m")


class Talks(nn.Module):
    """Has much to say about what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(
            "\n".join(["wanted", "  one thing", "", *(f"line {number}" for number in range(40))])
        )


def talks() -> tuple[nn.Module, Tensor]:
    return Talks(), torch.randn(3, 10)


def rejects() -> tuple[nn.Module, Tensor]:
    return nn.Linear(10, 10), torch.randn(3, 11)


@dataclass
class Said:
    """What a run of the program left: exit status, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    def refused(self, *texts: str) -> None:
        """Requires exit status 2, nothing printed, one line of error with quotes below it, and every text."""
        assert self.code == 2, (self.out, self.err)
        assert self.out == ""
        assert self.err.startswith("memscale: ")
        assert all(line.startswith("  ") for line in self.err.splitlines()[1:])
        assert "\x1b" not in self.err
        for text in texts:
            assert text in self.err


class Runner:
    """Runs the program in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object) -> Said:
        self.capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = self.capsys.readouterr()
        return Said(code, captured.out, captured.err)
