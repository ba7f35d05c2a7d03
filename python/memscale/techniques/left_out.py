# SPDX-License-Identifier: Apache-2.0
"""Modules that techniques leave alone: by `Config.exclude` and `only`, or after a `RecomputeError`.

    exclude=("h.1",)        root ── h ── h.0     considered
                                    ├─── h.1     excluded: no technique on it, and no recompute around it
                                    │    └ mlp   excluded with it
                                    └─── act     considered, but called in h.1 alone: left out
    only=("h.0",)           all but h.0 and what is in it: left out. A recompute of h.0 may run them

Both kinds have no technique of their own. The difference is what is around them: a recompute around an
excluded module would run that twice, so there is none. One that is merely left out, since it is outside of
`only`, or since an excluded module shares it with others, bars nobody else.

Nothing here raises but `require_matches`: patterns are checked once, when a model is given. Its parts may
come and go later.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memscale import _core
from memscale.errors import ConfigError
from memscale.plans.words import few, range_parts

if TYPE_CHECKING:
    from torch import nn

    from memscale.config.config import Config

__all__ = ["NOTHING_LEFT_OUT", "LeftOut", "left_out_of", "require_matches"]

_MOST_SHOWN: Final = 4
"""Paths of the model in the message about a pattern that matches none."""

_MOST_LISTED: Final = 12
"""Paths, or ranges of them, in a note."""


@dataclass(frozen=True)
class LeftOut:
    """Modules that techniques leave alone, by the path that `named_modules` has for each.

    Attributes:
        excluded: and nothing around them is recomputed, nor offloaded as one with them.
        aside: left out, with no consequence for modules around them.
        differed: a recompute of them, or of a module around them, differed from its forward: they run once.
        parameters: names of parameters that techniques for parameters leave as they are.
        notes: the same for the plan's notes.
    """

    excluded: frozenset[str] = frozenset()
    aside: frozenset[str] = frozenset()
    differed: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.excluded or self.aside or self.differed)

    def flags(self, path: str) -> int:
        """The core's flags for a module."""
        return (
            (_core.MODULE_EXCLUDED if path in self.excluded else 0)
            | (_core.MODULE_LEFT_OUT if path in self.aside else 0)
            | (_core.MODULE_DIFFERED if path in self.differed else 0)
        )

    def bars(self, path: str) -> bool:
        """Whether a technique that changes how a module and everything in it compute must not treat it."""
        if path in self.excluded or path in self.aside or path in self.differed:
            return True
        inside = f"{path}." if path else ""
        return any(other.startswith(inside) for other in (*self.excluded, *self.differed))


NOTHING_LEFT_OUT: Final = LeftOut()


def require_matches(model: nn.Module, config: Config) -> None:
    """Refuses patterns that match no module of a model: a typo would have no effect, and nobody would know.

    Raises:
        ConfigError: names the first of them, and paths that are close.
    """
    for field in ("exclude", "only"):
        patterns = _patterns(getattr(config, field))
        if not patterns:
            continue
        names = [name for known in _paths_of(model).values() for name in known]
        for text, pattern in patterns.items():
            if not any(map(pattern.match, names)):
                raise ConfigError(f"{field}: {_no_match(text, names)}", field)


def left_out_of(model: nn.Module, config: Config, differed: Iterable[str] = ()) -> LeftOut:
    """What techniques leave alone in a model.

    Args:
        model: any; only its modules' names are read.
        config: has the patterns.
        differed: paths of modules whose recompute has differed from its forward.
    """
    exclude, only = _patterns(config.exclude), _patterns(config.only)
    differed = frozenset(differed)
    if not exclude and not only and not differed:
        return NOTHING_LEFT_OUT
    names = {known[0]: known for known in _paths_of(model).values()}
    matched = [path for path, known in names.items() if _is_matched(known, exclude)]
    inside = {path: [_is_inside(name, exclude) for name in known] for path, known in names.items()}
    excluded = frozenset(matched) | {path for path in names if all(inside[path])}
    aside = {path for path in names if any(inside[path])}
    notes = [f"exclude: {_listed(matched)}: left as is, and nothing around is recomputed"] if matched else []
    if only:
        considered = [path for path, known in names.items() if any(_is_inside(name, only) for name in known)]
        aside |= names.keys() - considered
        outermost = [path for path in considered if _is_matched(names[path], only)]
        notes.append(f"only: {_listed(outermost) or 'no module'}: no other module is considered")
    kept = {path for path, known in names.items() if any(_is_below(name, differed) for name in known)}
    if kept:
        notes.append(f"kept: {_listed(sorted(differed))}: a recompute differed from its forward")
    aside = aside - excluded
    parameters = _parameters(model, excluded, aside)
    return LeftOut(excluded, frozenset(aside), frozenset(kept), parameters, tuple(notes))


# ---- patterns ----------------------------------------------------------------------------------------

_Patterns = Mapping[str, "re.Pattern[str]"]
"""Pattern as it was given → compiled."""


def _patterns(given: tuple[str, ...] | str) -> _Patterns:
    assert not isinstance(given, str)  # `Config` has made a tuple of it
    return {pattern: re.compile(fnmatch.translate(pattern)) for pattern in given}


def _is_matched(names: Iterable[str], patterns: _Patterns) -> bool:
    return any(pattern.match(name) for name in names for pattern in patterns.values())


def _is_inside(path: str, patterns: _Patterns) -> bool:
    """Whether a pattern matches a path, or one around it."""
    return bool(patterns) and _is_matched(_with_those_around(path), patterns)


def _is_below(path: str, roots: frozenset[str]) -> bool:
    return bool(roots) and not roots.isdisjoint(_with_those_around(path))


def _with_those_around(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield path


def _no_match(text: str, names: list[str]) -> str:
    """What to say of a pattern that matches none of these paths."""
    import difflib  # only on the way out: it is slow to import

    close = difflib.get_close_matches(text, names, n=_MOST_SHOWN)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    shown = ", ".join(map(repr, _examples(names)))
    return (
        f"the pattern {text!r} matches no module of the model.{hint} Paths are those of "
        f"model.named_modules(), such as {shown}"
    )


def _listed(paths: Iterable[str]) -> str:
    """Paths for a note, those that differ in numbers only put together."""
    return ", ".join(few(range_parts(path or "(model)" for path in paths), _MOST_LISTED))


def _examples(names: list[str]) -> list[str]:
    """A few paths from all over the model."""
    known = [name for name in names if name] or [""]
    step = max(len(known) // _MOST_SHOWN, 1)
    return known[::step][:_MOST_SHOWN]


# ---- the model ---------------------------------------------------------------------------------------


def _paths_of(model: nn.Module) -> dict[int, list[str]]:
    """Of every module all the paths that lead to it, the one of `named_modules` first. By `id`."""
    paths: dict[int, list[str]] = {}
    above: set[int] = set()

    def visit(module: nn.Module, path: str) -> None:
        if id(module) in above:  # a part that holds the whole
            return
        paths.setdefault(id(module), []).append(path)
        above.add(id(module))
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}" if path else name)
        above.remove(id(module))

    visit(model, "")
    return paths


def _parameters(model: nn.Module, excluded: Set[str], aside: Set[str]) -> frozenset[str]:
    """Parameters of an excluded module, and those that only modules which are left out have."""
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(path)
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if any(path in excluded for path in owners[id(parameter)])
        or all(path in excluded or path in aside for path in owners[id(parameter)])
    )
