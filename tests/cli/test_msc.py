# SPDX-License-Identifier: Apache-2.0
"""The ``msc`` tool from outside: output, messages and exit codes.

The environment variable ``MSC`` names the program. There is no skipping: without it the tests fail.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
BLOCKS = 4
USAGE, OVER_BUDGET, IO_ERROR = 2, 1, 3


def msc(*args: object) -> subprocess.CompletedProcess[str]:
    """Runs the tool and returns what it said."""
    program = os.environ.get("MSC")
    assert program, "set MSC to the path of the msc program"
    return subprocess.run([program, *map(str, args)], capture_output=True, text=True, timeout=60, check=False)


def msc_json(*args: object, status: int = 0) -> dict[str, Any]:
    """Runs the tool with ``--json`` and returns the object that it printed."""
    done = msc(*args, "--json")
    assert done.returncode == status, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def assert_refused(done: subprocess.CompletedProcess[str], status: int, *texts: str) -> None:
    """Requires an exit code, nothing on stdout, and one line on stderr that holds every text."""
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("msc: ")
    assert done.stderr.count("\n") == 1
    for text in texts:
        assert text in done.stderr


def block_graph(parts: bool = False) -> str:
    """Text of a step of four equal blocks, each of which saves its input and a large hidden tensor.

    Block ``i`` runs operations ``2i`` (input to hidden) and ``2i + 1`` (hidden to output); backward runs
    two operations per block in the opposite order.

    Args:
        parts: Each block's first operation runs inside a module of its own, ``blocks.i.up``.
    """
    ops = 4 * BLOCKS
    per_block = 2 if parts else 1
    modules, calls = ["module - 1 0000000000000000 0 ", "type Model"], []
    buffers, saves, inputs = [f"buffer {8 * MIB} 4 1 0 {ops + 1}"], [], []
    op_lines = []
    for i in range(BLOCKS):
        module, call = 1 + per_block * i, per_block * i
        modules += [f"module 0 0 0000000000000001 0 blocks.{i}", "type Block"]
        calls.append(f"call {module} - {2 * i} {2 * i + 2}")
        inputs.append(f"input {call} {2 * i}")
        if parts:
            modules += [f"module {module} 0 0000000000000002 0 blocks.{i}.up", "type Up"]
            calls.append(f"call {module + 1} {call} {2 * i} {2 * i + 1}")
            inputs.append(f"input {call + 1} {2 * i}")
        inner = call + per_block - 1
        op_lines.append(f"op {inner} 0 0 200000000 {2 * 32 * MIB} 0 up")
        op_lines.append(f"op {call} 0 0 200000000 {2 * 8 * MIB} 0 down")
        buffers.append(f"buffer {32 * MIB} 5 0 {2 * i} {2 * i + 2}")
        buffers.append(f"buffer {8 * MIB} 5 0 {2 * i + 1} {min(2 * i + 4, 2 * BLOCKS + 1)}")
        late = ops - 2 * i
        saves.append(f"save {2 * i} {inner} {2 * i} {late - 1} {late}")
        saves.append(f"save {2 * i + 1} {call} {2 * i + 1} {late - 2} {late - 1}")
    for at in range(2 * BLOCKS, ops, 2):
        op_lines.append(f"op - 1 0 200000000 {2 * 32 * MIB} 0 down_backward")
        op_lines.append(f"op - 1 0 200000000 {2 * 8 * MIB} 0 up_backward")
        buffers.append(f"buffer {32 * MIB} 6 0 {at} {at + 2}")
        buffers.append(f"buffer {8 * MIB} 6 0 {at + 1} {min(at + 3, ops + 1)}")
    lists = (calls, op_lines, buffers, saves, inputs)
    counts = " ".join(str(len(records)) for records in lists)
    lines = ["memscale-graph 1", f"counts {len(modules) // 2} {counts} 0", *modules]
    return "\n".join([*lines, *(line for records in lists for line in records), "end"]) + "\n"


def dear_graph() -> str:
    """Text of a step of four equal blocks that are worth a selective checkpoint.

    Block ``i`` runs ``3i`` (dear, makes 8 MiB), ``3i + 1`` (cheap, makes 32 MiB) and ``3i + 2`` (its output).
    It saves its input and the results of the first two. Backward of a block uses the saves last first.
    """
    ops = 6 * BLOCKS
    modules, calls, op_lines, saves, inputs = (
        ["module - 1 0000000000000000 0 ", "type Model"], [], [], [], [],
    )  # fmt: skip
    buffers = [f"buffer {8 * MIB} 4 1 0 {ops + 1}"]
    for i in range(BLOCKS):
        first, late = 3 * i, ops - 3 * i
        modules += [f"module 0 0 0000000000000001 0 blocks.{i}", "type Block"]
        calls.append(f"call {1 + i} - {first} {first + 3}")
        inputs.append(f"input {i} {3 * i}")
        for name, flops, size in (("dear", 10**10, 8), ("cheap", 1000, 32), ("dear", 10**10, 8)):
            op_lines.append(f"op {i} 0 0 {flops} {size * MIB} 0 {name}")
        buffers.append(f"buffer {8 * MIB} 5 0 {first} {first + 2}")
        buffers.append(f"buffer {32 * MIB} 5 0 {first + 1} {first + 3}")
        buffers.append(f"buffer {8 * MIB} 5 0 {first + 2} {min(first + 4, 3 * BLOCKS + 1)}")
        for which, size in enumerate((3 * i, 3 * i + 1, 3 * i + 2)):
            saves.append(f"save {size} {i} {first + which} {late - which - 1} {late - which}")
    for at in range(3 * BLOCKS, ops):
        op_lines.append(f"op - 1 0 200000000 {8 * MIB} 0 backward")
        buffers.append(f"buffer {8 * MIB} 6 0 {at} {min(at + 2, ops + 1)}")
    lists = (calls, op_lines, buffers, saves, inputs)
    counts = " ".join(str(len(records)) for records in lists)
    lines = ["memscale-graph 1", f"counts {len(modules) // 2} {counts} 0", *modules]
    return "\n".join([*lines, *(line for records in lists for line in records), "end"]) + "\n"


def chain_graph(layers: int = 6) -> str:
    """Text of a step of layers that run one after another and save what they make, as ReLU does.

    Layer ``i`` runs operation ``i``. What it makes is the input of the next. Neighbours that are checkpointed
    one by one hold what passes between them; as one region they hold the input of the first only.
    """
    ops = 2 * layers
    modules = [
        "module - 1 0000000000000000 0 ",
        "type Model",
        "module 0 64 0000000000000000 0 layers",
        "type Seq",
    ]
    calls, inputs, op_lines, saves = [f"call 1 - 0 {layers}"], ["input 0 0"], [], []
    buffers = [f"buffer {8 * MIB} 4 1 0 {ops + 1}"]
    for i in range(layers):
        modules += [f"module 1 0 0000000000000001 0 layers.{i}", "type ReLU"]
        calls.append(f"call {2 + i} 0 {i} {i + 1}")
        inputs.append(f"input {i + 1} {i}")
        op_lines.append(f"op {i + 1} 0 0 1000 {16 * MIB} 0 relu")
        buffers.append(f"buffer {8 * MIB} 5 0 {i} {min(i + 2, layers + 1)}")
        saves.append(f"save {i + 1} {i + 1} {i} {ops - i - 1} {ops - i}")
    for at in range(layers, ops):
        op_lines.append(f"op - 1 0 1000 {16 * MIB} 0 backward")
        buffers.append(f"buffer {8 * MIB} 6 0 {at} {min(at + 2, ops + 1)}")
    lists = (calls, op_lines, buffers, saves, inputs)
    counts = " ".join(str(len(records)) for records in lists)
    lines = ["memscale-graph 1", f"counts {len(modules) // 2} {counts} 0", *modules]
    return "\n".join([*lines, *(line for records in lists for line in records), "end"]) + "\n"


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A valid graph file."""
    path = tmp_path / "step.graph"
    path.write_text(block_graph())
    return path


