# SPDX-License-Identifier: Apache-2.0
"""Layouts of what traces take for results are those of real operators, for every operator that is called.

Generated: each function below runs forward and backward on tensors that lie in many ways, dimensions of one
element with odd strides among them. Every operation on the way is compared, strides and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale.ops import op_facts

Looks = list[tuple[tuple[int, ...], tuple[int, ...], int]]


def looks(values: Any) -> Looks:
    """Shape, strides and bytes of the storage of every tensor that has elements."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel()]
    return [(tuple(leaf.shape), leaf.stride(), leaf.untyped_storage().nbytes()) for leaf in tensors]


def without_ones(look: tuple[tuple[int, ...], tuple[int, ...], int]) -> Any:
    shape, strides, size = look
    return shape, [stride for length, stride in zip(shape, strides, strict=True) if length != 1], size


def fake(tensor: Tensor) -> Tensor:
    whole = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


EXCEPT = {"linalg_vector_norm", "convolution_backward", "native_layer_norm_backward", "roll"}
"""Of these, strides of dimensions of one element differ still."""


class Compare(TorchDispatchMode):
    """Runs every operation for real, and as a trace does."""

    def __init__(self) -> None:
        super().__init__()
        self.compared: set[str] = set()
        self.different: dict[str, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info = op_facts.facts(func)
        given = looks((args, kwargs))
        with FakeTensorMode(allow_non_fake_inputs=True):
            expected = looks(op_facts.run(func, info, *tree_map_only(Tensor, fake, (args, kwargs))))
        result = func(*args, **kwargs)
        self.compared.add(info.name)
        found = looks(result)
        if found != expected and not (
            info.name in EXCEPT and list(map(without_ones, found)) == list(map(without_ones, expected))
        ):
            self.different.setdefault(info.name, (given, found, expected))
        return result


def channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def images() -> Iterator[Tensor]:
    """Four dimensions, also with one element in some of them, as they come from convolutions and reshapes."""
    for shape in ((4, 6, 8, 10), (4, 6, 1, 1), (4, 1, 8, 10), (1, 6, 8, 10), (1, 1, 8, 10)):
        plain = torch.randn(shape)
        yield plain
        yield channels_last(plain)
        yield torch.randn(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)
        yield torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1)
        yield (plain * torch.ones(shape[1], 1, 1)).reshape(-1, *shape[2:], 1).permute(0, 3, 1, 2)


def rows() -> Iterator[Tensor]:
    """Three dimensions, in several orders."""
    for shape in ((4, 6, 8), (4, 1, 8), (1, 6, 8), (4, 6, 1)):
        yield torch.randn(shape)
        yield torch.randn(shape[0], shape[2], shape[1]).transpose(1, 2)
        yield torch.randn(shape[2], shape[0], shape[1]).permute(1, 2, 0)
        yield torch.randn(shape[1], shape[0], shape[2]).transpose(0, 1)


