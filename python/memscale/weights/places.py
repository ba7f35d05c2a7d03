# SPDX-License-Identifier: Apache-2.0
"""`memscale.weights.places`: the former name of `memscale.weights.placement`."""

from memscale.weights.placement import device_of_use

__all__ = ["device_of_use"]
