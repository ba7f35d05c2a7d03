# SPDX-License-Identifier: Apache-2.0
"""Figures of the documentation: rows of `bench/results`, what is made of them, and the text that it becomes.

    bench/measured.md   docs/guide/measured.md, with {name} in the place of a figure
    tools/measured.py   name → rows, arithmetic, text
    this file           reading, choosing and checking rows; filling a text in

Rows are only ever appended. A figure names the commit of its rows, because the words around it were written
for those; without a commit, the rows of the last commit count that has any that match.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Row = dict[str, str]

_PLACE: Final = re.compile(r"\{([a-z][a-z0-9_]*)(?::(commit|day|time))?\}")
_GIVEN: Final = re.compile(r"\{=([^{}]*)\}")
_CODE: Final = re.compile(r"`[^`]*`|\]\([^)]*\)")
_UNIT: Final = "%|ns|µs|ms|s|h|B|[KMGT]i?B|bytes?|seconds?|hours?|million|billion|times"
_LOOSE: Final = re.compile(rf"(?<![\w.-])[−+-]?\d[\d,]*(?:(?:\.\d+)?\s?(?:{_UNIT})(?!\w)|\.\d+)")

_VERSIONS: Final = ("torch", "compiler", "judge")
_MACHINES: Final = ("machine", "judge")
"""Columns of which a row needs one: a stand-in for a card is the judge, with its version."""


class FigureError(Exception):
    """A figure cannot be made, or stands on a row that does not say where it comes from."""


class Rows(list[Row]):
    """Rows of one file, in its order."""

    def where(self, **conditions: Any) -> Rows:
        """Those whose columns are what is asked: a value, one of a tuple, or what a function says yes to."""
        return Rows(
            row for row in self if all(_meets(row.get(key, ""), want) for key, want in conditions.items())
        )

    def numbers(self, column: str) -> list[float]:
        """A column as numbers. "numbers.3" is the fourth word of a column that holds several."""
        name, _, index = column.partition(".")
        texts = [row[name] if not index else row[name].split()[int(index)] for row in self]
        return [float(text) for text in texts if text not in ("", "none")]

    def values(self, column: str) -> list[str]:
        """Different values of a column, in the order of their first row."""
        return list(dict.fromkeys(row[column] for row in self))


@dataclass(frozen=True)
class Figure:
    """A text of the documentation and the rows that it comes from."""

    text: str
    rows: Rows

    def said(self, what: str | None) -> str:
        """The text; or the commit, day or time of the rows, which have to agree on it."""
        if what is None:
            return self.text
        texts = {
            "commit": [_bare(row) for row in self.rows],
            "day": [row["date"][:10] for row in self.rows],
            "time": [row["date"] for row in self.rows],
        }
        found = sorted(set(texts[what]))
        if len(found) != 1:
            raise FigureError(f"its rows have several: {', '.join(found)}")
        return found[0]

    def lacking(self) -> list[str]:
        """What its rows do not say of where they come from."""
        missing = set()
        for row in self.rows:
            missing |= {name for name in ("date", "commit") if not row.get(name)}
            missing |= set() if any(row.get(name) for name in _MACHINES) else {"machine"}
            missing |= set() if any(row.get(name) for name in _VERSIONS) else {"versions"}
        return sorted(missing)


class Results:
    """The files of one results folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Rows] = {}

    def rows(self, name: str, commit: str | tuple[str, ...] | None = None, **conditions: Any) -> Rows:
        """Rows of a file that meet conditions, of some commits, or of the last one that has any.

        Raises:
            FigureError: there is no such file, or no such row.
        """
        if name not in self._files:
            path = self.folder / f"{name}.csv"
            if not path.is_file():
                raise FigureError(f"there is no {path.name}")
            with path.open(newline="", encoding="utf-8") as file:
                self._files[name] = Rows(csv.DictReader(file))
        found = self._files[name].where(**conditions)
        wanted = (commit,) if isinstance(commit, str) else commit
        if wanted is None and found:
            wanted = (_bare(found[-1]),)
        found = Rows(row for row in found if _bare(row) in (wanted or ()))
        if not found:
            raise FigureError(f"no row of {name}.csv is of commit {commit or 'any'} with {conditions}")
        return found


def _bare(row: Row) -> str:
    return row["commit"].rstrip("+")


def _meets(value: str, wanted: Any) -> bool:
    if callable(wanted):
        return bool(wanted(value))
    if isinstance(wanted, tuple):
        return value in map(str, wanted)
    return value == str(wanted)


# ---- arithmetic and words ----------------------------------------------------------------------------


