# SPDX-License-Identifier: Apache-2.0
"""What a reader sees when the server refuses, is slow or does not answer."""

from __future__ import annotations

from typing import Any

import pytest
from page_site import NAME, PASSWORD, Site, Tab, project_of

pytestmark = pytest.mark.long

ERROR = '{"error": {"code": "%s", "message": "%s"}}'


def refuse(page: Any, path: str, status: int, code: str, message: str = "no", **headers: str) -> None:
    page.route(
        path,
        lambda route: route.fulfill(
            status=status, body=ERROR % (code, message), headers=headers, content_type="application/json"
        ),
    )


@pytest.mark.parametrize(
    ("status", "code", "headers", "said"),
    [
        (429, "later", {"Retry-After": "40"}, "Too many tries. Try again in 40 s."),
        (503, "later", {"Retry-After": "300"}, "The server is busy. Try again in 5 min."),
        (507, "full", {}, "The server's disk is full: nothing was changed."),
        (403, "forbidden", {}, "this token may only read"),
        (502, "", {}, "This token may only read."),
    ],
)
def test_refusals_are_words(
    new_tab: Any, site: Site, status: int, code: str, headers: dict[str, str], said: str
) -> None:
    page = new_tab().page
    page.goto(f"{site.url}/login")
    refuse(page, "**/api/v1/login", status, code, "this token may only read", **headers)
    page.get_by_label("Account name").fill(NAME)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("alert").get_by_text(said).wait_for()
    assert page.get_by_role("button", name="Log in").is_enabled()


def test_a_server_that_is_not_there_is_said_and_tried_again(new_tab: Any, site: Site) -> None:
    page = new_tab(site).page
    page.route("**/api/**", lambda route: route.abort())
    page.goto(site.url)
    page.get_by_text("The server does not answer.").wait_for()
    page.unroute("**/api/**")
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("heading", name="Projects").wait_for()


def test_a_table_stays_when_its_refresh_fails(tab: Tab, seeded: Site) -> None:
    tab.page.clock.install()
    page = tab.open(seeded, f"/projects/{project_of(seeded, 'trained-0')}")
    page.get_by_role("link", name="wide").wait_for()
    page.route("**/api/**", lambda route: route.abort())
    page.clock.run_for(11_000)
    page.get_by_role("alert").get_by_text("The server does not answer.").wait_for()
    assert page.get_by_role("link", name="wide").is_visible()


def test_an_answer_that_comes_late_does_not_replace_a_newer_one(tab: Tab, seeded: Site) -> None:
    page = tab.open(seeded, f"/projects/{project_of(seeded, 'sweep-0000')}")
    page.locator(".runs tbody tr").nth(49).wait_for()
    held: list[Any] = []
    page.route("**/runs?search=sweep+1*", lambda route: held.append(route))
    page.get_by_label("Search").fill("sweep 1")
    page.wait_for_url("**search=sweep+1")
    page.get_by_label("Search").fill("sweep 2")
    page.wait_for_function("() => document.querySelectorAll('.runs tbody tr').length === 10")
    for route in held:
        route.abort()
    assert page.locator(".runs .name a").first.inner_text() == "sweep 29"


def test_a_session_that_ended_leads_to_the_login_and_back(new_tab: Any, site: Site) -> None:
    page = new_tab(site).page
    page.goto(f"{site.url}/accounts")
    page.get_by_role("heading", name=NAME).wait_for()
    page.context.clear_cookies()
    page.get_by_role("link", name="Projects", exact=True).click()
    page.wait_for_url("**/login")
    page.get_by_label("Account name").fill(NAME)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Projects").wait_for()


def test_a_run_without_points_says_so(tab: Tab, site: Site) -> None:
    run = site.client.run("pointless1", "nothing yet")
    for path, said in (
        ("", "no points yet"),
        ("?tab=series", "No points yet."),
        ("?tab=plan", "recorded no plan"),
        ("?tab=events", "Nothing has happened"),
        ("?tab=documents", "has no documents"),
    ):
        tab.open(site, f"/runs/{run}{path}").get_by_text(said).first.wait_for()
