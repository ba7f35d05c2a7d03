# SPDX-License-Identifier: Apache-2.0
"""The memory techniques, each with a symmetric attach and detach."""
