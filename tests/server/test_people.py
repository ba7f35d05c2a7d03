# SPDX-License-Identifier: Apache-2.0
"""Who may what: setup, logins, sessions, other sites' pages, other people's projects, hostile names."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from server_process import PASSWORD, Client, Server, batch, begin_run, cookie_of, new_id, serving

HOSTILE = [
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "'; DROP TABLE run; --",
    "{{7*7}} ${7*7} %s %n",
    "\u202egnp.exe",
    "=cmd|'/c calc'!A1",
    "naïve 🚀 \\u003c \\\\ /../..",
]


def test_setup_is_once_and_by_its_link_alone(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        nobody = server.client()
        body = {"token": "0" * 64, "name": "eve", "password": PASSWORD}
        assert nobody.ask("POST", "/api/v1/setup", body).status == 403
        assert nobody.ask("GET", "/api/v1/setup").json == {"needed": True}
        ann = server.set_up()
        assert ann.ask("GET", "/api/v1/me").json["account"]["admin"] is True
        assert nobody.ask("GET", "/api/v1/setup").json == {"needed": False}
        body["token"] = server.setup_token or ""
        assert nobody.ask("POST", "/api/v1/setup", body).status == 403
        server.stop()
        server.start()
        assert server.setup_token is None
        assert server.log_in("ann").ask("GET", "/api/v1/me").status == 200


def test_weak_passwords_and_odd_names_are_refused(server: Server) -> None:
    for name, password, field in (
        ("Ann", PASSWORD, "name"),
        ("../x", PASSWORD, "name"),
        ("ann", "short", "password"),
    ):
        body = {"token": server.setup_token, "name": name, "password": password}
        answer = server.client().ask("POST", "/api/v1/setup", body)
        assert (answer.status, answer.json["error"]["field"]) == (400, field)
        assert password not in answer.body.decode()


def test_a_session_that_was_planted_is_not_taken_up(server: Server, ann: Client) -> None:
    planted = "memscale=" + "ab" * 32
    login = {"name": "ann", "password": PASSWORD}
    victim = server.client(cookie=planted).ask("POST", "/api/v1/login", login)
    assert victim.status == 200 and cookie_of(victim) != planted
    assert server.client(cookie=planted).ask("GET", "/api/v1/me").status == 401
    mine = cookie_of(victim)
    again = server.client(cookie=mine).ask("POST", "/api/v1/login", login)
    assert cookie_of(again) != mine
    assert (
        server.client(cookie=mine).ask("GET", "/api/v1/me").status == 401
    )  # the login has ended the old one


def test_logout_and_a_new_password_end_sessions(server: Server, ann: Client) -> None:
    other = server.log_in("ann")
    assert other.ask("POST", "/api/v1/logout").status == 204
    assert other.ask("GET", "/api/v1/me").status == 401
    other = server.log_in("ann")
    change = {"current": PASSWORD, "new": "another " + PASSWORD}
    changed = ann.ask("PUT", "/api/v1/me/password", change)
    assert changed.status == 200
    assert ann.ask("GET", "/api/v1/me").status == other.ask("GET", "/api/v1/me").status == 401
    assert server.client(cookie=cookie_of(changed)).ask("GET", "/api/v1/me").status == 200
    assert server.client().ask("POST", "/api/v1/login", {"name": "ann", "password": PASSWORD}).status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
    ids=str,
)
def test_other_sites_change_nothing(server: Server, ann: Client, headers: dict[str, str]) -> None:
    answer = ann.ask("POST", "/api/v1/projects", {"name": "forged"}, **headers)
    assert answer.status == 403
    assert ann.ask("GET", "/api/v1/projects").json == {"projects": []}
    login = {"name": "ann", "password": PASSWORD}
    assert server.client().ask("POST", "/api/v1/login", login, **headers).status == 403


def test_a_cookie_without_an_origin_changes_nothing(server: Server, ann: Client) -> None:
    bare = server.client(headers={"Cookie": ann.cookie or ""})
    assert bare.ask("GET", "/api/v1/me").status == 200
    assert bare.ask("POST", "/api/v1/projects", {"name": "forged"}).status == 403


def test_logins_are_throttled_but_nobody_is_locked_out(server: Server, ann: Client) -> None:
    wrong = {"name": "ann", "password": "wrong password"}
    statuses = [server.client().ask("POST", "/api/v1/login", wrong).status for _ in range(7)]
    assert statuses == [401] * 5 + [429] * 2
    refused = server.client().ask("POST", "/api/v1/login", {"name": "ann", "password": PASSWORD})
    assert refused.status == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
    assert ann.ask("GET", "/api/v1/me").status == 200  # who is in stays in
    assert server.client().ask("POST", "/api/v1/login", {"name": "bob", "password": "x"}).status == 401


def test_a_flood_of_logins_leaves_others_served(server: Server, ann: Client) -> None:
    statuses: list[int] = []

    def attempt(number: int) -> None:
        body = {"name": f"n{number}", "password": "x" * 256}
        statuses.append(server.client().ask("POST", "/api/v1/login", body).status)

    threads = [threading.Thread(target=attempt, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    served = [ann.ask("GET", "/api/v1/me").status for _ in range(10)]
    for thread in threads:
        thread.join()
    assert served == [200] * 10
    assert set(statuses) <= {401, 503} and 401 in statuses


def test_what_is_anothers_is_not_there(server: Server, ann: Client, tool: Client) -> None:
    run = begin_run(tool, "secret")
    assert tool.ask("POST", f"/api/v1/runs/{run}/batches", batch(1, [1], [1.0])).status == 200
    assert ann.ask("POST", "/api/v1/accounts", {"name": "bob", "password": PASSWORD}).status == 201
    bob = server.with_token(server.log_in("bob"), "admin")
    project = ann.ask("GET", "/api/v1/projects").json["projects"][0]["id"]
    token = ann.ask("GET", "/api/v1/tokens").json["tokens"][0]["id"]
    base = f"/api/v1/runs/{run}"
    attempts = [
        ("GET", f"/api/v1/projects/{project}/runs", None),
        ("GET", base, None),
        ("PATCH", base, {"name": "mine"}),
        ("DELETE", base, None),
        ("POST", base + "/batches", batch(2, [2], [2.0])),
        ("POST", base + "/heartbeat", None),
        ("POST", base + "/finish", {"state": "finished"}),
        ("GET", base + "/series", None),
        ("GET", base + "/points?series=loss", None),
        ("GET", base + "/events", None),
        ("GET", base + "/documents/plan", None),
        ("GET", base + "/live", None),
        ("GET", base + "/export?format=csv", None),
        ("DELETE", f"/api/v1/tokens/{token}", None),
    ]
    for method, path, body in attempts:
        answer = bob.ask(method, path, body)
        assert answer.status == 404, (method, path, answer)
        assert b"secret" not in answer.body
    assert bob.ask("POST", "/api/v1/runs", {"id": new_id(), "project": "secret"}).status == 404  # no team
    assert bob.ask("GET", "/api/v1/accounts").status == 403
    assert [p["name"] for p in bob.ask("GET", "/api/v1/projects").json["projects"]] == []
    assert tool.ask("GET", base).json["version"] == 1


def test_tokens_do_what_their_scope_says(server: Server, ann: Client) -> None:
    reader = server.with_token(ann, "read")
    sender = server.with_token(ann, "ingest")
    run = begin_run(sender)
    assert reader.ask("POST", "/api/v1/runs", {"id": "r" * 10, "project": "p"}).status == 403
    assert sender.ask("GET", f"/api/v1/runs/{run}").status == 403
    assert reader.ask("GET", f"/api/v1/runs/{run}").status == 200
    assert reader.ask("DELETE", f"/api/v1/runs/{run}").status == 403
    assert reader.ask("POST", "/api/v1/tokens", {"name": "more", "scopes": ["admin"]}).status == 403
    listed = ann.ask("GET", "/api/v1/tokens")
    assert reader.token is not None and reader.token[-64:] not in listed.body.decode()
    known = {token["id"]: token for token in listed.json["tokens"]}
    assert known[reader.token[3:19]]["used_ms"] is not None
    assert ann.ask("DELETE", f"/api/v1/tokens/{reader.token[3:19]}").status == 204
    assert reader.ask("GET", f"/api/v1/runs/{run}").status == 401


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(server: Server, tool: Client, name: str) -> None:
    run = begin_run(tool, name, name)
    body = batch(1, [1], [1.0], name)
    body["events"] = [{"kind": "oom", "text": name, "data": {name: name}}]
    body["documents"] = {"plan": {name: name}}
    assert tool.ask("POST", f"/api/v1/runs/{run}/batches", body).status == 200
    project = tool.ask("GET", "/api/v1/projects").json["projects"][0]
    runs = tool.ask("GET", f"/api/v1/projects/{project['id']}/runs")
    series = tool.ask("GET", f"/api/v1/runs/{run}/series")
    events = tool.ask("GET", f"/api/v1/runs/{run}/events")
    for answer in (runs, series, events):
        assert answer.headers["content-type"] == "application/json"
    for answer in (runs, series):
        assert b"<" not in answer.body and b">" not in answer.body
    assert project["name"] == runs.json["runs"][0]["name"] == series.json["series"][0]["name"] == name
    assert (events.json["events"][0]["text"], events.json["events"][0]["data"]) == (name, {name: name})
    assert tool.ask("GET", f"/api/v1/runs/{run}/documents/plan").json == {name: name}


def test_nothing_of_a_secret_is_on_disk(server: Server, ann: Client, tool: Client) -> None:
    server.stop()
    kept = b"".join(path.read_bytes() for path in server.folder.iterdir())
    assert tool.token is not None and ann.cookie is not None
    for secret in (PASSWORD, tool.token[-64:], ann.cookie.partition("=")[2], server.setup_token or ""):
        assert secret.encode() not in kept
    assert (server.folder / "memscale.db").stat().st_mode & 0o077 == 0
