"""The runtime API of the service over HTTP: send, receive and settle, for programs without AMQP.

====== ==================================== ====================================================
method path                                 what it does: status of success
====== ==================================== ====================================================
POST   ENTITY/messages                      send one message, or a batch: 201
POST   ENTITY/messages/head                 receive and lock: 201, 204 if none came
DELETE ENTITY/messages/head                 receive and delete: 200, 204 if none came
PUT    ENTITY/messages/MESSAGE/LOCK         unlock, so that others get it: 200
POST   ENTITY/messages/MESSAGE/LOCK         renew the lock: 200
DELETE ENTITY/messages/MESSAGE/LOCK         complete: 200
====== ==================================== ====================================================

ENTITY is a queue, a topic or TOPIC/subscriptions/NAME, or the dead letters of one. MESSAGE is the
message's id or number. ``timeout`` in the query says how many seconds a receiver waits.

Rules
1. A request is checked as one over AMQP is: Send or Listen for the entity, its status, sizes,
   sessions, duplicates. Both ways share the store, the locks and the transaction of a turn.
2. It is authorized before its body is read. What a message may have at most is the entity's limit.
3. A client that has gone while it waits gets no message. One that goes later leaves it locked until
   the lock expires; a message that it received and deleted is lost, as on the service.
4. Without a key, requests of other origins are refused. A page of any site may make a browser POST
   to this machine, without asking first as for PUT and DELETE.

Sources: learn.microsoft.com/rest/api/servicebus, "Service Bus runtime REST" and its pages, also
for the statuses: 410 for an entity that does not exist, 404 for a lock that does not, 403 for a
quota or a message that is too large, 401 for a token. Receivers of this API have no sessions, and
cannot defer or dead-letter ("Introduction"). It names no status for a disabled entity: 403 here.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final
from urllib.parse import quote, unquote
from uuid import UUID

from aztask.emulator import websocket
from aztask.emulator.admin import brokerproperties
from aztask.emulator.admin.http import MAX_BODY, HttpRequest, HttpResponse, failed
from aztask.emulator.amqp import (
    INTERNAL_ERROR,
    MESSAGE_SIZE_EXCEEDED,
    NOT_FOUND,
    RESOURCE_LIMIT_EXCEEDED,
    UNAUTHORIZED_ACCESS,
    AmqpError,
)
from aztask.emulator.broker import stored
from aztask.emulator.broker.broker import Lock, Service
from aztask.emulator.broker.conditions import (
    BUSY,
    ENTITY_DISABLED,
    LOCK_LOST,
    MESSAGE_LOCK_LOST,
    SERVER_BUSY,
    as_amqp,
)
from aztask.emulator.broker.consumer import receivable
from aztask.emulator.broker.dispatch import MessageSource, StoreChange
from aztask.emulator.broker.entities import Address, Entity, parse_address
from aztask.emulator.broker.entra import Right
from aztask.emulator.broker.forwarding import sendable
from aztask.emulator.broker.producer import StoredTransfer, new_message
from aztask.emulator.broker.settlement import COMPLETE, SettlementAction, SettlementKind, settle
from aztask.errors import AztaskError
from aztask.queues.engine import Engine, Leased, number_of

log = logging.getLogger(__name__)

DEFAULT_WAIT = 60.0  # seconds; the examples of the service ask for it
MAX_WAIT = 120.0
CHECK_SECONDS = 0.2  # how often it is checked that a waiting client and its entity are still there
_STATUS: Final = {
    INTERNAL_ERROR: 500,
    UNAUTHORIZED_ACCESS: 401,
    NOT_FOUND: 410,
    MESSAGE_LOCK_LOST: 404,
    MESSAGE_SIZE_EXCEEDED: 403,
    RESOURCE_LIMIT_EXCEEDED: 403,
    ENTITY_DISABLED: 403,
    SERVER_BUSY: 503,
}
_SECONDS: Final = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?\Z")


class Verb(Enum):
    """What a request asks for."""

    SEND = "send"
    LOCK = "receive and lock"
    TAKE = "receive and delete"
    UNLOCK = "unlock"
    RENEW = "renew"
    COMPLETE = "complete"


_AT_HEAD: Final = {"POST": Verb.LOCK, "DELETE": Verb.TAKE}
_AT_LOCK: Final = {"PUT": Verb.UNLOCK, "POST": Verb.RENEW, "DELETE": Verb.COMPLETE}


@dataclass(frozen=True, slots=True)
class RuntimeCall:
    """One request of the API.

    message: the id or the number of the message to settle. token: of its lock, as the engine knows
    it.
    """

    verb: Verb
    address: Address
    message: str = ""
    token: str = ""

    @property
    def right(self) -> Right:
        """The permission that it needs."""
        return Right.SEND if self.verb is Verb.SEND else Right.LISTEN


def call_of(method: str, path: str) -> RuntimeCall | None:
    """Return what a request asks of this API; None for one of the administration.

    path: still quoted, because the id of a message may have a slash.
    """
    parts = path.strip("/").split("/")
    names = [part.lower() for part in parts]
    if names[-1] == "messages" and method == "POST":
        return RuntimeCall(Verb.SEND, _address(parts[:-1]))
    if names[-2:] == ["messages", "head"] and method in _AT_HEAD:
        return RuntimeCall(_AT_HEAD[method], _address(parts[:-2]))
    if names[-3:-2] == ["messages"] and method in _AT_LOCK:
        try:
            token = UUID(unquote(parts[-1])).hex
        except ValueError:
            return None
        return RuntimeCall(_AT_LOCK[method], _address(parts[:-3]), unquote(parts[-2]), token)
    return None


def _address(parts: list[str]) -> Address:
    """Return the address of an entity; that of a subscription in the broker's spelling."""
    return parse_address("/".join(parts))


