# SPDX-License-Identifier: Apache-2.0
"""The table, the URL as the state of a view, what is archived and deleted, and names that are markup."""

from __future__ import annotations

import re
from typing import Any

import pytest
from feed import HOSTILE
from page_site import Site, Tab, project_of

pytestmark = pytest.mark.long

LISTED = ".runs tbody tr"


def names(page: Any) -> list[str]:
    return [str(name) for name in page.locator(".runs tbody .name").all_inner_texts()]


def settled(page: Any, count: int) -> list[str]:
    """Waits for so many rows."""
    page.wait_for_function(
        "([rows, count]) => document.querySelectorAll(rows).length === count", arg=[LISTED, count]
    )
    return names(page)


def test_pages_search_sort_and_state_are_the_servers(tab: Tab, seeded: Site) -> None:
    path = f"/projects/{project_of(seeded, 'sweep-0000')}"
    page = tab.open(seeded, path)
    assert settled(page, 50)[0] == "sweep 74"
    page.get_by_role("button", name="Next page").click()
    assert settled(page, 25)[-1] == "sweep 00"
    page.get_by_role("button", name="First page").click()
    settled(page, 50)
    page.get_by_role("button", name="Name").click()
    page.get_by_text("sweep 00").wait_for()
    assert settled(page, 50)[:2] == ["sweep 00", "sweep 01"]
    assert page.locator("th[aria-sort]").inner_text().startswith("Name")
    page.get_by_label("Search").fill("SWEEP 4")
    assert settled(page, 10) == [f"sweep 4{digit}" for digit in range(10)]
    page.get_by_label("State").select_option("finished")
    page.get_by_text("No run matches.").wait_for()
    assert page.url.endswith(f"{path}?sort=name&search=SWEEP+4&state=finished")
    page.get_by_role("button", name="Show all runs").click()
    settled(page, 50)


def test_a_url_is_the_whole_state_of_the_table(tab: Tab, seeded: Site, new_tab: Any) -> None:
    query = "sort=-name&search=1&limit=100&pick=sweep-0001,sweep-0010"
    path = f"/projects/{project_of(seeded, 'sweep-0000')}?{query}"
    page = tab.open(seeded, path)
    found = settled(page, 17)
    assert found[0] == "sweep 71"
    assert page.get_by_label("Search").input_value() == "1"
    assert page.get_by_label("Rows").input_value() == "100"
    assert page.get_by_label("Compare sweep 10").is_checked()
    assert page.get_by_text("2 runs chosen").is_visible()
    page.get_by_label("Compare sweep 11").check()
    other = new_tab(seeded).page
    other.goto(page.url)
    assert settled(other, 17) == found
    assert other.get_by_text("3 runs chosen").is_visible()


def test_going_back_undoes_a_filter(tab: Tab, seeded: Site) -> None:
    page = tab.open(seeded, f"/projects/{project_of(seeded, 'sweep-0000')}")
    settled(page, 50)
    page.get_by_label("Rows").select_option("100")
    settled(page, 75)
    page.go_back()
    settled(page, 50)
    assert page.get_by_label("Rows").input_value() == "50"


def test_a_run_is_archived_found_restored_and_deleted(tab: Tab, seeded: Site) -> None:
    seeded.client.run("doomed-0001", "doomed", project="doomed")
    page = tab.open(seeded, f"/projects/{project_of(seeded, 'doomed-0001')}")
    settled(page, 1)
    page.get_by_role("button", name="Archive doomed").click()
    page.get_by_role("dialog").get_by_role("button", name="Archive").click()
    page.get_by_role("heading", name="No run yet in this project").wait_for()
    page.get_by_label("Archived ones").check()
    settled(page, 1)
    page.get_by_role("button", name="Restore doomed").click()
    page.get_by_text("No run matches.").wait_for()
    page.get_by_label("Archived ones").uncheck()
    settled(page, 1)
    page.get_by_role("button", name="Delete doomed").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert settled(page, 1) == ["doomed"]
    page.get_by_role("button", name="Delete doomed").click()
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0
    page.get_by_role("button", name="Delete doomed").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete for good").click()
    page.get_by_role("heading", name="No run yet in this project").wait_for()
    page.goto(f"{seeded.url}/runs/doomed-0001")
    page.get_by_role("heading", name="Not here").wait_for()


def test_a_run_is_renamed(tab: Tab, seeded: Site) -> None:
    seeded.client.run("renamed-0001", "before", project="doomed")
    page = tab.open(seeded, "/runs/renamed-0001")
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("New name").fill("after <i>")
    page.get_by_role("dialog").get_by_role("button", name="Rename").click()
    page.get_by_role("heading", name="after <i>").wait_for()
    assert seeded.client.call("GET", "/runs/renamed-0001")["name"] == "after <i>"


