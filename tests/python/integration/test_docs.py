# SPDX-License-Identifier: Apache-2.0
"""What the pages show works: every block of Python runs, commands parse, links lead somewhere.

And the other way round: what a user can name (functions, fields, options, variables of the environment) is on
a page.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale.benchmarks import command as bench
from memscale.cli import arguments as cli
from memscale.core import executor, in_force, planner, wrapping
from memscale.techniques.step_table import STEP_TECHNIQUES

ROOT = Path(__file__).resolve().parents[3]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
USER_PAGES = [ROOT / "README.md", *GUIDE]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

_ON_A_CARD = re.compile(r"\.cuda\(\)|torch\.cuda\.memory\.")
"""Blocks with this run where there is a card, and are compiled elsewhere."""


def blocks(page: Path, *kinds: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(page.read_text(encoding="utf-8")) if kind in kinds]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# ---- blocks of Python --------------------------------------------------------------------------------


class MyModel(nn.Module):
    """A small model that computes its loss; forward takes what the pages' samples give."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
                                    for _ in range(2))  # fmt: skip
        self.head = nn.Linear(256, 1000)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def fresh(folder: Path) -> dict[str, Any]:
    """What the pages take for granted."""
    model = MyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 1000, (8, 128))
    batch = {"input_ids": ids, "labels": ids}
    settings = memscale.AsyncOffloadConfig(tiers=("file",), directory=str(folder))

    def train(model: nn.Module) -> None:
        for _ in range(2):
            model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return {
        "torch": torch, "memscale": memscale, "MyModel": MyModel, "build": MyModel, "model": model,
        "optimizer": optimizer, "batch": batch, "train": train, "step": 2,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "config": memscale.Config(memory_budget=1, async_config=settings, enable_logging=False),
    }  # fmt: skip


