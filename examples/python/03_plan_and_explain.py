# SPDX-License-Identifier: Apache-2.0
"""What would happen? Plans without applying, explains every choice, and shows what each budget would cost.

Nothing here trains or even computes: the plan comes from a trace with fake tensors. That works on a laptop
for a model that the laptop could never hold.
"""

import torch

import memscale
from memscale.units import format_bytes


class Block(torch.nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])
        self.attention = torch.nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class Model(torch.nn.Module):
    """A small language model."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def main() -> None:
    model = Model(vocabulary=4096, width=256, heads=4, layers=6)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(4096, (4, 256))

    # With all the memory there is, the plan is to do nothing; it says what the plain step takes.
    plain = memscale.plan(model, optimizer, sample_input=ids)
    peak = plain.plain.device_used_peak_bytes
    print(f"plain step: peak {format_bytes(peak)}\n")

    # Three quarters of that: which modules, by which rule, for how many bytes and milliseconds?
    budget = peak * 3 // 4
    plan = memscale.plan(model, optimizer, memscale.Config(memory_budget=budget), sample_input=ids)
    print(plan.explain())

    # Every peak that can be had, and its price.
    print("\nfrontier: peak against expected step time")
    last = 0
    for peak_bytes, step_ns in plan.frontier:
        if last == 0 or peak_bytes < 0.97 * last:
            print(f"  {format_bytes(peak_bytes):>12}  × {step_ns / plan.plain.step_time_ns:.3f}")
            last = peak_bytes

    # A budget that no plan meets raises nothing here: `fits` says so, `advice` what would help.
    tight = memscale.plan(model, optimizer, memscale.Config(memory_budget="40MiB"), sample_input=ids)
    print(f"\n40 MiB: fits={tight.fits}")
    for line in tight.advice:
        print(f"  {line}")

    # A plan is data: it can be stored and read again.
    assert memscale.Plan.from_json(plan.to_json()) == plan


if __name__ == "__main__":
    main()
