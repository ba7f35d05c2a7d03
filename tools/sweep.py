# SPDX-License-Identifier: Apache-2.0
"""Trains models of public libraries, plain and under MemScale, and compares every bit of it.

    python tools/sweep.py [--library transformers,timm,...] [--only PATTERN ...] [--sample N --seed S]
        [--minutes M] [--jobs 2] [--json FILE] [--again] [--table docs/guide/coverage.md]

Each model has a process of its own in which MemScale comes first; plain PyTorch trains it in another.
tools/sweeping says what is compared. Rows are appended to FILE as they come; those that are in it already, of
the same commit and versions or, with --keep, of any, are kept: a sweep can go on where another ended. Ends
with 1 if a bit is wrong, MemScale raises what plain PyTorch does not, or anything is left behind.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sweeping import packages, page, rows
from sweeping.driver import BARE, LIBRARIES, Orders, Sweep


def _orders() -> tuple[Orders, Path | None]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", default="", help=f"of {', '.join(LIBRARIES)}; default: all")
    parser.add_argument("--only", nargs="+", default=[], help="patterns or parts of library:name")
    parser.add_argument("--sample", type=int, help="so many of each library, drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a processor for a process")
    parser.add_argument("--share", type=float, default=0.6, help="budget as a share of the plain peak")
    parser.add_argument("--json", type=Path, default=rows.ROOT / "build" / "sweep.jsonl", help="file of rows")
    parser.add_argument("--again", action="store_true", help="also what is in the file already")
    parser.add_argument("--keep", action="store_true", help="rows of other commits count as in the file")
    parser.add_argument(
        "--unconfirmed", action="store_true", help="do not see failures again in a new process"
    )
    parser.add_argument("--retry", action="store_true", help="of that, what failed or was not swept")
    parser.add_argument("--installed", action="store_true", help="install nothing")
    parser.add_argument("--table", type=Path, help="write the page of coverage there")
    args = parser.parse_args()
    named = tuple(args.library.split(",")) if args.library else tuple(
        name for name in LIBRARIES if not args.only or any(item.startswith(f"{name}:") for item in args.only)
    ) or LIBRARIES  # fmt: skip
    unknown = set(named) - set(LIBRARIES)
    if unknown:
        parser.error(f"unknown library {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    if args.installed:
        named = tuple(name for name in named if name in BARE)
    folder = None if args.installed else packages.installed()
    return Orders(
        libraries=named,
        only=tuple(args.only),
        file=args.json,
        packages=folder,
        sample=args.sample,
        seed=args.seed,
        minutes=args.minutes,
        jobs=args.jobs,
        limit=args.limit,
        again=args.again,
        keep=args.keep,
        retry=args.retry,
        share=args.share,
        confirm=not args.unconfirmed,
    ), args.table


def main() -> int:
    orders, table = _orders()
    found = Sweep(orders).run()
    print(page.summary(found))
    if table is not None:
        table.write_text(page.text(list(rows.read(orders.file).values())), encoding="utf-8")
    return 1 if any(row.status == rows.FAILED for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
