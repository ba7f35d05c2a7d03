# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: the models of the registry, plain and with MemScale, beside every peer that is installed.

    python -m memscale.benchmarks                 the registry
    python -m memscale.benchmarks --peers         and every peer on the same work
    python -m memscale.benchmarks --sweep         and 25 points of a Latin hypercube
    python -m memscale.benchmarks --frontier      and memory against step time, as a picture

Everything is offline: weights are random. Each measurement has a process of its own, and gives a row as soon
as it ends: what was measured is there, however the rest goes. `memscale bench` is the same program.

    options ─► suite (jobs, by importance) ─► runner ─► child: loops, ways, peers, memory ─► rows ─► table
"""

from __future__ import annotations

from memscale.benchmarks.registry import BENCHMARK_MODELS, BenchmarkModel, Shape

__all__ = ["BENCHMARK_MODELS", "BenchmarkModel", "Shape"]
