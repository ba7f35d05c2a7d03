# SPDX-License-Identifier: Apache-2.0
"""For a part of a program: `memscale.optimize` as a context manager that knows the optimizer.

Because the optimizer is given, its real state is planned for (SGD with momentum holds half of AdamW's).
After the block the model is as before. The same seeds without the block give the same weights, bit for bit.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F

import memscale


class Net(torch.nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 64, 64, 64]
        self.stages = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.BatchNorm2d(after), torch.nn.ReLU()
            )
            for before, after in pairwise(widths)
        )
        self.head = torch.nn.Linear(widths[-1], 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            images = stage(images)
        return self.head(images.mean(dim=(2, 3)))


def train(model: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        images = torch.randn(8, 3, 32, 32, generator=generator)
        labels = torch.randint(10, (8,), generator=generator)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def main() -> None:
    plain, optimizer = make()
    train(plain, optimizer, steps=4)

    model, optimizer = make()
    sample = torch.randn(8, 3, 32, 32)
    peak = memscale.plan(model, optimizer, sample_input=sample).plain.device_used_peak_bytes
    config = memscale.Config(memory_budget=peak * 17 // 20, enable_logging=False)
    with memscale.optimize(model, optimizer, config, sample_input=sample) as executor:
        train(model, optimizer, steps=4)
        assert executor.plan is not None
        print("\n".join(executor.plan.summary_lines()))

    assert memscale.executor_of(model) is None
    pairs = zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
    equal = all(torch.equal(one, other) for one, other in pairs)
    print(f"weights and running statistics bit-equal to plain training: {'yes' if equal else 'NO'}")
    assert equal

    # The proof for one batch, without training: loss, every gradient, every buffer.
    print(memscale.verify(model, sample, optimizer).summary())


if __name__ == "__main__":
    main()
