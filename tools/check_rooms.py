# SPDX-License-Identifier: Apache-2.0
"""Checks the rooms of the Python package: who imports whom, that no circle is left, and how full a folder is.

A room is a folder of python/memscale, or a module beside them. The list below goes from the ground up, and
is the one in ARCHITECTURE.md: a room imports only rooms above it in the list. Imports inside of functions and
for types alone count as any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from source_tree import Finding, circles, files, main, parse_python

#: Rooms from the ground up. Those of one line have one rank, and do not know each other.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("_core", "units", "uninterrupted", "events"),
    ("errors",),
    ("config",),
    ("log",),
    ("hardware",),
    ("torchkit",),
    ("offload",),
    ("weights",),
    ("optim",),
    ("cuda",),
    ("ops",),
    ("state",),
    ("plans",),
    ("techniques",),
    ("trace",),
    ("survival",),
    ("core",),
    ("observability",),
    ("recording",),
    ("telemetry",),
    ("saving",),
    ("api",),
    ("policy", "autotuning", "runs"),
    ("__init__",),
    ("integrations", "benchmarks"),
    ("cli",),
    ("__main__",),
)
RANKS = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}

#: The one import that points up, in a function: `save_report` is a method of what the report is about.
UPWARD = frozenset({("plans.plan", "observability.report")})

FOLDER_FILES = 30

#: Packages that only some rooms may import, and never while they are themselves being imported.
OPTIONAL_PACKAGES = frozenset({"transformers", "lightning", "pytorch_lightning", "peft", "accelerate"})
OPTIONAL_USERS = frozenset({"integrations", "benchmarks", "cli"})


@dataclass(frozen=True)
class Import:
    """One name that a module imports.

    Attributes:
        line: of the statement.
        name: absolute and dotted, the imported name included.
        at_import: the statement runs while the module is imported.
        for_types: it runs never, and is there for a type checker.
    """

    line: int
    name: str
    at_import: bool
    for_types: bool


def check(root: Path) -> list[Finding]:
    """Returns every import of the package at ``root`` that points up or closes a circle, and full folders."""
    package = root / "python" / "memscale"
    modules = {_name_of(path, package): path for path in files(root, ".py", under="python/memscale")}
    imports = {name: list(_imports(path, package)) for name, path in modules.items()}
    known = {
        name: {
            (item.line, target) for item in found if (target := _module_of(item.name, modules)) is not None
        }
        for name, found in imports.items()
    }
    return [
        *_check_ranks(root, modules, known),
        *_check_optional(root, modules, imports),
        *_check_circles(root, modules, known),
        *_check_folders(root, modules),
    ]


def _name_of(path: Path, package: Path) -> str:
    """Dotted name below the package; "__init__" for the package itself."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _room_of(module: str) -> str:
    return module.partition(".")[0]


def _module_of(name: str, modules: Iterable[str]) -> str | None:
    """The module of the package that an imported name is, or is in; None for one from elsewhere."""
    first, _, rest = name.partition(".")
    if first != "memscale":
        return None
    if _room_of(rest) == "_core":
        return None  # the extension, which imports nothing
    parts = rest.split(".")
    for count in range(len(parts), 0, -1):
        if ".".join(parts[:count]) in modules:
            return ".".join(parts[:count])
    return rest if parts[0] in RANKS else "__init__"


def _check_ranks(
    root: Path, modules: dict[str, Path], known: dict[str, set[tuple[int, str]]]
) -> Iterator[Finding]:
    for name, path in modules.items():
        where, room = path.relative_to(root).as_posix(), _room_of(name)
        if room not in RANKS:
            yield Finding(where, 1, f"room '{room}' is not in the list of tools/check_rooms.py")
            continue
        for line, target in sorted(known[name]):
            other = _room_of(target)
            is_up = other != room and RANKS.get(other, 0) >= RANKS[room]
            if is_up and (name, target) not in UPWARD:
                yield Finding(where, line, f"{room} imports memscale.{target}, which stands above it")


def _check_optional(
    root: Path, modules: dict[str, Path], imports: dict[str, list[Import]]
) -> Iterator[Finding]:
    for name, path in modules.items():
        where = path.relative_to(root).as_posix()
        for item in imports[name]:
            first = item.name.partition(".")[0]
            if first not in OPTIONAL_PACKAGES or item.for_types:
                continue
            if _room_of(name) not in OPTIONAL_USERS:
                users = " and ".join(sorted(OPTIONAL_USERS))
                yield Finding(where, item.line, f"imports {first}; only {users} may")
            elif item.at_import:
                yield Finding(where, item.line, f"imports {first} at the top; do it in a function")


def _check_circles(
    root: Path, modules: dict[str, Path], known: dict[str, set[tuple[int, str]]]
) -> Iterator[Finding]:
    arrows = {
        name: {target for _, target in known[name] if target != name and (name, target) not in UPWARD}
        for name in modules
    }
    for circle in circles(arrows):
        where = modules[circle[0]].relative_to(root).as_posix()
        yield Finding(where, 1, f"imports go round in a circle: {', '.join(circle)}")


def _check_folders(root: Path, modules: dict[str, Path]) -> Iterator[Finding]:
    counts: dict[Path, int] = {}
    for path in modules.values():
        counts[path.parent] = counts.get(path.parent, 0) + 1
    for folder, count in counts.items():
        if count > FOLDER_FILES:
            where = folder.relative_to(root).as_posix()
            yield Finding(where, 1, f"{count} files, the cap is {FOLDER_FILES}: make folders of them")


def _imports(path: Path, package: Path) -> Iterator[Import]:
    """Every name that a module imports, wherever in it."""
    folder = path.parent.relative_to(package.parent).parts

    def walk(node: ast.AST, at_import: bool, for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(child.lineno, alias.name, at_import, for_types)
            elif isinstance(child, ast.ImportFrom):
                base = [child.module] if child.module else []
                if child.level:
                    base = [*folder[: len(folder) - child.level + 1], *base]
                for alias in child.names:
                    yield Import(child.lineno, ".".join([*base, alias.name]), at_import, for_types)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                yield from walk(child, False, True)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, at_import and not inside, for_types)

    return walk(parse_python(path.read_text(encoding="utf-8")), True, False)


if __name__ == "__main__":
    sys.exit(main(check, __doc__))
