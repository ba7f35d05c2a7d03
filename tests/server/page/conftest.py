# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: a server with an account, and a tab that is logged in.

MEMSCALE_SERVER names the program (default: the one in build/gcc), MEMSCALE_CHROMIUM the browser (default: `chromium`).
Without either, or without Playwright for Python, the tests are skipped and say so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from feed import HOSTILE, Client, hostile_content, training

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "server" / "page"
BUILT = ROOT / "build" / "gcc" / "server" / "memscale-server"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
NAME, PASSWORD = "ada", "correct horse battery"


@dataclass
class Site:
    """A running server.

    Attributes:
        setup: its one-time link.
        client: a program with a token of every scope, once there is an account.
    """

    url: str
    setup: str
    cookie: str = ""
    client: Client = field(init=False)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """As a browser would, with the session's cookie."""
        request = urllib.request.Request(f"{self.url}/api/v1{path}", json.dumps(body).encode(), method="POST")
        request.add_header("Content-Type", "application/json")
        request.add_header("Origin", self.url)
        if self.cookie:
            request.add_header("Cookie", self.cookie)
        with urllib.request.urlopen(request, timeout=60) as answer:
            if "Set-Cookie" in answer.headers:
                self.cookie = answer.headers["Set-Cookie"].split(";")[0]
            return json.loads(answer.read())

    def settle(self) -> None:
        """Makes the account and a token."""
        token = self.setup.partition("#token=")[2]
        self.post("/setup", {"token": token, "name": NAME, "password": PASSWORD})
        made = self.post("/tokens", {"name": "tests", "scopes": ["admin"]})
        self.client = Client(self.url, made["token"])


@pytest.fixture(scope="session")
def program() -> Path:
    """The server's program."""
    path = Path(os.environ.get("MEMSCALE_SERVER") or BUILT)
    if not path.is_file():
        pytest.skip(f"no server at {path}; MEMSCALE_SERVER may name one")
    return path


@pytest.fixture(scope="session")
def new_site(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts servers, each without any account."""
    ends = []

    def start() -> Site:
        data = tmp_path_factory.mktemp("data")
        command = [program, "--data", data, "--listen", "127.0.0.1:0", "--page", PAGE]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ends.append(lambda: (process.terminate(), process.wait()))
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            found = re.search(r"(http://[^/\s]+)/setup#token=[0-9a-f]{64}", line)
            if found:
                return Site(found.group(1), found.group())
        raise AssertionError(f"the server did not start:\n{''.join(said)}")

    yield start
    for end in ends:
        end()


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


@dataclass
class Tab:
    """A tab of the browser and what went wrong in it."""

    page: Any
    troubles: list[str]

    def open(self, site: Site, path: str) -> Any:
        """Opens a path and waits for its heading."""
        self.page.goto(f"{site.url}{path}")
        self.page.wait_for_selector("#main h1")
        return self.page


@pytest.fixture
def new_tab(browser: Any) -> Iterator[Any]:
    """Opens tabs; an exception, or a message that the browser blocked something, in any of them fails the test."""
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
        tab.page.on("dialog", lambda dialog: (tab.troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        tab.page.on("console", lambda said: _note(tab, said))
        tabs.append(tab)
        return tab

    yield start
    for context in contexts:
        context.close()
    assert [trouble for tab in tabs for trouble in tab.troubles] == []


def _note(tab: Tab, said: Any) -> None:
    expected = "Failed to load resource"  # a refusal, or a server that a test has taken away
    if said.type in ("error", "warning") and expected not in said.text:
        tab.troubles.append(f"{said.type}: {said.text}")


@pytest.fixture
def tab(new_tab: Any, site: Site) -> Tab:
    """A tab that is logged in."""
    one: Tab = new_tab(site)
    return one


@pytest.fixture(scope="session")
def seeded(site: Site) -> Site:
    """The server with runs of several kinds: two of 2,000 steps, hostile names, a page and a half of short ones."""
    client = site.client
    for number, (name, steps) in enumerate((("wide", 2000), ("narrow", 1500))):
        training(client, client.run(f"trained-{number}", name), steps, seed=number)
    client.call("POST", "/runs/trained-1/finish", {"state": "finished"})
    for number, name in enumerate(HOSTILE):
        client.run(f"hostile-{number}", name, project="hostile <b>&amp;</b>")
        hostile_content(client, f"hostile-{number}")
    for number in range(75):
        client.run(f"sweep-{number:04}", f"sweep {number:02}", project="sweeps", created_ms=1_700_000_000_000 + number)
    return site


def project_of(site: Site, run: str) -> int:
    """The number of a run's project."""
    return int(site.client.call("GET", f"/runs/{run}")["project"])
