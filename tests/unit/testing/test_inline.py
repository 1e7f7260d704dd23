"""Inline mode: tasks run at the send, through the codec and the real pipeline."""

import asyncio
import contextvars
import logging
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from aztask import (
    App,
    Context,
    Reject,
    Retry,
    RetryPolicy,
    Snooze,
    chain,
    chord,
    current_context,
)
from aztask.errors import ConfigurationError, EncodeError, ResultTimeout, TaskCancelled, TaskFailed

STRATEGIES = ("resubmit", "abandon", "lease-timeout", "hold", "defer")


@pytest.fixture
def app():
    """An app whose broker cannot be reached: nothing may leave the process."""
    return App("shop", broker="servicebus://nowhere.invalid", retry=RetryPolicy(3, delay=100.0))


def test_a_task_runs_at_the_send_and_its_result_is_there(app):
    @app.task
    def add(a, b):
        return a + b

    with app.inline() as inline:
        result = add.delay(1, 2)
        assert result.ready()
        assert result.get() == 3
        assert add.map([(1, 1), (2, 2)])[1].get() == 4
        assert app.send("shop.add", [5, 5]).get() == 10
        sent = inline.assert_sent(add, 1, 2)
        assert (sent.task, sent.queue, sent.id) == ("shop.add", "default", result.id)
        assert len(inline.sent_to("shop.add")) == 4
    assert "broker" not in vars(app)
    assert app.address == "servicebus://nowhere.invalid"


def test_context_variables_of_a_run_are_gone_with_it(app):
    tenant = contextvars.ContextVar("tenant", default="none")
    tenant.set("of the caller")

    @app.task
    def change():
        before = tenant.get()
        tenant.set("of the task")
        return before

    with app.inline():
        assert change.delay().get() == "of the caller"
    assert tenant.get() == "of the caller"
    assert current_context() is None


def test_what_cannot_be_sent_or_returned_fails_there(app):
    @app.task
    def echo(value):
        return object() if value == "object" else value

    with app.inline() as inline:
        with pytest.raises(EncodeError, match="a value of type object has no encoding"):
            echo.delay(object())
        with pytest.raises(TypeError, match="echo"):
            echo.delay()
        with pytest.raises(TaskFailed, match="no encoding"):
            echo.delay("object").get()
        assert echo.delay((1, 2)).get() == [1, 2], "as the codec delivers it"
        inline.assert_not_sent("shop.other")
        assert len(inline.sent) == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_retries_run_at_once_with_every_strategy(app, strategy):
    runs = []

    @app.task_with_context(retry_strategy=strategy)
    def flaky(context: Context):
        runs.append(context.resubmit_count)
        if context.resubmit_count < 2:
            raise ValueError("not yet")
        return context.delivery_count

    with app.inline():
        before = time.monotonic()
        flaky.delay().get()
        assert time.monotonic() - before < 10.0, "no delay is waited for"
    assert runs == [0, 1, 2]


def test_failures_and_rejections_end_in_the_dead_letters(app):
    @app.task(retry=RetryPolicy(max_retries=2, delay=3600))
    def hopeless():
        raise ValueError("never")

    @app.task
    def rejected():
        raise Reject("bad address")

    with app.inline() as inline:
        result = hopeless.delay()
        assert result.failed()
        assert result.error.error_type == "ValueError"
        with pytest.raises(TaskFailed, match="bad address"):
            rejected.delay().get()
        letters = [(each.reason, each.message.resubmit_count) for each in inline.dead_letters()]
    assert letters == [("retries-exhausted", 2), ("bad address", 0)]


