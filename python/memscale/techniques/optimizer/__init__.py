# SPDX-License-Identifier: Apache-2.0
"""Optimizer-side techniques: offload of weights, gradients and state; steps in backward."""
