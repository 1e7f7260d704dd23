"""Parts: supervised threads, steps that take too long, and what health is told."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from aztask.support import parts
from aztask.support.parts import Part, PartFailure, failures, lacking, part_of


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FIRST_PAUSE", 0.01)


def names() -> list[str]:
    return [failure.part for failure in failures()]


@pytest.mark.parametrize("error", [TypeError("no"), SystemExit(3), MemoryError()])
def test_a_thread_goes_on_after_whatever_it_raises_and_logs_it_once(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    part, calls, done = Part("test-a"), [], threading.Event()

    def target() -> None:
        calls.append(names())
        if len(calls) < 4:
            raise error
        part.begin()
        part.rest()
        done.set()

    thread = part.thread(target, "aztask-test")
    assert part_of(thread) is part
    thread.start()
    assert done.wait(10)
    thread.join()
    assert ["test-a" in each for each in calls] == [False, True, True, True]
    assert "test-a" not in names(), "a step has succeeded"
    assert caplog.text.count("Traceback") == 1


def test_a_stopped_part_ends_and_is_listed_no_longer() -> None:
    part = Part("test-b")

    def target() -> None:
        part.stop()
        raise ValueError("no")

    thread = part.thread(target, "aztask-test")
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert "test-b" not in names()


def test_a_step_that_takes_too_long_stands_still(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    part = Part("test-c", longest=0.01)
    part.begin()
    time.sleep(0.05)
    part.watch()
    part.watch()
    assert "test-c" in names()
    assert caplog.text.count("has stood still") == 1
    assert "parts.py:" in caplog.text, "and where"
    part.rest()
    part.watch()
    assert "test-c" not in names()
    assert "goes on" in caplog.text


def test_trouble_in_a_step_stays_until_another_step_succeeds() -> None:
    part = Part("test-d")
    part.begin()
    part.trouble("the store is away")
    part.rest()
    assert [each.reason for each in part.failures] == ["the store is away"]
    part.begin()
    part.rest()
    assert part.failures == []


def test_an_item_is_put_aside_alone_and_taken_back() -> None:
    part = Part("test-e")
    part.put_aside("schedule nightly", TypeError("no"))
    part.put_aside("schedule nightly", TypeError("still"))
    assert [(each.part, each.reason) for each in part.failures] == [
        ("schedule nightly", "TypeError: still")
    ]
    assert part.failure is None, "the part itself works"
    part.take_back("schedule nightly")
    assert part.failures == []


def test_something_essential_is_lacking_only_if_all_that_do_it_fail_for_long() -> None:
    one, two, other = (
        Part("one", essential="receive"),
        Part("two", essential="receive"),
        Part("schedules"),
    )
    other.trouble("no")
    one.trouble("no")
    assert lacking([one, two, other], 0.0) == []
    two.trouble("no")
    assert [each.part for each in lacking([one, two, other], 0.0)] == ["one"]
    assert lacking([one, two, other], 60.0) == [], "it may succeed at the next try"


def test_a_failure_is_a_value() -> None:
    assert PartFailure("a", 1.0, "b") == PartFailure("a", 1.0, "b")
