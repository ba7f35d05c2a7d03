# SPDX-License-Identifier: Apache-2.0
"""Teams as people meet them: roles, invitations, private projects, the last owner, removals, the log."""

from __future__ import annotations

import sqlite3
import threading
from typing import Any

import pytest
from server_process import PASSWORD, Client, Server, batch, begin_run, cookie_of, new_id
from test_people import HOSTILE
from test_streams import Stream

TEAM = "/api/v1/teams/1"


def role_of(client: Client, name: str) -> str | None:
    members = client.ask("GET", TEAM + "/members").json["members"]
    return next((member["role"] for member in members if member["name"] == name), None)


def invite(client: Client, role: str = "member", **more: Any) -> Any:
    answer = client.ask("POST", TEAM + "/invitations", {"role": role, **more})
    assert answer.status == 201, answer
    return answer.json


def accept(server: Server, token: str, name: str) -> Any:
    body = {"token": token, "name": name, "password": PASSWORD}
    return server.client().ask("POST", "/api/v1/invitations/accept", body)


def test_the_first_account_owns_the_first_team(ann: Client) -> None:
    (team,) = ann.ask("GET", "/api/v1/teams").json["teams"]
    assert (team["id"], team["name"], team["role"], team["members"]) == (1, "default", "owner", 1)
    assert team["created_ms"] > 10**12


def test_a_team_works_together(server: Server, ann: Client) -> None:
    bob = server.join(ann, "bob")
    tool = server.with_token(bob, "admin")
    run = begin_run(tool, "shared")
    carol = server.join(ann, "carol", "viewer")
    assert carol.ask("GET", f"/api/v1/runs/{run}").status == 200
    assert carol.ask("POST", f"/api/v1/runs/{run}/batches", batch(1, [1], [1])).status == 403
    ours = begin_run(server.with_token(ann, "ingest"), "shared")
    projects = ann.ask("GET", "/api/v1/projects").json["projects"]
    assert [(p["name"], p["owner"], p["runs"], p["may_change"]) for p in projects] == [
        ("shared", "bob", 2, True)
    ]
    assert bob.ask("GET", f"/api/v1/runs/{ours}").status == 200


# ---- invitations


def test_an_invitation_is_used_once(server: Server, ann: Client) -> None:
    made = invite(ann, "viewer")
    looked = server.client().ask("POST", "/api/v1/invitations/look", {"token": made["token"]})
    assert (looked.json["team"], looked.json["role"], looked.json["by"]) == ("default", "viewer", "ann")
    listed = ann.ask("GET", TEAM + "/invitations")
    assert made["token"][17:] not in listed.body.decode()
    assert [one["id"] for one in listed.json["invitations"]] == [made["id"]]
    assert accept(server, made["token"], "ann").status == 409  # the name is taken; the link still works
    assert accept(server, made["token"], "bob").status == 201
    assert accept(server, made["token"], "eve").status == 403
    assert ann.ask("GET", TEAM + "/invitations").json == {"invitations": []}
    assert role_of(ann, "bob") == "viewer"
    assert server.client().ask("POST", "/api/v1/login", {"name": "eve", "password": PASSWORD}).status == 401


def test_who_has_an_account_joins_with_it(server: Server, ann: Client) -> None:
    other = ann.ask("POST", "/api/v1/teams", {"name": "other"}).json["id"]
    bob = server.join(ann, "bob")
    token = ann.ask("POST", f"/api/v1/teams/{other}/invitations", {"role": "admin"}).json["token"]
    program = server.with_token(bob, "admin")
    assert program.ask("POST", "/api/v1/invitations/accept", {"token": token}).status == 400
    joined = bob.ask("POST", "/api/v1/invitations/accept", {"token": token})
    assert joined.status == 200 and cookie_of(joined) != bob.cookie
    bob = server.client(cookie=cookie_of(joined))
    teams = {team["name"]: team["role"] for team in bob.ask("GET", "/api/v1/teams").json["teams"]}
    assert teams == {"default": "member", "other": "admin"}
    again = ann.ask("POST", f"/api/v1/teams/{other}/invitations", {"role": "owner"}).json["token"]
    assert bob.ask("POST", "/api/v1/invitations/accept", {"token": again}).status == 409