@dataclass(frozen=True, slots=True)
class Requester:
    """The client of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def gone(self) -> bool:
        """Whether it closed its connection, or lost it."""
        return self.reader.at_eof() or self.writer.transport.is_closing()


class Runtime:
    """Answers the requests of the API. secure: write URLs with https."""

    def __init__(self, broker: Service, secure: bool) -> None:
        self._broker = broker
        self._scheme = "https" if secure else "http"

    def refusal(self, call: RuntimeCall, request: HttpRequest) -> HttpResponse | None:
        """Return why a request is refused before its body is read, or None (rules 2 and 4)."""
        access = self._broker.access
        if not access.required and not websocket.from_here(request.headers):
            return failed(421, "without a key, only programs and pages of this machine are served")
        host = request.headers.get("host", "")
        try:
            access.bearer(
                request.headers.get("authorization"), call.address.claimed, call.right, host
            )
        except AmqpError as error:
            return _failed(error)
        return None

    def most_bytes(self, call: RuntimeCall) -> int:
        """Return how large the body of a request may be."""
        entity = self._broker.namespace.find(call.address.entity)
        if call.verb is not Verb.SEND or entity is None:
            return MAX_BODY
        return max(MAX_BODY, entity.max_message_bytes)

    async def answer(
        self, call: RuntimeCall, request: HttpRequest, requester: Requester
    ) -> HttpResponse:
        """Do what a request asks for, and return the response."""
        self._broker.namespace.note_use(call.address.entity)
        try:
            if call.address.management or call.address.cbs:
                raise AmqpError(NOT_FOUND, "this node of an entity is for AMQP alone")
            if call.verb in (Verb.LOCK, Verb.TAKE):
                return await self._receive(call, request, requester)
            if self._broker.faults.is_busy():
                raise BUSY
            if call.verb is Verb.SEND:
                return await self._send(call, request)
            return await self._settle(call)
        except AmqpError as error:
            return _failed(error)
        except AztaskError as error:
            return _failed(as_amqp(error))

    async def _send(self, call: RuntimeCall, request: HttpRequest) -> HttpResponse:
        broker = self._broker
        if call.address.dead:
            raise brokerproperties.refused("messages cannot be sent to the dead letters")
        entity = sendable(broker.namespace, call.address.entity)
        raws = brokerproperties.messages_of(request.fields, request.headers, request.body)
        now = broker.clock.wall()
        messages = [new_message(entity, raw, now) for raw in raws]
        await _committed(broker, _Sent(StoredTransfer(broker, entity.path, messages)))
        return HttpResponse(201, content_type=brokerproperties.PLAIN_TYPE)

    async def _receive(
        self, call: RuntimeCall, request: HttpRequest, requester: Requester
    ) -> HttpResponse:
        entity = receivable(self._broker, call.address, {})
        left = _wait(request.query)
        source = MessageSource(entity.path, call.address.dead)
        waiting = _Receiver(self._broker, source, requester, delete=call.verb is Verb.TAKE)
        dispatcher = self._broker.dispatcher
        dispatcher.join(waiting)
        dispatcher.wake(source)
        try:
            while True:  # once at least: a timeout of 0 takes what is there
                await asyncio.wait({waiting.arrived}, timeout=min(left, CHECK_SECONDS))
                left -= CHECK_SECONDS
                if waiting.arrived.done() or left <= 0 or requester.gone:
                    break
                receivable(self._broker, call.address, {})  # it may be deleted or disabled now
                self._broker.namespace.note_use(call.address.entity)
        finally:
            waiting.ended = True
            dispatcher.leave(waiting)
        if not waiting.arrived.done():
            return HttpResponse(204, content_type=brokerproperties.PLAIN_TYPE)
        return self._delivered(entity, call, request, waiting.arrived.result())

    def _delivered(
        self, entity: Entity, call: RuntimeCall, request: HttpRequest, found: Delivered
    ) -> HttpResponse:
        body, content_type, headers = brokerproperties.received(found.encoded, found.token)
        if call.verb is Verb.TAKE:
            return HttpResponse(200, body, content_type, headers)
        host = request.headers.get("host", "localhost")
        path = quote(call.address.claimed or entity.path, safe="/$")
        place = f"{self._scheme}://{host}/{path}/messages/{found.number}/{found.token}"
        return HttpResponse(201, body, content_type, {**headers, "Location": place})

    async def _settle(self, call: RuntimeCall) -> HttpResponse:
        broker, address = self._broker, call.address
        entity = broker.namespace.get(address.entity)
        place = broker.namespace.transfer(entity) if address.transfer else entity
        lock = broker.locks.get(call.token)
        if lock is None or (lock.queue, lock.dead) != (place.path, address.dead):
            raise LOCK_LOST
        if call.message != str(number_of(lock.seq)):
            named = broker.engine.peek(lock.queue, lock.seq, 1, dead_letter=lock.dead)
            if not named or (named[0].seq, named[0].message_id) != (lock.seq, call.message):
                raise LOCK_LOST
        await _committed(broker, _Settled(broker, lock, call.verb))
        return HttpResponse(200, content_type=brokerproperties.PLAIN_TYPE)


def _wait(query: Mapping[str, str]) -> float:
    text = query.get("timeout")
    if text is None:
        return DEFAULT_WAIT
    if not _SECONDS.match(text):
        raise brokerproperties.refused(f"timeout={text[:40]} is no number of seconds")
    return min(float(text), MAX_WAIT)


def _failed(error: AmqpError) -> HttpResponse:
    return failed(_STATUS.get(error.condition, 400), error.description)


# -- Changes of the store --------------------------------------------------------------------------


class _Awaited(StoreChange):
    """A change that a request waits for."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def succeed(self) -> None:
        if not self.done.done():  # the request may have been given up
            self.done.set_result(None)

    def fail(self, error: AztaskError) -> None:
        if not self.done.done():
            self.done.set_exception(as_amqp(error))


