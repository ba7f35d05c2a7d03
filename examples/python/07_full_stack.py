# SPDX-License-Identifier: Apache-2.0
"""Everything at once: a step in a quarter of its memory, and what each technique brings.

`memscale.apply_all_optimizations` may round differently from plain PyTorch: BF16, 8-bit optimizer state,
losses and MLPs in tiles. With a folder, saved tensors, gradients and optimizer state may wait in a file, too.
"""

import tempfile

import torch
import torch.nn.functional as F

import memscale
from memscale.units import format_bytes

STEPS = 4


class Block(torch.nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(torch.nn.Module):
    """A small language model that computes its loss."""

    def __init__(self, vocabulary: int = 8192, width: int = 256, heads: int = 4, layers: int = 6) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())


def train(model: Model, optimizer: torch.optim.Optimizer, ids: torch.Tensor, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def main() -> None:
    ids = torch.randint(8192, (4, 257))
    model, optimizer = make()
    plain_peak = memscale.plan(model, optimizer, sample_input=ids).plain.device_used_peak_bytes
    plain_losses = train(model, optimizer, ids, STEPS)

    with tempfile.TemporaryDirectory() as folder:
        config = memscale.Config(
            mode="aggressive",
            memory_budget=plain_peak // 4,
            strict_budget=True,
            enable_logging=False,
            async_config=memscale.AsyncOffloadConfig(tiers=("file",), directory=folder),
        )
        model, optimizer = make()
        model, optimizer = memscale.apply_all_optimizations(model, optimizer, config, sample_input=ids)
        plan = memscale.executor_of(model).plan
        losses = train(model, optimizer, ids, STEPS)
        memscale.detach(model)

    for step in plan.steps:
        print(f"{step.technique:16}  {step.reason}")
    print(f"{len(plan.active)} modules run again in backward, or what they save leaves")
    peak = plan.predicted.device_used_peak_bytes
    print(f"peak {format_bytes(plain_peak)} -> {format_bytes(peak)}, {peak / plain_peak:.0%} of plain")
    print(f"loss after {STEPS} steps {plain_losses[-1]:.3f} plain, {losses[-1]:.3f} with the full stack")
    assert peak <= plain_peak // 4 and abs(losses[-1] / plain_losses[-1] - 1) < 0.05


if __name__ == "__main__":
    main()
