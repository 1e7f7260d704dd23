"""What each retry strategy makes of a decision to run again, and what counts the failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from still import Still

from aztask import App
from aztask.errors import CapabilityError
from aztask.queues.engine import Database
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.queues.lease.state import LeaseState
from aztask.queues.local.broker import LocalBroker
from aztask.retry import RETRY_STRATEGIES
from aztask.settlement import (
    Abandon,
    Complete,
    DeadLetter,
    Decision,
    Defer,
    Hold,
    Lapse,
    Resubmit,
)
from aztask.stores.records.base import Outcome, Owned, State
from aztask.support.clock import Clock
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.work import Stage, WorkItem, message_of

NOW = 1_000_000.0
LEASE = 10.0
AGAIN = Resubmit(2.0)
ASKED = Resubmit(5.0, asked=True)
SNOOZE = Resubmit(5.0, counted=False, asked=True)


class WithoutUpdate(LocalBroker):
    """The local broker, declared to be one that cannot change a message: as Service Bus."""

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, update=False)


class WithoutDefer(LocalBroker):
    """The local broker, declared to be one that cannot defer: as a Storage queue."""

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, defer=False, name="somewhere")


@dataclass
class Bench:
    """One item of a task with a strategy, on a real queue."""

    app: App
    clock: Clock
    keeper: LeaseKeeper
    redelivery: Redelivery
    item: WorkItem

    def decide(self, decision: Decision) -> Decision:
        return self.redelivery.decide(self.item, decision)


Make = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Make]:
    databases = []

    def make(
        strategy: str, *, results: bool = True, kind: type[LocalBroker] = LocalBroker, **send: Any
    ) -> Bench:
        clock = Still()
        database = Database(":memory:")
        databases.append(database)
        broker = kind(database, clock=clock)
        app = App("shop", broker=broker, results="local://:memory:" if results else None)
        task = app.task(name="shop.count", retry_strategy=strategy)(len)
        task.with_options(**send).delay([1])
        keeper = LeaseKeeper(broker, clock=clock)
        receiver = broker.receiver("default", lease=LEASE)
        (delivery,) = receiver.receive(1, 0.0)
        item = Deliveries("w", clock).add("default", receiver, delivery)
        item.open(app.codec.from_envelope(delivery.envelope, "default"), task)
        keeper.hold(receiver, [item.lease])
        return Bench(app, clock, keeper, Redelivery(app, keeper, clock), item)

    yield make
    for database in databases:
        database.close()


@pytest.mark.parametrize(
    ("strategy", "again", "asked", "snooze"),
    [
        (
            "resubmit",
            Resubmit(2.0, NOW + 2),
            Resubmit(5.0, NOW + 5),
            Resubmit(5.0, NOW + 5, counted=False),
        ),
        ("abandon", Abandon(), Resubmit(5.0, NOW + 5), Resubmit(5.0, NOW + 5, counted=False)),
        ("lease-timeout", Lapse(), Resubmit(5.0, NOW + 5), Resubmit(5.0, NOW + 5, counted=False)),
        ("hold", Hold(2.0, NOW + 2), Hold(5.0, NOW + 5), Hold(5.0, NOW + 5)),
        (
            "defer",
            Defer(2.0, NOW + 2),
            Defer(5.0, NOW + 5),
            Defer(5.0, NOW + 5, counted=False),
        ),
    ],
)
def test_a_decision_becomes_what_the_strategy_makes_of_it(
    make: Make, strategy: str, again: Decision, asked: Decision, snooze: Decision
) -> None:
    """A delay that the task asked for is kept, by resubmitting where the strategy cannot wait."""
    bench = make(strategy)
    assert [bench.decide(each) for each in (AGAIN, ASKED, SNOOZE)] == [again, asked, snooze]


@pytest.mark.parametrize("strategy", RETRY_STRATEGIES)
def test_other_decisions_stand(make: Make, strategy: str) -> None:
    bench = make(strategy)
    dead = DeadLetter("no good")
    assert bench.decide(dead) is dead
    bench.item.settled = True
    assert bench.decide(AGAIN) is AGAIN, "at most once: the message is gone, nothing comes again"


@pytest.mark.parametrize("strategy", ["resubmit", "hold", "defer"])
def test_what_would_expire_before_its_next_run_is_dead(make: Make, strategy: str) -> None:
    bench = make(strategy)
    bench.item.rewrite(expires=NOW + 2.0)
    assert bench.decide(AGAIN) == DeadLetter("expired", "it would expire before its next run")
    assert not isinstance(bench.decide(Resubmit(1.0)), DeadLetter)


@pytest.mark.parametrize("strategy", RETRY_STRATEGIES)
def test_with_a_result_store_its_row_counts(make: Make, strategy: str) -> None:
    bench = make(strategy)
    bench.redelivery.own(bench.item, Owned(3, None, failures=2, snoozes=1))
    message = message_of(bench.item)
    assert (message.resubmit_count, message.snooze_count, bench.item.claimed.starts) == (2, 1, 3)
    assert bench.redelivery.start_limit(bench.item) == 10


@pytest.mark.parametrize(
    ("strategy", "failures", "limit"),
    [("resubmit", 0, 2), ("defer", 0, 2), ("abandon", 2, 4), ("lease-timeout", 2, 4)],
)
def test_without_one_the_service_counts_what_nothing_else_can(
    make: Make, strategy: str, failures: int, limit: int
) -> None:
    """And then the limit of starts leaves room for all retries."""
    bench = make(strategy, results=False, kind=WithoutUpdate)
    object.__setattr__(bench.app.settings, "max_deliveries", 2)
    bench.redelivery.own(bench.item, Owned(3))
    assert message_of(bench.item).resubmit_count == failures
    assert bench.redelivery.start_limit(bench.item) == limit


def test_where_the_service_counts_a_snooze_resubmits(make: Make) -> None:
    """Else it would be counted among the failures."""
    bench = make("hold", results=False, kind=WithoutUpdate)
    assert bench.decide(SNOOZE) == Resubmit(5.0, NOW + 5, counted=False)
    assert bench.decide(ASKED) == Hold(5.0, NOW + 5)


def test_without_a_store_the_message_counts_where_it_can_be_changed(make: Make) -> None:
    bench = make("abandon", results=False)
    bench.redelivery.own(bench.item, Owned(3))
    assert message_of(bench.item).resubmit_count == 0, "starts are no failures"
    bench.item.decide(Abandon(), Outcome(State.RETRYING, Abandon()))
    bench.redelivery.write_counts([bench.item])
    bench.item.receiver.settle([(bench.item.delivery, Abandon())])
    (delivery,) = bench.item.receiver.receive(1, 0.0)
    message = bench.app.codec.from_envelope(delivery.envelope, "default")
    assert (message.resubmit_count, message.snooze_count, message.delivery_base) == (1, 0, 1)


@pytest.mark.parametrize("outcome", [None, Outcome(State.SUCCEEDED, Complete())])
def test_only_what_comes_again_is_counted_in_the_message(
    make: Make, outcome: Outcome | None
) -> None:
    bench = make("abandon", results=False)
    if outcome is not None:
        bench.item.decide(outcome.settlement, outcome)
    bench.redelivery.write_counts([bench.item])
    (peeked,) = bench.app.broker.peek("default")
    assert peeked.envelope.headers["aztask-resubmit-count"] == 0


def test_holding_extends_the_lease_past_its_limit_and_ends_in_time(make: Make) -> None:
    bench = make("hold")
    bench.item.lease.limit_at = NOW + 1
    bench.item.decide(bench.decide(Resubmit(60.0)))
    bench.redelivery.keep(bench.item)
    assert bench.redelivery.waits(bench.item)
    assert (bench.item.stage, bench.item.held_until) == (Stage.HELD, NOW + 60)
    assert bench.item.lease.limit_at == NOW + 60 + 2 * LEASE


def test_a_lapse_is_done_at_once(make: Make) -> None:
    bench = make("lease-timeout")
    bench.item.decide(bench.decide(AGAIN))
    bench.redelivery.keep(bench.item)
    assert bench.item.stage is Stage.ENDED
    assert not bench.item.settled


def test_a_pointer_carries_position_and_counts_and_nothing_of_the_work(make: Make) -> None:
    bench = make("defer")
    bench.item.decide(bench.decide(SNOOZE))
    first, second = (bench.redelivery.pointer(bench.item) for _ in range(2))
    assert first == second, "repeated, it has the same id"
    pointer = bench.app.codec.from_envelope(first, "default")
    assert pointer.pointer == bench.item.delivery.position
    assert (pointer.body, pointer.snooze_count, pointer.delivery_base) == (b"", 1, 1)
    assert first.delay == 5.0


def test_a_strategy_that_the_broker_cannot_do_is_refused(make: Make) -> None:
    with pytest.raises(CapabilityError, match="somewhere does not support retry_strategy='defer'"):
        make("defer", kind=WithoutDefer)
    assert make("hold", kind=WithoutDefer).item.settled is False


# -- in a session ------------------------------------------------------------------------------


class Slot:
    """What holds the item's session."""

    def held(self) -> None: ...

    def over(self, item: WorkItem) -> None: ...


