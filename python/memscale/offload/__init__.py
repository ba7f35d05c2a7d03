# SPDX-License-Identifier: Apache-2.0
"""The offload engine as techniques use it."""
