# SPDX-License-Identifier: Apache-2.0
"""One module per library, with the functions of `sweeping.subject.Library`."""