def in_session(bench: Bench, *, ordered: bool) -> None:
    bench.item.session = Slot()
    bench.item.rewrite(ordered=ordered)


@pytest.mark.parametrize("strategy", ["abandon", "lease-timeout"])
def test_in_order_a_delay_that_was_asked_for_is_held(make: Make, strategy: str) -> None:
    bench = make(strategy)
    in_session(bench, ordered=True)
    assert bench.decide(ASKED) == Hold(5.0, NOW + 5)
    in_session(bench, ordered=False)
    assert bench.decide(ASKED) == Resubmit(5.0, NOW + 5)


@pytest.mark.parametrize("strategy", ["resubmit", "defer", "hold"])
def test_in_order_nothing_overtakes_a_retry(make: Make, strategy: str) -> None:
    bench = make(strategy)
    in_session(bench, ordered=True)
    assert bench.redelivery.strategy(bench.item) == "hold"
    assert bench.decide(AGAIN) == Hold(2.0, NOW + 2)


def test_in_order_a_snooze_is_held_where_the_service_counts(make: Make) -> None:
    bench = make("abandon", results=False, kind=WithoutUpdate)
    in_session(bench, ordered=True)
    assert bench.decide(SNOOZE) == Hold(5.0, NOW + 5)
    assert bench.decide(replace(SNOOZE, asked=False)) == Hold(5.0, NOW + 5)


