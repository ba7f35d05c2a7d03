# SPDX-License-Identifier: Apache-2.0
"""Checks that tests reach no further into the product than they do today.

Two things are counted: private names of the product that a test uses, and parts of the product that a test
exchanges for something of its own. A test that needs another part gives it as an argument, makes a real
input, or stands beside a call (`tests/python/calls.py`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from source_tree import Finding, files, main, parse_python

#: The most that there may be. Lower them when there are fewer.
MOST_PRIVATE = 49
MOST_EXCHANGED = 52

#: Private by their look: the extension, and names of Python, IPython, PyTorch and transformers.
OTHERS = frozenset({
    "_core", "_replace", "_repr_html_", "_version", "_base", "_values", "_modules", "_parameters", "_buffers",
    "_backward_hooks", "_get_backward_hooks", "_get_backward_pre_hooks", "_softmax", "_log_softmax",
    "_train_batch_size",
})  # fmt: skip
_EXCHANGES = frozenset({"setattr", "setitem", "delattr", "delitem", "object", "patch"})


def check(root: Path) -> list[Finding]:
    """Returns one finding for each count that has grown, at the last use."""
    own = {name for path in files(root, ".py", under="python/memscale") for name in _defined(_tree(path))}
    private = {name for name in own if _is_private(name)} | {"_memscale_executor"}
    used: list[Finding] = []
    exchanged: list[Finding] = []
    for path in files(root, ".py", under="tests"):
        tree, where = _tree(path), path.relative_to(root).as_posix()
        imports = dict(_imports(tree))
        theirs = private - set(_defined(tree))
        used += [Finding(where, *found) for found in _private_uses(tree, imports, theirs)]
        exchanged += [Finding(where, *found) for found in _exchanges(tree, imports)]
    findings = []
    for found, most, what in (
        (used, MOST_PRIVATE, "uses of private names"),
        (exchanged, MOST_EXCHANGED, "exchanged parts of the product"),
    ):
        if len(found) > most:
            message = (
                f"{len(found)} {what} in tests, at most {most} are allowed; the last: {found[-1].message}"
            )
            findings.append(Finding(found[-1].path, found[-1].line, message))
    return findings


def _tree(path: Path) -> ast.Module:
    return parse_python(path.read_text(encoding="utf-8"))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names that a module gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """A name and the module or member that it was imported as."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module or ''}.{alias.name}"


def _source(node: ast.expr, imports: dict[str, str]) -> str | None:
    """Where the outermost name of an expression comes from; None for a variable."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return imports.get(node.id) if isinstance(node, ast.Name) else None


def _is_ours(source: str | None) -> bool:
    return source is not None and source.partition(".")[0] == "memscale"


def _private_uses(tree: ast.Module, imports: dict[str, str], names: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            source = _source(node.value, imports)
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_own and (source is None or _is_ours(source)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and _is_ours(node.module):
            yield from ((node.lineno, alias.name) for alias in node.names if _is_private(alias.name))


def _exchanges(tree: ast.Module, imports: dict[str, str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            target = node.args[0]
            text = target.value if isinstance(target, ast.Constant) else None
            source = text if isinstance(text, str) else _source(target, imports)
            if name in _EXCHANGES and _is_ours(source):
                yield node.lineno, ast.unparse(node.func) + " of " + ast.unparse(target)
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and _is_ours(_source(target.value, imports)):
                    yield node.lineno, ast.unparse(target)


if __name__ == "__main__":
    sys.exit(main(check, __doc__))