def test_a_run_that_was_not_heard_of_is_lost(tab: Tab, seeded: Site) -> None:
    def as_lost(route: Any) -> None:
        answer = route.fetch()
        content = answer.json()
        content["runs"][0]["state"] = "lost"
        route.fulfill(response=answer, json=content)

    tab.page.route(re.compile(r"/api/v1/projects/\d+/runs"), as_lost)
    page = tab.open(seeded, f"/projects/{project_of(seeded, 'sweep-0000')}")
    assert page.locator(LISTED).first.locator(".state").inner_text() == "lost"


@pytest.mark.parametrize("path", ["", "?tab=series", "?tab=plan", "?tab=events", "?tab=documents"])
def test_markup_in_names_and_content_stays_text(tab: Tab, seeded: Site, path: str) -> None:
    page = tab.open(seeded, f"/runs/hostile-0{path}")
    assert page.locator("h1").inner_text() == HOSTILE[0]
    if path == "?tab=documents":
        for summary in page.locator("summary").all():
            summary.click()
        page.get_by_text(HOSTILE[0]).nth(5).wait_for()
    elif path == "?tab=plan":
        page.get_by_role("row", name=HOSTILE[0]).first.wait_for()
    elif path == "?tab=events":
        page.get_by_role("cell", name=HOSTILE[0]).wait_for()
    elif path == "?tab=series":
        page.locator(".uplot").nth(3).wait_for()
    assert page.locator("main img, main script, main svg[onload]").count() == 0


def test_hostile_names_are_shown_whole_and_sent_whole(tab: Tab, seeded: Site) -> None:
    page = tab.open(seeded, f"/projects/{project_of(seeded, 'hostile-0')}?sort=name")
    shown = settled(page, len(HOSTILE))
    assert sorted(shown) == sorted(HOSTILE)
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("link", name=HOSTILE[0]).click()
    page.get_by_role("heading", name=HOSTILE[0]).wait_for()
    assert page.title().startswith(HOSTILE[0])
    page.goto(f"{seeded.url}/compare?runs=hostile-0,hostile-1")
    page.get_by_role("heading", name="Plan: what differs").wait_for()
    assert page.locator("main img, main script").count() == 0


def test_a_login_leads_to_paths_of_this_page_alone(new_tab: Any, seeded: Site) -> None:
    page = new_tab(seeded).page
    for path in ("//example.org/", "https://example.org/", "/\\example.org", "javascript:alert(1)"):
        page.goto(f"{seeded.url}/login?next={path}")
        page.get_by_role("heading", name="Projects").wait_for()
        assert page.url == f"{seeded.url}/"


def test_tokens_are_made_shown_once_and_revoked(tab: Tab, seeded: Site) -> None:
    page = tab.open(seeded, "/accounts")
    page.get_by_text("New token").click()
    page.get_by_label("Name", exact=True).fill("short-lived")
    page.get_by_label("Expires").select_option("30")
    page.get_by_role("button", name="Make the token").click()
    row = page.get_by_role("row", name="short-lived")
    row.get_by_text("ingest").wait_for()
    assert re.search(r"in (29|30) d", row.inner_text())
    page.get_by_text("New token").click()
    assert page.get_by_label("ingest").is_checked(), "the form is as it was"
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    row.wait_for(state="detached")
    page.reload()
    page.get_by_role("row", name="test").wait_for()
    assert page.get_by_role("row", name="short-lived").count() == 0


def test_an_admin_makes_accounts_and_an_account_changes_its_password(
    tab: Tab, seeded: Site, new_tab: Any
) -> None:
    page = tab.open(seeded, "/accounts")
    page.get_by_text("New account").click()
    page.get_by_label("Name of the account").fill("grace")
    page.get_by_label("First password", exact=True).fill("a first password")
    page.get_by_label("First password, again").fill("a first password")
    page.get_by_role("button", name="Make the account").click()
    page.get_by_role("row", name="grace").wait_for()
    other = new_tab().page
    other.goto(f"{seeded.url}/accounts")
    other.get_by_label("Account name").fill("grace")
    other.get_by_label("Password").fill("a first password")
    other.get_by_role("button", name="Log in").click()
    other.get_by_role("heading", name="grace").wait_for()
    assert other.get_by_text("Accounts of this server").count() == 0
    other.get_by_text("Change it").click()
    other.get_by_label("Present password").fill("not the one")
    other.get_by_label("New password", exact=True).fill("a second password")
    other.get_by_label("New password, again").fill("a second password")
    other.get_by_role("button", name="Change the password").click()
    other.get_by_role("alert").filter(has_text=re.compile(r"\w")).wait_for()
    other.get_by_label("Present password").fill("a first password")
    other.get_by_role("button", name="Change the password").click()
    other.get_by_text("The password is changed").wait_for()
    other.goto(f"{seeded.url}/runs/trained-0")
    other.get_by_role("heading", name="Not here").wait_for()
