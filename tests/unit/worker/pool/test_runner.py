"""Running one delivery in a pool process: what it answers, whatever the task does."""

import asyncio
import logging
import os
import re
import signal
import time
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace

import msgpack
import pytest

from aztask import App, Reject, RetryPolicy, Snooze
from aztask.context import TaskLease
from aztask.errors import EncodeError, TimeLimitExceeded
from aztask.message.message import MESSAGE_FIELDS, TaskMessage
from aztask.settlement import DeadLetter, Resubmit, from_record
from aztask.steps.parts import PartStore
from aztask.support.clock import boot_seconds
from aztask.worker.logs import configure
from aztask.worker.pool.attempt import ERROR_CHARACTERS, _described
from aztask.worker.pool.eventloop import LazyLoop
from aztask.worker.pool.interrupt import SIGNAL, CoroutineRun, InterruptSlot, MainThread
from aztask.worker.pool.leaseguard import STOP_GRACE, LeaseGuard
from aztask.worker.pool.link import Board
from aztask.worker.pool.runner import SlotRunner

app = App("shop", broker="local://:memory:", retry=RetryPolicy(max_retries=1, delay=5.0))


class Unreadable(Exception):
    def __str__(self):
        raise ValueError("no text")


class Exiting(Exception):
    def __str__(self):
        raise SystemExit(3)

    __repr__ = __str__


@app.task
def add(a, b):
    return a + b


@app.task
async def later(text):
    return text.upper()


@app.task(lease=lambda minutes: timedelta(minutes=minutes))
def minutes_long(minutes):
    return minutes


@app.task(lease=lambda text: text)
def wrong_lease(text):
    return text


@app.task
def fail(kind):
    raise {
        "value": ValueError("bad\x00 value"),
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "unreadable": Unreadable(),
        "exiting": Exiting(),
        "long": ValueError("x" * 9999),
        "giant": ValueError("x" * 50_000_000),
        "giant reject": Reject("x" * 50_000_000, "y" * 50_000_000),
        "giant encode": EncodeError("x" * 50_000_000),
        "reject": Reject("never"),
        "snooze": Snooze(60),
    }[kind]


@app.task
async def fail_later(kind):
    fail(kind)


@app.task
def unserialisable():
    return object()


@app.task
def unreadable_value():
    return {(1, 2): 3}


@app.task_with_context
def save(context):
    context.checkpoint({"page": 7})
    return context.saved


@app.task_with_context
def outlives_its_lease(context):
    """Run on after its deadline, while the control thread looks once."""
    while not context.lease.lost:
        time.sleep(0.01)
    bench = current[0]
    bench.runner.stop_overdue(boot_seconds())
    for _ in range(100):
        time.sleep(0.01)


current = []


class Bench:
    """A runner whose packets the test reads and answers."""

    def __init__(self, of=app):
        self.board = Board.create(1)
        self.sent = []
        self.notes = []
        self.guard = LeaseGuard(os.eventfd(0))
        self.loop = LazyLoop(MainThread())
        outbox = SimpleNamespace(send=self.send)
        self.runner = SlotRunner(of, self.board, outbox, self.guard, os.getpid(), self.loop)
        self.slot = InterruptSlot(0)

    def send(self, packet, *, wait=True):
        self.sent.append(packet)
        self.notes.append(self.board.running())
        if packet[0] == "save":
            self.runner.handle("answer", packet[1], "", None)

    def packet(self, task, *args, lease=60.0, **fields):
        """The packet of a delivery."""
        body, content_type, encoding = app.codec.encode_arguments(args, {})
        message = TaskMessage(
            "id-1", f"shop.{task}", "default", body, content_type, encoding, **fields
        )
        values = [getattr(message, name) for name in MESSAGE_FIELDS]
        return [7, values, 1, boot_seconds() + lease, 5.0]

    def run(self, task, *args, window=None, **options):
        packet = self.packet(task, *args, **options)
        self.runner.run(self.slot, packet if window is None else [*packet, None, window])
        return self.sent[-1]

    def run_beside(self, other, task, *args):
        """Run a coroutine on the loop, and another one beside it until the task has ended."""
        loop = self.loop.get().loop

        async def both():
            run = CoroutineRun(MainThread(), loop, asyncio.current_task())
            beside = loop.create_task(other(run))
            await self.runner.run_coroutine(self.slot, self.packet(task, *args), run)
            beside.cancel()

        loop.run_until_complete(both())
        return self.sent[-1]

    def close(self):
        self.loop.get().loop.close()
        asyncio.set_event_loop(None)
        self.board.close()


