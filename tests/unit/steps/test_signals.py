"""Signals to tasks that wait, children, and what wakes a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from aztask import (
    App,
    ConfigurationError,
    Context,
    EncodeError,
    RetryPolicy,
    SignalRefused,
    TaskCancelled,
    TaskFailed,
    WaitTimeout,
)
from aztask.errors import BrokerUnavailable, ContentRefused, DecodeError, NotFound
from aztask.message.encryption import Locked
from aztask.message.message import CALLER, PUT_OFF_SERIES, TaskMessage
from aztask.operate.deadletters import Selection
from aztask.operate.deadletters.actions import replay as replaying
from aztask.operate.steps import steps
from aztask.queues.local.payload import envelope_of
from aztask.steps import signals as signalling
from aztask.steps.history import waits_in
from aztask.steps.keepers import StoredOutside
from aztask.steps.suspension import Parked, StepDelayed, combined
from aztask.steps.waits import SIGNALS, SLEEPS, VERSION, ParkedRun, Wait
from aztask.stores.records.base import State
from aztask.stores.rows import Change

DAY = 86400.0


@pytest.fixture
def app() -> App:
    return App("shop", broker="servicebus://nowhere.invalid", retry=RetryPolicy(3, delay=1.0))


def scheduled(app: App) -> int:
    """How many messages wait in the queue."""
    return len(app.broker.peek("default", limit=100))


def rows(app: App, task_id: str) -> int:
    """How many rows of waits a task has."""
    store = app.sends.signals.store
    assert store is not None
    found = store.read(task_id)
    return len(found.signals) + (found.parked is not None)


def test_a_signal_wakes_a_task_and_cancels_its_timer(app: App) -> None:
    calls = []

    @app.task_with_context
    def order(context: Context, card: str) -> Any:
        context.step("charge", calls.append, "charge")
        approval = context.wait_for("approved", timeout=3 * DAY)
        context.step("ship", calls.append, "ship")
        return [card, approval]

    with app.inline():
        result = order.delay("visa")
        assert (result.state, calls) == ("waiting", ["charge"])
        result.signal("approved", {"by": "ann"})
        assert result.get(0) == ["visa", {"by": "ann"}]
        assert calls == ["charge", "ship"]
        assert scheduled(app) == 0, "its timer is cancelled"
        assert rows(app, result.id) == 0
        assert [each.record.state for each in steps(app, result.id)] == ["done"] * 3


def test_signals_of_one_name_queue_up(app: App) -> None:
    @app.task_with_context
    def order(context: Context) -> list[Any]:
        context.sleep(10)
        return [context.wait_for("page") for _ in range(3)]

    with app.inline() as inline:
        result = order.delay()
        for page in (1, 2):
            result.signal("page", page)
        assert result.state == "waiting", "no wait has asked for them"
        inline.advance(10)
        assert result.state == "waiting"
        result.signal("other", 0)
        assert result.state == "waiting"
        result.signal("page", 3)
        assert result.get(0) == [1, 2, 3]
        assert rows(app, result.id) == 0, "the other signal is gone with the task"


def test_a_signal_that_comes_before_the_wait_does_not_park(app: App) -> None:
    @app.task_with_context
    def order(context: Context) -> Any:
        if context.message.hop == 0:
            app.result(context.task_id).signal("approved", "early")
        return context.wait_for("approved", timeout=10), context.message.hop

    with app.inline():
        assert order.delay().get(0) == ["early", 0]


def test_a_signal_during_parking_wakes_at_once(app: App) -> None:
    """After the wait looked for signals, and before the run was recorded."""

    @app.task_with_context
    def order(context: Context) -> Any:
        try:
            return context.wait_for("approved", timeout=10)
        finally:
            if context.message.hop == 0:
                app.result(context.task_id).signal("approved", "between")

    with app.inline():
        assert order.delay().get(0) == "between"


def test_a_cancellation_during_parking_ends_the_task_at_once(app: App) -> None:
    """It found no row of a parked run, and so woke none."""
    runs = []

    @app.task_with_context
    def order(context: Context) -> None:
        runs.append(context.message.hop)
        try:
            context.sleep(10 * DAY)
        finally:
            assert app.result(context.task_id).cancel()

    with app.inline():
        result = order.delay()
        with pytest.raises(TaskCancelled):
            result.get(0)
        assert app.results is not None
        assert [each.key.hop for each in app.results.history(result.id)] == [0, 1]
        assert (runs, scheduled(app), rows(app, result.id)) == ([0], 0, 0)


def test_the_time_of_a_wait_ends(app: App) -> None:
    seen = []

    @app.task_with_context
    def order(context: Context) -> Any:
        try:
            context.wait_for("approved", timeout=2 * DAY)
        except TimeoutError as error:
            seen.append(str(error))
            return context.step("refund", str, "refunded")

    with app.inline() as inline:
        result = order.delay()
        inline.advance(2 * DAY - 1)
        assert result.state == "waiting"
        inline.advance(2)
        assert result.get(0) == "refunded"
        assert seen == ["no signal approved came within 172800 s"]


def test_a_timeout_that_is_not_caught_fails_the_task(app: App) -> None:
    @app.task_with_context(retry=RetryPolicy(0))
    def order(context: Context) -> Any:
        return context.wait_for("approved", timeout=5)

    with app.inline() as inline:
        result = order.delay()
        inline.advance(5)
        with pytest.raises(TaskFailed) as caught:
            result.get(0)
        assert caught.value.error_type == WaitTimeout.__name__


def test_a_signal_at_the_timeout_is_taken_once(app: App) -> None:
    """It is there when the run of the timer looks, so it wins; a later one waits for its wait."""

    @app.task_with_context
    def order(context: Context) -> list[Any]:
        found = []
        for _ in range(2):
            try:
                found.append(context.wait_for("approved", timeout=10))
            except WaitTimeout:
                found.append(None)
        return found

    with app.inline(run=False) as inline:
        result = order.delay()
        inline.run()
        inline._worker._time.move(10)
        result.signal("approved", "just")
        inline.run()
        assert result.state == "waiting"
        inline.advance(11)
        assert result.get(0) == ["just", None]


def test_the_first_of_several_names(app: App) -> None:
    @app.task_with_context
    def order(context: Context) -> Any:
        return [context.wait_any("approved", "rejected", timeout=10) for _ in range(2)]

    with app.inline():
        result = order.delay()
        result.signal("rejected", "too dear")
        result.signal("approved")
        assert result.get(0) == [["rejected", "too dear"], ["approved", None]]


def test_branches_wait_for_signals_side_by_side(app: App) -> None:
    @app.task_with_context
    def order(context: Context) -> Any:
        def branch(name: str) -> Callable[[], Any]:
            return lambda: context.wait_for(name, timeout=100)

        return context.gather(branch("a"), branch("b"), lambda: context.sleep(50))

    with app.inline() as inline:
        result = order.delay()
        result.signal("b", 2)
        assert result.state == "waiting"
        inline.advance(50)
        result.signal("a", 1)
        assert result.get(0) == [1, 2, None]


def test_several_waits_are_one(app: App) -> None:
    first = Parked("it sleeps", 30.0, 20.0, (Wait(SLEEPS, (), 30.0),), 1.0)
    wait = Wait(SIGNALS, ("a", "b"), 90.0)
    second = Parked(f"it waits for {wait}", 90.0, 20.0, (wait,), 2.0)
    found = combined([second, first, StepDelayed("ship", 25.0, 20.0, "down")])
    assert isinstance(found, Parked)
    assert (found.delay, found.since, set(found.waits)) == (5.0, 1.0, {*first.waits, wait})
    assert str(combined([second, first])).startswith("it sleeps, and signal a or b, until")


def test_a_child_runs_once_and_its_value_is_recorded(app: App) -> None:
    ran = []

    @app.task
    def ship(card: str) -> str:
        ran.append(card)
        return f"parcel for {card}"

    @app.task_with_context(retry=RetryPolicy(2, delay=0.1))
    def order(context: Context, card: str) -> Any:
        parcel = context.call(ship, card)
        if context.resubmit_count == 0:
            raise OSError("after the child")
        return parcel, context.call(ship.with_options(queue="slow"), "two")

    with app.inline() as inline:
        result = order.delay("visa")
        assert result.get(0) == ["parcel for visa", "parcel for two"]
        assert ran == ["visa", "two"]
        assert inline.sent_to("shop.ship")[1].queue == "slow"
        states = [(each.record.kind, each.record.label) for each in steps(app, result.id)]
        assert states[:2] == [("step", "start shop.ship"), ("call", "shop.ship")]


def test_a_child_that_is_not_done_wakes_its_caller(app: App) -> None:
    @app.task_with_context
    def ship(context: Context, card: str) -> str:
        assert context.message.extra[CALLER]
        context.sleep(DAY)
        return card

    @app.task_with_context
    def order(context: Context, card: str) -> Any:
        return context.call(ship, card), context.message.hop

    with app.inline() as inline:
        result = order.delay("visa")
        assert result.state == "waiting"
        inline.advance(DAY)
        assert result.get(0) == ["visa", 1]


def test_how_a_child_fails(app: App) -> None:
    @app.task(retry=RetryPolicy(0))
    def broken() -> None:
        raise ValueError("no")

    @app.task_with_context
    def sleeper(context: Context) -> None:
        context.sleep(DAY)

    @app.task_with_context
    def order(context: Context) -> Any:
        seen = []
        for child in (broken, sleeper):
            try:
                context.call(child)
            except (TaskFailed, TaskCancelled) as error:
                seen.append([type(error).__name__, str(error).split(":")[0]])
        return seen

    with app.inline() as inline:
        result = order.delay()
        child = inline.sent_to("shop.sleeper")[0].id
        assert app.result(child).cancel()
        assert result.get(0) == [
            ["TaskFailed", "ValueError"],
            ["TaskCancelled", f"task {child} was cancelled before it ran"],
        ]


def test_the_first_of_a_signal_and_tasks(app: App) -> None:
    ran = []

    @app.task
    def quick(card: str) -> str:
        ran.append(card)
        return f"checked {card}"

    @app.task_with_context
    def slow(context: Context, card: str) -> str:
        context.sleep(DAY)
        return f"parcel for {card}"

    @app.task_with_context
    def order(context: Context, card: str) -> Any:
        parcel, check = context.start(slow, card), context.start(quick, card)
        found = []
        waited: list[Any] = ["cancelled", parcel, check]
        while waited:
            first, value = context.wait_any(*waited, timeout=2 * DAY)
            waited.remove(first)
            found.append([getattr(first, "name", first), value])
        return found

    with app.inline() as inline:
        result = order.delay("visa")
        assert result.state == "waiting"
        result.signal("cancelled", "by ann")
        assert result.state == "waiting", "a task is left"
        inline.advance(DAY)
        assert result.get(0) == [
            ["shop.quick", "checked visa"],
            ["cancelled", "by ann"],
            ["shop.slow", "parcel for visa"],
        ]
        assert ran == ["visa"]
        kinds = [each.record.kind for each in steps(app, result.id)]
        assert kinds == ["step", "step", "any", "any", "any"]
        assert rows(app, result.id) == 0


def test_a_wait_for_tasks_ends_with_its_time_or_their_error(app: App) -> None:
    @app.task_with_context
    def slow(context: Context) -> None:
        context.sleep(DAY)

    @app.task(retry=RetryPolicy(0))
    def broken() -> None:
        raise ValueError("no")

    @app.task_with_context
    def order(context: Context) -> Any:
        child, found = context.start(slow), []
        for wanted in ((child, "stop"), (context.start(broken), child)):
            try:
                found.append(context.wait_any(*wanted, timeout=60))
            except (WaitTimeout, TaskFailed) as error:
                found.append(str(error).replace(child.id, "ID"))
        return found

    with app.inline() as inline:
        result = order.delay()
        inline.advance(61)
        late, failed = result.get(0)
        assert late == "no signal stop came, and task shop.slow ID did not end within 60 s"
        assert failed.startswith("ValueError: no")


def test_what_a_task_with_several_waits_for_is_shown(app: App) -> None:
    @app.task_with_context
    def slow(context: Context) -> None:
        context.sleep(DAY)

    @app.task_with_context
    def order(context: Context) -> Any:
        return context.wait_any("stop", context.start(slow))

    with app.inline() as inline:
        result = order.delay()
        child = inline.sent_to("shop.slow")[0].id
        store = app.sends.signals.store
        assert store is not None
        parked = store.parked(result.id)
        assert parked is not None
        assert [str(each) for each in parked.waits] == ["signal stop", f"task {child}"]
        (record,) = [each.record for each in steps(app, result.id) if each.record.kind == "any"]
        assert waits_in(record) == parked.waits


def test_a_direct_call_runs_started_tasks(app: App) -> None:
    @app.task
    def double(number: int) -> int:
        return 2 * number

    context = Context.for_testing(signals={"stop": ["now"]})
    child = context.start(double, 4)
    assert context.wait_any("stop", child) == ("stop", "now")
    assert context.wait_any("stop", child) == (child, 8)
    assert context.call(double, 5) == 10


def test_a_cancelled_task_ends_at_once(app: App) -> None:
    @app.task_with_context
    def order(context: Context) -> None:
        context.sleep(10 * DAY)

    with app.inline():
        result = order.delay()
        assert result.cancel()
        with pytest.raises(TaskCancelled):
            result.get(0)
        assert scheduled(app) == 0
        assert rows(app, result.id) == 0


def test_one_call_signals_many_tasks(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """In portions; what takes no signal stops no other."""

    @app.task_with_context
    def order(context: Context) -> Any:
        return context.wait_for("approved", timeout=DAY)

    @app.task_with_context
    def other(context: Context) -> Any:
        return context.wait_for("other", timeout=DAY), context.wait_for("approved", timeout=DAY)

    @app.task
    def done() -> None: ...

    monkeypatch.setattr(signalling, "TOGETHER", 2)
    with app.inline():
        waiting = [order.delay() for _ in range(5)]
        later, ended = other.delay(), done.delay()
        ids = [waiting[0].id, "x", *(each.id for each in waiting), ended.id, later.id]
        refused = app.signal_all(ids, "approved", "yes")
        assert {name: type(error) for name, error in refused.items()} == {
            "x": NotFound,
            ended.id: SignalRefused,
        }
        assert [each.get(0) for each in waiting] == ["yes"] * 5
        assert later.state == "waiting"
        later.signal("other", "go")
        assert later.get(0) == ["go", "yes"]
        assert scheduled(app) == 0, "their timers are cancelled"
        assert [rows(app, each) for each in ("x", ended.id)] == [0, 0], "what is refused is gone"
        assert app.signal_all([], "approved") == {}
        with pytest.raises(SignalRefused):
            app.signal_all(ids, "two\nlines")


def test_a_signal_is_one_transaction_where_all_is_one_file(app: App, tmp_path: Path) -> None:
    """What fails in the middle leaves nothing: neither a row nor a wake-up."""
    place = f"local://{tmp_path}/all.db"
    app = App("shop", broker=place, results=place)
    app.broker.declare("default")
    places = Places(app, app.broker)
    signals = signalling.TaskSignals(places, app.codec)  # type: ignore[arg-type]
    app.send("shop.order", task_id="a")
    store = signals.store
    assert store is not None
    message = TaskMessage("a", "shop.order", "default", b"\x93\x90\x80\x80").parked()
    now = store.now()
    waits = (Wait(SIGNALS, ("go",), now + DAY),)
    run = ParkedRun("a", "shop.order", "default", 0, 1, now, now + DAY, waits, b"")
    assert not signals.park(run, message)
    before = app.broker.stats("default")

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    signals._cancel_timers = fails  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        signals.signal("a", "go", 1)
    assert app.broker.stats("default") == before
    assert store.read("a").signals == []
    del signals._cancel_timers  # type: ignore[misc]
    signals.signal("a", "go", 1)
    assert app.broker.stats("default").active == before.active + 1
    assert len(store.read("a").signals) == 1
    app.close()


def test_who_takes_no_signal(app: App) -> None:
    @app.task
    def done() -> None: ...

    @app.task(retry=RetryPolicy(0))
    def dead() -> None:
        raise ValueError("no")

    with app.inline():
        with pytest.raises(NotFound, match="does not know task x; check the id"):
            app.result("x").signal("a")
        ended = done.delay()
        with pytest.raises(SignalRefused, match=r"has ended \(succeeded\) and takes no signal$"):
            ended.signal("a")
        with pytest.raises(SignalRefused, match=r"\(failed\).*; replay it first"):
            dead.delay().signal("a")


def test_what_is_no_signal(app: App) -> None:
    @app.task_with_context
    def order(context: Context) -> Any:
        return context.wait_for("a")

    with app.inline():
        result = order.delay()
        for name in ("", "x" * 201, 7, "a\nb"):
            with pytest.raises(SignalRefused, match="a signal's name is one line"):
                result.signal(name)  # type: ignore[arg-type]
        with pytest.raises(EncodeError, match="at most 16384 are taken"):
            result.signal("a", "x" * 17_000)
        with pytest.raises(EncodeError):
            result.signal("a", object())
        assert rows(app, result.id) == 1


def test_at_most_so_many_signals_of_one_name(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signalling, "MOST_SIGNALS", 3)

    @app.task_with_context
    def order(context: Context) -> None:
        context.sleep(10)

    with app.inline():
        result = order.delay()
        for number in range(3):
            result.signal("a", number)
        result.signal("b")
        with pytest.raises(SignalRefused, match="3 signals 'a' wait for task"):
            result.signal("a")
        assert rows(app, result.id) == 5


class NoRight:
    """A broker that takes no message from this program."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def send(self, queue: str, envelopes: Any) -> None:
        raise ConfigurationError("no permission to send")


