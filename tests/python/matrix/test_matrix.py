# SPDX-License-Identifier: Apache-2.0
"""The equality matrix: every technique and every pair × architectures × ways to train.

The part that `covering` chooses; all of it with the environment variable MEMSCALE_WHOLE_MATRIX=1, or by
`python tools/equality_matrix.py`, which also writes docs/guide/equality.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from matrix import cells, techniques
from matrix.architectures import ARCHITECTURES, architecture
from matrix.cells import EQUAL, FAILED, REFUSED, outcome
from matrix.covering import Cell, covering, every_cell
from matrix.modes import ATTEMPTS, MODES, mode
from matrix.techniques import COLUMNS, TECHNIQUES, Attaching, Technique, column_name, facts_of, forced
from memscale.state.attribute_tables import AttributeTables
from zoo.training import same_bits

WHOLE = os.environ.get("MEMSCALE_WHOLE_MATRIX") == "1"
CELLS = every_cell() if WHOLE else covering()


def _name(cell: Cell) -> str:
    return f"{cell[0].name}-{column_name(cell[1])}-{cell[2].name}".replace(" ", "")


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=_name)
def test_equal_to_plain_pytorch(cell: Cell) -> None:
    made = outcome(*cell)
    if "chain" in column_name(cell[1]):
        assert (made.status == REFUSED) >= (not cell[0].chains)
    assert made.status != FAILED, made.note
    assert made.status != REFUSED or made.note, "refused without a reason"
    assert made.status == REFUSED or made.compared > 0


class TestTheRows:
    def test_there_are_enough_of_every_kind(self) -> None:
        kinds = " ".join(item.kind for item in ARCHITECTURES)
        for kind in (
            "decoder", "mixture of experts", "state space", "encoder", "encoder-decoder", "vision", "audio",
            "convolution", "LSTM", "control flow", "custom autograd function", "in-place", "views",
            "tied weights", "frozen base", "called twice",
        ):  # fmt: skip
            assert kind in kinds
        assert len({item.name for item in ARCHITECTURES}) == len(ARCHITECTURES) >= 16

    def test_the_part_has_every_row_with_every_technique_and_mode(self) -> None:
        part = covering()
        with_technique = {(row.name, technique.name) for row, columns, _ in part for technique in columns}
        assert len(with_technique) == len(ARCHITECTURES) * len(TECHNIQUES)
        assert len({(row.name, how.name) for row, _, how in part}) == len(ARCHITECTURES) * len(MODES)
        with_mode = {(columns, how.name) for _, columns, how in part}
        for columns in COLUMNS:
            modes = [how.name for how in MODES if (columns, how.name) in with_mode]
            assert len(modes) >= (len(MODES) if len(columns) == 1 else len(MODES) // 3)
        pairs = {
            (technique.name, mode) for columns, mode in with_mode if len(columns) > 1 for technique in columns
        }
        assert len(pairs) == len(TECHNIQUES) * len(MODES)
        assert len(part) < len(every_cell()) / 4

    @pytest.mark.parametrize("name", ["gpt2", "whisper", "convnet", "sequential", "layer-drop", "shared"])
    def test_blocks_are_treated(self, name: str) -> None:
        row = architecture(name)
        made = outcome(row, (technique("checkpoint"),), mode("plain"))
        assert made.status == EQUAL and made.regions >= 3 and not made.note

    @pytest.mark.parametrize("name", ["gpt2", "llama", "convnet", "lstm", "tied"])
    def test_dropout_drops(self, name: str) -> None:
        """The mode changes what is computed, so that the techniques have random numbers to replay."""
        plain, dropped = (cells.reference(architecture(name), mode(how)) for how in ("plain", "dropout"))
        assert not same_bits(plain[0, "loss 0"], dropped[0, "loss 0"])
        assert not same_bits(plain[5, "random numbers"], dropped[5, "random numbers"])


def technique(name: str) -> Technique:
    return next(item for item in TECHNIQUES if item.name == name)


class _Forgetful(nn.Module):
    """Stands for a technique that is wrong: it changes one gradient in the last bit."""

    name, path = "wrong", ""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        first = next(value for value in model.parameters() if value.requires_grad)
        self.handle = first.register_hook(lambda gradient: torch.nextafter(gradient, gradient.new_ones(())))


class TestTheInstrument:
    """The matrix sees what is wrong, and says what is refused."""

    def test_one_bit_of_one_gradient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(model: nn.Module, *rest: object) -> Iterator[object]:
            _Forgetful(model)
            return forced(model, *rest)  # type: ignore[arg-type,return-value]

        monkeypatch.setattr(cells, "forced", wrong)
        made = outcome(architecture("gpt2"), (technique("checkpoint"),), mode("plain"))
        assert made.status == FAILED and "gradient" in made.note

    def test_a_block_that_may_not_run_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Forced onto what the planner refuses, a checkpoint is wrong, and it shows."""
        row = architecture("counts-in-number")
        facts = facts_of(row)
        every = {choice.module: choice for choice in facts.planned.plan.choices if choice.module}
        monkeypatch.setattr(techniques, "facts_of", lambda _: replace(facts, candidates=every))
        assert (
            outcome(row, (technique("checkpoint"),), mode("plain")).status == EQUAL
        )  # its number is put back
        monkeypatch.setattr(AttributeTables, "restore", lambda *_: None)
        assert outcome(row, (technique("checkpoint"),), mode("plain")).status == FAILED

    def test_what_cannot_be_attached_says_why(self) -> None:
        made = outcome(architecture("gpt2"), (technique("chain"),), mode("plain"))
        assert made.status == REFUSED and made.note == "no nn.Sequential"
        made = outcome(architecture("counts-in-number"), (technique("checkpoint"),), mode("plain"))
        assert made.status == EQUAL and "Python attribute" in made.note

    def test_a_refused_row(self) -> None:
        row = architecture("counts-in-number")
        nothing = replace(facts_of(row), candidates={})
        with pytest.raises(techniques.Refused, match="Python attribute"):
            Attaching(nothing, nn.Module(), 1).blocks()

    def test_attempts_fail_in_forward_and_in_backward(self) -> None:
        plain = cells.reference(architecture("gpt2"), mode("exception"))
        attempts = {step for step, name in plain if name == "failed attempts" and plain[step, name]}
        assert attempts == {step for step, where in ATTEMPTS.items() if where != "recompute"}