async def _committed(broker: Service, change: _Awaited) -> None:
    """Make a change with the others of this turn. Raises AmqpError if it was not made."""
    broker.committer.submit(change)
    await change.done


class _Sent(_Awaited):
    """Stores the messages of one request."""

    def __init__(self, storing: StoredTransfer) -> None:
        super().__init__()
        self._storing = storing

    def execute(self) -> None:
        self._storing.run()


_ACTIONS: Final = {
    Verb.COMPLETE: COMPLETE,
    Verb.UNLOCK: SettlementAction(SettlementKind.ABANDON),
}


class _Settled(_Awaited):
    """Completes or unlocks a message, or renews its lock."""

    def __init__(self, broker: Service, lock: Lock, verb: Verb) -> None:
        super().__init__()
        self._broker = broker
        self._lock = lock
        self._verb = verb
        self._held = False
        self._until: float | None = None

    def execute(self) -> None:
        lock, broker = self._lock, self._broker
        lease = [(lock.seq, lock.token)]
        if self._verb is Verb.RENEW:
            (self._until,) = broker.engine.renew(lock.queue, lease, dead_letter=lock.dead)
            return
        action = _ACTIONS[self._verb]
        (self._held,) = settle(broker.engine, lock.queue, lock.dead, action, lease)
        broker.queue_changed(lock.queue, lock.dead)

    def succeed(self) -> None:
        """Note what became of the lock, and answer."""
        if self._until is not None:
            self._broker.locks.renewed(self._lock.token, self._until)
        elif self._verb is not Verb.RENEW:
            self._broker.locks.discard(self._lock.token)
        if self._held or self._until is not None:
            super().succeed()
        elif not self.done.done():
            self.done.set_exception(LOCK_LOST)


