# SPDX-License-Identifier: Apache-2.0
"""Entry point of the `memscale` program: parses the command line, runs the command, prints errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from memscale.cli import terminal
from memscale.cli.arguments import Options, parse
from memscale.cli.problems import BAD_ARGUMENTS, UsageError, one_line

__all__ = ["main"]

_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Runs the program and returns its exit status: 0, 2 for a bad request, 3 for a step that does not fit.

    Args:
        arguments: without the program's name; None: those of this process.

    Example:
        >>> main(["estimate", "gpt2", "--batch", "4", "--gpu", "RTX 3090"])
        0
    """
    given = sys.argv[1:] if arguments is None else arguments
    terminal.prepare()
    try:
        if given[:1] == ["bench"]:
            from memscale.cli import bench

            return bench.run(given[1:])
        options = parse(given)
        return _command(options.command)(options)
    except UsageError as error:
        if "--debug" in given:
            raise
        terminal.complain(f"memscale: {error}")
        return BAD_ARGUMENTS
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if "--debug" in given:
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            terminal.complain("memscale: PyTorch is not installed: pip install torch")
            return BAD_ARGUMENTS
        terminal.complain(f"memscale: {type(error).__name__}: {one_line(error)} (--debug shows where)")
        return BAD_ARGUMENTS


def _command(name: str) -> Callable[[Options], int]:
    """What carries a command out. Imported when it is asked for: `--help` must not wait for PyTorch."""
    if name == "report":
        from memscale.cli.report import run

        return run
    if name == "plan":
        from memscale.cli import plan

        return plan.run
    if name == "tune":
        from memscale.cli import tune

        return tune.run
    if name == "snapshot":
        from memscale.cli import snapshot

        return snapshot.run
    if name == "login":
        from memscale.cli import login

        return login.run
    if name in ("sync", "runs"):
        from memscale.cli import sync

        return sync.run if name == "sync" else sync.list_runs
    if name == "import":
        from memscale.cli.server import importing

        return importing.run
    if name == "serve":
        from memscale.cli.server import serve

        return serve.run
    if name == "telemetry":
        from memscale.cli import telemetry

        return telemetry.run
    if name == "env":
        from memscale.cli import env

        return env.run
    from memscale.cli import estimate

    return estimate.run


if __name__ == "__main__":
    sys.exit(main())
