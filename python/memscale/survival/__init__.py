# SPDX-License-Identifier: Apache-2.0
"""What happens when memory runs out: a report, or a tighter plan and the same step once more."""