ANY: dict[str, Callable[[Tensor], Any]] = {
    "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "elu": F.elu, "softplus": F.softplus,
    "leaky": F.leaky_relu, "hardswish": F.hardswish, "sigmoid": torch.sigmoid, "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "arithmetic": lambda x: (x * 2 + x / 3 - 1).abs().sqrt().exp(),
    "powers": lambda x: x**2 + x.square() + x.abs() ** 0.5,
    "broadcast": lambda x: x * x[:1] + x.mean(-1, keepdim=True),
    "with a vector": lambda x: x * torch.ones(x.shape[-1]) + torch.ones(x.shape[1], *[1] * (x.dim() - 2)),
    "where": lambda x: torch.where(x > 0, x, x * 0.5).clamp(min=-1).masked_fill(x > 1, 0.0),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(1),
    "sums": lambda x: (x.sum(1), x.mean((0, -1)), x.amax(-1), x.std(-1, correction=0)),
    "cat": lambda x: torch.cat([x, x * 2], 1), "stack": lambda x: torch.stack([x, x], 1),
    "flatten": lambda x: x.flatten(1) * 2, "reshape": lambda x: x.reshape(x.shape[0], -1, 1) * 2,
    "unsqueeze": lambda x: x.unsqueeze(1) * 2, "chunk": lambda x: [part * 2 for part in x.chunk(2, -1)],
    "flip": lambda x: x.flip(-1), "roll": lambda x: x.roll(1, -1),
    "repeat": lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
    "likes": lambda x: x + torch.zeros_like(x) + torch.ones_like(x) + x.new_ones(x.shape),
    "clone": lambda x: x.clone() + x.contiguous() + x.detach(),
    "index": lambda x: x[torch.tensor([0, 0])], "select": lambda x: x.index_select(1, torch.tensor([0])),
    "gather": lambda x: x.gather(0, torch.zeros(x.shape, dtype=torch.long)),
    "dropout": lambda x: F.dropout(x, 0.5), "cumsum": lambda x: x.cumsum(-1), "sort": lambda x: x.sort(-1)[0],
    "topk": lambda x: x.topk(1, -1)[0], "max": lambda x: x.max(1)[0], "pad": lambda x: F.pad(x, (1, 1)),
    "mse": lambda x: F.mse_loss(x, x.detach() * 2), "l1": lambda x: F.l1_loss(x, x.detach() * 2),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x.detach() * 2),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    "linear": lambda x: F.linear(x, torch.ones(5, x.shape[-1])), "matmul": lambda x: x @ x.transpose(-1, -2),
    "norm": lambda x: F.normalize(x, dim=-1), "half": lambda x: x.to(torch.bfloat16).float(),
    "einsum": lambda x: torch.einsum("ab...,cb...->ac...", x, x),
}  # fmt: skip

IMAGES: dict[str, Callable[[Tensor], Any]] = {
    "conv": lambda x: nn.Conv2d(x.shape[1], 4, 1)(x),
    "conv channels_last": lambda x: nn.Conv2d(x.shape[1], 4, 1).to(memory_format=torch.channels_last)(x),
    "conv 3x3": lambda x: nn.Conv2d(x.shape[1], 4, 3, padding=1)(x),
    "depthwise": lambda x: nn.Conv2d(x.shape[1], x.shape[1], 3, padding=1, groups=x.shape[1])(x),
    "transposed": lambda x: nn.ConvTranspose2d(x.shape[1], 4, 2, stride=2)(x),
    "batch norm": lambda x: nn.BatchNorm2d(x.shape[1])(x),
    "layer norm": lambda x: nn.LayerNorm(x.shape[1:])(x),
    "instance norm": lambda x: F.instance_norm(x) if x.shape[-1] > 1 else x * 2,
    "average pool": lambda x: F.adaptive_avg_pool2d(x, 1) * 2, "max pool": lambda x: F.max_pool2d(x, 1),
    "pool of two": lambda x: F.avg_pool2d(F.pad(x, (0, 1, 0, 1)), 2),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "reflect": lambda x: F.pad(x, (1, 1, 0, 0), mode="replicate"),
    "cross entropy": lambda x: F.cross_entropy(x, x.argmax(1)),
    "shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    "sigmoid gate": lambda x: x * x.mean((2, 3), True),
    "permute": lambda x: (x.permute(0, 2, 3, 1) * 2).reshape(x.shape[0], -1, x.shape[1]),
    "rows and back": lambda x: (x.flatten(2).transpose(1, 2) * 2).transpose(1, 2).reshape(x.shape) * 2,
}  # fmt: skip


def run(function: Callable[[Tensor], Any], batch: Tensor) -> None:
    """Forward, and backward from gradients that lie as the results do, and contiguous."""
    leaf = batch.detach().requires_grad_()
    outputs = [output for output in tree_leaves(function(leaf)) if output.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs], retain_graph=True)
    contiguous = [torch.ones(output.shape) for output in outputs]
    torch.autograd.backward(outputs, contiguous)


@pytest.mark.long
@pytest.mark.parametrize("name", [*ANY])
def test_any_dimensions(name: str) -> None:
    with Compare() as compare:
        for batch in (*rows(), *islice(images(), 15)):
            run(ANY[name], batch)
    assert compare.different == {}
    assert compare.compared


@pytest.mark.parametrize("name", [*IMAGES])
def test_images(name: str) -> None:
    with Compare() as compare:
        for batch in images():
            run(IMAGES[name], batch)
    assert compare.different == {}
    assert compare.compared
