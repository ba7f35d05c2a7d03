# SPDX-License-Identifier: Apache-2.0
"""The generated pages of the reference: what they say is read from the code, so it cannot differ from it.

They need the package `memscale` without PyTorch: only what Sphinx takes from docstrings does.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from website.markdown import table
from website.openapi import server_page

__all__ = [
    "MODULES",
    "cli_page",
    "commands_of",
    "config_page",
    "errors_page",
    "headers_of",
    "python_page",
    "write",
]

MODULES: Final = ("autotuning", "errors")
"""Public names of the package that are modules."""

ABOUT_HEADERS: Final = "memscale.h"
"""The header that only includes the others."""

_EDITED: Final = "<!-- Made from the code by tools/build_site.py. -->\n"


# ---- Python ------------------------------------------------------------------------------------------


def _title(text: str, mark: str = "=") -> str:
    return f"{text}\n{mark * len(text)}\n"


def python_page() -> str:
    """Directives for every public name of `memscale`, and of its public modules."""
    import memscale

    names = [name for name in memscale.__all__ if not name.startswith("__") and name not in MODULES]
    functions = [name for name in names if name[0].islower()]
    classes = [name for name in names if not name[0].islower()]
    parts = [
        _title("Python"),
        "Everything that ``memscale`` makes public. What is not here may change without notice.\n",
        _title("Functions", "-"),
        *(f".. autofunction:: memscale.{name}\n" for name in functions),
        _title("Classes", "-"),
        *(_class(f"memscale.{name}") for name in classes),
    ]
    for module in MODULES:
        own = sys.modules.get(f"memscale.{module}") or getattr(memscale, module)
        parts += [_title(f"memscale.{module}", "-"), f".. automodule:: memscale.{module}\n"]
        for name in own.__all__:
            parts.append(_class(f"memscale.{module}.{name}"))
    return "\n".join(parts)


def _class(path: str) -> str:
    return f".. autoclass:: {path}\n   :members:\n   :show-inheritance:\n"


# ---- configuration -----------------------------------------------------------------------------------


def arguments_of(owner: type) -> dict[str, str]:
    """What a class's docstring says of each argument."""
    text = inspect.cleandoc(owner.__doc__ or "")
    section = re.search(r"^Args:\n((?:[ ].*\n|\n)+)", text + "\n", re.MULTILINE)
    found: dict[str, str] = {}
    for match in re.finditer(
        r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section.group(1) if section else "", re.MULTILINE
    ):
        found[match.group(1)] = " ".join(match.group(2).split())
    return found


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    return f"`{getattr(value, 'value', value)!r}`"


def _fields(owner: Any) -> str:
    said = arguments_of(owner)
    rows = [
        (f"`{field.name}`", f"`{field.type}`", _default(field), said[field.name])
        for field in dataclasses.fields(owner)
        if field.init
    ]
    return table(("field", "type", "default", "meaning"), rows)


def config_page() -> str:
    """Every field of `Config` and `AsyncOffloadConfig`, and what each mode sets."""
    from memscale.config import config

    modes = list(config.OptimizationMode)
    effective = {mode: config.Config(mode=mode).effective() for mode in modes}
    differ = [
        field.name
        for field in dataclasses.fields(config.EffectiveConfig)
        if field.name != "mode" and len({repr(getattr(effective[mode], field.name)) for mode in modes}) > 1
    ]
    rows = [(f"`{name}`", *(f"`{getattr(effective[mode], name)!r}`" for mode in modes)) for name in differ]
    return "\n".join(
        [
            "# Configuration fields\n",
            _EDITED,
            "Every field with its type and default. [Configuration](../guide/config.md) explains them.\n",
            "## Config\n",
            _fields(config.Config),
            "## AsyncOffloadConfig\n",
            _fields(config.AsyncOffloadConfig),
            "## Optimization modes\n",
            "What a mode sets where the field is not given; all other fields are the same in every mode.\n",
            table(("field", *(f"`{mode.value}`" for mode in modes)), rows),
        ]
    )


# ---- errors ------------------------------------------------------------------------------------------


def statuses_of(root: Path) -> list[tuple[str, str]]:
    """The status codes of the C library with their texts, in their order."""
    text = (root / "include/memscale/status.h").read_text(encoding="utf-8")
    return re.findall(r'^ {4}X\((\w+), "([^"]*)"\)', text, re.MULTILINE)


def server_codes_of(root: Path) -> list[str]:
    """The codes in the server's error answers."""
    contract = yaml.safe_load((root / "server/openapi.yaml").read_text(encoding="utf-8"))
    error = contract["components"]["schemas"]["Error"]["properties"]["error"]
    return [str(code) for code in error["properties"]["code"]["enum"]]


