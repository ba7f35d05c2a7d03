# SPDX-License-Identifier: Apache-2.0
"""Measured tensor bytes do not depend on what earlier measurements have left."""

from __future__ import annotations

import torch

from memscale.observability.tensor_peak import TensorPeak


def test_addresses_of_earlier_measurements_are_none_of_its_business() -> None:
    """PyTorch's profiler knows addresses from before, and takes a new tensor's end for an old one's."""
    for _ in range(25):
        with TensorPeak() as peak:
            small = [torch.empty(1) for _ in range(50)]  # they end when nobody looks
            peak.mark()
            large = torch.empty(1000)
            del large
            most, before = peak.end()
        assert (most, before) == (4200, 200)
        del small