# -- Receiving -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message for one request. encoded: as AMQP delivers it. token: a UUID, "" without a lock."""

    encoded: bytes
    number: int
    token: str


class _Receiver:
    """A request that waits for one message, among the links that receive from the same source."""

    def __init__(
        self, broker: Service, source: MessageSource, requester: Requester, *, delete: bool
    ) -> None:
        self.source = source
        self.delete = delete
        self.ended = False
        self.arrived: asyncio.Future[Delivered] = asyncio.get_running_loop().create_future()
        self._broker = broker
        self._requester = requester

    def capacity(self) -> int:
        """Return 1 until a message came, the time had passed, or the client went (rule 3)."""
        return 0 if self.ended or self.arrived.done() or self._requester.gone else 1

    def take(self, engine: Engine, limit: int) -> list[Leased]:
        """Lease the message in the transaction of this turn, or remove it."""
        return engine.receive(
            self.source.queue, limit, dead_letter=self.source.dead, delete=self.delete
        )

    def deliver(self, messages: list[Leased], offset: float) -> None:
        """Give the message to the request; one that cannot be read is logged, as on a link."""
        (message,) = messages
        locked = not self.delete
        try:
            encoded = stored.deliver(
                message.payload,
                sequence=number_of(message.seq),
                enqueued_ms=int(message.enqueued_at * 1000),
                delivery_count=message.delivery_count - 1,
                lock_token=bytes.fromhex(message.token) if locked else None,
                locked_until_ms=int((message.lease_until + offset) * 1000) if locked else None,
                dead=(message.reason or "", message.description or "")
                if self.source.dead
                else None,
            )
        except Exception:
            number = number_of(message.seq)
            log.exception("%s: the message %d cannot be read", self.source.queue, number)
            return
        token = ""
        if locked:
            token = str(UUID(message.token))
            lock = Lock(*self.source[:2], message.seq, message.token, None, message.lease_until)
            self._broker.locks.add(lock)
        self.arrived.set_result(Delivered(encoded, number_of(message.seq), token))

    def exhausted(self) -> None:
        """Nothing to answer: the request waits until its time has passed."""