class Places:
    def __init__(self, app: App, broker: Any) -> None:
        self._app, self._broker = app, broker

    def broker(self) -> Any:
        return self._broker

    def results(self) -> Any:
        return self._app.results


@pytest.fixture
def unable(app: App) -> Callable[[], signalling.TaskSignals]:
    return lambda: signalling.TaskSignals(Places(app, NoRight(app.broker)), app.codec)  # type: ignore[arg-type]


def test_housekeeping_wakes_for_a_signaller_that_may_not_send(
    app: App, unable: Callable[[], signalling.TaskSignals]
) -> None:
    @app.task_with_context
    def order(context: Context, name: str) -> Any:
        return context.wait_for(name)

    with app.inline() as inline:
        woken, cancelled, other = order.delay("a"), order.delay("a"), order.delay("b")
        for each in (woken, other):
            unable().signal(each.id, "a", 1)
        assert app.results is not None and app.results.cancel(cancelled.id, 0.0)
        assert unable().wake(cancelled.id)
        inline.run()
        assert woken.state == "waiting"
        assert app.results.history(cancelled.id)[-1].key.hop == 0
        signals = app.sends.signals
        inline._worker._time.move(2.9)
        signals.repair()
        inline.run()
        assert woken.state == "waiting"
        assert app.results.history(cancelled.id)[-1].key.hop == 1, "it has ended"
        inline._worker._time.move(0.2)
        assert signals.repair() == 2
        inline.run()
        assert woken.get(0) == 1
        assert other.state == "waiting"
        assert signals.repair() == 0, "it is not looked at again soon"


