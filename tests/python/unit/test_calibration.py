# SPDX-License-Identifier: Apache-2.0
"""Measured rates: when they are measured, kept, read, refused, and that they reach the core."""

from __future__ import annotations

import dataclasses
import json
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memscale
from memscale import _core
from memscale.core import calibration
from memscale.core.calibration import Patience, Rates, calibrated, measured, measures
from memscale.core.decision_engine import DecisionEngine
from memscale.core.devices import resolve_device
from memscale.errors import ConfigError
from memscale.hardware.cost_rates import CLASSES, KINDS, MEASURED, TABLE, CostRates
from memscale.hardware.detect import Hardware, budget_bytes, detect
from memscale.hardware.measured_rates import SWITCH, quantised

CPU = torch.device("cpu")


def rates(base: int = 1000) -> CostRates:
    """Rates that all differ."""
    flops = tuple(base + i for i in range(len(KINDS)))
    moved = tuple(2 * base + i for i in range(len(KINDS)))
    return CostRates(flops, moved, base, base + 1, base + 2, base + 3, base + 4, MEASURED)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Calibration on, with a cache folder of its own and nothing known. Returns the file."""
    monkeypatch.setenv(SWITCH, "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration.forget()
    yield tmp_path / "memscale" / "rates.json"
    calibration.forget()


class Measured(Rates):
    """Measuring gives `rates()` at once, and others at each further call."""

    def __init__(self) -> None:
        super().__init__(self.measure)
        self.count = 0

    def measure(self, hardware: Hardware) -> CostRates:
        self.count += 1
        return rates(1000 * self.count)

    def cost(self) -> CostRates:
        """Of this machine's processor."""
        return self.calibrated(detect(CPU)).cost


@pytest.fixture
def known(fresh: Path) -> Measured:
    return Measured()


def test_measured_once_and_kept(fresh: Path, known: Measured) -> None:
    assert calibration.cache_file() == fresh
    hardware = detect(CPU)
    found = known.calibrated(hardware)
    assert found == dataclasses.replace(hardware, cost=rates())
    assert known.calibrated(hardware) == found and known.count == 1
    known.forget()
    assert known.calibrated(hardware) == found and known.count == 1, "the file was not read"
    fresh.unlink()
    known.forget()
    assert known.calibrated(hardware).cost == rates(2000) and known.count == 2


def test_other_threads_are_another_entry(fresh: Path, known: Measured) -> None:
    before = torch.get_num_threads()
    one = known.cost()
    try:
        torch.set_num_threads(before + 1)
        assert known.cost() != one
    finally:
        torch.set_num_threads(before)
    known.forget()
    assert known.cost() == one
    assert known.count == 2 and len(json.loads(fresh.read_text())["entries"]) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: '"\udcff"',
        lambda text: text.replace('"format": 2', '"format": 3'),
        lambda text: text.replace('"launch_ns": 1002', '"launch_ns": 0'),
        lambda text: text.replace('"launch_ns": 1002', '"launch_ns": 1.5'),
        lambda text: text.replace('"launch_ns": 1002', '"launch_ns": true'),
        lambda text: text.replace('"launch_ns"', '"lunch_ns"'),
        lambda text: text.replace('"matrix": 1010', '"matrix": "fast"'),
        lambda text: text.replace('"matrix": 1010', '"matrix": -5'),
        lambda text: "[" * 100_000,
    ],
)
def test_a_damaged_file_is_measured_anew(fresh: Path, known: Measured, damage: Callable[[str], str]) -> None:
    known.cost()
    damaged = damage(fresh.read_text())
    assert damaged != fresh.read_text()
    fresh.write_text(damaged, errors="surrogateescape")
    known.forget()
    assert known.cost() == rates(2000)
    known.forget()
    assert known.cost() == rates(2000) and known.count == 2, "the file was not replaced"


def test_a_good_entry_survives_a_bad_one(fresh: Path, known: Measured) -> None:
    good = known.cost()
    data = json.loads(fresh.read_text())
    data["entries"]["another machine"] = {"launch_ns": -1}
    fresh.write_text(json.dumps(data))
    known.forget()
    assert known.cost() == good and known.count == 1


def test_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh: Path, known: Measured
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    assert known.cost() == rates()
    assert known.cost() == rates() and known.count == 1
    assert blocker.read_text() == "no folder"


def test_nothing_half_written_is_left(fresh: Path, known: Measured) -> None:
    fresh.mkdir(parents=True)  # which no file can replace
    assert known.cost() == rates()
    assert list(fresh.parent.iterdir()) == [fresh] and list(fresh.iterdir()) == []


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration.cache_file() == tmp_path / ".cache" / "memscale" / "rates.json"


