"""Settlements on Service Bus whose answer is cut off: what was done is reported as settled."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from bus import broker_at, bus_site
from harness import wait_until
from ledger_app import flaky
from proxy import Proxy

from aztask import App
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    Delivery,
    Lost,
    MessageState,
    QueueOptions,
    Receiver,
    Renewed,
    Settled,
    Unknown,
)
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.settlement import (
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Resubmit,
    Settlement,
    with_envelope,
)
from aztask.stores.events.sink import read_events
from aztask.testing import RunningEmulator

LEASE = 20.0
SHORT = 2.0
SETTLE = re.compile(rb"com\.microsoft:(update-disposition)")
CLONE = with_envelope(Resubmit(), Envelope(b"clone", message_id="m:1"), 0.0)
_names = count(1)


class Bench:
    """A queue; broker: through a proxy that meddles with settlements; direct: past it."""

    def __init__(self, bus: RunningEmulator, *, lease: float, sessions: bool) -> None:
        self.proxy = Proxy(bus.port, requests=SETTLE)
        self.broker = broker_at(bus, port=self.proxy.port)
        self.direct = broker_at(bus)
        self.name = f"settling-{next(_names)}"
        self.lease = lease
        self.session = "s" if sessions else None
        self.direct.declare(self.name, QueueOptions(lease=lease, sessions=sessions or None))

    def held(self, bodies: int = 1) -> tuple[Receiver, list[Delivery]]:
        """So many messages under leases, received through the proxy."""
        envelopes = [
            Envelope(b"%d" % n, message_id=f"m{n}", session=self.session) for n in range(bodies)
        ]
        self.direct.send(self.name, envelopes)
        receiver = self.broker.receiver(self.name, lease=self.lease, session=self.session)
        deliveries: list[Delivery] = []
        until = time.monotonic() + 10
        while len(deliveries) < bodies and time.monotonic() < until:
            deliveries += receiver.receive(bodies - len(deliveries), 5.0)
        assert len(deliveries) == bodies
        return receiver, deliveries

    def meddle(self, how: str, first: int = 1) -> None:
        """Do that to the first so many requests to settle."""
        self.proxy.hook = lambda line, number: how if number <= first else None

    def bodies(self, *, dead: bool = False) -> list[bytes]:
        return [each.envelope.body for each in self.direct.peek(self.name, dead_letter=dead)]


@contextmanager
def bench_on(
    bus: RunningEmulator, *, lease: float = LEASE, sessions: bool = False
) -> Iterator[Bench]:
    made = Bench(bus, lease=lease, sessions=sessions)
    yield made
    made.proxy.set("reset")
    made.broker.close()
    made.direct.close()
    made.proxy.close()


@pytest.fixture
def bench(bus: RunningEmulator) -> Iterator[Bench]:
    with bench_on(bus) as made:
        yield made


@pytest.fixture
def sessions(bus: RunningEmulator) -> Iterator[Bench]:
    with bench_on(bus, sessions=True) as made:
        yield made


KINDS = {
    "complete": Complete(),
    "abandon": Abandon(),
    "dead-letter": DeadLetter("bad", "because"),
    "defer": Defer(60.0, 0.0),
    "resubmit": CLONE,
}


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_one_whose_answer_is_cut_off_is_settled(bench: Bench, how: Settlement) -> None:
    receiver, (delivery,) = bench.held()
    bench.meddle("drop-reply")
    assert receiver.settle([(delivery, how)]) == [Settled()]
    assert bench.proxy.total == 2, "the repetition was refused, and nothing else was asked"
    left = bench.direct.peek(bench.name)
    if isinstance(how, Complete | DeadLetter):
        assert left == []
    elif isinstance(how, Abandon):
        (back,) = left
        assert (back.state, back.delivery_count) == (MessageState.ACTIVE, 1)
    elif isinstance(how, Defer):
        assert [each.state for each in left] == [MessageState.DEFERRED]
    else:
        assert [each.envelope.body for each in left] == [b"clone"]
    assert bench.bodies(dead=True) == ([b"0"] if isinstance(how, DeadLetter) else [])


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_one_whose_request_never_arrives_is_made_again(bench: Bench, how: Settlement) -> None:
    receiver, (delivery,) = bench.held()
    bench.meddle("reset")
    assert receiver.settle([(delivery, how)]) == [Settled()]
    assert bench.bodies(dead=True) == ([b"0"] if isinstance(how, DeadLetter) else [])


def test_a_batch_whose_answer_is_cut_off_is_settled(bench: Bench) -> None:
    receiver, deliveries = bench.held(7)
    bench.meddle("drop-reply")
    ways = [Complete(), Complete(), Complete(), Abandon(), Abandon(), DeadLetter("x"), Complete()]
    answers = receiver.settle(list(zip(deliveries, ways, strict=True)))
    assert answers == [Settled()] * 7
    assert bench.bodies() == [b"3", b"4"]
    assert bench.bodies(dead=True) == [b"5"]


def test_a_lock_that_is_lost_is_not_taken_for_settled(bench: Bench) -> None:
    """One of a batch lost its lock before anything was tried, by a settlement elsewhere."""
    receiver, deliveries = bench.held(3)
    other = bench.direct.receiver(bench.name, lease=LEASE)
    assert other.settle([(deliveries[1], Complete())]) == [Settled()]
    deliveries[1].settled = False  # type: ignore[attr-defined]  # as another process would have it
    answers = receiver.settle([(each, Complete()) for each in deliveries])
    assert [type(each) for each in answers] == [Settled, Lost, Settled]
    other.close()


def test_after_the_deadline_nothing_is_taken_for_settled(bus: RunningEmulator) -> None:
    with bench_on(bus, lease=SHORT) as bench:
        receiver, (delivery,) = bench.held()
        bench.meddle("drop-reply", 2)
        assert isinstance(receiver.settle([(delivery, Complete())])[0], Unknown)
        time.sleep(SHORT + 0.1)
        assert isinstance(receiver.settle([(delivery, Complete())])[0], Lost)


def test_a_renewal_after_an_unanswered_settlement_is_unknown(bench: Bench) -> None:
    """The settlement took effect, so the renewal is refused; the lease is not lost for that."""
    receiver, (delivery,) = bench.held()
    deadline = delivery.deadline
    bench.meddle("drop-reply", 2)
    assert isinstance(receiver.settle([(delivery, Complete())])[0], Unknown)
    assert isinstance(receiver.renew([delivery])[0], Unknown)
    assert delivery.deadline == deadline
    assert receiver.settle([(delivery, Complete())]) == [Settled()]


def test_a_renewal_of_what_is_settled_elsewhere_is_lost(bench: Bench) -> None:
    receiver, (delivery,) = bench.held()
    other = bench.direct.receiver(bench.name, lease=LEASE)
    assert isinstance(receiver.renew([delivery])[0], Renewed)
    assert other.settle([(delivery, Complete())]) == [Settled()]
    delivery.settled = False  # type: ignore[attr-defined]  # as another process would have it
    assert isinstance(receiver.renew([delivery])[0], Lost)
    other.close()


# -- sessions: they end with their connection, so nothing can be repeated -------------------------

IN_SESSION = {
    **{name: how for name, how in KINDS.items() if name != "resubmit"},
    "resubmit": with_envelope(Resubmit(), Envelope(b"clone", message_id="m:1", session="s"), 0.0),
}


@pytest.mark.parametrize("how", IN_SESSION.values(), ids=IN_SESSION)
def test_one_in_a_session_is_found_settled(sessions: Bench, how: Settlement) -> None:
    receiver, (delivery,) = sessions.held()
    sessions.meddle("drop-reply")
    assert receiver.settle([(delivery, how)]) == [Settled()]
    assert sessions.bodies(dead=True) == ([b"0"] if isinstance(how, DeadLetter) else [])
    if isinstance(how, Resubmit):
        assert sessions.bodies() == [b"clone"]


def test_a_batch_in_a_session_is_found_settled(sessions: Bench) -> None:
    receiver, deliveries = sessions.held(4)
    sessions.meddle("drop-reply")
    ways = [Complete(), Complete(), Complete(), DeadLetter("x")]
    answers = receiver.settle(list(zip(deliveries, ways, strict=True)))
    assert isinstance(answers[3], Lost), "the session was gone before its request could be sent"
    assert answers[:3] == [Settled()] * 3
    assert sessions.bodies() == [b"3"]


def test_one_in_a_session_that_never_arrived_comes_again(sessions: Bench) -> None:
    """First nobody can say; asked again, it is lost: the message is there, for anybody."""
    receiver, (delivery,) = sessions.held()
    sessions.meddle("reset")
    assert isinstance(receiver.settle([(delivery, Complete())])[0], Unknown)
    assert isinstance(receiver.settle([(delivery, Complete())])[0], Lost)
    (again,) = receiver.receive(1, 10.0)
    assert again.envelope.body == b"0"
    assert receiver.settle([(again, Complete())]) == [Settled()]


def test_an_old_delivery_is_no_business_of_the_session_held_now(sessions: Bench) -> None:
    """The receiver has the session again, and the message with it, under another lock."""
    receiver, (delivery,) = sessions.held()
    sessions.meddle("reset")
    assert isinstance(receiver.settle([(delivery, Complete())])[0], Unknown)
    (again,) = receiver.receive(1, 10.0)
    assert isinstance(receiver.settle([(delivery, Complete())])[0], Lost)
    assert isinstance(receiver.renew([again])[0], Renewed)
    assert receiver.settle([(again, Complete())]) == [Settled()]


# -- whoever settles ------------------------------------------------------------------------------


def test_a_held_lease_whose_answer_is_cut_off_is_completed(
    bus: RunningEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    with bench_on(bus) as bench:
        address = bus.connection_string.replace(f":{bus.port}", f":{bench.proxy.port}", 1)
        app = App("held", broker=address, lease=LEASE)
        bench.direct.send(bench.name, [Envelope(b"x"), Envelope(b"y")])
        bench.meddle("drop-reply")
        with app.receive(bench.name, wait=10.0) as lease:
            lease.complete()
        assert bench.bodies() == [b"y"]
        bench.proxy.counts.clear()
        with app.receive(bench.name, wait=10.0) as lease:
            lease.dead_letter("bad")
        assert bench.bodies(dead=True) == [b"y"]
        app.close()


def test_a_worker_reports_what_was_settled_though_answers_are_cut_off(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    """Every task fails once, so that clones are among them; what it reports is in its events."""
    tasks = 12
    proxy = Proxy(bus.port, requests=SETTLE)
    proxy.hook = lambda line, number: "drop-reply" if number in (1, 4, 9) else None
    options = QueueOptions(lease=LEASE, duplicate_window=600.0)
    with bus_site(tmp_path / "site", bus, options, port=proxy.port) as site:
        app = site.app()
        ids = [f"t{number}" for number in range(tasks)]
        for each in ids:
            app.send(flaky.name, [each, 1], task_id=each)
        worker = site.worker("-Q", "default", "-c", "2", "--lease", f"{LEASE}s")
        for each in ids:
            assert app.result(each).get(timeout=60) == 1
        wait_until(lambda: not app.broker.peek("default"), 20, "all is settled")
        assert worker.stop() == 0, worker.log
        told = [event.event for event in read_events(site.events)]
        assert (told.count("succeeded"), told.count("resubmitted")) == (tasks, tasks)
        assert not {"settle_failed", "lease_lost"} & set(told), worker.log
        assert proxy.total > 1, "the answer to the first one was cut off, and it was repeated"
    proxy.close()