def test_delays_snoozes_and_expiry_follow_the_inline_clock(app):
    ran = []

    @app.task_with_context
    def note(context: Context, name, snoozes=0):
        ran.append(name)
        if context.message.snooze_count < snoozes:
            raise Snooze(600)

    with app.inline() as inline:
        late = note.with_options(delay=3600).delay("late")
        note.with_options(delay=60).delay("soon", snoozes=1)
        expired = note.with_options(delay=7200, expires=7000).delay("expired")
        assert ran == []
        with pytest.raises(ResultTimeout, match=r"waits for inline\.advance"):
            late.get()
        inline.advance(3599.0)
        assert ran == ["soon", "soon"]
        inline.advance(1.0)
        assert ran == ["soon", "soon", "late"]
        inline.advance(86_400.0)
        assert expired.state == "expired"
        with pytest.raises(ValueError, match="0 or more"):
            inline.advance(-1.0)
    assert ran == ["soon", "soon", "late"]


def test_a_workflow_runs_inline(app):
    @app.task
    def add(*numbers):
        return sum(numbers)

    @app.task
    def total(numbers):
        return sum(numbers)

    with app.inline():
        first = chain(add.s(1, 2), add.s(10)).delay()
        second = chord([add.s(number, number) for number in range(4)], total.s()).delay()
        assert (first.state, second.state) == ("succeeded", "succeeded")
        assert (first.get(), second.get()) == (13, 12)
    with app.inline(run=False) as inline:
        kept = chain(add.s(1, 2), add.s(10)).delay()
        assert kept.state == "started"
        inline.run()
        assert kept.get() == 13


def test_an_eta_is_reached(app):
    """It becomes a delay when the message is sent, and again, a little later, in the block."""

    @app.task
    def note(number):
        return number

    with app.inline() as inline:
        later = datetime.now(UTC) + timedelta(hours=1)
        results = [note.with_options(eta=later).delay(number) for number in range(3)]
        inline.advance(3500.0)
        assert [result.state for result in results] == ["pending"] * 3
        inline.advance(100.0)
        assert [result.state for result in results] == ["succeeded"] * 3


def test_nested_sends_run_and_may_be_waited_for(app):
    """A retry of the inner task takes longer than the lease of the outer one, which is renewed."""
    runs = []

    @app.task
    def leaf(n):
        assert current_context().message.parent_id
        if current_context().resubmit_count < 1:
            raise ValueError("once")
        return n

    @app.task
    def parent(n):
        runs.append(n)
        outer = current_context()
        value = leaf.delay(n).get()
        assert current_context() is outer
        return value

    @app.task
    async def later(n):
        runs.append(n)
        result = await leaf.adelay(n)
        return await asyncio.to_thread(result.get)

    @app.task
    def countdown(n):
        return countdown.delay(n - 1).get() if n else "done"

    with app.inline() as inline:
        assert parent.delay(4).get() == 4
        assert later.delay(5).get() == 5
        assert countdown.delay(20).get() == "done"
        inline.assert_sent(leaf, 4)
    assert current_context() is None
    assert runs == [4, 5]


def test_tasks_started_by_a_task_in_a_chain_of_thousands(app):
    @app.task
    def step(n):
        if n:
            step.delay(n - 1)

    with app.inline() as inline:
        step.delay(2000)
        assert len(inline.sent) == 2001


def test_values_pass_through_chains_and_chords(app):
    @app.task
    def double(n):
        return 2 * n

    @app.task
    def total(values):
        return sum(values)

    with app.inline():
        assert (double.s(1) | double.s() | double.s()).delay().get() == 8
        assert chord([double.s(n) for n in range(4)], total.s()).delay().get() == 12


def test_checkpoints_leases_and_sessions(app):
    app.queue("accounts", sessions=True)

    @app.task_with_context
    def pages(context: Context):
        if context.saved is None:
            context.checkpoint({"page": 7})
            context.lease.extend(500.0)
            assert context.lease.remaining_seconds > 400.0
            raise Retry(5)
        return context.saved

    @app.task_with_context(queue="accounts")
    def book(context: Context, amount):
        if amount == 1 and context.resubmit_count == 0:
            raise ValueError("the first of the session is retried")
        context.session.state = (context.session.state or []) + [amount]
        return context.session.state

    with app.inline():
        assert pages.delay().get() == {"page": 7}
        ann = [book.with_options(session="ann").delay(amount) for amount in (1, 2)]
        bob = book.with_options(session="bob").delay(9)
        assert [result.get() for result in (*ann, bob)] == [[1], [1, 2], [9]]


