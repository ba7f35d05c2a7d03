# SPDX-License-Identifier: Apache-2.0
"""`memscale.optim.away`: the former name of `memscale.optim.offload.attach`."""

from memscale.optim.offload.attach import send, take_back

__all__ = ["send", "take_back"]
