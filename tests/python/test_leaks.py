# SPDX-License-Identifier: Apache-2.0
"""Nothing public in `_core` leaks: every name runs thousands of times and memory must not grow.

Two instruments, read before and after the loop:

* `sys.getallocatedblocks` counts the blocks of Python's own allocator. One object lost per round shows as a
  growth of at least `ROUNDS`.
* The C library's heap, from its own accounts, shows what C code lost outside that allocator. Its bound,
  `HEAP_BYTES`, is 16 bytes per round, less than any record of the core. Where the C library keeps no such
  accounts the resident set stands in, with a bound above its noise.

A third, `sys.getrefcount`, watches the arguments themselves, whose loss the first would miss if it were
balanced by one reference too few elsewhere.

The table `LEAK_TESTS` must name every public function, method and property; a missing one fails
`test_every_public_name_has_an_entry`. Error paths are entries too: that is where references get lost.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core_samples import chain, noted
from leak_blocks import BLOCK_CALLS, BLOCK_ERRORS
from leak_card import CARD_CALLS, CARD_ERRORS
from leak_optim import OPTIM_CALLS, OPTIM_ERRORS
from leak_record import RECORD_CALLS, RECORD_ERRORS, close_recorder
from memscale import _core
from memscale.errors import MemScaleError

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the heap as Linux shows it")

ROUNDS = 2000
WARM_UP_ROUNDS = 400
BLOCKS = 200  # free lists and caches that settle late
HEAP_BYTES = 16 * ROUNDS
RESIDENT_BYTES = 2 << 20

GRAPH = chain()
TEXT = GRAPH.to_text()
NOTED = noted()
PLAN = _core.Plan.build([(1, "checkpoint", "chosen", 1, 10, 10)], {"budget_bytes": 1})
KEEPING = _core.Plan.build(
    [*PLAN.choices, (2, "selective", "chosen", 1, 2000, 3000, 4000, 5000, False, (1000, 2000))], PLAN.summary
)
PLAN_TEXT = KEEPING.to_text()
SIM = {"kind": "cuda", "capacity_bytes": None}
RATES = {"flops_per_us": 10**6}
SNAPSHOT_FILE = Path(__file__).parent.parent / "data/snapshots/ring.pickle"
SNAPSHOT = _core.Snapshot(SNAPSHOT_FILE)


def offload_engine() -> _core.OffloadEngine:
    options = {"host_bytes": 1 << 20, "least_bytes": 1 << 10, "trace_count": 16}
    return _core.OffloadEngine(torch.Tensor, torch.nn.Parameter, None, options)


ENGINE = offload_engine()
SAVED, SMALL = torch.ones(1024), torch.ones(1)
META, SPARSE = torch.ones(3, device="meta"), torch.eye(3).to_sparse()


def entries() -> _core.Entries:
    return _core.Entries([{"a": 1, "b": SAVED}, OrderedDict(c=[]), {"d": b"passed over"}], bytes)


def changed_entries() -> _core.Entries:
    places: list[dict[str, Any]] = [{"a": []}, OrderedDict(b=[])]
    made = _core.Entries(places, bytes)
    places[1]["b"] = []
    return made


def simulated(change: Callable[[_core.Simulator], object]) -> Callable[[Path], object]:
    """An entry that changes a fresh simulator: three ids of one stream each, the third awaited."""

    def run(_: Path) -> object:
        simulator = _core.Simulator("cuda", "max_split_size_mb:40", 10**9, record_segments=True)
        for id in range(3):
            simulator.alloc(id, 10**7, stream=id)
        simulator.free_request(2)
        return change(simulator)

    return run


def refused(action: Callable[[], object]) -> None:
    """Runs `action`, which must raise."""
    try:
        action()
    except Exception:
        return
    raise AssertionError("was not refused")


def built(change: Callable[[_core.Graph], object]) -> Callable[[Path], object]:
    """An entry that changes a fresh graph: one module in an open call, an operation, a buffer, a save."""

    def run(_: Path) -> object:
        g = _core.Graph()
        g.add_module("", "Net")
        g.begin_call(0)
        g.add_op("first", 10**12, 10**12)
        g.add_buffer(10**12, _core.CATEGORY_ACTIVATION)
        g.add_save(0)
        return change(g)

    return run


def read(name: str) -> Callable[[Path], object]:
    """An entry that reads a property, or calls a reader, of the finished graph."""

    def run(_: Path) -> object:
        value = getattr(GRAPH, name)
        return value() if callable(value) else value

    return run


LEAK_TESTS: dict[str, Callable[[Path], object]] = {
    "decide": lambda _: _core.decide(GRAPH, 10**3, sim=SIM, rates=RATES, allow_checkpoint=True, force=False),
    "frontier": lambda _: _core.frontier(GRAPH, sim=SIM, rates=RATES),
    "step_events": lambda _: _core.step_events(GRAPH, PLAN),
    "replay": lambda _: _core.replay(GRAPH, PLAN, sim=SIM),
    "fingerprint": lambda _: (_core.fingerprint(SAVED), _core.fingerprint(SAVED[::2], sampled=True)),
    "Entries": lambda _: entries(),
    "Entries.same": lambda _: (entries().same(), changed_entries().same()),
    "Entries.held": lambda _: [entries().held(place) for place in range(3)],
    "Entries.values": lambda _: entries().values(0, 3, {"b"}, {int}),
    "op_times_ns": lambda _: _core.op_times_ns(GRAPH, RATES),
    "rule_text": lambda _: _core.rule_text("chosen"),
    "version": lambda _: _core.version(),
    "Graph": lambda _: _core.Graph(),
    "Graph.add_module": built(lambda g: g.add_module("a" * 300, "B" * 300, 0, structure=1 << 63)),
    "Graph.mark_module": built(lambda g: g.mark_module(0, 1, 10**12)),
    "Graph.set_phase": built(lambda g: g.set_phase(1)),
    "Graph.begin_call": built(lambda g: g.begin_call(0)),
    "Graph.end_call": built(lambda g: g.end_call(0)),
    "Graph.add_input": built(lambda g: g.add_input(0, 0)),
    "Graph.add_op": built(lambda g: g.add_op("x" * 300, flops=10**12, moved_bytes=10**12, scratch_bytes=1)),
    "Graph.add_buffer": built(lambda g: g.add_buffer(10**12, 6)),
    "Graph.add_resident": built(lambda g: g.add_resident(10**12, 0)),
    "Graph.add_late": built(lambda g: g.add_late(10**12, 7)),
    "Graph.make_late": built(lambda g: g.make_late(g.add_resident(10**12, 3))),
    "Graph.set_category": built(lambda g: g.set_category(0, 2)),
    "Graph.set_size": built(lambda g: g.set_size(0, 2)),
    "Graph.note_op": built(lambda g: g.note_op(0, "x" * 300)),
    "Graph.note_buffer": built(lambda g: (g.note_buffer(0, 0, "x" * 300), g.note_buffer(0, -1, "y" * 300))),
    "Graph.op_notes": lambda _: NOTED.op_notes(),
    "Graph.buffer_notes": lambda _: NOTED.buffer_notes(),
    "Graph.end_buffer": built(lambda g: g.end_buffer(0)),
    "Graph.add_write": built(lambda g: g.add_write(0)),
    "Graph.add_save": built(lambda g: g.add_save(0)),
    "Graph.unpack": built(lambda g: (g.set_phase(1), g.unpack(0))),
    "Graph.release": built(lambda g: (g.set_phase(1), g.unpack(0), g.release(0))),
    "Graph.finish": built(lambda g: g.finish()),
    "Graph.save": lambda folder: GRAPH.save(folder / "saved"),
    "Graph.load": lambda folder: _core.Graph.load(folder / "graph"),
    "Graph.parse": lambda _: (_core.Graph.parse(TEXT), _core.Graph.parse(TEXT.encode())),
    "Graph.to_text": read("to_text"),
    "Graph.ops": read("ops"),
    "Graph.buffers": read("buffers"),
    "Graph.saves": read("saves"),
    "Graph.modules": read("modules"),
    "Graph.calls": read("calls"),
    "Graph.op_count": read("op_count"),
    "Graph.buffer_count": read("buffer_count"),
    "Graph.save_count": read("save_count"),
    "Graph.module_count": read("module_count"),
    "Graph.call_count": read("call_count"),
    "Graph.finished": read("finished"),
    "Graph.digest": read("digest"),
    "Simulator": lambda _: _core.Simulator(
        "cuda",
        "roundup_power2_divisions:[256:1,>:8]",
        10**15,
        device_total_bytes=10**15,
        allowed_bytes=10**15,
        record_segments=True,
    ),
    "OffloadEngine": lambda _: offload_engine(),
    "OffloadEngine.pack": lambda _: ENGINE.pack(SAVED),
    "OffloadEngine.unpack": lambda _: ENGINE.unpack(ENGINE.pack(SAVED)),
    "OffloadEngine.region": lambda _: ENGINE.region((0, 3)) or ENGINE.region(None),
    "OffloadEngine.settle": lambda _: ENGINE.settle(),
    "OffloadEngine.step": lambda _: ENGINE.step(),
    "OffloadEngine.counters": lambda _: ENGINE.counters(),
    "OffloadEngine.trace": lambda _: ENGINE.trace(),
    "OffloadEngine.notes": lambda _: ENGINE.notes(),
    "OffloadEngine.close": lambda _: offload_engine().close(),
    "Saved": lambda _: ENGINE.pack(SMALL),
    "Saved.left": lambda _: ENGINE.pack(SMALL).left,
    "Saved.guard": lambda _: ENGINE.pack(SMALL).guard(object),
    **BLOCK_CALLS,
    "Simulator.alloc": simulated(lambda s: s.alloc(3, 10**6, stream=3, pool=1)),
    "Simulator.free": simulated(lambda s: s.free(1)),
    "Simulator.free_request": simulated(lambda s: s.free_request(0)),
    "Simulator.free_complete": simulated(lambda s: s.free_complete(2)),
    "Simulator.empty_cache": simulated(lambda s: s.empty_cache()),
    "Simulator.release_pool": simulated(lambda s: s.release_pool(10**9)),
    "Simulator.set_capturing": simulated(lambda s: s.set_capturing(True)),
    "Simulator.reset": simulated(lambda s: s.reset()),
    "Simulator.reset_peaks": simulated(lambda s: s.reset_peaks()),
    "Simulator.reset_accumulated": simulated(lambda s: s.reset_accumulated()),
    "Simulator.place_next_segment": simulated(lambda s: s.place_next_segment(512 * 10**12)),
    "Simulator.stats": simulated(lambda s: s.stats()),
    "Simulator.segments": simulated(lambda s: s.segments()),
    "Simulator.segment_events": simulated(lambda s: s.segment_events()),
    "Simulator.validate": simulated(lambda s: s.validate()),
    "Plan": lambda _: refused(_core.Plan),
    "Plan.build": lambda _: _core.Plan.build(KEEPING.choices, KEEPING.summary),
    "Plan.parse": lambda _: _core.Plan.parse(PLAN_TEXT),
    "Plan.to_text": lambda _: KEEPING.to_text(),
    "Plan.choices": lambda _: KEEPING.choices,
    "Plan.summary": lambda _: PLAN.summary,
    "Plan.digest": lambda _: PLAN.digest,
    "Snapshot": lambda _: _core.Snapshot(SNAPSHOT_FILE),
    "Snapshot.devices": lambda _: SNAPSHOT.devices,
    "Snapshot.settings": lambda _: SNAPSHOT.settings,
    "Snapshot.segments": lambda _: SNAPSHOT.segments(0),
    "Snapshot.events": lambda _: SNAPSHOT.events(0),
    "Snapshot.replay": lambda _: SNAPSHOT.replay(0, limits={"capacity_bytes": None}),
    "Snapshot.top_frames": lambda _: SNAPSHOT.top_frames(0, at_peak=True, count=5),
    **OPTIM_CALLS,
    **CARD_CALLS,
    **RECORD_CALLS,
}


class _Index:
    def __index__(self) -> int:
        return 10**15


NO_GRAPH: Any = 7

# Entries without a public name of their own: special methods and failures.
EXTRA_TESTS: dict[str, Callable[[Path], object]] = {
    "repr": lambda _: (repr(GRAPH), repr(PLAN)),
    "index": built(lambda g: g.add_op("x", _Index(), _Index())),
    "many operations": built(lambda g: [g.add_op("y", 1, 1) for _ in range(50)]),
    "error: unknown keyword": lambda _: refused(lambda: GRAPH.end_call(calls=10**9)),  # type: ignore[call-arg]
    "error: missing argument": lambda _: refused(lambda: GRAPH.end_call()),  # type: ignore[call-arg]
    "error: type": lambda _: refused(lambda: GRAPH.end_call("x")),  # type: ignore[arg-type]
    "error: range": lambda _: refused(lambda: GRAPH.end_call(2**70)),
    "error: name": lambda _: refused(lambda: _core.Graph().add_op("a\nb", 1, 1)),
    "error: surrogate": lambda _: refused(lambda: _core.Graph().add_op("\ud800", 1, 1)),
    "error: state": lambda _: refused(lambda: GRAPH.finish()),
    "error: open": lambda _: refused(lambda: _core.decide(_core.Graph(), 1)),
    "error: malformed graph": lambda _: refused(lambda: _core.Graph.parse(TEXT[: len(TEXT) // 2])),
    "error: malformed plan": lambda _: refused(lambda: _core.Plan.parse(PLAN_TEXT[: len(PLAN_TEXT) // 2])),
    "error: no file": lambda folder: refused(lambda: _core.Graph.load(folder / "none")),
    "error: no folder": lambda folder: refused(lambda: GRAPH.save(folder / "none" / "x")),
    "error: choice": lambda _: refused(lambda: _core.Plan.build([(1, "keep", "x", 1, 1, 1)], {})),
    "error: choices": lambda _: refused(lambda: _core.Plan.build([*PLAN.choices, *PLAN.choices], {})),
    "error: kept": lambda _: refused(
        lambda: _core.Plan.build([(0, "selective", "chosen", 1, 1, 1, 0, 0, False, (2000, 1000))], {})
    ),
    "error: summary": lambda _: refused(lambda: _core.Plan.build(PLAN.choices, {"peak": 1})),
    "error: sim key": lambda _: refused(lambda: _core.decide(GRAPH, 1, sim={"kin": "host"})),
    "error: sim kind": lambda _: refused(lambda: _core.replay(GRAPH, sim={"kind": "tpu"})),
    "error: sim conf": lambda _: refused(
        lambda: _core.replay(GRAPH, sim={"kind": "cuda", "alloc_conf": "max_split_size_mb:x"})
    ),
    "alloc conf": lambda _: _core.replay(
        GRAPH, sim={"kind": "cuda", "alloc_conf": "expandable_segments:True", "capacity_bytes": 10**12}
    ),
    "error: offload options": lambda _: refused(
        lambda: _core.OffloadEngine(torch.Tensor, torch.nn.Parameter, None, {"host_bytes": 0})
    ),
    "error: offload block": lambda _: [refused(action) for action in BLOCK_ERRORS],
    "error: offload save": lambda _: refused(lambda: ENGINE.unpack(SAVED)),  # type: ignore[arg-type]
    "error: simulator kind": lambda _: refused(lambda: _core.Simulator("tpu")),  # type: ignore[arg-type]
    "error: simulator conf": lambda _: refused(lambda: _core.Simulator("cuda", "no_key:" + "9" * 60)),
    "error: simulator memory": simulated(lambda s: refused(lambda: s.alloc(9, 10**12))),
    "error: simulator id": simulated(lambda s: refused(lambda: s.free(10**9))),
    "error: rates": lambda _: refused(lambda: _core.frontier(GRAPH, rates={"launch_ns": 0})),
    "error: capacity": lambda _: refused(
        lambda: _core.replay(GRAPH, sim={"kind": "cuda", "capacity_bytes": 1})
    ),
    "error: plan of another graph": lambda _: refused(
        lambda: _core.replay(GRAPH, _core.Plan.build([(99, "checkpoint", "chosen", 1, 1, 1)], {}))
    ),
    "error: no graph": lambda _: refused(lambda: _core.decide(NO_GRAPH, 1)),
    "error: snapshot": lambda folder: refused(lambda: _core.Snapshot(folder / "graph")),
    "error: snapshot device": lambda _: refused(lambda: SNAPSHOT.replay(1)),
    "error: snapshot limits": lambda _: refused(lambda: SNAPSHOT.replay(0, limits={"x": 1})),
    "error: fingerprint of no tensor": lambda _: refused(lambda: _core.fingerprint(7)),
    "error: fingerprint without data": lambda _: refused(lambda: _core.fingerprint(META)),
    "error: fingerprint of a sparse tensor": lambda _: refused(lambda: _core.fingerprint(SPARSE)),
    "error: entries of no dictionary": lambda _: refused(lambda: _core.Entries([{"a": []}, 7], bytes)),
    "error: entries without a type": lambda _: refused(lambda: _core.Entries([], None)),  # type: ignore[arg-type]
    "error: held by no place": lambda _: refused(lambda: entries().held(3)),
    "error: values of no places": lambda _: refused(lambda: entries().values(2, 4, set(), set())),
    "error: values without a set": lambda _: refused(lambda: entries().values(0, 1, 7, 7)),  # type: ignore[arg-type]
    "error: rule": lambda _: refused(lambda: _core.rule_text("x")),
    **{f"error: {name}": lambda _, call=call: refused(call) for name, call in OPTIM_ERRORS.items()},
    **CARD_ERRORS,
    **RECORD_ERRORS,
}

ALL_TESTS = LEAK_TESTS | EXTRA_TESTS


def public_names() -> set[str]:
    """Public functions and types of `_core`, and the public members of the types."""
    names: set[str] = set()
    for name, value in vars(_core).items():
        if name.startswith("_") or isinstance(value, (int, tuple)):  # a constant has nothing to run
            continue
        names.add(name)
        if isinstance(value, type):
            names |= {f"{name}.{member}" for member in vars(value) if not member.startswith("_")}
    return names


def test_every_public_name_has_an_entry() -> None:
    assert public_names() == set(LEAK_TESTS)


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library."""

    _fields_ = (
        ("before", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),  # bytes in blocks of their own
        ("between", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),  # bytes in use in the arenas
        ("after", ctypes.c_size_t * 2),
    )


