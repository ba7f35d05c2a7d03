# SPDX-License-Identifier: Apache-2.0
"""Plans and predictions show themselves in a notebook."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

import memscale
from cli_samples import sized
from memscale.units import format_bytes


class Balanced(HTMLParser):
    """Fails where a tag is not closed; keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def text_of(page: str) -> str:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser.text


@pytest.fixture(scope="module")
def prediction() -> memscale.Prediction:
    model, ids = sized(64, 64)
    config = memscale.Config(memory_budget="40MiB", enable_logging=False)
    return memscale.predict(model, None, config, ids, "cpu")


def test_a_prediction_shows_peaks_and_choices(prediction: memscale.Prediction) -> None:
    text = text_of(prediction._repr_html_())
    assert prediction.plain is not None
    for step in (prediction, prediction.plain):
        assert format_bytes(step.device_used_peak_bytes) in text
    for words in ("plain", "planned", "activation", "what is done", "checkpoint"):
        assert words in text
    assert "step" in text_of(prediction.plain._repr_html_())


def test_a_plan_shows_what_it_does(prediction: memscale.Prediction) -> None:
    plan = prediction.plan
    assert plan is not None
    text = text_of(plan._repr_html_())
    assert plan.active[0].rule in text or "checkpoint" in text
    ample = memscale.Config(memory_budget="8GiB", enable_logging=False)
    idle = memscale.plan(sized()[0], None, ample, sized()[1])
    assert "nothing is done" in text_of(idle._repr_html_())


def test_names_are_escaped(prediction: memscale.Prediction) -> None:
    odd = replace(prediction, device="<script>", advice=("a < b & c",), by_category={"<b>": 3})
    page = odd._repr_html_()
    assert "<script>" not in page
    assert "a &lt; b &amp; c" in page
    assert "&lt;b&gt;" in page
