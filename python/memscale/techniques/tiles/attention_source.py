# SPDX-License-Identifier: Apache-2.0
"""The call that attention scores come from, and how its tiling is reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memscale.techniques.tiles.tiled_loss import autocast_as

CHANGED = (
    "queries, keys or a mask of an attention were changed in place before its scores were used, which "
    "MemScale's attention tile puts off; change a copy, or set enable_tiling=False"
)
"""Where something was changed in place that the scores are still to be made of."""


class Report:
    """What became of the attentions of one module.

    Attributes:
        used: one has run in tiles.
        reason: why another one did not, the last time; "" if none.
    """

    def __init__(self) -> None:
        self.used = False
        self.reason = ""


def saving_hooks() -> Any:
    """The hooks on saved tensors in force: those of a checkpoint, if one is around."""
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if ask is None else ask(False)


@dataclass
class Source:
    """How the product of queries and keys was asked for.

    Attributes:
        func: the function.
        args: its arguments.
        kwargs: by keyword.
        autocast: as it was.
        hooks: on saved tensors, as they were.
        report: called with whether it has run in tiles, or why not.
        tiled: a product of these scores with values has run in tiles.
    """

    func: Any
    args: Any
    kwargs: Any
    autocast: Any
    hooks: Any
    report: Report
    tiled: bool = False

    def run(self) -> Tensor:
        """The product, plainly."""
        with autocast_as(self.autocast):
            made: Tensor = self.func(*self.args, **self.kwargs)
        return made
