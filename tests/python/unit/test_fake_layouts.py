# SPDX-License-Identifier: Apache-2.0
"""What a trace takes for an operator's results is laid out as the CPU kernel's results are, and as large."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale.ops import op_facts

Looks = list[tuple[tuple[int, ...], int, torch.dtype]]


def looks(values: Any) -> Looks:
    """Strides, bytes of the storage and dtype of every tensor. A dimension of one element has any stride."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [
        (() if 1 in leaf.shape else leaf.stride(), leaf.untyped_storage().nbytes(), leaf.dtype)
        for leaf in tensors
    ]


def fake(tensor: Tensor) -> Tensor:
    whole = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Compare(TorchDispatchMode):
    """Runs every operation twice: for real, and as a trace does.

    Attributes:
        compared: names of operators.
        different: (name, layouts of the arguments, real results, fake results).
    """

    def __init__(self) -> None:
        super().__init__()
        self.compared: set[str] = set()
        self.different: list[tuple[str, Looks, Looks, Looks]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info = op_facts.facts(func)
        wanted = info.name in op_facts.MENDS
        if wanted:
            with FakeTensorMode():
                likes = tree_map_only(Tensor, fake, (args, kwargs))
                expected = looks(op_facts.run(func, info, *likes))
        result = func(*args, **kwargs)
        if wanted:
            self.compared.add(info.name)
            if looks(result) != expected:
                self.different.append((info.name, looks((args, kwargs)), looks(result), expected))
        return result


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Any], set[str]]] = {
    "batch norm": (nn.BatchNorm1d(16), {"native_batch_norm", "native_batch_norm_backward"}),
    "layer norm": (nn.LayerNorm(12), {"native_layer_norm", "native_layer_norm_backward"}),
    "group norm": (nn.GroupNorm(4, 16), {"native_group_norm", "native_group_norm_backward"}),
    "log sigmoid": (F.logsigmoid, {"log_sigmoid_forward"}),
    "rrelu": (nn.RReLU(), {"rrelu_with_noise"}),
    "glu": (lambda x: F.glu(x, 1), {"glu_backward"}),
    "elu": (F.elu, {"elu_backward"}),
    "softplus": (F.softplus, {"softplus_backward"}),
    "hardtanh": (F.hardtanh, {"hardtanh_backward"}),
    "hardswish": (F.hardswish, {"hardswish_backward"}),
    "hardsigmoid": (F.hardsigmoid, {"hardsigmoid_backward"}),
    "mse": (lambda x: F.mse_loss(x, x.detach() * 2), {"mse_loss", "mse_loss_backward"}),
    "smooth l1": (
        lambda x: F.smooth_l1_loss(x, x.detach() * 2),
        {"smooth_l1_loss", "smooth_l1_loss_backward"},
    ),
    "huber": (lambda x: F.huber_loss(x, x.detach() * 2), {"huber_loss_backward"}),
}


def layouts() -> Iterable[Tensor]:
    """A batch of 8 × 16 × 12, laid out in several ways."""
    yield torch.randn(8, 16, 12)
    yield torch.randn(8, 12, 16).transpose(1, 2)
    yield torch.randn(12, 8, 16).permute(1, 2, 0)
    yield torch.randn(8, 32, 12)[:, 16:]


def run(function: Callable[[Tensor], Any], batch: Tensor) -> None:
    """Forward, and backward from gradients in two layouts."""
    leaf = batch.detach().requires_grad_()
    output = function(leaf)
    gradients = [torch.ones_like(output)]
    if output.dim() == 3:
        gradients.append(torch.ones(output.transpose(1, 2).shape).transpose(1, 2))
    for gradient in gradients:
        torch.autograd.grad(output, leaf, gradient, retain_graph=True)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_layouts_of_results(name: str) -> None:
    function, operators = FUNCTIONS[name]
    with Compare() as compare:
        for batch in layouts():
            run(function, batch)
    assert compare.different == []
    assert operators <= compare.compared


def test_images_that_are_channels_last() -> None:
    images = torch.randn(4, 16, 6, 10)
    with Compare() as compare:
        for batch in (images, images.to(memory_format=torch.channels_last), images.permute(0, 2, 1, 3)):
            run(nn.BatchNorm2d(batch.shape[1]), batch)
            run(nn.GroupNorm(2, batch.shape[1]), batch)
    assert compare.different == [] and {"native_batch_norm", "native_group_norm"} <= compare.compared