def test_an_invitation_is_revoked_changed_or_too_old(server: Server, ann: Client) -> None:
    made = invite(ann)
    for wrong in (made["token"][:-1] + ("0" if made["token"][-1] != "0" else "1"), "x", made["token"] + "0"):
        assert accept(server, wrong, "bob").status == 403
    assert ann.ask("DELETE", f"{TEAM}/invitations/{made['id']}").status == 204
    assert ann.ask("DELETE", f"{TEAM}/invitations/{made['id']}").status == 404
    assert accept(server, made["token"], "bob").status == 403
    old = invite(ann, days=1)
    server.stop()
    with sqlite3.connect(server.folder / "memscale.db") as db:
        db.execute("UPDATE invitation SET expires_ms = 5")
    db.close()
    server.start()
    assert accept(server, old["token"], "bob").status == 403
    for days in (0, 91, -1):
        refused = server.log_in("ann").ask("POST", TEAM + "/invitations", {"role": "member", "days": days})
        assert (refused.status, refused.json["error"]["field"]) == (400, "days")


def test_nobody_invites_above_themselves(server: Server, ann: Client) -> None:
    admin = server.join(ann, "bob", "admin")
    assert admin.ask("POST", TEAM + "/invitations", {"role": "owner"}).status == 403
    made = invite(admin, "admin")
    assert ann.ask("PATCH", TEAM + "/members/bob", {"role": "member"}).status == 204
    assert accept(server, made["token"], "eve").status == 403  # who invited may not any more


