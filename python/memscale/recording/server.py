# SPDX-License-Identifier: Apache-2.0
"""A `memscale-server`, as a client sees it: one request after another, each within a time.

Python's own HTTP and TLS. Proxies are those of the environment (HTTPS_PROXY, HTTP_PROXY, NO_PROXY);
certificates are verified. A server that sends a byte now and then does not hold a request beyond its time.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import os
import random
import socket
import ssl
import threading
import time
import urllib.request
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

__all__ = ["Answer", "Backoff", "Server", "UnreachableError"]

_CONNECT_SECONDS: Final = 5.0
_REQUEST_SECONDS: Final = 30.0
_MOST_ANSWER_BYTES: Final = 1 << 20
_LEAST_WAIT, _MOST_WAIT = 1.0, 60.0


class UnreachableError(Exception):
    """No answer: the message says why, in a line."""


@dataclass(frozen=True)
class Answer:
    """What a server has answered.

    Attributes:
        status: of HTTP.
        body: JSON as data; None: there was none.
        wait: seconds that it asks to be left alone; 0: it asks for nothing.
    """

    status: int
    body: Any = None
    wait: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether what was asked for is done."""
        return 200 <= self.status < 300

    @property
    def is_for_later(self) -> bool:
        """Whether the same request may be well later."""
        return self.status in (408, 429) or self.status >= 500

    @property
    def words(self) -> str:
        """The server's own, for a message."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        text = error.get("message") if isinstance(error, dict) else None
        return f"{self.status}: {text}"[:300] if isinstance(text, str) else str(self.status)


class Backoff:
    """How long to wait after so many failures: 1 s, 2 s, 4 s … up to a minute, by chance a little less."""

    def __init__(self) -> None:
        self._failures = 0
        self._chance = random.Random()  # its own: the program's generators stay where they are

    def good(self) -> None:
        """It went well."""
        self._failures = 0

    def bad(self, asked: float = 0.0) -> float:
        """It did not. Returns seconds to wait; `asked` is what the server has asked for."""
        most = min(_MOST_WAIT, _LEAST_WAIT * 2.0 ** min(self._failures, 10))
        self._failures += 1
        return max(min(asked, _MOST_WAIT), most * self._chance.uniform(0.5, 1.0))


class Server:
    """One server. Used by one thread; `abort` may be called by another.

    Args:
        url: "http://host:port" or "https://host:port".
        token: for its API; "": none.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url
        self._token = token
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._is_aborted = False

    def request(
        self, method: str, path: str, body: bytes | None = None, seconds: float = _REQUEST_SECONDS
    ) -> Answer:
        """Asks.

        Args:
            method: of HTTP.
            path: below the server's root.
            body: JSON.
            seconds: after which it is given up.

        Raises:
            UnreachableError: there was no answer.
        """
        deadline = time.monotonic() + seconds
        is_fresh = self._connection is None
        try:
            return self._ask(method, path, body, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            if is_fresh or isinstance(error, TimeoutError):
                raise UnreachableError(_line(error)) from error
        try:  # a connection that was kept may have ended meanwhile
            return self._ask(method, path, body, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise UnreachableError(_line(error)) from error

    def close(self) -> None:
        """Closes the connection, if there is one."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Ends a request that another thread waits for. There are no more after it."""
        with self._lock:
            self._is_aborted = True
            connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """In a child of a fork: lets go of the parent's connection, which stays open there."""
        self._lock = threading.Lock()
        connection, self._connection = self._connection, None
        if connection is not None and connection.sock is not None:
            os.close(connection.sock.detach())

    # ---- one request -----------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: bytes | None, deadline: float) -> Answer:
        connection, prefix = self._connected(deadline)
        headers = {"Content-Length": str(len(body or b"")), "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if prefix:
            headers |= _proxy_headers(prefix)
        connection.sock.settimeout(max(0.01, deadline - time.monotonic()))
        connection.request(method, self.url + path if prefix else path, body, headers)
        response = connection.getresponse()
        text = response.read(_MOST_ANSWER_BYTES + 1)
        if len(text) > _MOST_ANSWER_BYTES or response.will_close:
            self.close()
        try:
            found = json.loads(text) if text else None
        except ValueError:
            found = None
        return Answer(response.status, found, _seconds_of(response.getheader("Retry-After")))

    def _connected(self, deadline: float) -> tuple[http.client.HTTPConnection, str]:
        """A connection, and the proxy that plain requests go through by their whole address; "": none."""
        parts = urlsplit(self.url)
        host, proxy = parts.hostname or "", _proxy_of(parts.scheme, parts.hostname or "", parts.netloc)
        plain_proxy = proxy if parts.scheme == "http" else ""
        if self._connection is not None and self._connection.sock is not None:
            _deadline_of(self._connection, deadline)
            return self._connection, plain_proxy
        at = urlsplit(proxy)
        seconds = max(0.01, min(_CONNECT_SECONDS, deadline - time.monotonic()))
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            where = (at.hostname or "", at.port or 80) if proxy else (host, parts.port or 443)
            connection = _Https(*where, timeout=seconds, context=context)
            if proxy:
                connection.set_tunnel(host, parts.port or 443, _proxy_headers(proxy))
        else:
            where = (at.hostname or "", at.port or 80) if proxy else (host, parts.port or 80)
            connection = _Http(*where, timeout=seconds)
        _deadline_of(connection, deadline)
        with self._lock:
            if self._is_aborted:
                raise TimeoutError("given up")
            self._connection = connection
        connection.connect()
        return connection, plain_proxy


class _Timed(io.RawIOBase):
    """Reads from a socket until a time, whatever it brings in between."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket, self._deadline = sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)
        return self._socket.recv_into(buffer)


class _Response(http.client.HTTPResponse):
    """A response that comes within the time of its request."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock, deadline))


class _Http(http.client.HTTPConnection):
    """A connection whose responses have a deadline."""


class _Https(http.client.HTTPSConnection):
    """The same with TLS."""


def _deadline_of(connection: http.client.HTTPConnection, deadline: float) -> None:
    def made(sock: socket.socket, *args: Any, **kwargs: Any) -> _Response:
        return _Response(sock, *args, deadline=deadline, **kwargs)

    connection.response_class = made  # type: ignore[assignment]


def _proxy_of(scheme: str, host: str, netloc: str) -> str:
    """The proxy of the environment; "": none."""
    found = urllib.request.getproxies().get(scheme, "")
    if not found or urllib.request.proxy_bypass(netloc) or urllib.request.proxy_bypass(host):
        return ""
    return found if "://" in found else f"http://{found}"


def _proxy_headers(proxy: str) -> dict[str, str]:
    parts = urlsplit(proxy)
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _seconds_of(text: str | None) -> float:
    """A Retry-After in seconds; dates are not ours to send."""
    return float(text) if text is not None and text.isdigit() and len(text) < 7 else 0.0


def _line(error: BaseException) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words[:300]
