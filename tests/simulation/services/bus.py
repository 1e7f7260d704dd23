"""The Service Bus service: what it keeps, and what it does with each request.

Rules of the service
1. A receive locks a message for the queue's lock duration and counts a delivery. A lock that
   lapses, and an abandon, give it back; after as many deliveries as the queue allows, it becomes a
   dead letter. A release gives it back uncounted.
2. A scheduled message becomes active at its time, under a new number. A deferred one is received by
   its number only, and is deferred again when it is given back.
3. A queue with duplicate detection drops a message whose id it has seen within the window, also if
   that message is gone.
4. A session has one holder. Its messages are locked as long as the session; a session that is
   released gives them back uncounted, and one that lapses counts them.
5. A request that names several locks is carried out for all of them or for none.
6. An expired message becomes a dead letter, or is deleted, as the queue is set up. Dead letters
   never expire.

Source: learn.microsoft.com, "Message transfers, locks, and settlement", "Message sessions",
"Message sequencing and timestamps", "Dead-letter queues"; and our emulator.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from math import inf
from typing import Any, Final
from uuid import UUID

from azure.servicebus._pyamqp.message import Message

from aztask.queues.servicebus.reading import read_message
from aztask.support.clock import Clock

from .wire import Refused

Numbers = Sequence[int]

SCHEDULED_AT: Final = b"x-opt-scheduled-enqueue-time"
EXCEEDED: Final = ("MaxDeliveryCountExceeded", "the queue's delivery limit was reached")
EXPIRED: Final = ("TTLExpiredException", "the time to live ended")


class State(IntEnum):
    """The state of a message that is not locked, as peeks report it."""

    ACTIVE = 0
    DEFERRED = 1
    SCHEDULED = 2


@dataclass(slots=True, eq=False)
class BusMessage:
    """A message as the service keeps it. Times are the service's wall clock.

    * `content`: as it was sent; it is never changed.
    * `count`: deliveries that were begun and not released.
    * `token`, `until`: of the lock, which ends at this time of the service's monotonic clock.
    * `why`: reason and description, of a dead letter.
    """

    number: int
    content: Message
    message_id: str
    session: str | None
    enqueued_at: float
    expires_at: float
    due: float = 0.0
    state: State = State.ACTIVE
    count: int = 0
    token: UUID | None = None
    until: float = 0.0
    why: tuple[str, str] | None = None


@dataclass(slots=True)
class BusSettings:
    """The settings of a queue."""

    lock_seconds: float = 60.0
    max_deliveries: int = 10
    window: float = 0.0
    time_to_live: float = inf
    sessions: bool = False
    buries_expired: bool = False


@dataclass(slots=True, eq=False)
class BusSession:
    """A session: its holder's token, until when, and the bytes that were stored with it."""

    token: int = 0
    until: float = 0.0
    state: bytes | None = None


@dataclass(slots=True, eq=False)
class Box:
    """The living messages of a queue, or its dead letters.

    The heaps have an entry for every change; those that are outdated are skipped.

    * `in_sessions`: each session has a line of its own.
    * `ready`: numbers of messages that can be received, in each line.
    """

    in_sessions: bool = False
    messages: dict[int, BusMessage] = field(default_factory=dict)
    locks: dict[UUID, BusMessage] = field(default_factory=dict)
    ready: dict[str | None, list[int]] = field(default_factory=dict)
    lapses: list[tuple[float, int]] = field(default_factory=list)
    due: list[tuple[float, int]] = field(default_factory=list)
    ends: list[tuple[float, int]] = field(default_factory=list)

    def add(self, message: BusMessage) -> None:
        """Keep a new message."""
        self.messages[message.number] = message
        self._note_end(message)
        if message.state is State.SCHEDULED:
            heapq.heappush(self.due, (message.due, message.number))
        else:
            self.offer(message)

    def offer(self, message: BusMessage) -> None:
        """An unlocked message can be received, unless it is deferred."""
        if message.state is State.ACTIVE:
            heapq.heappush(self.ready.setdefault(self.line_of(message), []), message.number)

    def remove(self, message: BusMessage) -> None:
        """Forget a message and its lock."""
        self.unlock(message)
        del self.messages[message.number]

    def lock(self, message: BusMessage, token: UUID, until: float) -> None:
        """Lock a message until this time."""
        message.token = token
        self.locks[token] = message
        self.hold(message, until)

    def hold(self, message: BusMessage, until: float) -> None:
        """Let a lock end at this time."""
        message.until = until
        heapq.heappush(self.lapses, (until, message.number))

    def unlock(self, message: BusMessage) -> None:
        """End a message's lock, if it has one."""
        if message.token is not None:
            del self.locks[message.token]
            message.token = None
            self._note_end(message)

    def _note_end(self, message: BusMessage) -> None:
        if message.expires_at < inf:
            heapq.heappush(self.ends, (message.expires_at, message.number))

    def line_of(self, message: BusMessage) -> str | None:
        """The session in which the message is received, if it is received in one."""
        return message.session if self.in_sessions else None

    def first(self, session: str | None) -> BusMessage | None:
        """The first message that can be received, which is taken out of the line."""
        line = self.ready.get(session, [])
        while line:
            message = self.messages.get(heapq.heappop(line))
            if message is not None and _is_ready(message):
                return message
        return None

    def has_ready(self, session: str | None) -> bool:
        """Whether a message of this session can be received."""
        line = self.ready.get(session, [])
        while line:
            message = self.messages.get(line[0])
            if message is not None and _is_ready(message):
                return True
            heapq.heappop(line)
        self.ready.pop(session, None)
        return False

    def next_changes(self) -> tuple[float, float, float]:
        """When the next lock lapses, the next message is due, and the next one expires."""
        return (
            self._first_of(self.lapses, lambda each: each.until if each.token else inf),
            self._first_of(self.due, lambda each: each.due if _is_scheduled(each) else inf),
            self._first_of(self.ends, lambda each: each.expires_at),
        )

    def _first_of(
        self, heap: list[tuple[float, int]], time_of: Callable[[BusMessage], float]
    ) -> float:
        while heap:
            at, number = heap[0]
            message = self.messages.get(number)
            if message is not None and time_of(message) == at:
                return at
            heapq.heappop(heap)
        return inf

    def can_be_received(self) -> bool:
        """Whether a message can be received now."""
        return any(map(self.has_ready, list(self.ready)))


