"""All private calls of the SDK that aztask uses, each with its public replacement.

Why private calls: the public ones renew and settle one message per request.

The service's ``$management`` node accepts many lock tokens in one request (documented operations
``com.microsoft:renew-lock`` and ``com.microsoft:update-disposition``), but the Python SDK offers
them for one message at a time. Measured on the emulator with a round trip of 5 ms: 153 settlements
per second one at a time, 5,900 per second with 50 tokens in each request.

Rules
1. `available` checks the SDK once. If a call is missing or has another signature, the public call
   is used, one message at a time: slower, but correct.
2. ``tests/unit/queues/servicebus/test_private.py`` checks everything that this module relies on,
   so an SDK that changes it fails a test.
3. Messages are decoded by our own decoder, see `aztask.queues.servicebus.reading`. With the
   public calls, one message that the SDK cannot decode makes it lose the whole batch.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from io import BytesIO
from itertools import groupby
from typing import Any, Final
from uuid import UUID

from azure.core.exceptions import AzureError
from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiver, ServiceBusSender
from azure.servicebus._pyamqp.cbs import CBSAuthenticator
from azure.servicebus.exceptions import ServiceBusError

from aztask.queues.servicebus.reading import built, decode_answers, decode_here, supported
from aztask.queues.servicebus.symptoms import PYTHON_ERRORS, is_symptom
from aztask.support.parts import Part

logger = logging.getLogger(__name__)

STATUSES: Final = {
    "complete": "completed",
    "abandon": "abandoned",
    "defer": "defered",
    "dead-letter": "suspended",
}
"""Dispositions as the management node spells them, including ``defered``."""

LONGEST_READ: Final = 0.2
"""Seconds between two checks whether another caller needs the connection."""

GATHER: Final = 0.004
"""After this many seconds without another message, a receive returns fewer than its limit."""

READ_AHEAD: Final = 65_536
"""Bytes that one system call may read; the SDK alone makes two for each frame."""


WATCHDOG: Final = Part("connection watchdog")
KEEP_ALIVE: Final = Part("keeping connections alive")


@cache
def available() -> bool:
    """Whether this SDK has the private calls with the signatures that this module needs."""
    needed = {
        "_settle_message_via_mgmt_link": ["self", "settlement", "lock_tokens"],
        "_renew_locks": ["self", "lock_tokens", "kwargs"],
        "_open": ["self", "timeout"],
    }
    for name, parameters in needed.items():
        function = getattr(ServiceBusReceiver, name, None)
        if function is None:
            return False
        if list(inspect.signature(function).parameters)[: len(parameters)] != parameters:
            return False
    return hasattr(ServiceBusReceiver, "_close_handler") and supported()


@contextlib.contextmanager
def _translated(handler: ServiceBusReceiver | ServiceBusSender) -> Iterator[None]:
    """Raise errors of the SDK's AMQP layer as the SDK's public errors."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # its AMQP layer may raise any error
        link: Any = handler
        raise link._handle_exception(error) from None  # bugs as they are, see `symptoms`


@contextlib.contextmanager
def _receiving(link: Any) -> Iterator[None]:
    """Mark the link as being read, so that the SDK's keep-alive thread does not read from it."""
    link._receive_context.set()
    try:
        yield
    finally:
        link._receive_context.clear()


def settle_many(
    receiver: ServiceBusReceiver, verb: str, tokens: Sequence[UUID], reason: str, description: str
) -> None:
    """Settle all in one request; raises if one of them failed."""
    details = (
        {"deadletter-reason": reason, "deadletter-description": description}
        if verb == "dead-letter"
        else None
    )
    with _translated(receiver):
        receiver._settle_message_via_mgmt_link(
            STATUSES[verb], list(tokens), dead_letter_details=details
        )


def renew_many(receiver: ServiceBusReceiver, tokens: Sequence[UUID], timeout: float) -> None:
    """Renew all in one request; raises if one of them failed."""
    texts: Any = tokens  # annotated as str, but the wire format needs UUIDs
    receiver._renew_locks(*texts, timeout=timeout)


def settle_one(
    receiver: ServiceBusReceiver,
    verb: str,
    message: ServiceBusReceivedMessage,
    reason: str,
    description: str,
) -> None:
    """Settle one message with the SDK's public calls, if `available` is False.

    These calls compare the lock's end with this machine's clock. If the clock is far ahead of the
    service's, every lock looks lost.
    """
    if verb == "complete":
        receiver.complete_message(message)
    elif verb == "abandon":
        receiver.abandon_message(message)
    elif verb == "defer":
        receiver.defer_message(message)
    else:
        receiver.dead_letter_message(message, reason=reason, error_description=description)


