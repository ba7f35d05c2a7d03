# SPDX-License-Identifier: Apache-2.0
"""Metrics of wrapped models, for Prometheus: text on demand, and a server on 127.0.0.1 for each port in use.

    wrap ──► attach ──► one server per port ──► scrape ──► families(live models)
    detach ► detach ──► the last model of a port closes its server

Nothing is collected before somebody asks: a scrape reads the models that are wrapped then, through weak
references, on a thread of the server. Whatever goes wrong here is a line in the log, and training goes on.

The client library is optional (`memscale[metrics]`) and is not imported before a port is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from memscale import log
from memscale.errors import MemScaleError
from memscale.observability.metric_families import Reading, families

if TYPE_CHECKING:
    from torch import nn

    from memscale.core.wrapped import Wrapped

__all__ = ["attach", "detach", "render"]

_ADDRESS: Final = "127.0.0.1"


def render(model: nn.Module) -> str:
    """The metrics of one wrapped model in the Prometheus exposition format, without any server.

    Args:
        model: what was given to `wrap`.

    Raises:
        ValueError: the model is not wrapped.
        MemScaleError: prometheus_client is not installed.

    Example:
        >>> print(memscale.observability.metrics.render(model))
    """
    from memscale.core.wrapping import executor_of

    executor = executor_of(model)
    if executor is None:
        raise ValueError("this model is not wrapped, so it has no metrics")
    client = _client()
    registry = client.CollectorRegistry()
    name = _name_of(executor) or type(model).__name__
    registry.register(_Collector(lambda: {name: executor}))
    text: bytes = client.generate_latest(registry)
    return text.decode()


def attach(executor: Wrapped) -> None:
    """A model was wrapped: if its configuration names a port, a scrape of that port shows it from now on."""
    port = executor.config.observability_port
    if port is None:
        return
    with _state.lock:
        served = _state.ports.get(port) or _open(port)
        if served is not None:
            served.enter(executor)


def detach(executor: Wrapped) -> None:
    """A model is not wrapped any more. Harmless for one that is not shown anywhere."""
    port = executor.config.observability_port
    if port is None:
        return
    with _state.lock:
        served = _state.ports.get(port)
        if served is not None and served.leave(executor):
            del _state.ports[port]
            served.close()


@dataclass
class _Served:
    """A server and the models that it shows, by the value of their label."""

    server: Any
    models: dict[str, weakref.ref[Wrapped]] = field(default_factory=dict)

    def live(self) -> dict[str, Wrapped]:
        """Models that are still there."""
        found = {name: reference() for name, reference in list(self.models.items())}
        return {name: executor for name, executor in found.items() if executor is not None}

    def enter(self, executor: Wrapped) -> None:
        """Shows a model, under the name of its class, and a number where there are several."""
        taken = self.live()
        kind = type(executor.model).__name__
        names = [kind, *(f"{kind}-{number}" for number in range(2, len(taken) + 2))]
        self.models[next(name for name in names if name not in taken)] = weakref.ref(executor)

    def leave(self, executor: Wrapped) -> bool:
        """Shows it no more. Returns whether nobody else is left."""
        rest = {name: other for name, other in self.live().items() if other is not executor}
        self.models = {name: weakref.ref(other) for name, other in rest.items()}
        return not rest

    def close(self) -> None:
        """Ends the server's thread and frees the port."""
        with contextlib.suppress(OSError):  # wakes the thread, which would look up only twice a second
            self.server.socket.shutdown(socket.SHUT_RDWR)
        self.server.shutdown()
        self.server.server_close()


@dataclass
class _State:
    """Servers by port. A forked child begins anew: it has the sockets of its parent, and no thread of it."""

    lock: Any = field(default_factory=threading.RLock)
    ports: dict[int, _Served] = field(default_factory=dict)
    watches_forks: bool = False

    def forget(self) -> None:
        """In a child: lets go of the parent's sockets, so that the ports end with the parent."""
        for served in self.ports.values():
            served.server.socket.close()
        self.ports = {}
        self.lock = threading.RLock()


_state = _State()


class _Collector:
    """What a registry asks when it is scraped."""

    def __init__(self, models: Callable[[], dict[str, Wrapped]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Any]:
        """The families of the models that are there now."""
        readings = {name: Reading.of(executor) for name, executor in self._models().items()}
        yield from families(_client("prometheus_client.core"), readings)


def _open(port: int) -> _Served | None:
    """A server, or None and a line in the log."""
    try:
        client = _client()
        registry = client.CollectorRegistry()
        served = _Served(None)
        registry.register(_Collector(served.live))
        served.server, _ = client.start_http_server(port, addr=_ADDRESS, registry=registry)
    except (MemScaleError, OSError) as error:
        log.LOGGER.warning("no metrics on %s:%d, training goes on without: %s", _ADDRESS, port, error)
        return None
    if not _state.watches_forks:
        os.register_at_fork(after_in_child=_state.forget)
        _state.watches_forks = True
    _state.ports[port] = served
    return served


def _name_of(executor: Wrapped) -> str:
    """The label under which a server shows the model; "" if none does."""
    with _state.lock:
        shown = [item for served in _state.ports.values() for item in served.live().items()]
    return next((name for name, other in shown if other is executor), "")


def _client(module: str = "prometheus_client") -> Any:
    """The client library, or a module of it.

    Raises:
        MemScaleError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MemScaleError(
            f"metrics need prometheus_client: pip install 'memscale[metrics]' ({error})"
        ) from error
