# SPDX-License-Identifier: Apache-2.0
"""The pipeline of one `wrap`: hardware, profile, decision, plan, execution."""
