"""Results of invocations, on a store in memory."""

import asyncio
import contextvars

import pytest

from aztask import (
    App,
    ConfigurationError,
    Reject,
    ResultTimeout,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
)
from aztask.context import Context, TaskLease, set_current_context, set_only_slot
from aztask.message.message import TaskMessage
from aztask.settlement import Complete
from aztask.stores.records.base import (
    Finish,
    Outcome,
    RunKey,
    RunningTask,
    Start,
    State,
    WorkerRecord,
)
from aztask.support.clock import SYSTEM_CLOCK


@pytest.fixture
def app():
    app = App("shop", broker="local://:memory:", results="local://:memory:")
    yield app
    app.close()


def end(app, state, **fields):
    """Record how the task "a" ended."""
    app.results.start([Start(RunKey("a"), "shop.add", "default", 1, "owner", "w", 1.0)])
    outcome = Outcome(state, Complete(), at=2.0, **fields)
    assert app.results.record([Finish(RunKey("a"), "owner", outcome)]) == [True]


def test_a_success_has_a_value(app):
    result = app.result("a")
    assert (result.state, result.ready()) == ("pending", False)
    end(app, State.SUCCEEDED, value=app.codec.encode_value([1, 2]))
    assert (result.ready(), result.successful(), result.failed()) == (True, True, False)
    assert (result.get(timeout=0), result.error) == ([1, 2], None)
    assert repr(result) == "<AsyncResult a>"


def test_a_failure_is_raised_with_its_remote_error(app):
    end(app, State.FAILED, error_type="KeyError", error="'x'", traceback="Traceback")
    result = app.result("a")
    assert result.failed()
    assert (result.error.error_type, result.error.error) == ("KeyError", "'x'")
    with pytest.raises(TaskFailed) as caught:
        result.get(timeout=0)
    assert caught.value.traceback == "Traceback"


@pytest.mark.parametrize(
    ("state", "error"), [(State.CANCELLED, TaskCancelled), (State.EXPIRED, TaskExpired)]
)
def test_other_ends_have_errors_of_their_own(app, state, error):
    end(app, state)
    with pytest.raises(error, match="task a was"):
        app.result("a").get(timeout=0)


def test_a_damaged_value_is_no_success(app):
    end(app, State.SUCCEEDED, value=b"\xc1")
    with pytest.raises(Exception, match="the value of task a is damaged"):
        app.result("a").get(timeout=0)


class TestProgress:
    def beat(self, app, name, seen_at, progress):
        task = RunningTask("a", "shop.add", "default", 1.0, progress=progress)
        other = RunningTask("b", "shop.add", "default", 1.0, progress=app.codec.encode_value(9))
        app.results.heartbeat(WorkerRecord(name, 1.0, seen_at, ("q",), 2, 0, tasks=(other, task)))

    def test_it_is_that_of_the_newest_heartbeat_until_the_task_ends(self, app):
        result = app.result("a")
        assert result.progress is None
        self.beat(app, "new", 20.0, app.codec.encode_value({"row": 7}))
        self.beat(app, "old", 10.0, app.codec.encode_value({"row": 3}))
        assert result.progress == {"row": 7}
        end(app, State.SUCCEEDED)
        assert result.progress is None

    @pytest.mark.parametrize("progress", [None, b"\xc1"])
    def test_it_is_none_without_a_checkpoint_that_can_be_read(self, app, progress):
        self.beat(app, "one", 20.0, progress)
        assert app.result("a").progress is None


def test_waiting_is_bounded(app):
    with pytest.raises(ResultTimeout, match="did not end within 0 s"):
        app.result("a").get(timeout=0)


def test_cancel_and_forget(app):
    result = app.result("a")
    assert (result.cancel(), result.state) == (True, "cancelled")
    result.forget()
    assert result.state == "pending"
    end(app, State.SUCCEEDED)
    assert not result.cancel()
    assert (result.forget(), result.forget()) == (True, False)


def test_without_a_store_every_question_says_so():
    app = App("shop", broker="local://:memory:")
    with pytest.raises(ConfigurationError, match="no result store is configured"):
        app.result("a").get(timeout=0)
    app.close()


@pytest.mark.parametrize(("alone", "running", "warns"), [(1, 1, 1), (0, 1, 0), (1, 0, 0)])
def test_a_task_that_waits_in_the_only_slot_of_its_worker_is_warned(caplog, alone, running, warns):
    app = App("shop", broker="local://:memory:", results="local://:memory:")
    lease = TaskLease(SYSTEM_CLOCK.monotonic() + 60, ask=lambda seconds: None)
    message = TaskMessage("parent", "shop.add", "default", b"")
    context = Context(message, delivery_count=1, lease=lease, save=lambda state: None)

    def wait():
        set_only_slot(bool(alone))
        set_current_context(context if running else None)
        with pytest.raises(ResultTimeout):
            app.result("child").get(timeout=0)

    contextvars.copy_context().run(wait)
    app.close()
    assert ("a task waits for task child, but its worker runs one task" in caplog.text) is bool(
        warns
    )


def test_a_wait_that_ends_too_early_says_in_which_state_the_task_is(app):
    with pytest.raises(ResultTimeout, match=r"no worker has started it.* that the id is right"):
        app.result("unknown").get(timeout=0)
    app.send("shop.add", [1, 2], task_id="waits")
    with pytest.raises(ResultTimeout, match=r"no worker has started it; .* aztask workers$"):
        app.result("waits").get(timeout=0)
    app.results.start([Start(RunKey("runs"), "shop.add", "default", 1, "one", "w", 1.0)])
    with pytest.raises(ResultTimeout, match="it is running; ask again"):
        app.result("runs").get(timeout=0)
    with pytest.raises(ResultTimeout, match="it is running; ask again"):
        asyncio.run(app.result("runs").aget(timeout=0.01))


def test_an_unknown_id_can_be_told_from_a_task_that_waits(app):
    task = app.task(name="shop.add")(lambda: None)
    waits = task.with_options(task_id="my-own").delay()
    assert (waits.state, waits.exists()) == ("pending", True)
    unknown = app.result("nosuch")
    assert (unknown.state, unknown.exists()) == ("pending", False)
    end(app, State.SUCCEEDED)
    assert app.result("a").exists()


def test_the_error_of_a_rejected_task_has_its_description(app):
    rejected = Reject("no such customer", "customer 12 was deleted")
    assert (rejected.reason, rejected.description) == (
        "no such customer",
        "customer 12 was deleted",
    )
    with app.inline():

        @app.task
        def look():
            raise rejected

        assert look.delay().error.error == "no such customer: customer 12 was deleted"
