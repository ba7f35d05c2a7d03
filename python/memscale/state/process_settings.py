# SPDX-License-Identifier: Apache-2.0
"""Settings of the process that lie behind functions: environment variables, the context of `decimal`.

No name of a program leads to them. So they count where the program's code names what they are reached by.
"""

from __future__ import annotations

import decimal
import os
from collections.abc import Iterable
from typing import Any, Final

from memscale.state.process_tables import Whole


class _Environment(Whole):
    """Environment variables."""

    __slots__ = ()

    def read(self) -> dict[str, str]:
        """All of them."""
        return dict(os.environ)

    def write(self, values: dict[str, str]) -> None:
        """Sets these, and no others."""
        for name in os.environ.keys() - values.keys():
            del os.environ[name]
        for name, value in values.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    def differs(self) -> bool:
        """Whether one is another."""
        return bool(self.read() != self.held)


class _Decimals(Whole):
    """A context of `decimal`."""

    __slots__ = ()

    def read(self) -> dict[str, Any]:
        """Its settings, and which signals there have been."""
        context = self.place
        held = {name: getattr(context, name) for name in _OF_DECIMALS}
        return {**held, "flags": dict(context.flags), "traps": dict(context.traps)}

    def write(self, values: dict[str, Any]) -> None:
        """Gives it these."""
        for name, value in values.items():
            setattr(self.place, name, value)

    def differs(self) -> bool:
        """Whether it has others."""
        return bool(self.read() != self.held)


_OF_DECIMALS: Final = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")

_ENVIRONMENT: Final = frozenset({"environ", "environb", "putenv", "unsetenv"})
_DECIMALS: Final = frozenset({"getcontext", "setcontext", "localcontext"})


class KeptSettings:
    """Those that code names.

    Args:
        names: all that it names.
    """

    __slots__ = ("_has_decimals", "_has_environment")

    def __init__(self, names: frozenset[str]) -> None:
        self._has_environment = not names.isdisjoint(_ENVIRONMENT)
        self._has_decimals = not names.isdisjoint(_DECIMALS)

    def tables(self) -> list[Any]:
        """What they are now."""
        found: list[Any] = [_Environment(os.environ)] if self._has_environment else []
        return [*found, _Decimals(decimal.getcontext())] if self._has_decimals else found

    def values(self) -> Iterable[Any]:
        """Nothing more."""
        return ()
