# SPDX-License-Identifier: Apache-2.0
"""A run that is killed goes on with every bit: `memscale.save`, `torch.load`.

`memscale.save` does what `torch.save` does, and the file is the old one or the new one at every moment,
whatever happens. What a checkpoint has to have is what it has with plain PyTorch. Wrap first, then load.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import memscale

STEPS, DIES_IN = 6, 3


class Net(torch.nn.Module):
    """A small network with dropout, whose masks depend on the state of the random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train(path: Path, dies_in: int | None = None) -> dict[str, torch.Tensor]:
    """Trains from the checkpoint on, if there is one."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    config = memscale.Config(use_8bit_optimizer=True, exact=False, enable_logging=False)
    memscale.wrap(model, config, sample_input=torch.randn(64, 256), optimizer=optimizer)

    begin = 0
    if path.exists():
        saved = torch.load(path, mmap=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        torch.set_rng_state(saved["random"])
        begin = saved["step"]
        print(f"goes on with step {begin}")

    for step in range(begin, STEPS):
        x = torch.randn(64, 256)
        loss = F.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        loss.backward()
        if step == dies_in:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        states = {name: part.state_dict() for name, part in parts.items()}
        memscale.save({**states, "random": torch.get_rng_state(), "step": step + 1}, path)
    return model.state_dict()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.pt")
        killed = subprocess.run([sys.executable, __file__, str(path)], check=False)
        print(f"a run ended with signal {-killed.returncode} in step {DIES_IN}")
        assert killed.returncode == -signal.SIGKILL

        found = train(path)
        expected = train(Path(folder, "other.pt"))  # by a run that nobody interrupts
        equal = all(torch.equal(found[name], expected[name]) for name in expected)
        print(f"weights bit-equal to those of a run that was not killed: {'yes' if equal else 'NO'}")
        assert equal and sorted(os.listdir(folder)) == ["other.pt", "run.pt"]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), dies_in=DIES_IN)
    else:
        main()
