# SPDX-License-Identifier: Apache-2.0
"""Snapshot and restore around a dry run or a recompute: modules, values, reachable code."""