@pytest.fixture
def bench():
    before = signal.getsignal(SIGNAL)
    made = Bench()
    yield made
    made.close()
    signal.signal(SIGNAL, before)


@pytest.fixture
def streaming(monkeypatch):
    """A bench whose app has streams, in a store that takes half a second for each batch."""
    shop = App("shop", broker="local://:memory:", results="local://:memory:")

    @shop.task_with_context(name="shop.drip")
    async def drip(context):
        context.emit("word")
        return "said"

    append = PartStore.append

    def slow(self, *args, **options):
        time.sleep(0.5)
        append(self, *args, **options)

    monkeypatch.setattr(PartStore, "append", slow)
    before = signal.getsignal(SIGNAL)
    made = Bench(shop)
    yield made
    made.close()
    signal.signal(SIGNAL, before)
    shop.close()


def test_the_end_of_a_coroutine_that_emits_does_not_hold_up_the_loop(streaming):
    turns = []

    async def others(_):
        while True:
            turns.append(time.monotonic())
            await asyncio.sleep(0.01)

    began = time.monotonic()
    assert streaming.run_beside(others, "drip")[0] == "done"
    assert time.monotonic() - began >= 0.5, "it ends when its part is written"
    assert max(later - at for at, later in pairwise(turns)) < 0.4


def test_a_coroutine_that_is_stopped_while_its_parts_are_written_ends_at_once(
    streaming, monkeypatch
):
    """Its take does not count: the next start writes another one."""
    monkeypatch.setattr(PartStore, "append", lambda *_, **__: time.sleep(3.0))

    async def stop(run):
        await asyncio.sleep(0.2)
        run.interrupt_now(TimeLimitExceeded)

    began = time.monotonic()
    answer = streaming.run_beside(stop, "drip")
    assert (answer[0], answer[5]) == ("failed", "TimeLimitExceeded")
    assert time.monotonic() - began < 2.0


def test_a_callable_lease_may_give_a_timedelta(bench):
    assert bench.run("minutes_long", 2)[0] == "done"
    assert ["extend", 7, 120.0] in bench.sent


def test_a_callable_lease_that_gives_no_duration_is_named(bench):
    answer = bench.run("wrong_lease", "1m")
    assert answer[0] == "failed"
    assert any("shop.wrong_lease: lease takes seconds above 0" in str(part) for part in answer)


@pytest.mark.parametrize(
    ("task", "args", "value"), [("add", (1, 2), 3), ("later", ("zwei",), "ZWEI")]
)
def test_a_value(bench, task, args, value):
    kind, number, started, seconds, encoded = bench.run(task, *args)
    assert (kind, number) == ("done", 7)
    assert 0.0 <= boot_seconds() - started < 60.0
    assert seconds >= 0.0
    assert app.codec.decode_value(encoded) == value


def test_the_slot_is_idle_when_the_answer_is_sent(bench):
    bench.run("add", 1, 2)
    assert bench.notes == [{}]


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("value", "ValueError", "bad"),
        ("exit", "SystemExit", "3"),
        ("interrupt", "KeyboardInterrupt", ""),
        ("unreadable", "Unreadable", "(its text cannot be read: ValueError)"),
        ("exiting", "Exiting", "(its text cannot be read: SystemExit)"),
    ],
)
def test_whatever_is_raised_is_a_failed_attempt(bench, kind, name, text):
    answer, _, _, _, record, error_type, error, trace = bench.run("fail", kind)
    assert answer == "failed"
    assert isinstance(from_record(record), Resubmit)
    assert error_type == name
    assert error.startswith(text)
    assert "\x00" not in error + trace


def test_a_long_text_is_shortened(bench):
    assert len(bench.run("fail", "long")[6]) <= ERROR_CHARACTERS


def test_the_retry_policy_decides(bench, caplog):
    assert isinstance(from_record(bench.run("fail", "value", resubmit_count=1)[4]), DeadLetter)
    assert "task shop.fail id-1 failed, dead-lettered: retries-exhausted: ValueError" in caplog.text
    caplog.clear()
    bench.run("fail", "value")
    assert re.search(r"task shop.fail id-1 failed, retry 1 of 1 in [2-5]\.\d s: V", caplog.text)


def test_a_task_that_controls_itself_logs_what_follows_without_a_traceback(bench, caplog):
    assert isinstance(from_record(bench.run("fail", "reject")[4]), DeadLetter)
    assert "task shop.fail id-1 raised Reject: never, dead-lettered: never" in caplog.text
    assert "Traceback" not in caplog.text
    caplog.clear()
    assert from_record(bench.run("fail", "snooze")[4]).counted is False
    assert caplog.text == ""


