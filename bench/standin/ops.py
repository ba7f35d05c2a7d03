# SPDX-License-Identifier: Apache-2.0
"""Shows where the predicted allocations of a step part from those of the CUDA build on the stand-in runtime.

    ops.py CASE [--capability 8.0] [--count 20]

Both sequences of allocations, rounded as the allocator does, are aligned; what only one side has is printed
with its operator and line, the first difference first. A "+" is made by the CUDA build alone, a "-" predicted
alone. At the end, the highest sum of live bytes of both sides.
"""

from __future__ import annotations

import argparse
import difflib
from typing import Any

from sides import run_both


def _rounded(size: int) -> int:
    return -(-size // 512) * 512


def _allocations(events: list[list[Any]]) -> list[tuple[int, str]]:
    return [(_rounded(size), where) for action, size, _, where in events if action == "alloc" and size]


def _peak(events: list[list[Any]]) -> int:
    """Highest sum of what the events add and take away, from 0."""
    live = peak = 0
    for action, size, _, _ in events:
        if action == "alloc":
            live += _rounded(size)
        elif action in ("free", "free_completed"):
            live -= _rounded(size)
        peak = max(peak, live)
    return peak


def _print(sign: str, items: list[tuple[int, str]], room: int) -> None:
    for size, where in items[:room]:
        print(f"  {sign} {size:>12,}  {where}")


def main() -> None:
    """Runs both sides and compares."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("case")
    reader.add_argument("--capability", default="8.0")
    reader.add_argument("--count", type=int, default=20)
    options = reader.parse_args()
    real, ours = run_both(options.case, options.capability, events=True)
    left, right = _allocations(ours["events"]), _allocations(real["events"])
    matcher = difflib.SequenceMatcher(
        a=[size for size, _ in left], b=[size for size, _ in right], autojunk=False
    )
    shown = 0
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal" or shown >= options.count:
            continue
        after = left[a - 1][1] if a else "start"
        print(f"allocation {a} (of {len(left)}) / {c} (of {len(right)}), after {after}")
        _print("-", left[a:b], options.count - shown)
        _print("+", right[c:d], options.count - shown)
        shown += max(b - a, d - c)
    print(f"equal allocations: {sum(m.size for m in matcher.get_matching_blocks())}")
    print(f"rise within the step: predicted {_peak(ours['events']):,}, real {_peak(real['events']):,}")
    print(f"allocated: predicted {ours['allocated']:,}, real {real['allocated']:,}")
    print(f"reserved: predicted {ours['reserved']:,}, real {real['reserved']:,}")
    print(f"before a step: predicted {ours['start']:,}, real {real['steps'][-1]['before']:,}")


if __name__ == "__main__":
    main()
