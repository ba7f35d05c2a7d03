#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records what MemScale decides, predicts and computes: a change that is to change nothing proves it.

    python tools/golden.py record FILE [NAME ...]     before the change
    python tools/golden.py check FILE [NAME ...]      after it; every difference is a line, exit status 1

For each workload of `bench/python/truth_workloads.py`, in a process of its own, with rates from tables:

    plans   mode x budget (60 and 30 % of the plain peak, the smallest) x this host and a card: digest of the
            plan, predicted bytes by category, predicted time, advice. `--mode MODE` takes those of one mode
    bits    two steps under the plan for 60 %: a hash of losses and gradients. They are those of this machine
            and this PyTorch: compare on the same
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
MODES: Final = ("conservative", "balanced", "aggressive")
PERCENTS: Final = (60, 30, 0)
CARD: Final = "RTX 3090"
SEED: Final = 0


def workloads() -> dict[str, Any]:
    """Those of the benchmark of predictions."""
    found: dict[str, Any] = importlib.import_module("truth_workloads").WORKLOADS
    return found


def plans_of(name: str, modes: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What is planned for a workload, by mode, budget and device."""
    import torch

    import memscale

    work = workloads()[name]
    for mode in modes:
        for device in (None, CARD):
            torch.manual_seed(SEED)
            model, batch = work.build(), work.batch()
            optimizer = work.optimizer([value for value in model.parameters() if value.requires_grad])
            sample = batch if isinstance(batch, dict) else tuple(batch)
            peak = memscale.predict(model, optimizer, sample_input=sample, device=device).plain
            assert peak is not None
            for percent in PERCENTS:
                budget = max(1, peak.device_used_peak_bytes * percent // 100)
                config = memscale.Config(
                    memscale.OptimizationMode(mode), memory_budget=budget, enable_logging=False
                )
                plan = memscale.plan(model, optimizer, config, sample, device)
                predicted = plan.predicted
                yield (
                    f"{name} {mode} {percent} % {device or 'host'}",
                    {
                        "digest": plan.digest,
                        "steps": [step.technique for step in plan.steps],
                        "fits": plan.fits,
                        "bytes": predicted.by_category,
                        "plain": plan.plain.device_used_peak_bytes,
                        "smallest": plan.smallest_peak_bytes,
                        "ns": predicted.step_time_ns,
                        "advice": list(plan.advice),
                    },
                )


def bits_of(name: str) -> str:
    """A hash of losses and gradients of two steps under a plan."""
    import torch

    import memscale

    work = workloads()[name]
    torch.manual_seed(SEED)
    model, batch = work.build(), work.batch()
    optimizer = work.optimizer([value for value in model.parameters() if value.requires_grad])
    sample = batch if isinstance(batch, dict) else tuple(batch)
    plain = memscale.predict(model, optimizer, sample_input=sample).plain
    assert plain is not None
    budget = plain.device_used_peak_bytes * PERCENTS[0] // 100
    memscale.wrap(model, memory_budget=budget, optimizer=optimizer, enable_logging=False)
    found = hashlib.sha256()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "autocast"):
            loss = work.loss(model(**batch) if isinstance(batch, dict) else model(*batch))
        loss.backward()
        for value in (loss, *(item.grad for item in model.parameters() if item.grad is not None)):
            dense = value.detach().to_dense() if value.is_sparse else value.detach()
            found.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
    return found.hexdigest()


def _child(name: str, modes: Sequence[str]) -> None:
    import torch

    torch.set_num_threads(1)
    entries = dict(plans_of(name, modes))
    entries[f"{name} bits"] = bits_of(name)
    print(json.dumps(entries))


def taken(names: Sequence[str], modes: Sequence[str]) -> dict[str, Any]:
    """The entries of workloads, two processes at a time."""
    paths = [str(ROOT / "bench" / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "MEMSCALE_CALIBRATION": "off", "PYTHONPATH": os.pathsep.join(paths)}

    def one(name: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--child", name, *modes]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        print(f"{name}: {'failed' if done.returncode else 'taken'}", file=sys.stderr)
        if done.returncode:
            return {name: {"failed": done.stderr.strip().splitlines()[-1:]}}
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    with ThreadPoolExecutor(2) as pool:
        return {key: value for entries in pool.map(one, names) for key, value in entries.items()}


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is no longer as it was, a line each."""
    lines = [f"{key}: is gone" for key in before.keys() - now.keys()]
    lines += [f"{key}: is new" for key in now.keys() - before.keys()]
    for key in before.keys() & now.keys():
        old, new = before[key], now[key]
        if isinstance(old, dict) and isinstance(new, dict):
            fields = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
            lines += [f"{key}: {name} was {old.get(name)}, is {new.get(name)}" for name in sorted(fields)]
        elif old != new:
            lines.append(f"{key}: was {old}, is {new}")
    return sorted(lines)


def main() -> int:
    """Records or checks."""
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], sys.argv[3:])
        return 0
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("what", choices=("record", "check"))
    options.add_argument("file", type=Path)
    options.add_argument("names", nargs="*", metavar="NAME", help="workloads; default: all")
    options.add_argument("--mode", choices=MODES, help="plans of this one; default: of all")
    given = options.parse_args()
    sys.path.insert(0, str(ROOT / "bench" / "python"))
    known = workloads()
    names = given.names or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        options.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(known)}")
    modes = [given.mode] if given.mode else MODES
    entries = taken(names, modes)
    if given.what == "record":
        given.file.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
        return int(any("failed" in value for value in entries.values() if isinstance(value, dict)))
    before = json.loads(given.file.read_text())
    left_out = {mode for mode in MODES if mode not in modes}
    before = {
        key: value
        for key, value in before.items()
        if key.split()[0] in names and key.split()[1] not in left_out
    }
    lines = differences(before, entries)
    print("\n".join(lines) if lines else f"{len(entries)} entries are as they were")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
