# SPDX-License-Identifier: Apache-2.0
"""Sizes as text: reading, refusing, printing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale.units import MAX_BYTES, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8GB", 8_000_000_000),
        ("500 MB", 500_000_000),
        ("0.5gib", 1 << 29),
        (" 1 kib ", 1024),
        ("1KB", 1000),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 << 40),
        ("1PiB", 1 << 50),
        ("17", 17),
        ("17B", 17),
        ("0", 0),
        (".5KiB", 512),
        ("3.KB", 3000),
        ("1.0009765625KiB", 1025),
        ("9223372036854775807", MAX_BYTES),
    ],
)
def test_reads(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_a_fraction_of_a_byte_is_dropped() -> None:
    assert parse_bytes("1.9999KB") == 1999
    assert parse_bytes("0.1KiB") == 102


def test_reads_exactly_where_a_float_would_round() -> None:
    assert parse_bytes("9007199.254740993GB") == 9007199254740993


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "-1GiB", "+1GiB", "1e9", "1 2GB", "8 GiBs", "1,5GB", "nan", "inf", "1..5GB", ".GB",
     "1_000", "٣GB", "8GiB\n8", "9" * 41, "1 G iB"],
)  # fmt: skip
def test_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|unit"):
        parse_bytes(text)


def test_a_lone_prefix_is_refused_with_both_meanings() -> None:
    with pytest.raises(ValueError, match=r"GB \(1e9 bytes\) or GiB \(2\^30 bytes\)"):
        parse_bytes("8G")


def test_a_fraction_needs_a_unit() -> None:
    with pytest.raises(ValueError, match="fraction without a unit"):
        parse_bytes("0.5")


def test_more_than_63_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="largest size"):
        parse_bytes("9223372036854775808")
    with pytest.raises(ValueError, match="largest size"):
        parse_bytes("9000PiB")


def test_only_text_is_read() -> None:
    with pytest.raises(ValueError, match="not int"):
        parse_bytes(8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (8 << 30, "8.00 GiB"),
        (8_000_000_000, "7.45 GiB"),
        ((1 << 20) - 1, "1.00 MiB"),  # would round to 1024.00 KiB
        ((1 << 20) - 6 * 1024, "1018.00 KiB"),
        (-1024, "-1.00 KiB"),
        (-1, "-1 B"),
        (5 << 60, "5120.00 PiB"),
    ],
)
def test_prints(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, MAX_BYTES // 2))
def test_what_is_printed_reads_back_within_half_a_hundredth(size: int) -> None:
    text = format_bytes(size)
    unit = parse_bytes("1" + text.split()[1])
    assert abs(parse_bytes(text) - size) <= unit / 200 + 1


@given(st.integers(0, MAX_BYTES))
def test_a_plain_count_reads_back_exactly(size: int) -> None:
    assert parse_bytes(str(size)) == size == parse_bytes(f"{size} b")


@given(st.integers(0, 2**60), st.integers(0, 2**60))
def test_printing_is_monotonic(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert parse_bytes(format_bytes(low)) <= parse_bytes(format_bytes(high))


@given(st.text(max_size=60))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        size = parse_bytes(text)
    except ValueError:
        return
    assert 0 <= size <= MAX_BYTES
