# SPDX-License-Identifier: Apache-2.0
"""What was acknowledged is there, once, however the process ends; a full disk breaks nothing."""

from __future__ import annotations

import http.client
import resource
import threading
from pathlib import Path
from random import Random

import pytest
from server_process import Client, Server, batch, begin_run, serving

KILLS = 6
SENDERS = 4


class Sender(threading.Thread):
    """Sends batches until the server is gone; each not acknowledged is sent once more to the next server."""

    def __init__(self, token: str, run: str, number: int) -> None:
        super().__init__()
        self.token, self.run_id, self.name_ = token, run, f"c{number}"
        self.acknowledged = 0  # batches 0 … n-1 were answered with 200
        self.begun = 0
        self.port = 0
        self.wrong: list[object] = []

    def aim(self, port: int) -> Sender:
        again = Sender(self.token, self.run_id, 0)
        again.name_, again.acknowledged, again.begun, again.port = (
            self.name_,
            self.acknowledged,
            self.begun,
            port,
        )
        return again

    def run(self) -> None:
        client = Client(self.port, token=self.token)
        path = f"/api/v1/runs/{self.run_id}/batches"
        try:
            while True:
                number = self.acknowledged
                self.begun = max(self.begun, number + 1)
                steps = [3 * number, 3 * number + 1, 3 * number + 2]
                answer = client.ask(
                    "POST", path, batch(number, steps, [float(s) for s in steps], self.name_, self.name_)
                )
                if answer.status != 200:
                    self.wrong.append(answer)
                    return
                self.acknowledged += 1
        except (OSError, http.client.HTTPException):
            client.close()


def points_of(client: Client, run: str) -> dict[str, list[int]]:
    whole = client.ask("GET", f"/api/v1/runs/{run}/export?format=json").json
    return {series["name"]: [point[0] for point in series["points"]] for series in whole["series"]}


def test_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    random = Random(5)
    server = Server(tmp_path / "data").start()
    tool = server.with_token(server.set_up(), "admin")
    assert tool.token is not None
    run = begin_run(tool)
    senders = [Sender(tool.token, run, i) for i in range(SENDERS)]
    for _ in range(KILLS):
        senders = [sender.aim(server.port) for sender in senders]
        wanted = sum(s.acknowledged for s in senders) + random.randrange(1, 60)
        for sender in senders:
            sender.start()
        while sum(s.acknowledged for s in senders) < wanted and any(s.is_alive() for s in senders):
            pass
        server.kill()
        for sender in senders:
            sender.join()
        assert not any(sender.wrong for sender in senders)
        server.start()
    got = points_of(server.client(token=tool.token), run)
    for sender in senders:
        steps = got.get(sender.name_, [])
        assert steps == sorted(set(steps)), "a point is there twice"
        assert len(steps) >= 3 * sender.acknowledged, "an acknowledged point is lost"
        assert len(steps) <= 3 * sender.begun
        assert steps == list(range(len(steps))) and len(steps) % 3 == 0, "half a batch"
    server.stop()


def test_the_same_batch_many_times_at_once(server: Server, tool: Client) -> None:
    run = begin_run(tool)
    answers = []

    def send() -> None:
        client = Client(server.port, token=tool.token)
        answers.append(client.ask("POST", f"/api/v1/runs/{run}/batches", batch(7, [1, 2], [1, 2])).json)
        client.close()

    threads = [threading.Thread(target=send) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer["duplicate"] for answer in answers) == [False] + [True] * 11
    assert points_of(tool, run) == {"loss": [1, 2]}


def test_thirty_two_writers(server: Server, tool: Client) -> None:
    run = begin_run(tool)
    failures: list[object] = []

    def write(number: int) -> None:
        client = Client(server.port, token=tool.token)
        for i in range(10):
            steps = list(range(100 * i, 100 * (i + 1)))
            body = batch(i, steps, steps, f"s{number}", f"c{number}")
            answer = client.ask("POST", f"/api/v1/runs/{run}/batches", body)
            if answer.status != 200 or answer.json["duplicate"]:
                failures.append(answer)
        client.close()

    threads = [threading.Thread(target=write, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    listed = tool.ask("GET", f"/api/v1/runs/{run}/series").json["series"]
    assert [(s["count"], s["max"]) for s in listed] == [(1000, 999)] * 32
    assert tool.ask("GET", f"/api/v1/runs/{run}").json["version"] == 320


def _fill(tool: Client, run: str) -> tuple[int, int]:
    """Sends until something is refused; returns how many were taken, and the status that ended it."""
    for number in range(3000):
        steps = list(range(200 * number, 200 * (number + 1)))
        values = [((step * 2654435761) % 2**32) / 7 for step in steps]  # which pack badly
        answer = tool.ask("POST", f"/api/v1/runs/{run}/batches", batch(number, steps, values))
        if answer.status != 200:
            return number, answer.status
    return 3000, 200


def test_a_full_disk_refuses_and_recovers(server: Server, tool: Client) -> None:
    run = begin_run(tool)
    assert server.process is not None
    # No file of the process may grow beyond this: writes fail as they do on a full disk.
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    taken, status = _fill(tool, run)
    assert status == 507 and taken > 0
    refused = tool.ask("POST", f"/api/v1/runs/{run}/batches", batch(taken, [1], [1.0]))
    if refused.status != 200:  # a smaller batch may still find room
        assert refused.status == 507
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json["error"]["code"] == "full"
    assert tool.ask("GET", f"/api/v1/runs/{run}/series").json["series"][0]["count"] >= 200 * taken
    resource.prlimit(
        server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert tool.ask("GET", "/readyz").status == 200
    again = tool.ask("POST", f"/api/v1/runs/{run}/batches", batch(5000, [10**6], [1.0]))
    assert again.status == 200 and not again.json["duplicate"]
    steps = points_of(tool, run)["loss"]
    assert steps[: 200 * taken] == list(range(200 * taken))


def test_a_quota_refuses(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--max-bytes", "1M") as server:
        tool = server.with_token(server.set_up(), "admin")
        run = begin_run(tool)
        taken, status = _fill(tool, run)
        assert status == 507 and taken > 0
        assert len(points_of(tool, run)["loss"]) == 200 * taken
        assert tool.ask("DELETE", f"/api/v1/runs/{run}").status in (204, 507)


def test_a_second_server_is_refused(server: Server) -> None:
    with pytest.raises(AssertionError, match="another server"):
        Server(server.folder).start()
