# SPDX-License-Identifier: Apache-2.0
"""Every convolution of torch_geometric, three of them in a net, and its whole models for graphs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch_geometric.nn as tgnn
from torch import Tensor, nn

from sweeping.subject import Attempts, Made, Recipe, Unsupported, usual_loss

DISTRIBUTIONS = ("torch", "torch_geometric")

WIDTH, NODES, EDGES, CLASSES, KINDS = 16, 400, 1600, 5, 3

_MODELS = (
    "GCN",
    "GraphSAGE",
    "GIN",
    "GAT",
    "PNA",
    "EdgeCNN",
    "GraphUNet",
    "LINKX",
    "PMLP",
    "SGFormer",
    "Polynormer",
)

_NEED: dict[str, str] = {
    "FusedGATConv": "needs a card",
    "CuGraphGATConv": "needs a card",
    "CuGraphRGCNConv": "needs a card",
    "CuGraphSAGEConv": "needs a card",
    "DynamicEdgeConv": "needs torch_cluster",
    "GravNetConv": "needs torch_cluster",
    "XConv": "needs torch_cluster",
    "SplineConv": "needs torch_spline_conv",
    "PANConv": "needs torch_sparse",
    "WLConv": "has no trainable weight, and gives whole numbers",
}


def _mlp(inside: int = WIDTH, outside: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inside, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, outside))


def _construct() -> dict[str, Any]:
    """Parameter of a class → what to give for it; made anew, because it holds modules."""
    return {
        "in_channels": WIDTH, "out_channels": WIDTH, "channels": WIDTH, "hidden_channels": WIDTH, "K": 2,
        "k": 4, "num_layers": 2, "alpha": 0.2, "dim": 3, "kernel_size": 3, "num_relations": KINDS,
        "edge_dim": WIDTH, "num_node_types": KINDS, "num_edge_types": KINDS, "edge_type_emb_dim": 4,
        "edge_attr_emb_dim": 4, "filter_size": 2, "aggregators": ["mean", "max"],
        "scalers": ["identity", "amplification"], "deg": torch.tensor([0, 5, 20, 50, 100, 80]),
        "first_aggr": True, "mlp_h": _mlp(outside=3), "mlp_f": _mlp(WIDTH + 3), "mlp_g": _mlp(),
        "conv": tgnn.SAGEConv(WIDTH, WIDTH), "num_nodes": NODES, "nn": _mlp(), "pool_ratios": 0.5, "depth": 2,
    }  # fmt: skip


_NN = {"EdgeConv": lambda: _mlp(2 * WIDTH), "NNConv": lambda: _mlp(WIDTH, WIDTH * WIDTH)}
_ALSO: dict[str, dict[str, Any]] = {
    "GINEConv": {"edge_dim": WIDTH}, "GATConv": {"heads": 2, "concat": False, "dropout": 0.1},
    "GATv2Conv": {"heads": 2, "concat": False, "edge_dim": WIDTH},
    "TransformerConv": {"heads": 2, "concat": False}, "PointNetConv": {"local_nn": None},
    "AGNNConv": {"requires_grad": True}, "GPSConv": {"heads": 2}, "EGConv": {"num_heads": 4, "num_bases": 2},
    "DNAConv": {"heads": 2}, "AntiSymmetricConv": {"num_iters": 2}, "GMMConv": {"dim": WIDTH},
    "SignedConv": {"out_channels": WIDTH // 2},  # it gives two of them side by side
    "MixHopConv": {"out_channels": WIDTH // 2, "powers": [0, 1]},
}  # fmt: skip


class Net(nn.Module):
    """Three convolutions between linear layers; each is given what its forward asks for."""

    def __init__(self, kind: Any, given: Any) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(WIDTH, WIDTH), nn.LazyLinear(CLASSES)
        self.convs = nn.ModuleList(kind(**given()) for _ in range(3))
        self.wanted = [
            name
            for name, item in inspect.signature(kind.forward).parameters.items()
            if name != "self" and (item.default is item.empty or name in ("edge_attr", "edge_type"))
        ]

    def forward(self, **graph: Tensor) -> Tensor:
        x = graph["x"] = torch.tanh(self.inside(graph["x"]))
        first = x
        for conv in self.convs:
            known = {**graph, "x": x, "x_0": first}
            if type(conv).__name__ == "DNAConv":
                known["x"] = torch.stack([x, first], 1)
            if type(conv).__name__ == "MeshCNNConv":
                known["edge_index"] = graph["mesh_index"]
            given = {name: known[name] for name in self.wanted if name in known and self._takes(conv, name)}
            out = conv(**given)
            x = torch.relu(out[0] if isinstance(out, tuple) else out)
        scores: Tensor = self.head(x)
        return scores

    @staticmethod
    def _takes(conv: Any, name: str) -> bool:
        return (
            name != "edge_attr"
            or getattr(conv, "edge_dim", None) is not None
            or type(conv).__name__ in ("GMMConv", "NNConv", "PDNConv", "HEATConv", "GINEConv")
        )


class KindsNet(nn.Module):
    """The same for graphs of several kinds of nodes."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in _NODE_KINDS})
        self.convs = nn.ModuleList(self._conv(kind) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    @staticmethod
    def _conv(kind: Any) -> nn.Module:
        if kind is tgnn.HeteroConv:
            convs = {edge: tgnn.SAGEConv(WIDTH, WIDTH) for edge in _EDGE_KINDS}
            several: nn.Module = tgnn.HeteroConv(convs, aggr="sum")
            return several
        made: nn.Module = kind(WIDTH, WIDTH, (list(_NODE_KINDS), list(_EDGE_KINDS)), heads=2)
        return made

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> list[Tensor]:
        x = {name: torch.tanh(self.inside[name](item)) for name, item in x_dict.items()}
        for conv in self.convs:
            x = {name: torch.relu(item) for name, item in conv(x, edge_index_dict).items()}
        return [self.head(item) for item in x.values()]


_NODE_KINDS = ("paper", "author")
_EDGE_KINDS = (("author", "writes", "paper"), ("paper", "by", "author"), ("paper", "cites", "paper"))


def names() -> list[str]:
    convs = [name for name in tgnn.conv.__all__ if name.endswith("Conv")]
    return sorted([f"conv.{name}" for name in convs] + [f"model.{name}" for name in _MODELS])


def attempts(name: str) -> Attempts:
    if name.partition(".")[2] in _NEED:
        raise Unsupported(_NEED[name.partition(".")[2]])
    yield {}


def make(name: str, recipe: Recipe) -> Made:
    part, _, class_name = name.partition(".")
    kind: Any = getattr(tgnn, class_name)
    if class_name in ("HANConv", "HGTConv", "HeteroConv"):
        return Made(KindsNet(kind).train(), lambda step: ((), _graph_of_kinds(step)), usual_loss)
    parameters = inspect.signature(kind.__init__).parameters

    def given() -> dict[str, Any]:
        every = _construct()
        wanted = {
            key: every[key] for key, item in parameters.items() if item.default is item.empty and key in every
        }
        if "nn" in wanted and class_name in _NN:
            wanted["nn"] = _NN[class_name]()
        return wanted | _ALSO.get(class_name, {})

    if part == "conv":
        model: nn.Module = Net(kind, given)
        model(**graph(0))  # makes the head
        return Made(model.train(), lambda step: ((), graph(step)), usual_loss)
    if class_name == "PNA":
        extra = {key: _construct()[key] for key in ("aggregators", "scalers", "deg")}
        model = kind(**given(), **extra)
    else:
        model = kind(**given())
    takes = inspect.signature(kind.forward).parameters
    return Made(
        model.train(),
        lambda step: (
            (),
            {k: v for k, v in graph(step).items() if k in ("x", "edge_index", "batch") and k in takes},
        ),
        usual_loss,
    )


def _graph_of_kinds(step: int) -> dict[str, Any]:
    some = graph(step)
    x = {name: some["x"] + number for number, name in enumerate(_NODE_KINDS)}
    edges = {kind: some["edge_index"].roll(number, 1) for number, kind in enumerate(_EDGE_KINDS)}
    return {"x_dict": x, "edge_index_dict": edges}


def graph(step: int) -> dict[str, Tensor]:
    """A random graph; always the same edges."""
    fixed, generator = torch.Generator().manual_seed(1), torch.Generator().manual_seed(step)

    def some(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=fixed)

    return {
        "x": torch.randn(NODES, WIDTH, generator=generator),
        "edge_index": some(NODES, 2, EDGES),
        "hyperedge_index": some(NODES, 2, EDGES),
        "pos_edge_index": some(NODES, 2, EDGES),
        "neg_edge_index": some(NODES, 2, EDGES),
        "mesh_index": torch.stack([torch.arange(NODES).repeat_interleave(4), some(NODES, 4 * NODES)]),
        "edge_type": some(KINDS, EDGES),
        "node_type": some(KINDS, NODES),
        "edge_attr": torch.rand(EDGES, WIDTH, generator=generator),
        "batch": torch.arange(NODES) // (NODES // 4),
        "pos": torch.randn(NODES, 3, generator=generator),
        "normal": torch.randn(NODES, 3, generator=generator),
    }
