"""Runs that may not start yet, on a real queue and a real result store."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pipelinebench import Bench, Make

from aztask.errors import BrokerUnavailable
from aztask.message.codec import Codec
from aztask.message.encryption import Cipher
from aztask.message.message import TaskMessage
from aztask.queues.local.kind import CAPABILITIES
from aztask.settlement import Complete, Hold, Release, Resubmit
from aztask.stores.records.base import Finish, Outcome, State
from aztask.worker.pipeline.redelivery import LONGEST_HOLD, PutOffs
from aztask.worker.pipeline.work import Stage, WorkItem, message_of


def put_off(bench: Bench, delay: float = 5.0) -> list[WorkItem]:
    """Receive what is there and put it off as a worker does."""
    items = bench.receive()
    waiting = [
        item for item in items if not bench.pipeline.put_offs.wait(item, delay, "it is paused")
    ]
    bench.pipeline.claim(waiting)
    bench.pipeline.finish(items)
    return items


def test_it_waits_in_the_queue_and_nothing_is_counted_or_stored(make: Make) -> None:
    bench = make()
    bench.send("a")
    (item,) = put_off(bench)
    assert (item.stage, item.settled) == (Stage.ENDED, True)
    assert bench.app.broker.stats("default").scheduled == 1
    (record,) = bench.app.results.history("a")
    assert (record.state, record.starts) == (State.PENDING, 0), "the store was not written"
    assert bench.receive() == []
    bench.clock.now += 5.1
    (again,) = bench.receive()
    message = message_of(again)
    assert message.key == ("a", 0, 0)
    assert (message.resubmit_count, message.snooze_count, message.put_off_count) == (0, 0, 1)
    assert again.delivery.envelope.message_id == "a:0:0:put-1"
    assert again.delivery.delivery_count - message.delivery_base == 1


def test_a_hundred_times_exhausts_no_limit(make: Make) -> None:
    bench = make()
    bench.send("a")
    for _ in range(100):
        assert len(put_off(bench, 1.0)) == 1
        bench.clock.now += 1.1
    (item,) = bench.receive()
    bench.pipeline.claim([item])
    assert item.stage is Stage.READY
    assert message_of(item).snooze_count == 0
    assert item.claimed is not None
    assert item.claimed.starts == 1


def test_both_copies_after_a_crash_run_once(make: Make) -> None:
    """The worker died after the clone was sent: the original is still in the queue."""
    bench = make()
    bench.send("a")
    (item,) = bench.receive()
    assert bench.pipeline.put_offs.wait(item, 0.0, "it is paused")
    assert item.decided is not None
    assert item.decided.clone is not None
    clone = bench.app.codec.to_envelope(item.decided.clone)
    bench.app.broker.send("default", [clone])
    bench.receiver.settle([(item.delivery, Release())])
    first, second = bench.receive()
    assert {message_of(first).put_off_count, message_of(second).put_off_count} == {0, 1}
    bench.pipeline.claim([first, second])
    assert [first.stage, second.stage] == [Stage.READY, Stage.DECIDED]
    assert isinstance(second.settlement, Complete), "it is superfluous"
    bench.succeed([first])
    bench.pipeline.finish([first, second])
    assert bench.states("a") == ["succeeded"]
    assert bench.app.broker.stats("default").living == 0


def test_a_redelivered_one_that_has_a_start_row_is_admitted_later(make: Make) -> None:
    """A worker started it and died; then it was paused: its clone is another message."""
    bench = make()
    bench.claimed("a")
    bench.clock.now += 61.0  # the lease ends
    (item,) = put_off(bench)
    assert item.settled
    record = bench.app.results.get("a")
    assert record is not None
    assert record.starts == 1, "the start of the dead worker counts, this delivery does not"
    bench.clock.now += 5.1
    (clone,) = bench.receive()
    assert clone.delivery.position != item.delivery.position
    bench.pipeline.claim([clone])
    assert clone.stage is Stage.READY, "the row admits it: no worker owns it"
    assert clone.claimed is not None
    assert clone.claimed.starts == 2


@pytest.mark.parametrize("away", [False, True])
def test_a_worker_that_claims_too_late_keeps_no_copy_from_running(
    make: Make, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    """It stood still before its request; by then another one had put the message off."""
    bench = make()
    bench.send("a")
    (late,) = bench.receive()
    store = bench.app.results
    start, disown, errors = store.start, store.disown, [BrokerUnavailable("away")] * away

    def start_late(starts: Any) -> Any:
        monkeypatch.setattr(store, "start", start)
        bench.clock.now += 61.0  # the lease ends
        put_off(bench)
        return start(starts)

    def disown_some(runs: Any) -> None:
        if late.stage is not Stage.ENDED and runs == [(late.key, late.owner)] and errors:
            raise errors.pop()
        disown(runs)

    monkeypatch.setattr(store, "start", start_late)
    monkeypatch.setattr(store, "disown", disown_some)
    bench.pipeline.claim([late])
    if away:
        assert (late.stage, late.tries, errors) == (Stage.RECEIVED, 1, [])
        bench.pipeline.claim([late])
    assert (late.stage, late.settled) == (Stage.ENDED, False)
    assert [kind for kind, _ in late.notes] == ["lease_lost"]
    bench.clock.now += 5.1
    (clone,) = bench.receive()
    bench.pipeline.claim([clone])
    assert clone.stage is Stage.READY
    record = store.get("a")
    assert record is not None
    assert record.starts == 1, "the late start does not count"


def test_of_both_copies_with_a_start_row_one_runs(make: Make) -> None:
    bench = make()
    bench.claimed("a")
    bench.clock.now += 61.0
    (item,) = bench.receive()
    assert not bench.pipeline.put_offs.wait(item, 0.0, "it is paused")
    bench.pipeline.claim([item])
    assert item.decided is not None
    assert item.decided.clone is not None
    bench.app.broker.send("default", [bench.app.codec.to_envelope(item.decided.clone)])
    bench.receiver.settle([(item.delivery, Release())])
    copies = bench.receive()
    bench.pipeline.claim(copies)
    assert sorted(each.stage.value for each in copies) == ["decided", "ready"]


def test_a_redelivered_one_that_has_ended_is_settled_not_put_off(make: Make) -> None:
    bench = make()
    (item,) = bench.claimed("a")
    bench.succeed([item])
    bench.pipeline._record([item])  # and the worker dies before it settles
    bench.clock.now += 61.0
    put_off(bench)
    assert bench.app.broker.stats("default").living == 0
    assert bench.states("a") == ["succeeded"]


def test_while_the_store_is_away_a_redelivered_one_waits_as_it_is(make: Make) -> None:
    bench = make()
    bench.claimed("a")
    bench.clock.now += 61.0
    bench.faults.disown["a"] = BrokerUnavailable("away")
    (item,) = bench.receive()
    assert not bench.pipeline.put_offs.wait(item, 5.0, "it is paused")
    bench.pipeline.claim([item])
    assert (item.stage, item.waits is not None) == (Stage.RECEIVED, True)
    del bench.faults.disown["a"]
    bench.pipeline.claim([item])
    assert item.waits_in_queue


def test_it_is_never_put_off_past_its_expiry(make: Make) -> None:
    bench = make()
    bench.send("a")
    (item,) = bench.receive()
    item.rewrite(expires=bench.clock.now + 3.0)
    assert not bench.pipeline.put_offs.expired(item)
    bench.pipeline.put_offs.wait(item, 600.0, "it is paused")
    assert isinstance(item.settlement, Resubmit)
    assert item.settlement.delay <= 3.0
    bench.clock.now += 3.1
    assert bench.pipeline.put_offs.expired(item)


def test_in_a_session_it_keeps_its_lease_and_its_place(make: Make) -> None:
    bench = make()
    bench.send("a")
    (item,) = bench.receive()
    item.session = SimpleNamespace(held=lambda: None, over=lambda item: None)
    assert bench.pipeline.put_offs.wait(item, 600.0, "it is paused")
    assert isinstance(item.settlement, Hold)
    assert item.settlement.delay == LONGEST_HOLD
    bench.pipeline.finish([item])
    assert (item.stage, item.settled) == (Stage.HELD, False)
    item.rest()
    assert isinstance(item.settlement, Release), "this delivery does not count"


@pytest.mark.parametrize("in_place", [False, True])
def test_where_the_services_count_goes_on_a_put_off_does_not_count(
    in_place: bool, make: Make
) -> None:
    bench = make()
    bench.send("a")
    (item,) = bench.receive()
    broker: Any = SimpleNamespace(capabilities=replace(CAPABILITIES, resubmit_in_place=in_place))
    app: Any = SimpleNamespace(broker=broker, results=bench.app.results)
    PutOffs(app, bench.pipeline._redelivery, bench.clock).wait(item, 5.0, "it is paused")
    assert item.decided is not None
    assert item.decided.clone is not None
    assert item.decided.clone.delivery_base == int(in_place)


def test_an_outcome_that_was_put_off_before_is_recorded_once(make: Make) -> None:
    bench = make()
    bench.send("a")
    put_off(bench)
    bench.clock.now += 5.1
    items = bench.receive()
    bench.pipeline.claim(items)
    now = bench.clock.wall()
    items[0].sent()
    items[0].decide(Complete(), Outcome(State.SUCCEEDED, Complete(), b"\x01", at=now))
    bench.pipeline.finish(items)
    assert bench.states("a") == ["succeeded"]


# -- unknown tasks -----------------------------------------------------------------------------


def served(bench: Bench) -> list[WorkItem]:
    """Receive what is there as a worker does that does not know the task."""
    items = bench.receive()
    bench.pipeline.claim([item for item in items if item.decided is None])
    bench.pipeline.finish([item for item in items if item.stage is Stage.DECIDED])
    return items


def test_an_unknown_task_is_put_off_and_nothing_is_counted_or_stored(make: Make) -> None:
    bench = make(known=False, unknown_task_grace=300.0)
    bench.send("a")
    for number in range(10):
        (item,) = served(bench)
        assert item.decided is not None
        assert item.decided.put_off == "task shop.count is unknown to this worker"
        assert message_of(item).put_off_count == number
        assert bench.receive() == []
        bench.clock.now += 30.01
    (record,) = bench.app.results.history("a")
    assert (record.state, record.starts) == (State.PENDING, 0), "the store was not written"
    bench.app.task(name="shop.count")(len)  # the new release
    (item,) = bench.receive()
    bench.pipeline.claim([item])
    assert item.stage is Stage.READY
    message = message_of(item)
    assert message.key == ("a", 0, 0)
    assert (message.snooze_count, message.resubmit_count) == (0, 0)


def test_after_its_grace_an_unknown_task_is_a_dead_letter(make: Make) -> None:
    bench = make(known=False, unknown_task_grace=300.0)
    bench.send("a")
    first = bench.clock.now
    while not bench.dead():
        assert bench.clock.now <= first + 400.0
        served(bench)
        bench.clock.now += 30.01
    assert bench.dead() == {"a": "unknown-task: no worker knew the task 'shop.count' for 300 s"}
    assert bench.clock.now - 30.01 - first >= 300.0
    assert bench.states("a") == ["failed"]


def test_a_worker_that_knows_the_task_ends_the_grace(make: Make) -> None:
    """It is paused there: when an older worker gets it next, the grace begins anew."""
    bench = make(known=False, unknown_task_grace=300.0)
    bench.send("a")
    served(bench)
    bench.clock.now += 200.0
    bench.app.task(name="shop.count")(len)
    (item,) = put_off(bench)
    assert message_of(item).unknown_since is not None
    bench.clock.now += 5.1
    (item,) = bench.receive()
    assert message_of(item).unknown_since is None


def test_a_pause_by_a_worker_that_does_not_know_the_task_keeps_the_grace(make: Make) -> None:
    bench = make(known=False, unknown_task_grace=300.0)
    bench.send("a")
    since = bench.clock.now
    served(bench)
    bench.clock.now += 100.0
    (item,) = bench.receive()
    assert item.decided is not None
    assert item.decided.clone is not None
    assert item.decided.clone.unknown_since == since
    item.waits = None
    item.stage = Stage.RECEIVED
    assert bench.pipeline.put_offs.wait(item, 5.0, "it is paused")
    assert item.decided.clone is not None
    assert item.decided.clone.unknown_since == since


def test_an_unknown_task_that_expired_is_recorded_as_expired(make: Make) -> None:
    bench = make(known=False)
    bench.send("a", expires=10.0)
    bench.clock.now = time.time() + 11.0  # the sender's clock is the machine's
    (item,) = served(bench)
    assert bench.states("a") == ["expired"]
    assert item.settled


def test_a_redelivered_unknown_task_that_has_ended_is_settled(make: Make) -> None:
    """The worker that knew it died between the record and the settlement."""
    bench = make()
    (item,) = bench.claimed("a")
    outcome = Outcome(State.SUCCEEDED, Complete(), b"\x01")
    bench.app.results.record([Finish(item.key, item.owner, outcome)])
    bench.clock.now += 61.0
    del bench.app.tasks["shop.count"]
    (again,) = served(bench)
    assert again.settled
    assert bench.app.broker.stats("default").living == 0
    assert bench.states("a") == ["succeeded"]


def test_a_redelivered_unknown_task_is_admitted_later(make: Make) -> None:
    bench = make()
    bench.claimed("a")
    bench.clock.now += 61.0
    task = bench.app.tasks.pop("shop.count")
    (item,) = served(bench)
    assert item.settled
    bench.app.tasks["shop.count"] = task
    bench.clock.now += 30.1
    (clone,) = bench.receive()
    bench.pipeline.claim([clone])
    assert clone.stage is Stage.READY
    assert message_of(clone).snooze_count == 0


# -- messages whose key this worker lacks ------------------------------------------------------

KEY = "a-key-that-encrypts-and-is-long-enough"


def send_encrypted(bench: Bench, task_id: str) -> None:
    """By a program with another key. The message is encrypted, and not signed."""
    codec = Codec(cipher=Cipher([KEY.encode()], encrypt=True))
    body, content_type, encoding = codec.encode_arguments([task_id], {})
    message = TaskMessage(task_id, "shop.count", "default", body, content_type, encoding)
    bench.app.broker.send("default", [codec.to_envelope(message)])


def test_a_message_without_its_key_waits_for_a_worker_that_has_it(make: Make) -> None:
    bench = make(unknown_task_grace=300.0)
    send_encrypted(bench, "a")
    for number in range(3):
        (item,) = served(bench)
        assert item.decided is not None
        assert "it is encrypted with the key" in item.decided.put_off
        assert message_of(item).put_off_count == number
        bench.clock.now += 30.01
    assert bench.app.results.history("a") == [], "the store was not written"
    with_key = make(encryption_keys=[KEY])
    (waiting,) = bench.app.broker.peek("default")
    with_key.app.broker.send("default", [waiting.envelope])
    (item,) = with_key.receive()
    with_key.pipeline.claim([item])
    assert item.stage is Stage.READY
    message = message_of(item)
    assert with_key.app.codec.decode_arguments(message) == (("a",), {})
    assert (message.key, message.snooze_count) == (("a", 0, 0), 0)


def test_after_its_grace_a_message_without_its_key_is_a_dead_letter(make: Make) -> None:
    bench = make(unknown_task_grace=300.0)
    send_encrypted(bench, "a")
    first = bench.clock.now
    while not bench.dead():
        assert bench.clock.now <= first + 400.0
        served(bench)
        bench.clock.now += 30.01
    assert bench.clock.now - 30.01 - first >= 300.0
    text = bench.dead()["a"]
    assert text.startswith("encryption-key-missing: no worker had its key for 300 s: it is encryp")
    assert Cipher([KEY.encode()]).names()[0] in text
    assert bench.states("a") == ["failed"]
