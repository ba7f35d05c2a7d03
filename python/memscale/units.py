# SPDX-License-Identifier: Apache-2.0
"""Byte sizes as text: what a user writes ("8GiB", "500 MB") and what MemScale prints ("7.45 GiB").

Both families are read, because both are in daily use: GB is 1e9 bytes, GiB is 2^30 bytes. Printing always
uses the binary family, as PyTorch does.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

MAX_BYTES: Final = 2**63 - 1
"""Largest size accepted: the core adds sizes as signed 64-bit values."""

_MAX_TEXT = 40  # far above any size that fits into 63 bits; keeps hostile input short
_PREFIXES = ("K", "M", "G", "T", "P")
_SIZE = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([A-Za-z]*)\s*", re.ASCII)
_UNITS: dict[str, int] = {"": 1, "B": 1}
_UNITS.update({f"{prefix}B": 1000**power for power, prefix in enumerate(_PREFIXES, start=1)})
_UNITS.update({f"{prefix}IB": 1024**power for power, prefix in enumerate(_PREFIXES, start=1)})


def parse_bytes(text: str) -> int:
    """Reads a size such as "8GiB", "8 GB", "0.5gib" or "8589934592".

    A fraction of a byte is dropped, so that a budget read from text is never above the one written.

    Args:
        text: A number, then B, KB…PB (powers of 1000) or KiB…PiB (powers of 1024) in any case; without a unit
            the number counts bytes. "8G" is refused: it leaves open which of the two families is meant.

    Returns:
        The size in bytes, at most `MAX_BYTES`.

    Raises:
        ValueError: The text is not a size; the message says what is.

    Example:
        >>> parse_bytes("8GiB"), parse_bytes("500 MB")
        (8589934592, 500000000)
    """
    if not isinstance(text, str):
        raise ValueError(f"a size must be a text such as '8GiB', not {type(text).__name__}")
    match = _SIZE.fullmatch(text) if len(text) <= _MAX_TEXT else None
    if match is None:
        shown = text[:_MAX_TEXT]
        raise ValueError(f"{shown!r} is not a size: write it as '8GiB', '500 MB' or a count of bytes")
    number, unit = match.group(1), match.group(2).upper()
    if unit not in _UNITS:
        raise ValueError(f"{text!r} has the unknown unit {match.group(2)!r}{_unit_hint(unit)}")
    if unit == "" and "." in number:
        raise ValueError(f"{text!r} is a fraction without a unit: write it as '{number}GiB' or '{number}GB'")
    size = int(Decimal(number) * _UNITS[unit])
    if size > MAX_BYTES:
        raise ValueError(f"{text!r} is above the largest size, {format_bytes(MAX_BYTES)}")
    return size


def format_bytes(size: int) -> str:
    """Prints a size with two digits after the point in binary units: "7.45 GiB", "512 B", "-1.00 KiB".

    Args:
        size: Bytes; negative for a difference.

    Example:
        >>> format_bytes(8 * 1024**3)
        '8.00 GiB'
    """
    sign, rest = ("-", -int(size)) if size < 0 else ("", int(size))
    if rest < 1024:
        return f"{sign}{rest} B"
    for power, prefix in enumerate(_PREFIXES, start=1):
        # Hundredths, half up, in integers: a float would round sizes above 2^53 twice.
        hundredths = (rest * 200 + 1024**power) // (2 * 1024**power)
        if hundredths < 1024 * 100 or prefix == _PREFIXES[-1]:
            break
    return f"{sign}{hundredths // 100}.{hundredths % 100:02d} {prefix}iB"


def _unit_hint(unit: str) -> str:
    """Says which units there are, and which two a lone prefix such as "G" may mean."""
    if unit in _PREFIXES:
        power = _PREFIXES.index(unit) + 1
        return f": write {unit}B (1e{3 * power} bytes) or {unit}iB (2^{10 * power} bytes)"
    return ": allowed are B, KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB"
