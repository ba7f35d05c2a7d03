# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing, and the state that a recompute needs."""
