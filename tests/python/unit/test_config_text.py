# SPDX-License-Identifier: Apache-2.0
"""The configuration as dict, JSON and YAML: round trips, versions, broken text."""

from __future__ import annotations

import builtins
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale.config.config import (
    CONFIG_VERSION,
    EIGHT_BIT_BACKENDS,
    AsyncOffloadConfig,
    Config,
    OptimizationMode,
)
from memscale.errors import ConfigError, MemScaleError

sizes = st.one_of(
    st.none(),
    st.integers(1, 2**63 - 1),
    st.builds(
        lambda n, unit: f"{n}{unit}", st.integers(1, 4000), st.sampled_from(["", "B", "GiB", " MB", "tib"])
    ),
)
paths = st.text(min_size=1, max_size=12).filter(lambda text: "\0" not in text)


@st.composite
def async_configs(draw: st.DrawFn) -> AsyncOffloadConfig:
    tiers = draw(st.lists(st.sampled_from(["pinned", "pageable", "file"]), min_size=1, unique=True))
    return AsyncOffloadConfig(
        pinned_pool_bytes=draw(sizes),
        prefetch_depth=draw(st.integers(0, 10**6)),
        tiers=tuple(tiers),
        directory=draw(paths) if "file" in tiers else None,
        debug=draw(st.booleans()),
    )


fields = st.fixed_dictionaries(
    {},
    optional={
        "mode": st.sampled_from(OptimizationMode),
        "enable_checkpointing": st.booleans(),
        "enable_offloading": st.booleans(),
        "enable_tiling": st.booleans(),
        "use_mixed_precision": st.booleans(),
        "use_8bit_optimizer": st.booleans(),
        "eight_bit_backend": st.sampled_from(EIGHT_BIT_BACKENDS),
        "max_cpu_offload_gb": st.none() | st.floats(1e-6, 1e9),
        "target_gpu_utilization": st.floats(0, 1, exclude_min=True),
        "memory_budget": sizes,
        "strict_budget": st.booleans(),
        "force_optimize": st.booleans(),
        "step_in_backward": st.booleans(),
        "exact": st.none() | st.booleans(),
        "use_static_profiling": st.booleans(),
        "use_empirical_fallback": st.booleans(),
        "warmup_steps": st.integers(1, 10**9),
        "enable_logging": st.booleans(),
        "log_file": st.none() | paths,
        "observability_port": st.none() | st.integers(1, 65535),
        "verify_correctness": st.booleans(),
        "async_offload": st.booleans(),
        "async_config": st.none() | async_configs(),
        "auto_policy": st.booleans(),
    },
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    given_fields: dict[str, Any] = draw(fields)
    try:
        return Config(**given_fields)
    except ConfigError:  # a contradiction: keep the part that cannot contradict
        kept = ("mode", "memory_budget", "warmup_steps", "log_file", "max_cpu_offload_gb")
        return Config(**{name: given_fields[name] for name in kept if name in given_fields})


def same(again: Config, config: Config) -> bool:
    return again == config and again.explicit == config.explicit and again.effective() == config.effective()


@given(configs())
def test_dict_round_trip(config: Config) -> None:
    assert same(Config.from_dict(config.to_dict()), config)


@given(configs())
def test_json_round_trip(config: Config) -> None:
    assert same(Config.from_json(config.to_json()), config)
    assert same(Config.from_json(config.to_json(indent=None).encode()), config)


@given(configs())
def test_yaml_round_trip(config: Config) -> None:
    assert same(Config.from_yaml(config.to_yaml()), config)


@given(configs(), st.sampled_from(OptimizationMode))
def test_a_new_mode_means_the_same_after_a_round_trip(config: Config, mode: OptimizationMode) -> None:
    again = Config.from_json(config.to_json())
    outcomes = []
    for each in (config, again):
        try:
            outcomes.append(str(each.replace(mode=mode)))
        except ConfigError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@given(
    st.dictionaries(
        st.sampled_from([*Config.CHECKS, "version", "bogus"]), st.none() | st.integers() | st.text()
    )
)
def test_any_mapping_is_a_config_or_a_config_error(data: dict[str, object]) -> None:
    try:
        config = Config.from_dict(data)
    except ConfigError:
        return
    assert same(Config.from_dict(config.to_dict()), config)


@given(st.text(max_size=80))
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    for read in (Config.from_json, Config.from_yaml):
        with contextlib.suppress(ConfigError):  # any other exception fails the test
            assert isinstance(read(text), Config)


def test_only_version_and_explicit_fields_are_written() -> None:
    """A mode that nobody has named is none when it is read: `apply_all_optimizations` chooses then."""
    assert Config().to_dict() == {"version": 1}
    config = Config(OptimizationMode.AGGRESSIVE, enable_tiling=False, memory_budget="8GiB")
    assert config.to_dict() == {
        "version": CONFIG_VERSION,
        "mode": "aggressive",
        "enable_tiling": False,
        "memory_budget": "8GiB",
    }
    assert json.loads(config.to_json()) == config.to_dict()


def test_the_dict_is_not_shared_with_the_config() -> None:
    config = Config(async_config=AsyncOffloadConfig())
    data: Any = config.to_dict()
    data["async_config"]["tiers"].append("file")
    assert config.async_config == AsyncOffloadConfig()


def test_reading_leaves_the_mapping_alone() -> None:
    data: dict[str, object] = {"version": 1, "async_config": {"debug": True}}
    before = json.dumps(data)
    Config.from_dict(data)
    assert json.dumps(data) == before


def test_a_file_written_by_hand() -> None:
    text = """
    # no version: 1
    mode: aggressive
    memory_budget: 8 GiB
    use_8bit_optimizer: off
    async_config:
      tiers: [pinned, file]
      directory: /scratch
    """
    config = Config.from_yaml(text)
    assert config.memory_budget_bytes == 8 << 30
    assert config.use_8bit_optimizer is False
    assert config.async_offload is True
    assert config.async_config == AsyncOffloadConfig(tiers=("pinned", "file"), directory="/scratch")


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0])
def test_an_unknown_version_is_refused(version: object) -> None:
    with pytest.raises(ConfigError, match=r"^version=.*reads version 1"):
        Config.from_dict({"version": version})


