# SPDX-License-Identifier: Apache-2.0
"""Which failure raises what, and that `.status` says which it was."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core_samples import chain
from memscale import _core
from memscale.errors import MemScaleError


def refused(action: Callable[[], object], kind: type[Exception], status: str) -> Exception:
    """Runs `action`, which must raise exactly `kind` with `status`."""
    with pytest.raises(kind) as caught:
        action()
    assert caught.value.status == status  # type: ignore[attr-defined]
    assert str(caught.value)
    return caught.value


def test_malformed_text_is_a_value_error_that_names_the_line() -> None:
    text = chain().to_text().splitlines(keepends=True)
    broken = "".join([*text[:3], "what is this\n", *text[3:]])
    error = refused(lambda: _core.Graph.parse(broken), ValueError, "EFORMAT")
    assert "4" in str(error)
    refused(lambda: _core.Graph.parse(b""), ValueError, "EFORMAT")
    refused(lambda: _core.Graph.parse(b"\x00\xff"), ValueError, "EFORMAT")
    refused(lambda: _core.Plan.parse("nonsense"), ValueError, "EFORMAT")


def test_an_unknown_version_has_its_own_status() -> None:
    first, rest = chain().to_text().split("\n", 1)
    words = first.split(" ")
    newer = " ".join([*words[:-1], "999"]) + "\n" + rest
    refused(lambda: _core.Graph.parse(newer), ValueError, "EVERSION")


def test_contradicting_records_are_refused() -> None:
    g = _core.Graph()
    refused(lambda: g.add_module("a", "A", parent=3), ValueError, "EINVAL")
    refused(lambda: g.begin_call(0), ValueError, "EINVAL")
    refused(lambda: g.add_input(0, 0), ValueError, "EINVAL")
    refused(lambda: g.end_buffer(9), ValueError, "EINVAL")
    refused(lambda: g.add_op("bad\nname", 1, 1), ValueError, "EINVAL")


def test_sums_beyond_the_limit_overflow() -> None:
    g = _core.Graph()
    g.add_resident(2**62 - 1, _core.CATEGORY_PARAMETER)
    refused(lambda: g.add_resident(2**62, _core.CATEGORY_PARAMETER), ValueError, "EOVERFLOW")


def test_files_raise_os_errors_of_the_right_kind(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    error = refused(lambda: _core.Graph.load(missing), FileNotFoundError, "EIO")
    assert str(missing) in str(error)
    assert isinstance(error, OSError) and error.errno == errno.ENOENT
    refused(lambda: chain().save(missing / "x"), OSError, "EIO")
    with pytest.raises(ValueError, match="null"):
        _core.Graph.load("a\0b")


def test_order_of_calls_is_a_runtime_error() -> None:
    g = chain(finish=False)
    for action in (
        lambda: _core.decide(g, 1),
        lambda: _core.frontier(g),
        lambda: _core.replay(g),
        g.to_text,
    ):
        refused(action, RuntimeError, "ESTATE")


OUT_OF_MEMORY = """
import importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("memscale._core", sys.argv[1])
_core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_core)
assert not any(name.split(".")[0] in ("torch", "numpy", "memscale") for name in sys.modules)
g = _core.Graph()
limits = resource.getrlimit(resource.RLIMIT_AS)
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), limits[1]))
try:
    while True:
        g.add_op("x", 1, 1)
except MemoryError as error:
    status, count = error.status, g.op_count
resource.setrlimit(resource.RLIMIT_AS, limits)
assert status == "ENOMEM", status
assert count > 0 and g.add_op("x", 1, 1) == count
g.finish()
print("survived")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space as Linux does")
def test_host_memory_is_a_memory_error_and_the_extension_stands_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", OUT_OF_MEMORY, _core.__file__],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "survived\n", done.stderr
    assert Path(_core.__file__).name == "_core.abi3.so"


def test_what_python_has_no_type_for_is_our_own() -> None:
    error = refused(
        lambda: _core.replay(chain(), sim={"kind": "cuda", "capacity_bytes": 1}), MemScaleError, "EDEVMEM"
    )
    assert not isinstance(error, (ValueError, MemoryError, RuntimeError, OSError))


