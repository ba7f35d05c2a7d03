# SPDX-License-Identifier: Apache-2.0
"""The checks behind the configuration: one function per kind of field.

Each takes the field's name and the value given, and returns the value in its plain Python form (a NumPy
integer becomes an int, a path object a str), or raises a `ConfigError` that says field, value and what is
allowed. They work by protocol and never import NumPy.
"""

from __future__ import annotations

import math
import numbers
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from memscale.errors import ConfigError
from memscale.units import MAX_BYTES, parse_bytes

Check = Callable[[str, object], object]

_FEW_BYTES = 1024  # no step fits these; a card with so many GiB may be
_SHOWN = 80  # characters of a value in a message: enough for a path, too few for a tensor


def refuse(field: str, value: object, allowed: str) -> ConfigError:
    """Builds the error for one value; the caller raises it."""
    return ConfigError(f"{field}={show(value)} is not allowed: {allowed}", field)


def show(value: object) -> str:
    """A value for a message: its `repr` on one line, cut to a readable length."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def environment_allows(variable: str) -> bool:
    """Whether what a variable of the environment switches is on: it is, unless the variable says "off".

    Raises:
        ConfigError: the variable says neither "auto" nor "off".
    """
    value = os.environ.get(variable, "auto").strip().lower()
    if value not in ("auto", "off", ""):
        raise ConfigError(f"environment variable {variable} is {value!r}; allowed: 'auto', 'off'", variable)
    return value != "off"


def check_bool(field: str, value: object) -> bool:
    """True or False; NumPy's too, since sweeps over arrays produce them."""
    if isinstance(value, bool):
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
        return bool(value)
    raise refuse(field, value, f"give True or False, not {_kind(value)}")


def check_int(lowest: int, highest: int | None = None, *, optional: bool = False) -> Check:
    """A check for whole numbers in `lowest`…`highest`; `optional` admits None."""
    span = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
    allowed = f"give an int {span}" + (" or None" if optional else "")

    def check(field: str, value: object) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise refuse(field, value, f"{allowed}, not {_kind(value)}")
        number = int(value)
        if number < lowest or (highest is not None and number > highest):
            raise refuse(field, value, allowed)
        return number

    return check


def check_float(highest: float, *, optional: bool = False) -> Check:
    """A check for real numbers above 0 and at most `highest`; `optional` admits None."""
    allowed = f"give a number above 0 and at most {highest:g}" + (" or None" if optional else "")

    def check(field: str, value: object) -> float | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise refuse(field, value, f"{allowed}, not {_kind(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not 0 < number <= highest:  # NaN fails every comparison
            raise refuse(field, value, allowed)
        return number

    return check


def check_size(field: str, value: object) -> int | str | None:
    """A size above 0 as an int of bytes or a text such as "8GiB", or None. A text stays as it was written."""
    allowed = "give an int of bytes above 0, a text such as '8GiB' or '8GB', or None"
    if value is None:
        return None
    if isinstance(value, str):
        try:
            size = parse_bytes(value)
        except ValueError as error:
            raise refuse(field, value, str(error)) from None
    elif isinstance(value, numbers.Integral) and not isinstance(value, bool):
        size = int(value)
    else:
        raise refuse(field, value, f"{allowed}, not {_kind(value)}")
    if not 0 < size <= MAX_BYTES:
        raise refuse(field, value, allowed)
    return str(value) if isinstance(value, str) else size


def warn_of_few_bytes(field: str, value: int | str | None, stacklevel: int) -> None:
    """Warns of a size in bytes that was probably meant in GiB: a small number without a unit."""
    bare = isinstance(value, int) or (isinstance(value, str) and value.strip().isdigit())
    if value is not None and bare and int(value) <= _FEW_BYTES:
        warnings.warn(
            f'{field}={value!r} is {int(value)} bytes; for GiB write {field}="{int(value)}GiB"',
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def check_path(field: str, value: object) -> str | None:
    """A non-empty path as a str or path object, or None. Whether it exists is seen when it is used."""
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(path, str) or not path or "\0" in path:
        raise refuse(field, value, f"give a non-empty path or None, not {_kind(value)}")
    return str(path)


def check_place(field: str, value: object) -> str | None:
    """A server as "http://host:port" or "https://…", maybe with a path; a path of this machine; or None."""
    if not isinstance(value, str) or "://" not in value:
        return check_path(field, value)
    from urllib.parse import urlsplit

    allowed = 'give "http://host:port", "https://host" or either with "/project" behind it'
    try:
        parts = urlsplit(value)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_good = False
    if not is_good or parts.query or parts.fragment or not value.isprintable() or " " in value:
        raise refuse(field, value, allowed)
    if parts.username is not None or parts.password is not None:
        raise refuse(
            field, f"{parts.scheme}://…", f"{allowed}; a token is kept by `memscale login`, not in an address"
        )
    return value.rstrip("/")


def check_choice(names: Sequence[str]) -> Check:
    """A check for one of some names, in any case."""
    allowed = f"give one of {', '.join(map(repr, names))}"

    def check(field: str, value: object) -> str:
        if not isinstance(value, str):
            raise refuse(field, value, f"{allowed}, not {_kind(value)}")
        if value.lower() not in names:
            raise refuse(field, value, allowed)
        return value.lower()

    return check


def check_names(allowed_names: Sequence[str]) -> Check:
    """A check for a non-empty sequence of distinct names out of `allowed_names`."""
    allowed = f"give one or more of {', '.join(map(repr, allowed_names))}, each once, as a tuple"

    def check(field: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, (tuple, list)):
            raise refuse(field, value, f"{allowed}, not {_kind(value)}")
        names = tuple(value)
        if not names or any(not isinstance(name, str) or name not in allowed_names for name in names):
            raise refuse(field, value, allowed)
        if len(set(names)) != len(names):
            raise refuse(field, value, allowed)
        return names

    return check


def check_patterns(field: str, value: object) -> tuple[str, ...]:
    """Patterns over module paths as a tuple, each once. A text is one pattern."""
    allowed = "give module paths or patterns such as ('h.3', '*.adapter') as a tuple of texts, or one text"
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, (tuple, list)):
        raise refuse(field, value, f"{allowed}, not {_kind(value)}")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise refuse(field, value, f"{allowed}, not {_kind(pattern)} in it")
        if pattern != pattern.strip() or not pattern.isprintable():
            raise refuse(
                field, value, f"{allowed}; {show(pattern)} has blanks at an end or control characters"
            )
    return tuple(dict.fromkeys(patterns))


def unknown_field(owner: str, name: object, value: object, known: Iterable[str]) -> ConfigError:
    """Builds the error for a field that does not exist, with the closest name that does."""
    import difflib  # only on the way out: it is slow to import

    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    message = f"{owner} has no field {show(name)} (given {show(value)}).{hint}"
    return ConfigError(f"{message} Allowed are: {', '.join(names)}", str(name))


def keywords(owner: str, data: object) -> dict[str, Any]:
    """A mapping with text keys as keyword arguments."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{owner}.from_dict needs a mapping of names to values, not {show(data)}")
    for key in data:
        if not isinstance(key, str):
            raise ConfigError(f"{owner} has fields with text names only, not {show(key)}")
    return dict(data)


def _kind(value: object) -> str:
    """The type of a value, for "…, not <this>"."""
    return "None" if value is None else type(value).__name__
