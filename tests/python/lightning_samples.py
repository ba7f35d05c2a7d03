# SPDX-License-Identifier: Apache-2.0
"""A small LightningModule, and fits of it with and without MemScale, compared bit by bit."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.training import same_bits, seed

WIDTH, ROWS, CLASSES, BATCHES = 24, 192, 5, 6

PACKAGES = ("lightning.pytorch", "pytorch_lightning")

BUDGET = {"memory_budget": 1, "enable_logging": False}
"""Nothing meets it: whatever helps is checkpointed."""


class Block(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks, and statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def package_of(name: str = PACKAGES[0]) -> Any:
    """Lightning, without its advice on how to use it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = importlib.import_module(name)
    for logger in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return package


def module_class(package: Any) -> type[Any]:
    """The LightningModule, of one of the packages."""

    class Lit(package.LightningModule):  # type: ignore[misc,name-defined]
        """Its `training_step` never calls `forward`."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.seen: deque[float] = deque()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss_of(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def loss_of(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(float(self.trainer.callback_metrics["loss"]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    return Lit


def loader(rows: int = ROWS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(BATCHES * rows, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, (BATCHES * rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=rows)


def trainer_of(package: Any, folder: Path, callbacks: Sequence[Any] = (), **settings: Any) -> Any:
    usual: dict[str, Any] = {
        "max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    with quiet():
        return package.Trainer(
            default_root_dir=str(folder), callbacks=list(callbacks), **{**usual, **settings}
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning warns of few workers, small epochs and the like."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fitted(
    folder: Path,
    callbacks: Sequence[Any] = (),
    *,
    package: Any = None,
    kind: Callable[[Any], type[Any]] = module_class,
    resume: Path | None = None,
    data: DataLoader[Any] | None = None,
    **settings: Any,
) -> tuple[Any, Any]:
    """A trained module and its trainer."""
    package = package_of() if package is None else package
    seed(5)
    module = kind(package)()
    trainer = trainer_of(package, folder, callbacks, **settings)
    seed(6)
    with quiet():
        trainer.fit(
            module, loader() if data is None else data, ckpt_path=None if resume is None else str(resume)
        )
    return module, trainer


def state_of(module: nn.Module, trainer: Any) -> dict[str, Tensor]:
    """All that a run has computed: weights, statistics, optimizer state, logged losses, random numbers."""
    found = {name: value.detach().clone() for name, value in module.state_dict().items()}
    for number, optimizer in enumerate(trainer.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    found[f"optimizer {number} {index} {name}"] = value.detach().clone()
        rates = [group["lr"] for group in optimizer.param_groups]
        found[f"optimizer {number} rates"] = torch.tensor(rates, dtype=torch.float64)
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"gradient {name}"] = parameter.grad.detach().clone()
    found["seen"] = torch.tensor(module.seen, dtype=torch.float64)
    metrics = sorted(trainer.callback_metrics.items())
    found["metrics"] = torch.tensor([float(value) for _, value in metrics], dtype=torch.float64)
    return {**found, "generator": torch.get_rng_state()}


def assert_same_run(plain: tuple[Any, Any], planned: tuple[Any, Any]) -> None:
    """Every bit, and the same attributes."""
    assert_same_state(state_of(*plain), state_of(*planned))
    assert vars(planned[0]).keys() == vars(plain[0]).keys()


def assert_same_state(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Every bit."""
    assert found.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not same_bits(value, found[name])]
    assert not wrong, f"{len(wrong)} of {len(expected)} differ, first {wrong[:3]}"
