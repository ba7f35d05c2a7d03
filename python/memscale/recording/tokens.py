# SPDX-License-Identifier: Apache-2.0
"""API tokens by server, in a file that only the user reads."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Final

from memscale.recording.places import config_folder

__all__ = ["TOKEN", "is_token", "keep_token", "token_file", "token_for"]

TOKEN: Final = "MEMSCALE_TOKEN"
"""The environment variable with a token, which goes before those that are kept."""

_TOKEN: Final = re.compile(r"ms_[0-9a-f]{16}_[0-9a-f]{64}")


def is_token(text: str) -> bool:
    """Whether a text has the form of a token."""
    return _TOKEN.fullmatch(text) is not None


def token_file() -> Path:
    """Where tokens are kept."""
    return config_folder() / "tokens.json"


def token_for(url: str) -> str:
    """The token for a server; "": there is none."""
    word = os.environ.get(TOKEN, "").strip()
    if is_token(word):
        return word
    found = _known().get(url, "")
    return found if is_token(found) else ""


def keep_token(url: str, token: str) -> None:
    """Keeps a token, in the place of an earlier one.

    Raises:
        OSError: the file cannot be written.
    """
    path = token_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({**_known(), url: token}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def _known() -> dict[str, str]:
    try:
        found = json.loads(token_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(url): str(token) for url, token in found.items()} if isinstance(found, dict) else {}
