"""Queues whose number of shards changes while programs send, receive, die, and lose the store.

A course is drawn from a seed: senders, workers and an operator take turns on one clock. Nothing is
lost, nothing is done twice, and of each session everything is done in the order of the sends.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

import pytest
from services import ServiceBus, StorageQueues, service_bus_broker, storage_queue_broker
from simulated import line

from aztask.address.owner import Owner
from aztask.address.shards import ShardCount, ShardLayout, ShardRange, shard_name
from aztask.errors import BrokerUnavailable, ConfigurationError, QueueNotFound
from aztask.message.envelope import Envelope
from aztask.queues.base import ANY_SESSION, QueueOptions
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.queues.sharded.broker import ShardedBroker
from aztask.queues.sharded.layouts import DeclaredLayouts
from aztask.settlement import Complete, DeadLetter
from aztask.stores.local.rows import SqliteStore
from aztask.stores.records.controls import ControlStore
from aztask.stores.shardlayouts import REFRESH_SECONDS, LayoutRows, StoredLayouts
from aztask.support import chance, clock
from aztask.support.clock import SYSTEM_CLOCK

LEASE = 20.0
COUNTS = (1, 2, 4, 16)


class Time:
    """A clock that goes on only when it is told to, also by who sleeps."""

    def __init__(self) -> None:
        self.now = 10_000.0
        self.clock = clock.Clock(
            monotonic=lambda: self.now,
            wall=lambda: 1_800_000_000.0 + self.now,
            sleep=self.pass_time,
        )

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


class Entries(LayoutRows):
    """The entries of a program whose store may be gone until some time."""

    gone_until = 0.0

    def read(self, queue: str) -> Any:
        if clock.monotonic() < self.gone_until:
            raise BrokerUnavailable("the store is gone")
        return super().read(queue)


class Program:
    """A sender or a worker, as it is after its start."""

    def __init__(self, world: World) -> None:
        self.layouts = StoredLayouts({"orders": ShardCount(4, 4, declared=True)})
        self.layouts.attach(world.controls)
        self.entries = self.layouts._rows = Entries(world.controls)
        self.broker = ShardedBroker(
            LocalBroker(world.database, clock=world.time.clock),
            self.layouts,
            clock=world.time.clock,
        )
        self.receiver: Any = None
        self.held: list[Any] = []


class World:
    """One file, its programs, and what they did."""

    def __init__(self, seed: int, *, ordered: bool) -> None:
        self.chance = random.Random(seed)
        self.ordered = ordered
        self.time, self.database = Time(), Database(":memory:")
        self.controls = ControlStore(
            SqliteStore(self.database, self.time.clock), Owner("file", "shop")
        )
        with self.going():
            self.senders = [Program(self) for _ in range(3)]
            self.workers = [Program(self) for _ in range(3)]
            self.senders[0].broker.declare("orders", QueueOptions(sessions=ordered))
        self.sent: dict[str, int] = defaultdict(int)
        self.done: dict[str, list[int]] = defaultdict(list)
        self.moves = 0

    def going(self) -> Any:
        return clock.replaced(self.time.clock)

    def close(self) -> None:
        self.database.close()

    # -- what happens ------------------------------------------------------------------------

    def send(self) -> None:
        """The next message of a session; the one before it is confirmed. Now and then a sender
        dies: before the send, or when the message is stored, and another one sends it again.
        """
        place = self.chance.randrange(3)
        sender, session = self.senders[place], f"s{self.chance.randrange(8)}"
        number = self.sent[session]
        envelope = Envelope(
            f"{session}:{number}".encode(),
            {"id": f"{session}-{number}"},
            f"m-{session}-{number}",
            session=session if self.ordered else None,
        )
        fate = self.chance.random()
        if fate < 0.03:
            self.senders[place] = Program(self)
            return
        with suppress(BrokerUnavailable):
            sender.broker.send("orders", [envelope])
            if fate < 0.06:
                self.senders[place] = Program(self)
                return
            self.sent[session] += 1

    def work(self) -> None:
        """A worker receives, or ends one of its messages; now and then it dies."""
        place = self.chance.randrange(3)
        worker = self.workers[place]
        if self.chance.random() < 0.02:
            self.workers[place] = Program(self)
            return
        with suppress(BrokerUnavailable):
            if worker.receiver is None:
                session = ANY_SESSION if self.ordered else None
                worker.receiver = worker.broker.receiver("orders", lease=LEASE, session=session)
            if not worker.held:
                worker.held = worker.receiver.receive(3, 0.0)
                return
            delivery = worker.held.pop(0)
            if delivery.deadline <= self.time.now:
                worker.held = []
                return
            session, _, number = delivery.envelope.body.decode().partition(":")
            if int(number) not in self.done[session]:  # else its result is recorded
                self.done[session].append(int(number))
            if self.chance.random() < 0.02:
                self.workers[place] = Program(self)  # it dies before it settles
                return
            worker.receiver.settle([(delivery, Complete())])
            if not worker.held and self.ordered and self.chance.random() < 0.5:
                worker.receiver.let_go()

    def operate(self) -> None:
        """An operator begins a move, or dies on the way."""
        program = Program(self)
        with suppress(BrokerUnavailable, ConfigurationError):
            program.layouts.layout("orders")
            entry = program.entries.read("orders")
            if entry is None or entry.layout.former is not None:
                return
            count = self.chance.choice([each for each in COUNTS if each != entry.layout.sent.count])
            move = entry.layout.moved(count, ordered=self.ordered)
            options = QueueOptions(sessions=self.ordered)
            program.broker.moves.declare("orders", move, options)
            if self.chance.random() < 0.3:
                return
            program.entries.announce("orders", move, by="ann")
            self.moves += 1

    def lose_the_store(self) -> None:
        program = self.chance.choice([*self.senders, *self.senders, *self.workers])
        program.entries.gone_until = self.time.now + self.chance.uniform(1.0, 5 * REFRESH_SECONDS)

    # -- the course --------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        for step in range(steps):
            busy = 0.4 if step // 400 % 2 else 0.12  # else the workers wait for work
            what = self.chance.random()
            if what < busy:
                self.send()
            elif what < 0.95:
                self.work()
            elif what < 0.98:
                self.operate()
            else:
                self.lose_the_store()
            self.time.pass_time(self.chance.uniform(0.0, 2.0))

    def finish(self) -> None:
        """Work on until all is done."""
        probe = Program(self)
        for _ in range(40_000):
            self.work()
            self.time.pass_time(self.chance.uniform(0.0, 1.0))
            if probe.broker.stats("orders").living == 0:
                return
        raise AssertionError("messages are left")


@pytest.mark.parametrize("ordered", [False, True], ids=["free", "sessions"])
@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_or_overtaken_whatever_happens(
    seed: int, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aztask.stores.shardlayouts.FREE_SECONDS", 4 * REFRESH_SECONDS)
    world = World(seed, ordered=ordered)
    with world.going(), chance.replaced(world.chance):
        world.run(6_000)
        world.finish()
    assert world.moves >= 3
    for session, count in world.sent.items():
        found = world.done[session]
        # A message whose sender died may be stored even though nobody has counted it.
        assert len(found) - count in (0, 1)
        assert sorted(found) == list(range(len(found))), "lost, or done twice"
        if ordered:
            assert found == sorted(found), session
    world.close()


# -- states of sessions ----------------------------------------------------------------------


class Given(DeclaredLayouts):
    """A layout that the test sets."""

    def __init__(self) -> None:
        super().__init__({"orders": ShardCount(4, 4)})
        self.now = ShardLayout(ShardRange(0, 4), ordered=True)

    def layout(self, queue: str, *, session: bool = False) -> ShardLayout:
        return self.now

    def sending(self, queue: str, *, session: bool) -> ShardRange:
        return self.now.sent

    def move(self, count: int) -> None:
        self.now = self.now.moved(count, ordered=True).ended(0)


def local() -> Any:
    return LocalBroker(Database(":memory:"))


def service_bus() -> Any:
    return service_bus_broker(ServiceBus(SYSTEM_CLOCK), line(SYSTEM_CLOCK), tick=0.01)


class Sessions:
    """A queue whose one receiver holds one session after another."""

    def __init__(self, make: Any) -> None:
        self.layouts = Given()
        self.broker = ShardedBroker(make(), self.layouts)
        self.declare()
        self.numbers = iter(range(1000))

    def declare(self) -> None:
        self.broker.declare("orders", QueueOptions(sessions=True, lease=30.0))

    def move(self, count: int) -> None:
        self.layouts.move(count)
        self.declare()

    def hold(self, session: str) -> Any:
        envelope = Envelope(b"x", {}, f"m{next(self.numbers)}", session=session)
        self.broker.send("orders", [envelope])
        receiver: Any = self.broker.receiver("orders", lease=30.0, session=ANY_SESSION)
        until = time.monotonic() + 20.0
        while not (found := receiver.receive(1, 1.0)):
            assert time.monotonic() < until
        assert found[0].session == session
        receiver.done = lambda: receiver.settle([(found[0], Complete())])
        return receiver

    def leave(self, receiver: Any) -> None:
        receiver.done()
        receiver.let_go()
        receiver.close()


@pytest.mark.parametrize("make", [local, service_bus])
def test_the_state_of_a_session_comes_along(make: Any) -> None:
    sessions = Sessions(make)
    for name in ("a", "b", "c"):
        holder = sessions.hold(name)
        holder.set_session_state(name, f"of {name}".encode())
        sessions.leave(holder)
    sessions.move(16)
    holder = sessions.hold("a")
    assert holder.session_state("a") == b"of a"
    assert holder.session_state("a") == b"of a"
    holder.set_session_state("a", b"newer")
    sessions.leave(holder)
    holder = sessions.hold("c")
    holder.set_session_state("c", None)
    sessions.leave(holder)
    sessions.move(2)
    for name, state in (("a", b"newer"), ("b", b"of b"), ("c", None), ("d", None)):
        holder = sessions.hold(name)
        assert holder.session_state(name) == state, name
        sessions.leave(holder)
    holder = sessions.hold("a")
    holder.set_session_state("a", None)
    sessions.leave(holder)
    holder = sessions.hold("a")
    assert holder.session_state("a") is None
    sessions.leave(holder)
    sessions.broker.close()


@pytest.mark.parametrize("make", [local, service_bus])
def test_a_former_shard_that_was_deleted_has_no_states(make: Any) -> None:
    sessions = Sessions(make)
    sessions.move(16)
    for number in range(4):
        with suppress(QueueNotFound):
            sessions.broker._broker.delete(shard_name("orders", number))
    holder = sessions.hold("a")
    assert holder.session_state("a") is None
    holder.set_session_state("a", b"x")
    assert holder.session_state("a") == b"x"
    sessions.leave(holder)
    sessions.broker.close()


def test_a_state_that_another_receiver_holds_is_an_error() -> None:
    sessions = Sessions(local)
    holder = sessions.hold("a")
    holder.set_session_state("a", b"state")
    sessions.move(16)
    other = sessions.hold("a")
    with pytest.raises(BrokerUnavailable, match="held by another receiver"):
        other.session_state("a")
    sessions.leave(holder)
    assert other.session_state("a") == b"state"
    sessions.broker.close()


# -- the shards at the service ---------------------------------------------------------------


def storage_queues() -> Any:
    return storage_queue_broker(StorageQueues(SYSTEM_CLOCK), line(SYSTEM_CLOCK), poll_ceiling=0.05)


class Moving(Given):
    """A move that may end at any time. `kept`: what its end says."""

    kept: int | None = None

    def unfinished(self, queue: str) -> ShardLayout | None:
        return self.now if self.now.former else None

    def finish(self, queue: str, epoch: int, kept: int) -> None:
        self.kept = kept
        self.now = self.now.ended(kept)


@pytest.mark.parametrize("make", [local, service_bus, storage_queues])
@pytest.mark.parametrize("what", ["waiting", "leased", "delayed", "dead"])
def test_a_move_ends_when_the_former_shards_hold_nothing(
    make: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aztask.queues.sharded.moves.REST_NUMBER", 0.0)
    layouts = Moving()
    broker = ShardedBroker(make(), layouts)
    broker.declare("orders", QueueOptions(lease=30.0))
    layouts.now = ShardLayout(ShardRange(0, 4)).moved(2, ordered=False)
    inner = broker._broker
    delay = 1.0 if what == "delayed" else 0.0
    inner.send("orders-shard-3", [Envelope(b"x", {}, "m", delay=delay)])
    receiver: Any = inner.receiver("orders-shard-3", lease=30.0)
    if what in ("leased", "dead"):
        (held,) = receiver.receive(1, 5.0)
    assert broker.moves.end("orders") is False
    assert broker.moves.messages("orders", layouts.now.leaving()) == 1
    if what in ("waiting", "delayed"):
        (held,) = receiver.receive(1, 5.0)
    how = DeadLetter("reason", "why") if what == "dead" else Complete()
    receiver.settle([(held, how)])
    assert broker.moves.end("orders") is True
    assert layouts.kept == (4 if what == "dead" else 0)
    assert broker.moves.end("orders") is False
    assert len(broker.names("orders")) == 4, "as many as the code says"
    assert broker.needed("orders") == tuple(shard_name("orders", n) for n in range(4))
    broker.close()


@pytest.mark.parametrize("make", [local, service_bus, storage_queues])
def test_a_receiver_takes_from_shards_that_come_later(make: Any) -> None:
    layouts = Moving()
    broker = ShardedBroker(make(), layouts)
    broker.declare("orders", QueueOptions(lease=30.0))
    receiver = broker.receiver("orders", lease=30.0)
    assert receiver.receive(1, 0.05) == []
    layouts.now = ShardLayout(ShardRange(0, 4)).moved(16, ordered=False)
    broker.moves.declare("orders", layouts.now, QueueOptions(lease=30.0))
    broker.send("orders", [Envelope(b"x", {"id": f"t{n}"}, f"m{n}") for n in range(60)])
    found: list[Any] = []
    until = time.monotonic() + 20.0
    while len(found) < 60 and time.monotonic() < until:
        found += receiver.receive(10, 0.5)
    assert len(found) == 60
    assert {each.shard for each in found} == set(range(16))
    receiver.settle([(each, Complete()) for each in found])
    assert broker.stats("orders").living == 0
    receiver.close()
    assert receiver.receive(1, 0.0) == []
    broker.close()


def test_a_look_at_the_former_shards_is_not_repeated_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time, layouts = Time(), Moving()
    broker = ShardedBroker(local(), layouts)
    broker.declare("orders")
    layouts.now = ShardLayout(ShardRange(0, 4)).moved(2, ordered=False)
    looks: list[int] = []

    def slow(self: Any, queue: str, number: int) -> bool:
        looks.append(number)
        time.pass_time(2.0)
        return True

    monkeypatch.setattr("aztask.queues.sharded.moves.ShardMoves._holds", slow)
    with clock.replaced(time.clock):
        for _ in range(30):
            assert broker.moves.end("orders") is False
            time.pass_time(1.0)
    assert looks == [2, 2]
    broker.close()


def test_who_may_not_count_ends_a_move_by_peeks(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = Moving()
    broker = ShardedBroker(service_bus(), layouts)
    broker.declare("orders", QueueOptions(lease=30.0))
    layouts.now = ShardLayout(ShardRange(0, 4)).moved(2, ordered=False)
    inner: Any = broker._broker

    def refused(queue: str) -> Any:
        raise ConfigurationError("not allowed to count")

    monkeypatch.setattr(inner, "stats", refused)
    assert broker.moves.end("orders") is True
    assert layouts.kept == 4, "it may have dead letters"
    broker.close()


def test_where_nothing_is_shown_a_move_is_ended_by_who_may_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layouts = Moving()
    broker = ShardedBroker(storage_queues(), layouts, poll_ceiling=0.05)
    broker.declare("orders")
    layouts.now = ShardLayout(ShardRange(0, 4)).moved(2, ordered=False)
    inner: Any = broker._broker

    def refused(queue: str) -> Any:
        raise ConfigurationError("not allowed to count")

    monkeypatch.setattr(inner, "stats", refused)
    with pytest.raises(ConfigurationError):
        broker.moves.end("orders")
    receiver = broker.receiver("orders", lease=30.0)
    assert receiver.receive(1, 0.05) == [], "it receives, although it cannot end the move"
    broker.close()
