# SPDX-License-Identifier: Apache-2.0
"""Models with sparse tensors (graphs, mostly) train as without MemScale, and their peaks are known."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from amounts import some
from engine_samples import peak_bytes
from memscale import Config
from memscale.errors import ProfileError
from memscale.torchkit.leaves import parts_of

NODES, WIDTH, DEGREE = 1024, 48, 12

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def graph(layout: torch.layout) -> Tensor:
    """Neighbours, each with the same weight."""
    ends = torch.randint(0, NODES, (2, NODES * DEGREE), generator=torch.Generator().manual_seed(1))
    whole = torch.sparse_coo_tensor(ends, torch.full((ends.shape[1],), 1 / DEGREE), (NODES, NODES)).coalesce()
    return whole if layout is torch.sparse_coo else whole.to_sparse(layout=layout)


class Convolution(nn.Module):
    def __init__(self, of_elements: bool) -> None:
        super().__init__()
        self.of_elements = of_elements
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden = self.linear(self.norm(x)).relu()
        if self.of_elements:
            rows, columns = edges.indices()
            return x + torch.zeros_like(x).index_add(0, rows, hidden[columns] * edges.values()[:, None])
        return x + torch.sparse.mm(edges, hidden)


class Network(nn.Module):
    """Graph convolutions, with the graph as a buffer, a plain attribute, or an argument."""

    def __init__(self, layout: torch.layout, where: str, of_elements: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolution(of_elements) for _ in range(4))
        self.head = nn.Linear(WIDTH, 8)
        if where == "buffer":
            self.register_buffer("edges", graph(layout))
        elif where == "attribute":
            self.edges = graph(layout)

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.edges if edges is None else edges)
        return self.head(x)  # type: ignore[no-any-return]


def batch(layout: torch.layout, where: str) -> tuple[Tensor, ...]:
    x = torch.linspace(-1, 1, NODES * WIDTH).view(NODES, WIDTH)
    return (x, graph(layout)) if where == "argument" else (x,)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, args: tuple[Tensor, ...]) -> list[Tensor]:
    found = []
    for _ in range(2):
        loss = model(*args).square().mean()
        loss.backward()
        found += [
            loss.detach(),
            *(value.grad.clone() for value in model.parameters() if value.grad is not None),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return found


def made(build: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build().train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def nbytes(values: Any) -> int:
    storages = [part.untyped_storage() for value in values for part in parts_of(value)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}


@pytest.mark.parametrize(
    ("layout", "where", "static"),
    some(
        [("coo", "buffer", True), ("coo", "argument", False), ("csr", "argument", True),
         ("csr", "attribute", False), ("csc", "attribute", True)],
        [*itertools.product(LAYOUTS, ("buffer", "attribute", "argument"), (True, False))],
    ),
)  # fmt: skip
def test_graphs_train_equal_and_their_peak_is_known(layout: str, where: str, static: bool) -> None:
    args = batch(LAYOUTS[layout], where)
    plain = train(*made(lambda: Network(LAYOUTS[layout], where)), args)
    model, optimizer = made(lambda: Network(LAYOUTS[layout], where))
    whole = memscale.plan(model, sample_input=args, optimizer=optimizer).plain.device_used_peak_bytes
    config = Config(memory_budget=whole * 6 // 10, use_static_profiling=static, enable_logging=False)
    memscale.wrap(model, config, args, optimizer=optimizer)
    assert all(map(torch.equal, plain, train(model, optimizer, args)))
    plan = memscale.executor_of(model).plan
    assert plan.profile == ("static" if static else "empirical") and plan.active
    held = [*model.parameters(), *model.buffers(), *args]
    held += [
        value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)
    ]
    held += [model.edges] if where == "attribute" else []  # type: ignore[list-item]
    measured = nbytes(held) + peak_bytes(lambda: train_once(model, optimizer, args))
    assert measured <= plan.predicted.device_used_peak_bytes < 1.25 * measured


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, args: tuple[Tensor, ...]) -> None:
    model(*args).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.long
@pytest.mark.parametrize("where", ["buffer", "argument"])
def test_who_asks_for_elements_is_traced_by_a_real_step(where: str) -> None:
    """A fake of a sparse tensor has none, and sizes would be wrong."""
    args = batch(torch.sparse_coo, where)
    plain = train(*made(lambda: Network(torch.sparse_coo, where, True)), args)
    model, optimizer = made(lambda: Network(torch.sparse_coo, where, True))
    memscale.wrap(model, Config(memory_budget=1, enable_logging=False), args, optimizer=optimizer)
    assert all(map(torch.equal, plain, train(model, optimizer, args)))
    plan = memscale.executor_of(model).plan
    assert plan.profile == "empirical" and "sparse tensor" in " ".join(plan.notes)


class Writes(Convolution):
    """Has a graph of its own, and changes it in place before it is used."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__(False)
        self.own = graph(layout)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        with torch.no_grad():
            self.own.mul_(0.9)
        return super().forward(x, self.own)


@pytest.mark.long
@pytest.mark.parametrize("static", [True, False], ids=["fakes", "real"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_graph_that_a_forward_changes_is_changed_once(layout: str, static: bool) -> None:
    def build() -> nn.Module:
        model = Network(torch.sparse_coo, "buffer")
        model.layers = nn.ModuleList(Writes(LAYOUTS[layout]) for _ in range(4))
        return model

    args = batch(torch.sparse_coo, "buffer")
    plain = train(*made(build), args)
    model, optimizer = made(build)
    config = Config(memory_budget=1, enable_logging=False, use_static_profiling=static)
    memscale.wrap(model, config, args, optimizer=optimizer)
    assert all(map(torch.equal, plain, train(model, optimizer, args)))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).values()  # type: ignore[no-any-return]


def rows() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(n, WIDTH) for n in (3, 5, 2)], layout=torch.jagged)


class Bagged(nn.Module):
    """Its embedding's gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(4000, 64, sparse=True), nn.Linear(64, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words).mean(1)).square().mean()


def test_sparse_gradients_are_taken_as_they_lie() -> None:
    model, words = Bagged(), torch.randint(4000, (64, 20))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    predicted = memscale.predict(model, optimizer, sample_input=words).plain.allocated_peak_bytes

    def train() -> None:
        for _ in range(2):
            model(words).backward()
            optimizer.step()
            optimizer.zero_grad()

    measured = sum(tensor.nbytes for tensor in (*model.parameters(), words)) + peak_bytes(train)
    assert measured <= 1.001 * predicted <= 1.02 * measured


def test_nested_batches_are_refused_with_a_sample_and_run_unchanged_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ProfileError, match="nested tensor"):
        memscale.wrap(Rows(), Config(memory_budget=1), (rows(),))
    model, optimizer = made(Rows)
    plain = train(model, optimizer, (rows(),))
    model, optimizer = made(Rows)
    memscale.wrap(model, Config(memory_budget=1))
    assert all(map(torch.equal, plain, train(model, optimizer, (rows(),))))
    assert sum("nested tensor" in record.getMessage() for record in caplog.records) == 1