ANY_GRAPH: Any = chain()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda g: g.add_op(), "missing required argument 'name'"),
        (lambda g: g.add_op("x"), "missing required argument 'flops'"),
        (lambda g: g.add_op("x", 1, 2, 3, 4, 5, 6), "at most 6 positional"),
        (lambda g: g.add_op("x", 1, 2, size=3), "unexpected keyword argument 'size'"),
        (lambda g: g.add_op("x", 1, 2, flops=3), "multiple values for argument 'flops'"),
        (lambda g: g.add_op(1, 1, 2), "name must be a str, not <class 'int'>"),
        (lambda g: g.add_op("x", "1", 2), "flops must be an int, not <class 'str'>"),
        (lambda g: g.add_op("x", 1.0, 2), "flops must be an int, not <class 'float'>"),
        (lambda g: g.add_op("x", None, 2), "flops must be an int"),
        (lambda g: _core.decide(g, 1, {}), "at most 2 positional"),
        (lambda g: _core.decide(1, 1), "graph must be a memscale._core.Graph"),
        (lambda g: _core.decide(g, 1, force=1), "force must be a bool"),
        (lambda g: _core.decide(g, 1, sim=7), "sim must be a dict"),
        (lambda g: _core.decide(g, 1, sim={"kind": 7}), "kind must be a str"),
        (lambda g: _core.replay(g, g), "plan must be a memscale._core.Plan"),
        (lambda g: _core.Graph.parse(7), "text must be a str or bytes"),
        (lambda g: _core.Graph.load(7), "str, bytes"),
    ],
)
def test_wrong_types_are_type_errors_that_name_the_argument(
    action: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(TypeError) as caught:
        action(ANY_GRAPH)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda g: g.add_op("x", -1, 2), "flops must be in 0 to 18446744073709551615, not -1"),
        (lambda g: g.add_op("x", 2**64, 2), "flops must be in"),
        (lambda g: g.add_op("x", 1, 2, flags=256), "flags must be in 0 to 255, not 256"),
        (lambda g: g.add_op("x\0y", 1, 2), "name must not contain a null character"),
        (lambda g: g.add_buffer(1, 8), "category must be in 0 to 7, not 8"),
        (lambda g: g.set_phase(3), "phase must be in 0 to 2, not 3"),
        (lambda g: g.add_save(2**32 - 1), "buffer must be in 0 to 4294967294"),
        (lambda g: g.add_module("a", "A", -2), "parent must be -1 or an id, not -2"),
        (lambda g: _core.decide(g, -1), "budget_bytes must be in"),
        (lambda g: _core.decide(g, 1, sim={"kid": "host"}), "sim has no key 'kid'"),
        (lambda g: _core.decide(g, 1, sim={3: "host"}), "sim has no key 3"),
        (lambda g: _core.decide(g, 1, sim={"kind": "tpu"}), "kind must be 'host' or 'cuda', not 'tpu'"),
        (lambda g: _core.decide(g, 1, rates={"flops": 1}), "rates has no key 'flops'"),
        (lambda g: _core.decide(g, 1, rates={"flops_per_us": 0}), "flops_per_us must be above 0"),
        (lambda g: _core.decide(g, 1, rates={"moved_bytes_per_us": {"move": 0}}), "move must be above 0"),
        (
            lambda g: _core.frontier(g, rates={"flops_per_us": {"moves": 1}}),
            "flops_per_us has no key 'moves'",
        ),
        (lambda g: _core.decide(g, 1, rates={"intercept_ns": 0}), "intercept_ns must be above 0"),
        (lambda g: _core.op_times_ns(g, {"launch_ns": 0}), "launch_ns must be above 0"),
        (lambda g: _core.op_times_ns(g, {"recompute_ns": -(2**63) - 1}), "recompute_ns must be in"),
    ],
)
def test_values_out_of_range_name_argument_and_range(action: Callable[[Any], object], message: str) -> None:
    error = refused(lambda: action(ANY_GRAPH), ValueError, "EINVAL")
    assert message in str(error)


def test_anything_with_index_is_an_int() -> None:
    class Index:
        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

    g = _core.Graph()
    g.add_op("x", Index(5), Index(6))
    assert g.ops()[0][4:6] == (5, 6)
    with pytest.raises(ValueError, match="flops"):
        g.add_op("x", Index(-5), 6)


def test_bytes_that_are_no_utf8_survive() -> None:
    text = chain().to_text().encode().replace(b"aten::sum", b"aten::s\xffm")
    g = _core.Graph.parse(text)
    assert "aten::s\udcffm" in [op[0] for op in g.ops()]
    assert _core.Graph.parse(g.to_text()).digest == g.digest


def test_lone_surrogates_are_refused_by_the_builder() -> None:
    with pytest.raises(ValueError):
        _core.Graph().add_op("\ud800", 1, 1)
