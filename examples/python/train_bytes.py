# SPDX-License-Identifier: Apache-2.0
"""A plain training loop: a GPT-2 over bytes learns the source code of Python's standard library.

MemScale is one line of it, in `main`, below the comment "the one line". Without `--budget` it does not run
and MemScale is not even imported; everything else is what you would write anyway.

    python train_bytes.py                       # plain PyTorch
    python train_bytes.py --budget 800MiB       # the same steps within 800 MiB
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import resource
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are random: nothing is downloaded

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

logging.set_verbosity_error()

SIZES = {  # layers, width, heads, sequence, batch
    "full": (8, 512, 8, 512, 2),  # 25.6 million weights
    "short": (4, 384, 6, 512, 2),  # 7.4 million
    "small": (4, 128, 4, 256, 4),  # 0.9 million
    "tiny": (1, 64, 2, 16, 2),
}


def corpus() -> torch.Tensor:
    """The standard library's sources as one row of bytes."""
    folder = os.path.dirname(os.__file__)
    text = bytearray()
    for path in sorted(glob.glob(os.path.join(folder, "*.py"))):
        with open(path, "rb") as file:
            text += file.read()
    return torch.frombuffer(text, dtype=torch.uint8)


def build(size: str) -> GPT2LMHeadModel:
    """A GPT-2 with random weights and dropout, ready to train."""
    layers, width, heads, sequence, _ = SIZES[size]
    config = GPT2Config(
        vocab_size=256, n_positions=sequence, n_embd=width, n_layer=layers, n_head=heads,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def batch(text: torch.Tensor, size: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random excerpts. They are labels too: each byte is to be guessed from those before it."""
    *_, length, rows = SIZES[size]
    starts = torch.randint(len(text) - length, (rows,), generator=generator).tolist()
    ids = torch.stack([text[start : start + length] for start in starts]).long()
    return {"input_ids": ids, "labels": ids}


def digest(model: torch.nn.Module) -> str:
    """SHA-256 over the bytes of all weights."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().contiguous().numpy().data)
    return sha.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget", help="memory budget for the training step, such as 800MiB")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--record", help="JSON file for losses, step times, digest and memory")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    text, generator = corpus(), torch.Generator().manual_seed(1)
    model = build(arguments.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if arguments.budget:
        import memscale

        # the one line:
        memscale.wrap(model, memscale.Config(memory_budget=arguments.budget))

    losses, seconds = [], []
    for step in range(1, arguments.steps + 1):
        start = time.perf_counter()
        loss = model(**batch(text, arguments.size, generator)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        print(f"step {step:3d}  loss {losses[-1]:.4f}  {seconds[-1]:.2f} s", flush=True)

    if arguments.record:
        executor = memscale.executor_of(model) if arguments.budget else None
        with open("/proc/self/status") as status:
            data_kib = next(int(line.split()[1]) for line in status if line.startswith("VmData:"))
        record = {
            "losses": losses,
            "seconds": seconds,
            "digest": digest(model),
            "plan_peak_bytes": executor.plan.predicted.allocated_peak_bytes if executor else None,
            "data_bytes": data_kib * 1024,
            "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        with open(arguments.record, "w") as file:
            json.dump(record, file)


if __name__ == "__main__":
    main()
