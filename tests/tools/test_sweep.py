# SPDX-License-Identifier: Apache-2.0
"""The sweep finds what it looks for.

It looks at every object of a process, so its trials run in one of their own: this file, as a program.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from sweeping import forks, remains, rows, trial  # noqa: E402
from sweeping.driver import Orders, Sweep, sample  # noqa: E402
from sweeping.subject import Attempts, Made, Recipe, usual_loss  # noqa: E402

KEPT: list[Any] = []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks:
    """A library of one model."""

    def names(self) -> list[str]:
        return ["blocks"]

    def attempts(self, name: str) -> Attempts:
        yield {"width": 15}
        yield {"width": 16}

    def make(self, name: str, recipe: Recipe) -> Made:
        model = nn.Sequential(*(Block() for _ in range(4))).train()

        def batch(step: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
            return (torch.randn(64, recipe["width"], generator=torch.Generator().manual_seed(step)),), {}

        return Made(model, batch, usual_loss)


def trials() -> dict[str, Any]:
    """What plain PyTorch does with that model, and MemScale with each kind of defect. Of the program."""
    plain = trial.plain(Blocks(), "blocks")

    def wrapped() -> dict[str, Any]:
        return trial.planned(Blocks(), "blocks", plain["recipe"], plain["peak"], 0.6, deferred=False)

    found = {"plain": plain, "sound": wrapped()}
    for name, defect in ENDS.items():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, "wrap", defect)
            found[name] = wrapped()
    with pytest.MonkeyPatch.context() as patch:
        calls, forward = iter(range(1000)), Block.forward
        patch.setattr(Block, "forward", lambda self, x: forward(self, x) * (1 + next(calls)))
        found["unrepeatable"] = trial.plain(Blocks(), "blocks")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("predict", "detach"):
            plant(patch, name, *(defect for function, defect, _ in LEFT.values() if function == name))
        found["left"] = wrapped()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `trials` found."""
    places = [str(ROOT / "tools"), str(Path(memscale.__file__).parents[1]), *sys.path]
    done = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def plain(found: dict[str, Any]) -> dict[str, Any]:
    """What plain PyTorch does."""
    result: dict[str, Any] = found["plain"]
    return result


def judged(plain: dict[str, Any], planned: dict[str, Any]) -> rows.Row:
    row = rows.Row("blocks", "blocks", "none", {})
    rows.judge(row, plain, planned)
    return row


def plant(patch: pytest.MonkeyPatch, function: str, *defects: Callable[[Any], Any]) -> None:
    """Has a function of memscale end with something that is done to the model."""
    original = getattr(memscale, function)

    def changed(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        for defect in defects:
            defect(model)
        return result

    patch.setattr(memscale, function, changed)


def test_the_first_recipe_that_works_is_taken(plain: dict[str, Any]) -> None:
    assert plain["recipe"] == {"width": 16} and not plain["unrepeatable"]


def test_a_model_without_faults_is_equal(plain: dict[str, Any], found: dict[str, Any]) -> None:
    row = judged(plain, found["sound"])
    assert row.status == rows.EQUAL, row.problems
    assert row.active and row.predicted and row.peak


def _keep_a_fake(model: nn.Module) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        KEPT.append(torch.empty(3))


def _replace_a_weight(model: nn.Module) -> None:
    part: Any = model.get_submodule("0.up")
    part.bias = nn.Parameter(part.bias.detach())


LEFT: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "an attribute": ("predict", lambda m: setattr(m[1], "left", 1), "1.left"),
    "a hook": ("predict", lambda m: m[2].register_forward_hook(lambda *_: None), "2._forward_hooks"),
    "of a weight": ("predict", lambda m: setattr(m[0].up.weight, "left", 1), "0.up.weight"),
    "another weight": ("predict", _replace_a_weight, "0.up.bias: identity"),
    "a generator": ("predict", lambda m: torch.rand(1), "generator torch"),
    "a fake": ("predict", _keep_a_fake, "(3,)"),
    "a setting": ("detach", lambda m: torch.set_float32_matmul_precision("medium"), "matmul"),
    "what stays": ("detach", lambda m: m[3].register_buffer("left", None), "3._buffers"),
}
"""Function of memscale at whose end something is left behind, and a part of what is said of it."""


@pytest.mark.parametrize("defect", LEFT)
def test_what_is_left_behind_is_found(plain: dict[str, Any], found: dict[str, Any], defect: str) -> None:
    function, _, said = LEFT[defect]
    left = found["left"]
    of_model = remains.changed(plain["remains"], left["remains"])
    lines = [*left["left"], *left["fakes"], *(("detach", line) for line in of_model)]
    assert any(stage == function and said in line for stage, line in lines), lines
    assert {rows.LEFT, rows.FAKE} <= judged(plain, left).kinds()


