# SPDX-License-Identifier: Apache-2.0
"""Optimizer-side techniques as a trace reads them: what changes between a gradient and its weight.

    forward ──► backward ──► gradient ──► optimizer ──► weight
                              │             │             │
              gradient_window_bytes  state_chunk_bytes   half
              stepped: gone when it has been used

Other step techniques are attached for the time of a trace. These would change the model's data or the
optimizer, which a trace leaves as they are; so a trace reads this description, and the executor attaches
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple


class Block(NamedTuple):
    """A block of streamed weights.

    Attributes:
        names: of the parameters.
        owners: paths of the modules that use it.
        nbytes: its size.
    """

    names: tuple[str, ...]
    owners: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Streamed:
    """What of a step's weights is streamed.

    Attributes:
        names: of the parameters.
        blocks: which come and go.
        window_bytes: memory for blocks, at most.
        inner_bytes: memory for those that a recompute has at once, at most, where it has several.
        too_large: paths of modules whose recompute would hold too much at once.
        trained_bytes: that an optimizer's step reads and writes.
    """

    names: frozenset[str] = frozenset()
    blocks: tuple[Block, ...] = ()
    window_bytes: int = 0
    inner_bytes: int = 0
    too_large: frozenset[str] = frozenset()
    trained_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """That come in a forward."""
        return sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True)
class OptimizerPath:
    """What is different in a step.

    Attributes:
        half: names of parameters that are BF16, with the rest of an FP32 master in the optimizer's state.
        state_chunk_bytes: above 0, the optimizer's state is not resident, and passes in chunks of this size.
        gradient_window_bytes: above 0, complete gradients leave, and at most so many bytes of them wait for
            their copies.
        released: names of parameters whose gradients leave.
        link_moves: bytes of memory that are moved in the time of 1,024 bytes over the link, out and back.
        state_here: names of parameters whose state stays all the same.
        on_card: the state that is not resident is a card's.
        streamed: weights that are in memory while they are used.
        engine_bytes: memory of the device that the plan's engine takes for what leaves by this path; 0: it is
            not open for that.
        state_engine_bytes: likewise, of the engine that the optimizer's state has of its own.
        stepped: names of parameters that are stepped in backward, each alone when its gradient is complete.
        step_window_bytes: of gradients that wait for steps by our core on the host, beside backward; larger
            ones do not.
        host_step_moves: above 0, the host steps parameters of a card whose state is offloaded: bytes of the
            card's memory that are moved in the time of 1,024 elements.
    """

    half: frozenset[str] = frozenset()
    state_chunk_bytes: int = 0
    gradient_window_bytes: int = 0
    released: frozenset[str] = frozenset()
    link_moves: tuple[int, int] = (0, 0)
    state_here: frozenset[str] = frozenset()
    on_card: bool = False
    streamed: Streamed = field(default_factory=Streamed)
    engine_bytes: int = 0
    state_engine_bytes: int = 0
    stepped: frozenset[str] = frozenset()
    step_window_bytes: int = 0
    host_step_moves: int = 0


AS_IT_IS: Final = OptimizerPath()
"""Without any of them."""