def pull(
    receiver: ServiceBusReceiver,
    limit: int,
    wait: float,
    stop: Callable[[], bool] = lambda: False,
) -> list[Any]:
    """Receive up to `limit` messages: wait `wait` seconds for the first, and `GATHER` for others.

    stop: whether another caller needs the connection; called every `LONGEST_READ` seconds.

    When this returns, the service has no credit left, so it sends no message that no caller waits
    for. The next pull reads a message that is on its way at that instant; otherwise the SDK's
    keep-alive thread gives it back within five seconds. The public call, used if `available` is
    False, waits 200 ms for the rest of a batch.
    """
    if not available():
        return list(receiver.receive_messages(limit, max_wait_time=wait))
    link: Any = receiver
    with _translated(link), _receiving(link):
        handler = link._handler
        arrived = handler._received_messages
        missing = limit - arrived.qsize()
        if missing > 0:
            link._amqp_transport.reset_link_credit(handler, missing)
            _read(link, arrived, limit, wait, stop)
            if arrived.qsize() < limit and handler._link.current_link_credit > 0:
                link._amqp_transport.reset_link_credit(handler, 0)
        return [built(link, *arrived.get_nowait()) for _ in range(min(limit, arrived.qsize()))]


def _read(receiver: Any, arrived: Any, limit: int, wait: float, stop: Callable[[], bool]) -> None:
    """Read frames into `arrived`.

    The SDK's own read blocks for 200 ms if nothing comes, so this checks the socket first.
    """
    handler = receiver._handler
    handler.client_ready()  # refreshes the token when it is time
    transport, connected = _transport_of(receiver), _socket_of(receiver) is not None
    until = time.monotonic() + wait
    while (count := arrived.qsize()) < limit:
        left = until - time.monotonic()
        if not _arrived(transport, GATHER if count else max(0.0, min(LONGEST_READ, left))):
            if count or left <= 0 or stop():
                return
        elif not handler.do_work():
            raise ConnectionError("the connection was closed")
        elif not connected and (left <= 0 or stop()):
            return


def _arrived(transport: Any, wait: float) -> bool:
    """Whether there is something to read within `wait` seconds; True if only a read can tell.

    * `transport`: the SDK's; what has arrived is in its buffer then.
    """
    sock = getattr(transport, "sock", None)
    if not isinstance(sock, socket.socket) or _ahead(transport):
        return True
    if not (isinstance(sock, ssl.SSLSocket) and sock.pending()):
        try:
            if not select.select([sock], [], [], wait)[0]:
                return False
        except ValueError:
            if sock.fileno() < 0:  # another thread closed the connection
                raise ConnectionError("the connection was closed") from None
            raise
    _read_ahead(transport, sock)
    return True


def _ahead(transport: Any) -> bool:
    """Whether the SDK's buffer has bytes that were read before."""
    buffer = getattr(transport, "_read_buffer", None)
    return buffer is not None and buffer.tell() < buffer.getbuffer().nbytes


def _read_ahead(transport: Any, sock: socket.socket) -> None:
    """Fill the SDK's buffer with what has arrived, which is often more than one frame.

    The SDK reads from this buffer first. What it finds at the end of a connection, or instead of
    data, it finds by itself.
    """
    if getattr(transport, "_read_buffer", None) is None:  # another SDK's, which reads for itself
        return
    with transport.socket_lock:
        if not _ahead(transport):
            with contextlib.suppress(OSError):
                transport._read_buffer = BytesIO(sock.recv(READ_AHEAD))


def open_link(handler: ServiceBusReceiver | ServiceBusSender, timeout: float) -> None:
    """Connect now, within `timeout` seconds.

    The SDK's SASL handshake reads without a time-out ([seen] azure-servicebus 7.15: a server that
    accepts the connection and stays silent blocks it forever), so a timer shuts the socket down.
    Closing would wait up to a second for the keep-alive thread, even after a failed request, so
    this removes the reference to that thread; it ends by itself. The thread runs `keep_alive`.
    """
    link: Any = handler
    create = link._create_handler

    def created(auth: Any) -> None:
        create(auth)
        if hasattr(link._handler, "_keep_alive"):
            link._handler._keep_alive = partial(_keep_alive, handler)

    link._create_handler = created
    watchdog = WATCHDOG.alarm(timeout, end, handler)
    try:
        with _translated(link):
            link._open(timeout)
            if getattr(link._handler, "_keep_alive_thread", None) is not None:
                link._handler._keep_alive_thread = None
            decode_here(link._handler._link)
    finally:
        watchdog.cancel()
        link._create_handler = create


