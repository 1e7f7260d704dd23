"""The engine against a model: whatever is done, in whatever order, both agree.

The model is a list of messages and a few lines for each operation. Time is a number that a step
moves; the file is closed and opened again at any point.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aztask.queues.engine import (
    DUPLICATE,
    Database,
    Engine,
    Leased,
    NewMessage,
    SessionLease,
    StoredSettings,
)
from aztask.support.clock import Clock

QUEUE = "q"
LEASE = 10.0
WINDOW = 25.0
MAX_DELIVERIES = 3


@dataclass
class Message:
    """What the model knows of a message. place: its order in line, moved when it falls due."""

    place: int
    payload: bytes
    session: str | None = None
    state: str = "active"
    due: float | None = None
    expires_at: float | None = None
    count: int = 0
    until: float = 0.0
    deferred: bool = False
    reason: str | None = None


@dataclass
class Held:
    """A lease that the test holds, perhaps a lost one."""

    message: Message
    lease: Leased
    token: str
    dead: bool


@dataclass
class Model:
    """The queue as it should be."""

    alive: list[Message] = field(default_factory=list)
    dead: list[Message] = field(default_factory=list)
    seen: dict[str, float] = field(default_factory=dict)
    places: itertools.count[int] = field(default_factory=itertools.count)

    def bury(self, message: Message, reason: str) -> None:
        if message in self.alive:
            self.alive.remove(message)
            self.dead.append(message)
        message.state, message.reason, message.expires_at = "active", reason, None
        message.deferred = False

    def give_back(self, message: Message) -> None:
        if message in self.alive and message.count >= MAX_DELIVERIES:
            self.bury(message, "MaxDeliveryCountExceeded")
        else:
            message.state = "deferred" if message.deferred else "active"

    def sweep(self, now: float) -> None:
        for message in [*self.alive, *self.dead]:
            if message.state == "leased" and message.until <= now:
                self.give_back(message)
        ripe = [m for m in self.alive + self.dead if m.state == "scheduled" and m.due <= now]
        for message in sorted(ripe, key=lambda m: (m.due, m.place)):
            message.state, message.due, message.place = "active", None, next(self.places)
        for message in list(self.alive):
            resting = message.state in ("active", "deferred")
            if resting and message.expires_at is not None and message.expires_at <= now:
                self.bury(message, "TTLExpiredException")

    def box(self, dead: bool) -> list[Message]:
        return self.dead if dead else self.alive


class EngineAgainstModel(RuleBasedStateMachine):
    """Plain queues; sessions have a machine of their own."""

    queue_settings = StoredSettings(
        lease_seconds=LEASE,
        max_deliveries=MAX_DELIVERIES,
        duplicate_window=WINDOW,
        dead_letter_expired=True,
    )

    @initialize()
    def start(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.now = 1000.0
        self.model = Model()
        self.held: list[Held] = []
        self.highest = 0
        self.serial = itertools.count()
        self.open()
        self.engine.create_queue(QUEUE, self.queue_settings)

    def open(self) -> None:
        clock = Clock(monotonic=lambda: self.now, wall=lambda: self.now)
        self.database = Database(str(Path(self.directory.name) / "model.db"))
        self.engine = Engine(self.database, clock=clock, sweep_seconds=0.0)

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()
            self.directory.cleanup()

    # -- steps -----------------------------------------------------------------------------------

    def new_message(self, payload: bytes, due: float | None, ttl: float | None) -> Message:
        at = self.now if due is None else due
        return Message(
            next(self.model.places),
            payload,
            state="active" if due is None else "scheduled",
            due=due,
            expires_at=None if ttl is None else at + ttl,
        )

    @rule(
        specs=st.lists(
            st.tuples(
                st.sampled_from(["", "a", "b", "c"]),
                st.sampled_from([None, 3.0, 12.0]),
                st.sampled_from([None, None, 5.0, 30.0]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def send(self, specs: list[tuple[str, float | None, float | None]]) -> None:
        batch, expected = [], []
        for message_id, delay, ttl in specs:
            due = None if delay is None else self.now + delay
            payload = b"%d" % next(self.serial)
            mine = self.new_message(payload, due, ttl)
            batch.append(NewMessage(payload, message_id, None, due, mine.expires_at))
            if message_id and self.model.seen.get(message_id, 0.0) > self.now:
                expected.append(None)
                continue
            if message_id:
                self.model.seen[message_id] = self.now + WINDOW
            expected.append(mine)
        sent = self.engine.send(QUEUE, batch)
        for number, mine in zip(sent, expected, strict=True):
            assert (number == DUPLICATE) == (mine is None)
            if mine is not None:
                self.check_new(number)
                self.model.alive.append(mine)

    def check_new(self, number: int) -> None:
        """Numbers rise, and none is used twice."""
        assert number > self.highest
        self.highest = number

    @rule(limit=st.integers(1, 4), dead=st.booleans(), delete=st.sampled_from([False] * 4 + [True]))
    def receive(self, limit: int, dead: bool, delete: bool) -> None:
        got = self.engine.receive(QUEUE, limit, LEASE, dead_letter=dead, delete=delete)
        self.model.sweep(self.now)
        box = self.model.box(dead)
        ready = sorted((m for m in box if m.state == "active"), key=lambda m: m.place)[:limit]
        assert [lease.payload for lease in got] == [m.payload for m in ready]
        for message, lease in zip(ready, got, strict=True):
            self.granted(message, lease, dead, delete)

    def granted(self, message: Message, lease: Leased, dead: bool, delete: bool) -> None:
        message.count += 1
        self.highest = max(self.highest, lease.seq)
        assert lease.delivery_count == message.count
        assert lease.reason == message.reason
        if delete:
            self.model.box(dead).remove(message)
            return
        message.state, message.until = "leased", self.now + LEASE
        assert lease.lease_until == message.until
        self.held.append(Held(message, lease, lease.token, dead))

    def alive(self, held: Held) -> bool:
        """Whether the lease is still good: the newest of its message, and not ended."""
        newest = [h for h in self.held if h.message is held.message][-1] is held
        return newest and held.message.state == "leased" and held.message.until > self.now

    def pick(self, data: st.DataObject) -> list[Held]:
        chosen = data.draw(
            st.lists(st.sampled_from(self.held), min_size=1, max_size=3, unique_by=id)
        )
        return [held for held in chosen if held.dead == chosen[0].dead]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        chosen = self.pick(data)
        leases = [(held.lease.seq, held.token) for held in chosen]
        ends = self.engine.renew(QUEUE, leases, 2 * LEASE, dead_letter=chosen[0].dead)
        for held, end in zip(chosen, ends, strict=True):
            assert end == (self.now + 2 * LEASE if self.alive(held) else None)
        for held, end in zip(chosen, ends, strict=True):
            if end is not None:
                held.message.until = end

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        held, *_ = self.pick(data)
        payload = held.message.payload + b"+"
        good = self.alive(held)
        end = self.engine.update(
            QUEUE, held.lease.seq, held.token, payload, LEASE, dead_letter=held.dead
        )
        assert end == (self.now + LEASE if good else None)
        if good:
            held.message.payload, held.message.until = payload, self.now + LEASE

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        how=st.sampled_from(
            ["complete", "abandon", "delay", "release", "defer", "dead_letter", "replace"]
        ),
    )
    def settle(self, data: st.DataObject, how: str) -> None:
        chosen = self.pick(data)
        expected = [self.alive(held) for held in chosen]
        assert self.do(how, chosen) == expected
        for held, good in zip(chosen, expected, strict=True):
            if good:
                self.apply(how, held)

    def do(self, how: str, chosen: list[Held]) -> list[bool]:
        leases = [(held.lease.seq, held.token) for held in chosen]
        dead, engine = chosen[0].dead, self.engine
        if how == "delay":
            return engine.abandon(QUEUE, leases, 4.0, dead_letter=dead)
        if how == "dead_letter":
            return engine.dead_letter(QUEUE, leases, "r", "d", dead_letter=dead)
        if how == "replace":
            clones = [
                (*lease, NewMessage(h.message.payload))
                for lease, h in zip(leases, chosen, strict=True)
            ]
            return engine.replace(QUEUE, clones, dead_letter=dead)
        return getattr(engine, how)(QUEUE, leases, dead_letter=dead)

    def apply(self, how: str, held: Held) -> None:
        message, box = held.message, self.model.box(held.dead)
        if how in ("complete", "replace"):
            box.remove(message)
            message.state = "gone"
        if how == "replace":
            self.model.alive.append(self.new_message(message.payload, None, None))
        elif how == "abandon":
            self.model.give_back(message)
        elif how == "delay" and message in self.model.alive and message.count >= MAX_DELIVERIES:
            self.model.bury(message, "MaxDeliveryCountExceeded")
        elif how == "delay":
            message.state, message.due, message.deferred = "scheduled", self.now + 4.0, False
        elif how == "release":
            message.count -= 1
            message.state = "deferred" if message.deferred else "active"
        elif how == "defer":
            message.state, message.deferred = "deferred", True
        elif how == "dead_letter":
            self.model.bury(message, "r")

    @rule(dead=st.booleans())
    def receive_deferred(self, dead: bool) -> None:
        self.model.sweep(self.now)
        seqs = {
            looked.seq: looked.payload
            for looked in self.engine.peek(QUEUE, dead_letter=dead)
            if looked.state == "deferred"
        }
        aside = [m for m in self.model.box(dead) if m.state == "deferred"]
        assert sorted(seqs.values()) == sorted(m.payload for m in aside)
        got = self.engine.receive_deferred(QUEUE, [*seqs, 10**9], LEASE, dead_letter=dead)
        assert [lease.seq for lease in got] == list(seqs)
        for lease in got:
            message = next(m for m in aside if m.payload == lease.payload and m.state == "deferred")
            self.granted(message, lease, dead, False)

    @rule(message_id=st.sampled_from(["a", "b"]))
    def cancel(self, message_id: str) -> None:
        self.model.sweep(self.now)
        waiting = {
            looked.seq: looked
            for looked in self.engine.peek(QUEUE)
            if looked.state == "scheduled" and looked.message_id == message_id
        }
        assert sorted(self.engine.cancel_scheduled(QUEUE, [*waiting, 10**9])) == sorted(waiting)
        for looked in waiting.values():
            gone = next(
                m
                for m in self.model.alive
                if m.state == "scheduled" and m.payload == looked.payload
            )
            self.model.alive.remove(gone)
            gone.state = "gone"

    @rule(seconds=st.sampled_from([0.5, 3.0, LEASE, 2 * LEASE, WINDOW]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reopen(self) -> None:
        self.database.close()
        self.open()

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def same_counts(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.model.sweep(self.now)
        counts = self.engine.stats(QUEUE)
        for state in ("active", "leased", "scheduled", "deferred"):
            assert getattr(counts, state) == sum(m.state == state for m in self.model.alive)
        assert counts.dead == len(self.model.dead)

    @invariant()
    def same_line(self) -> None:
        if not hasattr(self, "engine"):
            return
        for dead in (False, True):
            looked = self.engine.peek(QUEUE, dead_letter=dead)
            assert [m.seq for m in looked] == sorted(m.seq for m in looked)
            box = sorted(self.model.box(dead), key=lambda m: m.place)
            mine = [(m.payload, m.state, m.count) for m in box]
            assert [(m.payload, m.state, m.delivery_count) for m in looked] == mine
            self.highest = max([self.highest, *(m.seq for m in looked)])


class SessionsAgainstModel(RuleBasedStateMachine):
    """Sessions: one holder at a time, messages in order, nothing lost."""

    @initialize()
    def start(self) -> None:
        self.now = 1000.0
        clock = Clock(monotonic=lambda: self.now, wall=lambda: self.now)
        self.database = Database(":memory:")
        self.engine = Engine(self.database, clock=clock, sweep_seconds=0.0)
        self.engine.create_queue(QUEUE, StoredSettings(sessions=True, lease_seconds=LEASE))
        self.lines: dict[str, list[bytes]] = {name: [] for name in "abc"}
        self.holders: dict[str, tuple[SessionLease, float]] = {}
        self.taken: dict[str, list[Leased]] = {name: [] for name in "abc"}
        self.past: list[SessionLease] = []
        self.serial = itertools.count()

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()

    def holder(self, name: str) -> SessionLease | None:
        lease, until = self.holders.get(name, (None, 0.0))
        return lease if until > self.now else None

    @rule(name=st.sampled_from("abc"))
    def send(self, name: str) -> None:
        payload = b"%d" % next(self.serial)
        self.engine.send(QUEUE, [NewMessage(payload, session=name)])
        self.lines[name].append(payload)

    @rule(name=st.sampled_from(["a", "b", "c", None]))
    def accept(self, name: str | None) -> None:
        free = {n for n in "abc" if self.holder(n) is None}
        lease = self.engine.accept_session(QUEUE, name)
        if name is not None:
            assert (lease is not None) == (name in free)
        else:
            with_work = {n for n in free if self.lines[n]}
            assert (lease.session in with_work) if lease else not with_work
        if lease is not None:
            old = self.holders.get(lease.session)
            if old is not None:
                self.past.append(old[0])
            self.holders[lease.session] = (lease, self.now + LEASE)
            self.taken[lease.session] = []

    @precondition(lambda self: any(self.holder(n) for n in "abc"))
    @rule(data=st.data(), limit=st.integers(1, 3))
    def receive(self, data: st.DataObject, limit: int) -> None:
        name = data.draw(st.sampled_from([n for n in "abc" if self.holder(n)]))
        got = self.engine.receive(QUEUE, limit, session=self.holder(name))
        start = len(self.taken[name])
        assert [m.payload for m in got] == self.lines[name][start : start + limit]
        self.taken[name] += got

    @precondition(lambda self: any(self.holder(n) and self.taken[n] for n in "abc"))
    @rule(data=st.data())
    def complete_first(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in "abc" if self.holder(n) and self.taken[n]]))
        first = self.taken[name].pop(0)
        assert self.engine.complete(QUEUE, [(first.seq, first.token)]) == [True]
        self.lines[name].remove(first.payload)

    @precondition(lambda self: any(self.holder(n) for n in "abc"))
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in "abc" if self.holder(n)]))
        lease = self.engine.renew_session(QUEUE, self.holder(name), LEASE)
        self.holders[name] = (lease, self.now + LEASE)
        ends = self.engine.renew(QUEUE, [(m.seq, m.token) for m in self.taken[name]])
        assert ends == [self.now + LEASE] * len(ends)

    @precondition(lambda self: any(self.holder(n) for n in "abc"))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in "abc" if self.holder(n)]))
        lease, _ = self.holders.pop(name)
        assert self.engine.release_session(QUEUE, lease)
        assert self.engine.complete(QUEUE, [(m.seq, m.token) for m in self.taken[name]]) == [
            False
        ] * len(self.taken[name])
        self.taken[name] = []
        self.past.append(lease)

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def use_a_past_lease(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.past))
        assert self.engine.renew_session(QUEUE, lease) is None
        assert not self.engine.release_session(QUEUE, lease)

    @rule(seconds=st.sampled_from([1.0, LEASE / 2, LEASE]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "engine"):
            counts = self.engine.stats(QUEUE)
            assert counts.active + counts.leased == sum(map(len, self.lines.values()))
            assert self.engine.sessions(QUEUE) == sorted(n for n in "abc" if self.lines[n])


# `tox -e fuzz` asks for more than the default profile does
EXAMPLES = max(40, settings.default.max_examples // 10) if settings.default else 40

TestEngine = EngineAgainstModel.TestCase
TestEngine.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestSessions = SessionsAgainstModel.TestCase
TestSessions.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
