"""The events and the closing summary of a worker."""

import pytest
from runtimes import make_runtime
from still import Still

from aztask import App
from aztask.message.message import TaskMessage
from aztask.settlement import Complete, DeadLetter, Resubmit
from aztask.stores.records.base import PARKED, Outcome, RunKey, State
from aztask.stores.records.onceruns import OnceRun
from aztask.stores.records.tallies import Tally, bucket_of
from aztask.worker.pipeline.work import Step
from aztask.worker.upkeep.recording import Recorder


class Bench:
    """A journal, and one delivery that was received 3 seconds after it was due."""

    def __init__(self):
        self.time = Still()
        self.events = []
        self.app = App("shop", broker="local://:memory:")
        self.runtime = make_runtime(self.app, clock=self.time, emit=self.events.append)
        self.journal = self.runtime.journal
        self.app.send("shop.add", [1], task_id="a")
        self.receiver = self.app.broker.receiver("default", lease=30.0)
        (delivery,) = self.receiver.receive(1, 0.0)
        delivery.enqueued_at = self.time.now - 3.0
        delivery.deadline = self.time.now + 30.0
        self.item = self.runtime.deliveries.add("default", self.receiver, delivery)
        self.item.open(TaskMessage("a", "shop.add", "default", b""), None)

    def start(self):
        self.item.change(Step.CLAIM)
        self.item.sent()
        self.item.run.started_at = self.time.now

    def end(self, state, settlement, **fields):
        outcome = Outcome(state, settlement, at=self.time.wall(), **fields)
        self.item.decide(settlement, outcome)
        self.item.settled = True
        self.journal.ended(self.item)

    def kinds(self):
        return [event.event for event in self.events]

    def close(self):
        self.receiver.close()
        self.app.close()
        self.runtime.mailbox.close()


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.close()


def test_the_events_of_a_task_that_succeeds(bench):
    bench.journal.received([bench.item])
    bench.start()
    bench.time.now += 2.0
    bench.journal.started(bench.item)
    bench.journal.renewed(bench.item, 0.7)
    bench.item.run.duration = 2.0
    bench.end(State.SUCCEEDED, Complete())
    assert bench.kinds() == ["received", "started", "renewed", "succeeded"]
    started, renewed, succeeded = bench.events[1:]
    assert started.wait_seconds == 3.0
    assert started.ts == bench.time.now - 2.0
    assert renewed.margin_seconds == pytest.approx(9.0)
    assert (succeeded.duration_seconds, succeeded.held_seconds) == (2.0, 2.0)
    assert succeeded.margin_seconds == pytest.approx(28.0)


def test_a_start_is_reported_once_and_before_the_end(bench):
    bench.start()
    bench.end(State.SUCCEEDED, Complete())
    bench.journal.started(bench.item)
    assert bench.kinds() == ["started", "succeeded"]


def test_a_run_that_waits_inside_its_task_is_neither_an_error_nor_put_off(bench):
    bench.start()
    bench.item.run.duration = 0.5
    text = "it sleeps, until 2026-09-21 12:00:00Z"
    settlement = Resubmit(9.0, counted=False, asked=True)
    bench.end(State.SNOOZED, settlement, error_type=PARKED, error=text)
    waiting = bench.events[-1]
    assert (waiting.event, waiting.reason, waiting.duration_seconds) == ("waiting", text, 0.5)
    assert (waiting.error_type, waiting.error) == (None, None)
    assert (bench.journal.counts["waiting"], bench.journal.counts["snoozed"]) == (1, 0)


def test_a_dead_letter_has_two_events(bench):
    bench.end(State.FAILED, DeadLetter("rejected", "no stock"), error_type="Reject", error="no")
    assert bench.kinds() == ["failed", "dead_lettered"]
    assert (bench.events[1].error_type, bench.events[1].error) == ("rejected", "no stock")


def test_a_lost_lease_is_reported_and_no_outcome(bench):
    bench.start()
    bench.item.note("lease_lost", "its deadline passed")
    bench.item.end()
    bench.journal.ended(bench.item)
    assert bench.kinds() == ["started", "lease_lost"]
    assert bench.journal.counts["lease_lost"] == 1


def test_a_repeated_settlement_is_no_second_outcome(bench):
    outcome = Outcome(State.SUCCEEDED, Complete(), at=1.0)
    bench.item.decide(Complete(), outcome, recorded=True, repeated=True)
    bench.item.settled = True
    bench.journal.ended(bench.item)
    assert bench.kinds() == []
    assert bench.journal.summary() == "0 succeeded, 0 failed, 0 retrying"


def test_the_summary_names_rare_counts_only_if_there_are_some(bench):
    bench.end(State.RETRYING, Resubmit(5.0))
    assert bench.journal.summary() == "0 succeeded, 0 failed, 1 retrying"
    bench.journal.counts["snoozed"] += 2
    bench.journal.counts["settle_failed"] += 1
    assert bench.journal.summary() == (
        "0 succeeded, 0 failed, 1 retrying, 2 snoozed, 1 settle failed"
    )


def test_a_message_that_the_broker_dead_lettered(bench):
    message = TaskMessage("b", "shop.add", "default", b"", resubmit_count=2)
    bench.journal.buried(message, "default", 10, DeadLetter("TTLExpiredException", "too old"))
    (event,) = bench.events
    assert (event.event, event.task_id, event.error) == ("dead_lettered", "b", "too old")
    assert bench.journal.counts["dead-lettered"] == 1


def test_a_changed_lease(bench):
    bench.journal.lease_changed("default", 30.0, 60.0, "p99 grew")
    (event,) = bench.events
    assert (event.former_lease_seconds, event.lease_seconds) == (30.0, 60.0)


def test_a_lost_lease_of_a_run_is_a_warning(bench, caplog):
    bench.start()
    bench.item.note("lease_lost", "its deadline passed")
    bench.journal.ended(bench.item)
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        (
            "WARNING",
            "task shop.add a: lease lost, this run is neither recorded nor settled: "
            "its deadline passed",
        )
    ]


def test_what_is_reported_is_counted_for_the_history(bench):
    bench.journal.recorder = recorder = Recorder(bench.time)
    bench.start()
    bench.item.run.duration = 2.0
    bench.item.note("lease_lost", "it ended")
    bench.item.note("settle_failed", "refused")
    bench.end(State.SUCCEEDED, Complete())
    (tally,) = recorder.take().values()
    assert tally == Tally(succeeded=1, lost=1, waits={bucket_of(3.0): 1}, runs={bucket_of(2.0): 1})


def test_the_wait_of_a_retry_is_not_counted(bench):
    bench.journal.recorder = recorder = Recorder(bench.time)
    bench.item.open(TaskMessage("a", "shop.add", "default", b"", resubmit_count=1), None)
    bench.start()
    bench.item.run.duration = 2.0
    bench.end(State.RETRYING, Resubmit(1.0))
    (tally,) = recorder.take().values()
    assert tally == Tally(retried=1, runs={bucket_of(2.0): 1})


def test_an_at_most_once_run_that_was_lost_counts_as_failed(bench):
    bench.journal.recorder = recorder = Recorder(bench.time)
    run = OnceRun(RunKey("a"), "shop.add", "default", "gone", "x", 1.0, 60.0)
    bench.journal.lost(run, "lost", "its worker ended")
    ((key, tally),) = recorder.take().items()
    assert (key[1:], tally) == (("default", "shop.add"), Tally(failed=1))
