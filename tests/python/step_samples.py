# SPDX-License-Identifier: Apache-2.0
"""What tests of whole training steps share: a batch of words, a recurrent model, the plan in force."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def words(count: int, rows: int = 2) -> Tensor:
    """Numbers below `count`: [rows, 40]."""
    return torch.randint(0, count, (rows, 40), generator=torch.Generator().manual_seed(1))


class Recurrent(nn.Module):
    """A language model with parameters in PyTorch's own lists."""

    def __init__(self, count: int = 2000, width: int = 310, features: int = 200) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(count, features), nn.Linear(width, count)
        self.layers = nn.LSTM(features, width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        logits = self.head(self.layers(self.embed(x))[0])[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
