# SPDX-License-Identifier: Apache-2.0
"""Every measured figure of README and guides agrees with rows of bench/results that have an origin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

HEADER = "date,commit,machine,torch,what,ms,sizes\n"
OLD = "2026-01-01T00:00:00Z,aaa,host,2.0,run,10,1 20 300\n"
NEW = "2026-01-02T00:00:00Z,bbb+,host,2.1,run,12.5,2 40 600\n"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "tools"))
    yield
    sys.path.remove(str(ROOT / "tools"))


def test_readme_says_what_the_rows_say(capsys: pytest.CaptureFixture[str]) -> None:
    import readme_figures

    code = readme_figures.main([])
    assert code == 0, (
        f"{capsys.readouterr().out}\n(tools/readme_figures.py --write puts the rows' figures in)"
    )


# ---- that the check can fail -------------------------------------------------------------------------


class Case:
    """A small README, its template and its rows."""

    def __init__(self, folder: Path, rows: str = HEADER + OLD + NEW) -> None:
        from figures import Document

        self.results = folder
        self.template = folder / "measured.md"
        self.readme = folder / "README.md"
        self.guide = folder / "guide.md"
        (folder / "runs.csv").write_text(rows, encoding="utf-8")
        self.template.write_text("A step takes {time} (`{time:commit}`).\n", encoding="utf-8")
        self.readme.write_text(
            "# x\n<!-- a -->\n\nA step takes 12.5 ms (`bbb`).\n\n<!-- b -->\nrest\n", encoding="utf-8"
        )
        self.document = Document(self.readme, self.template, "<!-- a -->", "<!-- b -->")

    def problems(self, commit: str | None = None, line: str = "") -> list[str]:
        from figures import Figure, Results, problems

        def made() -> dict[str, Figure]:
            rows = Results(self.results).rows("runs", commit, what="run")
            return {"time": Figure(f"{rows.numbers('ms')[0]:.1f} ms", rows)}

        return list(problems(self.document, made, {self.guide: [line]} if line else None))


def test_what_agrees_has_no_problems(tmp_path: Path) -> None:
    assert Case(tmp_path).problems() == []


def test_another_figure_in_the_readme_is_found(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.readme.write_text(case.readme.read_text(encoding="utf-8").replace("12.5", "11.9"), encoding="utf-8")
    (found,) = case.problems()
    assert "the rows say 'A step takes 12.5 ms (`bbb`).', it says 'A step takes 11.9 ms (`bbb`).'" in found
    case.document.write("A step takes 12.5 ms (`bbb`).")
    assert case.problems() == []
    assert case.readme.read_text(encoding="utf-8").endswith("<!-- b -->\nrest\n")


def test_a_newer_row_makes_it_disagree_unless_a_commit_is_named(tmp_path: Path) -> None:
    newest = NEW.replace("bbb+", "ccc").replace("12.5", "99")
    case = Case(tmp_path, HEADER + OLD + NEW + newest)
    assert "99.0 ms" in case.problems()[0]
    assert case.problems("bbb") == []


@pytest.mark.parametrize(
    ("cell", "missing"),
    [("bbb+", "commit"), ("host", "machine"), ("2.1", "versions"), ("2026-01-02T00:00:00Z", "date")],
)
def test_a_row_that_does_not_say_where_it_comes_from_is_refused(
    tmp_path: Path, cell: str, missing: str
) -> None:
    found = Case(tmp_path, HEADER + NEW.replace(cell, "", 1)).problems()
    assert any("'time' stands on a row without" in line and missing in line for line in found)


@pytest.mark.parametrize("text", ["3 %", "41.5 ms", "0.98", "−2.5 %", "2 GiB", "3,000 s", "1.9 times"])
def test_a_number_that_comes_from_no_row_is_found(tmp_path: Path, text: str) -> None:
    case = Case(tmp_path)
    case.template.write_text(
        f"A step takes {{time}} (`{{time:commit}}`). It is {text} less.\n", encoding="utf-8"
    )
    case.document.write(f"A step takes 12.5 ms (`bbb`). It is {text} less.")
    (found,) = case.problems()
    assert f"{text!r} comes from no row" in found


@pytest.mark.parametrize("text", ["{=3 %}", "GPT-2", "two", "`x 41.5 ms`", "4 × 512 tokens", "Llama-70B"])
def test_what_was_given_and_names_need_no_row(tmp_path: Path, text: str) -> None:
    case = Case(tmp_path)
    case.template.write_text(f"A step takes {{time}} (`{{time:commit}}`), {text}.\n", encoding="utf-8")
    case.document.write(f"A step takes 12.5 ms (`bbb`), {text.strip('{=}')}.")
    assert case.problems() == []


def test_a_guide_has_to_have_its_lines(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.guide.write_text("It takes 12.5 ms here.\n", encoding="utf-8")
    assert case.problems(line="takes {time} here") == []
    case.guide.write_text("It takes 12.4 ms here.\n", encoding="utf-8")
    assert case.problems(line="takes {time} here") == [
        "guide.md lacks 'takes 12.5 ms here', which the rows say"
    ]


def test_unknown_and_unused_figures_are_found(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.template.write_text("{space}\n", encoding="utf-8")
    assert "{space} is no figure" in case.problems()[0]
    case.template.write_text("nothing\n", encoding="utf-8")
    case.document.write("nothing")
    assert case.problems() == ["figure 'time' is used nowhere"]
    assert "no row of runs.csv is of commit zzz" in case.problems("zzz")[0]


def test_rows_are_chosen_and_read(tmp_path: Path) -> None:
    from figures import FigureError, Results, percentile, signed

    Case(tmp_path)
    results = Results(tmp_path)
    assert [row["commit"] for row in results.rows("runs")] == ["bbb+"]
    both = results.rows("runs", ("aaa", "bbb"))
    assert both.numbers("sizes.2") == [300, 600]
    assert len(both.where(ms=lambda text: float(text) > 11)) == 1
    with pytest.raises(FigureError, match=r"there is no other.csv"):
        results.rows("other")
    assert percentile(range(1, 101), 95) == 95
    assert signed(-0.04, 1) == "0.0" and signed(-1.26, 1) == "−1.3"


def test_peers_are_judged_as_memscale_bench_judges_them() -> None:
    """The tool reads rows without the package; who is beaten must not be two opinions."""
    import measured
    from figures import Results, Rows

    from memscale.benchmarks.table import beaten
    from memscale.benchmarks.ways import is_ours

    found = Results(ROOT / "bench" / "results").rows("benchmarks", measured.BENCHMARKS)
    ran = Rows(row for row in found if row["status"] == "ok")
    numbers = ("allocated_bytes", "engine_bytes", "step_ms", "loss_off_percent")
    typed = [{**row, **{name: float(row[name] or 0) for name in numbers}} for row in ran]
    theirs = [row for row in typed if row["suite"] == "peers" and not is_ours(row["way"])]
    figures = {name: figure.text for name, figure in measured.rows_of_peers(found)}
    assert figures["peers_runs"] == str(len(theirs)) != "0"
    assert figures["peers_beaten"] == str(sum(bool(beaten(row, typed)) for row in theirs))
