"""The operations of ``$management``: everything except sending and receiving over a link.

Rules
1. Each operation is one function, in the table `OPERATIONS`. It runs inside the turn's transaction
   and returns the response, or raises `AmqpError` with the service's condition.
2. A malformed request is an argument error; nothing is guessed.
3. If one of several lock tokens has lost its lock, the request fails and settles nothing, as on the
   service.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import UUID

from aztask.emulator.amqp import NOT_IMPLEMENTED, AmqpError, encode
from aztask.emulator.broker import stored
from aztask.emulator.broker.broker import Lock, Service
from aztask.emulator.broker.conditions import (
    ARGUMENT_ERROR,
    LOCK_LOST,
    MESSAGE_NOT_FOUND,
    SESSION_LOST,
)
from aztask.emulator.broker.consumer import Consumer
from aztask.emulator.broker.entities import Entity
from aztask.emulator.broker.forwarding import sendable
from aztask.emulator.broker.producer import new_message
from aztask.emulator.broker.settlement import SettlementAction, SettlementKind, settle
from aztask.queues.engine import (
    Leased,
    NewMessage,
    PeekedMessage,
    SessionLease,
    number_of,
)

MAX_PEEK = 250
FIRST_PAGE = 16
MAX_ITEMS = 5000
MAX_STATE = 1024 * 1024
MAX_RESPONSE = 1024 * 1024
NO_CONTENT = 204
OK = 200
SETTLE_MODE_DELETE = 0


@dataclass(slots=True)
class ManagementCall:
    """One request to ``$management``.

    entity, dead: whose node was addressed. consumers: the connection's receiving links, which hold
    its sessions.
    """

    broker: Service
    entity: Entity
    dead: bool
    body: dict[str, Any]
    consumers: Sequence[Consumer]

    def need(self, name: str, kind: type, what: str) -> Any:
        """Return a value of the body. Raises AmqpError (argument-error) unless it is a `kind`."""
        value = self.body.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise AmqpError(ARGUMENT_ERROR, f"{name!r} must be {what}")
        return value

    def items(self, name: str, kind: type, what: str) -> list[Any]:
        """Return a list of the body whose items are all of `kind`. Raises AmqpError otherwise."""
        values = self.need(name, list, f"an array of {what}")
        if len(values) > MAX_ITEMS or not all(isinstance(value, kind) for value in values):
            raise AmqpError(ARGUMENT_ERROR, f"{name!r} must be at most {MAX_ITEMS} of {what}")
        return list(values)

    def seqs(self, numbers: Sequence[int]) -> list[int]:
        """Return by what the engine knows the messages with these sequence numbers."""
        engine, path = self.broker.engine, self.entity.path
        return [engine.seq_of(path, number) for number in numbers]

    def session(self) -> SessionLease:
        """Return the session that the request names.

        Raises AmqpError (session-lock-lost) unless this connection holds it.
        """
        name = self.need("session-id", str, "a session id")
        for consumer in self.consumers:
            lease, path = consumer.lease, consumer.source.queue
            if lease and lease.session == name and path == self.entity.path and consumer.held():
                return lease
        raise SESSION_LOST


Result: TypeAlias = tuple[int, bytes]
Operation: TypeAlias = Callable[[ManagementCall], Result]


def _done() -> Result:
    return OK, encode.NULL


def _answer(name: str, value: bytes) -> Result:
    return OK, encode.map_of([(encode.string(name), value)])


def _locks(call: ManagementCall) -> list[Lock]:
    """Return the locks of the request's tokens. Raises AmqpError if one is unknown."""
    tokens: list[UUID] = call.items("lock-tokens", UUID, "uuid")
    locks = []
    for token in tokens:
        lock = call.broker.locks.get(token.hex)
        if lock is None or (lock.queue, lock.dead) != (call.entity.path, call.dead):
            raise LOCK_LOST
        locks.append(lock)
    return locks