@pytest.mark.parametrize("strategy", ["abandon", "hold", "resubmit"])
def test_what_is_put_off_keeps_its_place_and_counts_nothing(make: Make, strategy: str) -> None:
    bench = make(strategy)
    assert bench.redelivery.put_off(bench.item, 7.0) == Resubmit(7.0, NOW + 7, counted=False)
    in_session(bench, ordered=True)
    assert bench.redelivery.put_off(bench.item, 7.0) == Hold(7.0, NOW + 7)
    in_session(bench, ordered=False)
    assert bench.redelivery.put_off(bench.item, 7.0) == Resubmit(7.0, NOW + 7, counted=False)


# -- counts at their edges ---------------------------------------------------------------------


@pytest.mark.parametrize(("starts", "failures"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_where_the_service_counts_every_start_but_this_one_is_a_failure(
    make: Make, starts: int, failures: int
) -> None:
    bench = make("abandon", results=False, kind=WithoutUpdate)
    bench.item.rewrite(resubmit_count=4)
    bench.redelivery.own(bench.item, Owned(starts))
    assert message_of(bench.item).resubmit_count == 4 + failures


@pytest.mark.parametrize(("failures", "snoozes"), [(0, 2), (2, 0), (1, 1)])
def test_what_the_row_counted_is_added_to_what_the_message_carries(
    make: Make, failures: int, snoozes: int
) -> None:
    bench = make("abandon")
    bench.item.rewrite(resubmit_count=4, snooze_count=5)
    bench.redelivery.own(bench.item, Owned(3, b"page", failures=failures, snoozes=snoozes))
    message = message_of(bench.item)
    assert (message.resubmit_count, message.snooze_count) == (4 + failures, 5 + snoozes)
    assert message.saved == b"page"


def test_a_message_that_nothing_happened_to_stays_as_it_is(make: Make) -> None:
    bench = make("abandon")
    before = message_of(bench.item)
    bench.redelivery.own(bench.item, Owned(1))
    assert message_of(bench.item) is before


def test_a_task_that_is_not_known_has_the_apps_strategy_and_limit(make: Make) -> None:
    bench = make("abandon", results=False, kind=WithoutUpdate)
    object.__setattr__(bench.app.settings, "retry_strategy", "abandon")
    object.__setattr__(bench.app.settings, "max_deliveries", 2)
    bench.item.open(message_of(bench.item), None)
    assert bench.redelivery.strategy(bench.item) == "abandon"
    assert bench.redelivery.start_limit(bench.item) == 2


@pytest.mark.parametrize(("expires", "dead"), [(NOW, True), (NOW + 0.001, False), (None, False)])
@pytest.mark.parametrize("strategy", ["abandon", "lease-timeout"])
def test_what_comes_again_at_once_is_dead_only_if_it_has_expired(
    make: Make, strategy: str, expires: float | None, dead: bool
) -> None:
    bench = make(strategy)
    bench.item.rewrite(expires=expires)
    assert isinstance(bench.decide(AGAIN), DeadLetter) is dead


@pytest.mark.parametrize(
    ("results", "kind"), [(True, LocalBroker), (False, WithoutUpdate)], ids=["a row", "the service"]
)
def test_the_message_does_not_count_where_something_else_does(
    make: Make, results: bool, kind: type[LocalBroker]
) -> None:
    bench = make("abandon", results=results, kind=kind)
    bench.item.decide(Abandon(), Outcome(State.RETRYING, Abandon()))
    bench.redelivery.write_counts([bench.item])
    (peeked,) = bench.app.broker.peek("default")
    assert peeked.envelope.headers["aztask-resubmit-count"] == 0


@pytest.mark.parametrize(
    ("outcome", "settled"),
    [
        (Outcome(State.RETRYING, Resubmit(1.0)), False),  # its clone counts
        (Outcome(State.RETRYING, Abandon()), True),  # at most once: it is gone
        (Outcome(State.FAILED, DeadLetter("why")), False),
    ],
)
def test_what_does_not_come_again_itself_is_not_counted_and_those_after_it_are(
    make: Make, outcome: Outcome, settled: bool
) -> None:
    bench = make("abandon", results=False)
    other = make("abandon", results=False)
    if outcome is not None:
        bench.item.decide(outcome.settlement, outcome)
    bench.item.settled = settled
    other.item.decide(Abandon(), Outcome(State.SNOOZED, Abandon()))
    other.item.rewrite(snooze_count=3, resubmit_count=2)
    other.item.rewrite(saved=b"page 7")
    other.redelivery.write_counts([bench.item, other.item])
    (peeked,) = bench.app.broker.peek("default")
    assert peeked.envelope.headers["aztask-resubmit-count"] == 0
    (peeked,) = other.app.broker.peek("default")
    message = other.app.codec.from_envelope(peeked.envelope, "default")
    assert (message.resubmit_count, message.snooze_count) == (2, 4)
    assert (message.saved, message.delivery_base) == (b"page 7", 1)


def test_a_count_that_cannot_be_written_is_left_out_and_those_after_it_are_not(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    bench, other = make("abandon", results=False), make("abandon", results=False)
    for each in (bench, other):
        each.item.decide(Abandon(), Outcome(State.RETRYING, Abandon()))
    bench.keeper.drop([bench.item.lease])
    bench.item.lease.state = LeaseState.LOST
    other.redelivery._keeper = other.keeper
    other.redelivery.write_counts([bench.item, other.item])
    assert "is not counted" in caplog.text
    (peeked,) = other.app.broker.peek("default")
    assert peeked.envelope.headers["aztask-resubmit-count"] == 1


# -- carrying out ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hold", "until"),
    [
        (Hold(30.0), NOW + 30.0),
        (Hold(30.0, NOW + 12.0), NOW + 12.0),  # repeated later: what is left
        (Hold(30.0, NOW - 5.0), NOW),
    ],
)
def test_a_hold_ends_when_it_is_due(make: Make, hold: Hold, until: float) -> None:
    bench = make("hold")
    bench.item.decide(hold)
    bench.redelivery.keep(bench.item)
    assert bench.item.held_until == until
    assert bench.item.lease.limit_at == until + 2 * LEASE


def test_what_is_settled_now_waits_for_nothing(make: Make) -> None:
    bench = make("hold")
    for settlement, waits in ((Hold(1.0), True), (Lapse(), True), (Abandon(), False)):
        bench.item.decide(settlement)
        assert bench.redelivery.waits(bench.item) is waits


@pytest.mark.parametrize("how", [Complete(), Abandon(), DeadLetter("why"), Defer(2.0, NOW + 2)])
def test_most_settlements_go_to_the_broker_as_they_are(make: Make, how: Decision) -> None:
    bench = make("resubmit")
    bench.item.decide(how)
    assert bench.redelivery.pairs([bench.item]) == [(bench.item.delivery, how)]


@pytest.mark.parametrize(
    ("due", "left"), [(None, 2.0), (NOW + 2.0, 2.0), (NOW + 0.5, 0.5), (NOW, 0.0), (NOW - 9.0, 0.0)]
)
def test_a_resubmission_goes_with_its_clone_and_what_is_left_of_its_delay(
    make: Make, due: float | None, left: float
) -> None:
    bench = make("resubmit")
    bench.item.rewrite(saved=b"page 7")
    bench.item.decide(Resubmit(2.0, due))
    first, second = bench.redelivery.ready(bench.item), bench.redelivery.ready(bench.item)
    assert isinstance(first, Resubmit)
    assert first == second, "repeated, it sends the same clone under the same id"
    assert (first.delay, first.envelope.delay) == (left, left)
    clone = bench.app.codec.from_envelope(first.envelope, "default")
    before = message_of(bench.item)
    assert clone.key == (before.id, 0, 1)
    assert (clone.resubmit_count, clone.snooze_count) == (1, 0)
    assert (clone.saved, clone.unknown_since, clone.delivery_base) == (b"page 7", None, 0)


def test_a_clone_that_was_made_already_is_sent(make: Make) -> None:
    bench = make("resubmit")
    bench.item.decide(Resubmit(2.0, NOW + 2, counted=False), clone=message_of(bench.item).chained())
    ready = bench.redelivery.ready(bench.item)
    clone = bench.app.codec.from_envelope(ready.envelope, "default")
    assert (clone.hop, clone.snooze_count) == (1, 0)


@pytest.mark.parametrize(
    ("outcome", "since", "expected"),
    [
        (None, None, None),
        (Outcome(State.SNOOZED, Resubmit(), error_type="unknown-task", at=NOW - 5), None, NOW - 5),
        (Outcome(State.SNOOZED, Resubmit(), error_type="unknown-task", at=NOW - 5), 7.0, 7.0),
        (Outcome(State.SNOOZED, Resubmit(), error_type="unknown-task", at=NOW - 5), 4e9, NOW - 5),
        (Outcome(State.SNOOZED, Resubmit(), error_type="OSError", at=NOW - 5), None, None),
        (Outcome(State.SNOOZED, Resubmit(), error_type="OSError", at=NOW - 5), 7.0, None),
        (None, 7.0, None),
    ],
)
def test_a_clone_remembers_since_when_its_task_is_unknown(
    make: Make, outcome: Outcome | None, since: float | None, expected: float | None
) -> None:
    bench = make("resubmit")
    bench.item.rewrite(unknown_since=since)
    bench.item.decide(Resubmit(2.0, NOW + 2, counted=False), outcome)
    ready = bench.redelivery.ready(bench.item)
    clone = bench.app.codec.from_envelope(ready.envelope, "default")
    assert clone.unknown_since == expected
    assert clone.snooze_count == 1


class InPlace(LocalBroker):
    """The local broker, declared to change messages in place: as a Storage queue."""

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, resubmit_in_place=True)


@pytest.mark.parametrize(("kind", "base"), [(InPlace, 4), (LocalBroker, 0)])
def test_where_the_services_count_goes_on_a_clone_remembers_it(
    make: Make, kind: type[LocalBroker], base: int
) -> None:
    bench = make("resubmit", kind=kind)
    bench.item.delivery.delivery_count = 4
    bench.item.decide(Resubmit(2.0, NOW + 2))
    assert bench.redelivery.delivery_base(bench.item) == base
    ready = bench.redelivery.ready(bench.item)
    assert bench.app.codec.from_envelope(ready.envelope, "default").delivery_base == base


@pytest.mark.parametrize(("due", "left"), [(None, 5.0), (NOW + 2.0, 2.0), (NOW - 1.0, 0.0)])
@pytest.mark.parametrize("counted", [True, False])
def test_a_pointer_comes_when_it_is_due_and_counts_what_it_stands_for(
    make: Make, due: float | None, left: float, counted: bool
) -> None:
    bench = make("defer")
    bench.item.decide(Defer(5.0, due, counted=counted))
    envelope = bench.redelivery.pointer(bench.item)
    pointer = bench.app.codec.from_envelope(envelope, "default")
    assert envelope.delay == left
    assert (pointer.resubmit_count, pointer.snooze_count) == (int(counted), int(not counted))
