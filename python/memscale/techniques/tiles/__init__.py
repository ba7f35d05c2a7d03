# SPDX-License-Identifier: Apache-2.0
"""Forwards in tiles: attention by queries, losses by tokens, modules by rows."""
