# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: a server with an account, and a tab that is logged in.

MEMSCALE_CHROMIUM names the browser (default: `chromium`). Without it, or without Playwright for Python, the
tests are skipped and say so.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from feed import HOSTILE, hostile_content, training
from page_site import PAGE, Site, Tab, note
from server_process import serving

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def new_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts servers, each without any account."""
    with ExitStack() as open_ones:

        def start() -> Site:
            folder = tmp_path_factory.mktemp("site") / "data"
            return Site(open_ones.enter_context(serving(folder, "--page", str(PAGE))))

        yield start


@pytest.fixture(scope="session")
def site(new_site: Any) -> Site:
    """A server with an account and a token."""
    one: Site = new_site()
    one.settle()
    return one


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")
    program = os.environ.get("MEMSCALE_CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium; MEMSCALE_CHROMIUM may name one")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def new_tab(browser: Any) -> Iterator[Any]:
    """Opens tabs; an exception in one, or a word that the browser blocked something, fails the test."""
    contexts, tabs = [], []

    def start(site: Site | None = None, **options: Any) -> Tab:
        context = browser.new_context(**options)
        context.set_default_timeout(15_000)
        contexts.append(context)
        if site is not None:
            name, value = site.cookie.split("=", 1)
            context.add_cookies([{"name": name, "value": value, "url": site.url}])
        tab = Tab(context.new_page(), [])
        tab.page.on("pageerror", lambda error: tab.troubles.append(f"exception: {error}"))
        tab.page.on(
            "dialog", lambda dialog: (tab.troubles.append(f"dialog: {dialog.message}"), dialog.dismiss())
        )
        tab.page.on("console", lambda said: note(tab, said))
        tabs.append(tab)
        return tab

    yield start
    for context in contexts:
        context.close()
    assert [trouble for tab in tabs for trouble in tab.troubles] == []


@pytest.fixture
def tab(new_tab: Any, site: Site) -> Tab:
    """A tab that is logged in."""
    one: Tab = new_tab(site)
    return one


@pytest.fixture(scope="session")
def seeded(site: Site) -> Site:
    """The server with runs: two long ones, some with hostile names, a page and a half of empty ones."""
    client = site.client
    for number, (name, steps) in enumerate((("wide", 2000), ("narrow", 1500))):
        training(client, client.run(f"trained-{number}", name), steps, seed=number)
    client.call("POST", "/runs/trained-1/finish", {"state": "finished"})
    for number, name in enumerate(HOSTILE):
        client.run(f"hostile-{number}", name, project="hostile <b>&amp;</b>")
        hostile_content(client, f"hostile-{number}")
    for number in range(75):
        client.run(
            f"sweep-{number:04}",
            f"sweep {number:02}",
            project="sweeps",
            created_ms=1_700_000_000_000 + number,
        )
    return site
