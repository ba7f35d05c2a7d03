# SPDX-License-Identifier: Apache-2.0
"""What a training step takes, on cards that are not here, of a model whose weights are nowhere.

Nothing is computed, downloaded or allocated: the model lives on "meta", where tensors have shapes only.
"""

import torch
from torch import nn

import memscale

LAYERS, WIDTH, HEADS, VOCABULARY = 24, 1024, 16, 32_000


class Model(nn.Module):
    """A language model of 0.37 billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids to the loss of predicting them."""
        logits = self.head(self.layers(self.embed(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def sample(batch: int = 8, sequence: int = 512) -> torch.Tensor:
    """One batch; `largest_batch` and `largest_sequence` ask for others."""
    return torch.zeros(batch, sequence, dtype=torch.long, device="meta")


with torch.device("meta"):
    model = Model()

for device in ("RTX 4060", "RTX 3090", "A100 80GB", "48GiB"):
    prediction = memscale.predict(model, sample_input=sample, device=device)
    plain = prediction.plain
    verdict = "fits" if plain.fits else ("fits with a plan" if prediction.fits else "does not fit")
    print(f"{device:10}  plain peak {plain.device_used_peak_bytes / 2**30:5.1f} GiB, {verdict}")

prediction = memscale.predict(model, sample_input=sample, device="RTX 3090")
print(f"\n{prediction.explain()}\n")
with_plan, without = prediction.largest_batch(), prediction.largest_batch(with_plan=False)
print(f"largest batch on it: {with_plan} with a plan, {without} without")
