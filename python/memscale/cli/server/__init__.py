# SPDX-License-Identifier: Apache-2.0
"""Commands about a `memscale-server`: starting one, and bringing runs of other programs to it."""
