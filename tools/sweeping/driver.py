# SPDX-License-Identifier: Apache-2.0
"""Runs the models of several libraries, one after the other in each job, and keeps rows of earlier runs."""

from __future__ import annotations

import fnmatch
import json
import os
import queue
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweeping import rows
from sweeping.forks import Parent, call_anew, environment
from sweeping.rows import BAR, FAILED, NOT_SWEPT, Row

LIBRARIES = ("transformers", "timm", "torchvision", "diffusers", "torch_geometric", "monai", "around")
BARE = ("transformers", "around")
"""Those that need nothing but what the tests need."""

_TRIES_LIMIT = 3.0
"""The plain process tries several recipes, and may take so many times longer than the other."""


@dataclass(frozen=True)
class Orders:
    """What to run.

    Attributes:
        libraries: of `LIBRARIES`.
        only: patterns, or parts, of `library:name`; empty for all.
        file: of rows.
        packages: folder of libraries; None for what the environment has.
        sample: as many of each library, drawn with `seed`; None for all.
        seed: of the draw.
        minutes: nothing is begun after them.
        jobs: how many models at a time.
        limit: seconds for each process.
        again: also what is there already.
        keep: what was run with another commit or other versions counts as there.
        retry: of that, what failed or could not be swept.
        share: the budget as a share of the plain peak.
        confirm: failures are seen again in a process started anew before they count.
    """

    libraries: tuple[str, ...]
    only: tuple[str, ...]
    file: Path
    packages: Path | None
    sample: int | None = None
    seed: int = 0
    minutes: float = float("inf")
    jobs: int = 1
    limit: float = 120.0
    again: bool = False
    keep: bool = False
    retry: bool = False
    share: float = 0.6
    confirm: bool = True


class Sweep:
    """One run of the driver."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.commit = rows.commit()
        self.known = rows.read(orders.file)
        self.done: dict[tuple[str, str], Row] = {}
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._versions: dict[str, dict[str, str]] = {}

    def run(self) -> list[Row]:
        """All rows that were asked for, those of earlier runs among them."""
        wanted = self._wanted()
        work: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        for item in wanted:
            if self._is_known(item):
                self.done[item] = self.known[item]
            else:
                work.put(item)
        print(f"{len(wanted)} models, {len(self.done)} of them known", file=sys.stderr)
        lines = [threading.Thread(target=self._line, args=(work,)) for _ in range(self.orders.jobs)]
        for line in lines:
            line.start()
        for line in lines:
            line.join()
        return [self.done[item] for item in wanted if item in self.done]

    def _wanted(self) -> list[tuple[str, str]]:
        found = []
        for library in self.orders.libraries:
            about = _listing(library, self.orders.packages)
            self._versions[library] = rows.versions(about["distributions"], self.orders.packages)
            found += [(library, name) for name in about["names"]]
        if self.orders.only:
            found = [item for item in found if _matches(":".join(item), self.orders.only)]
        if self.orders.sample is not None:
            count, seed = self.orders.sample, self.orders.seed
            parts = [[item for item in found if item[0] == library] for library in self.orders.libraries]
            drawn = [item for part in parts for item in sample(part, count, seed)]
            found = sample(drawn, len(drawn), seed)  # in turns, so that time that ends ends with some of each
        return found

    def _is_known(self, item: tuple[str, str]) -> bool:
        row = self.known.get(item)
        if row is None or self.orders.again:
            return False
        same = row.commit == self.commit and row.versions == self._versions[item[0]]
        if not (same or self.orders.keep):
            return False
        return not (self.orders.retry and row.status in (FAILED, NOT_SWEPT))

    def _line(self, work: queue.SimpleQueue[tuple[str, str]]) -> None:
        """One model after the other, with a parent for each library."""
        parents: dict[str, Parent] = {}
        try:
            while time.monotonic() - self._start < 60 * self.orders.minutes:
                try:
                    item = work.get_nowait()
                except queue.Empty:
                    return
                if item[0] not in parents:
                    parents[item[0]] = Parent(item[0], self.orders.packages)
                self._finish(self._one(parents[item[0]], item))
        finally:
            for parent in parents.values():
                parent.close()

    def _one(self, parent: Parent, item: tuple[str, str]) -> Row:
        row = Row(*item, self.commit, self._versions[item[0]])
        start = time.monotonic()
        self.fill(row, parent)
        if row.status == FAILED and self.orders.confirm:
            again = replace(row, problems=[], status=NOT_SWEPT)
            self.fill(again, None)
            row.confirmed = bool(again.kinds() & row.kinds() & set(BAR))
        row.seconds = round(time.monotonic() - start, 1)
        return row

    def fill(self, row: Row, parent: Parent | None) -> None:
        """Runs both processes of a model; without a parent they are started anew.

        One that takes too long has shown nothing: the row says so, and that the model is not swept.
        """

        def call(function: str, limit: float, **arguments: Any) -> Any:
            if parent is not None:
                return parent.call(function, limit, name=row.name, **arguments)
            return call_anew(row.library, self.orders.packages, function, limit, name=row.name, **arguments)

        limit = self.orders.limit
        plain = call("plain", _TRIES_LIMIT * limit)
        if plain.value is None or plain.value["recipe"] is None:
            row.reason = plain.failure or plain.value["reason"]
            return
        row.recipe, row.plain_peak, row.finite = (plain.value[name] for name in ("recipe", "peak", "finite"))
        planned = call("planned", limit, recipe=row.recipe, peak=row.plain_peak, share=self.orders.share)
        if planned.late:
            row.reason = f"MemScale: {planned.failure}"
            return
        if planned.value is None:
            row.status, row.problems = FAILED, [(rows.CRASH, "planned", planned.failure)]
            return
        rows.judge(row, plain.value, planned.value)

    def _finish(self, row: Row) -> None:
        with self._lock:
            self.done[row.key] = row
            rows.append(self.orders.file, row)
            kinds = ", ".join(sorted(row.kinds()))
            said = kinds or row.reason[:70]
            print(
                f"{len(self.done):5d} {row.status:12s} {':'.join(row.key)} {row.seconds} s  {said}",
                file=sys.stderr,
                flush=True,
            )


def sample(items: Sequence[tuple[str, str]], count: int, seed: int) -> list[tuple[str, str]]:
    """So many of the items, by a hash of each: names that come and go leave the others of a draw in it."""
    return sorted(items, key=lambda item: zlib.crc32(f"{seed} {item}".encode()))[:count]


def _matches(text: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(text, pattern) or pattern in text for pattern in patterns)


_LIST = """
import importlib, json, sys
library = importlib.import_module("sweeping.libraries." + sys.argv[1])
print("\\n" + json.dumps({"names": library.names(), "distributions": library.DISTRIBUTIONS}))
"""


def _listing(library: str, packages: Path | None) -> Any:
    """Names of a library's models, from a process of its own: the driver imports none of them."""
    done = subprocess.run(
        [sys.executable, "-c", _LIST, library], env=environment(packages), capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{library} cannot be listed:\n{done.stderr[-1000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def command(row: Row) -> str:
    """What runs one model alone."""
    return f"{os.path.relpath(sys.executable)} tools/sweep.py --again --jobs 1 --only {':'.join(row.key)}"
