# SPDX-License-Identifier: Apache-2.0
"""A run as a trace for Perfetto and as one page: all of it is there, and hostile names are text."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

from server_process import Client, begin_run

HOSTILE = "</title><script>alert(1)</script>\" onload='x"
CATEGORIES = ("weights", "gradients", "temporary")
STEPS = 1300  # three blocks of 512
BEGIN_MS = 1_700_000_000_000


def recorded(client: Client) -> str:
    """A run with memory by category, step times, a loss with gaps, events and a document."""
    run = begin_run(client, name=HOSTILE)
    steps = [*range(STEPS)]
    times = [BEGIN_MS + 10 * step for step in steps]

    def points(name: str, unit: str, values: list[Any]) -> dict[str, Any]:
        return {"series": name, "unit": unit, "steps": steps, "times_ms": times, "values": values}

    batch = {
        "client": "c", "sequence": 1,
        "points": [
            *(points(f"memory/category/{name}", "bytes", [(1 << 20) * (index + 1) + step for step in steps])
              for index, name in enumerate(CATEGORIES)),
            points("time/step", "ns", [5_000_000] * STEPS),
            points("loss", "", ["NaN" if step % 100 == 7 else 1e6 if step == 701 else 1.0 for step in steps]),
            {"series": HOSTILE, "unit": "<b>", "steps": [3], "values": [4]},
            {"series": "endless", "steps": [1, 2], "values": ["Infinity", "NaN"]},
        ],
        "events": [{"kind": "oom", "step": 9, "time_ms": BEGIN_MS, "text": HOSTILE, "data": {"x": 1}}] * 250,
        "documents": {"params": {"note": HOSTILE}},
    }  # fmt: skip
    answer = client.ask("POST", f"/api/v1/runs/{run}/batches", batch)
    assert answer.status == 200, answer
    return run


def test_a_trace_has_counters_by_category_steps_and_events(tool: Client) -> None:
    run = recorded(tool)
    answer = tool.ask("GET", f"/api/v1/runs/{run}/export?format=perfetto")
    assert answer.status == 200 and f'"{run}.trace.json"' in answer.headers["content-disposition"]
    trace = answer.json
    assert trace["otherData"]["name"] == HOSTILE
    entries = trace["traceEvents"]
    kinds = Counter((entry["ph"], entry["name"]) for entry in entries)
    assert kinds["C", "memory/category"] == 3 * STEPS and kinds["i", "oom"] == 250
    assert kinds["C", "loss"] == STEPS - len(range(7, STEPS, 100))  # a counter has no NaN
    assert kinds["X", "step 701"] == 1 and kinds["C", "endless"] == 0
    began = tool.ask("GET", f"/api/v1/runs/{run}").json["created_ms"]
    (slice_,) = [entry for entry in entries if entry["name"] == "step 701"]
    assert slice_["dur"] == 5000 and slice_["ts"] + 5000 == 1000 * (BEGIN_MS + 7010 - began)
    weights = [entry for entry in entries if "weights" in entry.get("args", {})]
    assert [entry["args"]["weights"] for entry in weights] == [(1 << 20) + step for step in range(STEPS)]


class Page(HTMLParser):
    """What a browser would make of a page: its elements, their attributes, its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.paths: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.paths += [value or "" for name, value in attrs if name == "d"]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_needs_nothing_else_and_shows_hostile_names_as_text(tool: Client) -> None:
    run = recorded(tool)
    answer = tool.ask("GET", f"/api/v1/runs/{run}/export?format=html")
    assert answer.status == 200 and answer.headers["content-disposition"].startswith("attachment")
    text = answer.body.decode()
    page = Page()
    page.feed(text)
    assert page.text.count(HOSTILE) == 2 + 2 + 250  # title and heading, a chart and its legend, events
    assert page.tags["script"] == page.tags["b"] == page.tags["img"] == page.tags["link"] == 0
    assert page.attributes & {"src", "href", "onload"} == set()
    assert "default-src 'none'" in text and "url(" not in text and "@import" not in text
    assert page.tags["svg"] == 4 and page.tags["h2"] == 2 + 5  # categories, loss, time, hostile; endless
    assert "No finite values." in page.text
    assert "category" in page.text and "weights: last 1.001 MiB" in page.text
    assert "loss: last 1, at most 1e+06" in page.text  # the peak of one step
    numbers = [float(word) for path in page.paths for word in re.findall(r"-?[\d.]+", path)]
    assert len(numbers) > 4000 and all(0 <= number <= 760 for number in numbers)


def test_an_empty_run_can_be_exported_in_each_form(tool: Client) -> None:
    run = begin_run(tool)
    for form in ("csv", "json", "perfetto", "html"):
        answer = tool.ask("GET", f"/api/v1/runs/{run}/export?format={form}")
        assert answer.status == 200 and answer.body, form
    assert json.loads(tool.ask("GET", f"/api/v1/runs/{run}/export?format=perfetto").body)["traceEvents"]
    refused = tool.ask("GET", f"/api/v1/runs/{run}/export?format=xml")
    assert refused.status == 400 and refused.json["error"]["allowed"] == "csv, json, perfetto, html"
