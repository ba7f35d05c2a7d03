# SPDX-License-Identifier: Apache-2.0
"""Metrics, reports, and traces for viewers."""
