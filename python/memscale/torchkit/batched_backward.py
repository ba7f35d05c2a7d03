# SPDX-License-Identifier: Apache-2.0
"""A backward for many gradients at once: `grad(is_grads_batched=True)`, `torch.func.vmap` around one.

Saved tensors have no batch there. The forward that makes them again was not part of it, and draws its random
numbers once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch._functorch import pyfunctorch

_KEY = "VmapMode"
_functorchs_set_aside = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", None)


def set_aside() -> AbstractContextManager[object]:
    """For a block that runs as if no such backward were in progress."""
    in_functorch = torch._C._functorch.peek_interpreter_stack() is not None
    if not in_functorch and not torch._C._dispatch_tls_is_dispatch_key_included(_KEY):
        return nullcontext()
    return _set_aside(in_functorch and _functorchs_set_aside is not None)


@contextmanager
def _set_aside(in_functorch: bool) -> Iterator[None]:
    included = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)
    try:
        with _functorchs_set_aside() if in_functorch and _functorchs_set_aside else nullcontext():
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, included)
