"""The connections of the Service Bus SDK, as far as the adapter uses them.

The adapter's own code runs above: receivers, sessions, control requests, senders, peeks, the checks
of locks and clocks. Replaced are what the SDK does, and the adapter's calls of its private parts
(`aztask.queues.servicebus.private`), for these links only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar
from uuid import UUID

from azure.servicebus import (
    ServiceBusMessage,
    ServiceBusMessageBatch,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
)
from azure.servicebus._pyamqp.message import Header, Message
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from azure.servicebus.exceptions import (
    MessageLockLostError,
    MessageNotFoundError,
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusAuthorizationError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusServerBusyError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)

from aztask.queues.servicebus.kind import MESSAGE_LIMIT
from aztask.queues.servicebus.senders import encoded

from .bus import SCHEDULED_AT, BusMessage, ServiceBus, State
from .wire import Line, Refused, Service, Unanswered, Unconnected

Answer = TypeVar("Answer")

ERRORS: Final[dict[str, type[ServiceBusError]]] = {
    "not-found": MessagingEntityNotFoundError,
    "message-not-found": MessageNotFoundError,
    "message-lock-lost": MessageLockLostError,
    "session-lock-lost": SessionLockLostError,
    "session-cannot-be-locked": SessionCannotBeLockedError,
    "timeout": OperationTimeoutError,
    "ServerBusy": ServiceBusServerBusyError,
    "AuthorizationPermissionMismatch": ServiceBusAuthorizationError,
}
"""What the SDK raises for each of the service's errors; ServiceBusError for the others."""

MARGIN: Final = 10.0
"""Seconds that a receive may take longer than its wait, until the connection counts as broken."""