def renew_lock(call: ManagementCall) -> Result:
    """Renew the locks of messages; all of them or none."""
    locks = _locks(call)
    leases = [(lock.seq, lock.token) for lock in locks]
    ends = call.broker.engine.renew(call.entity.path, leases, dead_letter=call.dead)
    expirations = []
    for lock, end in zip(locks, ends, strict=True):
        if end is None:
            raise LOCK_LOST
        call.broker.locks.renewed(lock.token, end)
        expirations.append(int((end + call.broker.lock_token_offset()) * 1000))
    return _answer("expirations", encode.timestamp_array(expirations))


_KINDS = {
    "completed": SettlementKind.COMPLETE,
    "abandoned": SettlementKind.ABANDON,
    "defered": SettlementKind.DEFER,  # the service's spelling
    "deferred": SettlementKind.DEFER,
    "suspended": SettlementKind.DEAD_LETTER,
}


def requested_settlement(call: ManagementCall) -> tuple[SettlementAction, list[Lock]]:
    """Return what a request settles, and how. Raises AmqpError."""
    kind = _KINDS.get(str(call.body.get("disposition-status")))
    if kind is None:
        raise AmqpError(ARGUMENT_ERROR, f"'disposition-status' must be one of {sorted(_KINDS)}")
    texts = [str(call.body.get(f"deadletter-{part}") or "") for part in ("reason", "description")]
    changed = call.body.get("properties-to-modify")
    properties = changed if isinstance(changed, dict) else {}
    action = SettlementAction(kind, texts[0], texts[1], {str(k): v for k, v in properties.items()})
    return action, _locks(call)


def update_disposition(call: ManagementCall) -> Result:
    """Settle messages by their lock tokens; all of them or none."""
    action, locks = requested_settlement(call)
    leases = [(lock.seq, lock.token) for lock in locks]
    held = settle(call.broker.engine, call.entity.path, call.dead, action, leases)
    if not all(held):
        raise SESSION_LOST if call.entity.sessions and not call.dead else LOCK_LOST
    call.broker.queue_changed(call.entity.path, call.dead)
    for lock in locks:
        call.broker.locks.discard(lock.token)
    return _done()


def schedule_message(call: ManagementCall) -> Result:
    """Store messages that become available at a later time."""
    path, messages = _to_schedule(call)
    numbers = call.broker.engine.send(path, messages)
    call.broker.queue_changed(path)
    return _numbers(numbers)


def _numbers(seqs: Sequence[int]) -> Result:
    return _answer("sequence-numbers", encode.long_array(list(map(number_of, seqs))))


def _to_schedule(call: ManagementCall) -> tuple[str, list[NewMessage]]:
    """Return where to store which messages. Raises AmqpError."""
    entity = sendable(call.broker.namespace, call.entity.path)
    now = call.broker.clock.wall()
    messages = []
    for item in call.items("messages", dict, "maps"):
        encoded = item.get("message")
        if not isinstance(encoded, bytes):
            raise AmqpError(ARGUMENT_ERROR, "'message' must be an encoded message")
        messages.append(new_message(entity, encoded, now))
    return entity.path, messages


class Joining(ABC):
    """An operation under a transaction: begun when it is asked for, done at the discharge.

    What fails when it is asked for does not join: the discharge passes it by. others: the work of
    the transaction before this.
    """

    def __init__(self, call: ManagementCall, others: Sequence[object] = ()) -> None:
        self._call = call
        self._others = others
        self.joined = False

    @property
    def count(self) -> int:
        """How many messages it sends or cancels."""
        return 0

    @property
    def size(self) -> int:
        """How many bytes it holds."""
        return 0

    def begin(self, _call: ManagementCall) -> Result:
        """Check the request, and return the response. Raises AmqpError."""
        self.joined = False
        result = self._begin()
        self.joined = True
        return result

    def run(self) -> None:
        """Do it, inside the store's transaction. Raises AmqpError: then nothing is done."""
        if self.joined:
            self._run()

    def end(self, committed: bool) -> None:
        """Let no later discharge do it again: it was committed or rolled back."""
        self.joined = False

    def _begin(self) -> Result:
        return _done()

    @abstractmethod
    def _run(self) -> None:
        """Change the store, if the request was accepted. Raises AmqpError."""


