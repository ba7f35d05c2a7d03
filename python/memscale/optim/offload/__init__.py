# SPDX-License-Identifier: Apache-2.0
"""Optimizer state that is offloaded between steps, and the step that takes it in pieces."""
