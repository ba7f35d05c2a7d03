# SPDX-License-Identifier: Apache-2.0
"""What every unit test finds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def usual_allocator() -> Iterator[None]:
    """Allocator and cuBLAS workspaces as usual, whatever the GPU tests or the caller have asked for.

    Of module scope, so that it comes before the fixtures of a module.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            patch.delenv(name, raising=False)
        yield
