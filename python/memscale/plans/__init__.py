# SPDX-License-Identifier: Apache-2.0
"""Plan, prediction and savings as data, and their text."""