def _keep_alive(handler: ServiceBusReceiver | ServiceBusSender) -> None:
    threading.current_thread().name = "aztask-keep-alive"
    KEEP_ALIVE.adopt()
    KEEP_ALIVE.run(lambda: keep_alive(handler))


def keep_alive(
    handler: ServiceBusReceiver | ServiceBusSender, pause: Callable[[float], object] = time.sleep
) -> None:
    """Keep an open connection alive: what the SDK's thread does, without its wait.

    The SDK's own thread reads every few seconds, and holds the connection for 200 ms if nothing
    comes ([seen] azure-servicebus 7.15). A settlement or a receive waited for that long. This reads
    only what is there, and otherwise only sends the heartbeat when it is due.
    """
    client: Any = handler._handler
    connection, read_at = client._connection, time.monotonic()
    while client._connection is connection and not client._shutdown:
        KEEP_ALIVE.rest()
        pause(1.0)
        KEEP_ALIVE.begin()
        if time.monotonic() - read_at < client._keep_alive_interval:
            continue
        read_at = time.monotonic()
        credit = getattr(client._link, "current_link_credit", 0)
        try:
            connection.listen(batch=credit if has_unread(handler) else 0)
        except Exception as error:  # the next caller of the connection gets its error
            if isinstance(error, PYTHON_ERRORS) and not is_symptom(error, handler):
                logger.exception("a connection was not kept alive because of an unexpected error")
            return


def end(handler: ServiceBusReceiver | ServiceBusSender) -> None:
    """Shut down both directions of the connection: every reader and writer gets an error."""
    sock = _wire_of(handler)
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def is_open(handler: ServiceBusReceiver | ServiceBusSender) -> bool:
    """Whether the link was opened and has not been closed since."""
    return bool(getattr(handler, "_running", False))


def close(handler: ServiceBusReceiver | ServiceBusSender) -> None:
    """Close the link politely, and close its socket even if that fails.

    If the AMQP close fails, the SDK leaves the socket to the garbage collector, because
    ``Connection.close`` sets a state that ``_disconnect`` mistakes for closed. Until then the
    service would keep the connection and its leased messages. Raises the SDK's errors.
    """
    sock = _wire_of(handler)
    try:
        handler.close()
    finally:
        if sock is not None:
            with contextlib.suppress(OSError):  # the keep-alive thread may be reading: it holds on
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def disconnect(handler: ServiceBusReceiver | ServiceBusSender) -> None:
    """Close the connection of a link, even if it is broken. Raises nothing."""
    link: Any = handler
    sock = _wire_of(handler)
    end(handler)  # so that the SDK's AMQP close fails at once instead of waiting
    with contextlib.suppress(Exception):  # the connection is given up: errors do not matter
        link._close_handler()
    link._running = False
    if sock is not None:
        sock.close()


def has_unread(handler: ServiceBusReceiver | ServiceBusSender) -> bool:
    """Whether an idle connection has unread data: a close, a detached link, a heartbeat."""
    return _socket_of(handler) is None or _arrived(_transport_of(handler), 0.0)


def _transport_of(handler: Any) -> Any:
    """The SDK's transport of the connection; None if it is not connected."""
    inner = getattr(handler, "_handler", None)
    return getattr(getattr(inner, "_connection", None), "_transport", None)


def _socket_of(handler: Any) -> socket.socket | None:
    """The connection's socket; None if it is not connected, or uses a WebSocket."""
    sock = getattr(_transport_of(handler), "sock", None)
    return sock if isinstance(sock, socket.socket) and sock.fileno() >= 0 else None


def _wire_of(handler: ServiceBusReceiver | ServiceBusSender) -> socket.socket | None:
    """The TCP socket, also underneath a WebSocket.

    Use it only to end the connection: a WebSocket reads ahead, so this socket may look empty.
    """
    sock = getattr(_transport_of(handler), "sock", None)
    sock = sock if isinstance(sock, socket.socket) else getattr(sock, "sock", None)
    return sock if isinstance(sock, socket.socket) and sock.fileno() >= 0 else None


