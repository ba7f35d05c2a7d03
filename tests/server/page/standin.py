# SPDX-License-Identifier: Apache-2.0
"""An in-memory stand-in of the server's contract, for the page's tests. It keeps what it is sent and checks little."""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = Path(__file__).parents[3] / "server" / "page"
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
VIEWS = re.compile(r"/(|setup|login|account|compare|projects/\d+|runs/[\w-]+)$")
CSP = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Store:
    """All that there is."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.setup_token = secrets.token_hex(32)
        self.accounts: dict[str, dict[str, Any]] = {}
        self.sessions: dict[str, str] = {}
        self.tokens: list[dict[str, Any]] = []
        self.projects: list[dict[str, Any]] = []
        self.runs: dict[str, dict[str, Any]] = {}

    def project(self, name: str) -> dict[str, Any]:
        for one in self.projects:
            if one["name"] == name:
                return one
        made = {"id": len(self.projects) + 1, "name": name, "created_ms": now_ms(), "runs": 0}
        self.projects.append(made)
        return made

    def shown(self, run: dict[str, Any]) -> dict[str, Any]:
        keys = ("id", "project", "name", "archived", "created_ms", "seen_ms", "ended_ms", "state")
        found = {key: run[key] for key in keys}
        if run["state"] == "running" and now_ms() - run["seen_ms"] > 60_000:
            found["state"] = "lost"
        return found

    def say(self, run: dict[str, Any], kind: str, data: dict[str, Any]) -> None:
        run["version"] += 1
        run["said"].append((run["version"], kind, data))
        self.lock.notify_all()


def series_row(name: str, one: dict[str, Any]) -> dict[str, Any]:
    values = [value for _, _, value in one["points"] if isinstance(value, (int, float))]
    steps = [step for step, _, _ in one["points"]]
    last = one["points"][-1]
    return {
        "name": name, "unit": one["unit"], "count": len(steps), "first_step": min(steps), "last_step": max(steps),
        "last_time_ms": last[1], "min": min(values, default="NaN"), "max": max(values, default="NaN"), "last": last[2],
    }  # fmt: skip


def buckets_of(name: str, one: dict[str, Any], first: int, last: int, count: int) -> dict[str, Any]:
    found: dict[int, list[tuple[int, Any]]] = {}
    length = (last - first + 1) / count
    for step, _, value in one["points"]:
        if first <= step <= last:
            found.setdefault(int((step - first) / length), []).append((step, value))
    columns: dict[str, list[Any]] = {
        key: [] for key in ("index", "from", "to", "count", "nans", "min", "max", "mean", "last")
    }
    for index, points in sorted(found.items()):
        numbers = [value for _, value in points if isinstance(value, (int, float))]
        row = (
            index, min(step for step, _ in points), max(step for step, _ in points), len(points), len(points) - len(numbers),
            min(numbers, default="NaN"), max(numbers, default="NaN"), sum(numbers) / len(numbers) if numbers else "NaN",
            points[-1][1],
        )  # fmt: skip
        for key, value in zip(columns, row, strict=True):
            columns[key].append(value)
    return {"name": name, "unit": one["unit"], **columns}


class Handler(BaseHTTPRequestHandler):
    """Routes by method and pattern."""

    protocol_version = "HTTP/1.1"
    store: Store
    routes: tuple[tuple[str, str, str], ...] = (
        ("GET", r"/setup", "setup_state"), ("POST", r"/setup", "setup"), ("POST", r"/login", "login"),
        ("POST", r"/logout", "logout"), ("GET", r"/me", "me"), ("PUT", r"/me/password", "password"),
        ("GET", r"/accounts", "accounts"), ("POST", r"/accounts", "create_account"),
        ("GET", r"/tokens", "tokens"), ("POST", r"/tokens", "create_token"), ("DELETE", r"/tokens/(\w+)", "revoke"),
        ("GET", r"/projects", "projects"), ("POST", r"/projects", "create_project"),
        ("GET", r"/projects/(\d+)/runs", "runs"), ("POST", r"/runs", "create_run"), ("GET", r"/runs/([\w-]+)", "run"),
        ("PATCH", r"/runs/([\w-]+)", "change_run"), ("DELETE", r"/runs/([\w-]+)", "delete_run"),
        ("POST", r"/runs/([\w-]+)/batches", "ingest"), ("POST", r"/runs/([\w-]+)/finish", "finish"),
        ("GET", r"/runs/([\w-]+)/series", "series"), ("GET", r"/runs/([\w-]+)/points", "points"),
        ("GET", r"/runs/([\w-]+)/events", "events"), ("GET", r"/runs/([\w-]+)/documents/(\w+)", "document"),
        ("GET", r"/runs/([\w-]+)/export", "export"),
    )  # fmt: skip

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/page/"):
            self.send_page(PAGE / path.removeprefix("/page/"))
        elif VIEWS.match(path):
            self.send_page(PAGE / "index.html")
        elif match := re.fullmatch(r"/api/v1/runs/([\w-]+)/live", path):
            self.live(match.group(1))
        else:
            self.answer("GET")

    def do_POST(self) -> None:
        self.answer("POST")

    def do_PUT(self) -> None:
        self.answer("PUT")

    def do_PATCH(self) -> None:
        self.answer("PATCH")

    def do_DELETE(self) -> None:
        self.answer("DELETE")

    def send_page(self, path: Path) -> None:
        if not path.is_file() or path.suffix not in TYPES:
            self.send_json(404, {"error": {"code": "not_found", "message": "no such file"}})
            return
        self.send_bytes(200, path.read_bytes(), TYPES[path.suffix], {"Content-Security-Policy": CSP, "Cache-Control": "no-cache"})

    def send_json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self.send_bytes(status, b"" if value is None else json.dumps(value).encode(), "application/json", headers)

    def send_bytes(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, method: str) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        length = int(self.headers.get("Content-Length") or 0)
        self.body = json.loads(self.rfile.read(length)) if length else {}
        self.cookie: dict[str, str] = {}
        try:
            for verb, pattern, name in self.routes:
                match = re.fullmatch(f"/api/v1{pattern}", url.path)
                if match and verb == method:
                    self.check(name)
                    with self.store.lock:
                        handler: Callable[..., Any] = getattr(self, f"on_{name}")
                        result = handler(*map(unquote, match.groups()))
                    status, value = result if isinstance(result, tuple) else (200, result)
                    self.send_json(status, value, self.cookie)
                    return
            raise Refusal(404, "not_found", "there is nothing at this address")
        except Refusal as error:
            self.send_json(error.status, {"error": {"code": error.code, "message": str(error)}}, self.cookie)

    def check(self, name: str) -> None:
        bearer = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        session = re.search(r"memscale=(\w+)", self.headers.get("Cookie") or "")
        self.session = session.group(1) if session else ""
        self.account = self.store.sessions.get(self.session) or next(
            (one["account"] for one in self.store.tokens if one["token"] == bearer), None
        )
        if self.account is None and name not in ("setup_state", "setup", "login"):
            raise Refusal(401, "unauthenticated", "log in first")

    def begin(self, name: str) -> dict[str, Any]:
        session = secrets.token_hex(32)
        self.store.sessions[session] = name
        self.cookie["Set-Cookie"] = f"memscale={session}; HttpOnly; SameSite=Lax; Path=/"
        return {"account": self.account_row(name)}

    def account_row(self, name: str) -> dict[str, Any]:
        return {key: self.store.accounts[name][key] for key in ("name", "admin", "created_ms")}

    def add_account(self, admin: bool) -> str:
        name = self.body["name"]
        if name in self.store.accounts:
            raise Refusal(409, "conflict", "there is an account of this name")
        self.store.accounts[name] = {"name": name, "admin": admin, "created_ms": now_ms(), "password": self.body["password"]}
        return str(name)

    # ---- accounts ----

    def on_setup_state(self) -> Any:
        return {"needed": not self.store.accounts}

    def on_setup(self) -> Any:
        if self.body["token"] != self.store.setup_token or self.store.accounts:
            raise Refusal(403, "forbidden", "this link was used, or is not the one that the server printed")
        return 201, self.begin(self.add_account(True))

    def on_login(self) -> Any:
        account = self.store.accounts.get(self.body["name"])
        if account is None or account["password"] != self.body["password"]:
            raise Refusal(401, "unauthenticated", "name or password is wrong")
        return self.begin(account["name"])

    def on_logout(self) -> Any:
        self.store.sessions.pop(self.session, None)
        return 204, None

    def on_me(self) -> Any:
        return {"account": self.account_row(str(self.account)), "via": "session", "scopes": ["ingest", "read", "admin"]}

    def on_password(self) -> Any:
        account = self.store.accounts[str(self.account)]
        if account["password"] != self.body["current"]:
            raise Refusal(401, "unauthenticated", "the present password is another one")
        account["password"] = self.body["new"]
        return self.begin(account["name"])

    def on_accounts(self) -> Any:
        return {"accounts": [self.account_row(name) for name in sorted(self.store.accounts)]}

    def on_create_account(self) -> Any:
        return 201, self.account_row(self.add_account(self.body.get("admin", False)))

    def on_tokens(self) -> Any:
        hidden = ("token", "account")
        return {"tokens": [{k: v for k, v in one.items() if k not in hidden} for one in reversed(self.store.tokens)]}

    def on_create_token(self) -> Any:
        token_id = secrets.token_hex(8)
        made = {
            "id": token_id, "name": self.body["name"], "scopes": self.body["scopes"], "created_ms": now_ms(),
            "expires_ms": self.body.get("expires_ms"), "used_ms": None, "token": f"ms_{token_id}_{secrets.token_hex(32)}",
        }  # fmt: skip
        self.store.tokens.append({**made, "account": self.account})
        return 201, made

    def on_revoke(self, token: str) -> Any:
        self.store.tokens[:] = [one for one in self.store.tokens if one["id"] != token]
        return 204, None

    # ---- projects and runs ----

    def on_projects(self) -> Any:
        for one in self.store.projects:
            one["runs"] = sum(run["project"] == one["id"] and not run["archived"] for run in self.store.runs.values())
        return {"projects": sorted(self.store.projects, key=lambda one: one["name"])}

    def on_create_project(self) -> Any:
        return 201, self.store.project(self.body["name"])

    def on_runs(self, project: str) -> Any:
        query = {name: values[0] for name, values in self.query.items()}
        found = [self.store.shown(run) for run in self.store.runs.values() if run["project"] == int(project)]
        archived = query.get("archived") == "true"
        found = [
            run for run in found
            if run["archived"] == archived and query.get("search", "").lower() in run["name"].lower()
            and query.get("state", run["state"]) == run["state"]
        ]  # fmt: skip
        sort = query.get("sort", "-created")
        key = {"created": "created_ms", "seen": "seen_ms", "name": "name"}[sort.lstrip("-")]
        found.sort(key=lambda run: (run[key], run["id"]), reverse=sort.startswith("-"))
        after, limit = int(query.get("after", 0)), int(query.get("limit", 50))
        more = len(found) > after + limit
        return {"runs": found[after : after + limit], "next": str(after + limit) if more else None}

    def the(self, run: str) -> dict[str, Any]:
        if run not in self.store.runs:
            raise Refusal(404, "not_found", "there is no such run")
        return self.store.runs[run]

    def on_create_run(self) -> Any:
        body = self.body
        made = body.get("created_ms", now_ms())
        run = {
            "id": body["id"], "project": self.store.project(body["project"])["id"], "name": body.get("name", body["id"]),
            "archived": False, "created_ms": made, "seen_ms": now_ms(), "ended_ms": None, "state": "running", "version": 0,
            "series": {}, "events": [], "documents": {}, "said": [], "batches": set(),
        }  # fmt: skip
        self.store.runs.setdefault(body["id"], run)
        return 201, self.store.shown(self.store.runs[body["id"]])

    def on_run(self, run: str) -> Any:
        one = self.the(run)
        documents = [
            {"name": name, "bytes": len(json.dumps(value)), "updated_ms": one["seen_ms"]}
            for name, value in sorted(one["documents"].items())
        ]
        return {**self.store.shown(one), "version": one["version"], "documents": documents}

    def on_change_run(self, run: str) -> Any:
        one = self.the(run)
        one.update(self.body)
        self.store.say(one, "run", self.store.shown(one))
        return self.store.shown(one)

    def on_delete_run(self, run: str) -> Any:
        self.store.say(self.the(run), "gone", {})
        del self.store.runs[run]
        return 204, None

    def on_ingest(self, run: str) -> Any:
        one = self.the(run)
        body = self.body
        key = (body["client"], body["sequence"])
        if key in one["batches"]:
            return {"duplicate": True, "version": one["version"]}
        one["batches"].add(key)
        one["seen_ms"] = now_ms()
        changed = []
        for points in body.get("points", ()):
            series = one["series"].setdefault(points["series"], {"unit": points.get("unit", ""), "points": []})
            times = points.get("times_ms") or [now_ms()] * len(points["steps"])
            series["points"] += zip(points["steps"], times, points["values"], strict=True)
            changed.append({"name": points["series"], "from": min(points["steps"]), "to": max(points["steps"])})
        for event in body.get("events", ()):
            new = {"step": None, "time_ms": now_ms(), "text": "", "data": None, **event}
            one["events"].append({"id": len(one["events"]) + 1, **new})
        one["documents"].update(body.get("documents", {}))
        documents = [*body.get("documents", {})]
        self.store.say(one, "batch", {"series": changed, "events": len(body.get("events", ())), "documents": documents})
        return {"duplicate": False, "version": one["version"]}

    def on_finish(self, run: str) -> Any:
        one = self.the(run)
        one.update(state=self.body["state"], ended_ms=now_ms())
        self.store.say(one, "run", self.store.shown(one))
        return self.store.shown(one)

    # ---- reading ----

    def on_series(self, run: str) -> Any:
        return {"series": [series_row(name, one) for name, one in sorted(self.the(run)["series"].items())]}

    def on_points(self, run: str) -> Any:
        one = self.the(run)
        named = [(name, one["series"][name]) for name in self.query["series"] if name in one["series"]]
        steps = [step for _, series in named for step, _, _ in series["points"]]
        if not steps:
            return {"from": None, "to": None, "buckets": 0, "series": []}
        first = int(self.query.get("from", [min(steps)])[0])
        last = int(self.query.get("to", [max(steps)])[0])
        count = min(int(self.query.get("buckets", ["400"])[0]), last - first + 1)
        found = [buckets_of(name, series, first, last, count) for name, series in named]
        return {"from": first, "to": last, "buckets": count, "series": found}

    def on_events(self, run: str) -> Any:
        kind = self.query.get("kind", [""])[0]
        after, limit = int(self.query.get("after", ["0"])[0]), int(self.query.get("limit", ["100"])[0])
        found = [one for one in self.the(run)["events"] if one["id"] > after and kind in ("", one["kind"])]
        return {"events": found[:limit], "next": found[limit - 1]["id"] if len(found) > limit else None}

    def on_document(self, run: str, name: str) -> Any:
        documents = self.the(run)["documents"]
        if name not in documents:
            raise Refusal(404, "not_found", "there is no such document")
        return documents[name]

    def on_export(self, run: str) -> Any:
        return {"run": self.store.shown(self.the(run))}

    def live(self, run: str) -> None:
        self.check("live")
        query = parse_qs(urlsplit(self.path).query)
        seen = int(self.headers.get("Last-Event-ID") or query.get("after", ["0"])[0])
        one = self.store.runs.get(run)
        if one is None:
            self.send_json(404, {"error": {"code": "not_found", "message": "there is no such run"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self.wfile.write(b": begins\n\n")
            while True:
                with self.store.lock:
                    self.store.lock.wait_for(lambda: one["version"] > seen, timeout=1)
                    said = [item for item in one["said"] if item[0] > seen]
                for version, kind, data in said:
                    self.wfile.write(f"id: {version}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode())
                    seen = version
                self.wfile.write(b": alive\n\n")
                self.wfile.flush()
        except OSError:
            return


def serve() -> tuple[ThreadingHTTPServer, Store]:
    """A server on a free port of the loopback, running on a thread."""
    store = Store()
    handler = type("Bound", (Handler,), {"store": store})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, store


if __name__ == "__main__":
    server, store = serve()
    print(f"http://127.0.0.1:{server.server_port}/setup#token={store.setup_token}", flush=True)
    threading.Event().wait()