@pytest.mark.parametrize("task", ["fail", "fail_later"])
def test_a_traceback_begins_at_the_users_frame(bench, caplog, task):
    trace = bench.run(task, "value")[7]
    first = trace.splitlines()[1]
    assert __file__ in first
    assert first.endswith(f"in {task}")
    assert first in caplog.text
    assert "pool/runner.py" not in caplog.text


def test_an_error_of_the_call_itself_keeps_its_traceback(bench):
    assert "in call" in bench.run("add", 1)[7]


@pytest.mark.parametrize("task", ["unserialisable", "unreadable_value"])
def test_a_value_that_cannot_be_sent_or_read_back_is_not_retried(bench, task):
    record = from_record(bench.run(task)[4])
    assert isinstance(record, DeadLetter)
    assert record.reason == "unserialisable-result"
    assert record.description.startswith("the value cannot be written as msgpack: a ")
    assert bench.run(task)[7] == "", "no frame of the task's code would be in it"


@pytest.mark.parametrize("kind", ["giant", "giant reject", "giant encode"])
def test_a_text_of_50_mb_is_cut_before_it_is_sent_or_logged(bench, kind, capsys):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure("plain")
        answer = bench.run("fail", kind)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert len(msgpack.packb(answer)) < 30_000
    assert len(capsys.readouterr().err) < 30_000
    assert (kind == "giant reject") or "Traceback" in answer[-1]


def test_a_task_that_this_process_has_not_registered_is_undecodable(bench):
    record = from_record(bench.run("nosuch")[4])
    assert record.reason == "undecodable"
    assert "has not registered the task 'shop.nosuch'" in record.description


def test_a_lease_that_has_expired_runs_nothing(bench):
    assert bench.run("add", 1, 2, lease=-1.0)[0] == "lost"


def test_a_run_whose_lease_ends_without_news_is_stopped_and_reported(bench):
    current[:] = [bench]
    assert bench.run("outlives_its_lease", lease=0.1)[0] == "lost"
    assert bench.sent[0] == ["overdue", 7, False]


def test_a_run_that_ignores_that_its_lease_ended_ends_its_process(bench, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    lease = TaskLease(boot_seconds() - STOP_GRACE, ask=print)
    bench.guard.begin(7, lease, boot_seconds() - STOP_GRACE)
    bench.guard.lose(7, "the worker said so, and was stopped")
    bench.guard._runs[7].ends_at = boot_seconds()
    bench.runner.stop_overdue(boot_seconds())
    assert bench.sent == [["overdue", 7, True]]
    assert ended == [1]


def test_a_checkpoint_is_sent_and_waited_for(bench):
    assert bench.run("save")[0] == "done"
    kind, number, encoded = bench.sent[0]
    assert (kind, number) == ("save", 7)
    assert app.codec.decode_value(encoded) == {"page": 7}


def test_a_forked_copy_sends_nothing(bench, monkeypatch):
    monkeypatch.setattr(bench.runner._attempts, "_pid", -1)
    with pytest.raises(RuntimeError, match="return the value to the task"):
        bench.runner._attempts.send(["done"])
    assert bench.sent == []


def test_control_packets_about_other_deliveries_are_ignored(bench):
    bench.runner.handle("renewed", 99, 1.0)
    bench.runner.handle("lost", 99, "gone")
    bench.runner.interrupt(99, "limit", "soft limit")


def test_a_recorded_error_tells_no_secret(monkeypatch):
    monkeypatch.setattr("aztask.support.display._known", {})  # other tests wrap many
    try:
        raise OSError("no access with SharedAccessKey=c2VjcmV0c2VjcmV0;")
    except OSError as error:
        kind, text, trace = _described(error)
    assert kind == "OSError"
    assert text == "no access with SharedAccessKey=****;"
    assert "SharedAccessKey=****" in trace
    assert "c2VjcmV0c2" not in trace.splitlines()[-1]


def test_a_delivery_waits_for_its_slot(bench):
    opens = boot_seconds() + 0.05
    kind, number, started, _, encoded = bench.run("add", 1, 2, window=[opens, opens + 60.0])
    assert (kind, number, app.codec.decode_value(encoded)) == ("done", 7, 3)
    assert started >= opens


def test_a_delivery_that_missed_its_slot_does_not_start(bench):
    now = boot_seconds()
    assert bench.run("add", 1, 2, window=[now - 1.0, now - 0.5]) == ["late", 7]
    assert bench.notes == [{}]
    assert bench.run("add", 1, 2)[0] == "done", "its slot of the pool is free"
