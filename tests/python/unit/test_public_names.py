# SPDX-License-Identifier: Apache-2.0
"""`import memscale`: what is there, what it loads, and what it leaves as it was."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

import memscale


@pytest.mark.parametrize("name", memscale.__all__)
def test_what_is_listed_is_there(name: str) -> None:
    assert getattr(memscale, name) is getattr(memscale, name)
    assert name in dir(memscale)


def test_what_is_not_there_has_the_usual_error() -> None:
    with pytest.raises(AttributeError, match="module 'memscale' has no attribute 'wrop'"):
        memscale.wrop  # noqa: B018


def test_without_pytorch_it_says_how_to_get_it() -> None:
    code = (
        "import sys, memscale\nsys.modules['torch'] = None\n"
        "try:\n    memscale.wrap\nexcept ModuleNotFoundError as error:\n    print(error, error.name)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = "memscale.wrap needs PyTorch, which is not installed: pip install torch torch"
    assert said.stdout.strip() == expected


def test_the_import_loads_nothing_but_itself() -> None:
    code = "import sys, memscale; print(*(it for it in sys.modules if it.startswith(('torch', 'memscale'))))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["memscale"]


@pytest.mark.parametrize("collects", [True, False])
def test_loading_leaves_the_garbage_collector_as_it_was(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    try:
        assert memscale._imported("memscale.errors") is memscale.errors
        with pytest.raises(ModuleNotFoundError):
            memscale._imported("memscale.nothing")
        assert gc.isenabled() is collects
    finally:
        gc.enable()
