# SPDX-License-Identifier: Apache-2.0
"""Sends a payload: once a day and kind in a process, from a thread that nobody waits for.

The answer is awaited, so that the server is not cut off, and never read: there is nothing in it that would
change anything, a redirect included. No answer, no second try.
"""

from __future__ import annotations

import contextlib

# What a connection needs is imported here, not in the thread: a fork in the middle leaves its lock held.
import encodings.idna  # noqa: F401
import threading
import time
from http.client import HTTPConnection, HTTPSConnection
from typing import TYPE_CHECKING, Final

import torch

from memscale.telemetry.address import Address
from memscale.telemetry.consent import destination
from memscale.telemetry.payload import EVENT, payload_of

if TYPE_CHECKING:
    from memscale.core.wrapped import Wrapped

__all__ = ["SENT", "send_once"]

_SECONDS: Final = 2.0
_DAY_SECONDS: Final = 86_400
_HEADERS: Final = {"Content-Type": "application/json", "Connection": "close"}

SENT: Final[dict[tuple[int, str], object]] = {}
"""Day and kind of what this process has sent, or tried to."""


def send_once(executor: Wrapped) -> None:
    """Sends what is to be said of a wrapped model, unless something like it has been sent today."""
    address, _ = destination()
    if address is None or not _is_first_rank():
        return
    mine = object()
    if SENT.setdefault((int(time.time()) // _DAY_SECONDS, EVENT), mine) is mine:
        about = (address, payload_of(executor))
        threading.Thread(target=_deliver, args=about, name="memscale-telemetry", daemon=True).start()


def _is_first_rank() -> bool:
    """Of processes that train together, one sends."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank())


def _deliver(address: Address, body: bytes) -> None:
    with contextlib.suppress(Exception):
        kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
        connection = kind(address.host, address.port, timeout=_SECONDS)
        connection.set_debuglevel(0)  # which a program may have raised for all connections
        try:
            connection.request("POST", address.path, body, _HEADERS)
            connection.sock.recv(1)
        finally:
            connection.close()
