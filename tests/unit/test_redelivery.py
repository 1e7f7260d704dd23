"""What each retry strategy makes of a decision to run again, and what counts the failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from still import Still

from aztask import App
from aztask.brokers.local import LocalBroker
from aztask.clock import Clock
from aztask.engine import Database
from aztask.errors import CapabilityError
from aztask.leasekeeper import LeaseKeeper
from aztask.results.base import Outcome, Owned, State
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
from aztask.worker.deliveries import Deliveries
from aztask.worker.job import Job, Stage, message_of
from aztask.worker.redelivery import Redelivery

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
    """One job of a task with a strategy, on a real queue."""

    app: App
    clock: Clock
    keeper: LeaseKeeper
    redelivery: Redelivery
    job: Job

    def decide(self, decision: Decision) -> Decision:
        return self.redelivery.decide(self.job, decision)


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
        job = Deliveries("w", clock).add("default", receiver, delivery)
        job.message = app.codec.from_envelope(delivery.envelope, "default")
        job.task = task
        keeper.hold(receiver, [job.lease])
        return Bench(app, clock, keeper, Redelivery(app, keeper, clock), job)

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
    bench.job.settled = True
    assert bench.decide(AGAIN) is AGAIN, "at most once: the message is gone, nothing comes again"


@pytest.mark.parametrize("strategy", ["resubmit", "hold", "defer"])
def test_what_would_expire_before_its_next_run_is_dead(make: Make, strategy: str) -> None:
    bench = make(strategy)
    bench.job.message = replace(message_of(bench.job), expires=NOW + 2.0)
    assert bench.decide(AGAIN) == DeadLetter("expired", "it would expire before its next run")
    assert not isinstance(bench.decide(Resubmit(1.0)), DeadLetter)


@pytest.mark.parametrize("strategy", RETRY_STRATEGIES)
def test_with_a_result_store_its_row_counts(make: Make, strategy: str) -> None:
    bench = make(strategy)
    bench.redelivery.own(bench.job, Owned(3, None, failures=2, snoozes=1))
    message = message_of(bench.job)
    assert (message.resubmit_count, message.snooze_count, bench.job.starts) == (2, 1, 3)
    assert bench.redelivery.start_limit(bench.job) == 10


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
    bench.redelivery.own(bench.job, Owned(3))
    assert message_of(bench.job).resubmit_count == failures
    assert bench.redelivery.start_limit(bench.job) == limit


def test_where_the_service_counts_a_snooze_resubmits(make: Make) -> None:
    """Else it would be counted among the failures."""
    bench = make("hold", results=False, kind=WithoutUpdate)
    assert bench.decide(SNOOZE) == Resubmit(5.0, NOW + 5, counted=False)
    assert bench.decide(ASKED) == Hold(5.0, NOW + 5)


def test_without_a_store_the_message_counts_where_it_can_be_changed(make: Make) -> None:
    bench = make("abandon", results=False)
    bench.redelivery.own(bench.job, Owned(3))
    assert message_of(bench.job).resubmit_count == 0, "starts are no failures"
    bench.job.outcome = Outcome(State.RETRYING, Abandon())
    bench.redelivery.write_counts([bench.job])
    bench.job.receiver.settle([(bench.job.delivery, Abandon())])
    (delivery,) = bench.job.receiver.receive(1, 0.0)
    message = bench.app.codec.from_envelope(delivery.envelope, "default")
    assert (message.resubmit_count, message.snooze_count, message.delivery_base) == (1, 0, 1)


@pytest.mark.parametrize("outcome", [None, Outcome(State.SUCCEEDED, Complete())])
def test_only_what_comes_again_is_counted_in_the_message(
    make: Make, outcome: Outcome | None
) -> None:
    bench = make("abandon", results=False)
    bench.job.outcome = outcome
    bench.redelivery.write_counts([bench.job])
    (peeked,) = bench.app.broker.peek("default")
    assert peeked.envelope.headers["aztask-resubmit-count"] == 0


def test_holding_extends_the_lease_past_its_limit_and_ends_in_time(make: Make) -> None:
    bench = make("hold")
    bench.job.lease.limit_at = NOW + 1
    bench.job.settlement = bench.decide(Resubmit(60.0))
    bench.redelivery.keep(bench.job)
    assert bench.redelivery.waits(bench.job)
    assert (bench.job.stage, bench.job.held_until) == (Stage.HELD, NOW + 60)
    assert bench.job.lease.limit_at == NOW + 60 + 2 * LEASE


def test_a_lapse_is_done_at_once(make: Make) -> None:
    bench = make("lease-timeout")
    bench.job.settlement = bench.decide(AGAIN)
    bench.redelivery.keep(bench.job)
    assert bench.job.stage is Stage.DONE
    assert not bench.job.settled


def test_a_pointer_carries_position_and_counts_and_nothing_of_the_work(make: Make) -> None:
    bench = make("defer")
    bench.job.settlement = bench.decide(SNOOZE)
    first, second = (bench.redelivery.pointer(bench.job) for _ in range(2))
    assert first == second, "repeated, it has the same id"
    pointer = bench.app.codec.from_envelope(first, "default")
    assert pointer.pointer == bench.job.delivery.position
    assert (pointer.body, pointer.snooze_count, pointer.delivery_base) == (b"", 1, 1)
    assert first.delay == 5.0


def test_a_strategy_that_the_broker_cannot_do_is_refused(make: Make) -> None:
    with pytest.raises(CapabilityError, match="retry_strategy='defer' is not possible on somewh"):
        make("defer", kind=WithoutDefer)
    assert make("hold", kind=WithoutDefer).job.settled is False
