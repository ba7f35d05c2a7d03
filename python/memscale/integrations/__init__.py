# SPDX-License-Identifier: Apache-2.0
"""Trainers from elsewhere. Each is imported when one of its trainers is wrapped, and never before."""
