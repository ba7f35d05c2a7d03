# SPDX-License-Identifier: Apache-2.0
"""The log: who gets which record, what `teardown` leaves behind, blocks and tables."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from memscale.core.config import Config
from memscale.observability import logs


class _Handlers(list[logging.Handler]):
    """A handler list that pytest, which adds its own to the root before every phase, cannot get into."""

    def append(self, handler: logging.Handler) -> None:
        if not type(handler).__module__.startswith("_pytest."):
            super().append(handler)


@pytest.fixture(autouse=True)
def bare_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which nobody has configured logging."""
    root = logging.getLogger()
    logs.teardown()
    monkeypatch.setattr(root, "handlers", _Handlers())
    monkeypatch.setattr(root, "level", logging.WARNING)
    monkeypatch.setattr(logs.LOGGER, "handlers", [])
    monkeypatch.setattr(logs.LOGGER, "propagate", True)
    monkeypatch.setattr(logs.LOGGER, "level", logging.NOTSET)
    logs.LOGGER.setLevel(logging.NOTSET)  # also clears the cache of isEnabledFor
    yield
    logs.teardown()
    logs.LOGGER.setLevel(logging.NOTSET)


class _Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_an_unconfigured_process_sees_the_block_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        logs.setup(Config())
    logs.block(["budget 8 GiB"])
    err = capsys.readouterr().err
    assert err.count("budget 8 GiB") == 1
    assert len(logs.LOGGER.handlers) == 1


def test_single_lines_carry_the_name_and_warnings_their_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(Config())
    logs.LOGGER.info("attached")
    logs.LOGGER.warning("odd")
    logging.getLogger("memscale.executor").warning("child")
    assert capsys.readouterr().err.splitlines() == [
        "memscale: attached",
        "memscale: warning: odd",
        "memscale: warning: child",
    ]


