# SPDX-License-Identifier: Apache-2.0
"""The rows as tables for people: the registry, the peers, the sweep."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from memscale.benchmarks.peers import PEERS
from memscale.benchmarks.rows import Row, taken_bytes
from memscale.benchmarks.ways import is_ours

__all__ = ["beaten", "not_finite", "reductions", "report"]

_SIZES = {
    "full": "",
    "reduced": "Reduced sizes, for a host without a card: half the width, heads and tokens, a quarter of the "
    "layers and an eighth of the vocabulary. All memory is a sixteenth, in the same shares.",
    "tiny": "Tiny sizes, for tests: these figures show nothing.",
}


def report(rows: Sequence[Row], scale: str, left_out: Sequence[str]) -> str:
    """All tables of a run."""
    parts = [_SIZES[scale]]
    main = [row for row in rows if row["suite"] == "registry"]
    if main:
        parts.append(_table(_HEAD, [_main_row(row) for row in main]))
    theirs = [row for row in rows if row["suite"] == "peers" and not is_ours(row["way"])]
    if theirs:
        head = ("model", "peer", "peak MB", "× plain", "step ms", "× bf16", "beaten by MemScale", "remark")
        parts.append("Peers, under BF16 autocast\n" + _table(head, [_peer_row(row, rows) for row in theirs]))
        parts.append(_peer_list())
    curve = [row for row in rows if row["suite"] == "frontier"]
    if curve:
        parts.append("MemScale over budgets\n" + _table(_HEAD, [_main_row(row) for row in curve]))
    swept = [row for row in rows if row["suite"] == "sweep"]
    if swept:
        parts.append(_sweep(swept))
    if left_out:
        parts.append("Not measured, for want of time: " + "; ".join(left_out))
    return "\n\n".join(part for part in parts if part)


# ---- the registry ------------------------------------------------------------------------------------

_HEAD = (
    "model", "way", "peak MB", "engine MB", "reserved", "× plain", "predicted", "step ms", "quartiles",
    "× plain", "× bf16", "loss", "gradients", "remark",
)  # fmt: skip


def _main_row(row: Row) -> list[str]:
    return [
        row["model"],
        row["way"],
        _mb(row["allocated_bytes"]),
        _mb(row.get("engine_bytes") or None),
        _mb(row["reserved_bytes"]),
        _number(row["of_plain_memory"], ".3f"),
        _number(row.get("predicted_off_percent"), "+.1f", " %"),
        _number(row["step_ms"], ".1f"),
        _spread(row),
        _number(row["of_plain_time"], ".2f"),
        _number(row["of_bf16_time"], ".2f"),
        _loss(row),
        _gradients(row),
        _remark(row),
    ]


def _spread(row: Row) -> str:
    if row["step_ms"] is None:
        return ""
    return f"{row['step_low_ms']:.1f}–{row['step_high_ms']:.1f}"


def _loss(row: Row) -> str:
    if row.get("losses_equal"):
        return "equal"
    if not_finite(row):
        return "not finite"
    return _number(row.get("loss_off_percent"), ".2f", " % off")


def not_finite(row: Row) -> bool:
    """Whether a loss of it, or of what it is compared with, was infinite or no number."""
    off = row.get("loss_off_percent")
    return off is not None and not math.isfinite(float(off))  # text, where it came from a JSON file


def _gradients(row: Row) -> str:
    equal = row.get("gradients_equal")
    if equal is None or equal:
        return "equal" if equal else ""
    return "rounded" if row.get("exact") is False else "differ"


def _remark(row: Row) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    parts = [row["techniques"]]
    if row["fits"] is False and row["way"] != "smallest":
        parts.append("over its budget")
    return ", ".join(part for part in parts if part)


# ---- the peers ---------------------------------------------------------------------------------------


def beaten(row: Row, rows: Sequence[Row]) -> list[Row]:
    """MemScale's runs of the same model that take no more memory and no more time than a peer's run."""
    return [
        ours
        for ours in rows
        if ours["model"] == row["model"]
        and ours["scale"] == row["scale"]
        and ours["suite"] != "sweep"
        and ours["status"] == "ok"
        and is_ours(ours["way"])
        and taken_bytes(ours) <= taken_bytes(row)
        and not not_finite(ours)
        and ours["step_ms"] <= row["step_ms"]
    ]


def _peer_row(row: Row, rows: Sequence[Row]) -> list[str]:
    verdict = ""
    if row["status"] == "ok":
        better = beaten(row, rows)
        verdict = "no"
        if better:
            best = min(better, key=lambda ours: float(ours["step_ms"]))
            memory = taken_bytes(best) / taken_bytes(row)
            verdict = f"{memory:.2f} of its memory at {best['step_ms'] / row['step_ms']:.2f} of its time"
    return [
        row["model"],
        row["way"],
        _mb(row["allocated_bytes"]),
        _number(row["of_plain_memory"], ".3f"),
        _number(row["step_ms"], ".1f"),
        _number(row["of_bf16_time"], ".2f"),
        verdict,
        _remark(row),
    ]


def _peer_list() -> str:
    rows = [[peer.name, peer.version, peer.settings, peer.documentation] for peer in PEERS]
    return "Settings\n" + _table(("peer", "version", "settings", "recommended in"), rows)


# ---- the sweep ---------------------------------------------------------------------------------------


def reductions(rows: Sequence[Row]) -> list[tuple[Row, Row, float]]:
    """Plain run, MemScale's, and the share of the peak that is gone, of each point that has both."""
    found = []
    point = ("model", "scale", "batch", "length", "precision")
    for row in rows:
        if row["suite"] != "sweep" or row["way"].startswith("plain") or row["status"] != "ok":
            continue
        for plain in rows:
            same = plain["suite"] == "sweep" and plain["way"].startswith("plain") and plain["status"] == "ok"
            if same and all(plain[name] == row[name] for name in point):
                found.append((plain, row, 1 - taken_bytes(row) / taken_bytes(plain)))
                break
    return found


def _sweep(rows: Sequence[Row]) -> str:
    found = reductions(rows)
    lines = [
        [
            plain["model"], str(plain["batch"]), str(plain["length"]), plain["precision"],
            _mb(plain["allocated_bytes"]), _mb(ours["allocated_bytes"]),
            _mb(ours.get("engine_bytes") or None), f"{100 * gone:.1f} %",
            f"{ours['step_ms'] / plain['step_ms']:.2f}",
        ]
        for plain, ours, gone in found
    ]  # fmt: skip
    head = (
        "model",
        "batch",
        "length",
        "plain run",
        "plain MB",
        "MemScale MB",
        "engine MB",
        "reduction",
        "× time",
    )
    text = "Sweep\n" + _table(head, lines)
    if found:
        shares = [100 * gone for _, _, gone in found]
        middle = statistics.median(shares)
        text += f"\nmedian reduction {middle:.1f} % ({min(shares):.1f} to {max(shares):.1f})"
    for row in (row for row in rows if row["status"] != "ok"):
        what = f"{row['model']} {row['batch']}×{row['length']} {row['way']}"
        text += f"\n{what}: {row['status']}: {row['reason']}"
    return text


# ---- text --------------------------------------------------------------------------------------------


def _mb(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:,.1f}"


def _number(value: Any, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; numbers to the right. The last column is text."""
    every = [list(head), *map(list, rows)]
    widths = [max(len(row[index]) for row in every) for index in range(len(head))]
    right = [
        index < len(head) - 1 and all(not row[index] or row[index][0] in "+-0123456789" for row in rows)
        for index in range(len(head))
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if side else cell.ljust(width)
            for cell, width, side in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in every
    ]
    return "\n".join(lines)