@pytest.mark.parametrize("read", [Config.from_json, Config.from_yaml])
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"mode": ', "not valid"),
        ("[1, 2]", "needs a mapping"),
        ("null", "needs a mapping"),
        ('{"mode": "balanced", "mode": "aggressive"}', "'mode' twice"),
        ('{"async_config": {"debug": true, "debug": false}}', "'debug' twice"),
        ('{"bogus": 1}', "no field 'bogus'"),
        ('{"async_config": {"bogus": 1}}', "AsyncOffloadConfig has no field 'bogus'"),
        ('{"async_config": [1]}', "give an AsyncOffloadConfig"),
        ('{"warmup_steps": true}', "warmup_steps=True"),
        ('{"memory_budget": 8e9}', "memory_budget="),
    ],
)
def test_broken_text_is_refused(read: Callable[[str], Config], text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        read(text)


def test_nan_in_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="target_gpu_utilization=nan"):
        Config.from_json('{"target_gpu_utilization": NaN}')
    with pytest.raises(ConfigError, match="target_gpu_utilization=nan"):
        Config.from_yaml("target_gpu_utilization: .nan")


def test_yaml_makes_no_objects() -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        Config.from_yaml("mode: !!python/object/apply:os.getcwd []")


def test_names_must_be_text() -> None:
    with pytest.raises(ConfigError, match="text names only, not 1"):
        Config.from_yaml("1: 2")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"mode":' * 100_000])
def test_endless_nesting_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not valid JSON"):
        Config.from_json(text)


def test_undecodable_paths_survive() -> None:
    path = b"run-\xff.log".decode("utf-8", "surrogateescape")
    config = Config(log_file=path)
    assert Config.from_json(config.to_json()).log_file == path
    assert Config.from_yaml(config.to_yaml()).log_file == path


def test_a_missing_yaml_package_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_import = builtins.__import__

    def no_yaml(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "yaml":
            raise ImportError("No module named 'yaml'")
        return plain_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "yaml", raising=False)
    monkeypatch.setattr(builtins, "__import__", no_yaml)
    with pytest.raises(MemScaleError, match="pip install pyyaml"):
        Config().to_yaml()
    with pytest.raises(MemScaleError, match="pip install pyyaml"):
        Config.from_yaml("mode: balanced")
