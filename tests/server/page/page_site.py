# SPDX-License-Identifier: Apache-2.0
"""A server as the page's tests see it, and a tab of a browser."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feed import Feed
from server_process import PASSWORD, Client, Server

__all__ = ["NAME", "PAGE", "PASSWORD", "Site", "Tab", "note", "project_of"]

PAGE = Path(__file__).parents[3] / "server" / "page"
NAME = "ann"


class Site:
    """A running server.

    Attributes:
        client: a program with a token of every scope, once there is an account.
    """

    client: Feed
    _ann: Client

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = f"http://127.0.0.1:{server.port}"
        self.setup = f"{self.url}/setup#token={server.setup_token}"

    def settle(self) -> None:
        """Makes the account and a token."""
        self._ann = self.server.set_up()
        self.client = Feed(self.server.with_token(self._ann, "admin"))

    @property
    def cookie(self) -> str:
        """Of the account's session: "name=value"."""
        return str(self._ann.cookie)


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


def note(tab: Tab, said: Any) -> None:
    """Keeps what the browser complains of; not that a request failed, which a test may want."""
    if said.type in ("error", "warning") and "Failed to load resource" not in said.text:
        tab.troubles.append(f"{said.type}: {said.text}")


def project_of(site: Site, run: str) -> int:
    """The number of a run's project."""
    return int(site.client.call("GET", f"/runs/{run}")["project"])
