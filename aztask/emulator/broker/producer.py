"""Links on which clients send: messages are stored, then confirmed."""

from __future__ import annotations

from aztask.emulator.amqp import outgoing
from aztask.emulator.amqp.errors import MESSAGE_SIZE_EXCEEDED, AmqpError
from aztask.emulator.amqp.link import Inbound, ReceivingLink
from aztask.emulator.broker.broker import Broker
from aztask.emulator.broker.committer import Change
from aztask.emulator.broker.conditions import as_amqp
from aztask.emulator.broker.intake import messages_of, sendable
from aztask.engine import NewMessage
from aztask.errors import AztaskError

CREDIT = 1000


class Producer:
    """A client's link that sends to a queue or topic."""

    def __init__(self, broker: Broker, link: ReceivingLink, path: str) -> None:
        self.broker = broker
        self.link = link
        self.path = path

    def received(self, message: Inbound) -> None:
        """Store a message or a batch, or reject it at once if it is refused."""
        namespace = self.broker.namespace
        try:
            if message.too_large:
                raise AmqpError(
                    MESSAGE_SIZE_EXCEEDED,
                    f"a message of more than {self.link.max_message_size} bytes; send smaller ones",
                )
            entity = sendable(namespace, self.path)
            messages = messages_of(
                namespace,
                entity,
                message.payload,
                message.message_format,
                self.broker.clock.wall(),
            )
        except AmqpError as error:
            self.answer(message, outgoing.rejected(error.condition, error.description))
            return
        self.broker.committer.submit(_StoreMessages(self, message, entity.path, messages))

    def answer(self, message: Inbound, state: bytes) -> None:
        """Settle the delivery, unless the client sent it settled."""
        if not message.settled:
            delivery_id = message.delivery_id
            self.link.session.write(outgoing.disposition(True, delivery_id, delivery_id, state))


class _StoreMessages(Change):
    """Stores the messages of one transfer, all of them or none."""

    def __init__(
        self, producer: Producer, message: Inbound, queue: str, messages: list[NewMessage]
    ) -> None:
        self._producer = producer
        self._message = message
        self._queue = queue
        self._messages = messages

    def execute(self) -> None:
        broker = self._producer.broker
        broker.engine.send(self._queue, self._messages)
        broker.queue_changed(self._queue)

    def succeed(self) -> None:
        self._producer.answer(self._message, outgoing.ACCEPTED)

    def fail(self, error: AztaskError) -> None:
        reason = as_amqp(error)
        self._producer.answer(
            self._message, outgoing.rejected(reason.condition, reason.description)
        )