try:
    _mallinfo2 = ctypes.CDLL(None).mallinfo2
    _mallinfo2.restype = _MallInfo
except (AttributeError, OSError):
    _mallinfo2 = None

NATIVE_BYTES = RESIDENT_BYTES if _mallinfo2 is None else HEAP_BYTES


def native_bytes() -> int:
    """Bytes in use in the C library's heap, or the resident set."""
    if _mallinfo2 is not None:
        info = _mallinfo2()
        return int(info.uordblks + info.hblkhd)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True, scope="module")
def _closes() -> Iterator[None]:
    yield
    close_recorder()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the sample graph in the file `graph`."""
    GRAPH.save(tmp_path / "graph")
    return tmp_path


def growth(run: Callable[[Path], object], folder: Path) -> tuple[int, int]:
    """Least growth over three loops: a leak shows in each, what the test runner allocates in one."""
    loops = [_growth_once(run, folder)]
    while len(loops) < 3 and (loops[-1][0] >= BLOCKS or loops[-1][1] >= NATIVE_BYTES):
        loops.append(_growth_once(run, folder))
    return min(blocks for blocks, _ in loops), min(native for _, native in loops)


def _growth_once(run: Callable[[Path], object], folder: Path) -> tuple[int, int]:
    """Python blocks and native bytes by which `ROUNDS` rounds grew the process."""
    for _ in range(WARM_UP_ROUNDS):
        run(folder)
    gc.collect()
    blocks, native = sys.getallocatedblocks(), native_bytes()
    for _ in range(ROUNDS):
        run(folder)
    gc.collect()
    return sys.getallocatedblocks() - blocks, native_bytes() - native


@pytest.mark.long
@linux
@pytest.mark.parametrize("name", ALL_TESTS)
def test_memory_does_not_grow(name: str, folder: Path) -> None:
    blocks, native = growth(ALL_TESTS[name], folder)
    assert blocks < BLOCKS, f"{blocks / ROUNDS:.2f} Python blocks per round"
    assert native < NATIVE_BYTES, f"{native / ROUNDS:.0f} bytes per round"


@pytest.mark.parametrize("name", ALL_TESTS)
def test_arguments_keep_their_reference_counts(name: str, folder: Path) -> None:
    watched: list[object] = [GRAPH, PLAN, TEXT, PLAN_TEXT, SIM, RATES, folder, _core.Graph, _core.Plan]
    watched += [TypeError, ValueError, RuntimeError, OSError, FileNotFoundError, MemScaleError]
    watched = [item for item in watched if sys.getrefcount(item) < 1 << 30]  # the others are immortal
    ALL_TESTS[name](folder)
    gc.collect()  # an earlier test that failed may hold some of them in a cycle
    before = [sys.getrefcount(item) for item in watched]
    for _ in range(50):
        ALL_TESTS[name](folder)
    gc.collect()
    assert [sys.getrefcount(item) for item in watched] == before


@linux
def test_the_instruments_see_a_leak(folder: Path) -> None:
    kept: list[object] = []
    blocks, _ = growth(lambda _: kept.append(object()), folder)
    assert blocks >= ROUNDS
    _, native = growth(lambda _: kept.append(chain()), folder)
    assert native > RESIDENT_BYTES >= NATIVE_BYTES
