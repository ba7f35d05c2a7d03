# SPDX-License-Identifier: Apache-2.0
"""For a screen reader (axe-core: no violation in both colour schemes), by keyboard, and on a small screen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_site import Site, Tab, project_of

pytestmark = pytest.mark.long


def invitation(site: Site) -> str:
    return str(site.client.call("POST", "/teams/1/invitations", {"role": "member"})["token"])


VIEWS: dict[str, Callable[[Site], str]] = {
    "login": lambda site: "/login",
    "setup": lambda site: "/setup",
    "not found": lambda site: "/projects/999999",
    "projects": lambda site: "/",
    "account": lambda site: "/accounts",
    "teams": lambda site: "/teams",
    "team": lambda site: "/teams/1",
    "team's log": lambda site: "/teams/1/audit",
    "log": lambda site: "/audit",
    "settings": lambda site: f"/projects/{project_of(site, 'trained-0')}/settings",
    "join": lambda site: f"/join#token={invitation(site)}",
    "no invitation": lambda site: "/join#token=0",
    "reset": lambda site: "/reset#token=0",
    "runs": lambda site: f"/projects/{project_of(site, 'trained-0')}?pick=trained-0,trained-1",
    "no run": lambda site: f"/projects/{site.client.call('POST', '/projects', {'name': 'empty'})['id']}",
    "run": lambda site: "/runs/trained-0",
    "zoomed run": lambda site: "/runs/trained-0?from=600&to=700",
    "series": lambda site: "/runs/trained-0?tab=series",
    "plan": lambda site: "/runs/trained-0?tab=plan&modules=all",
    "events": lambda site: "/runs/trained-0?tab=events",
    "documents": lambda site: "/runs/trained-0?tab=documents",
    "compare": lambda site: "/compare?runs=trained-0,trained-1",
}


@pytest.fixture(scope="session")
def axe() -> str:
    package = pytest.importorskip(
        "axe_playwright_python", reason="axe-playwright-python, which has axe-core, is not installed"
    )
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def opened(tab: Tab, site: Site, view: str) -> Any:
    page = tab.open(site, VIEWS[view](site))
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    if view == "documents":
        page.get_by_role("row", name="optimizer AdamW").wait_for()
    if view in ("run", "zoomed run", "compare"):
        page.locator(".uplot").first.wait_for()
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(new_tab: Any, seeded: Site, axe: str, view: str, scheme: str) -> None:
    tab = new_tab(
        None if view == "login" else seeded, color_scheme=scheme, bypass_csp=True, reduced_motion="reduce"
    )
    page = opened(tab, seeded, view)
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    said = [
        f"{one['id']}: {node['html']} {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]
    assert said == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_screen_of_360_pixels_is_enough(new_tab: Any, seeded: Site, view: str) -> None:
    tab = new_tab(None if view == "login" else seeded, viewport={"width": 360, "height": 740})
    page = opened(tab, seeded, view)
    wide = page.evaluate(
        """() => [...document.querySelectorAll("main *, header *")]
            .filter((one) => !one.closest(".scroll, pre, .unseen"))
            .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
            .map((one) => one.outerHTML.slice(0, 120))"""
    )
    assert wide == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def focused(page: Any) -> str:
    """What has the focus, in a word."""
    return str(
        page.evaluate(
            "(document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText).trim()"
        )
    )


def tab_to(page: Any, text: str, most: int = 60) -> None:
    """Presses Tab until something of this name has the focus."""
    seen = []
    for _ in range(most):
        page.keyboard.press("Tab")
        seen.append(focused(page))
        if seen[-1] == text:
            return
    raise AssertionError(f"{text!r} is not reached; passed {seen}")


def test_a_keyboard_is_enough(tab: Tab, seeded: Site) -> None:
    page = tab.open(seeded, f"/projects/{project_of(seeded, 'trained-0')}")
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the content"
    page.keyboard.press("Enter")
    tab_to(page, "Compare narrow")
    page.keyboard.press("Space")
    tab_to(page, "Compare wide")
    page.keyboard.press("Space")
    tab_to(page, "Compare")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Compare 2 runs").wait_for()
    page.wait_for_function("() => document.activeElement.tagName === 'H1'")
    tab_to(page, "wide")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="wide").wait_for()
    tab_to(page, "Memory and time")
    page.keyboard.press("ArrowRight")
    page.get_by_role("tab", name="Series", selected=True).wait_for()
    page.keyboard.press("ArrowRight")
    page.get_by_role("row", name="transformer.h.1 GPT2Block").wait_for()


def test_a_chart_is_read_and_zoomed_by_keys(tab: Tab, seeded: Site) -> None:
    page = tab.open(seeded, "/runs/trained-0")
    page.locator(".uplot").first.wait_for()
    chart = page.get_by_role("group", name="Chart of memory by category over steps")
    chart.focus()
    page.keyboard.press("End")
    chart.get_by_text("step 1,99").wait_for()
    page.keyboard.press("Home")
    chart.get_by_text("step 1", exact=True).or_(chart.get_by_text("step 2", exact=True)).first.wait_for()
    page.keyboard.press("+")
    page.wait_for_url("**from=0&to=501*")
    page.keyboard.press("Escape")
    page.wait_for_url("**/runs/trained-0")
    time = page.get_by_role("group", name="Chart of Step time")
    time.focus()
    page.keyboard.press("ArrowLeft")
    time.get_by_text("step 1,99").wait_for()