class ModelLink:
    """One connection: a sender, a receiver, or the holder of a session.

    * `_running`: whether it is open. The adapter reads that.
    * `tick`: seconds after which a receive that waits looks again.
    """

    def __init__(
        self,
        service: ServiceBus,
        line: Line,
        queue: str,
        *,
        tick: float,
        dead: bool = False,
        delete: bool = False,
        session: object = None,
        request_seconds: float = 10.0,
        session_wait: float | None = None,
    ) -> None:
        """session: the name of one, None for none; any other object: the next one."""
        self.service = service
        self.line = line
        self.queue = queue
        self.dead = dead
        self.delete = delete
        self.seconds = request_seconds
        self.session = ModelSession(self, session, session_wait)
        self._tick = tick
        self._running = self._ended = False
        self._came_here: set[UUID] = set()

    # -- the connection ----------------------------------------------------------------------

    def open(self, timeout: float) -> None:
        """Connect, and accept the session that it is for."""
        self.ask("open", self._check, timeout)
        self._running = True
        if self.session.wanted is not None:
            try:
                self.session.accept()
            except BaseException:
                self.end()
                raise

    def _check(self) -> None:
        needs = self.service.queue(self.queue).settings.sessions
        if self.is_plain_receiver and needs and not self.dead:
            raise Refused(400, "not-allowed", "the queue requires a session")

    is_plain_receiver = False

    def end(self) -> None:
        """The connection ends; the service notices that, and releases its session."""
        self._running, self._ended = False, True
        self.session.leave()

    def ask(self, operation: str, execute: Callable[[], Answer], patience: float) -> Answer:
        """One request. Raises the SDK's errors; without an answer the connection has ended."""
        try:
            return self.line.request(
                Service.BUS, operation, execute, place=self.queue, patience=patience
            )
        except Refused as refused:
            kind = ERRORS.get(refused.code, ServiceBusError)
            raise kind(message=f"amqp:{refused.code}: {refused}") from None
        except (Unconnected, Unanswered) as error:
            self.end()
            raise ServiceBusConnectionError(message=str(error)) from None

    def wait_for(self, look: Callable[[], Answer], seconds: float) -> Answer:
        """What `look` finds within so many seconds; it looks at once, and when they have passed."""
        clock = self.line.clock
        until = clock.monotonic() + seconds
        while not (found := look()) and (left := until - clock.monotonic()) > 0:
            clock.sleep(min(self._tick, left))
            if self._ended:
                raise ServiceBusConnectionError(message="the connection was closed")
        return found

    # -- receiving ---------------------------------------------------------------------------

    def pull(self, limit: int, wait: float) -> list[ServiceBusReceivedMessage]:
        """Up to `limit` messages, within `wait` seconds."""

        def execute() -> list[tuple[BusMessage, Message]]:
            return [(each, self._content(each)) for each in self._take(limit)]

        found = self.wait_for(lambda: self.ask("receive", execute, wait + MARGIN), wait)
        self._came_here.update(each.token for each, _ in found if each.token is not None)
        return [self._received(*each) for each in found]

    def _take(self, limit: int) -> list[BusMessage]:
        if self.session.wanted is not None:
            return self.session.take(limit)
        return self.service.receive(self.queue, limit, dead=self.dead, delete=self.delete)

    def receive_deferred_messages(self, numbers: list[int]) -> list[ServiceBusReceivedMessage]:
        def execute() -> list[tuple[BusMessage, Message]]:
            found = self.service.receive_deferred(
                self.queue, numbers, dead=self.dead, delete=self.delete
            )
            return [(each, self._content(each)) for each in found]

        return [self._received(*each) for each in self.ask("deferred", execute, self.seconds)]

    def peek_messages(
        self, max_message_count: int = 1, sequence_number: int = 0, timeout: float | None = None
    ) -> list[ServiceBusReceivedMessage]:
        def execute() -> list[Message]:
            found = self.service.peek(
                self.queue, sequence_number, max_message_count, dead=self.dead
            )
            return [self._content(each, peeks=True) for each in found]

        contents = self.ask("peek", execute, timeout or self.seconds)
        return [self._built(each, is_peeked_message=True) for each in contents]

    def _content(self, message: BusMessage, *, peeks: bool = False) -> Message:
        """The message as the service writes it now."""
        clock = self.service.clock
        annotations: dict[str | bytes, Any] = {
            **(message.content.message_annotations or {}),
            b"x-opt-sequence-number": message.number,
            b"x-opt-enqueued-time": int(message.enqueued_at * 1000),
        }
        if peeks:
            annotations[b"x-opt-message-state"] = int(message.state)
        elif message.token is not None:
            until = clock.wall() + message.until - clock.monotonic()
            annotations[b"x-opt-locked-until"] = int(until * 1000)
        if message.state is not State.SCHEDULED:
            annotations.pop(SCHEDULED_AT, None)
        properties = message.content.application_properties
        if message.why is not None:
            reason, description = (text.encode() for text in message.why)
            properties = {
                **(properties or {}),
                b"DeadLetterReason": reason,
                b"DeadLetterErrorDescription": description,
            }
        header = message.content.header or Header()
        deliveries = message.count if peeks else message.count - 1
        return message.content._replace(
            header=header._replace(delivery_count=deliveries),
            message_annotations=annotations,
            application_properties=properties,
        )

    def _received(self, message: BusMessage, content: Message) -> ServiceBusReceivedMessage:
        return self._built(content, lock_token=message.token)

    def _built(self, content: Message, **options: Any) -> ServiceBusReceivedMessage:
        mode = ServiceBusReceiveMode
        receiver: Any = self
        return ServiceBusReceivedMessage(
            content,
            receive_mode=mode.RECEIVE_AND_DELETE if self.delete else mode.PEEK_LOCK,
            receiver=receiver,
            **options,
        )

    # -- locks -------------------------------------------------------------------------------

    def renew(self, tokens: Sequence[UUID], timeout: float) -> None:
        """Renew these locks in one request."""
        self.ask("renew", lambda: self.service.renew(self.queue, tokens, dead=self.dead), timeout)

    def settle(self, verb: str, tokens: Sequence[UUID], reason: str, description: str) -> None:
        """Settle these messages in one request."""
        why = (reason, description)
        self.ask(
            verb,
            lambda: self.service.settle(self.queue, verb, tokens, why, dead=self.dead),
            self.seconds,
        )

    def release(self, message: ServiceBusReceivedMessage) -> bool:
        """Release a message that came over this link; the service sends no answer."""
        token: Any = message.lock_token
        if not self._running or token not in self._came_here:
            return False
        try:
            self.ask(
                "release",
                lambda: self.service.release(self.queue, token, dead=self.dead),
                self.seconds,
            )
        except ServiceBusConnectionError:
            return False
        except ServiceBusError:
            pass  # the lock was lost: there was no answer to tell it
        return True

    # -- sending -----------------------------------------------------------------------------

    def create_message_batch(self) -> ServiceBusMessageBatch:
        return ServiceBusMessageBatch(max_size_in_bytes=MESSAGE_LIMIT)

    def send_messages(
        self, messages: ServiceBusMessage | ServiceBusMessageBatch, timeout: float
    ) -> None:
        if isinstance(messages, ServiceBusMessageBatch):
            batch: Any = messages
            payloads = [bytes(each) for each in batch._message[5]]
        else:
            payloads = [encoded_message(messages)]
        self.ask("send", lambda: self.service.send(self.queue, payloads), timeout)

    def schedule_messages(
        self, message: ServiceBusMessage, due: datetime, timeout: float
    ) -> list[int]:
        message.scheduled_enqueue_time_utc = due
        payloads = [encoded_message(message)]
        return self.ask("schedule", lambda: self.service.send(self.queue, payloads), timeout)

    def cancel_scheduled_messages(self, number: int, timeout: float) -> None:
        self.ask("cancel", lambda: self.service.cancel(self.queue, number), timeout)


