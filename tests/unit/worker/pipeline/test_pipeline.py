"""The stages of a delivery's life, on a real queue and a real result store, without a pool."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pipelinebench import LEASE, Bench, Make

from aztask import RetryPolicy
from aztask.errors import AlreadySettled, BrokerUnavailable
from aztask.message.envelope import Envelope
from aztask.queues.base import shared_transaction
from aztask.queues.delivery import Lost, Unknown
from aztask.queues.lease.state import LeaseState
from aztask.settlement import Complete, DeadLetter, Decision, Release, Resubmit
from aztask.stores.records.base import Finish, Outcome, Start, State, owner_of
from aztask.support.floodlog import FIRST_LINES
from aztask.worker.pipeline.settling import TRIES
from aztask.worker.pipeline.work import Stage, WorkItem, message_of

# -- one bad delivery in a batch ----------------------------------------------------------------


def test_a_record_that_cannot_be_written_fails_that_task_alone(make: Make, joint: bool) -> None:
    bench = make(joint=joint)
    items = bench.claimed(*"abcdefg")
    bench.succeed(items)
    bench.faults.record["c"] = TypeError("no such value")
    bench.pipeline.finish(items)
    assert [item.key.task_id for item in items if item.stage is not Stage.ENDED] == ["c"]
    assert bench.states(*"abdefg") == ["succeeded"] * 6
    assert bench.app.broker.stats("default").leased == 1, "the others are completed"
    assert (items[2].stage, items[2].tries) == (Stage.DECIDED, 1), "it is tried again slowly"
    assert items[2].lease.state is LeaseState.HELD
    del bench.faults.record["c"]
    bench.pipeline.finish([items[2]])
    assert bench.states("c") == ["succeeded"], "the cause is gone: so it is recorded after all"


def test_after_three_tries_it_is_dead_lettered_with_the_error(make: Make, joint: bool) -> None:
    bench = make(joint=joint)
    items = bench.claimed(*"abc")
    bench.succeed(items)
    error = bench.faults.record["b"] = TypeError("no such value")
    bench.pipeline.finish(items)
    for _ in range(TRIES - 1):
        assert bench.dead() == {}
        bench.pipeline.finish([items[1]])
    del bench.faults.record["b"]  # it was the value, which is left out now
    assert items[1].tries == 0, "the dead letter itself is tried at once"
    bench.pipeline.finish([items[1]])
    assert bench.dead() == {"b": f"unprocessable: TypeError: {error}"}
    assert items[1].stage is Stage.ENDED
    run = bench.app.results.get("b")
    assert (run.state, run.outcome.error) == (State.FAILED, "TypeError: no such value")
    assert run.outcome.settlement == DeadLetter("unprocessable", "TypeError: no such value")


def test_what_cannot_even_be_dead_lettered_is_left_to_its_lease(make: Make, joint: bool) -> None:
    bench = make(joint=joint)
    (item,) = bench.claimed("a")
    bench.succeed([item])
    bench.faults.record["a"] = TypeError("never")
    for _ in range(2 * TRIES):
        assert item.stage is Stage.DECIDED
        bench.pipeline.finish([item])
    assert item.stage is Stage.ENDED
    assert not item.settled
    assert item.lease.state is LeaseState.HELD, "nothing settles it: it ends by itself"
    run = bench.app.results.get("a")
    assert (run.state, run.starts) == (State.STARTED, 1), "its start counts"
    assert [kind for kind, _ in item.notes] == ["settle_failed"]


@pytest.mark.parametrize("half", [False, True], ids=["nothing settled", "some settled"])
def test_a_settlement_that_raises_harms_no_neighbour(make: Make, half: bool) -> None:
    bench = make(half=half)
    items = bench.claimed(*"abcdefgh")
    bench.succeed(items)
    bench.faults.settle["f"] = ValueError("this one")
    bench.pipeline.finish(items)
    assert [item.settled for item in items] == [item.key.task_id != "f" for item in items]
    assert bench.states(*"abcdefgh") == ["succeeded"] * 8, "all is recorded, once"
    bad = items[5]
    assert (bad.stage, bad.lease.state) == (Stage.DECIDED, LeaseState.HELD)
    del bench.faults.settle["f"]
    bench.pipeline.finish([bad])
    assert bad.settled
    assert bench.app.broker.stats("default").leased == 0


def test_in_one_transaction_a_settlement_that_raises_takes_only_its_own_record_back(
    make: Make,
) -> None:
    bench = make(joint=True)
    items = bench.claimed(*"abcde")
    bench.succeed(items)
    bench.faults.settle["e"] = ValueError("this one")
    bench.pipeline.finish(items)
    assert bench.states(*"abcde") == ["succeeded"] * 4 + ["started"]
    assert [item.settled for item in items] == [True] * 4 + [False]


def test_a_broker_that_is_away_is_not_asked_for_each_delivery(make: Make) -> None:
    bench = make()
    items = bench.claimed(*"abc")
    bench.succeed(items)
    bench.faults.settle.update(dict.fromkeys("abc", BrokerUnavailable("away")))
    asked = []
    settle = bench.receiver._inner.settle
    bench.receiver._inner.settle = lambda pairs: asked.append(len(pairs)) or settle(pairs)
    bench.pipeline.finish(items)
    assert asked == []
    assert [item.tries for item in items] == [1, 1, 1]
    assert all(item.lease.state is LeaseState.HELD for item in items)
    assert all(item.decided.recorded for item in items)
    bench.faults.settle.clear()
    bench.pipeline.finish(items)
    assert asked == [3]
    assert all(item.settled for item in items)


def test_a_settled_one_that_is_asked_for_again_counts_as_settled(make: Make) -> None:
    bench = make()
    (item,) = bench.claimed("a")
    bench.succeed([item])
    bench.faults.settle["a"] = AlreadySettled()
    bench.pipeline.finish([item])
    assert item.settled


def test_a_start_that_raises_harms_no_neighbour_and_ends_in_the_dead_letters(
    make: Make, joint: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(joint=joint)
    bench.faults.start["b"] = KeyError("row")
    items = bench.claimed(*"abcd")
    assert [item.stage for item in items] == [
        Stage.READY, Stage.RECEIVED, Stage.READY, Stage.READY
    ]  # fmt: skip
    assert bench.app.results.get("a").starts == 1, "a second call for the same start counts once"
    bad = items[1]
    for _ in range(TRIES - 1):
        assert bad.decided is None
        bench.pipeline.claim([bad])
    assert bad.settlement == DeadLetter("unprocessable", "KeyError: 'row'")
    bench.pipeline.finish([bad])
    assert bench.dead() == {"b": "unprocessable: KeyError: 'row'"}


def test_a_store_that_is_away_counts_no_try_of_a_single_delivery(make: Make) -> None:
    bench = make()
    bench.faults.start.update(dict.fromkeys("ab", BrokerUnavailable("away")))
    items = bench.claimed(*"ab")
    for _ in range(3 * TRIES):
        bench.pipeline.claim(items)
    assert [item.decided for item in items] == [None, None]
    bench.faults.start.clear()
    bench.pipeline.claim(items)
    assert [item.stage for item in items] == [Stage.READY] * 2


def test_a_message_that_no_codec_survives_is_dead_lettered(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    real = bench.app.codec.from_envelope

    def broken(envelope: Any, queue: str, **_: Any) -> Any:
        if envelope.headers["id"] == "a":
            raise RecursionError("too deep")
        return real(envelope, queue)

    monkeypatch.setattr(bench.app.codec, "from_envelope", broken)
    for task_id in "ab":
        bench.app.send("shop.count", [[1]], task_id=task_id)
    items = [
        bench.deliveries.add("default", bench.receiver, each)
        for each in bench.receiver.receive(2, 0.0)
    ]
    with caplog.at_level(logging.CRITICAL):
        bench.pipeline.open(items)
    bad, good = sorted(items, key=lambda item: item.opened is not None)
    assert bad.settlement == DeadLetter("undecodable", "RecursionError: too deep")
    assert good.decided is None


def test_a_flood_of_garbage_does_not_flood_the_log(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Unreadable messages and unknown tasks: a few lines and one summary of each reason."""
    bench = make(unknown_task_grace=0.0)
    count = 300
    bench.app.broker.send("default", [Envelope(b"garbage", {"id": f"x{n}"}) for n in range(count)])
    for n in range(count):
        bench.app.send(f"shop.random{n}", task_id=f"u{n}")
    found = bench.receiver.receive(2 * count, 0.0)
    while more := bench.receiver.receive(2 * count, 0.0):
        found += more
    items = [bench.deliveries.add("default", bench.receiver, each) for each in found]
    bench.keeper.hold(bench.receiver, [item.lease for item in items])
    bench.pipeline.open(items)
    bench.pipeline.claim([item for item in items if item.decided is None])
    assert len([item for item in items if isinstance(item.settlement, DeadLetter)]) == 2 * count
    bench.pipeline.floods.tick(bench.clock.now + 60.0)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 * (FIRST_LINES + 1)
    assert [line.split(" in the")[0] for line in lines if " more in the" in line] == [
        f"undecodable: {count - FIRST_LINES} more",
        f"unknown-task: {count - FIRST_LINES} more",
    ]


