# SPDX-License-Identifier: Apache-2.0
"""What is recorded, and how it gets to a server: each batch once, whatever happens on the way."""

from __future__ import annotations

import json
import math
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memscale
from memscale import _core
from memscale.recording.current import CURRENT
from memscale.recording.delivery import Delivery
from memscale.recording.places import (
    Target,
    name_of,
    record_setting,
    spool_folder,
    target_of,
)
from memscale.recording.run import Run
from memscale.recording.run_folder import RunFolder, RunInfo, run_folders
from memscale.recording.server import Backoff, Server, UnreachableError
from memscale.recording.sync import sync
from memscale.recording.tokens import keep_token, token_file, token_for
from record_server import (
    TOKEN,
    Store,
    broken,
    cut_before_the_answer,
    error,
    serving,
    silent,
    slow_drip,
)

STEPS = 50


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MEMSCALE_TOKEN", TOKEN)
    for name in (
        "MEMSCALE_RECORD",
        "MEMSCALE_RUN",
        "RANK",
        "HTTPS_PROXY",
        "HTTP_PROXY",
        "http_proxy",
        "https_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    yield
    if CURRENT.run is not None:
        CURRENT.release()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "memscale sender"]


def recorded(run: Run, steps: int = STEPS) -> None:
    for step in range(steps):
        run.values(step, {"loss": step / 8, "x/y": -step})
    run.event("oom", "memory has run out", 3, asked_bytes=7)
    run.document("plan", {"a": 1})


def folder_of(root: Path) -> RunFolder:
    (only,) = run_folders(root)
    return only


def everything(root: Path) -> tuple[list[tuple[int, float]], int, dict[str, Any]]:
    """Loss by step, the number of events and the documents that the spools of a folder hold."""
    points: list[tuple[int, float]] = []
    events, documents = 0, {}
    folder = folder_of(root)
    for client in folder.clients():
        for number in folder.segments(client):
            spool = _core.Spool(folder.segment(client, number))
            while spool.next() is not None:
                body = json.loads(spool.body(client))
                for item in body.get("points", []):
                    if item["series"] == "loss":
                        points += zip(item["steps"], item["values"], strict=True)
                events += len(body.get("events", []))
                documents |= body.get("documents", {})
    return points, events, documents


