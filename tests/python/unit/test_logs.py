# SPDX-License-Identifier: Apache-2.0
"""The log: who gets which record, what `teardown` leaves behind, blocks and tables."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from memscale import log
from memscale.config.config import Config


class _Handlers(list[logging.Handler]):
    """A handler list that pytest, which adds its own to the root before every phase, cannot get into."""

    def append(self, handler: logging.Handler) -> None:
        if not type(handler).__module__.startswith("_pytest."):
            super().append(handler)


@pytest.fixture(autouse=True)
def bare_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which nobody has configured logging."""
    root = logging.getLogger()
    log.teardown()
    monkeypatch.setattr(root, "handlers", _Handlers())
    monkeypatch.setattr(root, "level", logging.WARNING)
    log.LOGGER.handlers, log.LOGGER.propagate = [], True  # put back behind each test, as its level is
    log.LOGGER.setLevel(logging.NOTSET)  # also clears the cache of isEnabledFor
    yield
    log.teardown()
    log.LOGGER.setLevel(logging.NOTSET)


class _Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_an_unconfigured_process_sees_the_block_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        log.setup(Config())
    log.block(["budget 8 GiB"])
    err = capsys.readouterr().err
    assert err.count("budget 8 GiB") == 1
    assert len(log.LOGGER.handlers) == 1