class JoiningSchedule(Joining):
    """Schedules messages at the discharge, under numbers that the response has told already."""

    def __init__(self, call: ManagementCall, others: Sequence[object] = ()) -> None:
        super().__init__(call, others)
        self.path, self._messages = _to_schedule(call)
        self.seqs: list[int] = []

    @property
    def count(self) -> int:
        return len(self._messages)

    @property
    def size(self) -> int:
        return sum(len(message.payload) for message in self._messages)

    def _begin(self) -> Result:
        self.seqs = self._call.broker.engine.reserve(self.path, self._messages)
        return _numbers(self.seqs)

    def _run(self) -> None:
        entity = sendable(self._call.broker.namespace, self.path)
        self._call.broker.engine.send(entity.path, self._messages, numbers=self.seqs)
        self._call.broker.queue_changed(entity.path)


class JoiningCancel(Joining):
    """Cancels scheduled messages at the discharge.

    One that fell due since the request rolls the transaction back.
    """

    def __init__(self, call: ManagementCall, others: Sequence[object] = ()) -> None:
        super().__init__(call, others)
        self._numbers = call.items("sequence-numbers", int, "long")

    @property
    def count(self) -> int:
        return len(self._numbers)

    def _begin(self) -> Result:
        engine, path = self._call.broker.engine, self._call.entity.path
        ours = {
            seq
            for other in self._others
            if isinstance(other, JoiningSchedule) and other.joined and other.path == path
            for seq in other.seqs
        }
        for number, seq in zip(self._numbers, self._call.seqs(self._numbers), strict=True):
            found = engine.peek(path, seq, 1)
            known = found and found[0].seq == seq and found[0].state == "scheduled"
            if not known and seq not in ours:
                raise _not_scheduled(number)
        return _done()

    def _run(self) -> None:
        cancel_scheduled(self._call)


class JoiningState(Joining):
    """Sets the state of a session at the discharge, if this connection then still holds it."""

    def _begin(self) -> Result:
        _state_of(self._call)
        self._call.session()
        return _done()

    def _run(self) -> None:
        set_session_state(self._call)


def cancel_scheduled(call: ManagementCall) -> Result:
    """Delete scheduled messages; all of them or none."""
    numbers = call.items("sequence-numbers", int, "long")
    removed = call.broker.engine.cancel_scheduled(call.entity.path, call.seqs(numbers))
    missing = sorted(set(numbers) - set(map(number_of, removed)))
    if missing:
        raise _not_scheduled(missing[0])
    return _done()


def _not_scheduled(number: int) -> AmqpError:
    return AmqpError(MESSAGE_NOT_FOUND, f"no scheduled message has the sequence number {number}")


_STATES = {"deferred": stored.STATE_DEFERRED, "scheduled": stored.STATE_SCHEDULED}


def peek_message(call: ManagementCall) -> Result:
    """Return messages without locking them, from a sequence number on."""
    number = call.need("from-sequence-number", int, "a long")
    start = call.broker.engine.seq_of(call.entity.path, number)
    count = call.need("message-count", int, "an int")
    session = call.body.get("session-id")
    limit = max(0, min(count, MAX_PEEK))
    items: list[bytes] = []
    size = 0
    for message in _pages(call, start):
        if len(items) >= limit or (items and size > MAX_RESPONSE):
            break
        if session is None or message.session == session:
            encoded = encode.binary(_peeked(call, message))
            items.append(encode.map_of([(encode.string("message"), encoded)]))
            size += len(items[-1])
    if items and size > MAX_RESPONSE:
        items = items[:-1] or items
    if not items:
        return NO_CONTENT, encode.NULL
    return _answer("messages", encode.list_of(items))