def adapted(text: str, folder: Path) -> str:
    """The block with a folder, a port and a size that this machine has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = text.replace("/scratch", str(folder)).replace("9400", str(port)).replace("8 << 30", "64 << 20")
    # The ten lines with a quarter of their batch: test_examples runs them as they stand.
    return text.replace("torch.randn(16, 128, 256)", "torch.randn(4, 128, 256)").replace("(2048,)", "(512,)")


@pytest.mark.parametrize("page", [page for page in USER_PAGES if blocks(page, "python")], ids=name_of)
def test_blocks_of_python_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(MyModel().state_dict(), "weights.pt")
    names: dict[str, Any] = {}
    for text in blocks(page, "python"):
        if _ON_A_CARD.search(text) and not torch.cuda.is_available():
            compile(text, name_of(page), "exec")
            continue
        names.update(fresh(tmp_path))
        if re.search(r"executor\.|render\(", text) and "as executor" not in text:  # of a run that goes on
            memscale.wrap(names["model"], names["config"], names["batch"], optimizer=names["optimizer"])
            names["train"](names["model"])
            names["executor"] = memscale.executor_of(names["model"])
        exec(compile(adapted(text, tmp_path), name_of(page), "exec"), names)
        if memscale.executor_of(names["model"]) is not None:
            memscale.detach(names["model"])


def test_the_ten_lines_are_the_example() -> None:
    lines = blocks(ROOT / "README.md", "python")[1].splitlines()
    example = (ROOT / "examples" / "python" / "02_ten_lines.py").read_text(encoding="utf-8")
    assert len(lines) == 10
    for line in lines[2:5]:
        assert line.split("  #")[0].strip() in example, line


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


# ---- commands ----------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    for page in USER_PAGES:
        for line in "".join(blocks(page, "console", "sh")).splitlines():
            command = line.removeprefix("$ ")
            if command.startswith("memscale "):  # others' may go on in the next line
                yield name_of(page), shlex.split(command, comments=True)[1:]


@pytest.mark.parametrize(("page", "words"), list(commands()))
def test_commands_are_understood(page: str, words: list[str]) -> None:
    if words[0] == "bench":
        bench.parser().parse_args(words[1:])
    else:
        assert cli.parse(words).command == words[0]


def shown() -> Iterator[tuple[str, str, str]]:
    """Page, command and text of each command whose output stands below it."""
    for page in USER_PAGES:
        found = _BLOCK.findall(page.read_text(encoding="utf-8"))
        for (kind, command), (after, text) in itertools.pairwise(found):
            if (kind, after) == ("console", "text") and command.startswith("$ memscale "):
                yield name_of(page), command.removeprefix("$ memscale ").strip(), text


def test_commands_with_output_are_found() -> None:
    assert {words.split()[0] for _, words, _ in shown()} >= {"estimate", "snapshot"}


@pytest.mark.parametrize(("page", "words", "text"), list(shown()), ids=lambda item: item[:24].strip())
def test_output_is_as_shown(page: str, words: str, text: str) -> None:
    """Line by line, in order; `...` stands for lines that are left out. In a fresh process, as a user has."""
    command = [sys.executable, "-m", "memscale", *shlex.split(words)]
    ours = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    read = ("CUBLAS_", "CUDA_", "MEMSCALE_", "PYTORCH_")  # by predictions; tests/python/gpu sets one
    variables = {name: value for name, value in os.environ.items() if not name.startswith(read)} | ours
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    said = iter(line.rstrip() for line in done.stdout.splitlines())
    for line in text.splitlines():
        if line.strip() != "...":
            assert line.rstrip() in said, f"{line}\n--- is not in, or not there ---\n{done.stdout}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        for name in re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8")):
            assert name in targets, f"{name_of(page)}: make {name}"


# ---- links -------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    plain = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", plain, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = next(i for i in itertools.count() if (f"{slug}-{i}" if i else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(found), f"{target}: no such heading"


# ---- the map of the code -----------------------------------------------------------------------------


ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_the_rooms_are_those_that_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same order, but for rooms of which there is nothing yet."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import check_rooms

    section = ARCHITECTURE.partition("## Rooms of the Python package")[2].partition("\n## ")[0]
    named = [
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    package = ROOT / "python" / "memscale"
    built = [
        room
        for rooms in check_rooms.ROOMS
        for room in rooms
        if not room.startswith("_") and ((package / room).is_dir() or (package / f"{room}.py").is_file())
    ]
    assert named == built


def test_the_life_of_a_call_names_functions_that_there_are() -> None:
    life = ARCHITECTURE.partition("## The life of a `wrap` call")[2].partition("```")[2].partition("```")[0]
    calls = re.findall(
        r"(api\.wrap|core/wrapping\.begin|Executor\.start|Planner\.plan|InForce\.attach)", life
    )
    assert calls == ["api.wrap", "core/wrapping.begin", "Executor.start", "Planner.plan", "InForce.attach"]
    homes = {"Executor": executor.Executor, "Planner": planner.Planner, "InForce": in_force.InForce}
    assert callable(memscale.wrap) and callable(wrapping.begin)
    for call in calls[2:]:
        kind, _, name = call.partition(".")
        assert callable(getattr(homes[kind], name)), call


def test_paths_of_the_design_are_there() -> None:
    """Files that ARCHITECTURE.md, CONTRIBUTING.md and docs/design name with a folder."""
    places = (ROOT, ROOT / "python" / "memscale", ROOT / "src")
    for page in (
        ROOT / "ARCHITECTURE.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs" / "design").glob("*.md"),
    ):
        for name in re.findall(r"`([a-z_]+/[\w./]+\.(?:py|c|h|md|sh))`", page.read_text(encoding="utf-8")):
            assert any((place / name).exists() for place in places), f"{name_of(page)}: {name}"


def test_the_architecture_is_read_in_ten_minutes() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 200


# ---- what can be named stands on a page --------------------------------------------------------------


def everything(*pages: Path) -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def test_public_names_are_on_a_page() -> None:
    text = everything(*USER_PAGES)
    for name in memscale.__all__:
        if not name.startswith("__"):
            assert re.search(rf"(memscale\.|`){name}\b", text), name


@pytest.mark.parametrize(
    ("kind", "page"),
    [(memscale.Config, "docs/guide/config.md"), (memscale.AsyncOffloadConfig, "docs/guide/offload.md")],
)
def test_fields_are_in_a_table(kind: Any, page: str) -> None:
    rows = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    fields = {field.name for field in dataclasses.fields(kind)}
    assert fields - named - {"mode"} == set()  # which has a paragraph below the table


def test_techniques_are_in_a_table() -> None:
    page = (ROOT / "docs" / "guide" / "techniques.md").read_text(encoding="utf-8")
    names = {row.split("|")[2].strip().strip("`") for row in page.splitlines() if row.count("|") > 5}
    assert {technique.name for technique in STEP_TECHNIQUES} - names == set()


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}


def test_options_are_on_their_page() -> None:
    parser = cli._parser()
    (commands,) = (item for item in parser._actions if isinstance(item, argparse._SubParsersAction))
    page = everything(ROOT / "docs" / "guide" / "cli.md")
    for name, command in commands.choices.items():
        assert f"memscale {name}`" in page, name
        for option in options(command) | options(parser):
            assert re.search(rf"`[^`\n]*{option}\b", page), f"{name} {option}"
    page = everything(ROOT / "docs" / "guide" / "benchmarks.md")
    for option in options(bench.parser()):
        assert re.search(rf"{option}\b", page), option


def test_variables_of_the_environment_are_on_a_page() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "python").rglob("*.py"))
    named = set(re.findall(r"\"(MEMSCALE_[A-Z_]+)\"", sources))
    assert {"MEMSCALE_ASYNC_OFFLOAD", "MEMSCALE_CALIBRATION"} <= named
    text = everything(*USER_PAGES)
    assert {name for name in named if name not in text} == set()