def test_giving_back_one_that_raises_gives_the_others_back(make: Make, joint: bool) -> None:
    bench = make(joint=joint)
    items = bench.claimed(*"abcd")
    bench.faults.settle["b"] = ValueError("this one")
    bench.pipeline.release(items)
    assert [item.stage for item in items] == [Stage.ENDED] * 4
    assert bench.app.broker.stats("default").active == 3
    assert [bench.app.results.get(each).starts for each in "acd"] == [0, 0, 0]


# -- retries that cannot be sent ----------------------------------------------------------------


def test_a_retry_that_is_too_large_is_a_dead_letter_before_it_is_recorded(
    make: Make, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aztask.queues.local.broker.MESSAGE_LIMIT", 2_000)
    bench = make(joint=joint)
    items = bench.claimed(*"ab")
    for item in items:
        bench.pipeline.decisions.failed(item, Resubmit(1.0), "ValueError", "no luck", "the trace")
    items[0].rewrite(saved=b"x" * 3_000)
    bench.pipeline.finish(items)
    assert bench.states(*"ab") == ["failed", "retrying"]
    ((task_id, why),) = bench.dead().items()
    assert task_id == "a"
    assert why.startswith("retry-too-large: the retry cannot be sent: message 'a:0:1' has 3")
    outcome = bench.app.results.get("a").outcome
    assert (outcome.error_type, outcome.error) == ("ValueError", "no luck"), "the task's own error"


def test_a_recorded_retry_that_cannot_be_sent_is_recorded_as_the_failure_of_that_retry(
    make: Make, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older version recorded it, or a larger limit allowed it."""
    bench = make(joint=joint)
    (item,) = bench.claimed("a")
    settlement = Resubmit(1.0, due=bench.clock.wall() + 1.0)
    outcome = Outcome(State.RETRYING, settlement, None, "ValueError", "no luck")
    bench.app.results.record([Finish(item.key, item.owner, outcome)])
    item.decide(settlement, outcome, recorded=True, repeated=True)
    item.rewrite(saved=b"x" * 3_000)
    monkeypatch.setattr("aztask.queues.local.broker.MESSAGE_LIMIT", 2_000)
    bench.pipeline.finish([item])
    assert item.settled
    assert [run.state.value for run in bench.app.results.history("a")] == ["retrying", "failed"]
    assert bench.states("a") == ["failed"], "whoever waits for the result gets an answer"
    assert list(bench.dead()) == ["a"]


# -- texts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a\udc80b", "a\0b", "\ud83d\ude00", "\udfff" * 5000])
def test_no_text_is_too_strange_to_be_recorded(make: Make, joint: bool, text: str) -> None:
    bench = make(joint=joint)
    items = bench.claimed(*"ab")
    bench.pipeline.decisions.failed(items[0], DeadLetter(text, text), text, text, text)
    bench.pipeline.decisions.failed(items[1], DeadLetter("plain"), "ValueError", "plain", "")
    bench.pipeline.finish(items)
    assert all(item.settled for item in items)
    outcome = bench.app.results.get("a").outcome
    for stored in (outcome.error_type, outcome.error, outcome.traceback):
        stored.encode("utf-8")
        assert "\0" not in stored
    assert outcome.settlement == replace(items[0].settlement)


def test_an_error_that_ends_the_worker_counts_as_a_start(make: Make, joint: bool) -> None:
    """Otherwise a delivery that ends its worker would end all workers, one after the other."""
    bench = make(joint=joint)
    items = bench.claimed(*"ab")
    bench.pipeline.abandon(items)
    assert [item.settled for item in items] == [True, True]
    assert [bench.app.results.get(each).starts for each in "ab"] == [1, 1]
    items = [
        bench.deliveries.add("default", bench.receiver, each)
        for each in bench.receiver.receive(5, 0.0)
    ]
    bench.pipeline.open(items)
    bench.pipeline.claim(items)
    assert [item.claimed.starts for item in items] == [2, 2]
    assert [item.decided for item in items] == [None, None]


# -- half a system fails ------------------------------------------------------------------------


RETRY = Resubmit(5.0, 1_000_005.0)


def fails(bench: Bench, items: list[WorkItem], decision: Decision = RETRY) -> None:
    for item in items:
        bench.pipeline.decisions.failed(item, decision, "OSError", "disk full", "the trace")


def counted(bench: Bench, task_id: str) -> int:
    """How many failures the store has counted for the task's first run."""
    with bench.app.results._database.read() as connection:
        sql = "SELECT failures FROM runs WHERE task_id = ? AND hop = 0"
        return int(connection.execute(sql, (task_id,)).fetchone()[0])


@pytest.mark.parametrize("error", [ValueError("this one"), BrokerUnavailable("down")])
@pytest.mark.parametrize("strategy", ["abandon", "resubmit"])
def test_a_record_that_works_and_a_settlement_that_raises(
    make: Make, strategy: str, error: Exception
) -> None:
    """The failure is counted once, and the settlement alone is tried again, after a pause."""
    bench = make(task={"retry_strategy": strategy})
    (item,) = bench.claimed("a")
    fails(bench, [item])
    bench.faults.settle["a"] = error
    for tries in (1, 2):
        bench.pipeline.finish([item])
        assert (item.stage, item.settled, item.tries) == (Stage.DECIDED, False, tries)
        assert item.decided.recorded
        assert item.lease.state is LeaseState.HELD
        assert len(bench.keeper) == 1, "it is renewed until then"
        assert bench.states("a") == ["retrying"]
        assert counted(bench, "a") == (strategy == "abandon")
        pause = bench.deliveries.try_later(item) - bench.clock.now
        assert pause == 0.5 * 2 ** (tries - 1)
    bench.faults.settle.clear()
    bench.pipeline.finish([item])
    assert (item.stage, item.settled) == (Stage.ENDED, True)
    assert counted(bench, "a") == (strategy == "abandon")
    again = (1, 0, 0, 0) if strategy == "abandon" else (0, 0, 1, 0)
    assert bench.stats() == again, "one message, and no more"


@pytest.mark.parametrize("error", [ValueError("this one"), BrokerUnavailable("down")])
def test_a_joint_transaction_that_fails_at_its_commit(make: Make, error: Exception) -> None:
    """Neither the record nor the settlement has happened, and both are tried again."""
    bench = make(joint=True, task={"retry_strategy": "abandon"})
    (item,) = bench.claimed("a")
    fails(bench, [item])
    bench.faults.commit.append(error)
    bench.pipeline.finish([item])
    assert (item.stage, item.settled, item.tries) == (Stage.DECIDED, False, 1)
    assert item.decided.recorded is False
    assert item.lease.state is LeaseState.HELD
    assert len(bench.keeper) == 1
    assert (bench.states("a"), counted(bench, "a")) == (["started"], 0)
    assert bench.stats() == (0, 1, 0, 0)
    bench.pipeline.finish([item])
    assert (item.stage, item.settled, item.lease.state) == (
        Stage.ENDED, True, LeaseState.SETTLED,
    )  # fmt: skip
    assert (bench.states("a"), counted(bench, "a")) == (["retrying"], 1)
    assert bench.stats() == (1, 0, 0, 0)


def test_a_batch_whose_commit_fails_once_is_carried_out_in_halves(make: Make) -> None:
    bench = make(joint=True)
    items = bench.claimed(*"abcd")
    bench.succeed(items)
    bench.faults.commit.append(ValueError("disk"))
    bench.pipeline.finish(items)
    assert [len(batch) for batch in bench.receiver.batches] == [4, 2, 2]
    assert all(item.settled for item in items)
    assert bench.states(*"abcd") == ["succeeded"] * 4
    assert bench.stats() == (0, 0, 0, 0)


def test_a_send_that_fails_although_a_settlement_would_work(
    make: Make, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(joint=joint, task={"retry_strategy": "defer"})
    items = bench.claimed(*"ab")
    fails(bench, items[:1])
    bench.succeed(items[1:])

    def send(*_: Any) -> None:
        raise BrokerUnavailable("no way out")

    with monkeypatch.context() as patch:
        patch.setattr(bench.app.broker, "send", send)
        bench.pipeline.finish(items)
        assert (items[0].settled, items[0].lease.state) == (False, LeaseState.HELD)
        assert (items[0].tries, items[0].decided.recorded) == (1, not joint)
        assert items[1].settled is (not joint), "joint, the batch waits as a whole"
        assert bench.app.broker.stats("default").deferred == 0
    bench.pipeline.finish([item for item in items if not item.settled])
    assert bench.app.broker.stats("default").deferred == 1
    assert bench.states(*"ab") == ["retrying", "succeeded"]


def test_a_settlement_without_an_answer_is_tried_again(make: Make, joint: bool) -> None:
    bench = make(joint=joint)
    items = bench.claimed(*"ab")
    bench.succeed(items)
    bench.faults.answers["a"] = Unknown("no answer")
    bench.pipeline.finish(items)
    assert [(item.settled, item.tries) for item in items] == [(False, 1), (True, 0)]
    assert items[0].lease.state is LeaseState.HELD
    bench.faults.answers.clear()
    bench.pipeline.finish(items[:1])
    assert items[0].settled
    assert bench.states(*"ab") == ["succeeded"] * 2


def test_a_settlement_that_is_refused_because_the_lease_is_lost_ends_it(make: Make) -> None:
    bench = make()
    (item,) = bench.claimed("a")
    bench.succeed([item])
    bench.faults.answers["a"] = Lost("taken over")
    bench.pipeline.finish([item])
    assert (item.stage, item.settled, item.lease.state) == (
        Stage.ENDED, False, LeaseState.LOST,
    )  # fmt: skip
    assert bench.states("a") == ["succeeded"], "the redelivery settles from it"


# -- whose lease it is --------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "ours"), [(0.001, True), (0.0, False), (-5.0, False)])
def test_what_ends_after_its_deadline_is_neither_recorded_nor_settled(
    make: Make, joint: bool, left: float, ours: bool
) -> None:
    bench = make(joint=joint)
    items = bench.claimed(*"ab")
    bench.succeed(items)
    items[0].delivery.deadline = bench.clock.now + left
    bench.pipeline.finish(items)
    assert bench.states(*"ab") == ["succeeded" if ours else "started", "succeeded"]
    assert [item.stage for item in items] == [Stage.ENDED] * 2
    assert items[0].settled is ours
    assert items[0].notes == ([] if ours else [("lease_lost", "its deadline passed")])


@pytest.mark.parametrize(("left", "ours"), [(0.001, True), (0.0, False), (-5.0, False)])
def test_what_lost_its_lease_before_the_claim_claims_nothing(
    make: Make, joint: bool, left: float, ours: bool
) -> None:
    bench = make(joint=joint)
    items = bench.items(*"ab")
    items[0].delivery.deadline = bench.clock.now + left
    bench.pipeline.claim(items)
    assert bench.states(*"ab") == ["started" if ours else "pending", "started"]
    assert items[0].stage is (Stage.READY if ours else Stage.ENDED)
    assert items[0].notes == ([] if ours else [("lease_lost", "its deadline passed")])


def test_what_a_newer_delivery_has_started_ends_without_a_settlement(
    make: Make, joint: bool
) -> None:
    """Its worker thawed just before its lease ended, by its own clock."""
    bench = make(joint=joint)
    items = bench.items(*"ab")
    position, count = items[0].delivery.position, items[0].delivery.delivery_count
    newer = owner_of("other/1", count + 1)
    thief = Start(items[0].key, "shop.count", "default", position, newer, "other", 5.0)
    bench.app.results.start([thief])
    bench.pipeline.claim(items)
    assert [item.stage for item in items] == [Stage.ENDED, Stage.READY]
    assert items[0].settled is False
    assert [kind for kind, _ in items[0].notes] == ["lease_lost"]
    run = bench.app.results.get("a")
    assert (run.worker, run.starts) == ("other", 1)


def test_a_lost_lease_says_why(make: Make) -> None:
    bench = make()
    (item,) = bench.claimed("a")
    bench.succeed([item])
    bench.keeper.begin(item.lease)
    bench.keeper.lapse(item.lease, "the broker says so")
    bench.pipeline.finish([item])
    assert item.notes == [("lease_lost", "the broker says so")]
    assert bench.states("a") == ["started"]


def test_what_another_worker_took_over_is_neither_recorded_nor_settled(
    make: Make, joint: bool
) -> None:
    bench = make(joint=joint)
    items = bench.claimed(*"abc")
    bench.succeed(items)
    position = items[1].delivery.position
    thief = Start(items[1].key, "shop.count", "default", position, "thief", "x", 5.0)
    bench.app.results.start([thief])
    bench.pipeline.finish(items)
    assert bench.states(*"abc") == ["succeeded", "started", "succeeded"]
    assert [item.settled for item in items] == [True, False, True]
    assert items[1].stage is Stage.ENDED
    assert [kind for kind, _ in items[1].notes] == ["lease_lost"]
    assert len(bench.keeper) == 0, "it is not renewed any more"
    assert bench.stats() == (0, 1, 0, 0)


def test_at_most_once_the_end_is_recorded_without_a_lease(make: Make) -> None:
    bench = make(task={"delivery": "at-most-once"})
    (item,) = bench.claimed("a")
    assert item.settled
    item.sent()
    bench.clock.now += 10 * LEASE
    bench.succeed([item])
    bench.pipeline.finish([item])
    assert bench.states("a") == ["succeeded"]
    assert (item.stage, item.notes) == (Stage.ENDED, [])


def test_at_most_once_a_run_that_was_given_up_reports_no_second_end(make: Make) -> None:
    bench = make(task={"delivery": "at-most-once"})
    (item,) = bench.claimed("a")
    bench.succeed([item])
    position = item.delivery.position
    thief = Start(item.key, "shop.count", "default", position, "thief", "x", 5.0)
    bench.app.results.start([thief])
    bench.pipeline.finish([item])
    assert bench.states("a") == ["started"]
    assert item.decided is not None
    assert item.decided.repeated, "so the journal does not report it"
    assert [kind for kind, _ in item.notes] == ["lease_lost"]


# -- at most once -------------------------------------------------------------------------------


def test_at_most_once_the_message_is_gone_before_the_task_runs(make: Make, joint: bool) -> None:
    bench = make(joint=joint, task={"delivery": "at-most-once"})
    items = bench.claimed(*"ab")
    assert [(item.stage, item.settled) for item in items] == [(Stage.READY, True)] * 2
    assert bench.receiver.batches == [[("a", Complete()), ("b", Complete())]]
    assert bench.stats() == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "answer", [Unknown("no answer"), Lost("taken over"), ValueError("x"), BrokerUnavailable("x")]
)
def test_at_most_once_what_could_not_be_removed_does_not_run(make: Make, answer: Any) -> None:
    """It may be delivered again: it would run twice."""
    bench = make(task={"delivery": "at-most-once"})
    where = bench.faults.settle if isinstance(answer, Exception) else bench.faults.answers
    where["b"] = answer
    items = bench.claimed(*"abc")
    assert items[1].stage is Stage.ENDED
    assert not items[1].settled
    # where the broker is unreachable, none of the batch could be removed
    others = Stage.ENDED if isinstance(answer, BrokerUnavailable) else Stage.READY
    assert [item.stage for item in items[::2]] == [others] * 2


@pytest.mark.parametrize("state", [LeaseState.RENEWING, LeaseState.UNKNOWN, LeaseState.LOST])
def test_at_most_once_what_may_not_be_settled_now_does_not_run(
    make: Make, state: LeaseState
) -> None:
    bench = make(task={"delivery": "at-most-once"})
    items = bench.items(*"ab")
    items[0].lease.state = state
    bench.pipeline.claim(items)
    assert [item.stage for item in items] == [Stage.ENDED, Stage.READY]


def test_at_least_once_nothing_is_settled_before_the_run(make: Make) -> None:
    bench = make()
    bench.claimed(*"ab")
    assert bench.receiver.batches == []


@pytest.mark.parametrize("answer", [ValueError("this one"), BrokerUnavailable("x")])
def test_at_most_once_what_could_not_be_removed_is_held_still(
    make: Make, joint: bool, answer: Any
) -> None:
    """Its lease ends by itself: the message comes again."""
    bench = make(joint=joint, task={"delivery": "at-most-once"})
    bench.faults.settle["a"] = answer
    (item,) = bench.claimed("a")
    assert item.stage is Stage.ENDED
    assert item.lease.state is LeaseState.HELD


def test_at_most_once_what_is_not_to_run_is_settled_with_its_record(make: Make) -> None:
    """One that has expired, say: it is not completed before that is recorded."""
    bench = make(task={"delivery": "at-most-once"})
    (item,) = bench.items("a")
    item.rewrite(expires=bench.clock.now)
    bench.pipeline.claim([item])
    assert (item.stage, item.settled, bench.receiver.batches) == (Stage.DECIDED, False, [])
    bench.pipeline.finish([item])
    assert (bench.states("a"), item.settled) == (["expired"], True)


# -- opening ------------------------------------------------------------------------------------


def test_a_message_that_cannot_be_decoded_is_dead(make: Make) -> None:
    bench = make()
    bench.app.broker.send("default", [Envelope(b"junk", {"id": "bad"}, message_id="bad")])
    bench.send("good")
    bad, good = bench.receive()
    assert isinstance(bad.settlement, DeadLetter)
    assert bad.settlement.reason == "undecodable"
    assert (good.decided, bad.opened) == (None, None)
    assert good.task is bench.app.tasks["shop.count"]
    bench.pipeline.finish([bad])
    assert list(bench.dead()) == ["bad"]


def test_what_is_early_is_put_off_as_it_is_opened(make: Make) -> None:
    bench = make()
    bench.send("a")
    (item,) = bench.receive()
    early = replace(message_of(item), eta=bench.clock.now + 5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.app.codec, "from_envelope", lambda *_, **__: early)
        bench.pipeline.open([item])
    assert item.settlement == Resubmit(5.0, counted=False)


# -- claiming -----------------------------------------------------------------------------------


def test_what_the_store_is_told_of_a_start(make: Make) -> None:
    bench = make()
    bench.clock.now += 7.0
    (item,) = bench.claimed("a")
    run = bench.app.results.get("a")
    assert (run.task, run.queue, run.worker) == ("shop.count", "default", "w")
    assert (run.starts, run.started_at) == (1, bench.clock.now)
    assert item.claimed.starts == 1


@pytest.mark.parametrize(("count", "base", "starts"), [(1, 0, 1), (3, 0, 3), (12, 11, 1)])
def test_without_a_store_the_service_s_count_stands_for_the_starts(
    make: Make, count: int, base: int, starts: int
) -> None:
    """Counted from the last resubmit on: the services' own count may go on over it."""
    bench = make(results=False)
    (item,) = bench.items("a")
    item.delivery.delivery_count = count
    item.rewrite(delivery_base=base)
    bench.pipeline.claim([item])
    assert (item.stage, item.claimed.starts) == (Stage.READY, starts)


def test_deferred_messages_that_cannot_be_received_now_are_asked_for_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(task={"retry_strategy": "defer"})
    items = bench.claimed(*"a")
    fails(bench, items, Resubmit(0.0))
    bench.pipeline.finish(items)
    bench.send("b")
    pointer, other = bench.receive()

    def away(*_: Any) -> None:
        raise BrokerUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(bench.receiver._inner, "receive_deferred", away)
        bench.pipeline.claim([pointer, other])
    assert [(item.stage, item.tries) for item in (pointer, other)] == [(Stage.RECEIVED, 1)] * 2
    bench.pipeline.claim([pointer, other])
    assert [item.stage for item in (pointer, other)] == [Stage.READY] * 2
    assert bench.app.results.get("a").starts == 1


def test_one_whose_claim_cannot_be_carried_on_fails_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    items = bench.items(*"abc")
    real = bench.pipeline.decisions.claimed

    def claimed(item: WorkItem, answer: Any) -> None:
        if item.key.task_id == "b":
            raise LookupError("odd")
        real(item, answer)

    monkeypatch.setattr(bench.pipeline.decisions, "claimed", claimed)
    bench.pipeline.claim(items)
    assert [(item.stage, item.tries) for item in items] == [
        (Stage.READY, 0), (Stage.RECEIVED, 1), (Stage.READY, 0),
    ]  # fmt: skip


def test_a_duplicate_whose_run_is_owned_elsewhere_is_completed(make: Make, joint: bool) -> None:
    """Not released: it would come again and again, as long as the other one runs."""
    bench = make(joint=joint)
    bench.send("a")
    (peeked,) = bench.app.broker.peek("default")
    bench.app.broker.send("default", [replace(peeked.envelope, message_id="twice")])
    first, second = bench.again()
    assert (first.stage, second.stage) == (Stage.READY, Stage.DECIDED)
    bench.pipeline.finish([second])
    assert second.settled
    assert bench.receiver.batches == [[("a", Complete())]]
    assert bench.stats() == (0, 1, 0, 0)
    run = bench.app.results.get("a")
    assert (run.state, run.starts) == (State.STARTED, 1), "nothing is recorded of it"
    bench.succeed([first])
    bench.pipeline.finish([first])
    assert bench.states("a") == ["succeeded"]


# -- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("results", [True, False])
def test_given_back_twelve_times_the_starts_are_as_they_were(
    make: Make, joint: bool, results: bool
) -> None:
    """A deploy does not count: more of them than the delivery limit end nothing."""
    bench = make(joint=joint, results=results)
    bench.send("a")
    for _ in range(12):
        (item,) = bench.again()
        assert (item.stage, item.claimed.starts) == (Stage.READY, 1)
        bench.pipeline.release([item])
        assert (item.stage, item.settled) == (Stage.ENDED, True)
        if results:
            assert bench.app.results.get("a").starts == 0
    (item,) = bench.again()
    assert (item.stage, item.claimed.starts) == (Stage.READY, 1)


@pytest.mark.parametrize("counted", [True, False])
def test_resubmits_without_a_store_never_meet_the_delivery_limit(make: Make, counted: bool) -> None:
    """Each clone is a message of its own: of its deliveries only its own ones count."""
    bench = make(results=False, task={"retry": RetryPolicy(max_retries=100)})
    bench.send("a")
    for hop in range(25):
        (item,) = bench.again()
        assert (item.stage, item.claimed.starts) == (Stage.READY, 1)
        assert item.key.hop == hop
        item.delivery.delivery_count += 2  # two workers died over it
        item.sent()
        fails(bench, [item], Resubmit(0.0, counted=counted))
        bench.pipeline.finish([item])
        assert item.settled
    assert bench.stats() == (1, 0, 0, 0)
    assert message_of(item).resubmit_count == (24 if counted else 0)


def test_crashes_do_meet_it(make: Make, joint: bool) -> None:
    bench = make(joint=joint)
    bench.send("a")
    for starts in range(1, 11):
        (item,) = bench.again()
        assert (item.stage, item.claimed.starts) == (Stage.READY, starts)
        bench.clock.now += LEASE + 1.0
    (item,) = bench.again()
    assert item.settlement.reason == "delivery-limit"


# -- giving back --------------------------------------------------------------------------------


def test_what_was_not_claimed_is_given_back_without_the_store(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    items = bench.items(*"ab")
    monkeypatch.setattr(bench.app.results, "disown", lambda runs: 1 / 0)
    bench.pipeline.release(items)
    assert bench.stats() == (2, 0, 0, 0)
    assert [item.stage for item in items] == [Stage.ENDED] * 2


@pytest.mark.parametrize("error", [ValueError("this one"), BrokerUnavailable("down")])
def test_what_cannot_be_given_back_ends_all_the_same(make: Make, error: Exception) -> None:
    """Its lease ends by itself, and its start counts."""
    bench = make()
    items = bench.claimed(*"ab")
    bench.faults.disown["b"] = error
    bench.pipeline.release(items)
    assert [item.stage for item in items] == [Stage.ENDED] * 2
    assert bench.app.results.get("b").starts == 1
    assert items[1].lease.state is LeaseState.HELD
    assert items[1].tries >= 1


def test_what_lapsed_meanwhile_is_not_given_back_but_its_start_is(make: Make) -> None:
    bench = make()
    items = bench.claimed(*"ab")
    items[0].delivery.deadline = bench.clock.now
    bench.pipeline.release(items)
    assert bench.receiver.batches == [[("b", Release())]]
    assert [bench.app.results.get(each).starts for each in "ab"] == [0, 0]


def test_at_most_once_what_is_given_back_has_failed(make: Make) -> None:
    bench = make(task={"delivery": "at-most-once"})
    items = bench.claimed(*"ab")
    items[0].sent()
    bench.pipeline.release(items, "it ran beside another task")
    assert [item.stage for item in items] == [Stage.ENDED] * 2
    assert bench.states(*"ab") == ["failed", "failed"]
    outcome = bench.app.results.get("a").outcome
    assert (outcome.error_type, outcome.error) == ("Interrupted", "it ran beside another task")
    assert bench.stats() == (0, 0, 0, 0)


def test_at_most_once_what_the_worker_stopped_says_so(make: Make) -> None:
    bench = make(task={"delivery": "at-most-once"})
    items = bench.claimed("a")
    bench.pipeline.release(items)
    assert "worker" in bench.app.results.get("a").outcome.error


@pytest.mark.parametrize("error", [ValueError("this one"), BrokerUnavailable("down")])
def test_an_abandon_that_fails_harms_no_neighbour(make: Make, error: Exception) -> None:
    bench = make()
    items = bench.claimed(*"abc")
    items[2].delivery.deadline = bench.clock.now
    bench.faults.settle["b"] = error
    bench.pipeline.abandon(items)
    assert items[0].settled is isinstance(error, ValueError)
    assert not items[1].settled
    assert items[1].lease.state is LeaseState.HELD
    assert (items[2].stage, items[2].settled) == (Stage.ENDED, False)


def test_a_finished_run_is_not_given_back_while_the_store_is_unreachable(make: Make) -> None:
    """At SIGTERM: it would run again, although it has ended."""
    bench = make()
    done, waiting = bench.claimed(*"ab")
    bench.succeed([done])
    bench.faults.record["a"] = BrokerUnavailable("away")
    for tries in (1, 2):
        bench.pipeline.finish([done])
        assert (done.stage, done.tries, done.settled) == (Stage.DECIDED, tries, False)
    at = bench.deliveries.try_later(done)
    bench.deliveries.ready.append(waiting)
    assert bench.deliveries.waiting() == [waiting]
    bench.pipeline.release([waiting])
    assert bench.app.results.get("a").starts == 1
    bench.faults.record.clear()
    assert bench.deliveries.due(at) == [done]
    bench.pipeline.finish([done])
    assert (bench.states("a"), done.settled) == (["succeeded"], True)
    assert bench.stats() == (1, 0, 0, 0)


# -- strategies that wait -----------------------------------------------------------------------


def test_what_waits_is_recorded_and_not_settled(make: Make, joint: bool) -> None:
    bench = make(joint=joint, task={"retry_strategy": "hold"})
    items = bench.claimed(*"ab")
    fails(bench, items[:1])
    bench.succeed(items[1:])
    bench.pipeline.finish(items)
    assert [item.stage for item in items] == [Stage.HELD, Stage.ENDED]
    assert [item.settled for item in items] == [False, True]
    assert bench.states(*"ab") == ["retrying", "succeeded"]
    assert items[0].lease.state is LeaseState.HELD
    assert [[each for each, _ in batch] for batch in bench.receiver.batches] == [["b"]]


def test_what_waits_for_its_lease_to_end_is_done_with(make: Make) -> None:
    bench = make(task={"retry_strategy": "lease-timeout"})
    (item,) = bench.claimed("a")
    fails(bench, [item])
    bench.pipeline.finish([item])
    assert (item.stage, item.settled) == (Stage.ENDED, False)
    assert bench.states("a") == ["retrying"]
    assert bench.receiver.batches == []


def test_what_ended_meanwhile_is_left_out(make: Make) -> None:
    bench = make()
    items = bench.claimed(*"ab")
    bench.succeed(items)
    items[0].end()
    bench.pipeline.finish(items)
    assert bench.states(*"ab") == ["started", "succeeded"]
    assert not items[0].settled


def test_a_repeated_settlement_is_not_recorded_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    (item,) = bench.claimed("a")
    bench.succeed([item])
    bench.faults.answers["a"] = Lost("it was slow")
    bench.pipeline.finish([item])
    bench.faults.answers.clear()
    bench.clock.now += LEASE + 1.0
    (item,) = bench.again()
    assert item.decided.recorded
    monkeypatch.setattr(bench.app.results, "record", lambda finishes: 1 / 0)
    bench.pipeline.finish([item])
    assert item.settled
    assert bench.stats() == (0, 0, 0, 0)


def test_without_a_store_the_counts_are_written_before_it_comes_again(make: Make) -> None:
    bench = make(results=False, task={"retry_strategy": "abandon"})
    (item,) = bench.claimed("a")
    fails(bench, [item])
    bench.pipeline.finish([item])
    (item,) = bench.again()
    assert message_of(item).resubmit_count == 1
    assert item.claimed.starts == 1


# -- one transaction -------------------------------------------------------------------------


def test_one_transaction_needs_one_file(make: Make) -> None:
    assert make(joint=True).pipeline._joint is not None
    assert make(joint=False).pipeline._joint is None
    assert make(joint=True, results=False).pipeline._joint is None


def test_a_broker_or_a_store_without_transactions_has_none_in_common(make: Make) -> None:
    both = make(joint=True).app
    plain: Any = SimpleNamespace()
    for broker, results in ((plain, plain), (plain, both.results), (both.broker, plain)):
        assert shared_transaction(broker, results) is None
