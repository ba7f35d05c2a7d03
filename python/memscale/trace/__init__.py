# SPDX-License-Identifier: Apache-2.0
"""One step of training as a memory graph: on fake tensors, or recorded from a real step."""