def test_many_try_one_link(server: Server, ann: Client) -> None:
    people = [server.join(ann, f"p{i}") for i in range(3)]
    other = ann.ask("POST", "/api/v1/teams", {"name": "other"}).json["id"]
    token = ann.ask("POST", f"/api/v1/teams/{other}/invitations", {"role": "member"}).json["token"]
    statuses: list[int] = []

    def attempt(client: Client) -> None:
        for _ in range(10):
            statuses.append(client.ask("POST", "/api/v1/invitations/accept", {"token": token}).status)

    threads = [threading.Thread(target=attempt, args=(person,)) for person in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses.count(200) == 1
    assert len(ann.ask("GET", f"/api/v1/teams/{other}/members").json["members"]) == 2


# ---- roles


def test_a_team_keeps_an_owner(server: Server, ann: Client) -> None:
    bob = server.join(ann, "bob", "admin")
    assert ann.ask("DELETE", TEAM + "/members/ann").status == 409
    assert ann.ask("PATCH", TEAM + "/members/ann", {"role": "admin"}).status == 409
    assert bob.ask("PATCH", TEAM + "/members/bob", {"role": "owner"}).status == 403
    assert bob.ask("DELETE", TEAM + "/members/ann").status == 403
    assert ann.ask("PATCH", TEAM + "/members/bob", {"role": "owner"}).status == 204
    assert ann.ask("PATCH", "/api/v1/accounts/bob", {"disabled": True}).status == 200
    assert ann.ask("DELETE", TEAM + "/members/ann").status == 409  # who cannot log in does not count
    assert ann.ask("PATCH", "/api/v1/accounts/bob", {"disabled": False}).status == 200
    assert ann.ask("DELETE", TEAM + "/members/ann").status == 204
    assert ann.ask("GET", TEAM).status == 404
    assert ann.ask("PATCH", "/api/v1/accounts/bob", {"disabled": True}).status == 409
    assert server.log_in("bob").ask("GET", TEAM).json["role"] == "owner"


def test_a_role_that_is_no_role(server: Server, ann: Client) -> None:
    server.join(ann, "bob")
    refused = ann.ask("PATCH", TEAM + "/members/bob", {"role": "king"}).json["error"]
    assert (refused["field"], refused["value"]) == ("role", "king") and "viewer" in refused["allowed"]
    assert ann.ask("PATCH", TEAM + "/members/nobody", {"role": "viewer"}).status == 404


def test_who_is_removed_sees_and_sends_nothing(server: Server, ann: Client) -> None:
    bob = server.join(ann, "bob")
    tool = server.with_token(bob, "admin")
    run = begin_run(tool)
    assert ann.ask("DELETE", TEAM + "/members/bob").status == 204
    assert tool.ask("POST", f"/api/v1/runs/{run}/batches", batch(1, [1], [1])).status == 404
    assert bob.ask("GET", f"/api/v1/runs/{run}").status == 404
    assert bob.ask("GET", "/api/v1/projects").json == {"projects": []}
    assert ann.ask("GET", f"/api/v1/runs/{run}").status == 200  # what he made stays


@pytest.mark.parametrize("end", ["removed", "hidden", "revoked", "disabled"])
def test_an_open_stream_ends_with_the_right_to_it(server: Server, ann: Client, end: str) -> None:
    bob = server.join(ann, "bob", "viewer")
    reader = server.with_token(bob, "read")
    tool = server.with_token(ann, "admin")
    run = begin_run(tool)
    stream = Stream(reader, run)
    project = tool.ask("GET", f"/api/v1/runs/{run}").json["project"]
    assert tool.ask("POST", f"/api/v1/runs/{run}/batches", batch(0, [0], [0])).status == 200
    assert stream.next() is not None
    if end == "removed":
        assert ann.ask("DELETE", TEAM + "/members/bob").status == 204
    elif end == "hidden":
        assert ann.ask("PATCH", f"/api/v1/projects/{project}", {"visibility": "private"}).status == 200
    elif end == "revoked":
        assert reader.token is not None
        assert bob.ask("DELETE", f"/api/v1/tokens/{reader.token[3:19]}").status == 204
    else:
        assert ann.ask("PATCH", "/api/v1/accounts/bob", {"disabled": True}).status == 200
    number = 0
    with pytest.raises(EOFError):  # within seconds, of which some batches are still heard
        while True:
            number += 1
            body = batch(number, [number], [number])
            assert tool.ask("POST", f"/api/v1/runs/{run}/batches", body).status == 200
            stream.next()
    stream.close()


def test_a_team_with_projects_is_not_deleted(server: Server, ann: Client) -> None:
    team = ann.ask("POST", "/api/v1/teams", {"name": "short"}).json["id"]
    project = ann.ask("POST", "/api/v1/projects", {"name": "p", "team": team}).json["id"]
    assert ann.ask("DELETE", f"/api/v1/teams/{team}").status == 409
    assert ann.ask("DELETE", f"/api/v1/projects/{project}").status == 204
    while ann.ask("DELETE", f"/api/v1/teams/{team}").status == 409:
        pass  # the project's row goes in the background
    assert ann.ask("GET", f"/api/v1/teams/{team}").status == 404


# ---- projects


def test_private_projects(server: Server, ann: Client) -> None:
    bob, carol = server.join(ann, "bob"), server.join(ann, "carol")
    run = begin_run(server.with_token(bob, "admin"), "p")
    project = bob.ask("GET", "/api/v1/projects").json["projects"][0]["id"]
    path = f"/api/v1/projects/{project}"
    assert carol.ask("PATCH", path, {"visibility": "private"}).status == 403
    assert bob.ask("PATCH", path, {"visibility": "private"}).json["visibility"] == "private"
    assert carol.ask("GET", f"/api/v1/runs/{run}").status == 404
    assert carol.ask("GET", "/api/v1/projects").json == {"projects": []}
    assert ann.ask("GET", f"/api/v1/runs/{run}").status == 200  # admins see all of their team
    mine = begin_run(server.with_token(carol, "ingest"), "p")  # the name tells nothing: she gets her own
    assert carol.ask("GET", f"/api/v1/runs/{mine}").json["project"] != project
    assert bob.ask("PATCH", path, {"visibility": "team"}).status == 409
    assert bob.ask("PUT", path + "/chosen/carol").status == 204
    assert carol.ask("GET", f"/api/v1/runs/{run}").status == 200
    assert carol.ask("GET", path + "/chosen").json == {"chosen": ["carol"]}
    assert bob.ask("PUT", path + "/chosen/nobody").status == 404
    assert bob.ask("DELETE", path + "/chosen/carol").status == 204
    assert carol.ask("GET", f"/api/v1/runs/{run}").status == 404


def test_errors_name_the_field(server: Server, ann: Client) -> None:
    project = ann.ask("POST", "/api/v1/projects", {"name": "p"}).json["id"]
    for body, name in (
        ({"visibility": "all"}, "visibility"),
        ({"archive_days": 0}, "archive_days"),
        ({"delete_days": 36501}, "delete_days"),
        ({"delete_days": "3"}, "delete_days"),
        ({"name": ""}, "name"),
        ({}, "body"),
    ):
        refused = ann.ask("PATCH", f"/api/v1/projects/{project}", body)
        assert (refused.status, refused.json["error"]["field"]) == (400, name)
    for path in ("0", "x", "9" * 30, "-1", "1x"):
        assert ann.ask("GET", f"/api/v1/projects/{path}").status == 404
        assert ann.ask("GET", f"/api/v1/teams/{path}").status == 404


def test_tokens_are_bound_to_what_is_theirs(server: Server, ann: Client) -> None:
    bob = server.join(ann, "bob")
    other = ann.ask("POST", "/api/v1/teams", {"name": "other"}).json["id"]
    hidden = ann.ask("POST", "/api/v1/projects", {"name": "p", "team": other}).json["id"]
    for bound in ({"team": other}, {"project": hidden}, {"team": 99}):
        body = {"name": "t", "scopes": ["read"], **bound}
        assert bob.ask("POST", "/api/v1/tokens", body).status == 404
    body = {"name": "t", "scopes": ["read"], "team": 1, "project": hidden}
    assert ann.ask("POST", "/api/v1/tokens", body).status == 400
    made = ann.ask("POST", "/api/v1/tokens", {"name": "t", "scopes": ["read"], "team": other}).json
    assert (made["team"], made["project"], made["revoked_ms"]) == (other, None, None)
    assert ann.ask("DELETE", f"/api/v1/tokens/{made['id']}").status == 204
    assert ann.ask("DELETE", f"/api/v1/tokens/{made['id']}").status == 404
    assert ann.ask("GET", "/api/v1/tokens").json == {"tokens": []}
    (revoked,) = ann.ask("GET", "/api/v1/tokens?revoked=true").json["tokens"]
    assert revoked["id"] == made["id"] and revoked["revoked_ms"] is not None


# ---- accounts


def test_who_is_disabled_is_out_at_once(server: Server, ann: Client) -> None:
    bob = server.join(ann, "bob")
    tool = server.with_token(bob, "admin")
    run = begin_run(tool)
    assert ann.ask("PATCH", "/api/v1/accounts/bob", {"disabled": True}).json["disabled_ms"] is not None
    assert bob.ask("GET", "/api/v1/me").status == 401
    assert tool.ask("GET", f"/api/v1/runs/{run}").status == 401
    login = {"name": "bob", "password": PASSWORD}
    assert server.client().ask("POST", "/api/v1/login", login).status == 401
    assert ann.ask("PATCH", "/api/v1/accounts/bob", {"disabled": False}).json["disabled_ms"] is None
    assert tool.ask("GET", f"/api/v1/runs/{run}").status == 200
    assert server.log_in("bob").ask("GET", "/api/v1/me").status == 200
    assert ann.ask("PATCH", "/api/v1/accounts/ann", {"disabled": True}).status == 409
    assert ann.ask("PATCH", "/api/v1/accounts/ann", {"admin": False}).status == 409
    assert ann.ask("PATCH", "/api/v1/accounts/none", {"admin": True}).status == 404
    assert ann.ask("PATCH", "/api/v1/accounts/bob", {}).status == 400


def test_a_reset_link_sets_a_password_once(server: Server, ann: Client) -> None:
    bob = server.join(ann, "bob")
    lost = ann.ask("POST", "/api/v1/accounts/bob/reset").json["token"]
    token = ann.ask("POST", "/api/v1/accounts/bob/reset").json["token"]
    new = "another " + PASSWORD
    nobody = server.client()
    assert nobody.ask("POST", "/api/v1/reset", {"token": lost, "password": new}).status == 403  # replaced
    assert nobody.ask("POST", "/api/v1/reset", {"token": token, "password": "short"}).status == 400
    done = nobody.ask("POST", "/api/v1/reset", {"token": token, "password": new})
    assert done.status == 200 and done.json["account"]["name"] == "bob"
    assert bob.ask("GET", "/api/v1/me").status == 401  # all sessions have ended
    assert server.client(cookie=cookie_of(done)).ask("GET", "/api/v1/me").status == 200
    assert nobody.ask("POST", "/api/v1/reset", {"token": token, "password": new}).status == 403
    assert nobody.ask("POST", "/api/v1/login", {"name": "bob", "password": PASSWORD}).status == 401
    assert nobody.ask("POST", "/api/v1/login", {"name": "bob", "password": new}).status == 200


def test_links_of_an_admin_end_with_their_right(server: Server, ann: Client) -> None:
    server.join(ann, "bob")
    assert ann.ask("PATCH", "/api/v1/accounts/bob", {"admin": True}).json["admin"] is True
    bob = server.log_in("bob")
    token = bob.ask("POST", "/api/v1/accounts/ann/reset").json["token"]
    assert ann.ask("PATCH", "/api/v1/accounts/bob", {"admin": False}).json["admin"] is False
    body = {"token": token, "password": "taken " + PASSWORD}
    assert server.client().ask("POST", "/api/v1/reset", body).status == 403
    assert bob.ask("POST", "/api/v1/accounts/ann/reset").status == 403
    assert server.log_in("ann").ask("GET", "/api/v1/me").status == 200


def test_sessions_are_listed_and_ended(server: Server, ann: Client) -> None:
    other = server.log_in("ann")
    listed = ann.ask("GET", "/api/v1/me/sessions").json["sessions"]
    assert sorted(session["current"] for session in listed) == [False, True]
    body = ann.ask("GET", "/api/v1/me/sessions").body.decode()
    assert ann.cookie and ann.cookie.partition("=")[2] not in body
    gone = next(session["id"] for session in listed if not session["current"])
    assert ann.ask("DELETE", f"/api/v1/me/sessions/{gone}").status == 204
    assert ann.ask("DELETE", f"/api/v1/me/sessions/{gone}").status == 404
    assert other.ask("GET", "/api/v1/me").status == 401
    assert ann.ask("GET", "/api/v1/me").status == 200


# ---- the audit log


def entries(client: Client, path: str) -> list[Any]:
    """All of it, in pages of three, the newest first."""
    found: list[Any] = []
    before = ""
    while True:
        page = client.ask("GET", f"{path}?limit=3{before}").json
        found += page["entries"]
        if page["next"] is None:
            return found
        before = f"&before={page['next']}"


def test_the_log_says_who_did_what(server: Server, ann: Client) -> None:
    bob = server.join(ann, "bob", "admin")
    tool = server.with_token(bob, "admin")
    run = begin_run(tool, "p")
    project = bob.ask("GET", "/api/v1/projects").json["projects"][0]["id"]
    assert bob.ask("PATCH", f"/api/v1/runs/{run}", {"name": "x", "pinned": True}).status == 200
    assert bob.ask("PATCH", f"/api/v1/projects/{project}", {"delete_days": 9}).status == 200
    assert tool.ask("DELETE", f"/api/v1/runs/{run}").status == 204
    assert ann.ask("PATCH", TEAM + "/members/bob", {"role": "viewer"}).status == 204
    assert bob.ask("GET", TEAM + "/audit").status == 403
    told = [(e["by"], e["action"], e["thing"]) for e in entries(ann, TEAM + "/audit")]
    assert told[::-1][2:] == [
        ("bob", "project.make", "p"),
        ("bob", "run.rename", run),
        ("bob", "run.pin", run),
        ("bob", "project.retention", "p"),
        ("bob", "run.delete", run),
        ("ann", "member.role", "bob"),
    ]
    assert [e["action"] for e in entries(ann, TEAM + "/audit")][::-1][:2] == [
        "invitation.make",
        "invitation.accept",
    ]
    server_told = [(e["by"], e["action"]) for e in entries(ann, "/api/v1/audit")]
    assert ("bob", "token.make") in server_told and ("ann", "account.make") in server_told
    ids = [e["id"] for e in entries(ann, TEAM + "/audit")]
    assert ids == sorted(ids, reverse=True) and len(ids) == len(set(ids))


def test_the_log_cannot_be_altered_and_holds_no_secret(server: Server, ann: Client) -> None:
    made = invite(ann)
    reset = ann.ask("POST", "/api/v1/accounts/ann/reset").json["token"]
    token = ann.ask("POST", "/api/v1/tokens", {"name": "t", "scopes": ["read"]}).json["token"]
    server.stop()
    kept = b"".join(path.read_bytes() for path in server.folder.iterdir())
    for secret in (made["token"][17:], reset, token[-64:]):
        assert secret.encode() not in kept
    with sqlite3.connect(server.folder / "memscale.db") as db:
        for change in ("DELETE FROM audit", "UPDATE audit SET detail = ''"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(change)
    db.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_team_names_stay_text(server: Server, ann: Client, name: str) -> None:
    team = ann.ask("POST", "/api/v1/teams", {"name": name}).json
    assert team["name"] == name
    for path in ("/api/v1/teams", "/api/v1/audit"):
        answer = ann.ask("GET", path)
        assert b"<" not in answer.body and b">" not in answer.body
    token = ann.ask("POST", f"/api/v1/teams/{team['id']}/invitations", {"role": "owner"}).json["token"]
    looked = server.client().ask("POST", "/api/v1/invitations/look", {"token": token})
    assert looked.json["team"] == name and b"<" not in looked.body
    assert new_id() not in looked.body.decode()
