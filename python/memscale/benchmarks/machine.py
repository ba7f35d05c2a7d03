# SPDX-License-Identifier: Apache-2.0
"""Provenance of a measurement: date, commit, machine, versions. Every row begins with it."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

from memscale import __version__
from memscale.errors import MemScaleError
from memscale.hardware.host import processor_name
from memscale.hardware.present_gpu import present_gpu

__all__ = ["PROVENANCE", "provenance"]

PROVENANCE: Final = ("date", "commit", "machine", "cores", "python", "torch", "transformers", "memscale")


def provenance() -> dict[str, str]:
    """The first columns of a row. A "+" after the commit: the tree had changes."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.strftime("%Y-%m-%dT%H:%M:%SZ"), **_constant()}


@functools.cache
def _constant() -> dict[str, str]:
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "commit": commit(),
        "machine": _card() or processor_name(),
        "cores": str(os.cpu_count() if affinity is None else len(affinity(0))),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "memscale": __version__,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _card() -> str:
    """The card's name, without a context on it: this process measures nothing."""
    try:
        return present_gpu().name if torch.cuda.is_available() else ""
    except MemScaleError:
        return torch.cuda.get_device_name()


def commit() -> str:
    """Of the source tree that this package lies in; "" for an installed one.

    Who stages the package outside of its tree, as bench/gpu/run.sh does, names it in MEMSCALE_COMMIT.
    """
    named = os.environ.get("MEMSCALE_COMMIT")
    if named:
        return named
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return ""
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
