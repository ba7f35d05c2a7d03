# SPDX-License-Identifier: Apache-2.0
"""Finds the configuration of a Hugging Face model: local files, the hub's cache, the hub, the built-in table.

Only `config.json` is ever read; no weights, no code from a model's repository.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from memscale.cli import known_models
from memscale.cli.adapters import ADAPTER_FILE, Adapter, read_adapter
from memscale.cli.problems import UsageError, one_line

__all__ = ["Found", "find_config", "offline"]

_SECONDS: Final = 4.0
"""How long the hub may take to answer before the built-in table is asked."""

_LARGEST_BYTES: Final = 4 << 20
"""Longest configuration file that is read."""

_TRUE: Final = ("1", "on", "yes", "true")


@dataclass(frozen=True)
class Found:
    """A configuration and where it was found.

    Attributes:
        name: what the model is called.
        values: the content of its `config.json`.
        note: one line for the user where the values are not the hub's or a file's, else "".
        adapter: to train on the model, where the name is that of an adapter's folder.
    """

    name: str
    values: dict[str, Any]
    note: str = ""
    adapter: Adapter | None = None


class _NotThere(Exception):  # noqa: N818 - a fact, and it never leaves this file
    """The hub has no such model, or does not show it to this user."""


def offline() -> bool:
    """Whether the environment forbids to ask the hub."""
    return any(
        os.environ.get(name, "").strip().lower() in _TRUE
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def find_config(name: str) -> Found:
    """The configuration of a model.

    Args:
        name: a folder with a `config.json`, the path of such a file, or a model's name on the hub; or a
            folder with an `adapter_config.json`, which names its base model.

    Raises:
        UsageError: there is none; the message says what was tried.
    """
    path = Path(name).expanduser()
    if path.suffix == ".py":
        raise UsageError(f"{name!r} is a program: say which function makes the model, as in {name}:build")
    if (path / ADAPTER_FILE).is_file():
        adapter, base = read_adapter(path)
        return replace(find_config(base), adapter=adapter)
    if path.is_dir() and ((path / "config.json").exists() or name.startswith((".", os.sep, "~"))):
        return Found(name, _read(path / "config.json"))
    if path.suffix == ".json" or path.is_file():
        return Found(name, _read(path))
    cached = _from_cache(name)
    if cached is not None:
        return Found(name, _read(cached))
    known = known_models.find(name)
    try:
        values = _from_hub(name)
    except _NotThere as error:
        return _fall_back(known, name, one_line(error))
    if values is not None:
        return Found(name, values)
    return _fall_back(known, name, "the hub is off limits" if offline() else "the hub cannot be reached")


def _fall_back(known: known_models.Known | None, name: str, why: str) -> Found:
    if known is not None:
        return Found(known.name, dict(known.values), f"{why}: shape of {known.name} from the built-in table")
    close = known_models.closest(name)
    hint = f"; close to it: {', '.join(close)}" if close else ""
    raise UsageError(
        f"unknown model {name!r}: no such file, not in the hub's cache, not in the built-in table, "
        f"and {why}{hint}"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    if len(text) > _LARGEST_BYTES:
        raise UsageError(f"{str(path)!r} is no model configuration: larger than {_LARGEST_BYTES >> 20} MiB")
    return _parse(text, str(path))


def _parse(text: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where!r} is no model configuration: {one_line(error)}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UsageError(f"{where!r} is no model configuration: it names no model_type")
    return values


def _from_cache(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    for repository in _repositories(name):
        try:
            found = try_to_load_from_cache(repository, "config.json")
        except ValueError:  # not a name that the hub allows
            return None
        if isinstance(found, str):
            return Path(found)
    return None


def _from_hub(name: str) -> dict[str, Any] | None:
    """The hub's answer; None where it cannot be asked. Raises `_NotThere`."""
    if offline():
        return None
    try:
        from huggingface_hub import hf_hub_url

        tools: Any = importlib.import_module("huggingface_hub.utils")
    except ImportError:
        return None
    for repository in _repositories(name):
        try:
            tools.validate_repo_id(repository)
            url = hf_hub_url(repository, "config.json")
            # One plain request: the hub's own download tries for half a minute before it gives up.
            answer = tools.get_session().get(url, headers=tools.build_hf_headers(), timeout=_SECONDS)
        except ValueError as error:
            raise _NotThere(f"{name!r} is not a name that the hub allows") from error
        except Exception:  # no network, in the words of whichever client there is
            return None
        if answer.status_code == 200:
            return _parse(answer.content[: _LARGEST_BYTES + 1], url)
        if answer.status_code not in (401, 403, 404):
            return None
    # Without a login the hub answers for a model that does not exist as for one that it does not show.
    raise _NotThere("the hub has no such model, or does not show it without a login (hf auth login)")


def _repositories(name: str) -> list[str]:
    """Names to look up: as written, and the full name where the table knows one."""
    known = known_models.find(name)
    full = [] if known is None or known.name == name else [known.name]
    return [name, *full]
