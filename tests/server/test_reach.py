# SPDX-License-Identifier: Apache-2.0
"""Every operation of server/openapi.yaml, asked by those who may not: outsiders, viewers, members, programs.

The table below says of each operation what it needs: which scope, and which role in the team. An operation
that the table does not know fails the test, so a new one cannot be forgotten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from server_process import ROOT, Client, Server, batch, begin_run, new_id, serving

ROLES = ["viewer", "member", "admin", "owner"]
OPEN = {"setup_state", "setup", "login", "reset", "look_at_invitation", "accept_invitation"} | {
    "healthz",
    "readyz",
    "take_telemetry",
}
#: Of any account that is logged in, for itself; nothing of a team is in the answer that is not theirs.
THEIRS = {"logout", "me", "projects", "teams", "metrics", "change_password", "sessions", "tokens"} | {
    "create_experiment",
    "search_experiments",
    "search_runs",
}
#: Of the account's own secrets, of the server: what a token that is bound never reaches.
SELF = {"change_password", "sessions", "end_session", "tokens", "create_token", "revoke_token"}
SERVER = {"accounts", "create_account", "change_account", "make_reset", "audit", "create_team", "telemetry"}
#: Within a team: the smallest role, and the scope.
NEEDS = {
    "create_project": ("member", "ingest"),
    "project": ("viewer", "read"),
    "change_project": ("admin", "admin"),
    "delete_project": ("admin", "admin"),
    "chosen": ("viewer", "read"),
    "choose": ("admin", "admin"),
    "unchoose": ("admin", "admin"),
    "retention": ("viewer", "read"),
    "purge_project": ("admin", "admin"),
    "runs": ("viewer", "read"),
    "create_run": ("member", "ingest"),
    "run": ("viewer", "read"),
    "change_run": ("member", "admin"),
    "delete_run": ("member", "admin"),
    "ingest": ("member", "ingest"),
    "heartbeat": ("member", "ingest"),
    "finish": ("member", "ingest"),
    "series": ("viewer", "read"),
    "points": ("viewer", "read"),
    "events": ("viewer", "read"),
    "document": ("viewer", "read"),
    "live": ("viewer", "read"),
    "export_run": ("viewer", "read"),
    "team": ("viewer", "read"),
    "rename_team": ("owner", "admin"),
    "delete_team": ("owner", "admin"),
    "members": ("viewer", "read"),
    "change_member": ("admin", "admin"),
    "remove_member": ("admin", "admin"),
    "team_audit": ("admin", "admin"),
    "invitations": ("admin", "admin"),
    "create_invitation": ("admin", "admin"),
    "revoke_invitation": ("admin", "admin"),
    "create_mlflow_run": ("member", "ingest"),
    "update_mlflow_run": ("member", "ingest"),
    "delete_mlflow_run": ("member", "admin"),
    "restore_mlflow_run": ("member", "admin"),
    "log_metric": ("member", "ingest"),
    "log_parameter": ("member", "ingest"),
    "log_batch": ("member", "ingest"),
    "set_tag": ("member", "ingest"),
    "delete_tag": ("member", "ingest"),
    "get_experiment": ("viewer", "read"),
    "get_experiment_by_name": ("viewer", "read"),
    "get_mlflow_run": ("viewer", "read"),
    "get_history": ("viewer", "read"),
}
#: MLflow's operations name runs and experiments in body and query.
MLFLOW = "/api/2.0/mlflow/"
BODIES: dict[str, Any] = {
    "create_project": {"name": "other"},
    "change_project": {"visibility": "team"},
    "create_run": {"project": "hushed"},
    "change_run": {"name": "mine"},
    "ingest": batch(9, [2], [2.0]),
    "finish": {"state": "finished"},
    "rename_team": {"name": "mine"},
    "change_member": {"role": "viewer"},
    "create_invitation": {"role": "viewer"},
    "create_account": {"name": "new", "password": "x" * 12},
    "change_account": {"admin": True},
    "create_team": {"name": "new"},
    "create_token": {"name": "t", "scopes": ["read"]},
    "change_password": {"current": "x", "new": "y" * 12},
}
QUERIES = {"points": "?series=loss", "export_run": "?format=csv"}


@dataclass
class Operation:
    name: str
    method: str
    path: str


def operations() -> list[Operation]:
    described = yaml.safe_load((ROOT / "server" / "openapi.yaml").read_text())
    found = []
    for path, item in described["paths"].items():
        for method, what in item.items():
            if method != "parameters":
                found.append(Operation(what["operationId"], method.upper(), path))
    return found


ALL = operations()
OF_TEAMS = [operation for operation in ALL if operation.name in NEEDS]


@dataclass
class World:
    """A team with everything in it, and people in and out of it."""

    server: Server
    ann: Client
    ids: dict[str, str]
    run: str
    people: dict[str, Client] = field(default_factory=dict)

    def ask(self, who: Client, operation: Operation) -> int:
        path = re.sub(r"\{(\w+)\}", lambda found: self.ids[found.group(1)], operation.path)
        body = BODIES.get(operation.name)
        if operation.path.startswith(MLFLOW):
            named = {"run_id": self.run, "experiment_id": self.ids["project"]}
            if operation.method == "GET":
                path += f"?{urlencode(named)}&experiment_name=hushed&metric_key=loss"
            else:
                body = {
                    **named,
                    "key": "k",
                    "value": "v",
                    "timestamp": 1,
                    "status": "FINISHED",
                    "name": new_id(),
                }
                body |= {"value": 1.0} if operation.name == "log_metric" else {}
                body |= {"params": [{"key": "p", "value": "1"}]} if operation.name == "log_batch" else {}
        elif operation.name == "create_run":
            body = {**body, "id": new_id(), "team": int(self.ids["team"])}
        elif operation.name == "create_project":
            body = {**body, "team": int(self.ids["team"])}
        answer = who.ask(operation.method, path + QUERIES.get(operation.name, ""), body)
        said = answer.body.replace(b"experiment_name is hushed", b"")  # as it was asked for
        assert b"hushed" not in said or answer.status < 300, (operation, answer)
        return answer.status

    def state(self) -> list[Any]:
        """What must not change by what is refused."""
        team = self.ids["team"]
        asked = [f"teams/{team}", f"teams/{team}/members", f"teams/{team}/invitations", f"runs/{self.run}"]
        asked += [f"projects/{self.ids['project']}", f"projects/{self.ids['project']}/chosen", "accounts"]
        return [self.ann.ask("GET", "/api/v1/" + path).json for path in asked]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving(tmp_path_factory.mktemp("reach") / "data", "--telemetry", "7") as server:
        ann = server.set_up()
        team = str(ann.ask("POST", "/api/v1/teams", {"name": "hushed team"}).json["id"])
        run = new_id()
        made = ann.ask("POST", "/api/v1/runs", {"id": run, "project": "hushed", "team": int(team)})
        assert made.status == 201, made
        body = batch(1, [1], [1.0])
        body["documents"] = {"plan": {"hushed": 1}, "tags": {"k": "hushed"}}
        assert ann.ask("POST", f"/api/v1/runs/{run}/batches", body).status == 200
        ids = {"team": team, "run": run, "name": "plan", "account": "target"}
        ids["project"] = str(made.json["project"])
        token = ann.ask("POST", "/api/v1/tokens", {"name": "hushed", "scopes": ["read"]}).json
        ids["token"] = token["id"]
        ids["session"] = ann.ask("GET", "/api/v1/me/sessions").json["sessions"][0]["id"]
        there = World(server, ann, ids, run)
        for role in ROLES:
            there.people[role] = server.join(ann, role, role, int(team))
        server.join(ann, "target", "member", int(team))
        assert ann.ask("PUT", f"/api/v1/projects/{ids['project']}/chosen/target").status == 204
        there.people["outsider"] = server.join(ann, "outsider", "owner", 1)
        invited = ann.ask("POST", f"/api/v1/teams/{team}/invitations", {"role": "viewer"}).json
        ids["invitation"] = invited["id"]
        yield there


def test_the_table_knows_every_operation() -> None:
    known = OPEN | THEIRS | SELF | SERVER | set(NEEDS)
    assert {operation.name for operation in ALL} == known


@pytest.mark.parametrize("operation", OF_TEAMS, ids=lambda operation: operation.name)
def test_an_outsider_finds_nothing(world: World, operation: Operation) -> None:
    before = world.state()
    assert world.ask(world.people["outsider"], operation) == 404
    assert world.state() == before


@pytest.mark.parametrize("operation", OF_TEAMS, ids=lambda operation: operation.name)
def test_a_role_too_small_is_refused(world: World, operation: Operation) -> None:
    needed = ROLES.index(NEEDS[operation.name][0])
    before = world.state()
    for role in ROLES[:needed]:
        assert world.ask(world.people[role], operation) == 403, role
    assert world.state() == before


@pytest.mark.parametrize("operation", OF_TEAMS, ids=lambda operation: operation.name)
def test_a_token_of_other_scope_is_refused(world: World, operation: Operation) -> None:
    needed = NEEDS[operation.name][1]
    before = world.state()
    for scope in {"read", "ingest"} - {needed}:
        program = world.server.with_token(world.ann, scope)
        assert world.ask(program, operation) == 403, scope
    assert world.state() == before


@pytest.mark.parametrize("operation", OF_TEAMS, ids=lambda operation: operation.name)
def test_a_token_of_another_team_or_project_finds_nothing(world: World, operation: Operation) -> None:
    before = world.state()
    other = world.ann.ask("POST", "/api/v1/projects", {"name": "elsewhere", "team": 1}).json["id"]
    for bound in ({"team": 1}, {"project": other}):
        program = world.server.with_token(world.ann, "admin", **bound)
        assert world.ask(program, operation) == 404, bound
    assert world.state() == before


@pytest.mark.parametrize("operation", [o for o in ALL if o.name in SELF | SERVER], ids=lambda o: o.name)
def test_a_bound_token_reaches_nothing_of_the_account(world: World, operation: Operation) -> None:
    before = world.state()
    program = world.server.with_token(world.ann, "admin", team=int(world.ids["team"]))
    assert world.ask(program, operation) == 403
    assert world.state() == before


@pytest.mark.parametrize("operation", [o for o in ALL if o.name in SERVER], ids=lambda o: o.name)
def test_the_server_is_its_admins(world: World, operation: Operation) -> None:
    before = world.state()
    assert world.ask(world.people["owner"], operation) == 403
    assert world.state() == before


@pytest.mark.parametrize("name", ["revoke_token", "end_session"])
def test_secrets_of_another_account_are_not_there(world: World, name: str) -> None:
    operation = next(operation for operation in ALL if operation.name == name)
    assert world.ask(world.people["owner"], operation) == 404
    assert world.ann.ask("GET", "/api/v1/me").status == 200


def test_lists_hold_nothing_of_others(world: World) -> None:
    outsider = world.people["outsider"]
    for path in ("projects", "teams", "tokens", "sessions"):
        path = f"me/{path}" if path == "sessions" else path
        answer = outsider.ask("GET", f"/api/v1/{path}")
        assert answer.status == 200 and b"hushed" not in answer.body, path
    assert outsider.ask("GET", f"/api/v1/projects?team={world.ids['team']}").json == {"projects": []}


WITHIN = [o for o in OF_TEAMS if "{project}" in o.path or "{run}" in o.path or MLFLOW in o.path]


@pytest.mark.parametrize("operation", WITHIN, ids=lambda o: o.name)
def test_a_private_project_is_not_there_for_members(world: World, operation: Operation) -> None:
    path = f"/api/v1/projects/{world.ids['project']}"
    assert world.ann.ask("PATCH", path, {"visibility": "private"}).status == 200
    try:
        for role in ("viewer", "member"):
            assert world.ask(world.people[role], operation) == 404, role
    finally:
        assert world.ann.ask("PATCH", path, {"visibility": "team"}).status == 200


@pytest.mark.parametrize("operation", [o for o in ALL if o.name not in OPEN], ids=lambda o: o.name)
def test_nobody_is_asked_who_they_are(world: World, operation: Operation) -> None:
    assert world.ask(world.server.client(), operation) == 401


def test_a_bound_token_does_its_work(world: World) -> None:
    program = world.server.with_token(world.ann, "admin", project=int(world.ids["project"]))
    assert [p["name"] for p in program.ask("GET", "/api/v1/projects").json["projects"]] == ["hushed"]
    run = begin_run(program, "hushed")
    assert program.ask("GET", f"/api/v1/runs/{run}").json["project"] == int(world.ids["project"])
    assert program.ask("POST", "/api/v1/runs", {"id": new_id(), "project": "another"}).status == 403
    assert program.ask("GET", "/api/v1/teams").json == {"teams": []}
