# SPDX-License-Identifier: Apache-2.0
"""`memscale login`: keeps an API token for a server. It is typed, or piped in, and never an argument."""

from __future__ import annotations

import getpass
import json
import os
import sys
from pathlib import Path
from typing import Final

from memscale.cli.arguments import Options
from memscale.cli.problems import FITS, UsageError
from memscale.cli.sync import server_of
from memscale.cli.text import safe
from memscale.recording.server import Server, UnreachableError
from memscale.recording.tokens import TOKEN, is_token, keep_token, token_file

__all__ = ["LOGIN_VERSION", "run"]

LOGIN_VERSION: Final = 1


def run(options: Options) -> int:
    """Asks for the token, tries it, keeps it.

    Raises:
        UsageError: it is none, the server does not take it, or the file cannot be written.
    """
    url = server_of(options.place)
    token = _token(url)
    server = Server(url, token)
    try:
        answer = server.request("GET", "/api/v1/me", seconds=15.0)
    except UnreachableError as error:
        raise UsageError(f"{url} is not reached: {error}") from error
    finally:
        server.close()
    if not answer.is_ok or not isinstance(answer.body, dict):
        raise UsageError(f"{url} does not take this token ({answer.words})")
    name = str(answer.body.get("account", {}).get("name", ""))
    scopes = [str(scope) for scope in answer.body.get("scopes", [])]
    if not {"ingest", "admin"} & {*scopes}:
        raise UsageError(f"this token may {', '.join(scopes)}; recording needs the scope ingest")
    try:
        keep_token(url, token)
    except OSError as error:
        raise UsageError(
            f"cannot keep the token in {str(token_file())!r}: {error.strerror or error}"
        ) from error
    if options.as_json:
        found = {"format": "memscale-login", "version": LOGIN_VERSION, "server": url, "account": name,
                 "scopes": scopes}  # fmt: skip
        print(json.dumps(found, indent=2))
    else:
        print(safe(f"{name} at {url}; the token is in {_shown(token_file())}"))
    return FITS


def _token(url: str) -> str:
    """The token, from the environment, a terminal or a pipe."""
    word = os.environ.get(TOKEN, "").strip()
    if not word and sys.stdin is not None:
        word = getpass.getpass(f"API token for {url}: ") if sys.stdin.isatty() else sys.stdin.readline()
        word = word.strip()
    if not is_token(word):
        raise UsageError(f"this is no token: give ms_… on standard input or in {TOKEN}")
    return word


def _shown(path: Path) -> str:
    home = Path.home()
    return str(Path("~") / path.relative_to(home) if path.is_relative_to(home) else path)
