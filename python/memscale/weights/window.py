# SPDX-License-Identifier: Apache-2.0
"""The blocks in memory: those in use, and the next one, which is prefetched.

    use of unit i     waits for its block, and asks for that of unit i + 1 in the order of the last pass
    room              earlier blocks leave, and the next one reuses their memory

A pass is a forward and what comes until the next one. A block leaves only where `Unit.settle` finds that
nobody holds it, so a late use can be slow and never wrong. `blocks` has the memory, and fills it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable

from torch import Tensor

from memscale.weights.unit import Blocks, Unit


class Order:
    """The order in which units are used, recorded to predict the next one."""

    def __init__(self) -> None:
        self._recorded: list[Unit] = []
        self._present: list[Unit] = []
        self._position = 0

    def begin(self) -> None:
        """A pass begins."""
        self._recorded, self._present, self._position = self._present, [], 0

    def next_after(self, unit: Unit) -> Unit | None:
        """Records a use of a unit. Returns the unit that followed it in the last pass."""
        if not self._present or self._present[-1] is not unit:
            self._present.append(unit)
            self._position = self._found(unit) + 1
        return self._recorded[self._position] if self._position < len(self._recorded) else None

    def _found(self, unit: Unit) -> int:
        with contextlib.suppress(ValueError):
            return self._recorded.index(unit, self._position)
        with contextlib.suppress(ValueError):
            return self._recorded.index(unit)
        return len(self._recorded)

    def forget(self, unit: Unit) -> None:
        """Forgets a unit that is no longer streamed."""
        self._recorded = [item for item in self._recorded if item is not unit]
        self._present = [item for item in self._present if item is not unit]
        self._position = 0


class Window:
    """Blocks in memory.

    Args:
        blocks: where they get it, and their bytes.
        came: called with a unit that has got a block, before that is filled.
        went: called with a unit whose block is about to go.

    Attributes:
        most_bytes: of all blocks, unless more is in use at once.
        counters: what it has done so far.
    """

    def __init__(self, blocks: Blocks, came: Callable[[Unit], None], went: Callable[[Unit], None]) -> None:
        self.blocks = blocks
        self.most_bytes = 0
        self.order = Order()
        self.counters = {"read_bytes": 0, "read_count": 0, "waited_for": 0, "over_window": 0}
        self._came, self._went = came, went
        self._units: dict[Unit, None] = {}  # that have a block, the one used last at the end

    @property
    def used_bytes(self) -> int:
        """Of the blocks that units have."""
        return sum(unit.nbytes for unit in self._units)

    @property
    def here_bytes(self) -> int:
        """Of all blocks, used or free."""
        return self.used_bytes + self.blocks.free_bytes

    def fetch(self, unit: Unit) -> None:
        """Has a unit's block filled, and asks for the next unit's.

        Raises:
            OSError: it could not be read.
        """
        following = self.order.next_after(unit)
        self._let_go((unit, following))
        if unit.block is None:
            self._start(unit, self._room(unit.nbytes, (unit,), may_exceed=True))
        self._wait(unit)
        unit.refresh()
        if unit in self._units:  # not one that stays
            self._units[unit] = self._units.pop(unit)
        if following is not None and following is not unit and following.block is None:
            self._start(following, self._room(following.nbytes, (unit, following), may_exceed=False))
        self.blocks.rest()

    def clear(self, is_final: bool) -> list[Unit]:
        """Lets all blocks go that are not used. Returns the units whose blocks somebody holds.

        Args:
            is_final: what is held still stays for good.
        """
        held = []
        for unit in list(self._units):
            if unit.users:
                continue
            if self._leaves(unit):
                self.blocks.give(unit, self._taken(unit))
                continue
            unit.linger()
            held.append(unit)
            if is_final:
                del self._units[unit]
                unit.stays = True
                assert unit.block is not None
                self.blocks.lose(unit, unit.block)
        self.blocks.rest()
        return held

    def drop(self, unit: Unit) -> None:
        """Lets the block of a unit go that is streamed no more."""
        if unit in self._units:
            self.blocks.lose(unit, self._taken(unit))
        elif unit.block is not None:
            self._went(unit)
            unit.block = None
        self.order.forget(unit)

    def close(self) -> None:
        """Frees all that is free."""
        self.blocks.close()

    # ---- memory ------------------------------------------------------------------------------------

    def _room(self, nbytes: int, but: Iterable[Unit], may_exceed: bool) -> Tensor | None:
        """Memory for a block; None where there is none within the window."""
        while True:
            found = self.blocks.take(nbytes, self.used_bytes, self.most_bytes)
            if found is not None:
                return found
            leaving = next((unit for unit in self._units if unit not in but and self._leaves(unit)), None)
            if leaving is None:
                if not may_exceed:
                    return None
                self.counters["over_window"] += 1
                return self.blocks.beyond(nbytes)
            self.blocks.give(leaving, self._taken(leaving))

    def _let_go(self, but: Container[Unit | None]) -> None:
        """Lets the blocks of before go, so that a plan knows how many there are."""
        for unit in list(self._units):
            if unit not in but and self._leaves(unit):
                self.blocks.give(unit, self._taken(unit))

    def _leaves(self, unit: Unit) -> bool:
        """Whether the block of a unit can go."""
        if unit.users:
            return False
        self.blocks.end(unit)
        unit.settle()
        return not unit.lingers

    def _taken(self, unit: Unit) -> Tensor:
        """The memory of a unit, which has none then."""
        self._went(unit)
        block, unit.block = unit.block, None
        del self._units[unit]
        assert block is not None
        return block

    # ---- reading -----------------------------------------------------------------------------------

    def _start(self, unit: Unit, memory: Tensor | None) -> None:
        if memory is None:
            return
        unit.note_filled()
        unit.block = memory
        try:
            self.blocks.start(unit)
        except BaseException:  # nobody knows what is in it, or what goes on filling it
            unit.block = None
            self.blocks.lose(unit, memory)
            raise
        self._units[unit] = None
        self._came(unit)
        self.counters["read_count"] += 1
        self.counters["read_bytes"] += unit.nbytes

    def _wait(self, unit: Unit) -> None:
        try:
            self.counters["waited_for"] += self.blocks.wait(unit)
        except OSError:
            self.blocks.give(unit, self._taken(unit))
            raise
