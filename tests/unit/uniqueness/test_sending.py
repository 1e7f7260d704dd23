"""Unique tasks from the sender's side: conflicts, dead senders, replays, and housekeeping."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import pytest

from aztask import App
from aztask.errors import (
    BrokerUnavailable,
    ConfigurationError,
    MessageTooLarge,
    NotUnique,
    QueueFull,
    QueueNotFound,
    SendUnconfirmed,
)
from aztask.settlement import Complete
from aztask.stores.records.base import Outcome, RunKey, RunRecord, State
from aztask.support.clock import Clock
from aztask.uniqueness.engine import REPLAYED_SECONDS, UNSENT_SECONDS, Taken, read_claim


class Shop:
    """An app with a clock, whose unique task has these options."""

    def __init__(self, folder, *, keys=(), payloads=None, **options):
        self.now = 1_800_000_000.0
        address = f"local://{folder}/queues.db"
        stored = {"payloads": payloads, "payload_threshold": 1000} if payloads else {}
        self.app = App("shop", broker=address, results=address, signing_keys=keys, **stored)
        self.app.results.rows.clock = Clock(wall=lambda: self.now)
        given = {"unique": "arguments", **options}

        @self.app.task(**given)
        def ship(order):
            return order

        self.ship = ship
        self.app.broker.declare("default")

    def queued(self):
        return [each.envelope.headers["id"] for each in self.app.broker.peek("default", limit=99)]

    def end(self, task_id, state=State.SUCCEEDED):
        outcome = Outcome(state, Complete(), at=self.now)
        self.app.results.bury([RunRecord(RunKey(task_id), "t", "q", state, outcome=outcome)])

    def holder(self):
        (found,) = self.app.results.uniques.due(1e11, 9)
        return found

    @property
    def engine(self):
        return self.app.unique_engine("shop.ship")


@pytest.fixture
def shop(tmp_path):
    made = []

    def make(**options):
        made.append(Shop(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.app.close()


def test_a_second_call_returns_the_first_ones_result(shop):
    one = shop()
    first, other = one.ship.delay(1), one.ship.delay(2)
    assert one.ship.delay(order=1).id == first.id
    assert one.queued() == [first.id, other.id]
    assert [each.id for each in one.ship.map([(1,), (2,), (3,)])][:2] == [first.id, other.id]
    assert asyncio.run(one.ship.adelay(1)).id == first.id
    assert one.app.send("shop.ship", [1]).id == first.id
    assert len(one.queued()) == 3


def test_a_task_that_has_ended_holds_nothing(shop):
    one = shop()
    first = one.ship.delay(1)
    one.end(first.id, State.FAILED)  # its worker died before it freed the key
    second = one.ship.delay(1)
    assert second.id != first.id
    assert one.queued() == [first.id, second.id]


def test_drop_cancels_the_call(shop):
    one = shop(on_conflict="drop")
    first = one.ship.delay(1)
    second = one.ship.delay(1)
    assert (second.state, first.state) == ("cancelled", "pending")
    assert f"task {first.id} holds its key" in str(one.app.results.get(second.id).outcome.error)
    assert one.queued() == [first.id]


def test_raise_names_the_holder(shop):
    one = shop(on_conflict="raise")
    first = one.ship.delay(1)
    with pytest.raises(NotUnique, match=f"task {first.id} holds its key") as caught:
        one.ship.delay(1)
    assert caught.value.task_id == first.id


def test_replace_cancels_one_that_waits_and_keeps_one_that_runs(shop):
    one = shop(on_conflict="replace")
    first = one.ship.delay(1)
    second = one.ship.delay(1)
    assert second.id != first.id
    assert first.state == "cancelled"
    assert one.ship.delay(2).state == "pending"
    run = RunRecord(RunKey(second.id), "t", "q", State.STARTED, starts=1)
    one.app.results.get = lambda task_id: run
    with pytest.raises(NotUnique, match=second.id):
        one.ship.delay(1)


def test_a_time_frees_the_key_whatever_the_task_does(shop):
    one = shop(until=60)
    first = one.ship.delay(1)
    one.end(first.id)
    one.now += 59.9
    assert one.ship.delay(1).id == first.id
    one.now += 0.2
    assert one.ship.delay(1).id != first.id
    envelope = one.app.broker.peek("default", limit=1)[0].envelope
    assert "aztask-unique" not in envelope.headers  # workers have nothing to free


def test_throttle_is_the_first_call_of_each_time(shop):
    one = shop(throttle=60)
    states = []
    for _ in range(5):
        states.append(one.ship.delay(1).state)
        one.now += 25.0
    assert states == ["pending", "cancelled", "cancelled", "pending", "cancelled"]


def test_the_life_bounds_what_is_lost(shop):
    one = shop(unique_life=3600)
    first = one.ship.with_options(delay=600).delay(1)
    one.app.broker.purge("default")
    one.now += 4100.0
    assert one.ship.delay(1).id == first.id
    one.now += 200.0
    assert one.ship.delay(1).id != first.id


def lose(one, error):
    """A send whose process ends, or whose answer is lost, before anything is published."""

    def die(*_):
        raise error

    publish, one.app.sends.sender.publish = one.app.sends.sender.publish, die
    with pytest.raises(type(error)):
        one.ship.delay(1)
    one.app.sends.sender.publish = publish


@pytest.mark.parametrize("kind", [BrokerUnavailable, QueueNotFound, QueueFull, MessageTooLarge])
def test_a_send_that_is_refused_frees_the_key(shop, kind):
    one = shop()
    lose(one, kind("refused"))
    assert one.ship.delay(1).id in one.queued()


@pytest.mark.parametrize("conflict", ["return", "drop", "raise"])
def test_a_large_call_that_is_not_sent_leaves_no_payload(tmp_path, shop, conflict):
    one = shop(payloads=f"{tmp_path}/payloads", on_conflict=conflict)
    one.ship.delay("large" * 100_000)
    stored = [each for each in (tmp_path / "payloads").rglob("*") if each.is_file()]
    assert len(stored) == 1
    with pytest.raises(NotUnique) if conflict == "raise" else nullcontext():
        one.ship.delay("large" * 100_000)
    assert [each for each in (tmp_path / "payloads").rglob("*") if each.is_file()] == stored


@pytest.mark.parametrize("error", [SystemExit(), SendUnconfirmed("no answer", [])])
def test_a_later_caller_completes_the_send_of_a_dead_one(shop, error):
    one = shop()
    lose(one, error)
    first = one.ship.delay(1)
    assert one.queued() == []  # its sender may only be slow
    one.now += UNSENT_SECONDS
    assert one.ship.delay(1).id == first.id
    assert one.queued() == [first.id]
    assert one.ship.delay(1).id == first.id
    assert one.queued() == [first.id]


def test_housekeeping_completes_the_send_of_a_dead_one(shop):
    one = shop()
    lose(one, SystemExit())
    assert one.engine.repair() == 0
    one.now += UNSENT_SECONDS + 1
    assert one.engine.repair() == 1
    assert one.engine.repair() == 0
    assert one.queued() == [one.ship.delay(1).id]


def test_a_holder_that_fails_does_not_keep_others_from_their_turn(shop, monkeypatch):
    monkeypatch.setattr("aztask.uniqueness.engine.PAGE", 1)
    one = shop()
    lose(one, SystemExit())
    one.now += UNSENT_SECONDS + 1
    holder = one.holder()
    stray = read_claim(holder.data)
    one.app.results.uniques.write("stray", replace(stray, queue="no queue").pack(), 0.0, None)
    assert [one.engine.repair(), one.engine.repair()] == [0, 1]
    assert one.queued() == [stray.task_id]


def test_housekeeping_frees_keys_whose_life_has_ended(shop):
    one = shop(unique_life=100)
    one.ship.delay(1)
    one.now += 99.0
    assert one.engine.repair() == 0
    one.now += 2.0
    assert one.engine.repair() == 1
    assert one.app.results.uniques.due(1e11, 9) == []


def test_a_forged_or_damaged_holder_is_not_sent(shop, caplog):
    one = shop(keys=["k" * 32])
    store = one.app.results.uniques
    lose(one, SystemExit())
    holder = one.holder()
    store.write(holder.key, holder.data.replace(b"shop.ship", b"shop.shop"), 0.0, holder)
    store.write("other", b"\xc1", 0.0, None)
    one.now += UNSENT_SECONDS + 1
    one.engine.repair()
    assert (store.read("other"), store.read(holder.key)) == (None, None)
    assert one.queued() == []
    assert "its key is free" in caplog.text
    assert "is not sent: the signature" in caplog.text


def test_a_key_is_freed_by_compare_on_id_and_generation(shop):
    one = shop()
    first = one.ship.delay(1)
    envelope = one.app.broker.peek("default", limit=1)[0].envelope
    message = one.app.codec.from_envelope(envelope, "default")
    one.end(first.id)
    second = one.ship.delay(1)
    one.engine.ended(message)  # a late redelivery of the first
    assert one.ship.delay(1).id == second.id


def test_a_replay_takes_the_key_again_or_names_the_holder(shop):
    one = shop()
    first = one.ship.delay(1)
    envelope = one.app.broker.peek("default", limit=1)[0].envelope
    message = one.app.codec.from_envelope(envelope, "default")
    one.engine.ended(message)
    second = one.ship.delay(1)
    assert one.engine.retake(message.replayed()) == second.id
    one.end(second.id)
    assert one.engine.retake(message.replayed()) == ""
    assert one.ship.delay(1).id == first.id
    one.engine.ended(message)  # generation 0 frees nothing
    assert one.ship.delay(1).id == first.id
    one.engine.ended(message.replayed())
    assert one.ship.delay(1).id not in (first.id, second.id)


def test_until_started_is_free_from_the_start(shop):
    one = shop(until="started")
    first = one.ship.delay(1)
    envelope = one.app.broker.peek("default", limit=1)[0].envelope
    message = one.app.codec.from_envelope(envelope, "default")
    assert one.ship.delay(1).id == first.id
    one.engine.started(message)
    assert one.ship.delay(1).id != first.id


def test_without_a_result_store_the_send_says_what_is_missing():
    app = App("shop", broker="local://:memory:")

    @app.task(unique="arguments")
    def ship(order):
        return order

    with pytest.raises(ConfigurationError, match=r"shop\.ship is unique, which needs a result"):
        ship.delay(1)


def test_inline_mode_runs_it_once_and_frees_the_key(shop):
    one = shop()
    with one.app.inline() as inline:
        assert one.ship.delay(1).get() == 1
        assert one.ship.delay(1).get() == 1
        assert len(inline.sent_to(one.ship)) == 2


def arguments(one):
    """The arguments of the tasks that are in the queue."""
    found = []
    for each in one.app.broker.peek("default", limit=9):
        message = one.app.codec.from_envelope(each.envelope, "default")
        found.append((message.id, *one.app.codec.decode_arguments(message)[0]))
    return found


def debounced(shop, **options):
    return shop(unique=lambda order: order["id"], debounce=5, **options)


def test_debounce_sends_the_last_call_after_a_quiet_time(shop):
    one = debounced(shop)
    ids = set()
    for number in range(4):
        ids.add(one.ship.delay({"id": 7, "n": number}).id)
        one.now += 4.0
        one.engine.repair()
    assert (len(ids), one.queued()) == (1, [])
    one.now += 2.0
    assert one.engine.repair() == 1
    assert arguments(one) == [(*ids, {"id": 7, "n": 3})]
    one.now += 20.0
    assert one.engine.repair() == 0
    assert one.ship.delay({"id": 7, "n": 9}).id not in ids
    assert one.ship.delay({"id": 8, "n": 9}).id != one.ship.delay({"id": 7, "n": 9}).id


def test_calls_that_never_stop_are_sent_at_the_end_of_the_life(shop):
    one = debounced(shop, unique_life=30)
    for number in range(20):
        one.ship.delay({"id": 7, "n": number})
        one.now += 4.0
        one.engine.repair()
    assert [each[1]["n"] for each in arguments(one)] == [7, 15]


def test_a_debounced_message_survives_the_worker_that_was_sending_it(shop):
    one = debounced(shop)
    first = one.ship.delay({"id": 7, "n": 1})
    one.now += 6.0
    engine = one.engine

    def die(claim):
        raise SystemExit

    engine._post = die
    with pytest.raises(SystemExit):
        engine.repair()
    del engine._post
    assert engine.repair() == 0  # it may only be slow
    second = one.ship.delay({"id": 7, "n": 2})  # completes the send, and is another task
    assert arguments(one) == [(first.id, {"id": 7, "n": 1})]
    one.now += 6.0
    assert engine.repair() == 1
    assert arguments(one)[1:] == [(second.id, {"id": 7, "n": 2})]


def test_housekeeping_completes_what_another_one_began(shop):
    one = debounced(shop)
    first = one.ship.delay({"id": 7, "n": 1})
    one.now += 6.0
    holder = one.holder()
    claim = read_claim(holder.data)
    closing = replace(claim, closing=True)
    one.app.results.uniques.write(holder.key, closing.pack(), one.now + 10.0, holder)
    one.now += 11.0
    assert one.engine.repair() == 1
    assert arguments(one) == [(first.id, {"id": 7, "n": 1})]
    assert one.app.results.uniques.due(1e11, 9) == []


def test_inline_mode_sends_debounced_tasks_as_time_passes(shop):
    one = debounced(shop)
    with one.app.inline() as inline:
        results = [one.ship.delay({"id": 7, "n": number}) for number in range(3)]
        inline.advance(4.0)
        assert results[0].state == "pending"
        results.append(one.ship.delay({"id": 7, "n": 3}))
        inline.advance(4.9)
        assert results[0].state == "pending"
        inline.advance(1.0)
        assert results[0].get() == {"id": 7, "n": 3}
        assert len({each.id for each in results}) == 1
        inline.advance(3600.0)


def received(one):
    envelope = one.app.broker.peek("default", limit=1)[0].envelope
    return one.app.codec.from_envelope(envelope, "default")


def test_a_replay_that_died_before_it_was_sent_holds_its_key_for_a_minute(shop):
    one = shop()
    first = one.ship.delay(1)
    message = received(one)
    one.end(first.id)
    one.engine.ended(message)
    assert one.engine.retake(message.replayed()) == ""
    for seconds in (0.0, REPLAYED_SECONDS):
        one.now += seconds
        assert one.ship.delay(1).id == first.id
    one.now += 0.5
    assert one.ship.delay(1).id != first.id


def test_a_member_that_was_received_has_nothing_to_send(shop):
    one = shop()
    one.ship.delay(1)
    message = received(one)
    answer = one.engine.admit(one.ship.unique, "shop.ship:other", message)
    assert isinstance(answer, Taken)
    assert answer.claim.sent
    assert one.engine.admit(one.ship.unique, "shop.ship:other", message) == answer
    one.now += UNSENT_SECONDS + 1
    assert one.engine.repair() == 0
    assert len(one.queued()) == 1
