# SPDX-License-Identifier: Apache-2.0
"""Facts about a CUDA card that decide how much scratch memory its kernels take.

A reduction asks how many threads the card runs at once, an attention kernel how much shared memory a block
may have. Both follow from the compute capability, except the number of multiprocessors, which differs between
cards of one capability; a usual card of it stands for the others then.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memscale.hardware.target import Target

_USUAL_UNITS = {
    (7, 0): 80, (7, 5): 40, (8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170,
}  # fmt: skip
"""Multiprocessors of V100, T4, A100, RTX 3090, RTX 4090, H100, B200, RTX 5090."""

_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Resident threads of a multiprocessor, where they are not 2048."""

_SHARED = {
    (7, 0): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376,
    (9, 0): 232448, (10, 0): 232448, (12, 0): 101376, (12, 1): 101376,
}  # fmt: skip
"""Bytes of shared memory that one block may ask for."""


@dataclass(frozen=True)
class CardFacts:
    """What kernels ask of a card.

    Attributes:
        capability: compute capability, major and minor.
        units: multiprocessors.
        threads_per_unit: resident threads of one multiprocessor.
        shared_bytes: shared memory that one block may ask for.
    """

    capability: tuple[int, int]
    units: int
    threads_per_unit: int
    shared_bytes: int

    @classmethod
    def of_capability(cls, capability: tuple[int, int], units: int = 0) -> CardFacts:
        """A card of a capability.

        Args:
            capability: major and minor.
            units: multiprocessors; 0: as a usual card of that capability has.
        """
        return cls(
            capability,
            units or _USUAL_UNITS.get(capability, 108),
            _THREADS.get(capability, 2048),
            _SHARED.get(capability, 101376),
        )


def card_of(target: Target) -> CardFacts:
    """The card that a target stands for."""
    return CardFacts.of_capability(target.capability or (8, 0), target.multiprocessors)
