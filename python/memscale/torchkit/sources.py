# SPDX-License-Identifier: Apache-2.0
"""Which line of a program an operation comes from, and of what it is the gradient.

In forward and in the optimizer step the answer is on the stack: the innermost frame that is neither PyTorch's
nor MemScale's. In backward there is no such frame. But every node of the autograd graph has a number that the
forward operation knew when it ran, so the node that runs leads back to the line and to the module.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import torch

_TORCH: Final = str(Path(torch.__file__).parent) + "/"
_OWN: Final = str(Path(__file__).parent.parent) + "/"
_FALLBACKS: Final = (f"{_TORCH}nn/modules/", f"{_TORCH}optim/")
"""Where a line of PyTorch's own is better than none: `nn.Sequential` of `nn.Linear` has no other."""

_CALLERS: Final = frozenset({(f"{_OWN}trace/step.py", "run"), (f"{_OWN}trace/fake_optimizer.py", "step")})
"""What calls the model and the optimizer: frames above are not theirs."""

_MOST_FRAMES: Final = 64

_next_node_number: Final = torch._C._autograd._get_sequence_nr


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an operation of forward comes from.

    Attributes:
        source: "package/file.py:123", or "".
        module: graph id of the innermost module around it, or -1.
    """

    source: str
    module: int


NOWHERE: Final = Origin("", -1)


def shortened(path: str) -> str:
    """A file's path without what is particular to this machine: below its package's or script's folder."""
    roots = [root.rstrip("/") + "/" for root in sys.path if root]
    inside = [root for root in roots if path.startswith(root)]
    if inside:
        return path[len(max(inside, key=len)) :]
    here = str(Path.cwd()) + "/"
    return path[len(here) :] if path.startswith(here) else "/".join(Path(path).parts[-2:]).lstrip("/")


class SourceLines:
    """Finds the line that is being run. What it finds out about a file is kept."""

    def __init__(self) -> None:
        self.files: dict[CodeType, str] = {}
        """Name of the file; "": pass over; "?…": only for want of better; "!": the model ends here."""
        self._texts: dict[tuple[CodeType, int], str] = {}

    def here(self) -> str:
        """The innermost line outside PyTorch and MemScale, as "package/file.py:123"; "" if there is none."""
        frame: FrameType | None = sys._getframe(2)
        fallback: tuple[CodeType, int] | None = None
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            name = self.files.get(code)
            if name is None:
                name = self.files[code] = self._name_of(code)
            if name == "!":
                break
            if name and name[0] != "?":
                return self._text(code, frame.f_lineno, name)
            if name and fallback is None:
                fallback = code, frame.f_lineno
            frame = frame.f_back
        return "" if fallback is None else self._text(*fallback, self.files[fallback[0]][1:])

    def _text(self, code: CodeType, line: int, name: str) -> str:
        text = self._texts.get((code, line))
        if text is None:
            text = self._texts[code, line] = f"{name}:{line}"
        return text

    @staticmethod
    def _name_of(code: CodeType) -> str:
        path = code.co_filename
        if path.startswith(_OWN):
            return "!" if (path, code.co_name) in _CALLERS else ""
        if path.startswith(_TORCH):
            better_than_none = path.startswith(_FALLBACKS) and not path.endswith("/module.py")
            return "?" + shortened(path) if better_than_none else ""
        return "" if path.startswith("<") else shortened(path)


class Origins:
    """Remembers, for each node of the autograd graph, the operation of forward that made it."""

    def __init__(self) -> None:
        self.lines = SourceLines()
        self._by_node: dict[int, Origin] = {}
        self._running = NOWHERE

    def in_forward(self, module: int) -> str:
        """Notes the operation that just ran in forward; returns its line.

        Args:
            module: graph id of the innermost module around it, or -1.
        """
        source = self.lines.here()
        # The node of an operation is made right before its kernel runs, and takes the number before this one.
        self._by_node.setdefault(_next_node_number() - 1, Origin(source, module))
        return source

    def node_begins(self, number: int) -> None:
        """A node of the autograd graph is about to run."""
        self._running = self._by_node.get(number, NOWHERE)

    def in_backward(self) -> Origin:
        """Where the operation of forward comes from whose node is running."""
        return self._running