def fnv1a(data: bytes) -> str:
    """The digest of a canonical text, computed without the library."""
    digest = 14695981039346656037
    for byte in data:
        digest = ((digest ^ byte) * 1099511628211) % (1 << 64)
    return f"{digest:016x}"


# ---- good input ----------------------------------------------------------------------------------


def test_inspect_counts_and_digest(graph: Path) -> None:
    result = msc_json("inspect", graph)
    assert result["digest"] == fnv1a(graph.read_bytes())
    assert result["counts"]["operations"] == 4 * BLOCKS
    assert result["counts"]["saves"] == 2 * BLOCKS
    assert result["phases"]["forward"] == {"operations": 2 * BLOCKS, "flops": 2 * BLOCKS * 200000000}
    assert result["categories"]["activations"]["size_bytes"] == BLOCKS * 40 * MIB
    assert result["categories"]["inputs"] == {"buffers": 1, "resident": 1, "size_bytes": 8 * MIB}


def test_inspect_text(graph: Path) -> None:
    done = msc("inspect", graph)
    assert done.returncode == 0
    assert done.stderr == ""
    assert f"Graph {fnv1a(graph.read_bytes())}" in done.stdout
    assert "160.00 MiB" in done.stdout


def test_replay_plain_peak(graph: Path) -> None:
    result = msc_json("replay", graph)
    # Backward of the last block: every save, the last output, and the first temporary.
    assert result["peak_bytes"] == (8 + BLOCKS * 40 + 32) * MIB
    assert result["peak_bytes"] == result["allocated_peak_bytes"]
    assert sum(result["by_category_bytes"].values()) == result["peak_bytes"]
    assert result["planned"] is False
    assert result["peak_op"] == 2 * BLOCKS
    assert result["peak_op_name"] == "down_backward"


