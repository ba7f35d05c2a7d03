# SPDX-License-Identifier: Apache-2.0
"""Parts of `demo.py`: running a program under a hard memory limit, and measuring without one."""
