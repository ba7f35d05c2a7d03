# SPDX-License-Identifier: Apache-2.0
"""Whether telemetry is on, who has decided that, and where it goes. Nobody is ever asked.

    DO_NOT_TRACK        set, and not 0: off, whatever else says
    MEMSCALE_TELEMETRY  1 or 0
    CI                  off in a CI environment, whatever the file says
    the user's file     $XDG_CONFIG_HOME/memscale/telemetry.json, or below ~/.config: what `memscale telemetry
                        enable` or `disable` has written
    otherwise           off

A setting that cannot be understood is off. Nothing here raises, but for `keep`.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memscale.telemetry.address import Address, address_of

__all__ = ["URL", "Decision", "Kept", "choice_file", "decide", "destination", "keep", "kept"]

URL: Final = "MEMSCALE_TELEMETRY_URL"
"""The environment variable with an address, which goes before the one in the file."""

_SWITCH: Final = "MEMSCALE_TELEMETRY"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_CI: Final = ("CI", "CODEBUILD_BUILD_ID", "JENKINS_URL", "TEAMCITY_VERSION", "TF_BUILD")
"""Variables of CI environments. Nearly all set the first."""

_VERSION: Final = 1
_MOST_BYTES: Final = 4096


@dataclass(frozen=True)
class Decision:
    """Whether telemetry is on.

    Attributes:
        enabled: it is.
        decided_by: "DO_NOT_TRACK", "MEMSCALE_TELEMETRY", "CI", "file" or "default".
        reason: a sentence without its full stop.
    """

    enabled: bool
    decided_by: str
    reason: str


@dataclass(frozen=True)
class Kept:
    """What the user's file says.

    Attributes:
        enabled: the choice; None: there is no file, or it cannot be used.
        url: an address, checked; None: there is none.
        problem: why the file cannot be used; "": it can, or is not there.
    """

    enabled: bool | None = None
    url: str | None = None
    problem: str = ""


def decide() -> Decision:
    """Decides from the environment and the user's file, as they are now."""
    if _is_set("DO_NOT_TRACK"):
        return Decision(False, "DO_NOT_TRACK", "DO_NOT_TRACK is set")
    word = os.environ.get(_SWITCH, "").strip().lower()
    if word:
        shown = "" if word in _TRUE + _FALSE else f", which is none of {', '.join(_TRUE + _FALSE)}"
        return Decision(word in _TRUE, _SWITCH, f"{_SWITCH} is {word[:40]!r}{shown}")
    found = kept()
    if found.problem:
        return Decision(False, "file", found.problem)
    if found.enabled is None:
        return Decision(False, "default", "nobody has switched it on")
    if found.enabled and (variable := next(filter(_is_set, _CI), None)) is not None:
        return Decision(False, "CI", f"{variable} is set, and in a CI environment only {_SWITCH}=1 counts")
    return Decision(
        found.enabled, "file", f"`memscale telemetry {'enable' if found.enabled else 'disable'}` was run"
    )


def destination() -> tuple[Address | None, str]:
    """Where telemetry goes, and in words why nowhere ("" if it has an address)."""
    text = os.environ.get(URL, "").strip() or kept().url
    if not text:
        return None, f"none is built in: set {URL}, or run `memscale telemetry enable --url URL`"
    try:
        return address_of(text), ""
    except ValueError as error:  # of the environment: that of the file is checked
        return None, f"{URL}: {error}"


def choice_file() -> Path | None:
    """The user's file; None where there is no home."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # by the standard, a relative path there is to be ignored
        base = os.path.join(os.path.expanduser("~"), ".config")
    return Path(base, "memscale", "telemetry.json") if os.path.isabs(base) else None


def kept() -> Kept:
    """Reads the user's file."""
    path = choice_file()
    try:
        text = None if path is None else _read(path)
    except (FileNotFoundError, NotADirectoryError):
        return Kept()
    except (OSError, ValueError) as error:
        return Kept(problem=f"{path} cannot be read ({getattr(error, 'strerror', None) or error})")
    if text is None:
        return Kept()
    try:
        data = json.loads(text)
        return _checked(data)
    except (ValueError, RecursionError):
        return Kept(problem=f"{path} is damaged; `memscale telemetry enable` or `disable` writes it again")


def _read(path: Path) -> bytes:
    """The bytes of a file, which may be anything: nothing here waits for a writer of a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no file")
        return os.read(descriptor, _MOST_BYTES + 1)[:_MOST_BYTES]
    finally:
        os.close(descriptor)


def _checked(data: Any) -> Kept:
    """What the file says, if it is what `keep` writes.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(data, dict) or data.keys() != {"version", "enabled", "url"}:
        raise ValueError("unknown keys")
    if data["version"] != _VERSION or not isinstance(data["enabled"], bool):
        raise ValueError("unknown values")
    url = data["url"]
    if url is not None:
        url = address_of(str(url)).url
    return Kept(data["enabled"], url)


def keep(enabled: bool, url: str | None) -> None:
    """Writes the user's choice, in a file that only the user reads.

    Raises:
        OSError: it cannot be written. What was there is as before.
    """
    path = choice_file()
    if path is None:
        raise FileNotFoundError("there is no home: set XDG_CONFIG_HOME")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps({"version": _VERSION, "enabled": enabled, "url": url}) + "\n"
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)
            file.write(text)
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() not in ("", *_FALSE)
