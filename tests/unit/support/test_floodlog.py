"""Endless warnings: the first ones, then one line a minute for each reason."""

from __future__ import annotations

import logging

import pytest
from still import Still

from aztask.support.floodlog import FIRST_LINES, SUMMARY_SECONDS, FloodLog

logger = logging.getLogger("flood")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_the_first_lines_and_then_a_summary_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Still(0.0)
    floods = FloodLog(clock)
    for number in range(1000):
        floods.warning(logger, "undecodable", "message %d", number)
        floods.tick(clock.now)
    floods.warning(logger, "unknown-task", "another")
    assert lines(caplog) == [f"message {n}" for n in range(FIRST_LINES)] + ["another"]

    clock.now = SUMMARY_SECONDS
    floods.tick(clock.now)
    (line,) = lines(caplog)
    assert line.startswith(f"undecodable: {1000 - FIRST_LINES} more in the last 60 s")

    floods.warning(logger, "undecodable", "message %d", 1000)
    assert lines(caplog) == [], "it goes on: summaries only"
    clock.now = 2 * SUMMARY_SECONDS
    floods.tick(clock.now)
    (line,) = lines(caplog)
    assert line.startswith("undecodable: 1 more")

    clock.now = 3 * SUMMARY_SECONDS
    floods.tick(clock.now)
    floods.warning(logger, "undecodable", "message %d", 1001)
    assert lines(caplog) == ["message 1001"], "after a silent minute it begins anew"


def test_the_end_writes_what_was_only_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = Still(0.0)
    floods = FloodLog(clock)
    for number in range(FIRST_LINES + 2):
        floods.warning(logger, "x", "message %d", number)
    lines(caplog)
    clock.now = 3.0
    floods.close()
    (line,) = lines(caplog)
    assert line.startswith("x: 2 more in the last 3 s")
    floods.close()
    assert lines(caplog) == []


def test_an_unexpected_error_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    floods = FloodLog(Still(0.0))
    floods.warning(logger, "x", "message %d", 1, error=ValueError("no"))
    (record,) = caplog.records
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, True)
