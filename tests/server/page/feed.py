# SPDX-License-Identifier: Apache-2.0
"""Records runs through the API, as a program with a token does."""

from __future__ import annotations

import math
import random
from typing import Any

from server_process import Client

GIB = 1 << 30
MIB = 1 << 20

PLANNED = {
    "parameter": 2.9 * GIB,
    "gradient": 2.9 * GIB,
    "optimizer_state": 5.8 * GIB,
    "activation": 3.1 * GIB,
    "temporary": 0.6 * GIB,
    "workspace": 0.2 * GIB,
    "input": 24 * MIB,
    "buffer": 12 * MIB,
    "fragmentation": 0.3 * GIB,
    "context": 0.5 * GIB,
}
PLAIN = {**PLANNED, "activation": 9.4 * GIB, "temporary": 0.8 * GIB}


class Feed:
    """One program that records: its client and the number of its next batch."""

    def __init__(self, client: Client) -> None:
        self.client, self.sequence = client, 0

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One request, which must go well."""
        answer = self.client.ask(method, f"/api/v1{path}", body)
        self.client.close()  # the next call may be long after
        assert answer.status < 300, (method, path, answer)
        return answer.json if answer.body else None

    def run(self, run: str, name: str, project: str = "gpt", **more: Any) -> str:
        """Begins a run."""
        self.call("POST", "/runs", {"id": run, "project": project, "name": name, **more})
        return run

    def batch(self, run: str, **content: Any) -> None:
        """Points, events, documents of a run."""
        self.sequence += 1
        self.call("POST", f"/runs/{run}/batches", {"client": "feed", "sequence": self.sequence, **content})

    def points(self, run: str, series: str, unit: str, steps: list[int], values: list[Any]) -> None:
        """Points of one series, in pieces that fit into batches."""
        for first in range(0, len(steps), 10_000):
            piece = slice(first, first + 10_000)
            self.batch(
                run, points=[{"series": series, "unit": unit, "steps": steps[piece], "values": values[piece]}]
            )


def plan_document(seed: int = 0) -> dict[str, Any]:
    """A plan as `Plan.to_dict` writes it, without timelines."""
    layers = range(12)
    applied = {layer for layer in layers if (layer + seed) % 3}
    choices = [
        {
            "module": f"transformer.h.{layer}",
            "type": "GPT2Block",
            "techniques": ["checkpoint"] if layer in applied else [],
            "rule": "chosen" if layer in applied else "not-needed",
            "reason": "cheapest way found to meet the budget"
            if layer in applied
            else "the budget is met without it",
            "calls": 1,
            "bytes": 525 * MIB,
            "ns": 2_400_000,
            "joined": False,
            "boundary": False,
        }
        for layer in layers
    ]

    def step(parts: dict[str, float], ns: int) -> dict[str, Any]:
        sizes = {name: int(size) for name, size in parts.items()}
        return {"by_category": sizes, "device_used_peak_bytes": sum(sizes.values()), "step_time_ns": ns}

    return {
        "version": 7,
        "digest": f"8f2c41d0{seed:08x}",
        "mode": "balanced",
        "profile": "static",
        "fits": True,
        "budget_bytes": 18 * GIB,
        "budget_source": "85 % of the device's memory",
        "smallest_peak_bytes": 12 * GIB,
        "choices": choices,
        "predicted": step(PLANNED, 212_000_000 + seed),
        "plain": step(PLAIN, 188_000_000),
        "steps": [
            {
                "technique": "loss_tile",
                "modules": ["lm_head"],
                "types": ["Linear"],
                "exact": True,
                "bytes": 1_200 * MIB,
                "ns": -1_500_000,
                "other_fits": False,
                "reason": "the loss is computed in tiles, so that the logits are never whole",
            }
        ]
        if seed % 2 == 0
        else [],
        "advice": ["1.9 GiB are free: a batch of 9 would fit"],
        "notes": [],
    }


def training(client: Feed, run: str, steps: int, seed: int = 0) -> None:
    """All that a training run of so many steps records."""
    dice = random.Random(seed)
    count = [*range(steps)]
    total = int(sum(PLANNED.values()))
    peaks = [int(total * (0.985 + 0.006 * dice.random()) * min(1.0, 0.8 + step / 20)) for step in count]
    peaks[steps // 3] = int(total * 1.07)
    ends = [0, steps - 1]
    client.points(run, "memory/peak", "bytes", count, peaks)
    for phase, share in (("forward", 0.82), ("backward", 1.0), ("optimizer", 0.74)):
        client.points(run, f"memory/phase/{phase}", "bytes", count, [int(peak * share) for peak in peaks])
        client.points(run, f"memory/predicted/phase/{phase}", "bytes", ends, [int(total * share)] * 2)
    client.points(run, "memory/predicted", "bytes", ends, [total] * 2)
    client.points(run, "memory/budget", "bytes", ends, [18 * GIB] * 2)
    client.points(run, "memory/limit", "bytes", ends, [24 * GIB] * 2)
    for category, size in PLANNED.items():
        client.points(run, f"memory/predicted/category/{category}", "bytes", ends, [int(size)] * 2)
    times = [int(2.1e8 * (1 + 0.08 * dice.random() + (0.6 if step % 251 == 250 else 0))) for step in count]
    client.points(run, "time/step", "ns", count, times)
    client.points(run, "time/predicted", "ns", ends, [212_000_000] * 2)
    losses = [3.1 * math.exp(-step / (steps / 3)) + 2.4 + 0.15 * dice.random() for step in count]
    client.points(run, "loss", "", count, losses)
    client.points(run, "train/lr", "", count, [6e-4 * min(1, (step + 1) / 200) for step in count])
    client.points(run, "val/accuracy", "", count[::50], [0.2 + 0.5 * step / steps for step in count[::50]])
    client.points(run, "offload/out", "bytes", count, [step * 410 * MIB for step in count])
    client.batch(
        run,
        events=[
            {
                "kind": "plan",
                "step": 0,
                "text": "12 modules: 8 checkpointed; 16.3 GiB of 18.0 GiB",
                "data": {"digest": "8f2c41d0"},
            },
            {
                "kind": "oom",
                "step": steps // 3,
                "text": "out of memory in backward of transformer.h.7\n  asked 512 MiB\n  fix  budget 17 GiB",
            },
            {
                "kind": "recovery",
                "step": steps // 3,
                "text": "the step was repeated with all layers checkpointed",
            },
        ],
        documents={
            "plan": plan_document(seed),
            "params": {"lr": 6e-4 * (1 + seed), "batch": 8, "optimizer": "AdamW", "seed": seed},
            "environment": {
                "device": "NVIDIA H100 80GB",
                "device_bytes": 85_520_809_984,
                "python": "3.11.7",
                "torch": "2.11.0",
            },
            "report": {"lines": ["peak 16.3 GiB of 18.0 GiB", "  activation 3.1 GiB"]},
        },
    )


HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "javascript:alert(3)//%0a'\"><svg onload=alert(4)>",
    "\u202egnp.exe \u2066 the other way",
    "a" * 128,
)


def hostile_content(client: Feed, run: str) -> None:
    """Markup in every place that takes a text."""
    bad = HOSTILE[0]
    plan = plan_document()
    plan["digest"] = plan["mode"] = plan["budget_source"] = bad
    plan["advice"] = plan["notes"] = [bad]
    for choice in plan["choices"]:
        choice["module"] = choice["type"] = choice["reason"] = bad
        choice["techniques"] = [bad]
    client.batch(
        run,
        points=[
            {"series": name, "unit": bad[:16], "steps": [0, 1, 2], "values": [1, "NaN", 2.5]}
            for name in (bad, f"{bad}/{bad}", "loss", "memory/peak")
        ],
        events=[{"kind": "note", "step": 1, "text": bad, "data": {bad: bad}}],
        documents={
            "plan": plan,
            "params": {bad: bad},
            "environment": {bad: bad},
            "report": {"lines": [bad]},
            "config": {"a": {bad: [bad]}},
        },
    )
