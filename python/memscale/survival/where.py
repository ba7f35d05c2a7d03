# SPDX-License-Identifier: Apache-2.0
"""Where a step was when memory ran out: phase, module, and the line of the program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Final

import torch
from torch import nn

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
STEP: Final = "the optimizer's step"
EVALUATION: Final = "a forward without gradients"
ELSEWHERE: Final = "the loop"

_TORCH: Final = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True)
class Where:
    """Where it was.

    Attributes:
        phase: one of the words of this module.
        module: path of the innermost module that ran; None: not known.
        line: file, line and function of the program, innermost; "" where the traceback has none.
        is_near: backward has passed that module already; which one it was in, nobody can say.
    """

    phase: str
    module: str | None = None
    line: str = ""
    is_near: bool = False

    @property
    def text(self) -> str:
        """In a line."""
        parts = [self.phase]
        if self.module is not None:
            name = f"'{self.module}'" if self.module else "the model itself"
            parts.append(f"just after {name}" if self.is_near else f"in {name}")
        if self.line:
            parts.append(f"at {self.line}")
        return " ".join(parts)


def where(error: BaseException, model: nn.Module, phase: str) -> Where:
    """Reads it from an exception that was caught.

    Args:
        error: with its traceback.
        model: the wrapped model.
        phase: as far as is known from where it was caught; for `ELSEWHERE` the traceback may know better.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    module, line = None, ""
    for frame, number in _frames(error.__traceback__):
        code = frame.f_code
        owner = frame.f_locals.get("self")
        if id(owner) in paths:
            module = paths[id(owner)]
        if not code.co_filename.startswith((_TORCH, _OURS, "<")):
            line = f"{os.path.basename(code.co_filename)}:{number} ({code.co_name})"
        elif phase == ELSEWHERE and code.co_filename.startswith(os.path.join(_TORCH, "optim")):
            phase = STEP
    if phase == BACKWARD and module is None:
        return Where(phase, _passed(model), line, is_near=True)
    return Where(phase, module, line)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _passed(model: nn.Module) -> str | None:
    """The first module in forward's order whose weights have gradients while earlier ones have none."""
    weights = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    missing = [value.grad is None for _, value in weights]
    if not missing or not missing[0] or all(missing):
        return None
    return weights[missing.index(False)][0].rpartition(".")[0]
