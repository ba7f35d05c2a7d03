# SPDX-License-Identifier: Apache-2.0
"""Offload of weights: a file or host memory holds them between uses; see `stream`."""