class TestFolder:
    def test_a_folder_has_what_was_recorded(self, tmp_path: Path) -> None:
        run = Run(target_of(str(tmp_path / "runs")))
        recorded(run)
        run.close("finished")
        points, events, documents = everything(tmp_path / "runs")
        assert points == [(step, step / 8) for step in range(STEPS)]
        assert (events, documents) == (1, {"plan": {"a": 1}})

    def test_nothing_recorded_leaves_nothing(self, tmp_path: Path) -> None:
        run = Run(target_of(str(tmp_path / "runs")))
        run.event("plan", "waits for the first step")
        run.close("finished")
        assert not (tmp_path / "runs").exists()

    def test_what_came_before_the_first_step_is_there(self, tmp_path: Path) -> None:
        run = Run(target_of(str(tmp_path)))
        run.event("plan", "a plan")
        run.document("config", {"mode": "balanced"})
        run.values(0, {"loss": 1.0})
        run.close("finished")
        assert everything(tmp_path)[1:] == (1, {"config": {"mode": "balanced"}})

    def test_a_closed_run_takes_nothing_and_says_nothing(self, tmp_path: Path) -> None:
        run = Run(target_of(str(tmp_path)))
        recorded(run)
        run.close("finished")
        recorded(run)
        run.close("failed")
        assert len(everything(tmp_path)[0]) == STEPS
        assert not folder_of(tmp_path).is_live(folder_of(tmp_path).clients()[0])

    def test_one_run_goes_on_in_another_process(self, tmp_path: Path) -> None:
        first = Run(target_of(str(tmp_path)))
        first.values(0, {"loss": 0.0})
        first.close("failed")
        second = Run(target_of(str(tmp_path)))
        second.resume(first.id, 1, 0)
        second.values(1, {"loss": 1.0})
        second.close("finished")
        assert (second.id, second.attempt) == (first.id, 1)
        points, events, _ = everything(tmp_path)
        assert points == [(0, 0.0), (1, 1.0)]
        assert events == 1  # that of the attempt
        assert folder_of(tmp_path).info().attempts == 2

    def test_an_open_run_stays_what_it_is(self, tmp_path: Path) -> None:
        run = Run(target_of(str(tmp_path)))
        run.values(0, {"loss": 0.0})
        before = run.id
        run.resume("another_run", 4, 9)
        assert (run.id, run.attempt, run.step) == (before, 0, -1)
        run.close("finished")

    def test_the_environment_names_the_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MEMSCALE_RUN", "my_run-17")
        for _ in range(2):
            run = Run(target_of(str(tmp_path)))
            run.values(0, {"loss": 0.0})
            run.close("finished")
        assert folder_of(tmp_path).path.name == "my_run-17"
        assert folder_of(tmp_path).info().attempts == 2

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_read_only_folder_is_one_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        tmp_path.chmod(0o500)
        self.refused(tmp_path / "runs", caplog)

    def test_a_file_in_place_of_the_folder_is_one_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "runs").write_text("")
        self.refused(tmp_path / "runs", caplog)

    def refused(self, root: Path, caplog: pytest.LogCaptureFixture) -> None:
        run = Run(target_of(str(root)))
        recorded(run)
        run.close("finished")
        assert len([item for item in caplog.records if item.levelname == "WARNING"]) == 1

    def test_a_forked_child_records_nothing(self, tmp_path: Path) -> None:
        CURRENT.hold(str(tmp_path))
        memscale.record("loss", 0.0, step=0)
        child = os.fork()
        if child == 0:
            memscale.record("loss", 1.0, step=1)
            os._exit(0 if CURRENT.run is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        memscale.record("loss", 2.0, step=2)
        CURRENT.release()
        assert everything(tmp_path)[0] == [(0, 0.0), (2, 2.0)]


class TestRecord:
    def test_without_a_run_it_does_nothing(self, tmp_path: Path) -> None:
        memscale.record("loss", 1.0)
        memscale.record({"a": object()})
        assert CURRENT.run is None

    def test_numbers_notes_and_parameters(self, tmp_path: Path) -> None:
        run = CURRENT.hold(str(tmp_path))
        assert run is not None
        memscale.record("loss", 0.5, step=4)
        memscale.record({"loss": True, "n": 3})
        memscale.record("why", "because")
        memscale.record(params={"lr": 0.1, "shape": (1, 2)})
        CURRENT.release()
        points, events, documents = everything(tmp_path)
        assert points == [(4, 0.5), (0, 1)]
        assert events == 1
        assert documents == {"params": {"lr": 0.1, "shape": "(1, 2)"}}

    @pytest.mark.parametrize(
        "bad", [{"memory/peak": 1.0}, {"": 1.0}, {"a\nb": 1.0}, {"x" * 129: 1.0}, {3: 1.0}]
    )
    def test_bad_names_are_one_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: dict[Any, float]
    ) -> None:
        CURRENT.hold(str(tmp_path))
        memscale.record({**bad, "loss": 2.0}, step=1)
        memscale.record({**bad, "loss": 3.0}, step=2)
        CURRENT.release()
        assert everything(tmp_path)[0] == [(1, 2.0), (2, 3.0)]
        assert len([item for item in caplog.records if item.levelname == "WARNING"]) == 1

    @pytest.mark.parametrize("bad", [object(), [1, 2], None, {}, 1j])
    def test_bad_values_raise_nothing(self, tmp_path: Path, bad: object) -> None:
        CURRENT.hold(str(tmp_path))
        memscale.record("loss", bad)
        memscale.record("loss", 1.0, step=2**70)
        CURRENT.release()
        assert not list(tmp_path.glob("*/*.spool")) or everything(tmp_path)[0] == []

    def test_infinities_and_nan_are_strings(self, tmp_path: Path) -> None:
        CURRENT.hold(str(tmp_path))
        for step, value in enumerate((math.nan, math.inf, -math.inf)):
            memscale.record("loss", value, step=step)
        CURRENT.release()
        assert everything(tmp_path)[0] == [(0, "NaN"), (1, "Infinity"), (2, "-Infinity")]

    def test_the_environment_asks_for_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MEMSCALE_RECORD", str(tmp_path))
        memscale.record("loss", 1.0)
        CURRENT.release()
        assert everything(tmp_path)[0] == [(0, 1.0)]

    def test_other_ranks_record_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "1")
        assert CURRENT.hold(str(tmp_path)) is None
        monkeypatch.setenv("MEMSCALE_RECORD_RANK", "1")
        assert CURRENT.hold(str(tmp_path)) is not None

    def test_many_threads_record(self, tmp_path: Path) -> None:
        CURRENT.hold(str(tmp_path))

        def some(number: int) -> None:
            for step in range(200):
                memscale.record("loss", float(step), step=number * 1000 + step)

        threads = [threading.Thread(target=some, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        CURRENT.release()
        assert sorted(step for step, _ in everything(tmp_path)[0]) == [
            number * 1000 + step for number in range(8) for step in range(200)
        ]


class TestPlaces:
    def test_targets(self) -> None:
        found = target_of("http://localhost:8080/my%20project/")
        assert (found.url, found.root, found.project) == (
            "http://localhost:8080",
            spool_folder(),
            "my project",
        )
        assert target_of("runs") == Target(
            "", Path("runs"), found.project if False else target_of("x").project
        )

    def test_names_are_what_a_server_takes(self) -> None:
        assert name_of(" a\nb ") == "a b"
        assert len(name_of("ä" * 200).encode()) <= 128

    @pytest.mark.parametrize(("word", "found"), [("off", None), ("0", None), ("", None), ("there", "there")])
    def test_the_environment_overrides(
        self, monkeypatch: pytest.MonkeyPatch, word: str, found: str | None
    ) -> None:
        assert record_setting("here") == "here"
        monkeypatch.setenv("MEMSCALE_RECORD", word)
        assert record_setting("here") == found


class TestServer:
    def test_all_arrives(self) -> None:
        store = Store()
        with serving(store) as server:
            run = Run(target_of(f"{server.url}/demo"), "a name")
            recorded(run)
            run.close("finished", 20)
        kept = store.run
        assert not store.problems
        assert kept.about["project"] == "demo" and kept.about["name"] == "a name"
        assert kept.points("loss") == [(step, step / 8) for step in range(STEPS)]
        assert [event["kind"] for event in kept.events] == ["oom"]
        assert kept.documents == {"plan": {"a": 1}}
        assert kept.state == "finished"
        assert run_folders(spool_folder()) == []  # nothing waits any more

    def test_batches_arrive_while_it_runs(self) -> None:
        store = Store()
        with serving(store) as server:
            run = Run(target_of(server.url))
            run.values(0, {"loss": 0.0})
            server.await_requests(2)  # the run, and its first batch
            run.values(1, {"loss": 1.0})
            run.close("failed", 20)
        assert store.run.points("loss") == [(0, 0.0), (1, 1.0)]
        assert store.run.state == "failed"

    @pytest.mark.parametrize("fault", [silent, broken, slow_drip, cut_before_the_answer])
    def test_a_server_that_fails_gets_all_of_it_later(self, fault: Any) -> None:
        store = Store()
        with serving(store, fault) as server:
            run = Run(target_of(server.url))
            recorded(run)
            server.await_requests(1)
            run.close("finished", 0.3)
            url = server.url
        self.arrives(store, url)

    def test_a_server_that_is_down_gets_all_of_it_later(self) -> None:
        store = Store()
        with serving(store) as server:
            url = server.url
        run = Run(target_of(url))
        recorded(run)
        run.close("finished", 2)
        assert store.runs == {}
        self.arrives(store, url)

    def arrives(self, store: Store, url: str) -> None:
        """All of it is at another server of this address after a `sync`, once."""
        with serving(store, port=int(url.rpartition(":")[2])):
            (found,) = sync(spool_folder(), patience=60)
        assert found.is_there and not store.problems
        assert store.run.points("loss") == [(step, step / 8) for step in range(STEPS)]
        assert len(store.run.events) == 1 and store.run.state == "finished"
        assert run_folders(spool_folder()) == []

    def test_a_server_that_restarts_gets_each_batch_once(self) -> None:
        store = Store()
        with serving(store, cut_before_the_answer) as server:
            run = Run(target_of(server.url))
            run.values(0, {"loss": 0.0})
            server.await_requests(2)
            port = server.server_address[1]
        with serving(store, port=port):
            run.values(1, {"loss": 1.0})
            run.close("finished", 30)
            [*sync(spool_folder(), patience=60)]
        assert store.run.points("loss") == [(0, 0.0), (1, 1.0)]
        assert store.run.state == "finished"

    def test_a_wrong_token_is_one_warning(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("MEMSCALE_TOKEN", "ms_" + "1" * 16 + "_" + "2" * 64)
        store = Store()
        with serving(store) as server:
            run = Run(target_of(server.url))
            recorded(run)
            server.await_requests(1)
            run.close("finished", 5)
            (warning,) = [item.getMessage() for item in caplog.records if item.levelname == "WARNING"]
            assert "memscale login" in warning and "2222" not in warning
            monkeypatch.setenv("MEMSCALE_TOKEN", TOKEN)
            (found,) = sync(spool_folder())
        assert found.is_there and len(store.run.points("loss")) == STEPS

    def test_later_means_later(self) -> None:
        store, asked = Store(), []

        def busy(handler: Any) -> bool:
            asked.append(handler.path)
            if len(asked) > 2:
                return False
            handler.answer(*error(429, "later", "not now"), headers={"Retry-After": "0"})
            return True

        with serving(store, busy) as server:
            folder = spooled(server.url)
            delivery = Delivery(folder, Server(server.url, TOKEN))
            assert not delivery.advance() and delivery.wait > 0 and "429" in delivery.sent.problem
            assert not delivery.advance() and delivery.wait > 0
            while delivery.advance():
                pass
            assert delivery.sent.problem == ""
        assert len(store.run.points("loss")) == STEPS

    def test_a_batch_that_is_refused_is_passed_over(self) -> None:
        store = Store()

        def choosy(handler: Any) -> bool:
            if b'"sequence":0' not in handler.body:
                return False
            handler.answer(*error(400, "invalid", "no"))
            return True

        with serving(store, choosy) as server:
            folder = spooled(server.url, batches=3)
            delivery = Delivery(folder, Server(server.url, TOKEN))
            while delivery.advance():
                pass
        assert delivery.sent.refused == 1 and len(store.run.batches) == 2
        delivery.clean_up()
        assert run_folders(spool_folder())  # what was refused is not thrown away

    def test_two_that_sync_at_once_send_nothing_twice(self) -> None:
        store = Store()
        with serving(store) as server:
            folders = [spooled(server.url, batches=4) for _ in range(4)]
            results: list[list[Any]] = [[], []]
            threads = [
                threading.Thread(target=lambda found=found: found.extend(sync(spool_folder())))
                for found in results
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(store.runs) == len(folders)
        assert all(
            run.duplicates == 0 and len(run.points("loss")) == 4 * STEPS for run in store.runs.values()
        )

    def test_without_a_cursor_all_is_sent_again_and_nothing_doubled(self) -> None:
        store = Store()
        with serving(store) as server:
            folder = spooled("", batches=3)
            for _ in range(2):
                found = [*sync(folder.path, server.url)]
                assert [item.is_there for item in found] == [True]
                assert folder.path.exists()  # a folder is the record, and stays
                for path in folder.path.glob("*.sent"):
                    path.unlink()
        assert store.run.duplicates == 3
        assert len(store.run.points("loss")) == 3 * STEPS

    def test_a_killed_process_leaves_what_it_had(self, tmp_path: Path) -> None:
        store = Store()
        with serving(store) as server:
            for _ in range(3):
                points = self.killed(server.url)
            found = [*sync(spool_folder())]
        assert all(item.is_there for item in found)
        assert len(store.runs) == 3 and not store.problems
        for kept in store.runs.values():
            steps = [step for step, _ in kept.points("loss")]
            assert steps == [*range(len(steps))] and len(steps) >= points
            assert kept.state == "running"  # nobody has said otherwise: the server finds it lost

    def killed(self, url: str) -> int:
        """Steps that a process had recorded for sure when it was killed in the middle of more."""
        program = (
            "import sys, memscale; from memscale.recording.current import CURRENT\n"
            "for step in range(10**9):\n"
            "    memscale.record('loss', step / 8, step=step)\n"
            "    if step == 300: CURRENT.run._recorder.flush(30.0); print('x', flush=True)\n"
        )
        environment = {**os.environ, "MEMSCALE_RECORD": url}
        with subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        return 301

    def test_a_wrong_certificate_is_no_server(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        ssl = pytest.importorskip("ssl")
        made = subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
             "-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "cert.pem"],
            cwd=tmp_path, capture_output=True, check=False,
        )  # fmt: skip
        if made.returncode:
            pytest.skip("openssl makes no certificate here")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
        store = Store()
        with serving(store, context=context) as server:
            run = Run(target_of(server.url.replace("http:", "https:")))
            recorded(run)
            run.close("finished", 5)
        assert store.runs == {} and "CERTIFICATE_VERIFY_FAILED" in caplog.text
        assert len(everything(spool_folder())[0]) == STEPS

    def test_a_file_that_is_begun_is_no_trouble(self) -> None:
        store = Store()
        with serving(store) as server:
            folder = spooled(server.url)
            folder.segment("1-test", 1).touch()
            delivery = Delivery(folder, Server(server.url, TOKEN), {"1-test"})
            while delivery.advance():
                pass
        assert store.run.points("loss") and not delivery.sent.problem

    def test_a_file_that_is_thinned_while_it_is_sent(self) -> None:
        store, rows = Store(), 4000
        folder = RunFolder(spool_folder() / "thinned_run")
        folder.begin(RunInfo("thinned_run", "demo", "a run", 1))
        recorder = _core.Recorder(folder.path, "1-a", segment_bytes=8192, cap_bytes=32768, batch_seconds=60.0)
        with serving(store) as server:
            delivery = Delivery(folder, Server(server.url, TOKEN), {"1-a"})
            for step in range(rows):
                recorder.row(step, step, {"loss": step / 8})
                if step % 40 == 39:
                    assert recorder.flush(30.0)
                if step in (199, 399):  # two batches of the first file, which loses rows soon
                    assert delivery.advance()
            assert recorder.end("finished") and recorder.flush(30.0)
            dropped = recorder.figures()["dropped_rows"]
            recorder.close()
            delivery.own.clear()
            while delivery.advance():
                pass
        steps = [step for step, _ in store.run.points("loss")]
        assert dropped > rows / 4 and store.run.duplicates == 0 and not store.problems
        assert steps[:80] == [*range(80)] and steps[-1] == rows - 1 and len({*steps}) == len(steps)
        assert rows - dropped <= len(steps) < rows and store.run.state == "finished"


def spooled(url: str, batches: int = 1) -> RunFolder:
    """A finished run that waits for a server, or is in a folder."""
    run_id = os.urandom(8).hex()
    folder = RunFolder(spool_folder() / run_id)
    folder.begin(RunInfo(run_id, "demo", "a run", 1, url))
    recorder = _core.Recorder(folder.path, "1-test")
    for batch in range(batches):
        for step in range(batch * STEPS, (batch + 1) * STEPS):
            recorder.row(step, step, {"loss": step / 8})
        assert recorder.flush(30.0)
    recorder.end("finished")
    recorder.close()
    return folder


class TestClient:
    def test_nobody_answers(self) -> None:
        with serving(Store()) as server:
            url = server.url
        with pytest.raises(UnreachableError):
            Server(url).request("GET", "/api/v1/me")

    @pytest.mark.parametrize("fault", [silent, slow_drip])
    def test_an_answer_has_a_time(self, fault: Any) -> None:
        with serving(Store(), fault) as server, pytest.raises(UnreachableError):
            Server(server.url).request("GET", "/api/v1/me", seconds=0.2)

    def test_a_request_can_be_given_up(self) -> None:
        with serving(Store(), silent) as server:
            client = Server(server.url)
            errors: list[Exception] = []

            def ask() -> None:
                try:
                    client.request("GET", "/")
                except UnreachableError as error:
                    errors.append(error)

            thread = threading.Thread(target=ask)
            thread.start()
            server.await_requests(1)
            client.abort()
            thread.join(30)
            assert not thread.is_alive() and len(errors) == 1

    def test_a_connection_is_kept_and_made_again(self) -> None:
        with serving(Store()) as server:
            client = Server(server.url, TOKEN)
            assert client.request("GET", "/api/v1/me").is_ok
            assert client.request("GET", "/api/v1/me").is_ok
            assert len(server.connections) == 1
            server.connections[0].shutdown(2)
            assert client.request("GET", "/api/v1/me").is_ok
            client.close()

    def test_the_proxy_of_the_environment_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store, paths = Store(), []

        def proxy(handler: Any) -> bool:
            paths.append(handler.path)
            handler.answer(200, {})
            return True

        with serving(store, proxy) as server:
            monkeypatch.setenv("http_proxy", server.url.replace("http://", "http://me:word@"))
            assert Server("http://far.invalid:99").request("GET", "/api/v1/me").is_ok
            monkeypatch.setenv("no_proxy", "far.invalid")
            with pytest.raises(UnreachableError):
                Server("http://far.invalid:99").request("GET", "/api/v1/me")
        assert paths == ["http://far.invalid:99/api/v1/me"]

    def test_waits_grow_to_a_minute(self) -> None:
        backoff = Backoff()
        waits = [backoff.bad() for _ in range(12)]
        assert all(0.5 * 2 ** min(i, 6) <= wait <= min(60, 2**i) or i >= 6 for i, wait in enumerate(waits))
        assert 30 <= waits[-1] <= 60
        assert backoff.bad(10**6) == 60
        backoff.good()
        assert backoff.bad() <= 1
        assert backoff.bad(7) == 7


class TestTokens:
    def test_a_token_is_for_its_user_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MEMSCALE_TOKEN")
        assert token_for("http://a") == ""
        keep_token("http://a", TOKEN)
        keep_token("http://b", TOKEN.replace("0a", "1b"))
        assert (
            token_for("http://a") == TOKEN and token_for("http://b") != TOKEN and token_for("http://c") == ""
        )
        assert stat.S_IMODE(token_file().stat().st_mode) == 0o600
        assert stat.S_IMODE(token_file().parent.stat().st_mode) == 0o700

    def test_a_damaged_file_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MEMSCALE_TOKEN")
        token_file().parent.mkdir(parents=True)
        token_file().write_text("[1, 2")
        assert token_for("http://a") == ""
        token_file().write_text('{"http://a": "word"}')
        assert token_for("http://a") == ""


def test_modules_that_send_need_no_torch() -> None:
    program = (
        "import sys, memscale.recording.sync, memscale.recording.current; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
