# SPDX-License-Identifier: Apache-2.0
"""The command line's words, and how fast and quietly the program starts."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time

import pytest

from memscale.cli.arguments import DTYPES, OPTIMIZERS, TASKS, parse
from memscale.cli.problems import UsageError, one_line
from memscale.cli.progress import Progress
from memscale.cli.text import safe, table


def program(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = ["-c", code] if code else ["-m", "memscale"]
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_numbers_and_names_are_lists_without_repetition() -> None:
    options = parse(["estimate", "m", "--batch", "1, 4,1", "--seq", "128", "--gpu", "RTX 3090, 24GiB"])
    assert options.batches == (1, 4)
    assert options.lengths == (128,)
    assert options.devices == ("RTX 3090", "24GiB")


def test_defaults_are_left_open() -> None:
    options = parse(["estimate", "m"])
    assert (options.batches, options.lengths, options.devices, options.dtype) == ((), (), (), None)
    assert not options.as_json
    assert not options.verbose


def test_sizes_are_bytes() -> None:
    assert parse(["estimate", "m", "--budget", "8GiB"]).budget_bytes == 8 << 30


def test_report_takes_one_case() -> None:
    options = parse(["report", "m", "--batch", "2", "-o", "x.html", "--trace", "t.json", "--device", "cpu"])
    assert (options.batches, options.output, options.trace, options.devices) == (
        (2,),
        "x.html",
        "t.json",
        ("cpu",),
    )
    with pytest.raises(UsageError, match="--batch"):
        parse(["report", "m", "--batch", "2,4"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "COMMAND"),
        (["frobnicate"], "frobnicate"),
        (["estimate"], "MODEL"),
        (["estimate", "m", "--batch", "0"], "'0' is not a number from 1"),
        (["estimate", "m", "--batch", "-1"], "--batch"),
        (["estimate", "m", "--batch", "1e3"], "1e3"),
        (["estimate", "m", "--batch", "٣"], "is not a number"),
        (["estimate", "m", "--batch", "1,,2"], "empty entry"),
        (["estimate", "m", "--seq", "9" * 400], "is not a number"),
        (["estimate", "m", "--budget", "8G"], "write GB"),
        (["estimate", "m", "--budget", "0"], "at least 1 byte"),
        (["estimate", "m", "--dtype", "fp8"], "fp8"),
        (["estimate", "m", "--optimizer", "magic"], "magic"),
        (["estimate", "m", "--mode", "fast"], "fast"),
        (["estimate", "m", "--task", "juggling"], "juggling"),
        (["estimate", "m", "--gpu", "A100", "--device", "cpu"], "not allowed with"),
        (["estimate", "m", "--device", "tpu"], "tpu"),
        (["estimate", "m", "--batch", ",".join(map(str, range(1, 400)))], "too many"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(words)


def test_choices_are_what_is_implemented() -> None:
    from torch import nn

    from memscale.cli import hf, workload
    from memscale.cli.optimizers import make_optimizers

    assert tuple(hf.TASKS) == TASKS
    model = nn.Linear(2, 2)
    for name in OPTIMIZERS:
        assert make_optimizers(name, model)
    assert set(workload.WEIGHTS) | set(workload.AUTOCAST) == set(DTYPES)


def test_help_is_fast_because_it_imports_nothing_slow() -> None:
    code = (
        "import sys\nfrom memscale.cli.main import main\n"
        "try:\n    main(['estimate', '--help'])\nexcept SystemExit: pass\n"
        "slow = {'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    done = program(code=code)
    assert done.returncode == 0, done.stderr
    assert "--gpu" in done.stdout


def test_module_and_version() -> None:
    from memscale import __version__

    done = program("--version")
    assert (done.returncode, done.stdout) == (0, f"memscale {__version__}\n")


def test_a_mistake_is_one_line_and_no_traceback() -> None:
    done = program("estimate", "gpt2", "--batch", "x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    debugged = program("estimate", "gpt2", "--batch", "x", "--debug")
    assert debugged.returncode == 1
    assert "Traceback" in debugged.stderr


@pytest.mark.parametrize("arguments", [("env",), ("env", "--nonsense")])
def test_a_closed_standard_error_ends_nothing(arguments: tuple[str, ...]) -> None:
    line = ["sh", "-c", 'exec "$0" -m memscale "$@" 2>&-', sys.executable, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (0 if arguments == ("env",) else 2)
    assert ("memscale" in done.stdout) == (arguments == ("env",))


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}])
def test_where_there_is_only_ascii_signs_have_stand_ins(locale: dict[str, str]) -> None:
    code = "from memscale.cli import terminal\nterminal.prepare()\nprint('2 × 3 …', '█' * 2, 'ü')"
    settings = {**os.environ, **locale}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=settings
    )
    assert done.stdout == "2 x 3 ~ ## ?\n", done.stderr


def test_lines_end_where_the_terminal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("12.00 MiB", "a.very.long.path.of.a.module.somewhere", "x" * 40), ("1.00 MiB", "short", "y")]
    words = "note    " + "some words " * 12
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, table(rows, right=(0,)).splitlines())) == 93
    assert safe(words) == words
    monkeypatch.setenv("COLUMNS", "60")
    lines = table(rows, right=(0,)).splitlines()
    assert max(map(len, lines)) == 60
    assert lines[0].startswith("  12.00 MiB  a.very")
    assert "…" in lines[0]
    assert table(rows, right=(0,), fixed=(1, 2)).splitlines()[0].endswith("x" * 40)
    broken = safe(words).splitlines()
    assert len(broken) == 3
    assert all(len(line) <= 60 for line in broken)
    assert all(line.startswith("        ") for line in broken[1:])
    assert " ".join(safe(words).split()) == words.strip().replace("note    ", "note ")


def test_one_line_has_no_control_characters() -> None:
    assert one_line(RuntimeError("a\n\x1b[31mb\tc")) == "a ?[31mb c"
    assert one_line(RuntimeError()) == "RuntimeError"
    assert len(one_line(RuntimeError("x" * 999))) == 300


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_speaks_after_a_while_and_cleans_up() -> None:
    stream = Terminal()
    with Progress(stream, seconds=0.01) as progress:
        progress.say("tracing gpt2")
        deadline = time.monotonic() + 30
        while "tracing gpt2" not in stream.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        progress.say("drawing")
    shown = stream.getvalue()
    assert "\rdrawing     " in shown  # the longer line is covered
    assert shown.endswith("\r")


def test_progress_is_silent_when_quick_or_not_on_a_terminal() -> None:
    terminal, file = Terminal(), io.StringIO()
    with Progress(terminal, seconds=3600) as progress:
        progress.say("quick")
    with Progress(file, seconds=0) as progress:
        progress.say("a file")
        time.sleep(0.05)
    assert terminal.getvalue() == ""
    assert file.getvalue() == ""