def test_single_lines_carry_the_name_and_warnings_their_level(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(Config())
    log.LOGGER.info("attached")
    log.LOGGER.warning("odd")
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
    log.setup(Config())
    log.LOGGER.info("hello")
    assert theirs.messages == ["hello"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("where", ["memscale", None])
def test_logging_configured_later_silences_our_handler(
    where: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup(Config())
    theirs = _Collect()
    logging.getLogger(where).addHandler(theirs)
    log.LOGGER.info("hello")
    assert theirs.messages == ["hello"]
    assert capsys.readouterr().err == ""


def test_root_handlers_do_not_count_without_propagation(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().addHandler(_Collect())
    logging.getLogger("memscale").propagate = False
    log.setup(Config())
    log.LOGGER.info("hello")
    assert capsys.readouterr().err == "memscale: hello\n"


def test_a_null_handler_is_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    log.LOGGER.addHandler(logging.NullHandler())
    log.setup(Config())
    log.LOGGER.info("hello")
    assert capsys.readouterr().err == "memscale: hello\n"


def test_switched_off_only_warnings_remain(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(Config(enable_logging=False))
    log.block(["plan"])
    log.LOGGER.info("hello")
    assert log.LOGGER.handlers == []
    assert capsys.readouterr().err == ""
    assert log.LOGGER.isEnabledFor(logging.WARNING)


def test_switched_off_wins_over_an_earlier_level() -> None:
    log.LOGGER.setLevel(logging.DEBUG)
    log.setup(Config(enable_logging=False))
    assert not log.LOGGER.isEnabledFor(logging.INFO)
    log.teardown()
    assert log.LOGGER.level == logging.DEBUG


def test_the_last_setup_counts(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(Config(enable_logging=False))
    log.setup(Config())
    log.LOGGER.info("on")
    log.setup(Config(enable_logging=False))
    log.LOGGER.info("off")
    assert capsys.readouterr().err == "memscale: on\n"


def test_a_level_of_the_application_stays() -> None:
    log.LOGGER.setLevel(logging.DEBUG)
    log.setup(Config())
    assert log.LOGGER.level == logging.DEBUG
    log.teardown()
    assert log.LOGGER.level == logging.DEBUG


@pytest.mark.parametrize("before", [True, False])
def test_the_level_of_the_application_counts(before: bool, tmp_path: Path) -> None:
    theirs, path = _Collect(), tmp_path / "log.txt"
    if before:
        logging.basicConfig(level=logging.WARNING, handlers=[theirs])
    log.setup(Config(log_file=str(path)))
    if not before:
        logging.basicConfig(level=logging.WARNING, handlers=[theirs])
    log.LOGGER.info("news")
    log.LOGGER.warning("trouble")
    assert theirs.messages == ["trouble"]
    assert [line.split(": ")[-1] for line in path.read_text().splitlines()] == ["news", "trouble"]
    logging.getLogger().setLevel(logging.INFO)
    log.LOGGER.info("more")
    assert theirs.messages == ["trouble", "more"]
    logging.getLogger().setLevel(logging.ERROR)
    log.LOGGER.warning("quiet")
    log.LOGGER.setLevel(logging.DEBUG)
    log.LOGGER.info("asked for")
    assert theirs.messages == ["trouble", "more", "asked for"]


def test_teardown_leaves_a_level_set_meanwhile() -> None:
    log.setup(Config())
    log.LOGGER.setLevel(logging.ERROR)
    log.teardown()
    assert log.LOGGER.level == logging.ERROR


def test_teardown_leaves_the_logger_as_it_was() -> None:
    theirs = _Collect()
    log.LOGGER.addHandler(theirs)
    log.setup(Config())
    log.teardown()
    log.teardown()
    assert log.LOGGER.handlers == [theirs]
    assert log.LOGGER.level == logging.NOTSET


def test_the_file_is_appended_to_without_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("before\n")
    config = Config(log_file=str(path))
    log.setup(config)
    opened = list(log.LOGGER.handlers)
    log.setup(config.replace(log_file=str(tmp_path / "." / "run.log")))
    assert log.LOGGER.handlers == opened
    log.block(["budget é 8 GiB"])
    log.teardown()
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.count("budget é 8 GiB") == 1
    assert " INFO memscale: " in text
    log.LOGGER.warning("later")
    assert "later" not in path.read_text(encoding="utf-8")


def test_another_file_replaces_the_first_and_none_keeps_it(tmp_path: Path) -> None:
    one, two = tmp_path / "one.log", tmp_path / "two.log"
    log.setup(Config(log_file=str(one)))
    log.setup(Config(log_file=str(two)))
    log.setup(Config())
    log.LOGGER.info("hello")
    assert one.read_text() == ""
    assert "hello" in two.read_text()


def test_an_unwritable_file_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "missing" / "run.log"
    log.setup(Config(log_file=str(path)))
    log.setup(Config(log_file=str(path)))  # as `wrap` does
    log.setup(Config(log_file=str(tmp_path)))  # a folder
    err = capsys.readouterr().err
    assert err.count("memscale: warning: cannot append to log_file=") == 2
    assert "missing" in err
    log.LOGGER.info("still here")
    assert "still here" in capsys.readouterr().err


def test_a_file_that_cannot_be_opened_keeps_the_former_one(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    log.setup(Config(log_file=str(path)))
    log.setup(Config(log_file=str(tmp_path)))
    log.LOGGER.info("hello")
    assert "hello" in path.read_text()


def test_a_full_disk_is_one_warning_and_the_end_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(Config(log_file="/dev/full"))
    log.LOGGER.info("first")
    log.LOGGER.info("second")
    err = capsys.readouterr().err
    assert err.count("memscale: warning: cannot write to log_file='/dev/full'") == 1
    assert "Traceback" not in err and "first" in err and "second" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    log.setup(Config(log_file=str(tmp_path / "run.log")))
    assert "cannot append" in capsys.readouterr().err


def test_with_logging_off_a_file_takes_warnings_and_stderr_still_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.log"
    log.setup(Config(enable_logging=False, log_file=str(path)))
    log.LOGGER.info("quiet")
    log.LOGGER.warning("loud")
    assert "quiet" not in path.read_text()
    assert "loud" in path.read_text()
    assert capsys.readouterr().err == "memscale: warning: loud\n"


def test_a_missing_stderr_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    log.setup(Config())
    monkeypatch.setattr("sys.stderr", None)
    log.LOGGER.warning("nobody hears this")


def test_a_block_is_one_framed_record() -> None:
    theirs = _Collect()
    log.LOGGER.addHandler(theirs)
    log.setup(Config())
    log.block(["one  ", "", "two\nthree", "100 % {x} %s"], title="plan")
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
    log.LOGGER.addHandler(theirs)
    log.setup(Config())
    log.block(["x" * 60])
    log.block(["x" * 300])
    log.block([])
    first, second, empty = (message.splitlines() for message in theirs.messages)
    assert len(first[0]) == len(first[-1]) == 62
    assert len(second[0]) == len(second[-1]) == 100
    assert second[1] == "  " + "x" * 300
    assert len(empty) == 2


def test_a_block_below_the_level_costs_nothing() -> None:
    theirs = _Collect()
    log.LOGGER.addHandler(theirs)
    log.setup(Config(enable_logging=False))
    log.block(["info"])
    log.block(["warning"], level=logging.WARNING)
    assert len(theirs.messages) == 1


def test_a_table_aligns_numbers_to_the_right() -> None:
    text = log.table([["blocks", 12, 0.5], ["head", None, 10]], ["what", "count", "ms"])
    assert text.splitlines() == [
        "what    count   ms",
        "------  -----  ---",
        "blocks     12  0.5",
        "head            10",
    ]


def test_a_table_without_rows_is_its_head() -> None:
    assert log.table([], ["a", "bc"]).splitlines() == ["a  bc", "-  --"]


def test_cells_stay_on_one_line_and_flags_are_text() -> None:
    assert log.table([["a\nb", True]], ["x", "wide"]).splitlines()[-1] == "a b  True"


def test_a_ragged_row_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 1 cells does not fit 2 headers"):
        log.table([["a"]], ["x", "y"])
