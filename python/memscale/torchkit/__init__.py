# SPDX-License-Identifier: Apache-2.0
"""Patches and inspects PyTorch: forwards, hooks, graphs, compiled and sharded models. No memory in it."""
