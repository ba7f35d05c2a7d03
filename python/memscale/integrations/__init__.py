# SPDX-License-Identifier: Apache-2.0
"""Adapters to trainers of other libraries, imported when such a trainer is wrapped."""
