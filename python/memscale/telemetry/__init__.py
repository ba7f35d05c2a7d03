# SPDX-License-Identifier: Apache-2.0
"""Telemetry: one small description of a plan, where the user wants it sent. See docs/guide/telemetry.md."""
