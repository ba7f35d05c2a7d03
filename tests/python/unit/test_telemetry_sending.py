# SPDX-License-Identifier: Apache-2.0
"""Telemetry on its way: nothing while it is off, the bytes that `show` prints, and no harm to training."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import memscale
from cli_samples import Runner, sized
from memscale.telemetry import sending
from memscale.telemetry.consent import keep

NAME = "memscale-telemetry"

Answer = Callable[[socket.socket, threading.Event], None]
"""What a server does once it has a whole request, until the test is over."""


class Server:
    """Takes connections one after the other; `received` has a request, head and body, for each."""

    def __init__(self, answer: Answer, reads: bool = True) -> None:
        self.received: queue.Queue[tuple[bytes, bytes]] = queue.Queue()
        self.answer, self.reads = answer, reads
        self.over = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        while not self.over.is_set():
            connection, _ = self.listener.accept()
            with connection:
                if self.over.is_set():
                    return
                if self.reads:
                    self.received.put(request(connection))
                try:
                    self.answer(connection, self.over)
                except OSError:  # the sender has gone
                    continue

    def close(self) -> None:
        self.over.set()
        with socket.create_connection(self.listener.getsockname()):
            self.thread.join()
        self.listener.close()


def request(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body, as long as the head says."""
    text = b""
    while b"\r\n\r\n" not in text:
        text += connection.recv(4096)
    head, _, body = text.partition(b"\r\n\r\n")
    (length,) = (
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")
    )
    while len(body) < length:
        body += connection.recv(4096)
    return head, body


