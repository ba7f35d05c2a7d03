# SPDX-License-Identifier: Apache-2.0
"""What MemScale tells while it works: log blocks, metrics, timelines."""
