# SPDX-License-Identifier: Apache-2.0
"""Backwards that autograd runs: each is a graph task, with a number."""

from __future__ import annotations

import torch

from memscale.torchkit.compiled import never_compiled


def in_backward() -> bool:
    """Whether a backward runs this thread's code: hooks, and functions' backward with its recomputes."""
    return bool(torch._C._current_graph_task_id() >= 0)


never_compiled(in_backward)
