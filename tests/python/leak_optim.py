# SPDX-License-Identifier: Apache-2.0
"""Calls of `_core.Optim` on arrays that live as long as this module, for test_leaks.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memscale import _core
from memscale.errors import MemScaleError

_COUNT = 300
_FORM = "master_rest8"
_RULE: dict[str, Any] = {"kind": "adamw", "gradient": "bf16", "weights": _FORM, "moments": "code8"}
_SIZES = _core.Optim.sizes(_RULE, _COUNT)
_NAMES = ("gradient", "weight", "master", "moment1", "moment2", "scale1", "scale2")
_ARRAYS = {name: torch.zeros(_SIZES[f"{name}_bytes"], dtype=torch.uint8) for name in _NAMES}
_WHOLE, _OTHER = torch.ones(_COUNT), torch.ones(_COUNT)
_OPTIM = _core.Optim(2)
_OPTIM_TYPE: Any = _core.Optim


def _span(array: Tensor) -> tuple[int, int]:
    return array.data_ptr(), array.nbytes


def _typed(array: Tensor, kind: str = "fp32") -> tuple[int, int, str]:
    return (*_span(array), kind)


def _tensor() -> tuple[int, ...]:
    return (_COUNT, 0, 1, *(number for name in _NAMES for number in _span(_ARRAYS[name])))


def _card_name() -> str:
    """Of a new card, where there is one. To be refused must not leak either."""
    try:
        return _core.Card().name
    except MemScaleError:
        return ""


OPTIM_CALLS: dict[str, Callable[[Path], object]] = {
    "Card": lambda _: _card_name(),
    "Card.name": lambda _: _card_name(),
    "Optim": lambda _: _core.Optim(2),
    "Optim.threads": lambda _: _OPTIM.threads,
    "Optim.isa": lambda _: _OPTIM.isa,
    "Optim.sizes": lambda _: _core.Optim.sizes(_RULE, _COUNT),
    "Optim.step": lambda _: _OPTIM.step(_RULE, [_tensor()]),
    "Optim.norm": lambda _: _OPTIM.norm([_typed(_WHOLE)]),
    "Optim.clip_factor": lambda _: _core.Optim.clip_factor(4.0, 1.0),
    "Optim.accumulate": lambda _: _OPTIM.accumulate(_span(_WHOLE), _typed(_OTHER)),
    "Optim.convert": lambda _: _OPTIM.convert(_typed(_ARRAYS["gradient"], "bf16"), _typed(_WHOLE)),
    "Optim.split": lambda _: _OPTIM.split(
        _FORM, _span(_WHOLE), _span(_ARRAYS["weight"]), _span(_ARRAYS["master"])
    ),
    "Optim.join": lambda _: _OPTIM.join(
        _FORM, _span(_ARRAYS["weight"]), _span(_ARRAYS["master"]), _span(_WHOLE)
    ),
    "Optim.moments_read": lambda _: _OPTIM.moments_read(_RULE, _tensor(), _span(_WHOLE), _span(_OTHER)),
    "Optim.moments_write": lambda _: _OPTIM.moments_write(_RULE, _tensor(), _span(_WHOLE), _span(_OTHER)),
}
"""By public name."""

OPTIM_ERRORS: dict[str, Callable[[], object]] = {
    "no driver": lambda: _core.Card(0, None, "/nowhere/libcuda.so"),
    "no Card": lambda: _OPTIM_TYPE(card=object()),
    "stream of no card": lambda: _core.Optim(stream=16),
    "threads": lambda: _core.Optim(0),
    "field of a rule": lambda: _OPTIM.step({**_RULE, "beta3": 1.0}, [_tensor()]),
    "bytes of an array": lambda: _OPTIM.norm([(_WHOLE.data_ptr(), 3, "fp32")]),
    "arrays that overlap": lambda: _OPTIM.accumulate(_span(_WHOLE), _typed(_WHOLE)),
    "no tensor": lambda: _OPTIM.step(_RULE, [object()]),  # type: ignore[list-item]
}
"""What is refused."""
