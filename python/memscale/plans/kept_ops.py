# SPDX-License-Identifier: Apache-2.0
"""Names of the operations that a selective checkpoint keeps.

The core counts operations from the begin of a module's call. People and techniques go by name, which does
not depend on what else the call runs:

    offset   0      1      2     3      4
    op       addmm  view   mul   addmm  add
    name     #0     …      …     addmm#1: the second operation of that name in the call

All calls of a module run the same operations, or the core keeps none; so the first call speaks for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memscale import _core

__all__ = ["KeptOps", "operation_of"]


@dataclass(frozen=True)
class KeptOps:
    """Translates between offsets and names, for one graph.

    Attributes:
        ops: `Graph.ops` of it.
        calls: `Graph.calls` of it.
    """

    ops: Sequence[tuple[Any, ...]]
    calls: Sequence[tuple[int, int, int, int]]

    @classmethod
    def of(cls, graph: _core.Graph) -> KeptOps:
        """For a finished graph."""
        return cls(graph.ops(), graph.calls())

    @cached_property
    def _first_calls(self) -> dict[int, tuple[int, int]]:
        """Module → first operation of its first call, and the one after the last."""
        first: dict[int, tuple[int, int]] = {}
        for module, _, begin, end in self.calls:
            first.setdefault(module, (begin, end))
        return first

    def _names(self, module: int) -> list[str]:
        """Names of all operations of a module's first call, in order."""
        begin, end = self._first_calls.get(module, (0, 0))
        seen: Counter[str] = Counter()
        names = []
        for op in self.ops[begin:end]:
            names.append(f"{op[0]}#{seen[op[0]]}")
            seen[op[0]] += 1
        return names

    def names(self, module: int, offsets: Sequence[int]) -> tuple[str, ...]:
        """Names such as "addmm#0" of operations.

        Args:
            module: id in the graph.
            offsets: from the begin of the module's call.

        Raises:
            ValueError: the module's call has no such operation.
        """
        if not offsets:
            return ()
        names = self._names(module)
        if max(offsets) >= len(names):
            raise ValueError(f"the plan keeps operation {max(offsets)} of a call of {len(names)} operations")
        return tuple(names[offset] for offset in offsets)

    def offsets(self, module: int, names: Iterable[str]) -> tuple[int, ...]:
        """Offsets of operations, rising.

        Args:
            module: id in the graph.
            names: as `names` gives them.

        Raises:
            ValueError: the module's call has no such operation.
        """
        wanted = tuple(names)
        if not wanted:
            return ()
        offset_of = {name: offset for offset, name in enumerate(self._names(module))}
        unknown = [name for name in wanted if name not in offset_of]
        if unknown:
            raise ValueError(f"the plan keeps {unknown[0]!r}, which the module's call does not run")
        return tuple(sorted(offset_of[name] for name in wanted))


def operation_of(name: str) -> str:
    """The operation that a name such as "addmm#0" stands for, without its number."""
    return name.rpartition("#")[0]
