"""Links on which clients send: messages are stored, then confirmed."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from aztask.emulator.amqp import (
    DECODE_ERROR,
    INVALID_FIELD,
    MESSAGE_SIZE_EXCEEDED,
    AmqpError,
    encode,
    outgoing,
    sections,
)
from aztask.emulator.amqp.link import Inbound, ReceivingLink
from aztask.emulator.amqp.sections import Sections, check_properties
from aztask.emulator.broker import stored
from aztask.emulator.broker.broker import Service
from aztask.emulator.broker.conditions import BUSY, as_amqp
from aztask.emulator.broker.dispatch import StoreChange
from aztask.emulator.broker.entities import Entity
from aztask.emulator.broker.forwarding import (
    MAX_KEY,
    Refusal,
    closed,
    error_of,
    refused,
    sendable,
)
from aztask.emulator.broker.settlement import transaction_of
from aztask.emulator.broker.transactions import Transactions, transactional
from aztask.errors import AztaskError
from aztask.queues.engine import NewMessage

# -- incoming messages: checks a transfer and makes the messages that the engine stores ----
#
# Rules
# 1. A batch (message format 0x80013700) is a list of data sections, each a complete message. The
#    envelope around them is ignored. All of the messages are stored, or none.
# 2. A message without an id gets one, as on the service. SDKs rely on it ([seen] @azure/service-bus
#    7.9 cannot settle a message without an id).
# 3. A message is checked completely before any of it is stored.


BATCH_FORMAT = 0x80013700
MAX_BATCH = 4500


def messages_of(payload: bytes, message_format: int) -> list[bytes]:
    """Return the encoded messages of one transfer. Raises AmqpError."""
    if message_format != BATCH_FORMAT:
        return [payload]
    envelope = sections.cut(payload)
    if not envelope.data_items or len(envelope.data_items) > MAX_BATCH:
        raise AmqpError(
            DECODE_ERROR, f"a batch of {len(envelope.data_items)} messages; 1 to {MAX_BATCH}"
        )
    return [envelope.raw[start:end] for start, end in envelope.data_items]


def new_message(entity: Entity, raw: bytes, now: float) -> NewMessage:
    """Return one encoded message, ready to be stored. Raises AmqpError if it is refused.

    now: UTC epoch seconds.
    """
    new = parsed(entity, raw, now)
    refusal = refused(entity, new.session, len(raw))
    if refusal is not None:
        raise error_of(refusal)
    return new


def parsed(entity: Entity, raw: bytes, now: float) -> NewMessage:
    """Return one encoded message as the entity would store it. Raises AmqpError if malformed."""
    message = sections.cut(raw)
    session = _session(message.property(sections.GROUP_ID))
    message_id = _message_id(message.property(sections.MESSAGE_ID))
    check_properties(message)
    new = stored.to_stored(message)
    if entity.time_to_live is not None:
        new = stored.limited(new, entity.time_to_live)
    if not message_id:
        message_id = uuid4().hex
        new = stored.with_fields(new, {sections.MESSAGE_ID: encode.string(message_id)})
    due = _due(message, now) if message.annotations else None
    start = now if due is None else due
    expires = None if new.ttl == stored.NO_TTL else start + new.ttl / 1000
    found = NewMessage(new.pack(), message_id, session, due, expires)
    return stored.in_partition(found) if entity.partitioned else found


def _session(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or len(value) > MAX_KEY):
        raise AmqpError(INVALID_FIELD, f"the session id must be a string of at most {MAX_KEY}")
    return value


def _message_id(value: Any) -> str:
    """Return a message id as text: it may be a string, uuid, binary or number (part 3.2.11)."""
    if value is None:
        return ""
    text = value.hex() if isinstance(value, bytes) else str(value)
    if len(text) > MAX_KEY:
        raise AmqpError(INVALID_FIELD, f"the message id has {len(text)} characters, over {MAX_KEY}")
    return text


def _due(message: Sections, now: float) -> float | None:
    due = message.annotations.get(stored.SCHEDULED_TIME)
    if due is None:
        return None
    if not isinstance(due, int):
        raise AmqpError(INVALID_FIELD, f"{stored.SCHEDULED_TIME} must be a timestamp")
    return due / 1000 if due / 1000 > now else None


CREDIT = 1000


class Producer:
    """A client's link that sends to a queue or topic.

    transactions: those of its connection. destination: the entity to which it sends through `path`;
    what that refuses goes to the transfer dead letters of `path`. None for no other.
    """

    def __init__(
        self,
        broker: Service,
        link: ReceivingLink,
        path: str,
        transactions: Transactions,
        destination: str | None = None,
    ) -> None:
        self.broker = broker
        self.link = link
        self.path = path
        self._transactions = transactions
        self._destination = destination

    def received(self, message: Inbound) -> None:
        """Store a message or a batch, or reject it at once if it is refused."""
        broker = self.broker
        number = None if message.state is None else transaction_of(message.state)
        try:
            if broker.faults.busy and broker.faults.is_busy():
                raise BUSY
            if message.too_large:
                raise AmqpError(
                    MESSAGE_SIZE_EXCEEDED,
                    f"a message of more than {self.link.max_message_size} bytes; send smaller ones",
                )
            entity = sendable(broker.namespace, self.path)
            now = broker.clock.wall()
            raws = messages_of(message.payload, message.message_format)
            if self._destination is None:
                storing = StoredTransfer(
                    broker, entity.path, [new_message(entity, raw, now) for raw in raws]
                )
            else:
                storing = self._through(entity, raws, now)
            if number is not None:
                self._transactions.add(number, storing)
                self.answer(message, transactional(number, outgoing.ACCEPTED))
                return
        except AmqpError as error:
            if number is not None and message.settled:
                self._transactions.refuse(number, error)
            self.answer(message, outgoing.rejected(error.condition, error.description))
            return
        broker.committer.submit(_StoreMessages(self, message, storing))

    def _through(self, via: Entity, raws: list[bytes], now: float) -> StoredTransfer:
        """Return how messages to the destination are stored. Raises AmqpError."""
        path = self._destination or ""
        target = self.broker.namespace.find(path)
        storing = StoredTransfer(self.broker, via.path if target is None else target.path, [])
        for raw in raws:
            new = parsed(target or via, raw, now)
            refusal = closed(path, target)
            if refusal is None and target is not None:
                refusal = refused(target, new.session, len(raw))
            if refusal is None:
                storing.messages.append(new)
            else:
                storing.refused.append((via, new, refusal))
        return storing

    def answer(self, message: Inbound, state: bytes) -> None:
        """Settle the delivery, unless the client sent it settled."""
        if not message.settled:
            delivery_id = message.delivery_id
            self.link.session.write(outgoing.disposition(True, delivery_id, delivery_id, state))


class StoredTransfer:
    """The messages of one transfer, to be stored: all of them or none.

    refused: what the destination of the link refuses: through which entity it was sent, and why.
    """

    def __init__(self, broker: Service, queue: str, messages: list[NewMessage]) -> None:
        self._broker = broker
        self._queue = queue
        self.messages = messages
        self.refused: list[tuple[Entity, NewMessage, Refusal]] = []

    @property
    def count(self) -> int:
        """How many messages are sent."""
        return len(self.messages) + len(self.refused)

    @property
    def size(self) -> int:
        """How many bytes their payloads have."""
        refused = [message for _, message, _ in self.refused]
        return sum(len(message.payload) for message in [*self.messages, *refused])

    def run(self) -> None:
        """Store them, inside the transaction."""
        broker = self._broker
        if self.messages:
            broker.engine.send(self._queue, self.messages)
            broker.queue_changed(self._queue)
        for via, message, refusal in self.refused:
            place = broker.namespace.transfer(via).path
            broker.engine.send_dead(place, message, refusal.cause.reason, refusal.description)
            broker.queue_changed(place, True)

    def end(self, committed: bool) -> None:
        """Nothing is held between the check and the commit."""


class _StoreMessages(StoreChange):
    """Stores the messages of one transfer and answers it."""

    def __init__(self, producer: Producer, message: Inbound, storing: StoredTransfer) -> None:
        self._producer = producer
        self._message = message
        self._storing = storing

    def execute(self) -> None:
        self._storing.run()

    def succeed(self) -> None:
        self._producer.answer(self._message, outgoing.ACCEPTED)

    def fail(self, error: AztaskError) -> None:
        reason = as_amqp(error)
        self._producer.answer(
            self._message, outgoing.rejected(reason.condition, reason.description)
        )