def peek_over(
    sender: ServiceBusSender, receiver: ServiceBusReceiver, start: int, limit: int, timeout: float
) -> list[ServiceBusReceivedMessage]:
    """Peek for `receiver`, which stays unconnected, over the sender's connection.

    This works because the management node belongs to the queue, not to the link.
    """
    lender: Any = sender
    borrower = decode_answers(receiver, lender._mgmt_request_response_with_retry)
    return borrower.peek_messages(max_message_count=limit, sequence_number=start, timeout=timeout)


def session_locked_until(receiver: ServiceBusReceiver) -> float | None:
    """When the lock of the receiver's session ends, UTC epoch seconds of the service's clock.

    This also clears the time in the SDK. The SDK would compare it with this machine's clock; if
    that clock is ahead by more than the lock, it reports every session as lost ([seen] 7.15).
    """
    session: Any = receiver.session
    locked_until = getattr(session, "_locked_until_utc", None)
    if locked_until is None:
        return None
    session._locked_until_utc = None
    return float(locked_until.timestamp())


def arrival(message: ServiceBusReceivedMessage | None) -> tuple[int, bytes] | None:
    """(delivery id, delivery tag) on the message's link; None if it did not come over a link."""
    number = getattr(message, "_delivery_id", None)
    tag = getattr(message, "_delivery_tag", None)
    return (number, tag) if isinstance(number, int) and isinstance(tag, bytes) else None


def forget(receiver: ServiceBusReceiver, deliveries: Sequence[tuple[int, bytes]]) -> None:
    """Tell both ends of the link that these deliveries were settled over another link.

    deliveries: (delivery id, delivery tag); those of other links are skipped.

    Without this, both ends remember every delivery of the link until it closes. The frame is a
    settled disposition without an outcome (AMQP 1.0, 2.6.12): it does not change the message, and
    it gets no answer.
    """
    link: Any = getattr(getattr(receiver, "_handler", None), "_link", None)
    tags = getattr(link, "_received_delivery_tags", None)
    if not available() or tags is None:
        return
    ours = sorted({(number, tag) for number, tag in deliveries if tag in tags})
    for _, run in groupby(enumerate(ours), key=lambda item: item[1][0] - item[0]):
        numbers = [each for _, each in run]
        with _translated(receiver):
            link._outgoing_disposition(
                first=numbers[0][0],
                last=numbers[-1][0],
                delivery_tag=numbers[0][1],
                settled=True,
                state=None,
                batchable=None,
            )
        tags.difference_update(tag for _, tag in numbers)


def release(receiver: ServiceBusReceiver, message: ServiceBusReceivedMessage | None) -> bool:
    """Release a message over the link that it came on, without counting the delivery.

    Returns False if the message did not come over this link, or the link failed. The service sends
    no answer.
    """
    handler = getattr(receiver, "_handler", None)
    link = getattr(handler, "_link", None)
    tag = getattr(message, "_delivery_tag", None)
    if not is_open(receiver) or tag not in getattr(link, "_received_delivery_tags", ()):
        return False
    try:
        with _translated(receiver):
            handler.settle_messages(message._delivery_id, tag, "released")  # type: ignore[union-attr]
    except (AzureError, OSError):  # the link failed: the caller abandons the message
        return False
    return True


@cache
def keep_refusals() -> bool:
    """Make the SDK keep the status with which the service refuses a token.

    For a missing queue the service refuses the token with status 404. The SDK raises the same error
    as for a wrong key, and drops the status ([seen] azure-servicebus 7.15). Returns False if the
    SDK has another signature; then a missing queue is reported as refused access.
    """
    original: Any = getattr(CBSAuthenticator, "_on_execute_operation_complete", None)
    if original is None or list(inspect.signature(original).parameters) != _STATUS_PARAMETERS:
        return False

    def kept(
        self: Any, result: Any, status: Any, text: Any, message: Any, condition: Any = None
    ) -> None:
        original(self, result, status, text, message, condition)
        if condition:
            self._token_status_code, self._token_status_description = status, text

    authenticator: Any = CBSAuthenticator
    authenticator._on_execute_operation_complete = kept
    return True


_STATUS_PARAMETERS: Final = [
    *("self", "execute_operation_result", "status_code", "status_description", "_"),
    "error_condition",
]


def refused_status(error: ServiceBusError) -> int | None:
    """The status with which the service refused a token; None if unknown."""
    status = getattr(getattr(error, "inner_exception", None), "status_code", None)
    return status if isinstance(status, int) else None
