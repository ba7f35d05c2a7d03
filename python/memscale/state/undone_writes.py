# SPDX-License-Identifier: Apache-2.0
"""Undoes in-place writes of a real step that is discarded, to memory from before it.

Buffers and plain attributes of modules are looked after by name (`model_state`). This is for all else:
weights that a forward changes, modules that PyTorch does not see, global tensors.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.ops import op_facts
from memscale.state.tensor_versions import Versions
from memscale.torchkit.leaves import is_sparse, tensors_of

_autograd: Any = torch.autograd


class UndoneWrites(TorchDispatchMode):
    """A block whose in-place writes to memory from before it are undone at its end, versions included.

    The memory is copied as a whole, before it is written to for the first time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, StorageWeakRef] = {}  # in the block, by address
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._sparse: dict[int, tuple[Tensor, Tensor]] = {}  # may get other parts
        self._versions = Versions()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation."""
        kwargs = kwargs or {}
        info = op_facts.facts(func)
        for tensor in op_facts.arguments_at(func, info.writes, args, kwargs) if info.writes else ():
            self._keep(tensor)
        result = func(*args, **kwargs)
        if not info.is_view:
            for tensor in filter(_has_memory, tensors_of(result)):
                self._note_made(tensor.untyped_storage())
        return result

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Puts back what was there."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        for storage, held in self._before.values():
            if storage.nbytes() == held.nbytes():  # else it was given other memory
                storage.copy_(held)
        for tensor, before in self._sparse.values():  # `.data` would get other parts, and not the tensor
            with torch.no_grad(), _autograd._unsafe_preserve_version_counter(tensor):
                tensor.copy_(before)
        self._versions.restore()
        self._before.clear()
        self._sparse.clear()
        self._made.clear()

    def _note_made(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._before:  # an operation in place returns what was there
            self._made[storage._cdata] = StorageWeakRef(storage)

    def _keep(self, tensor: Tensor) -> None:
        if not _has_memory(tensor):
            is_real = not tensor.is_meta and not isinstance(tensor, FakeTensor)
            if is_real and is_sparse(tensor) and id(tensor) not in self._sparse:
                self._sparse[id(tensor)] = (tensor, tensor.detach().clone())
                self._versions.note(tensor)
            return
        storage = tensor.untyped_storage()
        made = self._made.get(storage._cdata)
        if made is None or made.expired():
            self._versions.note(tensor)  # each time: what shares memory need not share its version
            if storage._cdata not in self._before:
                self._before[storage._cdata] = (storage, storage.clone())


def _has_memory(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided and not tensor.is_meta and not isinstance(tensor, FakeTensor)
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    )  # fmt: skip
