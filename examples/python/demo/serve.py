# SPDX-License-Identifier: Apache-2.0
"""A server with real runs in it: `make serve-demo`.

    python demo/serve.py                 # trains three times, then serves until Ctrl-C
    python demo/serve.py --short --once  # a smaller model, and ends when all is there

A memscale-server starts on loopback with a temporary folder and gets its first account. A small GPT-2 is
trained three times: under a budget that nothing has to be done for, and under two that take a plan. Each run
is recorded at the server by `Config(record=...)` and nothing else. The folder is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the example that is trained

from train_bytes import batch, build, corpus

import memscale
from memscale.cli.server.serve import command_of, find_program

STEPS = {"short": 40, "small": 30}
SHARES = (0.8, 0.6)
LISTENS = re.compile(r"memscale-server listens on (http://\S+)")
LINK = re.compile(r"#token=(\w+)")
MIB = 1 << 20


class Service:
    """A memscale-server of ours: a process, its address, the account that it has.

    Args:
        folder: of its data.
        listen: "ADDRESS:PORT".
    """

    name = "demo"

    def __init__(self, folder: Path, listen: str) -> None:
        words = command_of(find_program(), folder, listen)
        # Of a group of its own: Ctrl-C is for us, and we end it.
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.url = self._said(LISTENS)
        self.password = secrets.token_urlsafe(12)
        made = {"token": self._said(LINK), "name": self.name, "password": self.password}
        _, headers = self.ask("POST", "/setup", made, {})
        cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0], "Origin": self.url}
        wanted = {"name": "demo's runs", "scopes": ["ingest", "read"]}
        token, _ = self.ask("POST", "/tokens", wanted, cookie)
        self.token = token["token"]

    def _said(self, form: re.Pattern[str]) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = form.search(line)
        if found is None:
            raise SystemExit(f"memscale-server did not start: exit status {self.process.wait()}")
        return found[1]

    def ask(self, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[Any, Any]:
        """One request; returns the answer's JSON and its headers."""
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **headers} if data else headers
        request = urllib.request.Request(f"{self.url}/api/v1{path}", data, sent, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer), answer.headers

    def runs(self) -> list[dict[str, Any]]:
        """All runs that it has, each with the series of its points."""
        bearer = {"Authorization": f"Bearer {self.token}"}
        found = []
        for project in self.ask("GET", "/projects", None, bearer)[0]["projects"]:
            for run in self.ask("GET", f"/projects/{project['id']}/runs?sort=created", None, bearer)[0][
                "runs"
            ]:
                run["series"] = self.ask("GET", f"/runs/{run['id']}/series", None, bearer)[0]["series"]
                found.append(run)
        return found

    def stop(self) -> None:
        """Ends it as Ctrl-C would."""
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(60) != 0:
            raise SystemExit(f"memscale-server ended with status {self.process.returncode}")


def train(size: str, budget: int, record: str, name: str) -> list[float]:
    """One run of `train_bytes.py`, recorded. Returns its losses."""
    torch.manual_seed(0)
    text, generator = corpus(), torch.Generator().manual_seed(1)
    model = build(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    config = memscale.Config(memory_budget=budget, record=record, enable_logging=False)
    memscale.wrap(model, config, optimizer=optimizer)
    memscale.record(params={"size": size, "steps": STEPS[size], "budget": budget, "what": name})
    losses = []
    for _ in range(STEPS[size]):
        loss = model(**batch(text, size, generator)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    memscale.detach(model)
    return losses


def plain_peak(size: str) -> int:
    """What a step takes without a plan, predicted."""
    torch.manual_seed(0)
    sample = batch(corpus(), size, torch.Generator().manual_seed(1))
    model = build(size)
    plan = memscale.plan(model, torch.optim.AdamW(model.parameters()), sample_input=sample)
    return int(plan.plain.device_used_peak_bytes)


def train_all(service: Service, size: str) -> None:
    """Three runs with the same seed; what a plan does leaves no bit of the losses different."""
    os.environ["MEMSCALE_TOKEN"] = service.token
    peak = plain_peak(size)
    cases = [("plain", 2 * peak), *((f"{share:.0%} of it", int(share * peak)) for share in SHARES)]
    first: list[float] = []
    for name, budget in cases:
        print(f"training: {name}, {STEPS[size]} steps within {budget / MIB:.0f} MiB", flush=True)
        losses = train(size, budget, f"{service.url}/demo", name)
        print(f"  loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
        first = first or losses
        if losses != first:
            raise SystemExit("the losses differ from those of the plain run")


def check(service: Service) -> None:
    """Says what the server has; ends with an error if that is not three whole runs."""
    runs = service.runs()
    for run in runs:
        points = sum(series["count"] for series in run["series"])
        print(f"  {run['name']}: {run['state']}, {len(run['series'])} series, {points} points")
    if [run["state"] for run in runs] != ["finished"] * (1 + len(SHARES)):
        raise SystemExit("not all runs are at the server")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="train a smaller model")
    parser.add_argument("--once", action="store_true", help="end when the runs are there")
    parser.add_argument("--listen", default="127.0.0.1:8300", help="ADDRESS:PORT; port 0: any that is free")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of `finally`
    with tempfile.TemporaryDirectory(prefix="memscale-demo-") as folder:
        os.environ["XDG_STATE_HOME"] = folder  # what waits to be sent goes with the rest
        service = Service(Path(folder) / "data", arguments.listen)
        try:
            train_all(service, "small" if arguments.short else "short")
            check(service)
            print(f"\n{service.url}  account {service.name}, password {service.password}", flush=True)
            if not arguments.once:
                print("Ctrl-C ends the server and removes its folder", flush=True)
                service.process.wait()
        except KeyboardInterrupt:
            print()
        finally:
            service.stop()


if __name__ == "__main__":
    sys.exit(main())
