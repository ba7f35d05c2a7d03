# SPDX-License-Identifier: Apache-2.0
"""Values for the operators of PyTorch's CUDA build on the stand-in runtime; README.md in the folder above."""

from standin_values.registration import install

__all__ = ["install"]
