# SPDX-License-Identifier: Apache-2.0
"""The way of a new user, once, from the link in the terminal to a comparison. CI runs this file."""

from __future__ import annotations

import re
from typing import Any

from feed import Feed, training
from page_site import NAME, PASSWORD


def test_from_the_setup_link_to_a_comparison(new_site: Any, new_tab: Any) -> None:
    site = new_site()
    page = new_tab().page

    page.goto(site.url)
    page.wait_for_url("**/setup")
    page.get_by_text("one-time link").wait_for()
    page.goto("about:blank")
    page.goto(site.setup)
    page.get_by_label("Account name").fill(NAME)
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_label("Password, again").fill("another one")
    page.get_by_role("button", name="Make the account").click()
    page.get_by_text("The two passwords differ").wait_for()
    page.get_by_label("Password, again").fill(PASSWORD)
    page.get_by_role("button", name="Make the account").click()

    page.get_by_role("heading", name="Record a first run").wait_for()
    assert f"memscale login {site.url}" in page.locator("pre").all_inner_texts()
    page.get_by_role("link", name="Make an API token").click()
    page.get_by_label("Name", exact=True).fill("laptop")
    page.get_by_label("admin – rename").check()
    page.get_by_role("button", name="Make the token").click()
    shown = page.locator(".copyable code").inner_text()
    assert re.fullmatch(r"ms_[0-9a-f]{16}_[0-9a-f]{64}", shown)
    page.reload()
    page.get_by_role("row", name="laptop").wait_for()
    assert shown not in page.content()

    client = Feed(site.server.client(token=shown))
    for number, name in enumerate(("first", "second")):
        training(client, client.run(f"walk-{number:04}", name), 60, seed=number)
    client.call("POST", "/runs/walk-0000/finish", {"state": "finished"})
    page.get_by_role("link", name="Projects", exact=True).click()
    page.get_by_role("link", name="gpt").click()
    row = page.get_by_role("row", name="first")
    row.get_by_text("finished").wait_for()
    row.get_by_text("97 % of 18.0 GiB").wait_for()
    page.get_by_role("link", name="first").click()
    page.get_by_role("heading", name="first").wait_for()
    facts = page.locator(".facts")
    facts.get_by_text("18.0 GiB").wait_for()
    facts.get_by_text("−6.5 %").wait_for()
    page.get_by_role("tab", name="Plan").click()
    page.get_by_role("row", name="transformer.h.1 GPT2Block").wait_for()
    page.get_by_role("tab", name="Events").click()
    page.get_by_text("the step was repeated").wait_for()

    page.go_back()
    page.go_back()
    page.go_back()
    page.get_by_role("heading", name="gpt").wait_for()
    page.get_by_label("Compare first").check()
    page.get_by_label("Compare second").check()
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_role("heading", name="Compare 2 runs").wait_for()
    page.get_by_role("heading", name="Modules: what differs").wait_for()
    page.locator(".uplot canvas").nth(2).wait_for()
    compared = page.url

    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login")
    page.goto(compared)
    page.get_by_label("Account name").fill(NAME)
    page.get_by_label("Password").fill("not this one")
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("alert").filter(has_text=re.compile("wrong|password", re.IGNORECASE)).wait_for()
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(compared)
    page.get_by_role("heading", name="Compare 2 runs").wait_for()
