# SPDX-License-Identifier: Apache-2.0
"""The configuration: defaults, modes and explicit fields, what is refused."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import math
import pickle
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memscale
from memscale.config.config import AsyncOffloadConfig, Config, EffectiveConfig, OptimizationMode
from memscale.errors import ConfigError

CONSERVATIVE, BALANCED, AGGRESSIVE = OptimizationMode

DEFAULTS: dict[str, object] = {
    "mode": BALANCED,
    "enable_checkpointing": True,
    "enable_offloading": True,
    "enable_tiling": False,
    "use_mixed_precision": False,
    "use_8bit_optimizer": False,
    "eight_bit_backend": "auto",
    "max_cpu_offload_gb": None,
    "target_gpu_utilization": 0.85,
    "memory_budget": None,
    "strict_budget": False,
    "force_optimize": False,
    "step_in_backward": False,
    "step_on_host": None,
    "exclude": (),
    "only": (),
    "check_recompute": "always",
    "on_oom": "report",
    "oom_snapshot": None,
    "guard": False,
    "learn_loss": False,
    "exact": None,
    "use_static_profiling": True,
    "use_empirical_fallback": True,
    "warmup_steps": 2,
    "enable_logging": True,
    "log_file": None,
    "observability_port": None,
    "record": None,
    "verify_correctness": False,
    "async_offload": False,
    "async_config": None,
    "auto_policy": False,
}
BOOLS = [name for name, value in DEFAULTS.items() if isinstance(value, bool)]


def make(**fields: Any) -> Config:
    return Config(**fields)


def refused(**fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config(**fields)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


class TestDefaults:
    def test_every_field_has_its_default(self) -> None:
        config = Config()
        assert {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} == DEFAULTS
        assert dataclasses.asdict(config) == DEFAULTS

    def test_nothing_is_explicit(self) -> None:
        assert Config().explicit == frozenset()

    def test_the_signature_shows_fields_and_defaults(self) -> None:
        parameters = inspect.signature(Config).parameters
        assert {name: parameter.default for name, parameter in parameters.items()} == DEFAULTS

    def test_every_field_is_checked(self) -> None:
        assert set(Config.CHECKS) == set(DEFAULTS)
        names = {field.name for field in dataclasses.fields(AsyncOffloadConfig)}
        assert set(AsyncOffloadConfig.CHECKS) == names

    def test_every_field_is_documented(self) -> None:
        for cls in (Config, AsyncOffloadConfig):
            for field in dataclasses.fields(cls):
                assert f"        {field.name}: " in (cls.__doc__ or ""), field.name

    def test_async_defaults(self) -> None:
        config = AsyncOffloadConfig()
        assert dataclasses.astuple(config) == (None, 2, ("pinned", "pageable"), None, False)

    @pytest.mark.parametrize(
        "name",
        [
            "errors",
            "config.config",
            "config.checks",
            "config.text",
            "core.config",
            "hardware.detect",
            "hardware.host",
            "hardware.rates",
            "units",
            "log",
        ],
    )
    def test_importing_costs_no_heavy_package(self, name: str) -> None:
        module = importlib.import_module(f"memscale.{name}")
        statements = ast.parse(inspect.getsource(module)).body  # the top level only: functions may import
        imported = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in statements if isinstance(node, ast.ImportFrom)}
        assert {text.split(".")[0] for text in imported} <= {*sys.stdlib_module_names, "memscale"}


class TestModes:
    def test_conservative_only_checkpoints(self) -> None:
        assert make(mode=CONSERVATIVE).effective().techniques == ("enable_checkpointing",)

    def test_balanced_adds_offload(self) -> None:
        assert Config().effective().techniques == ("enable_checkpointing", "enable_offloading")

    def test_aggressive_is_the_full_stack(self) -> None:
        assert len(make(mode=AGGRESSIVE).effective().techniques) == 5
        assert make(mode=AGGRESSIVE).enable_tiling is True
        assert make(mode=AGGRESSIVE).async_offload is True and Config().async_offload is False

    def test_aggressive_without_offload(self) -> None:
        assert make(mode=AGGRESSIVE, enable_offloading=False).async_offload is False
        assert make(mode=AGGRESSIVE, async_offload=False).async_offload is False

    @pytest.mark.parametrize(
        ("mode", "name"),
        [
            (CONSERVATIVE, "enable_offloading"),
            (AGGRESSIVE, "enable_tiling"),
            (AGGRESSIVE, "use_mixed_precision"),
            (AGGRESSIVE, "use_8bit_optimizer"),
        ],
    )
    def test_an_explicit_field_overrides_the_mode(self, mode: OptimizationMode, name: str) -> None:
        for value in (True, False):
            config = make(mode=mode, **{name: value})
            assert getattr(config, name) is value
            assert getattr(config.effective(), name) is value
            assert config.explicit == {"mode", name}

    @pytest.mark.parametrize("text", ["aggressive", "AGGRESSIVE", "Aggressive"])
    def test_a_mode_may_be_text(self, text: str) -> None:
        assert make(mode=text).mode is AGGRESSIVE

    def test_the_mode_may_be_positional(self) -> None:
        config = Config(AGGRESSIVE)
        assert config.enable_tiling
        assert config.explicit == {"mode"}

    def test_replacing_the_mode_keeps_only_what_was_explicit(self) -> None:
        config = make(mode=AGGRESSIVE, use_8bit_optimizer=True).replace(mode=CONSERVATIVE)
        assert config.effective().techniques == ("enable_checkpointing", "use_8bit_optimizer")


class TestExact:
    @pytest.mark.parametrize(("mode", "exact"), [(CONSERVATIVE, True), (BALANCED, True), (AGGRESSIVE, False)])
    def test_open_follows_the_mode(self, mode: OptimizationMode, exact: bool) -> None:
        config = Config(mode)
        assert config.exact is None
        assert config.effective().exact is exact

    def test_exact_switches_the_modes_inexact_techniques_off(self) -> None:
        config = make(mode=AGGRESSIVE, exact=True)
        assert config.effective().exact is True
        assert config.effective().techniques == (
            "enable_checkpointing",
            "enable_offloading",
            "use_mixed_precision",
        )

    @pytest.mark.parametrize("name", ["enable_tiling", "use_8bit_optimizer"])
    def test_exact_contradicts_an_inexact_technique(self, name: str) -> None:
        for mode in OptimizationMode:
            text = refused(mode=mode, exact=True, **{name: True})
            assert "exact=True" in text
            assert f"{name}=True" in text

    @pytest.mark.parametrize("name", ["enable_tiling", "use_8bit_optimizer"])
    def test_asking_for_an_inexact_technique_ends_exactness_where_it_is_open(self, name: str) -> None:
        assert make(**{name: True}).effective().exact is False
        assert make(**{name: False}).effective().exact is True

    def test_mixed_precision_is_exact_at_its_precision(self) -> None:
        assert make(exact=True, use_mixed_precision=True).effective().exact is True

    def test_false_is_kept(self) -> None:
        assert make(exact=False).effective().exact is False


class TestUnknown:
    def test_an_unknown_field_is_named_with_the_allowed_ones(self) -> None:
        text = refused(bogus=1)
        assert "'bogus'" in text
        assert "given 1" in text
        for name in DEFAULTS:
            assert name in text

    def test_the_closest_name_is_offered(self) -> None:
        assert "Did you mean 'enable_tiling'?" in refused(enable_tilling=True)
        with pytest.raises(ConfigError, match="Did you mean 'prefetch_depth'"):
            AsyncOffloadConfig(prefetch_dept=3)  # type: ignore[call-arg]

    def test_private_names_are_unknown(self) -> None:
        assert "'_explicit'" in refused(_explicit=1)

    def test_unknown_in_replace(self) -> None:
        with pytest.raises(ConfigError, match="bogus"):
            Config().replace(bogus=1)
        with pytest.raises(ConfigError, match="bogus"):
            AsyncOffloadConfig().replace(bogus=1)


class TestTypes:
    @pytest.mark.parametrize("name", BOOLS)
    @pytest.mark.parametrize("value", [1, 0, "yes", None, 1.0, [], np.int64(1)])
    def test_flags_are_bools(self, name: str, value: object) -> None:
        text = refused(**{name: value})
        assert text.startswith(f"{name}=")
        assert "True or False" in text

    @pytest.mark.parametrize("name", ["warmup_steps", "observability_port", "memory_budget"])
    @pytest.mark.parametrize("value", [True, False, 2.0, [], math.nan, b"8", np.bool_(True)])
    def test_counts_are_ints(self, name: str, value: object) -> None:
        text = refused(**{name: value})
        assert text.startswith(f"{name}=")
        assert "int" in text

    @pytest.mark.parametrize("name", ["target_gpu_utilization", "max_cpu_offload_gb"])
    @pytest.mark.parametrize("value", [True, "0.5", [], 1j])
    def test_shares_are_numbers(self, name: str, value: object) -> None:
        text = refused(**{name: value})
        assert text.startswith(f"{name}=")
        assert "give a number" in text

    def test_numpy_values_become_plain(self) -> None:
        config = make(
            warmup_steps=np.int32(3),
            memory_budget=np.uint64(5 << 30),
            target_gpu_utilization=np.float32(0.5),
            enable_tiling=np.bool_(True),
        )
        assert type(config.warmup_steps) is int
        assert type(config.memory_budget) is int
        assert type(config.target_gpu_utilization) is float
        assert config.enable_tiling is True

    def test_other_numbers_are_accepted_as_shares(self) -> None:
        assert make(target_gpu_utilization=1).target_gpu_utilization == 1.0
        assert type(make(target_gpu_utilization=1).target_gpu_utilization) is float
        assert make(target_gpu_utilization=Fraction(1, 4)).target_gpu_utilization == 0.25

    @pytest.mark.parametrize("value", ["fast", 3, None, [], ["balanced"], np.array([1, 2])])
    def test_modes(self, value: object) -> None:
        text = refused(mode=value)
        assert text.startswith("mode=")
        assert "'conservative', 'balanced', 'aggressive'" in text

    @pytest.mark.parametrize("value", ["", "a\0b", b"run.log", 3, True, []])
    def test_paths(self, value: object) -> None:
        assert refused(log_file=value).startswith("log_file=")

    def test_a_path_object_becomes_text(self) -> None:
        assert make(log_file=Path("a") / "b").log_file == str(Path("a") / "b")

    @pytest.mark.parametrize("value", [{}, True, "on", AsyncOffloadConfig])
    def test_async_config(self, value: object) -> None:
        assert "give an AsyncOffloadConfig or None" in refused(async_config=value)

    def test_a_long_value_is_cut_in_the_message(self) -> None:
        assert len(refused(warmup_steps="x" * 10_000)) < 200

    def test_the_error_names_the_field(self) -> None:
        with pytest.raises(ConfigError) as caught:
            make(warmup_steps=0)
        assert caught.value.field == "warmup_steps"


class TestRanges:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("target_gpu_utilization", 0),
            ("target_gpu_utilization", -0.1),
            ("target_gpu_utilization", 1.0000001),
            ("target_gpu_utilization", math.nan),
            ("target_gpu_utilization", math.inf),
            ("target_gpu_utilization", Fraction(1, 10**400)),
            ("max_cpu_offload_gb", 0),
            ("max_cpu_offload_gb", -1.0),
            ("max_cpu_offload_gb", math.nan),
            ("max_cpu_offload_gb", math.inf),
            ("max_cpu_offload_gb", 10**400),
            ("memory_budget", 0),
            ("memory_budget", -1),
            ("memory_budget", "0"),
            ("memory_budget", "0.1B"),
            ("memory_budget", "8G"),
            ("memory_budget", "lots"),
            ("memory_budget", 2**63),
            ("warmup_steps", 0),
            ("warmup_steps", -1),
            ("observability_port", 0),
            ("observability_port", 65536),
            ("observability_port", -1),
        ],
    )
    def test_refused(self, name: str, value: object) -> None:
        text = refused(**{name: value})
        assert text.startswith(f"{name}=")
        assert "is not allowed: " in text

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("target_gpu_utilization", 1.0),
            ("target_gpu_utilization", 5e-324),
            ("max_cpu_offload_gb", 0.001),
            ("max_cpu_offload_gb", 1e9),
            ("memory_budget", 1),
            ("memory_budget", 2**63 - 1),
            ("memory_budget", "1B"),
            ("warmup_steps", 1),
            ("observability_port", 1),
            ("observability_port", 65535),
        ],
    )
    def test_edges_are_accepted(self, name: str, value: object) -> None:
        assert getattr(make(**{name: value}), name) == value

    @pytest.mark.parametrize(
        ("value", "size"),
        [
            (None, None),
            (77, 77),
            ("8GiB", 8 << 30),
            ("8GB", 8 * 10**9),
            ("500 MB", 5 * 10**8),
            ("0.5gib", 1 << 29),
        ],
    )
    def test_budgets_in_bytes(self, value: int | str | None, size: int | None) -> None:
        config = Config(memory_budget=value)
        assert config.memory_budget == value
        assert config.memory_budget_bytes == size
        assert config.effective().memory_budget_bytes == size


class TestContradictions:
    def test_async_settings_without_async(self) -> None:
        text = refused(async_config=AsyncOffloadConfig(), async_offload=False)
        assert "async_offload=False" in text
        assert "async_config" in text

    def test_async_settings_switch_async_on(self) -> None:
        config = make(async_config=AsyncOffloadConfig())
        assert config.async_offload
        assert "async_offload" not in config.explicit
        assert not config.replace(async_config=None).async_offload

    def test_forcing_with_nothing_to_force(self) -> None:
        off = {"enable_checkpointing": False, "enable_offloading": False, "force_optimize": True}
        assert "force_optimize=True" in refused(**off)
        assert "'conservative'" in refused(mode=CONSERVATIVE, enable_checkpointing=False, force_optimize=True)
        assert make(**off, enable_tiling=True).force_optimize
        assert make(mode=AGGRESSIVE, **off).force_optimize

    def test_settings_of_an_engine_that_is_switched_off(self) -> None:
        text = refused(enable_offloading=False, async_config=AsyncOffloadConfig())
        assert "enable_offloading=False" in text and "async_config" in text
        assert make(enable_offloading=False, async_offload=True).async_offload  # the environment's, say
        assert not make(mode=CONSERVATIVE, async_config=AsyncOffloadConfig()).enable_offloading

    def test_no_way_to_profile(self) -> None:
        text = refused(use_static_profiling=False, use_empirical_fallback=False)
        assert "use_static_profiling" in text
        assert "use_empirical_fallback" in text

    def test_strict_without_a_budget_is_fine(self) -> None:
        assert make(strict_budget=True).strict_budget

    def test_all_techniques_off_is_fine(self) -> None:
        assert make(enable_checkpointing=False, enable_offloading=False).effective().techniques == ()


class TestAsyncOffloadConfig:
    @pytest.mark.parametrize("tiers", [(), "pinned", ("pinned", "pinned"), ("device",), (1,), None, ([],)])
    def test_tiers_are_refused(self, tiers: object) -> None:
        with pytest.raises(ConfigError, match=r"^tiers=.*'pinned', 'pageable', 'file'"):
            AsyncOffloadConfig(tiers=tiers)  # type: ignore[arg-type]

    def test_a_list_of_tiers_becomes_a_tuple(self) -> None:
        config = AsyncOffloadConfig(tiers=["pageable"])  # type: ignore[arg-type]
        assert config.tiers == ("pageable",)
        assert hash(config) == hash(AsyncOffloadConfig(tiers=("pageable",)))

    def test_the_file_tier_and_the_directory_need_each_other(self) -> None:
        with pytest.raises(ConfigError, match="needs directory"):
            AsyncOffloadConfig(tiers=("pinned", "file"))
        with pytest.raises(ConfigError, match="tier 'file' only"):
            AsyncOffloadConfig(directory="/tmp")
        assert AsyncOffloadConfig(tiers=("file",), directory="/tmp").directory == "/tmp"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("prefetch_depth", -1),
            ("prefetch_depth", True),
            ("prefetch_depth", 1.0),
            ("pinned_pool_bytes", 0),
            ("pinned_pool_bytes", "2G"),
            ("directory", ""),
            ("debug", 1),
        ],
    )
    def test_values_are_refused(self, name: str, value: object) -> None:
        with pytest.raises(ConfigError, match=f"^{name}="):
            AsyncOffloadConfig(**{name: value})  # type: ignore[arg-type]

    def test_the_pool_in_bytes(self) -> None:
        assert AsyncOffloadConfig().pinned_pool_limit_bytes is None
        assert AsyncOffloadConfig(pinned_pool_bytes="2GiB").pinned_pool_limit_bytes == 2 << 30
        assert AsyncOffloadConfig(pinned_pool_bytes=5).pinned_pool_limit_bytes == 5

    def test_replace(self) -> None:
        config = AsyncOffloadConfig(debug=True)
        assert config.replace(prefetch_depth=4) == AsyncOffloadConfig(debug=True, prefetch_depth=4)
        assert config.prefetch_depth == 2


class TestEffective:
    def test_it_is_plain_and_frozen(self) -> None:
        effective = make(memory_budget="1GiB", max_cpu_offload_gb=1.5).effective()
        assert effective.max_cpu_offload_bytes == 1_500_000_000
        assert effective.async_config == AsyncOffloadConfig()
        with pytest.raises(dataclasses.FrozenInstanceError):
            effective.mode = AGGRESSIVE  # type: ignore[misc]

    def test_nothing_is_open_but_limits_files_and_ports(self) -> None:
        for mode in OptimizationMode:
            values = dataclasses.asdict(Config(mode).effective())
            open_names = {name for name, value in values.items() if value is None}
            assert open_names == {
                "max_cpu_offload_bytes",
                "memory_budget_bytes",
                "log_file",
                "oom_snapshot",
                "observability_port",
                "record",
                "step_on_host",  # asked where a plan is made: depends on the machine
            }

    def test_it_covers_every_field(self) -> None:
        renamed = {"max_cpu_offload_gb": "max_cpu_offload_bytes", "memory_budget": "memory_budget_bytes"}
        names = {field.name for field in dataclasses.fields(EffectiveConfig)}
        assert names == {renamed.get(name, name) for name in DEFAULTS}

    def test_a_tiny_cap_is_not_no_memory(self) -> None:
        assert make(max_cpu_offload_gb=1e-12).effective().max_cpu_offload_bytes == 1


class TestPatterns:
    """Of modules to leave out, or to consider alone."""

    @pytest.mark.parametrize("field", ["exclude", "only"])
    def test_a_text_is_one_pattern(self, field: str) -> None:
        assert getattr(make(**{field: "*.adapter"}), field) == ("*.adapter",)
        assert getattr(make(**{field: ""}), field) == ("",)  # the model itself

    def test_a_list_is_a_tuple_with_each_pattern_once(self) -> None:
        config = make(exclude=["h.1", "lm_head", "h.1"])
        assert config.exclude == ("h.1", "lm_head") == config.effective().exclude

    @pytest.mark.parametrize("value", [None, 3, b"h", {"h.1"}, ("h.1", 2), (" h.1",), ("h\n",)])
    def test_anything_else_is_refused_by_name(self, value: Any) -> None:
        text = refused(exclude=value)
        assert text.startswith("exclude=") and "'*.adapter'" in text

    @pytest.mark.parametrize("fields", [{"exclude": ("h.*", "")}, {"only": "h", "check_recompute": "First"}])
    def test_json_and_yaml_keep_them(self, fields: dict[str, Any]) -> None:
        config = make(**fields)
        assert Config.from_json(config.to_json()) == Config.from_yaml(config.to_yaml()) == config
        assert hash(Config.from_json(config.to_json())) == hash(config)

    def test_check_recompute_is_one_of_three(self) -> None:
        assert make(check_recompute="OFF").effective().check_recompute == "off"
        text = refused(check_recompute="sometimes")
        assert "check_recompute='sometimes'" in text and "'always', 'first', 'off'" in text


class TestObject:
    def test_it_is_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            Config().mode = AGGRESSIVE  # type: ignore[misc]

    def test_replace_leaves_the_original(self) -> None:
        config = make(memory_budget="8GiB")
        before = copy.deepcopy(config)
        changed = config.replace(memory_budget=5, mode=AGGRESSIVE)
        assert config == before
        assert config.explicit == before.explicit == {"memory_budget"}
        assert changed.explicit == {"memory_budget", "mode"}
        assert changed.memory_budget == 5

    def test_replace_checks(self) -> None:
        with pytest.raises(ConfigError, match="warmup_steps"):
            Config().replace(warmup_steps=0)
        with pytest.raises(ConfigError, match="contradicts"):
            make(exact=True).replace(enable_tiling=True)

    def test_dataclasses_replace_keeps_what_applies(self) -> None:
        for mode in OptimizationMode:
            changed = dataclasses.replace(Config(mode), memory_budget=1)
            assert changed == make(mode=mode, memory_budget=1)
            assert changed.effective() == make(mode=mode, memory_budget=1).effective()

    def test_equality_is_what_applies(self) -> None:
        assert Config() == Config(BALANCED) == make(enable_tiling=False)
        assert make(mode=AGGRESSIVE) != make(mode=AGGRESSIVE, enable_tiling=False)
        assert hash(Config()) == hash(make(enable_tiling=False))

    @pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
    def test_copies_keep_everything(self, copier: Any) -> None:
        config = make(mode=AGGRESSIVE, enable_tiling=False, async_config=AsyncOffloadConfig(debug=True))
        again = copier(config)
        assert again == config
        assert again.explicit == config.explicit
        assert again.effective() == config.effective()

    def test_the_text_form_is_python(self) -> None:
        config = make(mode=AGGRESSIVE, log_file="a b", async_config=AsyncOffloadConfig())
        names = {"OptimizationMode": OptimizationMode, "AsyncOffloadConfig": AsyncOffloadConfig}
        text = repr(config).replace(repr(AGGRESSIVE), "OptimizationMode.AGGRESSIVE")
        assert eval(text, {"Config": Config, **names}) == config

    @pytest.mark.skipif(sys.version_info < (3, 13), reason="copy.replace is new in 3.13")
    def test_copy_replace_is_our_replace(self) -> None:
        assert copy.replace(Config(), warmup_steps=5).explicit == {"warmup_steps"}  # type: ignore[attr-defined,unused-ignore]


@pytest.mark.parametrize("wrong", [1, "yes", torch.ones(2)], ids=str)
def test_a_switch_that_is_none_is_refused(wrong: Any) -> None:
    """Whoever gives a second argument of the batch by position is told where it belongs."""
    with pytest.raises(TypeError, match="allowed: True, False or None") as refused:
        memscale.wrap(torch.nn.Linear(2, 2), None, torch.ones(2, 2), wrong)
    assert ("sample_input: (x, y)" in str(refused.value)) == isinstance(wrong, torch.Tensor)