def median(values: Iterable[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def percentile(values: Iterable[float], share: int) -> float:
    """The smallest value that is not exceeded by this share of them."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) / 100) - 1)]


_WORDS: Final = (
    "none",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)


def in_words(number: int) -> str:
    """A small number as a word."""
    return _WORDS[number] if number < len(_WORDS) else str(number)


def signed(value: float, digits: int) -> str:
    """A number with the minus sign of the documentation; 0 has none."""
    return f"{value:.{digits}f}".replace("-", "−") if round(value, digits) else f"{0:.{digits}f}"


# ---- a text with figures -----------------------------------------------------------------------------


def _names(template: str) -> set[str]:
    return {match.group(1) for match in _PLACE.finditer(template)}


def _filled(template: str, figures: Mapping[str, Figure], where: str) -> str:
    def filled(match: re.Match[str]) -> str:
        name, what = match.groups()
        if name not in figures:
            raise FigureError(f"{where}: {{{name}}} is no figure")
        try:
            return figures[name].said(what)
        except FigureError as error:
            raise FigureError(f"{where}: {match.group(0)}: {error}") from None

    return _PLACE.sub(filled, template)


@dataclass(frozen=True)
class Document:
    """A part of a file that is made of a template.

    Attributes:
        path: the file.
        template: text with {name} in the place of figures, and {=24 GiB} for what was given and not measured.
        begin, end: lines of the file that the part lies between.
    """

    path: Path
    template: Path
    begin: str
    end: str

    @property
    def _source(self) -> str:
        return self.template.read_text(encoding="utf-8")

    def loose(self) -> list[str]:
        """Numbers of the template that are neither figures nor marked as given."""
        bare = _CODE.sub("", _GIVEN.sub("", _PLACE.sub("", self._source)))
        return [match.group(0).strip() for match in _LOOSE.finditer(bare)]

    def rendered(self, figures: Mapping[str, Figure]) -> str:
        """The template with its figures.

        Raises:
            FigureError: one is not known.
        """

        return _GIVEN.sub(r"\1", _filled(self._source, figures, self.template.name)).strip("\n")

    def names(self) -> set[str]:
        """The figures that the template uses."""
        return _names(self._source)

    def present(self) -> str:
        """What the file has now.

        Raises:
            FigureError: the lines that the part lies between are not there.
        """
        text = self.path.read_text(encoding="utf-8")
        _, begin, rest = text.partition(self.begin)
        part, end, _ = rest.partition(self.end)
        if not begin or not end:
            raise FigureError(f"{self.path.name} lacks {self.begin!r} or {self.end!r}")
        return part.strip("\n")

    def write(self, part: str) -> None:
        """Puts another part in."""
        text = self.path.read_text(encoding="utf-8")
        head, begin, rest = text.partition(self.begin)
        _, end, tail = rest.partition(self.end)
        self.path.write_text(f"{head}{begin}\n\n{part}\n\n{end}{tail}", encoding="utf-8")


def problems(
    document: Document,
    make: Callable[[], dict[str, Figure]],
    guides: Mapping[Path, Sequence[str]] | None = None,
) -> Iterator[str]:
    """What is wrong with figures, a line each; nothing if all is well.

    Args:
        document: a part of a file that is made of its template.
        make: makes all figures.
        guides: other files, and templates of lines that they have to have.
    """
    guides = guides or {}
    try:
        figures = make()
        expected, present = document.rendered(figures), document.present()
        yield from _missing(guides, figures)
    except FigureError as error:
        yield str(error)
        return
    used = document.names() | {name for lines in guides.values() for line in lines for name in _names(line)}
    for name in sorted(set(figures) - used):
        yield f"figure {name!r} is used nowhere"
    for name in sorted(used):
        lacking = figures[name].lacking()
        if lacking:
            yield f"figure {name!r} stands on a row without {', '.join(lacking)}"
    for text in document.loose():
        how = f"make it a figure, or {{={text}}} if it was given"
        yield f"{document.template.name}: {text!r} comes from no row: {how}"
    if expected != present:
        yield f"{document.path.name}: {_first_difference(expected, present)}"


def _missing(guides: Mapping[Path, Sequence[str]], figures: Mapping[str, Figure]) -> Iterator[str]:
    for path, lines in guides.items():
        text = path.read_text(encoding="utf-8")
        for line in lines:
            filled = _filled(line, figures, path.name)
            if filled not in text:
                yield f"{path.name} lacks {filled!r}, which the rows say"


def _first_difference(expected: str, present: str) -> str:
    lines = zip(expected.splitlines(), present.splitlines(), strict=False)
    for ours, theirs in lines:
        if ours != theirs:
            return f"the rows say {ours!r}, it says {theirs!r}"
    return "it has more or fewer lines than its template"
