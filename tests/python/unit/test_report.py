# SPDX-License-Identifier: Apache-2.0
"""The HTML report: complete, self-contained, escaped."""

from __future__ import annotations

import dataclasses
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from memscale.errors import MemScaleError
from memscale.observability.report import write_report
from memscale.plans.plan import Choice, Plan, Prediction, Timeline

pytest.importorskip("jinja2")

MIB = 1024 * 1024
VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}


class Page(HTMLParser):
    """What a browser would see: text, attributes that load something, and whether the tags balance."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source = text
        self.texts: list[str] = []
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self._open: list[str] = []
        self._goes_on = False  # after a place where a word may be broken
        self.feed(text)
        self.close()
        assert self._open == []

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")
        ]
        self._goes_on = tag == "wbr"
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            return
        for seen, text in ((self.texts, data), (self.cells, data.strip())):
            if self._goes_on:
                seen[-1] += text
            elif seen is self.texts or "td" in self._open:
                seen.append(text)
        self._goes_on = False


def prediction(peak: int, ops: int, recompute: bool) -> Prediction:
    phases = tuple(min(3 * op // max(ops, 1), 2) for op in range(ops))
    timeline = Timeline(
        live_bytes=tuple(peak - abs(op - ops // 2) * 1000 for op in range(ops)),
        phase=phases,
        recompute=tuple(int(recompute and phase == 1 and op % 2 == 0) for op, phase in enumerate(phases)),
        time_ns=tuple(op * 250_000 for op in range(ops)),
    )
    return Prediction(
        allocated_peak_bytes=peak,
        reserved_peak_bytes=peak,
        device_used_peak_bytes=peak,
        context_bytes=0,
        by_category={"activation": peak // 2, "optimizer_state": peak // 4, "parameter": peak // 4},
        timeline=timeline,
        step_time_ns=ops * 250_000,
        error_band_bytes=(peak - 500, peak + 500),
        fits=True,
        budget_bytes=700 * MIB,
    )


def choice(module: str, technique: str | None, reason: str = "frees most per millisecond") -> Choice:
    techniques = () if technique is None else (technique,)
    return Choice(module, "Block", techniques, "rule", reason, 1, 5 * MIB, 1_500_000)


def sample(*choices: Choice, ops: int = 30) -> Plan:
    return Plan(
        choices=choices,
        fits=True,
        budget_bytes=700 * MIB,
        budget_source="memory_budget='700MiB'",
        predicted=prediction(650 * MIB, ops, recompute=True),
        plain=prediction(1100 * MIB, ops, recompute=False),
        smallest_peak_bytes=432 * MIB,
        time_bound_ppm=12_000,
        walk=lambda: ((1100 * MIB, 7_000_000), (650 * MIB, 7_500_000), (432 * MIB, 9_000_000)),
        digest="0123456789abcdef",
        profile="static",
    )


def written(tmp_path: Path, plan: Plan, **arguments: object) -> Page:
    path = tmp_path / "report.html"
    write_report(plan, path, **arguments)  # type: ignore[arg-type]
    return Page(path.read_text(encoding="utf-8"))


def test_says_what_the_plan_says(tmp_path: Path) -> None:
    page = written(tmp_path, sample(choice("h.0", "checkpoint"), choice("h.1", None)))
    for text in (
        "700.00 MiB",
        "1.07 GiB",
        "650.00 MiB",
        "432.00 MiB",
        "0123456789abcdef",
        "the plan fits",
        "static",
    ):
        assert text in page.text
    row = ["h.0", "Block", "checkpoint", "5.00 MiB", "1.50 ms", "frees most per millisecond"]
    assert page.cells[:6] == row
    assert page.text.count("budget") >= 4  # tile, summary, and a line in both curves
    for text in ("forward", "backward", "optimizer", "recompute", "peak 650 MiB", "peak 1100 MiB", "chosen"):
        assert text in page.text
    assert page.tags.count("svg") == 4  # curves, categories, what changes, frontier


def test_kept_modules_are_folded(tmp_path: Path) -> None:
    kept = [choice(f"h.{index}", None) for index in range(40)]
    page = written(tmp_path, sample(choice("h.99", "checkpoint"), *kept))
    assert "40 modules run as they are" in page.text
    folded = page.source[page.source.index("<details>") : page.source.index("</details>")]
    assert "h.<wbr>0-39" in folded
    assert "h.<wbr>99" not in folded


def test_choices_say_what_they_keep_and_the_other_way_round(tmp_path: Path) -> None:
    blocks = [
        dataclasses.replace(
            choice(f"h.{index}", "selective"),
            kept=("addmm#0", "addmm#1", "sdpa#0"),
            other_peak_bytes=680 * MIB,
            other_ns=6_000_000,
        )
        for index in range(4)
    ]
    region = [
        choice("tail.0", "checkpoint"),
        dataclasses.replace(choice("tail.1", "checkpoint"), joined=True),
    ]
    rejected = dataclasses.replace(
        choice("head", None), rule="not-needed", other_peak_bytes=650 * MIB, other_ns=9_000_000
    )
    page = written(tmp_path, sample(*blocks, *region, rejected))
    for text in (
        "4 × h.0-3",
        "keeps addmm ×2, sdpa",
        "kept instead: peak 680.00 MiB (higher by 30.00 MiB), step -1.50 ms",
        "tail.0-1",
        "checkpoint as one",
        "checkpointed too: peak 650.00 MiB (no lower), step +1.50 ms",
        "at most 1.2 % slower than the best possible plan that fits, by the cost model",
    ):
        assert text in page.text, text


def test_stands_alone(tmp_path: Path) -> None:
    curves = {"plain": [(0.0, MIB), (1.0, 2 * MIB)]}
    page = written(tmp_path, sample(choice("", "checkpoint")), timeline_measured=curves)
    assert page.loads == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert "@import" not in page.source
    assert "url(" not in page.source
    assert "://" not in page.source


def test_everything_is_escaped(tmp_path: Path) -> None:
    bad = "<script>alert('x')</script> & $\\frac{1}{0}$"
    plan = dataclasses.replace(
        sample(choice(bad, "checkpoint", bad)), advice=(bad,), notes=(bad,), budget_source=bad
    )
    plan = dataclasses.replace(
        plan, predicted=dataclasses.replace(plan.predicted, by_category={bad: 7 * MIB})
    )
    page = written(
        tmp_path, plan, title=bad, measured=[(bad, bad)], timeline_measured={bad: [(0.0, MIB), (1.0, MIB)]}
    )
    assert "<script" not in page.source
    assert "script" not in page.tags
    assert page.text.count(bad) >= 9


def test_no_choices_and_no_curve(tmp_path: Path) -> None:
    plan = dataclasses.replace(sample(ops=0), walk=tuple)
    page = written(tmp_path, plan, timeline_measured={"plain": []})
    assert "every module runs as it is" in page.text
    assert page.tags.count("svg") == 1  # only the categories
    assert "details" not in page.tags


def test_unmet_budget_shows_advice(tmp_path: Path) -> None:
    plan = dataclasses.replace(sample(), fits=False, advice=("raise the budget to 2 GiB",))
    page = written(tmp_path, plan)
    assert "no plan fits" in page.text
    assert "raise the budget to 2 GiB" in page.text


def test_measured_rows_and_curves(tmp_path: Path) -> None:
    curves = {"plain": [(0.0, 900 * MIB), (5.0, 1090 * MIB)], "wrapped": [(0.0, 300 * MIB), (6.0, 644 * MIB)]}
    page = written(tmp_path, sample(), measured=[("bit-equal", "yes")], timeline_measured=curves)
    assert "bit-equal yes" in page.text
    assert "peak 1090 MiB" in page.text
    assert "peak 644 MiB" in page.text


def test_long_steps_keep_their_peak_and_stay_small(tmp_path: Path) -> None:
    plan = sample(ops=60_000)
    page = written(tmp_path, plan)
    assert "peak 650 MiB" in page.text
    assert len(page.source) < 400_000


def test_dark_mode_reaches_the_charts(tmp_path: Path) -> None:
    page = written(tmp_path, sample(choice("h.0", "checkpoint")))
    charts = "".join(re.findall(r"<svg.*?</svg>", page.source, re.DOTALL))
    used = set(re.findall(r"var\(--(\w+)\)", charts))
    light, dark = (set(re.findall(r"--(\w+):", part)) for part in page.source.split(":root {")[1:3])
    assert {"ink", "plain", "planned", "budget", "forward"} <= used
    assert used <= light
    assert used <= dark
    assert not re.findall(r"#[0-9a-f]{3,8}\b|rgb\(", charts)  # every colour is the page's


def test_same_plan_same_file(tmp_path: Path) -> None:
    plan = sample(choice("h.0", "checkpoint"))
    assert written(tmp_path, plan).source == written(tmp_path, plan).source


@pytest.mark.parametrize("package", ["jinja2", "markupsafe"])
def test_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MemScaleError, match=re.escape("pip install 'memscale[report]'")):
        write_report(sample(), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
