"""Waits inside a task: the run ends, and the next hop goes on after them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from aztask import (
    App,
    ConfigurationError,
    Context,
    NotUnique,
    ResultTimeout,
    RetryPolicy,
    StepError,
    TaskCancelled,
    TaskFailed,
)
from aztask.message.codec import Codec
from aztask.message.message import CONTINUE, TaskMessage
from aztask.operate.steps import steps
from aztask.steps.suspension import OrderChanged, Parked, StepDelayed, combined
from aztask.stores.payloads.holders import PayloadHolders
from aztask.stores.payloads.store import PayloadKind
from aztask.worker.pipeline.uniquekeys import unique_engine

DAY = 86400.0


@pytest.fixture
def app() -> App:
    return App("shop", broker="servicebus://nowhere.invalid", retry=RetryPolicy(3, delay=1.0))


def headers(app: App) -> list[dict[str, Any]]:
    """The headers of the messages that wait in the queue."""
    return [dict(each.envelope.headers) for each in app.broker.peek("default", limit=10)]


def test_a_task_sleeps_and_goes_on(app: App) -> None:
    calls, before = [], []

    @app.task_with_context
    def order(context: Context, card: str) -> str:
        before.append(context.message.hop)
        context.step("charge", calls.append, "charge")
        context.sleep(timedelta(days=3))
        return context.step("ship", lambda: calls.append("ship") or card)

    with app.inline() as inline:
        result = order.delay("visa")
        assert calls == ["charge"]
        assert result.state == "waiting" and result.error is None
        with pytest.raises(ResultTimeout, match="it waits: it sleeps, until 2"):
            result.get(0)
        (waiting,) = headers(app)
        assert (waiting["task"], waiting["aztask-hop"]) == ("shop.order#continue", 1)
        inline.advance(3 * DAY - 5)
        assert calls == ["charge"]
        inline.advance(5)
        assert result.get() == "visa"
        assert calls == ["charge", "ship"]
    assert before == [0, 1]


def test_a_long_wait_is_cut_so_that_no_purge_takes_it_for_an_end(app: App) -> None:
    """Retention of 7 days: the row of the run is never older than half of that."""

    @app.task_with_context
    def order(context: Context) -> int:
        context.sleep(30 * DAY)
        return context.message.hop

    with app.inline() as inline:
        result = order.delay()
        results = app.results
        assert results is not None
        for _ in range(29):
            inline.advance(DAY)
            clock = inline._worker._clock.wall()
            results.purge(clock - 7 * DAY)
            assert result.state == "waiting"
            assert steps(app, result.id)
        inline.advance(DAY + 1)
        assert result.get() == 9


def test_the_time_counts_from_the_first_call(app: App) -> None:
    fail = [True]

    @app.task_with_context(retry=RetryPolicy(3, delay=50.0, jitter=False))
    def order(context: Context) -> str:
        try:
            context.sleep(100)
        finally:
            if fail:
                fail.clear()
                raise OSError("the run ends, and is retried")
        return "done"

    with app.inline() as inline:
        result = order.delay()
        assert result.state == "waiting", "it was retried, and waits for the rest"
        inline.advance(51)
        assert result.get(0) == "done"


def test_no_count_rises_and_the_expiry_is_for_the_first_start(app: App) -> None:
    seen = []

    @app.task_with_context
    def order(context: Context) -> None:
        message = context.message
        seen.append((message.resubmit_count, message.snooze_count, message.expires is None))
        context.sleep(100)

    with app.inline() as inline:
        result = order.with_options(expires=10).delay()
        inline.advance(100)
        assert result.successful()
    assert seen == [(0, 0, False), (0, 0, True)]


def test_branches_wait_side_by_side(app: App) -> None:
    ended: list[str] = []

    @app.task_with_context
    def order(context: Context) -> Any:
        def after(name: str, seconds: float) -> Callable[[], str]:
            def branch() -> str:
                context.sleep(seconds)
                context.step("note", ended.append, name)
                return name

            return branch

        return context.gather(after("long", 100), after("short", 10), after("none", 0))

    with app.inline() as inline:
        result = order.delay()
        assert ended == ["none"]
        inline.advance(10)
        assert ended == ["none", "short"]
        inline.advance(90)
        assert result.get() == ["long", "short", "none"]


def test_coroutines_wait(app: App) -> None:
    @app.task_with_context
    async def order(context: Context) -> Any:
        async def branch(seconds: float) -> float:
            context.sleep(seconds)
            await asyncio.sleep(0)
            return seconds

        context.sleep(5)
        return await context.gather(branch(10), branch(20))

    with app.inline() as inline:
        result = order.delay()
        inline.advance(25)
        assert result.get() == [10, 20]


def test_how_several_ends_go_on() -> None:
    long, short = Parked("it sleeps", 120.0, 20.0), Parked("it sleeps", 30.0, 20.0)
    retried, order = StepDelayed("ship", 25.0, 20.0, "down"), OrderChanged("a", "b", 0.0)
    assert str(combined([long, short])) == str(short)
    assert combined([long, order, short]) is order
    assert combined([retried]) is retried
    found = combined([long, retried])
    assert isinstance(found, Parked) and found.delay == 5.0


def test_a_cancelled_task_does_not_go_on(app: App) -> None:
    calls: list[str] = []

    @app.task_with_context
    def order(context: Context) -> None:
        context.sleep(10)
        calls.append("ship")

    with app.inline() as inline:
        result = order.delay()
        assert result.cancel()
        inline.advance(10)
        with pytest.raises(TaskCancelled):
            result.get()
    assert calls == []


def refused(app: App, function: Callable[[Context], Any], **options: Any) -> str:
    """Why the task that calls this fails."""
    task = app.task_with_context(name="shop.refused", **options)(function)
    sending = {"session": "s"} if options.get("queue") == "sessions" else {}
    with app.inline():
        with pytest.raises(TaskFailed) as caught:
            task.with_options(**sending).delay().get()
        assert caught.value.error_type == StepError.__name__
    return str(caught.value)


def test_where_no_run_could_go_on_a_wait_is_refused(app: App) -> None:
    app.queue("sessions", sessions=True)
    inside = refused(app, lambda context: context.step("a", lambda: context.sleep(1)))
    assert "sleep is called inside step 'a'" in inside
    del app.tasks["shop.refused"]
    session = refused(app, lambda context: context.sleep(1), queue="sessions")
    assert "those behind it would overtake it" in session
    del app.tasks["shop.refused"]
    once = refused(app, lambda context: context.sleep(1), delivery="at-most-once")
    assert "delivered at most once" in once


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 91 * DAY])
def test_a_time_that_no_wait_may_have(app: App, seconds: float) -> None:
    found = refused(app, lambda context: context.sleep(seconds))
    assert "sleeps for 0 to 7.776e+06 seconds (max_wait)" in found


def test_a_swallowed_wait_fails(app: App) -> None:
    def swallow(context: Context) -> None:
        try:
            context.sleep(10)
        except BaseException:  # noqa: BLE001  # what a careless task does
            return

    assert "caught the end of its run (it sleeps, until" in refused(app, swallow)


def test_without_a_worker_it_returns_at_once() -> None:
    context = Context.for_testing()
    context.sleep(10**6)
    assert [each.due > 0 for each in context.steps._history.keeper.read()] == [True]


def test_a_name_of_its_own_on_the_wire(app: App) -> None:
    codec = Codec(signing_keys=[b"0123456789abcdef"])
    message = TaskMessage("t", "shop.order", "q", b"\x93\x90\x80\x80", expires=2e9, snooze_count=2)
    parked = message.parked()
    envelope = codec.to_envelope(parked)
    assert envelope.headers["task"] == "shop.order" + CONTINUE
    found = codec.from_envelope(envelope, "q")
    assert (found.task, found.continued, found.hop, found.expires) == ("shop.order", True, 1, None)
    assert found.snooze_count == 2
    assert found.resubmitted(counted=True).continued and found.replayed().continued
    assert not found.replayed(keep_saved=False).continued
    plain = codec.from_envelope(codec.to_envelope(message), "q")
    assert (plain.task, plain.continued) == ("shop.order", False)
    for name in ("shop.a#continue", "shop.a#renewed"):
        with pytest.raises(ConfigurationError, match="stands for a task that goes on"):
            app.task(name=name)(lambda: None)


def test_a_unique_key_is_held_while_its_task_waits(app: App) -> None:
    """It would be free a day after the send."""

    @app.task_with_context(unique="arguments", on_conflict="raise")
    def order(context: Context, card: str) -> None:
        context.sleep(5 * DAY)

    with app.inline() as inline:
        order.delay("visa")
        unique = unique_engine(app)
        assert unique is not None
        for _ in range(4):
            inline.advance(DAY + 60)
            with pytest.raises(NotUnique):
                order.delay("visa")
            unique.repair()
        inline.advance(DAY)
        assert order.delay("visa").state == "waiting", "the next one"


def test_a_schedule_sees_that_the_task_before_waits(app: App) -> None:
    @app.task_with_context
    def report(context: Context) -> None:
        context.sleep(3 * DAY)

    with app.inline() as inline:
        result = report.delay()
        results = app.results
        assert results is not None
        record = results.get(result.id)
        assert record is not None and record.due_again is not None
        due = record.due_again
        assert record.parked_at(due) and record.parked_at(due + 3600)
        assert not record.parked_at(due + 2 * DAY), "nothing woke it: it is lost"
        inline.advance(3 * DAY)
        ended = results.get(result.id)
        assert ended is not None and not ended.parked_at(due)


def test_arguments_of_a_task_that_waits_are_not_collected(app: App, tmp_path: Path) -> None:
    """Where the service hides the message, the row of the wait shows what it needs."""
    app = App(
        "shop",
        broker="servicebus://nowhere.invalid",
        payloads=str(tmp_path),
        payload_threshold=1000,
    )

    @app.task_with_context
    def order(context: Context, data: bytes) -> int:
        context.sleep(10)
        return len(data)

    def arguments() -> list[str]:
        assert app.payloads is not None
        return [
            each.name for each in app.payloads.store.list() if each.kind == PayloadKind.ARGUMENTS
        ]

    with app.inline() as inline:
        result = order.delay(b"x" * 30_000)
        assert len(arguments()) == 1
        found: set[str] = set()
        assert PayloadHolders(None, app.results)._rows(found) == ""
        assert set(arguments()) <= found
        inline.advance(10)
        assert result.get() == 30_000


def test_with_every_queue_empty_a_task_that_waits_is_open(tmp_path: Path) -> None:
    """Its message is gone: the rows alone say that it is open, and hold what wakes it."""
    app = App(
        "shop",
        broker="servicebus://nowhere.invalid",
        payloads=str(tmp_path),
        payload_threshold=1000,
    )

    @app.task_with_context(unique="arguments", on_conflict="raise", expires=60.0)
    def order(context: Context, data: bytes) -> list[Any]:
        return [len(data), context.wait_for("approved", timeout=30 * DAY)]

    with app.inline() as inline:
        result = order.delay(b"x" * 30_000)
        app.broker.purge("default")
        assert not app.broker.peek("default", limit=10)
        results, unique = app.results, unique_engine(app)
        assert results is not None and unique is not None
        for _ in range(3):
            inline.advance(DAY)
            unique.repair()
            app.sends.signals.repair()
            now = inline._worker._clock.wall()
            results.purge(now - 7 * DAY)
            with pytest.raises(NotUnique):
                order.delay(b"x" * 30_000)
            found: set[str] = set()
            assert PayloadHolders(None, app.results)._rows(found) == ""
            assert app.payloads is not None
            kept = {each.name for each in app.payloads.store.list()}
            assert kept and kept <= found
            record = results.get(result.id)
            assert record is not None and record.parked_at(now), "what a schedule's overlap asks"
            assert not app.broker.peek("default", limit=10)
        result.signal("approved", "yes")
        assert result.get(0) == [30_000, "yes"]


def test_no_signature_is_too_old_for_a_timer() -> None:
    """`signature_max_age` counts from the time at which a message is due."""
    app = App(
        "shop",
        broker="servicebus://nowhere.invalid",
        signing_keys=["0123456789abcdef"],
        signature_max_age=60.0,
    )

    @app.task_with_context
    def order(context: Context) -> str:
        context.sleep(3 * DAY)
        return str(context.wait_for("approved", timeout=3 * DAY))

    with app.inline() as inline:
        result = order.delay()
        inline.advance(3 * DAY + 1)
        inline.advance(2 * DAY)
        result.signal("approved", "yes")
        assert result.get(0) == "yes"
