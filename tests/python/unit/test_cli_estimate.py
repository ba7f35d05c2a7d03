# SPDX-License-Identifier: Apache-2.0
"""`memscale estimate`: answers, exit codes, refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import memscale
from calls import beside
from cli_samples import Runner, sized
from core_samples import chain
from memscale.core.profiler import MemoryProfiler
from memscale.units import format_bytes

SIZED = "cli_samples:sized"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return Runner(capsys)


def predicted(batch: int, seq: int, budget: int) -> memscale.Prediction:
    """The same step through the library."""
    model, ids = sized(batch, seq)
    config = memscale.Config(memory_budget=budget, enable_logging=False)
    return memscale.predict(model, None, config, ids, "cpu")


def test_the_screen_says_what_predict_says(run: Runner) -> None:
    said = run("estimate", SIZED, "--batch", 4, "--seq", 64, "--device", "cpu", "--budget", "1GiB")
    expected = predicted(4, 64, 1 << 30)
    assert said.code == 0
    assert said.out.count("\n") < 60
    for text in (
        "batch 4 × 64 tokens, as built, adamw",
        f"FITS: {format_bytes(expected.device_used_peak_bytes)} of 1.00 GiB",
        "largest holders",
        "blocks.*",
        "cli_samples.py:",
        "by module",
    ):
        assert text in said.out
    for name, size in expected.by_category.items():
        assert any(
            name.replace("_", " ") in line and format_bytes(size) in line for line in said.out.splitlines()
        )


def test_a_plan_is_shown_with_its_price(run: Runner) -> None:
    plain = predicted(64, 64, 1 << 30)
    budget = (plain.smallest_peak_bytes + plain.device_used_peak_bytes) // 2
    said = run("estimate", SIZED, "--batch", 64, "--seq", 64, "--device", "cpu", "--budget", budget)
    assert said.code == 0
    assert "FITS WITH A PLAN" in said.out
    assert "step time ×" in said.out
    assert "checkpoint" in said.out
    assert f"without a plan it would be {format_bytes(plain.device_used_peak_bytes)}" in said.out


def test_what_does_not_fit_is_3_and_says_what_would(run: Runner) -> None:
    said = run("estimate", SIZED, "--batch", 64, "--seq", 64, "--device", "cpu", "--budget", "4MiB")
    assert said.code == 3
    assert "DOES NOT FIT" in said.out
    assert "raise the budget to" in said.out


def test_verbose_shows_every_choice(run: Runner) -> None:
    said = run("estimate", SIZED, "--device", "cpu", "--budget", "1GiB", "--verbose")
    assert "blocks.2.3" in said.out
    assert "digest" in said.out


def test_json_is_the_prediction(run: Runner) -> None:
    said = run("estimate", SIZED, "--batch", 4, "--seq", 64, "--device", "cpu", "--budget", "1GiB", "--json")
    found, expected = said.document, predicted(4, 64, 1 << 30)
    assert said.code == 0
    assert (found["format"], found["version"], found["fits"]) == ("memscale-estimate", 1, True)
    assert found["model"]["parameters"] == sum(weight.numel() for weight in sized()[0].parameters())
    (case,) = found["cases"]
    assert (case["batch"], case["sequence"], case["verdict"]) == (4, 64, "plain")
    assert case["device"]["kind"] == "cpu"
    assert case["plain"]["device_used_peak_bytes"] == expected.device_used_peak_bytes
    assert case["planned"]["by_category"] == expected.by_category
    assert sum(case["plain"]["by_category"].values()) == case["plain"]["device_used_peak_bytes"]
    assert case["planned"]["holders"][0]["bytes"] >= case["planned"]["holders"][1]["bytes"]
    assert case["plan"]["digest"] == expected.plan.digest  # type: ignore[union-attr]
    assert set(case["plain"]["phase_peaks"]) == {"forward", "backward", "optimizer"}


def test_cards_share_what_is_the_same(run: Runner) -> None:
    arguments = ("--batch", "1,8", "--seq", "32,64", "--gpu", "RTX 3090,A100 80GB,80GiB", "--json")
    found = run("estimate", SIZED, *arguments).document
    assert len(found["cases"]) == 12
    assert [(case["batch"], case["sequence"]) for case in found["cases"][::3]] == [
        (1, 32), (1, 64), (8, 32), (8, 64),
    ]  # fmt: skip
    peaks = [case["plain"]["allocated_peak_bytes"] for case in found["cases"]]
    assert peaks[0] == peaks[1] == peaks[2] < peaks[9] == peaks[10] == peaks[11]
    assert all(case["plain"]["context_bytes"] > 0 for case in found["cases"])


def test_cards_of_one_kind_share_their_traces(run: Runner) -> None:

    traced: list[object] = []
    with beside({MemoryProfiler.profile: lambda *given: traced.append(given)}):
        assert run("estimate", SIZED, "--gpu", "24GiB").code == 0
        alone = len(traced)
        assert run("estimate", SIZED, "--gpu", "24GiB,48GiB,80GiB").code == 0
    assert len(traced) == 2 * alone


def test_names_cannot_play_with_the_terminal(run: Runner, tmp_path: Path) -> None:
    source = tmp_path / "odd_net.py"
    source.write_text(
        "import torch\nclass Odd(torch.nn.Linear): pass\nOdd.__name__ = 'Odd\\x1b[31m\\n'\n"
        "def build():\n    return torch.nn.Sequential(Odd(10, 10)), torch.randn(3, 10)\n"
        "def odd():\n    return Odd(10, 10), torch.randn(3, 10)\n"
    )
    for name in ("build", "odd"):
        said = run("estimate", f"{source}:{name}", "--device", "cpu", "--verbose")
        assert "\x1b" not in said.out + said.err
    sys.modules.pop("odd_net", None)


def test_the_fit_table_has_a_row_per_card_and_a_column_per_size(run: Runner) -> None:
    said = run("estimate", SIZED, "--batch", "1,8", "--seq", 64, "--gpu", "RTX 3090,A100 80GB")
    lines = said.out.splitlines()
    head = next(line for line in lines if line.startswith("device"))
    rows = [line for line in lines if line.startswith(("RTX 3090 ", "A100 80GB ")) or "A100 80GB" in line]
    assert head.endswith(" 8 × 64")
    assert len(rows) == 2
    assert all(row.count(" ok") == 2 and row.index("ok") for row in rows)
    assert said.code == 0


def test_one_case_that_does_not_fit_makes_the_table_3(run: Runner) -> None:
    said = run("estimate", SIZED, "--batch", "1,64", "--seq", 64, "--device", "cpu", "--budget", "4MiB")
    assert said.code == 3
    assert " no" in said.out


def test_optimizers_and_dtypes_change_the_bytes(run: Runner) -> None:
    def planned(*more: object) -> dict[str, int]:
        said = run("estimate", SIZED, "--device", "cpu", "--budget", "1GiB", "--json", *more)
        sizes: dict[str, int] = said.document["cases"][0]["plain"]["by_category"]
        return sizes

    adamw, sgd = planned("--optimizer", "adamw"), planned("--optimizer", "sgd")
    assert adamw["optimizer_state"] >= 2 * adamw["parameter"]
    assert "optimizer_state" not in sgd
    assert planned("--dtype", "bf16")["parameter"] * 2 == adamw["parameter"]
    mixed = planned("--dtype", "bf16-amp", "--batch", 64)
    assert mixed["parameter"] == adamw["parameter"]
    assert mixed["activation"] < planned("--batch", 64)["activation"]


def test_a_mode_says_what_it_cannot_do_yet(run: Runner) -> None:
    from memscale.core.plan_log import fields_without_effect

    said = run("estimate", SIZED, "--device", "cpu", "--mode", "aggressive")
    fields = fields_without_effect(memscale.Config(mode="aggressive"))  # type: ignore[arg-type]
    assert ("no effect in this version" in said.out) == bool(fields)
    quiet = run("estimate", SIZED, "--device", "cpu")
    assert "no effect" not in quiet.out


@pytest.mark.parametrize("device", [("--device", "cpu"), ("--gpu", "RTX 3090")])
def test_aggressive_counts_8_bit_state(run: Runner, device: tuple[str, str]) -> None:
    def state(*more: Any) -> tuple[int, list[str]]:
        said = run("estimate", SIZED, *device, "--json", *more)
        (found,) = said.document["cases"]
        return found["plain"]["by_category"]["optimizer_state"], said.document["model"]["notes"]

    (whole, quiet), (narrow, notes) = state(), state("--mode", "aggressive")
    assert narrow < 0.3 * whole
    assert any("8-bit optimizer state, as" in note for note in notes)
    assert not any("8-bit" in note for note in quiet)
    _, notes = state("--mode", "aggressive", "--optimizer", "adagrad")
    assert any(note.startswith("no 8-bit optimizer state: ") for note in notes)


def test_savings_of_8_bit_state_are_over_the_plain_optimizer(run: Runner) -> None:
    def saved(*more: Any) -> dict[str, Any]:
        said = run("estimate", SIZED, "--gpu", "RTX 3090", "--savings", "--json", "--budget", "32MiB", *more)
        found: dict[str, Any] = said.document["savings"]
        return found

    usual, aggressive = saved(), saved("--mode", "aggressive")
    assert aggressive["same_batch"]["plain"] == usual["same_batch"]["plain"]


# ---- what MODEL may be -----------------------------------------------------------------------------


def test_a_file_and_a_function_without_sizes(run: Runner, tmp_path: Path) -> None:
    source = tmp_path / "my_net.py"
    source.write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(10, 10), torch.randn(3, 10)\n"
        "class Maker:\n    @staticmethod\n    def small():\n        return build()\n"
    )
    assert run("estimate", f"{source}:build", "--device", "cpu").code == 0
    assert run("estimate", f"{source}:Maker.small", "--device", "cpu").code == 0
    run("estimate", f"{source}:build", "--batch", 3, "--device", "cpu").refused("--batch", "'batch'")
    run("estimate", f"{source}:nothing", "--device", "cpu").refused("no function 'nothing'", "build")
    sys.modules.pop("my_net", None)


def test_a_function_that_needs_data_gets_it_and_it_is_said(run: Runner) -> None:
    said = run("estimate", "cli_samples:needs_data", "--device", "cpu")
    assert said.code == 0
    assert "built with data" in said.out


def test_a_model_that_decides_by_values_is_run_with_data(run: Runner) -> None:
    said = run("estimate", "cli_samples:decides", "--device", "cpu")
    assert said.code == 0, said.err
    assert "cannot be traced on the meta device" in said.out
    assert "traced by a real step" in said.out


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        ("cli_samples:alone", ["Linear", "return (model, batch)"]),
        ("cli_samples:wrong", ["returned a int"]),
        ("cli_samples:raises", ["RuntimeError: no\n  way?[31m\n", "in raises"]),
        ("cli_samples:rejects", ["the model raised RuntimeError", "(3x11 and 10x10)"]),
        (
            "cli_samples:talks",
            ["ValueError: wanted\n    one thing\n", "line 39", "in forward: raise ValueError"],
        ),
        ("cli_samples:missing", ["has no function 'missing'"]),
        ("no_such_module_at_all:f", ["cannot import 'no_such_module_at_all'"]),
        ("no_such_file.py:f", ["no such file"]),
        ("no_such.graph", ["cannot read 'no_such.graph'"]),
    ],
)
def test_models_that_cannot_be(run: Runner, model: str, texts: list[str]) -> None:
    run("estimate", model, "--device", "cpu").refused(*texts)


def test_a_graph_is_a_step_of_its_own(run: Runner, tmp_path: Path) -> None:
    path = tmp_path / "step.graph"
    chain(4).save(path)
    said = run("estimate", path, "--device", "cpu", "--budget", "1GiB", "--json")
    assert said.code == 0
    (case,) = said.document["cases"]
    assert case["plain"]["device_used_peak_bytes"] == memscale._core.replay(chain(4))["peak_bytes"]
    assert said.document["model"]["parameters"] is None
    assert "graph of Net" in run("estimate", path, "--device", "cpu").out
    run("estimate", path, "--batch", 2, "--device", "cpu").refused("--batch", "is a graph")
    run("estimate", path, "--dtype", "bf16", "--device", "cpu").refused("--dtype")
    path.write_text(path.read_text()[:-40])
    run("estimate", path, "--device", "cpu").refused("cannot read the graph")


def test_unknown_cards_give_the_closest(run: Runner) -> None:
    run("estimate", SIZED, "--gpu", "RTX 3091").refused("RTX 3091", "RTX 3090")
    run("estimate", SIZED, "--gpu", "RTX 3090,nonsense").refused("nonsense")
