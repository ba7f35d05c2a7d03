# SPDX-License-Identifier: Apache-2.0
"""Released gradients: they leave the device when complete, and stay tensors like any other."""
