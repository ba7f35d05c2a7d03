# SPDX-License-Identifier: Apache-2.0
"""The configuration: `Config`, its checks, and its text forms. Independent of models."""
