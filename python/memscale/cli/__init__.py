# SPDX-License-Identifier: Apache-2.0
"""The `memscale` program. `main.main` is its entry point; nothing here is imported by the library."""
