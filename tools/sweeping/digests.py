# SPDX-License-Identifier: Apache-2.0
"""Bits of a training run as short texts, so that runs of different processes can be compared."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sweeping.subject import leaves

Digests = dict[str, str]
"""Name → digest of the bits."""

_UNCOMPARED = ("past_key_values", "cache_params", "cache", "mems")
"""Outputs that the plan may switch off."""


def of_bytes(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def of_tensor(tensor: Tensor) -> str:
    """Type, shape and bits; a tensor without data says so."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return f"without data {list(tensor.shape)}"
    value = tensor.detach()
    if value.layout != torch.strided:
        value = value.to_dense()
    if value.is_quantized:
        value = value.int_repr()
    value = value.resolve_conj().resolve_neg().contiguous().cpu()
    data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}:{of_bytes(data)}"


def of_step(model: nn.Module, output: Any, loss: Tensor) -> Digests:
    """All that one forward and backward computed."""
    found = {"loss": of_tensor(loss)}
    for path, item in leaves(output):
        if not any(part in _UNCOMPARED for part in path.split(".")):
            found[f"output{path}"] = of_tensor(item)
    found |= of_named("gradient", ((name, p.grad) for name, p in model.named_parameters()))
    return found | of_named("buffer", model.named_buffers()) | of_generators()


def of_named(kind: str, tensors: Iterable[tuple[str, Tensor | None]]) -> Digests:
    """A tensor that is not there has a digest, too."""
    return {f"{kind} {name}": "none" if item is None else of_tensor(item) for name, item in tensors}


def of_generators() -> Digests:
    """States of the random generators."""
    import numpy

    return {
        "generator torch": of_tensor(torch.get_rng_state()),
        "generator python": of_bytes(repr(random.getstate()).encode()),
        "generator numpy": of_bytes(pickle.dumps(numpy.random.get_state())),
    }


def different(expected: Digests, got: Digests) -> list[str]:
    """Names whose bits differ, or that only one side has."""
    return [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
