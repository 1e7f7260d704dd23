"""The modelled Service Bus beside the engine of the emulator, request for request.

Both get the same random requests, and time passes for both. After each one they must have answered
alike, and have the same messages in the same order, with the same states, counts and reasons.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import methodcaller
from typing import Any, Protocol
from uuid import UUID

import pytest
from azure.servicebus import ServiceBusMessage

from aztask.errors import LeaseLost
from aztask.queues.engine import Database, Engine, NewMessage, StoredSettings
from aztask.queues.engine.messages import SessionLease

from .services import Refused, ServiceBus
from .services.bus import BusMessage, BusQueue, BusSettings, State
from .services.buslinks import encoded_message
from .stepped import Time

LOCK = 30.0
QUEUE = "q"
VERBS = ("complete", "abandon", "defer", "dead-letter", "release")

Seen = tuple[str, int, str, str | None]
"""A message as a peek shows it: its id, its deliveries, its state, why it is dead."""


@dataclass
class Settings:
    """Those of a course."""

    most: int
    window: float
    sessions: bool
    buries: bool


class Side(Protocol):
    """One of the two. Messages and locks have the names of their messages' ids."""

    def send(self, name: str, session: str | None, delay: float, life: float | None) -> None: ...

    def receive(self, limit: int, dead: bool, session: str | None) -> list[str] | None: ...

    def recall(self, name: str) -> bool: ...

    def settle(self, verb: str, name: str, dead: bool) -> bool: ...

    def renew(self, name: str, dead: bool) -> bool: ...

    def cancel(self, name: str) -> bool: ...

    def accept(self, session: str) -> bool: ...

    def renew_session(self, session: str) -> bool: ...

    def leave(self, session: str) -> None: ...

    def peek(self, dead: bool) -> list[Seen]: ...


