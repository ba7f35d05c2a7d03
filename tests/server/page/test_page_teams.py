# SPDX-License-Identifier: Apache-2.0
"""Settings as people use them: invitations, roles, tokens, new passwords, retention, the audit log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from feed import HOSTILE
from page_site import NAME, PASSWORD, Site, Tab
from server_process import cookie_of

pytestmark = pytest.mark.long


@pytest.fixture
def fresh(new_site: Callable[[], Site]) -> Site:
    """A server of its own, with an account: these tests change what others count."""
    one = new_site()
    one.settle()
    return one


def join_by_page(new_tab: Callable[..., Tab], site: Site, link: str, name: str) -> Any:
    page = new_tab().page
    page.goto(link)
    page.get_by_role("heading", name="Join default").wait_for()
    page.get_by_label("Account name").fill(name)
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_label("Password, again").fill(PASSWORD)
    page.get_by_role("button", name="Make the account and join").click()
    page.get_by_role("heading", name="Projects").wait_for()
    return page


def test_an_invitation_from_link_to_account(new_tab: Callable[..., Tab], fresh: Site) -> None:
    page = new_tab(fresh).open(fresh, "/teams")
    page.get_by_role("link", name="default").click()
    page.get_by_role("heading", name="1 member").wait_for()
    page.get_by_text("New invitation").click()
    page.get_by_label("Role", exact=True).select_option("viewer")
    page.get_by_role("button", name="Make the link").click()
    page.get_by_role("heading", name="An invitation as viewer").wait_for()
    link = page.locator(".copyable code").inner_text()
    assert link.startswith(f"{fresh.url}/join#token=")
    page.get_by_role("button", name="Revoke the invitation as viewer by ann").wait_for()
    bobs = join_by_page(new_tab, fresh, link, "bob")
    bobs.get_by_text("There is no project that you see yet.").wait_for()  # a viewer makes none
    assert bobs.get_by_text("New project").count() == 0
    run = fresh.client.run("page-run-1", "looked at")
    bobs.goto(f"{fresh.url}/runs/{run}")
    bobs.get_by_role("link", name="Perfetto").wait_for()
    assert bobs.get_by_role("button", name="Delete").count() == 0  # nor may a viewer
    again = new_tab().page
    again.goto(link)
    again.get_by_role("heading", name="This invitation is over").wait_for()
    page.reload()
    page.get_by_label("Role of bob").select_option("member")
    page.get_by_text("bob is member now").wait_for(state="attached")
    bobs.reload()
    bobs.get_by_role("button", name="Delete").wait_for()
    bobs.goto(fresh.url)
    bobs.get_by_text("New project").wait_for()
    page.get_by_role("button", name="Remove bob").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    page.get_by_role("button", name="Remove bob").wait_for(state="detached")
    bobs.reload()
    bobs.get_by_text("You are in no team.").wait_for()
    page.get_by_role("link", name="Audit log").click()
    page.get_by_role("row", name="member.remove").wait_for()
    told = page.locator("td code").all_inner_texts()
    assert told == ["member.remove", "member.role", "project.make", "invitation.accept", "invitation.make"]


def test_the_last_owner_is_told_so(new_tab: Callable[..., Tab], fresh: Site) -> None:
    page = new_tab(fresh).open(fresh, "/teams/1")
    page.get_by_label(f"Role of {NAME}").select_option("viewer")
    page.get_by_text("A team would be left without an owner who can log in").wait_for()
    assert page.get_by_label(f"Role of {NAME}").input_value() == "owner"


def test_hostile_names_are_text(new_tab: Callable[..., Tab], fresh: Site) -> None:
    ann = fresh.server.log_in(NAME)
    for name in HOSTILE:
        team = ann.ask("POST", "/api/v1/teams", {"name": name}).json["id"]
        project = ann.ask("POST", "/api/v1/projects", {"name": name, "team": team}).json["id"]
        invited = ann.ask("POST", f"/api/v1/teams/{team}/invitations", {"role": "member"}).json["token"]
        tab = new_tab(fresh)
        assert tab.open(fresh, f"/teams/{team}").locator("h1").inner_text().strip() == name.strip()
        settings = tab.open(fresh, f"/projects/{project}/settings")
        assert name.strip() in settings.locator("h1").inner_text()
        tab.open(fresh, f"/teams/{team}/audit").get_by_role("row", name="project.make").wait_for()
        assert name.strip() in tab.open(fresh, f"/join#token={invited}").locator("h1").inner_text()
        for path in ("/teams", "/audit", "/accounts", "/"):
            tab.open(fresh, path)


def test_a_token_of_one_project_and_a_reset(new_tab: Callable[..., Tab], fresh: Site) -> None:
    project = fresh.client.call("POST", "/projects", {"name": "only this"})["id"]
    page = new_tab(fresh).open(fresh, "/accounts")
    page.get_by_text("New token").click()
    page.get_by_label("Name", exact=True).fill("cluster")
    page.get_by_label("Reaches").select_option(f"project {project}")
    page.get_by_role("button", name="Make the token").click()
    page.get_by_role("heading", name="The token cluster").wait_for()
    page.get_by_role("row", name="cluster").get_by_text("project only this").wait_for()
    page.get_by_role("button", name=f"New password: {NAME}").click()
    page.get_by_role("heading", name=f"A new password for {NAME}").wait_for()
    link = page.locator(".copyable code").last.inner_text()
    other = new_tab().page
    other.goto(link)
    other.get_by_label("New password", exact=True).fill("another " + PASSWORD)
    other.get_by_label("New password, again").fill("another " + PASSWORD)
    other.get_by_role("button", name="Set the password").click()
    other.get_by_role("heading", name="Projects").wait_for()
    page.reload()
    page.get_by_role("heading", name="Log in").wait_for()  # the session has ended


def test_retention_shows_what_would_go(new_tab: Callable[..., Tab], fresh: Site) -> None:
    fresh.client.run("run-number-1", "first", project="kept")
    project = fresh.client.call("GET", "/runs/run-number-1")["project"]
    page = new_tab(fresh).open(fresh, f"/projects/{project}")
    page.get_by_role("button", name="Pin first").click()
    page.get_by_role("button", name="Unpin first").wait_for()
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("Delete after").fill("30")
    page.get_by_role("button", name="Show what would go").click()
    page.get_by_text("Now: 0 runs archived, 0 runs deleted, 0 pinned runs left alone.").wait_for()
    page.get_by_role("button", name="Keep to this").click()
    page.get_by_text("The rule is set.").wait_for()
    page.reload()
    assert page.get_by_label("Delete after").input_value() == "30"
    page.get_by_label("Seen by").select_option("private")
    page.get_by_text("The team has nobody else.").wait_for()
    page.get_by_role("button", name="Delete the project").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete for good").click()
    page.get_by_role("heading", name="Projects").wait_for()
    assert fresh.client.call("GET", "/projects")["projects"] == []


def test_sessions_are_ended_by_page(new_tab: Callable[..., Tab], fresh: Site) -> None:
    other = fresh.server.log_in(NAME)
    page = new_tab(fresh).open(fresh, "/accounts")
    page.get_by_role("button", name="End the session of").click()
    page.get_by_role("button", name="End the session of").wait_for(state="detached")
    assert other.ask("GET", "/api/v1/me").status == 401
    again = fresh.server.client().ask("POST", "/api/v1/login", {"name": NAME, "password": PASSWORD})
    assert cookie_of(again) != other.cookie
