# SPDX-License-Identifier: Apache-2.0
"""`_core.Entries`: what dictionaries hold, compared by identity and order."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from memscale._core import Entries


class Passed:
    """A value that is passed over."""


class PassedToo(Passed):
    """One of a subclass."""


class Thing:
    """A value."""


def noted(*places: Any) -> Entries:
    return Entries(places, Passed)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another value": lambda place: place.update(b=Thing()),
    "an equal value that is another object": lambda place: place.update(number=float("2.5")),
    "one more": lambda place: place.update(z=1),
    "one less": lambda place: place.pop("number"),
    "the first gone": lambda place: place.pop("a"),
    "all gone": lambda place: place.clear(),
    "another order": lambda place: place.update(a=place.pop("a")),
    "a value passed over in the place of one": lambda place: place.update(b=Passed()),
    "a value in the place of one passed over": lambda place: place.update(passed=Thing()),
}


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_found_and_so_is_what_was_there(
    change: Callable[[dict[str, Any]], object], kind: type[dict[str, Any]]
) -> None:
    place = kind(a=Thing(), passed=Passed(), b=Thing(), number=float("2.5"))
    before = dict(place)
    entries = noted({"x": 1}, place, {})
    assert entries.same()
    change(place)
    assert not entries.same()
    held = entries.held(1)
    assert list(held) == list(before) and all(held[key] is before[key] for key in before)
    place.clear()
    place.update(before)
    assert entries.same()


def test_an_ordered_dictionary_has_an_order_of_its_own() -> None:
    place = OrderedDict(a=1, b=2)
    entries = noted(place)
    place.move_to_end("a")
    assert not entries.same()


def test_what_is_passed_over_comes_and_goes() -> None:
    place: dict[str, Any] = {"one": Passed(), "a": 1, "two": PassedToo()}
    entries = noted(place)
    del place["one"], place["two"]
    assert entries.same()
    place["three"] = PassedToo()
    assert entries.same()
    del place["a"]
    assert not entries.same()


def test_a_freed_value_cannot_come_again_as_another() -> None:
    """A new object often gets the address of the one before."""
    place: dict[str, Any] = {"a": Thing()}
    entries = noted(place)
    for _ in range(100):
        place["a"] = Thing()
        assert not entries.same()


def test_values_are_those_of_some_places_names_and_types() -> None:
    thing = Thing()
    entries = noted({"a": 1, "b": thing, "left": [], "c": Passed()}, {"b": "text"}, {"b": 3.5})
    assert entries.values(0, 2, frozenset({"left"}), frozenset({int})) == [thing, "text"]
    assert entries.values(2, 3, set(), set()) == [3.5]
    assert entries.values(1, 1, set(), set()) == []


def test_what_is_no_dictionary_is_read_by_its_items() -> None:
    class Registry:
        def items(self) -> list[tuple[str, Any]]:
            return [("a", 1), ("b", Thing())]  # another one each time

    entries = noted(Registry())
    assert list(entries.held(0)) == ["a", "b"]
    assert not entries.same()


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: Entries([7], Passed), (TypeError, AttributeError)),
        (lambda: noted({}).held(1), IndexError),
        (lambda: noted({}).values(0, 2, set(), set()), IndexError),
        (lambda: noted({}, {}).values(2, 1, set(), set()), IndexError),
    ],
)
def test_what_is_refused(call: Callable[[], object], kind: Any) -> None:
    with pytest.raises(kind):
        call()


def test_a_circle_through_it_is_freed() -> None:
    thing: Any = Thing()
    thing.entries = noted(vars(thing), {"itself": thing})
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None