@pytest.mark.parametrize("where", ["memscale", None])
def test_the_applications_handlers_are_used_instead(
    where: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = _Collect()
    logging.getLogger(where).addHandler(theirs)
    logs.setup(Config())
    logs.LOGGER.info("hello")
    assert theirs.messages == ["hello"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("where", ["memscale", None])
def test_logging_configured_later_silences_our_handler(
    where: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.setup(Config())
    theirs = _Collect()
    logging.getLogger(where).addHandler(theirs)
    logs.LOGGER.info("hello")
    assert theirs.messages == ["hello"]
    assert capsys.readouterr().err == ""


def test_root_handlers_do_not_count_without_propagation(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().addHandler(_Collect())
    logs.LOGGER.propagate = False
    logs.setup(Config())
    logs.LOGGER.info("hello")
    assert capsys.readouterr().err == "memscale: hello\n"


def test_a_null_handler_is_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    logs.LOGGER.addHandler(logging.NullHandler())
    logs.setup(Config())
    logs.LOGGER.info("hello")
    assert capsys.readouterr().err == "memscale: hello\n"


def test_switched_off_only_warnings_remain(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(Config(enable_logging=False))
    logs.block(["plan"])
    logs.LOGGER.info("hello")
    assert logs.LOGGER.handlers == []
    assert capsys.readouterr().err == ""
    assert logs.LOGGER.isEnabledFor(logging.WARNING)


def test_switched_off_wins_over_an_earlier_level() -> None:
    logs.LOGGER.setLevel(logging.DEBUG)
    logs.setup(Config(enable_logging=False))
    assert not logs.LOGGER.isEnabledFor(logging.INFO)
    logs.teardown()
    assert logs.LOGGER.level == logging.DEBUG


def test_the_last_setup_counts(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(Config(enable_logging=False))
    logs.setup(Config())
    logs.LOGGER.info("on")
    logs.setup(Config(enable_logging=False))
    logs.LOGGER.info("off")
    assert capsys.readouterr().err == "memscale: on\n"


def test_a_level_of_the_application_stays() -> None:
    logs.LOGGER.setLevel(logging.DEBUG)
    logs.setup(Config())
    assert logs.LOGGER.level == logging.DEBUG
    logs.teardown()
    assert logs.LOGGER.level == logging.DEBUG


@pytest.mark.parametrize("before", [True, False])
def test_the_level_of_the_application_counts(before: bool, tmp_path: Path) -> None:
    theirs, path = _Collect(), tmp_path / "log.txt"
    if before:
        logging.basicConfig(level=logging.WARNING, handlers=[theirs])
    logs.setup(Config(log_file=str(path)))
    if not before:
        logging.basicConfig(level=logging.WARNING, handlers=[theirs])
    logs.LOGGER.info("news")
    logs.LOGGER.warning("trouble")
    assert theirs.messages == ["trouble"]
    assert [line.split(": ")[-1] for line in path.read_text().splitlines()] == ["news", "trouble"]
    logging.getLogger().setLevel(logging.INFO)
    logs.LOGGER.info("more")
    assert theirs.messages == ["trouble", "more"]
    logging.getLogger().setLevel(logging.ERROR)
    logs.LOGGER.warning("quiet")
    logs.LOGGER.setLevel(logging.DEBUG)
    logs.LOGGER.info("asked for")
    assert theirs.messages == ["trouble", "more", "asked for"]


def test_teardown_leaves_a_level_set_meanwhile() -> None:
    logs.setup(Config())
    logs.LOGGER.setLevel(logging.ERROR)
    logs.teardown()
    assert logs.LOGGER.level == logging.ERROR


def test_teardown_leaves_the_logger_as_it_was() -> None:
    theirs = _Collect()
    logs.LOGGER.addHandler(theirs)
    logs.setup(Config())
    logs.teardown()
    logs.teardown()
    assert logs.LOGGER.handlers == [theirs]
    assert logs.LOGGER.level == logging.NOTSET


def test_the_file_is_appended_to_without_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("before\n")
    config = Config(log_file=str(path))
    logs.setup(config)
    opened = list(logs.LOGGER.handlers)
    logs.setup(config.replace(log_file=str(tmp_path / "." / "run.log")))
    assert logs.LOGGER.handlers == opened
    logs.block(["budget é 8 GiB"])
    logs.teardown()
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.count("budget é 8 GiB") == 1
    assert " INFO memscale: " in text
    logs.LOGGER.warning("later")
    assert "later" not in path.read_text(encoding="utf-8")


def test_another_file_replaces_the_first_and_none_keeps_it(tmp_path: Path) -> None:
    one, two = tmp_path / "one.log", tmp_path / "two.log"
    logs.setup(Config(log_file=str(one)))
    logs.setup(Config(log_file=str(two)))
    logs.setup(Config())
    logs.LOGGER.info("hello")
    assert one.read_text() == ""
    assert "hello" in two.read_text()


def test_an_unwritable_file_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "missing" / "run.log"
    logs.setup(Config(log_file=str(path)))
    logs.setup(Config(log_file=str(path)))  # as `wrap` does
    logs.setup(Config(log_file=str(tmp_path)))  # a folder
    err = capsys.readouterr().err
    assert err.count("memscale: warning: cannot append to log_file=") == 2
    assert "missing" in err
    logs.LOGGER.info("still here")
    assert "still here" in capsys.readouterr().err


def test_a_file_that_cannot_be_opened_keeps_the_former_one(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    logs.setup(Config(log_file=str(path)))
    logs.setup(Config(log_file=str(tmp_path)))
    logs.LOGGER.info("hello")
    assert "hello" in path.read_text()


def test_a_full_disk_is_one_warning_and_the_end_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(Config(log_file="/dev/full"))
    logs.LOGGER.info("first")
    logs.LOGGER.info("second")
    err = capsys.readouterr().err
    assert err.count("memscale: warning: cannot write to log_file='/dev/full'") == 1
    assert "Traceback" not in err and "first" in err and "second" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    logs.setup(Config(log_file=str(tmp_path / "run.log")))
    assert "cannot append" in capsys.readouterr().err


def test_with_logging_off_a_file_takes_warnings_and_stderr_still_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.log"
    logs.setup(Config(enable_logging=False, log_file=str(path)))
    logs.LOGGER.info("quiet")
    logs.LOGGER.warning("loud")
    assert "quiet" not in path.read_text()
    assert "loud" in path.read_text()
    assert capsys.readouterr().err == "memscale: warning: loud\n"


def test_a_missing_stderr_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.setup(Config())
    monkeypatch.setattr("sys.stderr", None)
    logs.LOGGER.warning("nobody hears this")


def test_a_block_is_one_framed_record() -> None:
    theirs = _Collect()
    logs.LOGGER.addHandler(theirs)
    logs.setup(Config())
    logs.block(["one  ", "", "two\nthree", "100 % {x} %s"], title="plan")
    assert theirs.messages == [
        "\n".join(
            [
                "---- plan ----",
                "  one",
                "",
                "  two",
                "  three",
                "  100 % {x} %s",
                "--------------",
            ]
        )
    ]


def test_the_frame_grows_with_the_lines_up_to_a_limit() -> None:
    theirs = _Collect()
    logs.LOGGER.addHandler(theirs)
    logs.setup(Config())
    logs.block(["x" * 60])
    logs.block(["x" * 300])
    logs.block([])
    first, second, empty = (message.splitlines() for message in theirs.messages)
    assert len(first[0]) == len(first[-1]) == 62
    assert len(second[0]) == len(second[-1]) == 100
    assert second[1] == "  " + "x" * 300
    assert len(empty) == 2


def test_a_block_below_the_level_costs_nothing() -> None:
    theirs = _Collect()
    logs.LOGGER.addHandler(theirs)
    logs.setup(Config(enable_logging=False))
    logs.block(["info"])
    logs.block(["warning"], level=logging.WARNING)
    assert len(theirs.messages) == 1


def test_a_table_aligns_numbers_to_the_right() -> None:
    text = logs.table([["blocks", 12, 0.5], ["head", None, 10]], ["what", "count", "ms"])
    assert text.splitlines() == [
        "what    count   ms",
        "------  -----  ---",
        "blocks     12  0.5",
        "head            10",
    ]


def test_a_table_without_rows_is_its_head() -> None:
    assert logs.table([], ["a", "bc"]).splitlines() == ["a  bc", "-  --"]


def test_cells_stay_on_one_line_and_flags_are_text() -> None:
    assert logs.table([["a\nb", True]], ["x", "wide"]).splitlines()[-1] == "a b  True"


def test_a_ragged_row_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 1 cells does not fit 2 headers"):
        logs.table([["a"]], ["x", "y"])
