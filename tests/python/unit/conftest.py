# SPDX-License-Identifier: Apache-2.0
"""What every unit test finds."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def usual_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS workspaces of the usual size, whatever the GPU tests or the caller have asked for."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