def _raise(model: nn.Module) -> None:
    raise RuntimeError("planted")


def _flip_a_bit(model: Any) -> None:
    model[0].up.bias.data.view(torch.int32).bitwise_xor_(1)


ENDS = {"raises": _raise, "flips a bit": _flip_a_bit}
"""What happens at the end of `wrap`."""


@pytest.mark.parametrize(
    ("defect", "kind", "said"), [("raises", rows.EXCEPTION, "planted"), ("flips a bit", rows.BITS, "differ")]
)
def test_an_exception_and_a_bit_are_found(
    plain: dict[str, Any], found: dict[str, Any], defect: str, kind: str, said: str
) -> None:
    row = judged(plain, found[defect])
    assert row.status == rows.FAILED
    assert any(one == kind and said in line for one, _, line in row.problems), row.problems


def test_a_model_that_plain_pytorch_does_not_repeat_is_told_apart(found: dict[str, Any]) -> None:
    assert "loss" in found["unrepeatable"]["unrepeatable"]


def test_rows_survive_a_file(tmp_path: Path) -> None:
    row = rows.Row("blocks", "blocks", "none", {"torch": "2"}, problems=[(rows.BITS, "step 0", "1 differ")])
    rows.append(tmp_path / "rows.jsonl", dataclasses.replace(row, reason="an earlier run"))
    rows.append(tmp_path / "rows.jsonl", row)
    assert list(rows.read(tmp_path / "rows.jsonl").values()) == [row]


def _answers(plain: Any, planned: Any) -> Any:
    """A process that forks, of which each call is answered like that."""
    known = {"plain": plain, "planned": planned}
    return SimpleNamespace(call=lambda function, limit, **given: known[function])


def test_what_takes_too_long_is_not_swept_and_what_crashes_has_failed(plain: dict[str, Any]) -> None:
    sweep = Sweep(Orders(("blocks",), (), Path("rows.jsonl"), None, confirm=False))
    worked = forks.Answer(plain, "", 1.0)
    late = forks.Answer(None, "not done after 1 s", 1.0, late=True)
    crashed = forks.Answer(None, "ended by SIGSEGV", 1.0)
    found = []
    for answers in ((late, late), (worked, late), (worked, crashed)):
        row = rows.Row("blocks", "blocks", "none", {})
        sweep.fill(row, _answers(*answers))
        found.append((row.status, row.kinds()))
    assert found == [(rows.NOT_SWEPT, set()), (rows.NOT_SWEPT, set()), (rows.FAILED, {rows.CRASH})]


def test_a_sample_hardly_changes_with_the_names() -> None:
    names = [("library", f"model{number}") for number in range(100)]
    chosen = sample(names, 10, seed=3)
    assert len(chosen) == 10 and chosen != sample(names, 10, seed=4)
    assert len(set(sample([*names, ("library", "new")], 10, seed=3)) & set(chosen)) >= 9


def test_fields_of_configurations_inside_are_fixed_by_names_with_points() -> None:
    sizes = pytest.importorskip("sweeping.libraries.transformers_config")
    transformers = pytest.importorskip("transformers")
    config = sizes.shrink(transformers.CLIPConfig(), **{"text_config.projection_dim": 3})
    assert config.text_config.projection_dim == 3
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 64


def test_a_configuration_that_makes_those_inside_anew_has_an_end() -> None:
    from sweeping.libraries.transformers_ask import Ask

    class Endless:
        encoder = property(lambda self: Endless())

    ask = Ask(Endless, Endless(), {}, 0)
    assert ask.field("hidden_size", default=7) == 7
    inner = SimpleNamespace(vision_config=SimpleNamespace(patch_size=8))
    assert Ask(Endless, SimpleNamespace(vlm_config=inner), {}, 0).field("patch_size") == 8


def test_suppression_keeps_what_no_better_box_covers() -> None:
    from sweeping.libraries.torchvision_ops import _nms

    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(60, 2, generator=generator) * 20
    boxes = torch.cat([corner, corner + 1 + torch.rand(60, 2, generator=generator) * 10], 1)
    scores = torch.rand(60, generator=generator)
    kept: list[int] = []
    for index in scores.argsort(descending=True).tolist():
        low, high = (
            torch.maximum(boxes[index, :2], boxes[kept, :2]),
            torch.minimum(boxes[index, 2:], boxes[kept, 2:]),
        )
        common = (high - low).clamp(min=0).prod(1)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        if not (common / (area[index] + area[kept] - common) > 0.3).any():
            kept.append(index)
    assert 5 < len(kept) < 55
    assert _nms(boxes, scores, 0.3).tolist() == kept


if __name__ == "__main__":
    print(json.dumps(trials()))
