# SPDX-License-Identifier: Apache-2.0
"""Checks who may know whom in C: the includes of src/, of the public headers and of what stands on these.

No includes of src/ or python/ext go round in a circle, a file and its header taken as one.

The tables below are the drawing in ARCHITECTURE.md. Changing one means changing
the other. `check_rooms.py` has the Python package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from source_tree import Finding, circles, files, includes, main

#: Modules of src/ and what each may include beside itself.
SRC_LAYERS: dict[str, frozenset[str]] = {
    "base": frozenset(),
    "graph": frozenset({"base"}),
    "device": frozenset({"base"}),
    "fingerprint": frozenset({"base", "device"}),
    "metrics": frozenset({"base"}),
    "optim": frozenset({"base", "device"}),
    "record": frozenset({"base"}),
    "policy": frozenset({"base"}),
    "plan": frozenset({"base", "graph"}),
    "sim": frozenset({"base", "graph", "plan"}),
    "snapshot": frozenset({"base", "sim"}),
    "offload": frozenset({"base", "device", "metrics"}),
    "decide": frozenset({"base", "graph", "plan", "sim", "policy"}),
}

#: Public headers that are not named after their module.
HEADER_MODULES = {"status": "base", "replay": "sim"}

#: The header that includes all others.
UMBRELLA = "memscale.h"

#: Programs that stand on the public headers, and the modules of src/ that each may include all the same.
DOOR_USERS: dict[str, frozenset[str]] = {
    "cli": frozenset(),
    "server": frozenset({"base"}),
    "python/ext": frozenset(),
    "examples/c": frozenset(),
    # graphs and brute force of the tests of decide; parts of the offload engine that have no public door
    "bench/c": frozenset({"brute.h", "synth.h", "offload"}),
}


def check(root: Path) -> list[Finding]:
    """Returns every include that crosses the layers of the tree at ``root``."""
    return [*_check_src(root), *_check_headers(root), *_check_door(root), *_check_circles(root)]


def _header_module(name: str) -> str:
    stem = Path(name).stem
    return HEADER_MODULES.get(stem, stem)


def _check_src(root: Path) -> Iterator[Finding]:
    for path in files(root, ".c", ".h", ".cu", under="src"):
        where = path.relative_to(root).as_posix()
        module = path.relative_to(root / "src").parts[0]
        if module not in SRC_LAYERS:
            yield Finding(where, 1, f"module '{module}' is not in the table of tools/check_layers.py")
            continue
        allowed = SRC_LAYERS[module] | {module}
        for line, name, _ in includes(path.read_text(encoding="utf-8")):
            other = _src_target(root, path, name)
            if other is not None and other not in allowed:
                known = ", ".join(sorted(allowed))
                yield Finding(where, line, f"{module} includes {name}; it may know only {known}")


def _src_target(root: Path, path: Path, name: str) -> str | None:
    """Module that an include names, or None for one from outside the project."""
    folder, _, rest = name.partition("/")
    if folder == "memscale" and rest:
        return "everything" if rest == UMBRELLA else _header_module(rest)
    if rest and (folder in SRC_LAYERS or (root / "src" / folder).is_dir()):
        return folder
    beside = (path.parent / name).resolve()
    if beside.is_file() and (root / "src") in beside.parents:
        return beside.relative_to(root / "src").parts[0]
    return None


def _check_headers(root: Path) -> Iterator[Finding]:
    folder = root / "include" / "memscale"
    names = [path.name for path in files(root, ".h", under="include/memscale")]
    for name in names:
        where = f"include/memscale/{name}"
        seen = set()
        module = _header_module(name)
        allowed = SRC_LAYERS.get(module, frozenset()) | {module}
        for line, target, quoted in includes((folder / name).read_text(encoding="utf-8")):
            seen.add(target)
            if not quoted:
                continue
            if target not in names:
                yield Finding(where, line, f"includes {target}, which is not a public header beside it")
            elif name != UMBRELLA and _header_module(target) not in allowed:
                known = ", ".join(sorted(allowed))
                yield Finding(where, line, f"{module} includes {target}; it may know only {known}")
        if name == UMBRELLA:
            for missing in sorted(set(names) - seen - {UMBRELLA}):
                yield Finding(where, 1, f"does not include {missing}")


def _check_door(root: Path) -> Iterator[Finding]:
    for folder, modules in DOOR_USERS.items():
        for path in files(root, ".c", ".h", under=folder):
            where = path.relative_to(root).as_posix()
            for line, name, quoted in includes(path.read_text(encoding="utf-8")):
                first = name.split("/")[0]
                if name.startswith("memscale/") or first in modules:
                    continue
                own = any((place / name).is_file() for place in (path.parent, root / folder))
                private = (root / "src" / name).is_file() or (first in SRC_LAYERS and "/" in name)
                if private or (quoted and not own):
                    yield Finding(where, line, f"{folder} includes {name}; it may use only memscale/*.h")


def _check_circles(root: Path) -> Iterator[Finding]:
    for folder in (root / "src", root / "python" / "ext"):
        arrows: dict[str, set[str]] = {}
        for path in files(root, ".c", ".h", under=folder.relative_to(root).as_posix()):
            seen = {
                target.resolve().relative_to(folder).with_suffix("").as_posix()
                for _, name, _ in includes(path.read_text(encoding="utf-8"))
                for target in (path.parent / name, folder / name)
                if target.is_file() and folder in target.resolve().parents
            }
            own = path.relative_to(folder).with_suffix("").as_posix()
            arrows.setdefault(own, set()).update(seen - {own})
        for circle in circles(arrows):
            where = (folder / circle[0]).relative_to(root).as_posix()
            yield Finding(where, 1, f"includes go round in a circle: {', '.join(circle)}")


if __name__ == "__main__":
    sys.exit(main(check, __doc__))
