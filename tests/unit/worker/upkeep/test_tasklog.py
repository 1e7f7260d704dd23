"""The log lines of tasks that end: one each, or a summary when they are many."""

import logging

import pytest
from runtimes import make_runtime
from still import Still

from aztask import App
from aztask.message.message import TaskMessage
from aztask.settlement import Complete, Resubmit
from aztask.stores.records.base import Outcome, State
from aztask.worker.upkeep.journal import LINES_A_SECOND, SUMMARY_SECONDS, TaskLog


class Bench:
    """A log of tasks, and one delivery that ends again and again."""

    def __init__(self, mode):
        self.time = Still()
        self.app = App("shop", broker="local://:memory:")
        self.runtime = make_runtime(self.app, clock=self.time)
        self.app.send("shop.add", [1], task_id="a")
        self.receiver = self.app.broker.receiver("default", lease=30.0)
        (delivery,) = self.receiver.receive(1, 0.0)
        self.item = self.runtime.deliveries.add("default", self.receiver, delivery)
        self.item.open(TaskMessage("a", "shop.add", "default", b""), None)
        self.log = TaskLog(self.time, mode)

    def end(self, state=State.SUCCEEDED, settlement=Complete(), times=1, **fields):
        for _ in range(times):
            self.log.ended(self.item, Outcome(state, settlement, **fields))

    def close(self):
        self.receiver.close()
        self.app.close()
        self.runtime.mailbox.close()


@pytest.fixture
def make(caplog):
    caplog.set_level(logging.INFO, "aztask.worker")
    made = []

    def bench(mode="auto"):
        made.append(Bench(mode))
        return made[-1]

    yield bench
    for each in made:
        each.close()


def test_each_end_has_a_line_and_failures_have_theirs_elsewhere(make, caplog):
    bench = make()
    bench.end()
    bench.end(State.SNOOZED, Resubmit(5.0, counted=False), error_type="Snooze")
    bench.end(State.CANCELLED)
    bench.end(State.EXPIRED)
    bench.end(State.FAILED)
    bench.end(State.RETRYING, Resubmit(1.0))
    assert caplog.messages == [
        "task shop.add a succeeded in 0.0 s",
        "task shop.add a snoozed, it runs again in 5.0 s",
        "task shop.add a was cancelled",
        "task shop.add a did not run: it expired before it could start",
    ]


def test_a_summary_replaces_the_lines_above_the_limit(make, caplog):
    bench = make()
    bench.end(times=LINES_A_SECOND + 10)
    bench.end(State.FAILED)
    assert len(caplog.messages) == LINES_A_SECOND + 1
    assert caplog.messages[-1].startswith("more than 50 tasks a second")
    bench.log.tick(bench.time.now + SUMMARY_SECONDS - 0.1)
    assert len(caplog.messages) == LINES_A_SECOND + 1
    bench.log.tick(bench.time.now + SUMMARY_SECONDS)
    assert caplog.messages[-1] == "11 tasks ended in the last 60 s: 10 succeeded, 1 failed"
    caplog.clear()
    bench.time.now += SUMMARY_SECONDS
    bench.end()
    assert caplog.messages == ["task shop.add a succeeded in 0.0 s"]


def test_the_summaries_continue_while_the_rate_stays_high(make, caplog):
    bench = make()
    bench.end(times=LINES_A_SECOND + 51 * int(SUMMARY_SECONDS))
    bench.time.now += SUMMARY_SECONDS
    bench.log.tick(bench.time.now)
    caplog.clear()
    bench.end()
    assert caplog.messages == []
    bench.log.close()
    assert caplog.messages == ["1 task ended in the last 0 s: 1 succeeded"]


def test_a_steady_rate_below_the_limit_keeps_its_lines(make, caplog):
    bench = make()
    for _ in range(4):
        bench.end(times=LINES_A_SECOND)
        bench.time.now += 1.0
    assert len(caplog.messages) == 4 * LINES_A_SECOND


@pytest.mark.parametrize(("mode", "lines"), [("all", 60), ("off", 0)])
def test_other_modes(make, caplog, mode, lines):
    make(mode).end(times=60)
    assert len(caplog.messages) == lines
