# SPDX-License-Identifier: Apache-2.0
"""Where telemetry goes: an address that somebody has written. There is none built in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

__all__ = ["Address", "address_of"]

_PATH: Final = "/api/v1/telemetry"
_PORTS: Final = {"http": 80, "https": 443}
_LONGEST: Final = 512
_PRINTABLE: Final = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class Address:
    """One address, checked.

    Attributes:
        scheme: "http" or "https".
        host: name or number, without brackets.
        port: as written, else the usual one.
        path: as written; a server's alone is completed.
    """

    scheme: str
    host: str
    port: int
    path: str

    @property
    def url(self) -> str:
        """The address in one piece."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"


def address_of(text: str) -> Address:
    """Reads an address.

    Args:
        text: such as "https://memscale.example.org"; without a path `/api/v1/telemetry` is meant.

    Raises:
        ValueError: it is none, or has a user's name, a query or a fragment, which would name somebody.
    """
    if len(text) > _LONGEST or not _PRINTABLE.fullmatch(text) or any(sign in text for sign in "@?#\\"):
        raise ValueError(_wrong(text))
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(_wrong(text)) from error
    if parts.scheme not in _PORTS or not parts.hostname or port == 0:
        raise ValueError(_wrong(text))
    path = _PATH if parts.path in ("", "/") else parts.path
    return Address(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], path)


def _wrong(text: str) -> str:
    return f"{text[:80]!r} is no address for telemetry; allowed: http://HOST[:PORT][/PATH], or https"