def kept(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")


def fails(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\nwhat")


def garbage(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(bytes(range(256)) * 64)


def silent(connection: socket.socket, over: threading.Event) -> None:
    over.wait()


def drips(connection: socket.socket, over: threading.Event) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10_000:
        connection.sendall(bytes([byte]))
        if over.wait(0.02):
            return


def cuts(connection: socket.socket, over: threading.Event) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def started(answer: Answer, reads: bool = True) -> Server:
        servers.append(Server(answer, reads))
        return servers[-1]

    yield started
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Switched on, with an address of the test's, in a process that has sent nothing."""
    for name in ("DO_NOT_TRACK", "MEMSCALE_TELEMETRY_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CI", "JENKINS_URL", "TEAMCITY_VERSION", "TF_BUILD", "CODEBUILD_BUILD_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEMSCALE_TELEMETRY", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    sending.SENT.clear()


def sent() -> None:
    """Waits for what is being sent."""
    for thread in threading.enumerate():
        if thread.name == NAME:
            assert thread.daemon
            thread.join(60)
            assert not thread.is_alive()


def trained(wraps: bool) -> list[torch.Tensor]:
    """Losses and weights of a few steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, 8)
    if wraps:
        memscale.wrap(model, sample_input=batch, optimizer=optimizer, enable_logging=False)
    losses = []
    for _ in range(3):
        loss = model(batch).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if wraps:
        memscale.detach(model)
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


# ---- what is sent ------------------------------------------------------------------------------------


def test_the_server_gets_what_show_prints(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(kept)
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", server.url)
    run = Runner(capsys)
    for budget in ("1GiB", "30MiB"):  # without and with a plan that does something
        sending.SENT.clear()
        model, batch = sized(64, 64)
        memscale.wrap(model, sample_input=batch, memory_budget=budget)
        head, body = server.received.get(timeout=60)
        memscale.detach(model)
        shown = run(
            "telemetry",
            "show",
            "cli_samples:sized",
            "--batch",
            64,
            "--seq",
            64,
            "--device",
            "cpu",
            "--budget",
            budget,
        )
        assert body + b"\n" == shown.out.encode()
        assert bool(json.loads(body)["techniques"]) == (budget == "30MiB")
    sent()
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /api/v1/telemetry HTTP/1.1"
    names = {line.split(b":")[0] for line in lines[1:]}
    assert names == {b"Host", b"Accept-Encoding", b"Content-Length", b"Content-Type", b"Connection"}


def test_a_small_model_is_what_show_prints_without_one(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(kept)
    monkeypatch.delenv("MEMSCALE_TELEMETRY")
    keep(True, server.url)  # the user's choice, with its address
    trained(wraps=True)
    _, body = server.received.get(timeout=60)
    sent()
    assert body + b"\n" == Runner(capsys)("telemetry", "show").out.encode()


def test_nothing_is_sent_twice_in_a_day(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(kept)
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", server.url)
    model = nn.Linear(8, 8)
    for rows in (4, 8, 16):  # two plans of one model, and two of another
        memscale.wrap(model, sample_input=torch.randn(rows, 8))
        model(torch.randn(2 * rows, 8)).sum().backward()
        sent()
    memscale.detach(model)
    trained(wraps=True)
    sent()
    server.received.get(timeout=60)
    assert server.received.empty()
    (key,) = sending.SENT
    sending.SENT[(key[0] - 1, key[1])] = sending.SENT.pop(key)  # yesterday's
    trained(wraps=True)
    server.received.get(timeout=60)
    sent()
    assert server.received.empty()


def test_without_a_sample_it_is_sent_when_the_plan_is_made(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(kept)
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", server.url)
    model = nn.Linear(8, 8)
    memscale.wrap(model)
    assert not sending.SENT
    model(torch.randn(4, 8)).sum().backward()
    server.received.get(timeout=60)
    memscale.detach(model)
    sent()


# ---- what goes wrong ---------------------------------------------------------------------------------


def check_nothing_is_noticed(
    expected: list[torch.Tensor], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    capfd.readouterr()
    caplog.clear()
    found = trained(wraps=True)
    sent()
    assert all(itertools.starmap(torch.equal, zip(expected, found, strict=True)))
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("answer", [kept, fails, garbage, silent, drips, cuts])
def test_training_does_not_know_of_a_bad_server(
    answer: Answer, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    expected = trained(wraps=False)
    server = serve(answer)
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", server.url)
    monkeypatch.setattr(http.client.HTTPConnection, "debuglevel", 1)  # prints, where it is left so
    check_nothing_is_noticed(expected, capfd, caplog)
    assert len(sending.SENT) == 1
    server.received.get(timeout=60)
    assert server.received.empty()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_training_does_not_know_of_a_server_that_never_reads(
    scheme: str, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    expected = trained(wraps=False)
    server = serve(silent, reads=False)
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", server.url.replace("http", scheme))
    check_nothing_is_noticed(expected, capfd, caplog)


def test_a_redirect_is_not_followed(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    expected = trained(wraps=False)
    other = serve(kept)
    text = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {other.url}/\r\nContent-Length: 0\r\n\r\n".encode()
    server = serve(lambda connection, over: connection.sendall(text))
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", server.url)
    check_nothing_is_noticed(expected, capfd, caplog)
    server.received.get(timeout=60)
    assert server.received.empty() and other.received.empty()


@pytest.mark.parametrize("url", ["down", "http://nowhere.invalid", "http://[::1]:1", "no address"])
def test_training_does_not_know_of_a_server_that_is_down(
    url: str, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    expected = trained(wraps=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", f"http://127.0.0.1:{port}" if url == "down" else url)
    check_nothing_is_noticed(expected, capfd, caplog)
    assert len(sending.SENT) == (url != "no address")


def test_a_model_that_objects_is_wrapped_all_the_same(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", serve(kept).url)

    looked = []

    class Kind(type(nn.Module)):  # type: ignore[misc]
        def __getattribute__(cls, name: str) -> object:
            if name == "__mro__" and sending.SENT and not looked:
                looked.append(name)
                raise RuntimeError("do not look")
            return super().__getattribute__(name)

    class Model(nn.Linear, metaclass=Kind):
        pass

    model = Model(8, 8)
    memscale.wrap(model, sample_input=torch.randn(4, 8), enable_logging=False)
    model(torch.randn(4, 8)).sum().backward()
    assert memscale.executor_of(model) is not None and looked
    memscale.detach(model)
    assert not [record for record in caplog.records if record.levelname != "INFO"]


def test_no_thread_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    expected = trained(wraps=False)
    monkeypatch.setenv("MEMSCALE_TELEMETRY_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(threading.Thread, "start", refused)
    found = trained(wraps=True)
    assert all(itertools.starmap(torch.equal, zip(expected, found, strict=True)))


# ---- while it is off ---------------------------------------------------------------------------------

PROGRAM = """
import os, sys

sockets = 0

def seen(event, about):  # of every socket, whoever opens it, until the interpreter has ended
    global sockets
    if event == "socket.__new__" and about:
        sockets += 1
        if not wanted:
            os.write(2, b"a socket\\n")
            os._exit(7)
    if event == "open" and str(about[0]).endswith("telemetry.json") and "DO_NOT_TRACK" in os.environ:
        os._exit(8)

wanted = sys.argv[1] == "on"
sys.addaudithook(seen)

import threading
import torch
import memscale

def life():
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    memscale.wrap(model, sample_input=torch.randn(16, 8), optimizer=optimizer, enable_logging=False)
    for rows in (16, 64):
        model(torch.randn(rows, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert memscale.executor_of(model).plan is not None
    memscale.detach(model)

CASES = {
    "nothing": ({}, None),
    "do not track": ({"DO_NOT_TRACK": "1", "MEMSCALE_TELEMETRY": "1", "MEMSCALE_TELEMETRY_URL": URL}, True),
    "switch": ({"MEMSCALE_TELEMETRY": "0"}, True),
    "ci": ({"CI": "true"}, True),
    "disabled": ({"MEMSCALE_TELEMETRY_URL": URL}, False),
    "damaged": ({"MEMSCALE_TELEMETRY_URL": URL}, "{"),
    "no address": ({"MEMSCALE_TELEMETRY": "1"}, None),
    "on": ({}, True),
} if (URL := sys.argv[2]) else {}

file = os.path.join(os.environ["XDG_CONFIG_HOME"], "memscale", "telemetry.json")
os.makedirs(os.path.dirname(file))
for name, (variables, choice) in CASES.items():
    if (name == "on") != wanted:
        continue
    if choice is not None:
        text = choice if isinstance(choice, str) else '{"version": 1, "enabled": %s, "url": "%s"}' % (
            str(choice).lower(), URL)
        with open(file, "w") as out:
            out.write(text)
    os.environ.update(variables)
    life()
    for variable in variables:
        del os.environ[variable]
    if choice is not None:
        os.unlink(file)
    if not wanted:
        assert not [thread for thread in threading.enumerate() if "telemetry" in thread.name], name
        loaded = {"sending", "payload", "families"} & {item.rpartition(".")[2] for item in sys.modules
                                                       if item.startswith("memscale.telemetry")}
        assert not loaded or name == "no address", (name, loaded)
for thread in threading.enumerate():
    if thread.name == "memscale-telemetry":
        thread.join()
assert bool(sockets) == wanted
"""


@pytest.mark.parametrize("case", ["off", "on"])
def test_no_socket_is_opened_while_it_is_off(case: str, serve: Callable[..., Server], tmp_path: Path) -> None:
    """By import, wrap, training, detach, exit. While it is on one is, or the test could not fail."""
    server = serve(kept)
    dropped = ("MEMSCALE_TELEMETRY", "DO_NOT_TRACK", "CI", "JENKINS_URL", "TEAMCITY_VERSION", "TF_BUILD")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    variables |= {"XDG_CONFIG_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [
        sys.executable,
        "-W",
        "error::ResourceWarning",
        "-c",
        PROGRAM,
        case,
        f"{server.url}/api/v1/telemetry",
    ]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert server.received.qsize() == (case == "on")


def test_a_process_ends_while_a_server_is_silent(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(silent)
    code = """
import torch, memscale
model = torch.nn.Linear(8, 8)
memscale.wrap(model, sample_input=torch.randn(4, 8), enable_logging=False)
input()  # the server has the request, and the thread awaits the answer
"""
    ours = {"MEMSCALE_TELEMETRY_URL": server.url, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | ours, text=True, **pipes)
    server.received.get(timeout=120)
    out, error = process.communicate("\n", timeout=120)
    assert (process.returncode, out, error) == (0, "", "")