def _pages(call: ManagementCall, start: int) -> Iterator[PeekedMessage]:
    """Peek at a queue's messages; pages grow from a few, because a message may be large."""
    size = FIRST_PAGE
    while True:
        page = call.broker.engine.peek(call.entity.path, start, size, dead_letter=call.dead)
        yield from page
        if len(page) < size:
            return
        start = call.broker.engine.seq_of(call.entity.path, number_of(page[-1].seq) + 1)
        size = min(2 * size, MAX_PEEK)


def _peeked(call: ManagementCall, message: PeekedMessage) -> bytes:
    return stored.deliver(
        message.payload,
        sequence=number_of(message.seq),
        enqueued_ms=int(message.enqueued_at * 1000),
        delivery_count=message.delivery_count,
        state=_STATES.get(message.state, stored.STATE_ACTIVE),
        dead=(message.reason or "", message.description or "") if call.dead else None,
    )


def receive_by_sequence_number(call: ManagementCall) -> Result:
    """Receive deferred messages; all of them or none."""
    numbers = call.items("sequence-numbers", int, "long")
    delete = call.body.get("receiver-settle-mode") == SETTLE_MODE_DELETE
    seconds = None
    if call.entity.sessions and not call.dead:
        seconds = max(0.001, call.session().until - call.broker.clock.monotonic())
    leased = call.broker.engine.receive_deferred(
        call.entity.path, call.seqs(numbers), seconds, dead_letter=call.dead, delete=delete
    )
    if len(leased) < len(set(numbers)):
        missing = sorted(set(numbers) - {number_of(message.seq) for message in leased})
        raise AmqpError(
            MESSAGE_NOT_FOUND, f"no deferred message has the sequence number {missing[0]}"
        )
    items = [_deferred(call, message) for message in leased]
    return _answer("messages", encode.list_of(items))


def _deferred(call: ManagementCall, message: Leased) -> bytes:
    key = bytes.fromhex(message.token) if message.token else bytes(16)
    until = None
    if message.token:
        lock = Lock(
            *(call.entity.path, call.dead, message.seq, message.token),
            *(message.session, message.lease_until),
        )
        call.broker.locks.add(lock)
        until = int((message.lease_until + call.broker.lock_token_offset()) * 1000)
    encoded = stored.deliver(
        message.payload,
        sequence=number_of(message.seq),
        enqueued_ms=int(message.enqueued_at * 1000),
        delivery_count=message.delivery_count - 1,
        state=stored.STATE_DEFERRED,
        lock_token=key if message.token else None,
        locked_until_ms=until,
        dead=(message.reason or "", message.description or "") if call.dead else None,
    )
    return encode.map_of(
        [
            (encode.string("message"), encode.binary(encoded)),
            (encode.string("lock-token"), encode.uuid(UUID(bytes=key))),
        ]
    )


def renew_session_lock(call: ManagementCall) -> Result:
    """Renew the lock of a session that this connection holds."""
    lease = call.session()
    renewed = call.broker.engine.renew_session(call.entity.path, lease)
    if renewed is None:
        raise SESSION_LOST
    for consumer in call.consumers:
        if consumer.lease == lease:
            consumer.lease = renewed
    until = int((renewed.until + call.broker.lock_token_offset()) * 1000)
    return _answer("expiration", encode.timestamp(until))


def get_session_state(call: ManagementCall) -> Result:
    """Return the state of a session that this connection holds."""
    state = call.broker.engine.get_session_state(call.entity.path, call.session())
    return _answer("session-state", encode.NULL if state is None else encode.binary(state))


