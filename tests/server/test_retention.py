# SPDX-License-Identifier: Apache-2.0
"""How long runs are kept: what a rule would do is what it does; pinned ones stay; purges; deletions."""

from __future__ import annotations

import sqlite3
from typing import Any

from server_process import Client, Server, batch, begin_run

DAY_MS = 86_400_000


def aged(server: Server, ages: dict[str, int]) -> None:
    """Sets how many days ago runs were last heard of, in the file of a server that is stopped meanwhile."""
    server.stop()
    with sqlite3.connect(server.folder / "memscale.db") as db:
        for run, days in ages.items():
            db.execute("UPDATE run SET seen_ms = seen_ms - ? WHERE uid = ?", (days * DAY_MS, run))
    db.close()
    server.start()


def state(client: Client, run: str) -> str:
    answer = client.ask("GET", f"/api/v1/runs/{run}")
    if answer.status == 404:
        return "gone"
    return "archived" if answer.json["archived"] else "open"


def wait(client: Client, wanted: dict[str, str]) -> None:
    """Until the background has done its work; the test's own limit ends what does not come."""
    while {run: state(client, run) for run in wanted} != wanted:
        pass


def project_of(client: Client, run: str) -> str:
    return f"/api/v1/projects/{client.ask('GET', f'/api/v1/runs/{run}').json['project']}"


def test_a_rule_does_what_it_says_before(server: Server, tool: Client) -> None:
    names = ["new", "month", "pinned", "year", "old_pinned", "old_archived"]
    runs = {name: begin_run(tool, "p", name) for name in names}
    assert tool.ask("POST", f"/api/v1/runs/{runs['year']}/batches", batch(1, [1], [1])).status == 200
    for name in ("pinned", "old_pinned"):
        assert tool.ask("PATCH", f"/api/v1/runs/{runs[name]}", {"pinned": True}).json["pinned"] is True
    assert tool.ask("PATCH", f"/api/v1/runs/{runs['old_archived']}", {"archived": True}).status == 200
    path = project_of(tool, runs["new"])
    token = tool.token
    ages = {"month": 31, "pinned": 31, "year": 400, "old_pinned": 400, "old_archived": 400}
    aged(server, {runs[name]: days for name, days in ages.items()})
    tool = server.client(token=token)
    would = tool.ask("GET", path + "/retention?archive_days=30&delete_days=365").json
    assert (would["archives"], would["deletes"], would["pinned"]) == (1, 2, 2)
    assert [run["name"] for run in would["archived_first"]] == ["month"]
    assert sorted(run["name"] for run in would["deleted_first"]) == ["old_archived", "year"]
    assert tool.ask("GET", path + "/retention").json["deletes"] == 0  # without a rule nothing goes
    assert [state(tool, runs[name]) for name in names] == ["open"] * 5 + ["archived"]
    rule = {"archive_days": 30, "delete_days": 365}
    changed = tool.ask("PATCH", path, rule).json
    assert (changed["archive_days"], changed["delete_days"]) == (30, 365)
    wait(tool, {runs["month"]: "archived", runs["year"]: "gone", runs["old_archived"]: "gone"})
    assert [state(tool, runs[name]) for name in ("new", "pinned", "old_pinned")] == ["open"] * 3
    entries: Any = tool.ask("GET", "/api/v1/teams/1/audit").json["entries"]
    by_rule = sorted((e["action"], e["detail"]) for e in entries if e["by"] is None)
    assert by_rule == [("run.archive", "month"), ("run.delete", "old_archived"), ("run.delete", "year")]
    assert tool.ask("PATCH", path, {"archive_days": None}).json["archive_days"] is None
    assert tool.ask("GET", path).json["delete_days"] == 365


def test_a_rule_that_nobody_changed_is_kept_after_a_start(server: Server, tool: Client) -> None:
    run = begin_run(tool)
    assert tool.ask("PATCH", project_of(tool, run), {"delete_days": 1}).status == 200
    token = tool.token
    aged(server, {run: 2})
    wait(server.client(token=token), {run: "gone"})


def test_a_purge_takes_what_was_archived(server: Server, tool: Client) -> None:
    runs = [begin_run(tool, "p", str(i)) for i in range(130)]  # more than one step
    for run in runs[10:]:
        assert tool.ask("PATCH", f"/api/v1/runs/{run}", {"archived": True}).status == 200
    assert tool.ask("PATCH", f"/api/v1/runs/{runs[10]}", {"pinned": True}).status == 200
    assert tool.ask("PATCH", f"/api/v1/runs/{runs[11]}", {"archived": False}).status == 200
    path = project_of(tool, runs[0])
    assert tool.ask("POST", path + "/purge").status == 204
    wait(tool, {run: "gone" for run in runs[12:]})
    assert state(tool, runs[10]) == "archived"
    assert {state(tool, run) for run in [*runs[:10], runs[11]]} == {"open"}
    later = runs[0]
    assert tool.ask("PATCH", f"/api/v1/runs/{later}", {"archived": True}).status == 200
    assert state(tool, later) == "archived"  # one purge, not a rule


def test_a_deleted_project_is_gone_at_once(server: Server, tool: Client) -> None:
    runs = [begin_run(tool, "p") for _ in range(5)]
    assert tool.ask("PATCH", f"/api/v1/runs/{runs[0]}", {"pinned": True}).status == 200
    path = project_of(tool, runs[0])
    assert tool.ask("DELETE", path).status == 204
    assert [state(tool, run) for run in runs] == ["gone"] * 5
    assert tool.ask("GET", path).status == 404
    assert tool.ask("POST", f"/api/v1/runs/{runs[1]}/batches", batch(1, [1], [1])).status == 404
    assert tool.ask("GET", "/api/v1/projects").json == {"projects": []}
    again = begin_run(tool, "p")  # the name is free
    assert state(tool, again) == "open" and project_of(tool, again) != path
