# SPDX-License-Identifier: Apache-2.0
"""The optimizer's side of a traced step: gradients that leave or are used at once, streamed weights."""