def _is_ready(message: BusMessage) -> bool:
    return message.token is None and message.state is State.ACTIVE


def _is_scheduled(message: BusMessage) -> bool:
    return message.state is State.SCHEDULED


def _until(heap: list[tuple[float, int]], now: float) -> Iterator[tuple[float, int]]:
    while heap and heap[0][0] <= now:
        yield heapq.heappop(heap)


@dataclass(slots=True, eq=False)
class BusQueue:
    """One queue: settings, messages, dead letters, sessions, and the ids that it has seen."""

    settings: BusSettings
    living: Box = field(init=False)
    dead: Box = field(default_factory=Box)
    sessions: dict[str, BusSession] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    most_seen: int = 1000
    """Above this the ids whose window has passed are forgotten."""
    turn: str = ""

    def __post_init__(self) -> None:
        self.living = Box(self.settings.sessions)

    def box(self, dead: bool) -> Box:
        """The dead letters, or the living messages."""
        return self.dead if dead else self.living

    def bury(self, message: BusMessage, why: tuple[str, str]) -> None:
        """Make a message a dead letter."""
        for box in (self.living, self.dead):
            if message.number in box.messages:
                box.remove(message)
        message.why, message.state, message.expires_at = why, State.ACTIVE, inf
        self.dead.add(message)

    def give_back(self, box: Box, message: BusMessage) -> None:
        """End a lock that was counted."""
        if box is self.living and message.count >= self.settings.max_deliveries:
            self.bury(message, EXCEEDED)
        else:
            box.unlock(message)
            box.offer(message)


