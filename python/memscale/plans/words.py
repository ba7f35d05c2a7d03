# SPDX-License-Identifier: Apache-2.0
"""Text for parts of a plan: modules as ranges, kept operations, ranges of sizes and times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

from memscale.plans.kept_ops import operation_of
from memscale.units import format_bytes

__all__ = [
    "bytes_range",
    "few",
    "kept_words",
    "ms_range",
    "pattern",
    "range_parts",
    "ranges",
    "signed_ms_range",
]

_MOST_PARTS: Final = 4


def kept_words(kept: Iterable[str]) -> str:
    """`addmm#0 addmm#1 _scaled_dot_product_flash_attention#0` as `addmm ×2, attention`."""
    counts = Counter(_short(operation_of(name)) for name in kept)
    return ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in counts.items()) or "nothing"


def _short(operation: str) -> str:
    """An operation's name for reading: all kernels of attention are "attention"."""
    return "attention" if "scaled_dot_product" in operation else operation.lstrip("_")


def bytes_range(sizes: tuple[int, int]) -> str:
    """A size, or two where they do not read the same."""
    low, high = map(format_bytes, sizes)
    return low if low == high else f"{low} – {high}"


def ms_range(times_ns: tuple[int, int]) -> str:
    """A time in milliseconds, or two where they do not read the same."""
    low, high = (f"{ns / 1e6:.2f}" for ns in times_ns)
    return f"{low} ms" if low == high else f"{low} – {high} ms"


def signed_ms_range(times_ns: tuple[int, int]) -> str:
    """A difference in milliseconds, or two."""
    low, high = (f"{ns / 1e6:+.2f}" for ns in times_ns)
    return f"{low} ms" if low == high else f"{low} to {high} ms"


def pattern(path: str) -> str:
    """A path with `*` for every number of a layer; "(model)" for the model itself."""
    return ".".join("*" if part.isdigit() else part for part in path.split(".")) or "(model)"


def ranges(modules: Iterable[str]) -> str:
    """`h.0 h.1 h.2 h.5` as `h.0-2, h.5`; `a.0.b.0 a.0.b.1 a.1.b.0 a.1.b.1` as `a.0-1.b.0-1`."""
    return ", ".join(range_parts(modules))


def range_parts(modules: Iterable[str]) -> list[str]:
    """Paths that differ in numbers only, put together."""
    by_pattern: dict[str, list[str]] = {}
    for module in modules:
        by_pattern.setdefault(pattern(module), []).append(module)
    parts: list[str] = []
    for name, alike in by_pattern.items():
        whole = _block(name, alike)
        parts += [whole] if whole else _runs(alike)
    return parts


def _block(name: str, modules: list[str]) -> str:
    """All combinations of some ranges of numbers as one part; "" where some are missing."""
    numbers = [[int(part) for part in module.split(".") if part.isdigit()] for module in modules]
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if any(column[-1] - column[0] >= len(column) for column in columns):
        return ""
    if math.prod(map(len, columns)) != len({tuple(row) for row in numbers}):
        return ""
    words = iter([f"{c[0]}-{c[-1]}" if len(c) > 1 else str(c[0]) for c in columns])
    return ".".join(next(words) if part == "*" else part for part in name.split("."))


def _runs(modules: list[str]) -> list[str]:
    """Stretches of paths whose last number rises by one."""
    parts: list[str] = []
    run: list[tuple[str, int, str]] = []
    for module in [*modules, ""]:
        split = _numbered(module)
        if run and (split is None or (run[-1][0], run[-1][1] + 1, run[-1][2]) != split):
            (head, first, tail), last = run[0], run[-1][1]
            parts.append(f"{head}{first}{'' if first == last else f'-{last}'}{tail}")
            run.clear()
        if split is not None:
            run.append(split)
    return parts


def few(parts: list[str], most: int = _MOST_PARTS) -> list[str]:
    """The parts, or of more than `most` the first ones and the last."""
    return parts if len(parts) <= most else [*parts[: most - 1], f"… {parts[-1]}"]


def _numbered(module: str) -> tuple[str, int, str] | None:
    """Splits at the last numeric component: ("transformer.h.", 3, ".mlp")."""
    parts = module.split(".")
    for index in range(len(parts) - 1, -1, -1):
        if parts[index].isdigit():
            head, tail = ".".join(parts[:index]), ".".join(parts[index + 1 :])
            return (head and head + "."), int(parts[index]), (tail and "." + tail)
    return None