class ModelReceiver(ModelLink):
    """A receiver without a session."""

    is_plain_receiver = True


class ModelSession:
    """The session of a link, as the SDK's receivers have it.

    * `_locked_until_utc`: the end of its lock. The adapter reads and clears that.
    """

    def __init__(self, link: ModelLink, wanted: object, wait: float | None) -> None:
        self.wanted = wanted
        self.session_id = ""
        self._link = link
        self._wait = wait
        self._token = 0
        self._locked_until_utc: datetime | None = None

    def accept(self) -> None:
        """Hold a session. One that is named must be free now; any other one is waited for."""
        link, name = self._link, self.wanted if isinstance(self.wanted, str) else None
        service = link.service

        def execute() -> tuple[str, int, float]:
            held = service.accept(link.queue, name)
            return *held, service.clock.wall() + service.queue(link.queue).settings.lock_seconds

        def look() -> tuple[str, int, float] | None:
            try:
                return link.ask("accept", execute, (self._wait or 0.0) + MARGIN)
            except OperationTimeoutError:
                return None

        found = look() if name is not None else link.wait_for(look, self._wait or 0.0)
        if found is None:
            raise OperationTimeoutError(message="no session is available")
        self.session_id, self._token, until = found
        self._locked_until_utc = datetime.fromtimestamp(until, UTC)

    def take(self, limit: int) -> list[BusMessage]:
        """At the service: the first messages of the session."""
        link = self._link
        return link.service.receive_session(
            link.queue, self.session_id, self._token, limit, link.delete
        )

    def renew_lock(self, timeout: float) -> None:
        link = self._link

        def execute() -> float:
            return link.service.renew_session(link.queue, self.session_id, self._token)

        until = link.ask("renew session", execute, timeout)
        self._locked_until_utc = datetime.fromtimestamp(until, UTC)

    def get_state(self, timeout: float) -> bytes | None:
        link = self._link
        return link.ask(
            "get state",
            lambda: link.service.state(link.queue, self.session_id, self._token),
            timeout,
        )

    def set_state(self, state: bytes | None, timeout: float) -> None:
        link = self._link
        link.ask(
            "set state",
            lambda: link.service.set_state(link.queue, self.session_id, self._token, state),
            timeout,
        )

    def leave(self) -> None:
        """The link has ended: the service releases the session."""
        link, token = self._link, self._token
        self._token = 0
        if token and link.queue in link.service.queues:
            link.service.release_session(link.queue, self.session_id, token)


def encoded_message(message: ServiceBusMessage) -> bytes:
    return bytes(encoded(PyamqpTransport.to_outgoing_amqp_message(message.raw_amqp_message)))
