# SPDX-License-Identifier: Apache-2.0
"""The command line of the benchmarks. Imports nothing slow: help and mistakes do not wait for PyTorch."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memscale.benchmarks.registry import BENCHMARK_MODELS, SCALES, WAYS
from memscale.errors import MemScaleError

if TYPE_CHECKING:
    from memscale.benchmarks.program import Measure

__all__ = ["main", "parser"]

_BAD_ARGUMENTS: Final = 2
_INTERRUPTED: Final = 130


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="memscale bench",
        description="Measures memory, time and loss of the benchmark models: plain PyTorch, MemScale, and "
        "its peers. Offline, with random weights; every measurement in a process of its own.",
        epilog="exit status: 0; 2 where the request cannot be carried out; 130 when interrupted (rows stay)",
    )
    names = ", ".join(model.name for model in BENCHMARK_MODELS)
    made.add_argument("--models", metavar="NAME[,…]", help=f"of {names} (default: all)")
    made.add_argument("--ways", metavar="NAME[,…]", help=f"of {', '.join(WAYS)} (default: all; '' for none)")
    made.add_argument("--peers", action="store_true", help="every peer that is installed, on the same work")
    made.add_argument("--frontier", action="store_true", help="memory against step time, over budgets")
    made.add_argument("--sweep", action="store_true", help="25 points over model, batch, sequence and dtype")
    made.add_argument("--points", type=_count, metavar="N", help="of the sweep (default: 25)")
    made.add_argument("--quick", action="store_true", help="tiny shapes and one model, to see that it works")
    made.add_argument("--scale", choices=SCALES, help="of the models (default: full on a card, else reduced)")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a card")
    made.add_argument("--steps", type=_count, metavar="N", help="training steps per run (default: 20)")
    made.add_argument("--minutes", type=_minutes, metavar="N", help="begin nothing after that many minutes")
    made.add_argument("--out", type=Path, default=Path("memscale-benchmarks"), metavar="DIR",
                      help="folder of rows, logs and pictures (default: memscale-benchmarks)")  # fmt: skip
    made.add_argument("--csv", type=Path, metavar="FILE", help="rows (default: DIR/benchmarks.csv)")
    made.add_argument("--png", type=Path, metavar="FILE", help="picture (default: DIR/frontier.png)")
    made.add_argument("--resume", action="store_true", help="leave out what DIR has good rows of")
    made.add_argument("--directory", metavar="DIR", help="where files may lie that stand for host memory")
    made.add_argument("--json", action="store_true", help="print one JSON document, not tables")
    made.add_argument("--debug", action="store_true", help="show where an error comes from")
    return made


def _count(text: str) -> int:
    """A whole number of at least 1."""
    if not (text.isascii() and text.isdigit()) or int(text[:9]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _minutes(text: str) -> float:
    """A number of at least 0; parts of a minute are allowed."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def main(arguments: list[str] | None = None, measure: Measure | None = None) -> int:
    """Runs the program and returns its exit status.

    Args:
        arguments: without the program's name; None: those of this process.
        measure: as for `memscale.benchmarks.program.run`.
    """
    options = parser().parse_args(arguments)
    before = _end_as_interrupted()
    try:
        from memscale.benchmarks.program import run

        return _INTERRUPTED if run(options, measure) else 0
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("memscale bench: PyTorch is not installed: pip install torch", file=sys.stderr)
        return _BAD_ARGUMENTS
    except KeyboardInterrupt:  # before or after the measurements, which keep what they have themselves
        return _INTERRUPTED
    except (MemScaleError, ValueError, OSError) as error:
        if options.debug:
            raise
        print(f"memscale bench: {error}", file=sys.stderr)
        return _BAD_ARGUMENTS
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _end_as_interrupted() -> Any:
    """Lets SIGTERM end the program as Ctrl-C does: rows stay, processes and folders do not.

    Returns what was in force, or None outside of the main thread, which has the signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, signal.default_int_handler)
