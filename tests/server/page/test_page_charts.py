# SPDX-License-Identifier: Apache-2.0
"""Charts: no peak is lost, a zoom asks for finer buckets, and what a run says arrives while it is watched."""

from __future__ import annotations

import csv
import re
from typing import Any

import pytest
from feed import GIB
from page_site import Site, Tab

pytestmark = pytest.mark.long

PEAK_STEP, PEAK = 123_457, 15 * GIB


@pytest.fixture(scope="session")
def long_run(site: Site) -> str:
    """200,000 steps, and one of them takes half as much again."""
    run = site.client.run("long-00001", "long")
    steps = [*range(200_000)]
    values = [10 * GIB + step % 7 for step in steps]
    values[PEAK_STEP] = PEAK
    site.client.points(run, "memory/peak", "bytes", steps, values)
    site.client.points(run, "memory/budget", "bytes", [0], [16 * GIB])
    return run


def asked(page: Any) -> list[str]:
    """Requests for points from here on."""
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url) if "/points?" in request.url else None)
    return urls


def drag(page: Any, chart: Any, first: float, last: float) -> None:
    """Over a part of a chart, as shares of its width."""
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + first * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + last * box["width"], y, steps=4)
    page.mouse.up()


def test_the_peak_of_200000_steps_is_seen_and_found_by_zooming(tab: Tab, site: Site, long_run: str) -> None:
    page = tab.open(site, f"/runs/{long_run}")
    stack = page.get_by_role("group", name="Chart of memory by category over steps")
    legend = stack.locator("[data-name=measured] .amount")
    legend.get_by_text("15.0 GiB").wait_for()
    urls = asked(page)
    drag(page, stack.locator("canvas"), 0.58, 0.68)
    page.wait_for_url(re.compile(r"from=\d+&to=\d+"))
    page.mouse.move(0, 0)  # off the chart: then it says its highest moment
    legend.get_by_text("15.0 GiB").wait_for()
    shown = [int(step) for step in re.findall(r"(?:from|to)=(\d+)", page.url)]
    assert shown[0] < PEAK_STEP < shown[1] and shown[1] - shown[0] < 40_000
    assert any(f"from={shown[0]}" in url and f"to={shown[1]}" in url for url in urls)
    page.goto(f"{site.url}/runs/{long_run}?from={PEAK_STEP - 50}&to={PEAK_STEP + 50}")
    stack.get_by_text(f"highest at step {PEAK_STEP:,}").wait_for()
    page.get_by_role("button", name="Show all steps").click()
    page.wait_for_url(f"**/runs/{long_run}")


def test_a_line_chart_keeps_the_peak_in_its_band(tab: Tab, site: Site, long_run: str) -> None:
    page = tab.open(site, f"/runs/{long_run}?tab=series&find=memory/peak")
    chart = page.get_by_role("group", name="Chart of memory/peak")
    chart.locator("canvas").wait_for()
    box = chart.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * PEAK_STEP / 200_000, box["y"] + 20)
    chart.get_by_text(re.compile(r"to 15\.0 GiB")).wait_for()
    drag(page, chart.locator(".u-over"), 0.6, 0.65)
    page.wait_for_url(re.compile(r"from=1[12]\d{4}&to=1[23]\d{4}"))
    chart.locator(".u-over").dblclick()
    page.wait_for_url(re.compile(r"find=memory(/|%2F)peak$"))


def test_what_a_run_says_arrives_while_it_is_watched(tab: Tab, site: Site) -> None:
    client = site.client
    run = client.run("watched-01", "watched")
    client.points(run, "memory/peak", "bytes", [0, 1], [GIB, GIB])
    page = tab.open(site, f"/runs/{run}")
    page.locator(".live", has_text="live").wait_for()
    legend = page.locator("[data-name=measured] .amount")
    legend.get_by_text("1.00 GiB").wait_for()
    client.batch(run, points=[{"series": "memory/peak", "unit": "bytes", "steps": [2], "values": [3 * GIB]}])
    legend.get_by_text("3.00 GiB").wait_for()
    page.locator(".facts").get_by_text("3.00 GiB").wait_for()
    page.get_by_role("tab", name="Events").click()
    page.get_by_text("Nothing has happened").wait_for()
    client.batch(run, events=[{"kind": "note", "step": 2, "text": "half way"}])
    page.get_by_role("cell", name="half way").wait_for()
    client.batch(run, events=[{"kind": "oom", "step": 3, "text": "no room"}])
    page.get_by_role("cell", name="no room").wait_for()
    assert page.get_by_role("cell", name="half way").count() == 1, "an event is there once"
    page.get_by_role("tab", name="Documents").click()
    client.batch(run, documents={"params": {"lr": 1}})
    page.get_by_text("params").wait_for()
    client.call("POST", f"/runs/{run}/finish", {"state": "finished"})
    page.locator(".state.finished").wait_for()
    client.call("DELETE", f"/runs/{run}")
    page.get_by_text("This run was deleted.").wait_for()


