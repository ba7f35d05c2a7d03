# SPDX-License-Identifier: Apache-2.0
"""What the page's files must and must not say; no browser is needed."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "server" / "page"
VENDOR = PAGE / "vendor"
OURS = sorted(
    path
    for path in PAGE.rglob("*")
    if path.suffix in (".js", ".css", ".html", ".svg") and VENDOR not in path.parents
)
MOST_LINES = 400

HTML_FROM_TEXT = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\b"
    r"|new Function"
)


def name_of(path: Path) -> str:
    return path.relative_to(PAGE).as_posix()


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_a_file_is_small_and_names_its_license(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert "SPDX-License-Identifier: Apache-2.0" in "\n".join(text.splitlines()[:2])


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_nothing_makes_elements_from_text_that_is_html(path: Path) -> None:
    assert HTML_FROM_TEXT.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_nothing_is_loaded_from_elsewhere(path: Path) -> None:
    found = re.findall(r"""(?:https?:)?//[\w-]+\.[\w.-]+""", path.read_text(encoding="utf-8"))
    assert [address for address in found if "www.w3.org" not in address] == []


def test_the_first_file_has_no_script_or_style_of_its_own() -> None:
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text) == []


def test_what_the_first_file_names_is_there() -> None:
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    named = re.findall(r'(?:href|src)="/([\w./]+)"', text)
    assert len(named) > 5
    assert [path for path in named if not (PAGE / path).is_file()] == []


def test_imports_lead_to_files_of_the_page() -> None:
    missing = []
    for path in OURS:
        for target in re.findall(
            r"""(?:from|import\()\s*["'](\.[^"']+)["']""", path.read_text(encoding="utf-8")
        ):
            if not (path.parent / target).resolve().is_file():
                missing.append(f"{name_of(path)}: {target}")
    assert missing == []


def test_foreign_files_are_those_that_are_recorded() -> None:
    folder = VENDOR / "uplot"
    recorded = dict(
        reversed(line.split())
        for line in (folder / "README.md").read_text().splitlines()
        if re.match(r"[0-9a-f]{64} ", line)
    )
    there = {path.name for path in folder.iterdir()} - {"README.md", "LICENSE"}
    assert there == set(recorded)
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in there} == recorded


def test_names_are_those_of_the_design() -> None:
    design = (
        (ROOT / "docs" / "design" / "server.md")
        .read_text(encoding="utf-8")
        .partition("## Names that runs record")[2]
    )
    names = (PAGE / "names.js").read_text(encoding="utf-8")
    constants = re.findall(r'^(?:export )?const [A-Z_]+ = "([\w/]+)"', names, re.MULTILINE)
    assert len(constants) >= 9
    assert [name for name in constants if f"`{name}" not in design] == []
    block = re.search(r"CATEGORIES = \[(.*?)\]", names, re.DOTALL)
    assert block is not None
    order = re.search(r"stacked from below: (.*?)\. What", design, re.DOTALL)
    assert order is not None
    assert re.findall(r'"(\w+)"', block.group(1)) == re.findall(r"`(\w+)`", order.group(1))