def test_writers_at_once_leave_a_whole_file(fresh: Path) -> None:
    writers = [
        threading.Thread(target=calibration.write_entry, args=(fresh, f"machine {i}", rates(1000 + i)))
        for i in range(8)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    kept = calibration.read_entries(fresh)
    assert kept and all(kept[key] == rates(1000 + int(key.split()[1])) for key in kept)
    assert list(fresh.parent.iterdir()) == [fresh]


def test_threads_measure_once(fresh: Path, known: Measured) -> None:
    threads = [threading.Thread(target=known.calibrated, args=(detect(CPU),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert known.count == 1


@pytest.mark.parametrize("value", ["off", " OFF "])
def test_the_switch(monkeypatch: pytest.MonkeyPatch, fresh: Path, known: Measured, value: str) -> None:
    monkeypatch.setenv(SWITCH, value)
    hardware = detect(CPU)
    assert known.calibrated(hardware) is hardware and hardware.cost.source == TABLE
    assert known.count == 0 and not fresh.exists()


def test_a_wrong_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "on")
    with pytest.raises(ConfigError, match=r"MEMSCALE_CALIBRATION is 'on'; allowed: 'auto', 'off'"):
        calibrated(detect(CPU))


def test_only_what_is_here_is_measured(known: Measured) -> None:
    card = resolve_device("RTX 3090")
    assert not torch.cuda.is_initialized() and known.calibrated(card) is card
    assert known.count == 0
    assert card.cost.source == resolve_device("24GiB").cost.source == TABLE


def test_a_device_that_is_here_has_the_rates_of_the_file(known: Measured) -> None:
    assert known.cost() == resolve_device("cpu").cost  # which has read the file


def test_what_cannot_be_measured_is_looked_up(fresh: Path) -> None:
    no_card = dataclasses.replace(detect(CPU), device_kind="cuda", device_index=99)
    assert calibration.measured(no_card) is None
    assert Rates(lambda _: None).calibrated(detect(CPU)).cost.source == TABLE
    assert not fresh.exists()


@given(st.floats(1, 1e15))
def test_quantised_lies_close_and_stays(value: float) -> None:
    step = quantised(value)
    assert abs(step - value) <= 0.045 * value + 0.5
    assert quantised(step) == step or value < 12  # small whole numbers lie off the grid


def test_noise_seldom_matters() -> None:
    values = [1000 * 1.07**i for i in range(200)]
    same = sum(quantised(value) == quantised(value * 1.01) for value in values)
    assert same > 160


# ---- measuring ---------------------------------------------------------------------------------------


def rates_of_host(**patience: float) -> CostRates:
    """With the fewest repetitions, however busy the machine is."""
    chosen = {"repeats": 1, "limit_s": 300.0, "spread": 1e9, **patience}
    return Rates(lambda hardware: measured(hardware, Patience(**chosen))).calibrated(detect(CPU)).cost


def test_measuring_changes_nothing(fresh: Path) -> None:
    state = torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cost = rates_of_host()
        assert torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
    assert torch.equal(state, torch.get_rng_state())
    assert cost.source == MEASURED
    assert list(calibration.read_entries(fresh).values()) == [cost]
    numbers = (*cost.flops_per_us, *cost.moved_bytes_per_us, cost.launch_ns, cost.recompute_ns)
    assert all(type(number) is int and number > 0 for number in numbers)


@pytest.mark.parametrize("patience", [{"limit_s": 0.0}, {"spread": 0.0}])
def test_a_busy_machine_is_not_measured(fresh: Path, patience: dict[str, float]) -> None:
    assert rates_of_host(**patience).source == TABLE
    assert not fresh.exists()


def test_every_class_is_measured() -> None:
    samples = measures.Samples(CPU, torch.float32, 1, 1)
    assert {name for name, _ in samples.by_class()} == set(CLASSES) - {"other"}


def test_measured_rates_reach_the_core(known: Measured) -> None:
    hardware = known.calibrated(detect(CPU))
    config = memscale.Config(memory_budget="1GiB")
    engine = DecisionEngine(config.effective(), hardware, budget_bytes(config, hardware))
    g = _core.Graph()
    g.add_op("mm", 10**6, 0, work=_core.WORK_MATRIX, flags=_core.OP_HALF)
    kind = KINDS.index("matrix_half")
    times = array("q", _core.op_times_ns(g, engine.rates)).tolist()
    assert times == [1002 + 10**9 // (1000 + kind)]


def test_a_plan_says_where_its_times_come_from(monkeypatch: pytest.MonkeyPatch, known: Measured) -> None:
    known.cost()  # which writes the file
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    config = memscale.Config(memory_budget="1GiB", enable_logging=False)
    with memscale.optimize(model, config=config, sample_input=torch.randn(2, 4)) as executor:
        assert "times by rates measured on this machine" in executor.planned.plan.notes
    monkeypatch.setenv(SWITCH, "off")
    with memscale.optimize(model, config=config, sample_input=torch.randn(2, 4)) as executor:
        assert "times by rates from a table" in executor.planned.plan.notes