def set_session_state(call: ManagementCall) -> Result:
    """Set or delete the state of a session that this connection holds."""
    state = _state_of(call)
    path, lease = call.entity.path, call.session()
    times = call.broker.namespace.session_times
    call.broker.engine.set_session_state(path, lease, state)
    if state is None:
        times.forget(path, lease.session)
    else:
        times.note(path, lease.session, call.broker.clock.wall())
    return _done()


def _state_of(call: ManagementCall) -> bytes | None:
    """Return the state that a request sets. Raises AmqpError (argument-error)."""
    state = call.body.get("session-state")
    if isinstance(state, str):
        state = state.encode()
    if state is not None and (not isinstance(state, bytes) or len(state) > MAX_STATE):
        raise AmqpError(ARGUMENT_ERROR, f"a session state is at most {MAX_STATE} bytes, or null")
    return state


# Clients ask for sessions updated since the year 10000 to list those with messages, too.
ALL_SESSIONS = 253_402_300_800_000


def get_message_sessions(call: ManagementCall) -> Result:
    """List the sessions whose state was set after a time."""
    skip = max(0, call.need("skip", int, "an int"))
    top = max(0, min(call.need("top", int, "an int"), MAX_ITEMS))
    updated = call.need("last-updated-time", int, "a timestamp")
    engine, path = call.broker.engine, call.entity.path
    names = set(engine.sessions(path, with_state=True))
    if updated >= ALL_SESSIONS:
        names |= set(engine.sessions(path))
    else:
        names -= call.broker.namespace.session_times.until(path, updated / 1000)
    page = sorted(names)[skip : skip + top]
    if not page:
        return NO_CONTENT, encode.NULL
    return OK, encode.map_of(
        [
            (encode.string("skip"), encode.int32(skip + len(page))),
            (encode.string("sessions-ids"), encode.string_array(page)),  # the service's spelling
        ]
    )


MAX_DELETED = 4000


def batch_delete_messages(call: ManagementCall) -> Result:
    """Delete the oldest messages that were enqueued before a time and are not locked."""
    count = call.need("message-count", int, "an int")
    before = call.need("enqueued-time-utc", int, "a timestamp") / 1000
    if not 1 <= count <= MAX_DELETED:
        raise AmqpError(ARGUMENT_ERROR, f"'message-count' must be 1 to {MAX_DELETED}")
    engine, path = call.broker.engine, call.entity.path
    deleted = engine.remove_oldest(path, count, before, dead_letter=call.dead)
    if not deleted:
        return NO_CONTENT, encode.NULL
    return _answer("message-count", encode.int32(deleted))


_PREFIX = "com.microsoft:"
OPERATIONS: dict[str, Operation] = {
    "renew-lock": renew_lock,
    "update-disposition": update_disposition,
    "schedule-message": schedule_message,
    "cancel-scheduled-message": cancel_scheduled,
    "peek-message": peek_message,
    "receive-by-sequence-number": receive_by_sequence_number,
    "renew-session-lock": renew_session_lock,
    "get-session-state": get_session_state,
    "set-session-state": set_session_state,
    "get-message-sessions": get_message_sessions,
    "batch-delete-messages": batch_delete_messages,
}


def operation(name: str) -> Operation:
    """Return the function of an operation. Raises AmqpError (not-implemented)."""
    found = OPERATIONS.get(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
    if found is None:
        raise AmqpError(NOT_IMPLEMENTED, f"there is no operation {name[:100]!r} here")
    return found


_JOINING: dict[str, type[Joining]] = {
    "schedule-message": JoiningSchedule,
    "cancel-scheduled-message": JoiningCancel,
    "set-session-state": JoiningState,
}


def joining(name: str) -> type[Joining]:
    """Return what an operation is as part of a transaction. Raises AmqpError."""
    found = _JOINING.get(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
    if found is None:
        raise AmqpError(NOT_IMPLEMENTED, f"{name[:100]!r} under a transaction")
    return found
