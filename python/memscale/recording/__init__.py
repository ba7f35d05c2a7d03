# SPDX-License-Identifier: Apache-2.0
"""What a run records: into a folder, and from there to a `memscale-server`."""
