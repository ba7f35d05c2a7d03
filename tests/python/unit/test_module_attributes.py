# SPDX-License-Identifier: Apache-2.0
"""Plain attributes of modules: what counts as another step, what is learnt not to, what is held."""

from __future__ import annotations

import enum
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from memscale.state.module_attributes import Attributes, ModuleAttributes


class Mode(enum.Enum):
    DENSE = 1
    SPARSE = 2


class Settings:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Part(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def model_of(**attributes: Any) -> nn.Module:
    return nn.Sequential(nn.Identity(), Part(**attributes))


def part_of(model: Any) -> Any:
    return model[1]


class TestReading:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (True, False),
            ("a", "b"),
            (None, torch.zeros(1)),
            (None, False),
            (False, torch.zeros(1)),
            (["a"], ["a", "b"]),
            (("a",), ()),
            (Mode.DENSE, Mode.SPARSE),
            (1, 2),
            (0.0, 0.25),
            ({"a": 1}, {"a": 2}),
            ([1, 2], [3]),
            (Settings(depth=1), Settings(depth=2)),
            (Settings(depth=1), Settings(depth=1, more=True)),
        ],
    )
    def test_what_is_another_step(self, first: Any, second: Any) -> None:
        model, read = model_of(x=first), ModuleAttributes()
        before = read.read(model)
        part_of(model).x = second
        assert read.read(model) != before
        part_of(model).x = first
        assert read.read(model) == before

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (0.5, 0.25),
            (torch.zeros(1), torch.ones(1)),
            ({"a": [1]}, {"a": [2]}),
            (Settings(rate=0.5), Settings(rate=0.25)),
            (["a"] * 9, ["b"] * 9),  # data, rather than names
        ],
    )
    def test_what_is_not(self, first: Any, second: Any) -> None:
        model, read = model_of(x=first), ModuleAttributes()
        before = read.read(model)
        part_of(model).x = second
        assert read.read(model) == before

    def test_a_list_that_is_changed_in_place_is_seen(self) -> None:
        model, read = model_of(active=["a"]), ModuleAttributes()
        before = read.read(model)
        part_of(model).active.append("b")
        assert dict(item[1:] for item in read.read(model)) == {"active": ("a", "b")}
        assert before == (("1", "active", ("a",)),)

    def test_settings_that_modules_share(self) -> None:
        settings = Settings(depth=2, rate=0.0, name="a", inner=Settings(depth=3))
        model: Any = nn.Sequential(Part(config=settings), Part(config=settings))
        read = ModuleAttributes()
        assert read.read(model) == (
            ("0.config", "depth", 2),
            ("0.config", "rate", 0.0),
            ("0.config", "name", "a"),
        )
        settings.depth = 3
        assert ("0.config", "depth", 3) in read.read(model)
        model[0].config = Settings(depth=4)
        assert ("0.config", "depth", 4) in read.read(model)
        assert ("1.config", "depth", 3) in read.read(model)

    def test_what_is_written_into_a_configuration_as_it_is_saved(self) -> None:
        model, read = model_of(), ModuleAttributes()
        settings: Any = Settings(depth=2)
        settings.architectures, settings.dtype = None, None
        model[0].config = settings
        before = read.read(model)
        settings.architectures, settings.dtype = ["Net"], "float32"
        assert read.read(model) is before
        settings.depth = 3
        assert read.read(model) != before

    def test_numbers_of_layers(self) -> None:
        model: Any = nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2))
        read = ModuleAttributes()
        before = read.read(model)
        model[1].in_features = 3
        assert read.read(model) is before
        model[0].p = 0.5
        assert read.read(model) != before

    def test_attributes_that_come_and_go(self) -> None:
        model, read = model_of(), ModuleAttributes()
        bare = read.read(model)
        part_of(model).flag = True
        assert ("1", "flag", True) in read.read(model)
        del part_of(model).flag
        assert read.read(model) == bare
        part_of(model).cache = torch.zeros(1)  # it fills a place that was not there: the same step
        assert read.read(model) == bare

    def test_flags_hung_on_layers_of_pytorch(self) -> None:
        model: Any = nn.Sequential(nn.Linear(2, 2))
        read = ModuleAttributes()
        model[0].enabled = True
        before = read.read(model)
        model[0].enabled = False
        assert read.read(model) != before

    def test_the_training_flag_counts_elsewhere(self) -> None:
        model, read = model_of(), ModuleAttributes()
        before = read.read(model)
        model.eval()
        assert read.read(model) == before

    def test_modules_in_other_places(self) -> None:
        model: Any = nn.Sequential(Part(flag=True), Part(flag=False))
        read = ModuleAttributes()
        before = read.read(model)
        model[0], model[1] = model[1], model[0]
        assert read.read(model) != before

    def test_nothing_of_the_model_is_held(self) -> None:
        model, read = model_of(x=torch.zeros(1), flag=True), ModuleAttributes()
        read.read(model)
        gone = weakref.ref(part_of(model)), weakref.ref(part_of(model).x)
        gc.disable()
        try:
            del model
            assert [item() for item in gone] == [None, None]
        finally:
            gc.enable()


class TestLearning:
    def test_two_equal_steps_in_a_row_make_a_value_count_no_more(self) -> None:
        model, read = model_of(tag="a", flag=True), ModuleAttributes()
        seen = [self.change(model, read, tag=tag, same=True) for tag in ("b", "c", "d")]
        assert seen[0][0] != seen[0][1] and seen[1][0] != seen[1][1] and seen[2][0] == seen[2][1]
        assert ("1", "flag", True) in read.read(model)

    def test_a_value_that_matters_goes_on_counting(self) -> None:
        model, read = model_of(flag=True), ModuleAttributes()
        for number in range(40):
            before, now = self.change(model, read, flag=bool(number % 2), same=False)
            assert number == 1 or before != now

    def test_beside_a_flag_that_matters_a_counter_ends_after_so_many_values(self) -> None:
        model, read = model_of(flag=True, tag="0"), ModuleAttributes()
        for number in range(40):
            self.change(model, read, flag=bool(number % 2), tag=str(number), same=False)
        assert [item[1] for item in read.read(model)] == ["flag"]

    def test_what_a_forward_changes_itself_is_no_sign(self) -> None:
        model, read = model_of(flag=True, cache=None, other=None), ModuleAttributes()
        before = read.read(model)
        read.ignore({"1": ["flag"]})
        assert [item[1] for item in read.read(model)] == ["cache", "other"]
        part_of(model).cache = torch.zeros(1)
        read.note_forward(before[1:], read.read(model))
        part_of(model).cache = None
        assert read.read(model) == (("1", "other", None),)

    @staticmethod
    def change(
        model: nn.Module, read: ModuleAttributes, same: bool, **attributes: Any
    ) -> tuple[Attributes, Attributes]:
        before = read.read(model)
        for name, value in attributes.items():
            setattr(part_of(model), name, value)
        now = read.read(model)
        read.learn(before, now, same)
        return before, now
