# SPDX-License-Identifier: Apache-2.0
"""Weights that lie elsewhere between their uses; see `stream`."""
