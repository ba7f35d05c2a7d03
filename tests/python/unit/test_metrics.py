# SPDX-License-Identifier: Apache-2.0
"""The table of metrics: names and labels that dashboards rest on, and what a card adds."""

from __future__ import annotations

from typing import Any

import pytest
from test_offload_observability import EMPTY

from memscale.observability.metric_families import Reading, families

client: Any = pytest.importorskip("prometheus_client")
core: Any = pytest.importorskip("prometheus_client.core")

ON_CARD = Reading(
    planning_seconds=0.5,
    plan=None,
    offload=EMPTY,
    device="cuda:1",
    memory={"allocated_bytes.all.current": 600, "reserved_bytes.all.current": 800},
)


def text_of(readings: dict[str, Reading]) -> str:
    class Collector:
        def collect(self) -> Any:
            return families(core, readings)

    registry = client.CollectorRegistry()
    registry.register(Collector())
    found: bytes = client.generate_latest(registry)
    return found.decode()


def samples(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_a_card_is_told_of_once() -> None:
    found = samples(text_of({"a": ON_CARD, "b": ON_CARD}))
    assert [line for line in found if "device" in line] == [
        'memscale_memory_allocated_bytes{device="cuda:1"} 600.0',
        'memscale_memory_reserved_bytes{device="cuda:1"} 800.0',
        'memscale_fragmentation_ratio{device="cuda:1"} 0.25',
    ]


@pytest.mark.parametrize("memory", [None, {}, {"reserved_bytes.all.current": 0}])
def test_no_figure_is_made_up(memory: dict[str, int] | None) -> None:
    found = samples(text_of({"a": Reading(0.0, None, None, "cuda:0", memory)}))
    reserved = ['memscale_memory_reserved_bytes{device="cuda:0"} 0.0'] if memory else []
    assert found == ['memscale_planning_seconds_total{model="a"} 0.0', *reserved]
    assert text_of({}) == ""


def test_names_and_labels_of_the_offload() -> None:
    found = samples(text_of({"a": ON_CARD}))
    for line in (
        'memscale_offload_bytes_total{direction="out",model="a",tier="pinned"} 9.437184e+06',
        'memscale_offload_bytes_total{direction="in",model="a",tier="file"} 3.145728e+07',
        'memscale_offload_tensors_total{model="a",tier="file"} 20.0',
        'memscale_offload_held_bytes{model="a",tier="file"} 0.0',
        'memscale_offload_held_peak_bytes{model="a",tier="file"} 6.291456e+06',
        'memscale_offload_taken_bytes{model="a",tier="pinned"} 8.388608e+06',
        'memscale_offload_limit_bytes{model="a",tier="pinned"} 6.7108864e+07',
        'memscale_offload_wait_seconds_total{direction="out",model="a"} 0.0025',
        'memscale_offload_wait_seconds_total{direction="in",model="a"} 0.014',
        'memscale_offload_prefetch_total{model="a",result="hit"} 30.0',
        'memscale_offload_prefetch_total{model="a",result="late"} 1.0',
        'memscale_offload_prefetch_total{model="a",result="miss"} 1.0',
        'memscale_offload_trouble_total{kind="refused",model="a"} 0.0',
    ):
        assert line in found, line
    assert not [line for line in found if 'tier="pageable"' in line]  # not in use


def test_every_family_has_a_type_and_a_help() -> None:
    text = text_of({'a "model"\n': ON_CARD})
    names = {line.partition("{")[0] for line in samples(text)}
    for mark in ("# HELP ", "# TYPE "):
        assert {line.split()[2] for line in text.splitlines() if line.startswith(mark)} == names
    assert r'model="a \"model\"\n"' in text
