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
BUDGET_SHARE = 0.6
SLACK_BYTES = 64 * MIB
PREDICTION_SHARE = 0.02
MESSAGE = "can't allocate memory"
STEPS = {"full": 12, "short": 6}


class Demo:
    """The demo's state: what was found so far, and which promises were broken."""

    def __init__(self, size: str, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.start = time.perf_counter()
        self.broken: list[str] = []
        self.result: dict[str, Any] = {"size": size}

    def say(self, text: str) -> None:
        """One line of progress, with the time that has passed."""
        print(f"[{time.perf_counter() - self.start:5.0f} s] {text}", flush=True)

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
            if show and line.startswith(("step", "measured", "compared", "  plan ")):
                self.say(f"    {line.strip()}")

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
        weights, peak = found["parameters"] / 1e6, mib(self.result["plain_predicted_bytes"])
        self.say(f"    {weights:.1f} million weights, plain peak {peak}")
        budget, peak = mib(found["budget_bytes"]), mib(self.result["wrapped_predicted_bytes"])
        self.say(f"    under a budget of {budget}: peak {peak}; planned in {found['planning_seconds']:.1f} s")
        self.promise(plan["fits"], "the plan fits the budget")

    def limit(self) -> int:
        """The limit for both runs, from a dry run."""
        self.say("dry run: what do the interpreter and the libraries take by themselves?")
        dry = self.required(*self.training("tiny", 2), "--budget=1MiB")
        baseline, budget = dry["data_bytes"], self.result["budget_bytes"]
        limit = baseline + budget + SLACK_BYTES
        self.result |= {"baseline_bytes": baseline, "slack_bytes": SLACK_BYTES, "limit_bytes": limit}
        self.say(
            f"    hard limit (RLIMIT_DATA) {mib(limit)} = {mib(baseline)} for those + {mib(budget)} budget "
            f"+ {mib(SLACK_BYTES)} slack"
        )
        return int(limit)

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
        self.say(f"the same and one line, under the same limit: python train_bytes.py --budget {budget}")
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

    def training(self, size: str = "", steps: int = 0) -> list[str]:
        """The training program's command line."""
        steps = steps or STEPS[self.size]
        return ["train_bytes.py", f"--size={size or self.size}", f"--steps={steps}", "--record", "RECORD"]

    def compare(self) -> None:
        """Peaks, equality and step times, without a limit."""
        self.say("without a limit: measured peaks (torch.profiler), then both side by side, bit by bit")
        budget = self.result["budget_bytes"]
        found = self.required("demo/measure.py", "compare", self.size, str(budget), "RECORD", show=True)
        self.curves = {name: found[name]["curve"] for name in ("plain", "wrapped")}
        difference = found["steps"]["first_difference"]
        self.result |= {
            "plain_measured_bytes": found["plain"]["peak_bytes"],
            "wrapped_measured_bytes": found["wrapped"]["peak_bytes"],
            "bit_equal": difference is None,
            **found["steps"],
        }
        self.promise(difference is None, f"loss, gradients and weights are bit-equal (differs: {difference})")
        self.promise(found["wrapped"]["peak_bytes"] <= budget, "the measured peak stays within the budget")
        for name in ("plain", "wrapped"):
            predicted, peak = self.result[f"{name}_predicted_bytes"], found[name]["peak_bytes"]
            close = abs(predicted - peak) <= PREDICTION_SHARE * peak
            self.promise(close, f"the {name} peak is predicted to {PREDICTION_SHARE:.0%}")

    # ---- the end ---------------------------------------------------------------------------------

    def rows(self) -> list[tuple[str, str]]:
        """The closing table."""
        r = self.result
        sizes = {name: mib(size) for name, size in r.items() if name.endswith("_bytes")}
        share = 100 * r["budget_bytes"] / r["plain_measured_bytes"]
        times = f"{r['plain_step_seconds']:.2f} s plain, {r['wrapped_step_seconds']:.2f} s wrapped"
        peaks = "{} predicted, {} measured"
        equal = "yes" if r["bit_equal"] else f"NO: {r['first_difference']}"
        return [
            ("plain peak", peaks.format(sizes["plain_predicted_bytes"], sizes["plain_measured_bytes"])),
            ("wrapped peak", peaks.format(sizes["wrapped_predicted_bytes"], sizes["wrapped_measured_bytes"])),
            ("budget", f"{sizes['budget_bytes']}, {share:.0f} % of the plain peak"),
            ("step time", f"× {r['step_time_ratio']:.2f} ({times}; median of {r['compared_steps'] - 1})"),
            (
                "processor time",
                f"× {r['processor_time_ratio']:.2f} (tells more where other programs run too)",
            ),
            (f"bit-equal over {r['compared_steps']} steps", equal),
        ]

    def report(self, path: Path) -> str:
        """Writes the HTML report; returns a line about it."""
        from memscale import Plan
        from memscale.errors import MemScaleError
        from memscale.observability.report import write_report

        plan = Plan.from_json(json.dumps(self.plan))
        title, curves = "MemScale demo: GPT-2 over bytes", self.curves
        try:
            write_report(plan, path, title=title, measured=self.rows(), timeline_measured=curves)
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
