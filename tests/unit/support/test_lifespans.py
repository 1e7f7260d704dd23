"""Lifespans: what opens is closed once, in order, in the task that opened it."""

import asyncio
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar, copy_context

import pytest

from aztask.errors import ConfigurationError
from aztask.hooks import Lifespans


@pytest.fixture
def run():
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


def test_all_kinds_open_in_order_and_close_in_reverse(run):
    lifespans, log = Lifespans(), []
    assert not lifespans

    @lifespans
    async def first():
        log.append("first")
        yield
        log.append("first closed")

    @lifespans
    def second():
        log.append("second")
        yield
        log.append("second closed")

    @lifespans
    @asynccontextmanager
    async def third():
        log.append("third")
        yield
        log.append("third closed")

    @lifespans
    @contextmanager
    def fourth():
        log.append("fourth")
        yield
        log.append("fourth closed")

    assert lifespans
    opened = lifespans.open(run)
    assert log == ["first", "second", "third", "fourth"]
    opened.close()
    assert log[4:] == ["fourth closed", "third closed", "second closed", "first closed"]
    opened.close()
    assert len(log) == 8


def test_a_task_group_is_left_in_the_task_that_entered_it(run):
    lifespans, ticks = Lifespans(), []

    @lifespans
    async def background():
        async with asyncio.TaskGroup() as group:
            task = group.create_task(tick())
            yield
            task.cancel()

    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0)

    opened = lifespans.open(run)
    run(asyncio.sleep(0.01))
    opened.close()
    assert ticks


def test_if_one_fails_to_open_those_before_it_are_closed(run):
    lifespans, log = Lifespans(), []

    @lifespans
    async def good():
        yield
        log.append("closed")

    @lifespans
    async def bad():
        raise OSError("no such host")
        yield

    with pytest.raises(OSError, match="no such host"):
        lifespans.open(run)
    assert log == ["closed"]


def test_an_error_of_closing_is_logged_and_the_others_are_closed(run, caplog):
    lifespans, log = Lifespans(), []

    @lifespans
    async def good():
        yield
        log.append("closed")

    @lifespans
    async def bad():
        yield
        raise OSError("already closed")

    lifespans.open(run).close()
    assert log == ["closed"]
    assert "a lifespan failed while it closed" in caplog.text


@pytest.mark.parametrize("wrong", [7, "clients"])
def test_what_is_no_function_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="a lifespan is a function with one yield"):
        Lifespans()(wrong)


def test_a_coroutine_function_without_yield_is_refused():
    async def forgot():
        return None

    with pytest.raises(ConfigurationError, match="a lifespan is a function with one yield"):
        Lifespans()(forgot)


def test_a_function_that_returns_no_context_manager_is_refused(run):
    lifespans = Lifespans()
    lifespans(lambda: 7)
    with pytest.raises(ConfigurationError, match="which is no context manager"):
        lifespans.open(run)


def test_context_variables_of_lifespans_are_seen_where_they_were_opened(run):
    """Those of an asynchronous one too, which runs in a task with a context of its own."""
    lifespans, seen = Lifespans(), []
    first, second = ContextVar("first", default="none"), ContextVar("second", default="none")

    @lifespans
    async def opens():
        first.set("async")
        yield

    @lifespans
    async def sees():
        seen.append(first.get())
        yield

    @lifespans
    def plain():
        seen.append(first.get())
        second.set("plain")
        yield

    def opened():
        found = lifespans.open(run)
        values = [first.get(), second.get()]
        found.close()
        return values, first.get()

    assert copy_context().run(opened) == (["async", "plain"], "none")
    assert seen == ["async", "async"]
    assert first.get() == "none"
