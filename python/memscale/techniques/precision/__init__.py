# SPDX-License-Identifier: Apache-2.0
"""Forwards and weights of lower precision: autocast, BF16 weights, FP16's loss scale."""