class Broken:
    """A result store that does not give the runs of some tasks, and counts who asks."""

    def __init__(self, app: App, error: Exception, *broken: str) -> None:
        self._results = app.results
        self.error, self.broken = error, broken
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._results, name)

    def get(self, task_id: str) -> Any:
        self.asked.append(task_id)
        if task_id in self.broken:
            raise self.error
        return self._results.get(task_id)  # type: ignore[union-attr]


class BrokenPlaces(Places):
    def __init__(self, app: App, results: Broken) -> None:
        super().__init__(app, app.broker)
        self._results = results

    def results(self) -> Any:
        return self._results


def waiting_order(app: App) -> Any:
    @app.task_with_context
    def order(context: Context) -> Any:
        return context.wait_for("a")

    return order


def signalled(app: App, unable: Callable[[], signalling.TaskSignals], *ids: str) -> list[Any]:
    """Tasks with signals whose signallers could not wake them."""
    order = app.tasks["shop.order"] if "shop.order" in app.tasks else waiting_order(app)
    found = [order.with_options(task_id=each).delay() for each in ids]
    for each in ids:
        unable().signal(each, "a", each)
    return found


@pytest.mark.parametrize("error", [DecodeError("damaged"), Locked("damaged")])
def test_what_cannot_be_repaired_does_not_stop_the_others(
    error: Exception,
    app: App,
    unable: Callable[[], signalling.TaskSignals],
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    monkeypatch.setattr(signalling, "PAGE", 2)
    with app.inline() as inline:
        found = signalled(app, unable, "bad-1", "bad-2", "bad-3", "good")
        places = BrokenPlaces(app, Broken(app, error, "bad-1", "bad-2", "bad-3"))
        signals = signalling.TaskSignals(places, app.codec)  # type: ignore[arg-type]
        inline._worker._time.move(4)
        assert [signals.repair() for _ in range(3)] == [2, 2, 0]
        inline.run()
        assert found[-1].get(0) == "good"
        assert caplog.text.count("is woken later: damaged") == 3
        places._results.broken = ()
        inline._worker._time.move(61)
        assert [signals.repair() for _ in range(3)] == [2, 1, 0]
        inline.run()
        assert [each.get(0) for each in found] == ["bad-1", "bad-2", "bad-3", "good"]


def test_a_wait_for_a_name_of_two_lines_is_refused(app: App) -> None:
    """Its record has a line for each name."""

    @app.task_with_context
    def order(context: Context) -> Any:
        return context.wait_for("a\nb")

    with app.inline(), pytest.raises(TaskFailed, match="a signal's name is one line"):
        order.delay().get(0)


def test_what_waits_stays_while_the_row_of_its_run_is_damaged(
    app: App,
    unable: Callable[[], signalling.TaskSignals],
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    """It may be readable later, for example with a key that is missing here."""
    with app.inline() as inline:
        (result,) = signalled(app, unable, "t")
        kept, results = rows(app, "t"), app.results
        assert results is not None
        known = results.get("t")
        assert known is not None
        damaged = replace(known, state=State.UNREADABLE, outcome=None, damage="no such key")
        inline._worker._time.move(4)
        with monkeypatch.context() as patched:
            patched.setattr(results, "get", lambda task_id: damaged)
            app.sends.signals.repair()
        assert rows(app, "t") == kept == 2
        assert "its row is damaged (no such key)" in caplog.text
        inline._worker._time.move(61)
        app.sends.signals.repair()
        inline.run()
        assert result.get(0) == "t"


def test_an_unreachable_store_is_no_fault_of_a_row(
    app: App, unable: Callable[[], signalling.TaskSignals], caplog: Any
) -> None:
    with app.inline() as inline:
        (task,) = signalled(app, unable, "t")
        away = BrokenPlaces(app, Broken(app, BrokerUnavailable("away"), "t"))
        inline._worker._time.move(4)
        with pytest.raises(BrokerUnavailable):
            signalling.TaskSignals(away, app.codec).repair()  # type: ignore[arg-type]
        assert "woken later" not in caplog.text
        assert app.sends.signals.repair() == 1, "its time is as it was"
        inline.run()
        assert task.get(0) == "t"


def test_an_unreachable_broker_is_no_fault_of_a_row(
    app: App, unable: Callable[[], signalling.TaskSignals]
) -> None:
    class Away(NoRight):
        def send(self, queue: str, envelopes: Any) -> None:
            raise BrokerUnavailable("away")

    with app.inline() as inline:
        (task,) = signalled(app, unable, "t")
        away = signalling.TaskSignals(Places(app, Away(app.broker)), app.codec)  # type: ignore[arg-type]
        assert away.wake("t"), "it is stored, and housekeeping is to wake it"
        inline._worker._time.move(4)
        with pytest.raises(BrokerUnavailable):
            away.repair()
        assert app.sends.signals.repair() >= 1
        inline.run()
        assert task.get(0) == "t"


def test_one_worker_looks_at_a_task(app: App, unable: Callable[[], signalling.TaskSignals]) -> None:
    """Both have seen that it is due."""
    with app.inline() as inline:
        signalled(app, unable, "t")
        inline._worker._time.move(4)
        store = app.sends.signals.store
        assert store is not None
        due = store.due(10)
        assert app.sends.signals.repair() == 1
        results = Broken(app, ValueError())
        late = signalling.TaskSignals(BrokenPlaces(app, results), app.codec)  # type: ignore[arg-type]
        assert late.store is not None
        late.store.due = lambda limit: due  # type: ignore[method-assign]
        late.repair()
        assert results.asked == []


def test_a_row_of_a_newer_release_stays(
    app: App, unable: Callable[[], signalling.TaskSignals], caplog: Any
) -> None:
    """Its workers wake the task; a wait of this release, and housekeeping, keep it as it is."""
    with app.inline() as inline:
        signalled(app, unable, "t")
        store = app.sends.signals.store
        assert store is not None and app.results is not None
        parked = store.parked("t")
        assert parked is not None and parked.row is not None
        data = msgpack.packb([VERSION + 1, "t", {"waits": []}])
        newer = store._rows.write(Change(parked.row.place, {"due": 0.0, "data": data}, parked.row))
        StoredOutside(store, app.results, "t").signals(["a"], ())
        inline._worker._time.move(4)
        assert app.sends.signals.repair() == 2
        (kept,) = store.read("t").newer
        assert newer is not None and kept.values["data"] == data
        assert "1 rows of waiting tasks are of a newer aztask" in caplog.text
        assert app.sends.signals.repair() == 0, "it does not stop other rows"


def test_a_parent_is_seldom_looked_at_while_its_child_runs(app: App) -> None:
    @app.task_with_context
    def ship(context: Context) -> str:
        context.sleep(10 * 3600)
        return "parcel"

    @app.task_with_context
    def order(context: Context) -> Any:
        return context.call(ship)

    with app.inline() as inline:
        result = order.delay()
        results = Broken(app, ValueError())
        signals = signalling.TaskSignals(BrokenPlaces(app, results), app.codec)  # type: ignore[arg-type]
        for _ in range(9 * 60):
            inline._worker._time.move(60)
            signals.repair()
        looks = results.asked.count(result.id)
        assert 9 <= looks <= 16, "soon at first, then every hour"
        inline.advance(2 * 3600)
        assert result.get(0) == "parcel", "its child has woken it"


def test_housekeeping_sends_a_timer_that_is_lost(app: App) -> None:
    @app.task_with_context
    def order(context: Context) -> str:
        context.sleep(10)
        return "awake"

    with app.inline(run=False) as inline:
        result = order.delay()
        inline.run()
        purge(app)
        inline._worker._time.move(65)
        app.sends.signals.repair()
        assert scheduled(app) == 0, "a minute of grace"
        inline._worker._time.move(10)
        app.sends.signals.repair()
        inline.run()
        assert result.get(0) == "awake"


def test_housekeeping_sees_that_a_child_has_ended(app: App) -> None:
    """Its worker died before it woke the caller, or the service dead-lettered its message."""

    @app.task
    def ship() -> str:
        return "parcel"

    @app.task_with_context
    def order(context: Context) -> Any:
        return context.call(ship)

    with app.inline(run=False) as inline:
        woken = app.sends.signals
        woken.child_ended, kept = (lambda *_: None), woken.child_ended  # type: ignore[method-assign]
        result = order.delay()
        inline.run()
        woken.child_ended = kept  # type: ignore[method-assign]
        assert result.state == "waiting"
        inline._worker._time.move(61)
        woken.repair()
        inline.run()
        assert result.get(0) == "parcel"


def test_rows_of_ended_tasks_go(app: App, unable: Callable[[], signalling.TaskSignals]) -> None:
    @app.task_with_context
    def order(context: Context) -> Any:
        app.result(context.task_id).signal("never", 1)
        if context.resubmit_count == 0:
            return "done"
        raise AssertionError

    with app.inline() as inline:
        result = order.delay()
        assert rows(app, result.id) == 1
        inline._worker._time.move(4)
        app.sends.signals.repair()
        assert rows(app, result.id) == 0


def test_the_signal_of_a_signaller_that_stands_still_waits_until_the_task_is_known(
    app: App,
) -> None:
    """It has written the row, and will look at the task when it goes on."""

    @app.task_with_context
    def order(context: Context) -> Any:
        return context.wait_for("a")

    with app.inline() as inline:
        store = app.sends.signals.store
        assert store is not None
        value = app.codec.encode_value(7)
        store.add_all(["known", "never"], "a", value)
        for seconds in (4, 3600):
            inline._worker._time.move(seconds)
            app.sends.signals.repair()
            assert [rows(app, each) for each in ("known", "never")] == [1, 1]
        result = order.with_options(task_id="known").delay()
        assert result.get(0) == 7
        inline._worker._time.move(DAY)
        app.sends.signals.repair()
        assert rows(app, "never") == 0, "its signaller is gone"


def test_signals_of_a_dead_letter_wait_for_its_replay(app: App) -> None:
    broken = [True]

    @app.task_with_context(retry=RetryPolicy(0))
    def order(context: Context) -> Any:
        context.sleep(1)
        if broken:
            raise ValueError("broken")
        return context.wait_for("a")

    with app.inline() as inline:
        result = order.delay()
        result.signal("a", 7)
        inline.advance(1)
        assert result.state == "failed"
        inline.advance(4)
        app.sends.signals.repair()
        broken.clear()
        replay(app, result.id)
        inline.run()
        assert result.get(0) == 7


def replay(app: App, task_id: str) -> None:

    replaying(app, ["default"], Selection(ids=(task_id,))).act()


def purge(app: App) -> None:
    receiver = app.broker.receiver("default", lease=30.0)
    ids = [each.envelope.message_id for each in app.broker.peek("default", limit=10)]
    assert app.broker.cancel_scheduled("default", ids) == len(ids)
    receiver.close()


def test_a_test_gives_the_signals() -> None:
    context = Context.for_testing(signals={"approved": ["ann", "bob"]})
    assert [context.wait_for("approved") for _ in range(2)] == ["ann", "bob"]
    with pytest.raises(WaitTimeout):
        context.wait_for("approved", timeout=10)


def test_a_test_calls_children(app: App) -> None:
    @app.task
    def double(number: int) -> int:
        return 2 * number

    assert Context.for_testing().call(double, 4) == 8


def test_the_wake_up_has_an_id_of_its_own() -> None:
    message = TaskMessage("t", "shop.order", "q", b"").parked(delivery_base=3)
    woken = message.woken()
    assert woken.key == message.key
    assert woken.message_id == f"t:0:1:put-{woken.put_off_count}" != message.message_id
    assert woken.put_off_count > message.put_off(series=PUT_OFF_SERIES).put_off_count
    assert woken.put_off().message_id != woken.message_id
    assert woken.delivery_base == 0


KEYS = ["0123456789abcdef"]


@pytest.fixture
def signed() -> App:
    """An app that obeys nothing unsigned."""
    place = "servicebus://nowhere.invalid"
    return App("shop", broker=place, signing_keys=KEYS, old_signatures=False)


def test_with_keys_signals_and_wake_ups_are_signed(signed: App, caplog: Any) -> None:
    @signed.task_with_context
    def order(context: Context) -> Any:
        return context.wait_for("a"), context.wait_for("a")

    stranger = App("shop", broker="servicebus://nowhere.invalid")
    with signed.inline() as inline:
        result = order.delay()
        result.signal("a", 1)
        forged = signalling.TaskSignals(Places(signed, signed.broker), stranger.codec)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="give this app the same signing_keys"):
            forged.signal(result.id, "a", "forged")
        store = forged.store
        assert store is not None
        store.add_all([result.id], "a", b"\xa6forged")
        assert not forged.wake(result.id) or scheduled(signed) == 1
        inline._worker._time.move(4)
        signed.sends.signals.repair()
        assert "1 signals or waiting tasks are damaged or not signed, and dropped" in caplog.text
        result.signal("a", 2)
        assert result.get(0) == [1, 2]


def test_the_wake_up_in_the_store_is_not_taken_by_a_queue(signed: App) -> None:

    @signed.task_with_context
    def order(context: Context) -> Any:
        return context.wait_for("a")

    with signed.inline():
        result = order.delay()
        store = signed.sends.signals.store
        assert store is not None
        parked = store.read(result.id).parked
        assert parked is not None and [str(each) for each in parked.waits] == ["signal a"]
        assert [each.id for each in store.runs()] == [result.id]
        with pytest.raises(ContentRefused):
            signed.codec.from_envelope(envelope_of(parked.payload), "default")


def test_a_stranger_who_changes_the_row_of_a_task_that_waits_moves_no_step_of_it(
    signed: App, caplog: Any
) -> None:
    """No signature covers that row, but one covers its message, and the record of the wait."""
    calls: list[str] = []

    @signed.task_with_context
    def order(context: Context) -> None:
        context.sleep(3 * DAY)
        context.step("ship", calls.append, "ship")

    def change(**values: Any) -> None:
        run = store.read(result.id).parked
        assert run is not None and run.row is not None
        store.remove([run.row])
        assert store.park(replace(run, row=None, **values), run.since)

    with signed.inline() as inline:
        result = order.delay()
        store = signed.sends.signals.store
        assert store is not None
        change(queue="other")
        signed.sends.signals.wake(result.id)
        assert "is not woken, it waits for its time" in caplog.text
        change(queue="default", waits=(Wait(SIGNALS, ("now",), 0.0),), due=0.0)
        assert signed.sends.signals.wake(result.id)
        inline.run()
        assert (result.state, calls) == ("waiting", []), "it was woken, and sleeps on"
        parked = store.read(result.id).parked
        assert parked is not None and parked.hop > 1
        inline.advance(3 * DAY)
        result.get(0)
        assert calls == ["ship"]


def test_arguments_that_are_stored_apart_come_with_the_wake_up(tmp_path: Path) -> None:
    app = App(
        "shop",
        broker="servicebus://nowhere.invalid",
        payloads=str(tmp_path),
        payload_threshold=1000,
    )

    @app.task_with_context
    def order(context: Context, data: bytes) -> Any:
        return len(data), context.wait_for("a")

    with app.inline():
        result = order.delay(b"x" * 30_000)
        result.signal("a", 1)
        assert result.get(0) == [30_000, 1]
