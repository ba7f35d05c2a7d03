# SPDX-License-Identifier: Apache-2.0
"""CUDA's semantics on a CPU build: what a card's operators return and allocate, for a trace without one."""