def test_replay_on_cuda_reserves_more(graph: Path) -> None:
    host = msc_json("replay", graph)
    cuda = msc_json("replay", graph, "--device", "cuda")
    assert cuda["device"] == "cuda"
    assert cuda["reserved_peak_bytes"] >= host["allocated_peak_bytes"]
    assert cuda["peak_bytes"] == cuda["reserved_peak_bytes"]


def test_plan_with_room_keeps_everything(graph: Path) -> None:
    plain = msc_json("replay", graph)["peak_bytes"]
    plan = msc_json("plan", graph, "--budget", plain)
    assert plan["fits"] is True
    assert plan["peak_bytes"] == plan["plain_peak_bytes"] == plain
    assert {choice["action"] for choice in plan["choices"]} == {"keep"}


def test_plan_under_pressure_replays_to_its_peak(graph: Path, tmp_path: Path) -> None:
    plan_path = tmp_path / "step.plan"
    plan = msc_json("plan", graph, "--budget", "150MiB", "--output", plan_path)
    assert plan["fits"] is True
    assert plan["peak_bytes"] <= 150 * MIB < plan["plain_peak_bytes"]
    assert plan["step_ns"] > plan["plain_step_ns"]
    assert plan["graph_digest"] == fnv1a(graph.read_bytes())
    assert plan["plan_digest"] == fnv1a(plan_path.read_bytes())
    chosen = [choice for choice in plan["choices"] if choice["action"] == "checkpoint"]
    assert chosen
    assert {choice["rule"] for choice in chosen} == {"chosen"}
    replay = msc_json("replay", graph, "--plan", plan_path)
    assert replay["planned"] is True
    assert replay["peak_bytes"] == plan["peak_bytes"]
    assert replay["peak_op"] == plan["peak_op"]


def test_plan_text(graph: Path) -> None:
    done = msc("plan", graph, "--budget", "150MiB")
    assert done.returncode == 0
    assert "fits the budget" in done.stdout
    assert "150.00 MiB  (157286400 bytes)" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("blocks.")]
    assert len(rows) == BLOCKS
    assert any("checkpoint" in row and "cheapest way found" in row for row in rows)


def test_kept_operations_stand_by_name(graph: Path) -> None:
    graph.write_text(dear_graph())
    choices = msc_json("plan", graph, "--budget", "120MiB")["choices"]
    selective = [choice for choice in choices if choice["action"] == "selective"]
    assert selective
    for choice in selective:
        assert choice["kept"] == [{"offset": 0, "name": "dear", "ordinal": 0}]
        assert choice["joined"] is False
    assert all(choice["kept"] == [] for choice in choices if choice["action"] != "selective")
    lines = msc("plan", graph, "--budget", "120MiB").stdout.splitlines()
    for choice in selective:
        row = next(number for number, line in enumerate(lines) if line.startswith(choice["path"]))
        assert " selective " in lines[row]
        assert lines[row + 1] == "    keeps dear#0"


