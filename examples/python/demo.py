# SPDX-License-Identifier: Apache-2.0
"""MemScale's promise, tried out: training under a memory budget that the operating system enforces.

    python demo.py               # a GPT-2 of 25 million weights; two to four minutes on two cores
    python demo.py --short       # a smaller one; about a minute

1. MemScale says, before anything runs, what a training step takes and what it would take under a budget.
2. `train_bytes.py` runs as plain PyTorch under a limit that leaves room for the budget: it dies.
3. The same program with the one line runs under the same limit: it trains.
4. Without a limit, both are measured, and compared bit by bit.

The exit status is 0 only if all of that came true. `report.html` shows the plan and the measured curves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from demo.limits import Run, limits_work, run

HERE = Path(__file__).resolve().parent
MIB = 1024 * 1024
BUDGET_SHARE = 0.65
SLACK_BYTES = 96 * MIB
MESSAGE = "can't allocate memory"
STEPS = {"full": 12, "short": 12}


class Demo:
    """The demo's state: what was found so far, and which promises were broken."""

    def __init__(self, size: str, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.start = time.perf_counter()
        self.broken: list[str] = []
        self.result: dict[str, Any] = {"size": size}

    def say(self, text: str = "") -> None:
        """One line of progress, with the time that has passed."""
        print(f"[{time.perf_counter() - self.start:5.0f} s] {text}" if text else "", flush=True)

    def promise(self, kept: bool, text: str) -> None:
        """Notes whether something came true."""
        if not kept:
            self.broken.append(text)
            self.say(f"BROKEN PROMISE: {text}")

    def child(self, *command: str, limit_bytes: int | None = None, show: bool = False) -> tuple[Run, Any]:
        """Runs one of our programs; returns how it ended and what it recorded (None: nothing)."""
        file = self.folder / "record.json"
        file.unlink(missing_ok=True)
        program, *arguments = (str(file) if word == "RECORD" else word for word in command)

        def progress(line: str) -> None:
            if show and line.startswith(("step", "measured", "compared")):
                self.say(f"    {line}")

        ended = run([sys.executable, str(HERE / program), *arguments], limit_bytes, progress)
        return ended, json.loads(file.read_text()) if file.exists() else None

    def required(self, *command: str, show: bool = False) -> Any:
        """Runs a program that has no reason to fail; returns what it recorded."""
        ended, record = self.child(*command, show=show)
        if ended.code != 0 or record is None:
            raise SystemExit(f"{' '.join(command)} failed with status {ended.code}:\n{ended.output}")
        return record

    # ---- the parts -------------------------------------------------------------------------------

    def predict(self) -> None:
        """What MemScale says beforehand."""
        self.say("memscale.plan: what will a training step take? (nothing is computed)")
        found = self.required("demo/measure.py", "predict", self.size, str(BUDGET_SHARE), "RECORD")
        plan = found["plan"]
        self.result |= {
            "parameters": found["parameters"],
            "budget_bytes": found["budget_bytes"],
            "plain_predicted_bytes": plan["plain"]["allocated_peak_bytes"],
            "wrapped_predicted_bytes": plan["predicted"]["allocated_peak_bytes"],
        }
        self.plan = plan
        self.say(f"    {found['parameters'] / 1e6:.1f} million weights, plain peak {mib(self.result['plain_predicted_bytes'])}")
        self.say(f"    budget for the demo: {mib(found['budget_bytes'])}; planned in {found['planning_seconds']:.1f} s")
        self.promise(plan["fits"], "the plan fits the budget")

    def limit(self) -> int:
        """The limit for both runs, from a dry run."""
        self.say("dry run: what do the interpreter and the libraries take by themselves?")
        dry = self.required("train_bytes.py", "--size=tiny", "--steps=2", "--budget=1MiB", "--record", "RECORD")
        limit_bytes = int(dry["data_bytes"]) + int(self.result["budget_bytes"]) + SLACK_BYTES
        self.result |= {"baseline_bytes": dry["data_bytes"], "slack_bytes": SLACK_BYTES, "limit_bytes": limit_bytes}
        self.say(
            f"    limit (RLIMIT_DATA) {mib(limit_bytes)} = {mib(dry['data_bytes'])} for those "
            f"+ {mib(self.result['budget_bytes'])} budget + {mib(SLACK_BYTES)} slack"
        )
        return limit_bytes

    def plain_dies(self, limit_bytes: int) -> None:
        """Plain PyTorch under the limit."""
        self.say("plain PyTorch under that limit: python train_bytes.py")
        ended, _ = self.child(*self.training(), limit_bytes=limit_bytes, show=True)
        line = ended.line_with(MESSAGE)
        self.say(f"    {line or (ended.output.splitlines() or ['no output'])[-1]}")
        self.say(f"    exit status {ended.code}")
        self.result |= {"plain_status": ended.code, "plain_message": line}
        self.promise(ended.code != 0 and line is not None, "plain PyTorch runs out of memory under the limit")

    def wrapped_trains(self, limit_bytes: int) -> None:
        """The same program with the one line, under the same limit."""
        budget = str(self.result["budget_bytes"])
        self.say(f"the same with one line more, under the same limit: python train_bytes.py --budget {budget}")
        ended, record = self.child(*self.training(), f"--budget={budget}", limit_bytes=limit_bytes, show=True)
        trained = ended.code == 0 and record is not None
        self.promise(trained, "the wrapped run trains under the limit")
        if not trained:
            print(ended.output[-3000:])
            return
        first, last = record["losses"][0], sum(record["losses"][-3:]) / 3
        self.result |= {"losses": record["losses"], "limited_plan_bytes": record["plan_peak_bytes"]}
        self.say(f"    loss {first:.3f} -> {last:.3f} (mean of the last three)")
        self.promise(last < first - 0.2, "the loss falls")

    def training(self) -> list[str]:
        """The training program's command line."""
        return ["train_bytes.py", f"--size={self.size}", f"--steps={STEPS[self.size]}", "--record", "RECORD"]

    def compare(self) -> None:
        """Peaks, equality and step times, without a limit."""
        self.say("without a limit: measured peaks (torch.profiler), then both side by side, bit by bit")
        budget = self.result["budget_bytes"]
        found = self.required("demo/measure.py", "compare", self.size, str(budget), "RECORD", show=True)
        plain_seconds, wrapped_seconds = found["step_seconds"]
        self.curves = {"plain": found["plain"]["curve"], "wrapped": found["wrapped"]["curve"]}
        self.result |= {
            "plain_measured_bytes": found["plain"]["peak_bytes"],
            "wrapped_measured_bytes": found["wrapped"]["peak_bytes"],
            "plain_step_seconds": plain_seconds,
            "wrapped_step_seconds": wrapped_seconds,
            "step_time_ratio": wrapped_seconds / plain_seconds,
            "compared_steps": found["steps"],
            "first_difference": found["difference"],
            "bit_equal": found["difference"] is None,
        }
        self.promise(found["difference"] is None, f"loss, gradients and weights are bit-equal: {found['difference']}")
        self.promise(found["wrapped"]["peak_bytes"] <= budget, "the measured peak stays within the budget")

    # ---- the end ---------------------------------------------------------------------------------

    def rows(self) -> list[tuple[str, str]]:
        """The closing table."""
        r = self.result
        equal = "yes" if r["bit_equal"] else f"NO: {r['first_difference']}"
        return [
            ("plain peak", f"{mib(r['plain_predicted_bytes'])} predicted, {mib(r['plain_measured_bytes'])} measured"),
            ("wrapped peak", f"{mib(r['wrapped_predicted_bytes'])} predicted, {mib(r['wrapped_measured_bytes'])} measured"),
            ("budget", f"{mib(r['budget_bytes'])}, {100 * r['budget_bytes'] / r['plain_measured_bytes']:.0f} % of plain"),
            ("step time", f"× {r['step_time_ratio']:.2f} ({r['plain_step_seconds']:.2f} s -> {r['wrapped_step_seconds']:.2f} s)"),
            (f"bit-equal over {r['compared_steps']} steps", equal),
        ]

    def report(self, path: Path) -> str:
        """Writes the HTML report; returns a line about it."""
        from memscale import Plan
        from memscale.errors import MemScaleError
        from memscale.observability.report import write_report

        plan = Plan.from_json(json.dumps(self.plan))
        try:
            write_report(
                plan, path, title="MemScale demo: GPT-2 over bytes", measured=self.rows(), timeline_measured=self.curves
            )
        except MemScaleError as error:
            return f"no report: {error}"
        return f"report: {path}"


def mib(size: float) -> str:
    """Bytes as text."""
    return f"{size / MIB:.0f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="a smaller model; about a minute")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures to a file")
    arguments = parser.parse_args()
    os.environ["PYTHONUNBUFFERED"] = "1"
    if not limits_work():
        print("demo.py needs a system that enforces RLIMIT_DATA: Linux 4.7 or later")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        demo = Demo("short" if arguments.short else "full", Path(folder))
        demo.predict()
        limit_bytes = demo.limit()
        demo.plain_dies(limit_bytes)
        demo.wrapped_trains(limit_bytes)
        demo.compare()
    report = demo.report(Path("report.html").resolve())
    seconds = time.perf_counter() - demo.start
    demo.result |= {"seconds": seconds, "broken": demo.broken}
    if arguments.json:
        arguments.json.write_text(json.dumps(demo.result, indent=2) + "\n")
    print()
    for name, value in demo.rows():
        print(f"  {name:26}{value}")
    print(f"\n{report}\ntotal: {seconds:.0f} s")
    for text in demo.broken:
        print(f"BROKEN PROMISE: {text}")
    return 1 if demo.broken else 0


if __name__ == "__main__":
    sys.exit(main())
