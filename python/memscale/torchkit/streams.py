# SPDX-License-Identifier: Apache-2.0
"""Orders the reuse of card memory between streams.

PyTorch's allocator hands memory out again in the order of the stream that it was made on, and knows of no
other. So code that frees memory used on another stream makes the first one wait for that before.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Stream = Any
"""A stream of a card; None on the host, where everything is done in the order of the program."""


def present(tensor: Tensor) -> Stream:
    """The stream that operations on a tensor run on now."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def on(stream: Stream) -> AbstractContextManager[Any]:
    """Operations of a block run on a stream."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def follow(stream: Stream, other: Stream) -> None:
    """What is given to a stream from now on waits for what another one has been given."""
    if stream is not None and stream != other:
        stream.wait_stream(other)
