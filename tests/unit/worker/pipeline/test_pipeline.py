"""The stages of a delivery's life, on a real queue and a real result store, without a pool."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from pipelinebench import Make

from aztask.errors import AlreadySettled, BrokerUnavailable
from aztask.lease.state import LeaseState
from aztask.results.base import Finish, Outcome, State
from aztask.settlement import DeadLetter, Resubmit
from aztask.worker.pipeline.refusals import TRIES
from aztask.worker.pipeline.work import Stage

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

    def broken(envelope: Any, queue: str) -> Any:
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
    monkeypatch.setattr("aztask.brokers.local.broker.MESSAGE_LIMIT", 2_000)
    bench = make(joint=joint)
    items = bench.claimed(*"ab")
    for item in items:
        bench.pipeline.verdicts.failed(item, Resubmit(1.0), "ValueError", "no luck", "the trace")
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
    monkeypatch.setattr("aztask.brokers.local.broker.MESSAGE_LIMIT", 2_000)
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
    bench.pipeline.verdicts.failed(items[0], DeadLetter(text, text), text, text, text)
    bench.pipeline.verdicts.failed(items[1], DeadLetter("plain"), "ValueError", "plain", "")
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