def test_offloads_stand_with_what_they_move(graph: Path, tmp_path: Path) -> None:
    plan_path = tmp_path / "step.plan"
    args = ("plan", graph, "--budget", "150MiB", "--offload", "1TB")
    plan = msc_json(*args, "--output", plan_path)
    moved = [choice for choice in plan["choices"] if choice["action"] == "offload"]
    assert moved and all(choice["moved"] and choice["moved_bytes"] > 0 for choice in moved)
    assert plan["away_peak_bytes"] > 0
    assert msc_json("replay", graph, "--plan", plan_path)["peak_bytes"] == plan["peak_bytes"]
    text = msc(*args).stdout
    assert "most bytes away" in text and "    offloads what it saves: " in text
    assert "away" not in msc("plan", graph, "--budget", "150MiB").stdout
    assert_refused(msc("plan", graph, "--budget", "1GB", "--offload", "5kB"), 2, "--offload 5kB", "12GB")
    assert_refused(msc("replay", graph, "--offload", "1GB"), 2, "does not take --offload")


def test_a_region_of_several_modules_has_its_numbers_once(graph: Path) -> None:
    graph.write_text(chain_graph())
    choices = msc_json("plan", graph, "--budget", "48MiB")["choices"]
    joined = [choice for choice in choices if choice["joined"]]
    assert joined
    assert {choice["action"] for choice in joined} == {"checkpoint"}
    lines = msc("plan", graph, "--budget", "48MiB").stdout.splitlines()
    for choice in joined:
        row = next(line for line in lines if line.startswith(f"{choice['path']} "))
        assert row.split() == f"{choice['path']} joined in one region with the module before it".split()


def test_the_other_way_round_is_what_a_replay_without_the_choice_gives(graph: Path, tmp_path: Path) -> None:
    plan_path = tmp_path / "step.plan"
    plan = msc_json("plan", graph, "--budget", "150MiB", "--output", plan_path)
    chosen = next(choice for choice in plan["choices"] if choice["action"] == "checkpoint")
    lines = plan_path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"choice {chosen['module']} checkpoint "))
    lines[at] = lines[at].replace("checkpoint chosen", "keep not-needed")
    plan_path.write_text("\n".join(lines) + "\n")
    assert chosen["other_peak_bytes"] == msc_json("replay", graph, "--plan", plan_path)["peak_bytes"]
    assert 0 < chosen["other_step_ns"] < plan["step_ns"]
    assert "    kept instead: peak " in msc("plan", graph, "--budget", "150MiB").stdout


def test_modules_inside_a_checkpoint_are_folded(graph: Path) -> None:
    graph.write_text(block_graph(parts=True))
    folded = msc("plan", graph, "--budget", "150MiB").stdout.splitlines()
    listed = msc("plan", graph, "--budget", "150MiB", "--all").stdout.splitlines()
    checkpointed = [line for line in folded if " checkpoint " in line]
    assert checkpointed
    for line in checkpointed:
        part = line.split()[0] + ".up "
        assert line.endswith("[+ 1 inside]")
        assert not any(row.startswith(part) for row in folded)
        assert any(row.startswith(part) and " keep " in row for row in listed)


def test_plan_is_the_same_twice(graph: Path) -> None:
    first = msc("plan", graph, "--budget", "150MiB", "--json")
    assert first.stdout == msc("plan", graph, "--budget", "150MiB", "--json").stdout


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1000000000", 10**9), ("1GB", 10**9), ("1GiB", 1 << 30), ("1.5gib", 3 << 29), ("512 MiB", 1 << 29)],
)
def test_sizes(graph: Path, text: str, size_bytes: int) -> None:
    assert msc_json("plan", graph, "--budget", text)["budget_bytes"] == size_bytes


def test_version_and_help() -> None:
    assert msc("--version").stdout.startswith("msc 0.")
    for args in (["--help"], ["plan", "--help"]):
        done = msc(*args)
        assert done.returncode == 0
        assert done.stdout.startswith("usage: msc plan")


# ---- a budget that cannot be met -----------------------------------------------------------------


