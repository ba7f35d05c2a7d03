# SPDX-License-Identifier: Apache-2.0
"""The README's ten lines: a plain training loop, kept within 256 MiB by one of them."""

import torch
from torch import nn

import memscale

layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 8), nn.Linear(256, 1000))
memscale.wrap(model, memscale.Config(memory_budget="256MiB"))  # the one line
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    output = model(torch.randn(16, 128, 256))
    loss = nn.functional.cross_entropy(output.flatten(0, 1), torch.randint(1000, (2048,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.4f}")

# As it was before, bit for bit; the weights stay trained.
memscale.detach(model)