class ServiceBus:
    """All queues of one namespace.

    * `queues`: what it keeps, by the names of the queues.
    """

    def __init__(self, clock: Clock) -> None:
        """clock: the service's."""
        self.clock = clock
        self.queues: dict[str, BusQueue] = {}
        self._numbers = count(1)
        self._tokens = count(1)

    def queue(self, name: str) -> BusQueue:
        """A queue, as of now: what is due, has lapsed or expired, has changed its place."""
        found = self.queues.get(name)
        if found is None:
            raise Refused(404, "not-found", f"the queue {name!r} does not exist")
        self._sweep(found)
        return found

    def restart(self) -> None:
        """A restart of the service: all locks are void, and sessions have no holders."""
        for queue in self.queues.values():
            for session in queue.sessions.values():
                session.until = 0.0
            for box in (queue.living, queue.dead):
                for message in list(box.locks.values()):
                    queue.give_back(box, message)

    def until_change(self, name: str | None = None) -> float:
        """Seconds until a message is due or expires, or a lock lapses; infinite if none will.

        name: only of this queue.
        """
        now, wall = self.clock.monotonic(), self.clock.wall()
        left: list[float] = []
        for queue in self.queues.values() if name is None else (self.queues[name],):
            self._sweep(queue)
            left += [each.until - now for each in queue.sessions.values()]
            for box in (queue.living, queue.dead):
                lapse, due, end = box.next_changes()
                left += [lapse - now, due - wall, end - wall]
        return min((each for each in left if each > 0), default=inf)

    def _sweep(self, queue: BusQueue) -> None:
        now, wall = self.clock.monotonic(), self.clock.wall()
        for box in (queue.living, queue.dead):
            for until, number in _until(box.lapses, now):
                message = box.messages.get(number)
                if message is not None and message.token is not None and message.until == until:
                    queue.give_back(box, message)
        box = queue.living
        for _, number in _until(box.due, wall):
            message = box.messages.get(number)
            if message is not None and message.state is State.SCHEDULED:
                box.remove(message)
                message.number, message.state = next(self._numbers), State.ACTIVE
                message.enqueued_at = message.due
                box.add(message)
        for end, number in _until(box.ends, wall):
            message = box.messages.get(number)
            if message is None or message.expires_at != end:
                continue
            if message.token is not None:
                continue  # `unlock` notes it again
            if queue.settings.buries_expired:
                queue.bury(message, EXPIRED)
            else:
                box.remove(message)

    # -- sending -----------------------------------------------------------------------------

    def send(self, name: str, payloads: Sequence[bytes]) -> list[int]:
        """Store all messages; returns their numbers, and 0 for each that was dropped."""
        queue, wall = self.queue(name), self.clock.wall()
        made = [self._made(queue, payload, wall) for payload in payloads]
        numbers = []
        for message in made:
            if self._is_duplicate(queue, message, wall):
                numbers.append(0)
                continue
            message.number = next(self._numbers)
            queue.living.add(message)
            numbers.append(message.number)
        return numbers

    def _made(self, queue: BusQueue, payload: bytes, wall: float) -> BusMessage:
        content = read_message(payload)
        properties: Any = content.properties
        session = _text(properties.group_id if properties else None)
        if queue.settings.sessions and session is None:
            raise Refused(400, "not-allowed", "the queue requires a session")
        annotations: Any = content.message_annotations or {}
        due = annotations.get(SCHEDULED_AT, 0) / 1000.0
        begins = due if due > wall else wall
        header: Any = content.header
        life = queue.settings.time_to_live
        if header is not None and header.ttl is not None:
            life = min(life, header.ttl / 1000.0)
        return BusMessage(
            0,
            content,
            _text(properties.message_id if properties else None) or "",
            session,
            wall,
            begins + life,
            due=due,
            state=State.SCHEDULED if due > wall else State.ACTIVE,
        )

    @staticmethod
    def _is_duplicate(queue: BusQueue, message: BusMessage, wall: float) -> bool:
        window, name = queue.settings.window, message.message_id
        if not window or not name:
            return False
        if queue.seen.get(name, 0.0) > wall:
            return True
        if len(queue.seen) > queue.most_seen:
            queue.seen = {each: until for each, until in queue.seen.items() if until > wall}
            queue.most_seen = 1000 + 2 * len(queue.seen)
        queue.seen[name] = wall + window
        return False

    def cancel(self, name: str, number: int) -> None:
        """Remove a scheduled message."""
        box = self.queue(name).living
        message = box.messages.get(number)
        if message is None or message.state is not State.SCHEDULED:
            raise Refused(404, "message-not-found")
        box.remove(message)

    # -- receiving ---------------------------------------------------------------------------

    def receive(self, name: str, limit: int, *, dead: bool, delete: bool) -> list[BusMessage]:
        """Lock or remove the first messages."""
        queue = self.queue(name)
        if queue.settings.sessions and not dead:
            raise Refused(400, "not-allowed", "the queue requires a session")
        until = self.clock.monotonic() + queue.settings.lock_seconds
        return self._taken(queue.box(dead), None, limit, until, delete)

    def _taken(
        self, box: Box, session: str | None, limit: int, until: float, delete: bool
    ) -> list[BusMessage]:
        taken: list[BusMessage] = []
        while len(taken) < limit and (message := box.first(session)) is not None:
            message.count += 1
            taken.append(message)
            if delete:
                box.remove(message)
            else:
                box.lock(message, self._token(), until)
        return taken

    def _token(self) -> UUID:
        return UUID(int=next(self._tokens))

    def receive_deferred(
        self, name: str, numbers: Numbers, *, dead: bool, delete: bool
    ) -> list[BusMessage]:
        """Lock or remove deferred messages; all of them, or none."""
        queue = self.queue(name)
        box, until = queue.box(dead), self.clock.monotonic() + queue.settings.lock_seconds
        found = [box.messages.get(number) for number in numbers]
        taken = [
            each
            for each in found
            if each is not None and each.token is None and each.state is State.DEFERRED
        ]
        if len(taken) < len(numbers):
            raise Refused(404, "message-not-found")
        for message in taken:
            message.count += 1
            if delete:
                box.remove(message)
            else:
                box.lock(message, self._token(), until)
        return taken

    def peek(self, name: str, start: int, limit: int, *, dead: bool) -> list[BusMessage]:
        """Messages in every state from a number on, in order."""
        messages = self.queue(name).box(dead).messages
        numbers = heapq.nsmallest(limit, (each for each in messages if each >= start))
        return [messages[number] for number in numbers]

    # -- locks -------------------------------------------------------------------------------

    def _held(self, box: Box, tokens: Sequence[UUID]) -> list[BusMessage]:
        found = [box.locks.get(token) for token in tokens]
        held = [each for each in found if each is not None]
        if len(held) < len(tokens):
            raise Refused(410, "message-lock-lost")
        return held

    def renew(self, name: str, tokens: Sequence[UUID], *, dead: bool) -> None:
        """Let these locks end a lock duration from now."""
        queue = self.queue(name)
        box = queue.box(dead)
        for message in self._held(box, tokens):
            box.hold(message, self.clock.monotonic() + queue.settings.lock_seconds)

    def settle(
        self, name: str, verb: str, tokens: Sequence[UUID], why: tuple[str, str], *, dead: bool
    ) -> None:
        """Complete, abandon, defer or dead-letter these messages."""
        queue = self.queue(name)
        box = queue.box(dead)
        for message in self._held(box, tokens):
            if verb == "complete":
                box.remove(message)
            elif verb == "dead-letter":
                queue.bury(message, why)
            elif verb == "defer":
                message.state = State.DEFERRED
                box.unlock(message)
            else:
                queue.give_back(box, message)

    def release(self, name: str, token: UUID, *, dead: bool) -> None:
        """Give a message back uncounted."""
        box = self.queue(name).box(dead)
        for message in self._held(box, [token]):
            _released(box, message)

    # -- sessions ----------------------------------------------------------------------------

    def accept(self, name: str, session: str | None) -> tuple[str, int]:
        """Hold a session, or any that has messages and no holder; returns its name and a token."""
        queue = self.queue(name)
        if not queue.settings.sessions:
            raise Refused(400, "not-allowed", "the queue has no sessions")
        now = self.clock.monotonic()
        found = self._next(queue, now) if session is None else session
        known = queue.sessions.setdefault(found, BusSession())
        if known.until > now:
            raise Refused(409, "session-cannot-be-locked")
        known.token, known.until = next(self._tokens), now + queue.settings.lock_seconds
        return found, known.token

    def _next(self, queue: BusQueue, now: float) -> str:
        """The next session in turn with messages and without a holder."""
        names = sorted(name for name in list(queue.living.ready) if name is not None)
        behind = [name for name in names if name > queue.turn]
        for name in behind + names:
            free = name not in queue.sessions or queue.sessions[name].until <= now
            if free and queue.living.has_ready(name):
                queue.turn = name
                return name
        raise Refused(408, "timeout", "no session is available")

    @staticmethod
    def _in_session(queue: BusQueue, session: str) -> list[BusMessage]:
        return [each for each in queue.living.locks.values() if each.session == session]

    def _session(self, queue: BusQueue, session: str, token: int) -> BusSession:
        known = queue.sessions.get(session)
        if known is None or known.token != token or known.until <= self.clock.monotonic():
            raise Refused(410, "session-lock-lost")
        return known

    def receive_session(
        self, name: str, session: str, token: int, limit: int, delete: bool
    ) -> list[BusMessage]:
        """Lock or remove the first messages of a session."""
        queue = self.queue(name)
        until = self._session(queue, session, token).until
        return self._taken(queue.living, session, limit, until, delete)

    def renew_session(self, name: str, session: str, token: int) -> float:
        """Renew a session with its messages; returns the end, by the service's wall clock."""
        queue, now = self.queue(name), self.clock.monotonic()
        known = self._session(queue, session, token)
        known.until = now + queue.settings.lock_seconds
        for message in self._in_session(queue, session):
            queue.living.hold(message, known.until)
        return self.clock.wall() + queue.settings.lock_seconds

    def release_session(self, name: str, session: str, token: int) -> None:
        """Release a session and its messages."""
        queue = self.queue(name)
        known = queue.sessions.get(session)
        if known is None or known.token != token or known.until <= self.clock.monotonic():
            return
        known.until = 0.0
        for message in self._in_session(queue, session):
            _released(queue.living, message)

    def state(self, name: str, session: str, token: int) -> bytes | None:
        """The bytes that were stored with a session."""
        return self._session(self.queue(name), session, token).state

    def set_state(self, name: str, session: str, token: int, state: bytes | None) -> None:
        """Store bytes with a session."""
        self._session(self.queue(name), session, token).state = state


def _released(box: Box, message: BusMessage) -> None:
    message.count -= 1
    box.unlock(message)
    box.offer(message)


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
