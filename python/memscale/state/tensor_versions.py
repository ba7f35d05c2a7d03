# SPDX-License-Identifier: Apache-2.0
"""Versions of tensors that were written to for a plan, and whose contents are put back.

A graph from before, whose backward is still to come, has saved such a tensor with its version, and would
raise if it found another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_autograd: Any = torch._C._autograd


class Versions:
    """Versions to be put back.

    Args:
        tensors: whose present versions are noted.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._noted: list[tuple[Tensor, int]] = []
        for tensor in tensors:
            self.note(tensor)

    def note(self, tensor: Tensor, version: int | None = None) -> None:
        """Notes the version that a tensor has now, or one from before. Of several the first is put back."""
        if not tensor.is_inference():  # those have none
            base = tensor._base  # a view has its version, and may have a graph, which is not to be held
            noted = tensor._version if version is None else version
            self._noted.append((tensor if base is None else base, noted))

    def restore(self) -> None:
        """Puts them back, and forgets them."""
        while self._noted:
            tensor, version = self._noted.pop()
            if tensor._version != version:
                _autograd._unsafe_set_version_counter((tensor,), (version,))
