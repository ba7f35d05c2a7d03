# SPDX-License-Identifier: Apache-2.0
"""`memscale bench`: the benchmarks, with options of their own."""

from __future__ import annotations

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Runs the benchmarks with these options; returns the exit status."""
    from memscale.benchmarks.command import main

    return main(arguments)