def test_unreachable_budget_prints_smallest_plan(graph: Path) -> None:
    plan = msc_json("plan", graph, "--budget", "1MiB", status=OVER_BUDGET)
    assert plan["fits"] is False
    assert plan["peak_bytes"] == plan["smallest_peak_bytes"] > MIB
    done = msc("plan", graph, "--budget", "1MiB")
    assert done.returncode == OVER_BUDGET
    assert "DOES NOT FIT" in done.stdout
    assert f"({plan['peak_bytes'] - MIB} bytes)" in next(
        line for line in done.stdout.splitlines() if line.startswith("  short by ")
    )


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["inspect"], ["replay"], ["plan", "--budget", "1GiB"]])
def test_corrupt_file(graph: Path, command: list[str]) -> None:
    text = graph.read_text()
    line = text.splitlines().index("buffer 33554432 5 0 2 4") + 1
    graph.write_text(text.replace("buffer 33554432 5 0 2 4", "buffer 33554432 5 0 2 1"))
    assert_refused(msc(*command, graph), USAGE, f"{graph}: graph, line {line}: buffer 3: begin <= end")


def test_truncated_file(graph: Path) -> None:
    graph.write_text(graph.read_text()[:-40])
    assert_refused(msc("inspect", graph), USAGE, str(graph), "graph, line ")


def test_other_version(graph: Path) -> None:
    graph.write_text(re.sub(r"^memscale-graph \d+", "memscale-graph 99", graph.read_text()))
    assert_refused(msc("inspect", graph), USAGE, "line 1: a version other than")


def test_file_that_is_no_graph(tmp_path: Path) -> None:
    path = tmp_path / "noise"
    path.write_bytes(bytes(range(256)) * 64)
    assert_refused(msc("replay", path), USAGE, str(path), "line 1")


def test_plan_for_another_graph(graph: Path, tmp_path: Path) -> None:
    plan_path = tmp_path / "step.plan"
    assert msc("plan", graph, "--budget", "1GiB", "--output", plan_path).returncode == 0
    graph.write_text(graph.read_text().replace("type Model", "type Other"))
    assert_refused(msc("replay", graph, "--plan", plan_path), USAGE, str(plan_path), "digests")


def test_corrupt_plan(graph: Path, tmp_path: Path) -> None:
    plan_path = tmp_path / "step.plan"
    plan_path.write_text("memscale-plan 4\ngraph xyz\n")
    assert_refused(msc("replay", graph, "--plan", plan_path), USAGE, str(plan_path), "plan, line 2")


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "nothing.graph"
    assert_refused(msc("inspect", path), IO_ERROR, f"msc: {path}: ", "No such file")


def test_missing_plan_and_unwritable_output(graph: Path, tmp_path: Path) -> None:
    assert_refused(msc("replay", graph, "--plan", tmp_path / "none"), IO_ERROR, "none: cannot open it")
    done = msc("plan", graph, "--budget", "1GiB", "--output", tmp_path / "no" / "where")
    assert done.returncode == IO_ERROR
    assert "cannot write the plan" in done.stderr


def test_full_disk(graph: Path) -> None:
    with open("/dev/full", "w") as full:
        program = os.environ["MSC"]
        done = subprocess.run([program, "inspect", graph], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == IO_ERROR
    assert b"cannot write to standard output" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8G",
        "GiB",
        "-1",
        "0",
        "0GiB",
        "1e9",
        "8 G B",
        "1.GiB",
        "1.1234567GiB",
        "0x10",
        "99999999TiB",
        "5000000000000000000",
    ],
)
def test_bad_budget_text(graph: Path, text: str) -> None:
    assert_refused(msc("plan", graph, "--budget", text), USAGE, f"--budget {text} is not a size")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", "x"], "--budget is missing"),
        (["plan", "--budget", "1GB"], "exactly one graph file"),
        (["inspect", "x", "y"], "exactly one graph file"),
        (["inspect", "x", "--budget", "1GB"], "inspect does not take --budget"),
        (["replay", "x", "--plan"], "--plan needs a value"),
        (["replay", "x", "--device", "tpu"], "--device tpu is unknown"),
        (["replay", "x", "--nonsense"], "option --nonsense is unknown"),
        (["replay", "x", "-q"], "option -q is unknown"),
        (["replay", "x", "--json=1"], "--json takes no value"),
        (["explode"], "there is no command explode"),
    ],
)
def test_bad_usage(args: list[str], message: str) -> None:
    assert_refused(msc(*args), USAGE, message)


def test_no_command_prints_usage() -> None:
    done = msc()
    assert done.returncode == USAGE
    assert done.stderr.startswith("usage: msc plan")


def test_name_that_is_not_utf8(graph: Path) -> None:
    graph.write_bytes(graph.read_bytes().replace(b"0 down_backward", b"0 \xff\xfe"))
    assert msc_json("replay", graph)["peak_op_name"] == "??"