def errors_page(root: Path) -> str:
    """Exceptions of Python, status codes of C, codes of the server."""
    from memscale import errors

    kinds = [getattr(errors, name) for name in errors.__all__]
    rows = [
        (
            f"`{kind.__name__}`",
            ", ".join(f"`{base.__name__}`" for base in kind.__bases__),
            " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split()),
        )
        for kind in kinds
    ]
    codes = [(str(at), f"`MSC_{name}`", text) for at, (name, text) in enumerate(statuses_of(root))]
    return "\n".join(
        [
            "# Errors\n",
            _EDITED,
            "## Exceptions\n",
            "In `memscale.errors`; the [Python reference](python.rst) has what to do about each.\n",
            table(("exception", "is also", "meaning"), rows),
            "## Status codes of the C library\n",
            "Values are stable. [ARCHITECTURE](../../ARCHITECTURE.md#errors) has the exception of each.\n",
            table(("value", "code", "text"), codes),
            "## Codes of memscale-server\n",
            "`error.code` of an answer; the [server API](server-api.md) has the answers of each operation.\n",
            table(("code",), [(f"`{code}`",) for code in server_codes_of(root)]),
        ]
    )


# ---- command line ------------------------------------------------------------------------------------


def _help(*command: str) -> str:
    """What the program itself says, 100 columns wide."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "memscale", *command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return done.stdout.rstrip()


def commands_of(overview: str) -> list[str]:
    """Names of the commands in what `--help` prints."""
    return re.findall(r"^ {4}([a-z]+)(?:  +\S.*)?$", overview, re.MULTILINE)


def cli_page() -> str:
    """What `memscale --help` prints, and each command's."""
    overview = _help()
    parts = ["# Command line options\n", _EDITED]
    parts.append("What the program prints. [Command line](../guide/cli.md) shows it at work.\n")
    parts.append(f"```text\n{overview}\n```\n")
    for command in commands_of(overview):
        parts.append(f"## memscale {command}\n\n```text\n{_help(command)}\n```\n")
        for action in _actions(command):
            parts.append(f"### memscale {command} {action}\n\n```text\n{_help(command, action)}\n```\n")
    return "\n".join(parts)


def _actions(command: str) -> list[str]:
    text = _help(command)
    return commands_of(text.partition("  ACTION\n")[2].partition("\n\n")[0]) if "  ACTION\n" in text else []


# ---- C -----------------------------------------------------------------------------------------------


def headers_of(root: Path) -> list[str]:
    """The public headers, in the order in which `memscale.h` includes them."""
    text = (root / "include/memscale" / ABOUT_HEADERS).read_text(encoding="utf-8")
    named = re.findall(r'^#include "(\w+\.h)"', text, re.MULTILINE)
    there = {path.name for path in (root / "include/memscale").glob("*.h")} - {ABOUT_HEADERS}
    return [*named, *sorted(there - set(named))]


def brief_of(root: Path, header: str) -> str:
    """The first sentence of a header."""
    text = (root / "include/memscale" / header).read_text(encoding="utf-8")
    match = re.search(r"@file \S+\n((?: \* .*\n)+)", text)
    words = " ".join(line.strip(" *") for line in match.group(1).splitlines()) if match else ""
    return re.split(r"(?<=\.)\s", words, maxsplit=1)[0]


def c_pages(root: Path) -> Iterator[tuple[str, str]]:
    """The overview of the C headers, and a page of each."""
    headers = headers_of(root)
    listed = "".join(f"* :doc:`c/{name[:-2]}`: {brief_of(root, name)}\n" for name in headers)
    names = "\n".join(f"   c/{name[:-2]}" for name in headers)
    yield (
        "c.rst",
        "\n".join(
            [
                _title("C headers"),
                "``memscale/memscale.h`` includes all of them. How to build: :doc:`/docs/guide/c-library`.\n",
                re.sub(r"(?<![`:\w])`([^`/]+)`(?!`)", r"``\1``", listed),
                f".. toctree::\n   :hidden:\n\n{names}\n",
            ]
        ),
    )
    for name in headers:
        title = f"{name}"
        yield f"c/{name[:-2]}.rst", f"{_title(title)}\n.. c:autodoc:: {name}\n"


def write(root: Path, folder: Path) -> None:
    """Writes the pages of the reference, but for the numbers, into a folder."""
    pages: dict[str, Callable[[], str]] = {
        "python.rst": python_page,
        "config.md": config_page,
        "errors.md": lambda: errors_page(root),
        "cli.md": cli_page,
        "server-api.md": lambda: server_page(root),
    }
    (folder / "c").mkdir(parents=True, exist_ok=True)
    for name, make in pages.items():
        (folder / name).write_text(make(), encoding="utf-8")
    for name, text in c_pages(root):
        (folder / name).write_text(text, encoding="utf-8")