@dataclass
class ModelSide:
    """The model."""

    time: Time
    settings: Settings
    locks: dict[str, UUID] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bus = ServiceBus(self.time.clock())
        given = self.settings
        self.bus.queues[QUEUE] = BusQueue(
            BusSettings(
                LOCK,
                given.most,
                given.window,
                sessions=given.sessions,
                buries_expired=given.buries,
            )
        )

    def send(self, name: str, session: str | None, delay: float, life: float | None) -> None:
        message = ServiceBusMessage(b"x", message_id=name, session_id=session)
        if delay:
            due = self.bus.clock.wall() + delay
            message.scheduled_enqueue_time_utc = datetime.fromtimestamp(due, UTC)
        if life is not None:
            message.time_to_live = timedelta(seconds=life)
        self.bus.send(QUEUE, [encoded_message(message)])

    def receive(self, limit: int, dead: bool, session: str | None) -> list[str] | None:
        if session is None:
            return self._took(self.bus.receive(QUEUE, limit, dead=dead, delete=False))
        token = self.held.get(session, 0)
        found: list[str] | None = self._try(
            lambda: self._took(self.bus.receive_session(QUEUE, session, token, limit, False))
        )
        return found

    def _took(self, found: Sequence[BusMessage]) -> list[str]:
        for each in found:
            assert each.token is not None
            self.locks[each.message_id] = each.token
        return [each.message_id for each in found]

    def recall(self, name: str) -> bool:
        return bool(self._try(lambda: self._took(self._deferred(name))))

    def _deferred(self, name: str) -> list[BusMessage]:
        number = self._number(name)
        return self.bus.receive_deferred(QUEUE, [number], dead=False, delete=False)

    def _number(self, name: str) -> int:
        messages = self.bus.queue(QUEUE).living.messages
        return next((each.number for each in messages.values() if each.message_id == name), 0)

    def settle(self, verb: str, name: str, dead: bool) -> bool:
        token = self.locks.get(name, UUID(int=0))
        if verb == "release":
            return self._done(lambda: self.bus.release(QUEUE, token, dead=dead))
        why = ("because", "")
        return self._done(lambda: self.bus.settle(QUEUE, verb, [token], why, dead=dead))

    def renew(self, name: str, dead: bool) -> bool:
        token = self.locks.get(name, UUID(int=0))
        return self._done(lambda: self.bus.renew(QUEUE, [token], dead=dead))

    def cancel(self, name: str) -> bool:
        return self._done(lambda: self.bus.cancel(QUEUE, self._number(name)))

    def accept(self, session: str) -> bool:
        found = self._try(lambda: self.bus.accept(QUEUE, session))
        if found is not None:
            self.held[session] = found[1]
        return found is not None

    def renew_session(self, session: str) -> bool:
        token = self.held.get(session, 0)
        return self._done(lambda: self.bus.renew_session(QUEUE, session, token))

    def leave(self, session: str) -> None:
        self.bus.release_session(QUEUE, session, self.held.pop(session, 0))

    def peek(self, dead: bool) -> list[Seen]:
        names = {State.ACTIVE: "active", State.DEFERRED: "deferred", State.SCHEDULED: "scheduled"}
        return [
            (
                each.message_id,
                each.count,
                names[each.state] if each.token is None else "leased",
                each.why[0] if each.why else None,
            )
            for each in self.bus.peek(QUEUE, 0, 1000, dead=dead)
        ]

    @staticmethod
    def _try(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Refused:
            return None

    def _done(self, call: Callable[[], Any]) -> bool:
        try:
            call()
        except Refused:
            return False
        return True


@dataclass
class EngineSide:
    """The engine."""

    time: Time
    settings: Settings
    locks: dict[str, tuple[int, str]] = field(default_factory=dict)
    held: dict[str, SessionLease] = field(default_factory=dict)

    def __post_init__(self) -> None:
        clock = self.time.clock()
        self.engine = Engine(Database(":memory:"), clock=clock, sweep_seconds=0.0)
        given = self.settings
        self.engine.create_queue(
            QUEUE,
            StoredSettings(
                LOCK,
                given.most,
                given.window,
                sessions=given.sessions,
                dead_letter_expired=given.buries,
            ),
        )

    def send(self, name: str, session: str | None, delay: float, life: float | None) -> None:
        now = self.engine.clock.wall()
        ends = None if life is None else now + delay + life
        due = now + delay if delay else None
        self.engine.send(QUEUE, [NewMessage(b"x", name, session, due, ends)])

    def receive(self, limit: int, dead: bool, session: str | None) -> list[str] | None:
        lease = None
        if session is not None:
            lease = self.held.get(session, SessionLease(session, "", 0.0))
        try:
            found = self.engine.receive(QUEUE, limit, session=lease, dead_letter=dead)
        except LeaseLost:
            return None
        return self._took(found)

    def _took(self, found: Sequence[Any]) -> list[str]:
        self.locks.update({each.message_id: (each.seq, each.token) for each in found})
        return [each.message_id for each in found]

    def _number(self, name: str) -> int:
        found = self.engine.peek(QUEUE, limit=1000)
        return next((each.seq for each in found if each.message_id == name), 0)

    def recall(self, name: str) -> bool:
        return bool(self._took(self.engine.receive_deferred(QUEUE, [self._number(name)])))

    def settle(self, verb: str, name: str, dead: bool) -> bool:
        leases = [self.locks.get(name, (0, ""))]
        if verb == "dead-letter":
            return self.engine.dead_letter(QUEUE, leases, "because", dead_letter=dead)[0]
        return bool(getattr(self.engine, verb)(QUEUE, leases, dead_letter=dead)[0])

    def renew(self, name: str, dead: bool) -> bool:
        lease = self.locks.get(name, (0, ""))
        return self.engine.renew(QUEUE, [lease], dead_letter=dead)[0] is not None

    def cancel(self, name: str) -> bool:
        return bool(self.engine.cancel_scheduled(QUEUE, [self._number(name)]))

    def accept(self, session: str) -> bool:
        lease = self.engine.accept_session(QUEUE, session)
        if lease is not None:
            self.held[session] = lease
        return lease is not None

    def renew_session(self, session: str) -> bool:
        lease = self.held.get(session)
        renewed = None if lease is None else self.engine.renew_session(QUEUE, lease)
        if renewed is not None:
            self.held[session] = renewed
        return renewed is not None

    def leave(self, session: str) -> None:
        lease = self.held.pop(session, None)
        if lease is not None:
            self.engine.release_session(QUEUE, lease)

    def peek(self, dead: bool) -> list[Seen]:
        return [
            (each.message_id, each.delivery_count, each.state, each.reason)
            for each in self.engine.peek(QUEUE, dead_letter=dead, limit=1000)
        ]


class Course:
    """Random requests of one seed, which both sides get."""

    def __init__(self, seed: int, sessions: bool) -> None:
        self.dice = random.Random(seed)
        self.settings = Settings(
            self.dice.choice((2, 3, 1000)),
            self.dice.choice((0.0, 60.0)),
            sessions,
            self.dice.random() < 0.5,
        )
        self.time = Time()
        self.sides: tuple[Side, Side] = (
            ModelSide(self.time, self.settings),
            EngineSide(self.time, self.settings),
        )
        self.names = 0
        self.steps: list[str] = []

    def both(self, what: str, call: Callable[[Side], Any]) -> Any:
        """The answer of both, which must be the same."""
        self.steps.append(what)
        answers = [call(side) for side in self.sides]
        assert answers[0] == answers[1], self.steps
        return answers[0]

    def step(self) -> None:
        """One request, or some seconds."""
        dice = self.dice
        steps = [self._send, self._receive, self._settle, self._settle, self._renew, self._pass]
        steps += [self._sessions] if self.settings.sessions else [self._recall]
        dice.choice([*steps, self._cancel])()
        for dead in (False, True):
            self.both(f"peek {dead}", methodcaller("peek", dead))

    def _name(self) -> str:
        return f"m{self.dice.randrange(max(0, self.names - 8), self.names + 1)}"

    def _session(self) -> str | None:
        return self.dice.choice("ab") if self.settings.sessions else None

    def _send(self) -> None:
        repeats = self.settings.window and self.dice.random() < 0.3
        name = self._name() if repeats else f"m{self.names + 1}"
        self.names += not repeats
        session, delay = self._session(), self.dice.choice((0.0, 0.0, 7.0, 40.0))
        life = self.dice.choice((None, None, 5.0, 45.0))
        self.both(
            f"send {name} {session} {delay} {life}",
            lambda side: side.send(name, session, delay, life),
        )

    def _receive(self) -> None:
        dead = self.dice.random() < 0.2
        session, limit = None if dead else self._session(), self.dice.randint(1, 3)
        what = f"receive {limit} {dead} {session}"
        self.both(what, lambda side: side.receive(limit, dead, session))

    def _settle(self) -> None:
        verb, name, dead = self.dice.choice(VERBS), self._name(), self.dice.random() < 0.2
        dead = dead and verb != "defer"
        self.both(f"{verb} {name} {dead}", lambda side: side.settle(verb, name, dead))

    def _renew(self) -> None:
        name = self._name()
        if not self.settings.sessions:
            self.both(f"renew {name}", lambda side: side.renew(name, False))

    def _recall(self) -> None:
        name = self._name()
        self.both(f"recall {name}", lambda side: side.recall(name))

    def _cancel(self) -> None:
        name = self._name()
        self.both(f"cancel {name}", lambda side: side.cancel(name))

    def _sessions(self) -> None:
        session = self.dice.choice("ab")
        what = self.dice.choice(("accept", "accept", "renew_session", "leave"))
        self.both(f"{what} {session}", lambda side: getattr(side, what)(session))

    def _pass(self) -> None:
        seconds = self.dice.choice((1.0, 6.0, 31.0))
        self.steps.append(f"{seconds} seconds pass")
        self.time.move(seconds)


@pytest.mark.parametrize("sessions", [False, True], ids=["no sessions", "sessions"])
@pytest.mark.parametrize("first", range(0, 100, 25))
def test_the_model_does_what_the_engine_does(sessions: bool, first: int) -> None:
    for seed in range(first, first + 25):
        course = Course(seed, sessions)
        for _ in range(60):
            course.step()
