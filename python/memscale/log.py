# SPDX-License-Identifier: Apache-2.0
"""The log: one block when a model is wrapped, then silence, except for warnings.

Everything goes through the logger "memscale", so an application that configures logging gets the records in
its own handlers and nothing is printed twice. Only where nobody has configured anything, `setup` attaches a
handler of its own to stderr, and that one falls silent as soon as the application does configure logging.
Its level counts: `logging.basicConfig(level="WARNING")` leaves warnings alone, but for a log file.

    application's handlers on "memscale" or root?   enable_logging   what appears on stderr
    yes                                             True             whatever the application decides
    no                                              True             block and warnings, by our handler
    no                                              False            warnings, by Python's last resort; with a
                                                                     log file, by our handler
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from memscale.config.config import Config, EffectiveConfig

    _Stream = logging.StreamHandler[TextIO]
else:
    _Stream = logging.StreamHandler  # cannot be subscripted before Python 3.11

__all__ = ["LOGGER", "block", "quiet", "setup", "table", "teardown"]

LOGGER: Final = logging.getLogger("memscale")
"""The logger of the package. Submodules may use its children, such as "memscale.executor"."""

_WIDEST_FRAME: Final = 100  # columns; longer lines stick out rather than being cut


def setup(config: Config | EffectiveConfig) -> None:
    """Sets the log up as the config says. May be called again for every wrap; the last call counts.

    Args:
        config: `enable_logging` decides the level and whether a handler for stderr is needed. `log_file` is
            appended to; another file than before replaces it, None leaves it as it is. A file that cannot be
            opened is a logged warning.
    """
    with _lock:
        _set_level(logging.INFO if config.enable_logging else logging.WARNING)
        LOGGER.addFilter(_is_wanted)  # which does nothing the second time
        # Once a log file is a handler, Python's last resort no longer shows warnings: then ours has to.
        wanted = config.enable_logging or config.log_file is not None
        if wanted and _state.stderr is None and not _application_handles():
            _state.stderr = _StderrHandler()
            LOGGER.addHandler(_state.stderr)
        if config.log_file is not None:
            _open_file(config.log_file)


def teardown() -> None:
    """Closes the log file, takes our handlers off and restores the logger's level. Harmless when repeated."""
    with _lock:
        _close_file()
        LOGGER.removeFilter(_is_wanted)
        _state.refused = ""
        if _state.stderr is not None:
            LOGGER.removeHandler(_state.stderr)
            _state.stderr = None
        if _state.level_before is not None:
            if LOGGER.level == _state.level_set:  # else the application has changed it since: it is theirs
                LOGGER.setLevel(_state.level_before)
            _state.level_before = None


def block(lines: Sequence[str], title: str = "MemScale", level: int = logging.INFO) -> None:
    """Logs lines as one framed record, so that other threads' records cannot come between them.

    Args:
        lines: Text lines; one that contains line breaks counts as several.
        title: Stands in the upper edge of the frame.
        level: Of the record.

    Example:
        >>> block(["budget  8.00 GiB", "peak    7.61 GiB"])
    """
    if not LOGGER.isEnabledFor(level):
        return
    flat = [line.rstrip() for text in lines for line in (text.splitlines() or [""])]
    head = f"---- {title} "
    width = min(_WIDEST_FRAME, max([len(head) + 4, *(len(line) + 2 for line in flat)]))
    framed = [head.ljust(width, "-"), *(f"  {line}".rstrip() for line in flat), "-" * width]
    LOGGER.log(level, "%s", "\n".join(framed))


def table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Lays rows out under headers, two blanks between the columns.

    A column whose cells are all numbers (or empty) is aligned to the right, any other to the left.

    Args:
        rows: Cells by row; None is an empty cell.
        headers: One per column.

    Returns:
        Lines joined by line breaks, without one at the end.

    Raises:
        ValueError: A row has not as many cells as there are headers.

    Example:
        >>> print(table([["blocks", 12], ["head", 1]], ["what", "count"]))
        what    count
        ------  -----
        blocks     12
        head        1
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row of {len(row)} cells does not fit {len(headers)} headers: {list(row)!r}")
    cells = [["" if cell is None else " ".join(str(cell).split()) for cell in row] for row in rows]
    columns = range(len(headers))
    widths = [max([len(headers[i]), *(len(row[i]) for row in cells)]) for i in columns]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in columns]
    body = [list(headers), ["-" * width for width in widths], *cells]
    return "\n".join(_aligned(line, widths, right) for line in body)