def test_without_a_stream_the_run_is_asked_for(tab: Tab, site: Site) -> None:
    client = site.client
    run = client.run("polled-001", "polled")
    client.points(run, "loss", "", [0], [4.0])
    tab.page.route("**/live?*", lambda route: route.abort())
    tab.page.clock.install()
    page = tab.open(site, f"/runs/{run}?tab=series")
    page.get_by_text("asking every 5 s").wait_for()
    page.get_by_text("last 4").wait_for()
    client.points(run, "loss", "", [1], [3.0])
    page.clock.run_for(7000)
    page.get_by_text("last 3").wait_for()


def test_a_stream_that_a_proxy_holds_back_is_given_up_and_tried_again(tab: Tab, site: Site) -> None:
    run = site.client.run("held-00001", "held")
    held: list[Any] = []
    tab.page.route("**/live?*", lambda route: held.append(route))
    tab.page.clock.install()
    page = tab.open(site, f"/runs/{run}")
    page.clock.run_for(9_000)
    page.get_by_text("asking every 5 s").wait_for()
    page.unroute("**/live?*")
    page.clock.run_for(65_000)
    page.locator(".live", has_text="live").wait_for()
    assert len(held) == 1


def test_a_hidden_tab_is_silent(tab: Tab, site: Site) -> None:
    client = site.client
    run = client.run("hidden-001", "hidden")
    client.points(run, "loss", "", [0], [4.0])
    page = tab.open(site, f"/runs/{run}?tab=series")
    page.locator(".live", has_text="live").wait_for()
    turn = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(turn, True)
    page.get_by_text("paused").wait_for()
    client.points(run, "loss", "", [1], [3.0])
    page.evaluate(turn, False)
    page.get_by_text("last 3").wait_for()


def test_values_that_are_no_numbers_are_counted_and_not_drawn(tab: Tab, site: Site) -> None:
    run = site.client.run("nan-000001", "nan")
    site.client.points(run, "loss", "", [0, 1, 2, 3], [1.0, "NaN", "Infinity", 2.0])
    page = tab.open(site, f"/runs/{run}?tab=series")
    page.get_by_text("1 of them NaN").wait_for()
    page.locator(".uplot canvas").wait_for()


def test_a_comparison_overlays_what_was_asked_for(tab: Tab, seeded: Site) -> None:
    page = tab.open(seeded, "/compare?runs=trained-0,trained-1&series=loss")
    loss = page.get_by_role("group", name="Chart of loss")
    loss.locator("canvas").wait_for()
    assert page.locator(".chart").count() == 1
    assert loss.locator(".legend bdi").all_inner_texts() == ["wide", "narrow"]
    page.get_by_label("Add a series").select_option("val/accuracy")
    page.get_by_role("group", name="Chart of val/accuracy").locator("canvas").wait_for()
    drag(page, loss.locator(".u-over"), 0.2, 0.4)
    page.wait_for_url(re.compile(r"series=loss.*val.*from=\d+&to=\d+"))
    shown = page.url
    page.reload()
    page.get_by_role("button", name="Show all steps").wait_for()
    assert page.url == shown and page.locator(".chart").count() == 2
    page.get_by_role("table").first.get_by_text("97 %").first.wait_for()
    page.goto(f"{seeded.url}/compare?runs=trained-0,nowhere-00,trained-1")
    page.get_by_text("1 of these runs are not there").wait_for()


def test_a_run_is_exported(tab: Tab, seeded: Site) -> None:
    page = tab.open(seeded, "/runs/trained-1")
    with page.expect_download() as waiting:
        page.get_by_role("link", name="CSV").click()
    with waiting.value.path().open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [*rows[0]] == ["series", "unit", "step", "time_ms", "value"]
    assert sum(row["series"] == "loss" for row in rows) == 1500