def test_lifespans_are_open_and_hooks_and_listeners_are_called(app):
    log = []

    @app.lifespan
    async def client():
        log.append("open")
        yield
        log.append("closed")

    @app.around_run
    def around(context):
        log.append("before")
        yield
        log.append("after")

    @app.on_event
    def listen(event):
        log.append(event.event)

    @app.task
    async def work():
        log.append("run")

    with app.inline():
        work.delay()
    assert log[0] == "open"
    assert log[-1] == "closed"
    assert [each for each in log if each in ("before", "run", "after")] == [
        "before",
        "run",
        "after",
    ]
    assert "succeeded" in log


def test_without_running_tasks_are_kept_until_run(app):
    @app.task
    def add(a, b):
        return a + b

    with app.inline(run=False) as inline:
        result = add.delay(1, 2)
        cancelled = add.delay(3, 4)
        assert cancelled.cancel()
        assert result.state == "pending"
        inline.run()
        assert result.get() == 3
        with pytest.raises(TaskCancelled):
            cancelled.get()


def test_assertions_list_what_was_sent(app):
    @app.task(queue="mail")
    def notify(address, subject=""):
        return None

    with app.inline() as inline:
        with pytest.raises(
            AssertionError, match=r"shop.notify\('ann'\) was not sent; sent: nothing"
        ):
            inline.assert_sent(notify, "ann")
        notify.delay("ann", subject="Hi")
        with pytest.raises(
            AssertionError, match=r"\n  shop.notify\('ann', subject='Hi'\) to queue m"
        ):
            inline.assert_sent(notify, "ann")
        with pytest.raises(AssertionError, match=r"notify\('ann', subject='Hi'\) to .* was sent"):
            inline.assert_not_sent(notify)


def test_a_failed_assertion_or_ctrl_c_in_a_task_reaches_the_test(app):
    @app.task
    def skips():
        pytest.skip("not on this machine")

    @app.task
    def interrupted():
        raise KeyboardInterrupt

    with app.inline():
        with pytest.raises(pytest.skip.Exception):
            skips.delay()
        with pytest.raises(KeyboardInterrupt):
            interrupted.delay()


def test_one_block_at_a_time(app):
    with app.inline(), pytest.raises(ConfigurationError, match="inline already"), app.inline():
        pass
    with app.inline():
        pass


def test_blocks_share_nothing(app):
    @app.task
    def add(a, b):
        return a + b

    for _ in range(2):
        with app.inline() as inline:
            assert add.with_options(task_id="one").delay(1, 2).get() == 3
            assert len(inline.sent) == 1


def test_a_hundred_tasks_and_blocks_take_a_fraction_of_a_second(app, caplog):
    """0.05 s and 0.3 s where this was written."""
    caplog.set_level(logging.ERROR)

    @app.task
    def add(a, b):
        return a + b

    before = time.process_time()
    with app.inline():
        assert [add.delay(n, 1).get() for n in range(100)] == [n + 1 for n in range(100)]
    assert time.process_time() - before < 5.0
    before = time.process_time()
    for n in range(100):
        with app.inline():
            assert add.delay(n, 1).get() == n + 1
    assert time.process_time() - before < 10.0


def test_a_program_that_only_sends_does_not_import_the_worker():
    script = (
        "import sys\n"
        "from aztask import App\n"
        "App('shop', broker='local://:memory:').send('shop.add')\n"
        "assert not [name for name in sys.modules if name.startswith('aztask.worker')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ, timeout=60)