class _StderrHandler(_Stream):
    """Writes to whatever `sys.stderr` is at the time, and only while the application has no handlers."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_Plain())

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        if stream is None or _application_handles():
            return
        self.stream = stream
        super().emit(record)


class _Plain(logging.Formatter):
    """Blocks as they are; single lines with the name in front, and the level from a warning upwards."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if "\n" in record.getMessage():
            return text
        if record.levelno >= logging.WARNING:
            return f"memscale: {record.levelname.lower()}: {text}"
        return f"memscale: {text}"


@dataclass
class _State:
    """What `setup` has done to the logger and `teardown` must undo."""

    stderr: _StderrHandler | None = None
    file: logging.FileHandler | None = None
    refused: str = ""  # the file that the last warning was about
    level_before: int | None = None
    level_set: int = logging.NOTSET


_state = _State()
_lock = threading.RLock()


def _set_level(level: int) -> None:
    """Sets the logger's level. A more talkative level chosen by the application itself (DEBUG) stays."""
    ours = _state.level_before is not None and LOGGER.level == _state.level_set
    if not ours:
        if level == logging.INFO and LOGGER.level != logging.NOTSET:
            return
        _state.level_before = LOGGER.level
    _state.level_set = level
    LOGGER.setLevel(level)


def _is_wanted(record: logging.LogRecord) -> bool:
    """Whether the application's handlers get a record that our level admits; a log file gets it anyway."""
    root = logging.getLogger()
    ours = _state.level_before == logging.NOTSET and LOGGER.level == _state.level_set
    if not ours or record.levelno >= root.level or not any(map(_is_foreign, root.handlers)):
        return True
    if _state.file is not None:
        _state.file.handle(record)
    return False


def _application_handles() -> bool:
    """Whether records reach a handler that is not ours."""
    reached = [*LOGGER.handlers, *(logging.getLogger().handlers if LOGGER.propagate else ())]
    return any(map(_is_foreign, reached))


def _is_foreign(handler: logging.Handler) -> bool:
    """Whether a handler is the application's, and shows something."""
    return handler not in (_state.stderr, _state.file) and not isinstance(handler, logging.NullHandler)


class _LogFile(logging.FileHandler):
    """The log file. One that takes no more, as on a full disk, is given up with one warning."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's own name)
        """Called by `emit`, with the exception at hand."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif _state.file is self:
            _close_file()
            LOGGER.warning(
                "cannot write to log_file=%r (%s): the log goes on without it", self.baseFilename, error
            )


def _open_file(path: str) -> None:
    """Starts appending to a file, unless it is the one already open."""
    full = os.path.abspath(path)
    if _state.file is not None and _state.file.baseFilename == full:
        return
    try:
        handler = _LogFile(full, mode="a", encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:
        if _state.refused != full:  # one wrap sets the log up more than once
            LOGGER.warning("cannot append to log_file=%r (%s): the log goes on without it", path, error)
        _state.refused = full
        return
    _state.refused = ""
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _close_file()
    _state.file = handler
    LOGGER.addHandler(handler)


def _close_file() -> None:
    """Stops writing to the log file, if there is one."""
    if _state.file is None:
        return
    LOGGER.removeHandler(_state.file)
    with contextlib.suppress(OSError):  # a full disk shows here as well; training goes on
        _state.file.close()
    _state.file = None


def _is_number(cell: object) -> bool:
    """Whether a cell lets its column be aligned to the right."""
    return cell is None or (isinstance(cell, (int, float)) and not isinstance(cell, bool))


def _aligned(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    """One line of a table."""
    columns = zip(cells, widths, right, strict=True)
    return "  ".join(cell.rjust(width) if end else cell.ljust(width) for cell, width, end in columns).rstrip()


# ---- long plannings ----------------------------------------------------------------------------------

_FIRST_SECONDS = 10.0


class Pace:
    """Says now and then that a long planning goes on: a large model takes seconds for each trace.

    Its lines come after 10 s, 20 s, 40 s and so on; a short planning has none.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._next = _FIRST_SECONDS
        self._traced = 0

    def traced(self) -> None:
        """A step was traced."""
        self._traced += 1
        seconds = time.perf_counter() - self._began
        if seconds < self._next:
            return
        LOGGER.info(
            "planning goes on: the step was traced in %d ways so far, in %.0f s", self._traced, seconds
        )
        while self._next <= seconds:
            self._next *= 2


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops what native code writes to file descriptor 2, as PyTorch's profiler does when it starts."""
    if sys.stderr is not None:
        sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
