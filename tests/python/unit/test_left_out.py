# SPDX-License-Identifier: Apache-2.0
"""Which modules techniques leave alone: what patterns match, what follows for modules inside and around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memscale
from memscale import Config
from memscale.errors import ConfigError
from memscale.techniques.left_out import NOTHING_LEFT_OUT, LeftOut, left_out_of, require_matches

X = torch.zeros(2, 8)


class Block(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act = nn.ReLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.act(self.up(x)))
        return result


class Model(nn.Module):
    """Two blocks in a list, a head; the blocks may have one activation together."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        act = nn.ReLU() if shared else None
        self.h = nn.ModuleList([Block(act), Block(act)])
        self.lm_head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        result: Tensor = self.lm_head(x)
        return result


def left_out(model: nn.Module | None = None, **fields: Any) -> LeftOut:
    return left_out_of(model or Model(), Config(**fields))


def inside(path: str) -> set[str]:
    return {path, f"{path}.up", f"{path}.act", f"{path}.down"}


EVERYTHING = {"", "h", "lm_head"} | inside("h.0") | inside("h.1")


class TestExclude:
    def test_without_patterns_nothing_is_looked_at(self) -> None:
        assert left_out() is NOTHING_LEFT_OUT and not left_out()

    def test_a_module_is_excluded_with_all_in_it(self) -> None:
        assert left_out(exclude="h.1") == LeftOut(
            excluded=frozenset(inside("h.1")),
            parameters=frozenset({"h.1.up.weight", "h.1.up.bias", "h.1.down.weight", "h.1.down.bias"}),
            notes=("exclude: h.1: left as is, and nothing around is recomputed",),
        )

    def test_a_star_matches_dots(self) -> None:
        assert left_out(exclude="*act").excluded == {"h.0.act", "h.1.act"}
        assert left_out(exclude="*").excluded == EVERYTHING

    def test_a_list_of_modules_is_excluded_with_them(self) -> None:
        assert left_out(exclude="h").excluded == {"h"} | inside("h.0") | inside("h.1")

    def test_the_model_itself_is_the_empty_path(self) -> None:
        assert left_out(exclude="").excluded == EVERYTHING

    def test_letters_count(self) -> None:
        with pytest.raises(ConfigError):
            require_matches(Model(), Config(exclude="H.1"))

    def test_what_others_have_too_bars_nobody_else(self) -> None:
        found = left_out(Model(shared=True), exclude="h.1")
        assert found.excluded == inside("h.1") - {"h.1.act"} and found.aside == {"h.0.act"}

    def test_a_shared_module_that_is_named_is_excluded_under_any_of_its_paths(self) -> None:
        found = left_out(Model(shared=True), exclude="h.1.act")  # `named_modules` knows it as h.0.act alone
        assert found.excluded == {"h.0.act"} and not found.aside

    def test_tied_weights_are_those_of_the_excluded_module(self) -> None:
        model = Model()
        model.h[0].up.weight = model.h[1].up.weight  # type: ignore[union-attr,assignment]
        assert "h.0.up.weight" in left_out(model, exclude="h.1").parameters
        assert "h.0.up.weight" not in left_out(model, only="h.0").parameters

    def test_a_module_that_holds_the_whole_ends(self) -> None:
        model = Model()
        model.lm_head.add_module("whole", model)
        assert left_out(model, exclude="lm_head").excluded == {"lm_head"}


class TestOnly:
    def test_all_but_what_matches_is_left_out_and_bars_nothing(self) -> None:
        found = left_out(only="h.0")
        assert found.aside == EVERYTHING - inside("h.0") and not found.excluded

    def test_exclude_is_taken_off(self) -> None:
        found = left_out(only="h.*", exclude="h.0.up")
        assert found.excluded == {"h.0.up"} and found.aside == {"", "h", "lm_head"}

    def test_a_module_that_is_recomputed_may_call_others(self) -> None:
        """A block's own activation, which only a block elsewhere shows under its path."""
        model = Model(shared=True)
        plan = memscale.plan(model, config=Config(force_optimize=True, only="h.1"), sample_input=X)
        rules = {choice.module: choice.rule for choice in plan.choices}
        assert rules["h.1"] != "excluded" and rules["h.0"] == "excluded"
        assert rules["h.1"] not in ("holds-excluded", "excluded")


class TestDiffered:
    def test_what_is_in_it_runs_once_too(self) -> None:
        found = left_out_of(Model(), Config(), ["h.1"])
        assert found.differed == inside("h.1") and not found.excluded
        assert found.notes == ("kept: h.1: a recompute differed from its forward",)

    def test_a_module_that_is_gone_says_nothing(self) -> None:
        assert not left_out_of(Model(), Config(), ["h.7"])


class TestTiles:
    @pytest.mark.parametrize(
        ("fields", "barred", "free"),
        [
            ({"exclude": "h.0.act"}, ["h.0.act", "h.0", "h", ""], ["h.1", "h.0.up"]),
            ({"only": "h.0"}, ["", "h", "h.1", "h.1.up"], ["h.0", "h.0.up"]),
        ],
    )
    def test_what_computes_otherwise_as_a_whole(
        self, fields: dict[str, Any], barred: list[str], free: list[str]
    ) -> None:
        found = left_out(**fields)
        assert [path for path in barred + free if found.bars(path)] == barred


class TestTypos:
    @pytest.mark.parametrize("field", ["exclude", "only"])
    def test_the_message_names_pattern_close_paths_and_real_ones(self, field: str) -> None:
        with pytest.raises(ConfigError) as caught:
            require_matches(Model(), Config(**{field: ("h.0", "lm_haed")}))
        text = str(caught.value)
        assert text.startswith(f"{field}: the pattern 'lm_haed' matches no module")
        assert "Did you mean 'lm_head'?" in text and "such as 'h'" in text
        assert caught.value.field == field

    @pytest.mark.parametrize(
        "call",
        [
            lambda model, **given: memscale.wrap(model, **given),
            lambda model, **given: memscale.plan(model, **given),
            lambda model, **given: memscale.predict(model, **given),
            lambda model, **given: memscale.estimate_savings(model, **given),
            lambda model, **given: memscale.apply_all_optimizations(
                model, torch.optim.AdamW(model.parameters()), **given
            ),
        ],
    )
    def test_every_entry_refuses_before_anything_changes(self, call: Callable[..., Any]) -> None:
        model = Model()
        before = {path: set(vars(module)) for path, module in model.named_modules()}
        with pytest.raises(ValueError, match=r"'h\.9' matches no module"):
            call(model, config=Config(exclude="h.9", enable_logging=False), sample_input=X)
        assert before == {path: set(vars(module)) for path, module in model.named_modules()}

    def test_a_wrapped_model_keeps_its_plan(self) -> None:
        model = Model()
        memscale.wrap(model, Config(memory_budget=1, enable_logging=False), X)
        plan = memscale.executor_of(model).plan
        with pytest.raises(ValueError, match="matches no module"):
            memscale.wrap(model, Config(only="x"), X)
        assert memscale.executor_of(model).plan is plan
