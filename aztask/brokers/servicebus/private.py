"""The private calls of the SDK that aztask uses, all of them, each with its public replacement.

The service's ``$management`` node takes many lock tokens in one request (documented operations
``com.microsoft:renew-lock`` and ``com.microsoft:update-disposition``), but the Python SDK offers
them for one message at a time. Measured on the emulator with 5 ms round trip: one settlement at a
time 153/s, 50 tokens in each request 5,900/s.

Rules
1. `available` probes the SDK once. Where a call is missing or has another shape, the public call is
   used, one message at a time: slower, but right.
2. ``tests/unit/brokers/servicebus/test_private.py`` pins what is relied on, so that a new SDK that
   changes it is found by a failing test.
3. Messages are decoded by our own decoder, see `aztask.brokers.servicebus.reading`. With the
   public calls, a message that the SDK cannot decode costs its batch.
"""

from __future__ import annotations

import contextlib
import inspect
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, Final
from uuid import UUID

from azure.servicebus import ServiceBusReceivedMessage, ServiceBusReceiver, ServiceBusSender
from azure.servicebus._pyamqp.cbs import CBSAuthenticator
from azure.servicebus.exceptions import ServiceBusError

from aztask.brokers.servicebus.reading import built, decode_answers, decode_here, supported

STATUSES: Final = {
    "complete": "completed",
    "abandon": "abandoned",
    "defer": "defered",
    "dead-letter": "suspended",
}
"""Dispositions as the management node spells them, ``defered`` included."""

LONGEST_READ: Final = 0.2
"""Seconds between two looks at whether somebody else needs the connection."""

GATHER: Final = 0.004
"""Seconds without another message after which a receive is content with fewer than it asked for."""


@cache
def available() -> bool:
    """Whether this SDK has the private calls in the shape that is used here."""
    wanted = {
        "_settle_message_via_mgmt_link": ["self", "settlement", "lock_tokens"],
        "_renew_locks": ["self", "lock_tokens", "kwargs"],
        "_open": ["self", "timeout"],
    }
    for name, parameters in wanted.items():
        function = getattr(ServiceBusReceiver, name, None)
        if function is None:
            return False
        if list(inspect.signature(function).parameters)[: len(parameters)] != parameters:
            return False
    return hasattr(ServiceBusReceiver, "_close_handler") and supported()


@contextlib.contextmanager
def _translated(handler: ServiceBusReceiver | ServiceBusSender) -> Iterator[None]:
    """Errors of the SDK's AMQP layer leave as the SDK's public ones, which it makes of them."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # whichever its AMQP layer raises
        link: Any = handler
        raise link._handle_exception(error) from None


@contextlib.contextmanager
def _receiving(link: Any) -> Iterator[None]:
    """Marks that somebody reads: the SDK's keep-alive thread leaves the connection alone."""
    link._receive_context.set()
    try:
        yield
    finally:
        link._receive_context.clear()


def settle_many(
    receiver: ServiceBusReceiver, verb: str, tokens: Sequence[UUID], reason: str, description: str
) -> None:
    """One request for all; raises if one of them failed."""
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
    """One request for all; raises if one of them failed."""
    texts: Any = tokens  # the annotation says str; uuids are what the wire wants
    receiver._renew_locks(*texts, timeout=timeout)


def settle_one(
    receiver: ServiceBusReceiver,
    verb: str,
    message: ServiceBusReceivedMessage,
    reason: str,
    description: str,
) -> None:
    """The public calls, where `available` says no. They compare the lock's end with this machine's
    clock, so there a clock that is far ahead of the service's makes every lock look lost.
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
    """Up to `limit` messages: what comes within `wait` seconds, and right after the first.

    stop: whether somebody else needs the connection; asked every `LONGEST_READ` seconds.

    On return no credit is left with the service, so nothing is sent that nobody waits for. (What is
    under way at that instant is read by the next pull, or given back by the SDK's keep-alive thread
    within five seconds.) The public call, used where `available` says no, waits 200 ms for the rest
    of a batch.
    """
    if not available():
        return list(receiver.receive_messages(limit, max_wait_time=wait))
    link: Any = receiver
    with _translated(link), _receiving(link):
        handler = link._handler
        arrived = handler._received_messages
        wanted = limit - arrived.qsize()
        if wanted > 0:
            link._amqp_transport.reset_link_credit(handler, wanted)
            _read(link, arrived, limit, wait, stop)
            if arrived.qsize() < limit and handler._link.current_link_credit > 0:
                link._amqp_transport.reset_link_credit(handler, 0)
        return [built(link, *arrived.get_nowait()) for _ in range(min(limit, arrived.qsize()))]


def _read(receiver: Any, arrived: Any, limit: int, wait: float, stop: Callable[[], bool]) -> None:
    """Read frames into `arrived`. The SDK's own read blocks for 200 ms when nothing comes, so the
    socket is asked first.
    """
    handler = receiver._handler
    handler.client_ready()  # refreshes the token when it is time
    sock = _socket_of(receiver)
    until = time.monotonic() + wait
    while (count := arrived.qsize()) < limit:
        left = until - time.monotonic()
        if not _readable(sock, GATHER if count else max(0.0, min(LONGEST_READ, left))):
            if count or left <= 0 or stop():
                return
        elif not handler.do_work():
            raise ConnectionError("the connection was closed")
        elif sock is None and (left <= 0 or stop()):
            return


def _readable(sock: socket.socket | None, wait: float) -> bool:
    """Whether there is something to read within `wait` seconds; True where only reading tells."""
    if sock is None or (isinstance(sock, ssl.SSLSocket) and sock.pending()):
        return True
    return bool(select.select([sock], [], [], wait)[0])


def open_link(handler: ServiceBusReceiver | ServiceBusSender, timeout: float) -> None:
    """Connect now, within `timeout` seconds.

    The SDK's SASL handshake reads without any time-out ([seen] azure-servicebus 7.15: a server that
    takes the connection and says nothing holds it for ever), so the socket is ended from outside.
    Closing would wait up to a second for the keep-alive thread, also in the middle of a request
    that failed: it is not told of that thread, which ends by itself.
    """
    link: Any = handler
    watchdog = threading.Timer(timeout, end, [handler])
    watchdog.daemon = True
    watchdog.start()
    try:
        with _translated(link):
            link._open(timeout)
            if getattr(link._handler, "_keep_alive_thread", None) is not None:
                link._handler._keep_alive_thread = None
            decode_here(link._handler._link)
    finally:
        watchdog.cancel()


def end(handler: ServiceBusReceiver | ServiceBusSender) -> None:
    """End both directions of the connection, so that whoever reads or writes gets an error."""
    sock = _wire_of(handler)
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def is_open(handler: ServiceBusReceiver | ServiceBusSender) -> bool:
    """Whether it was opened and not closed since."""
    return bool(getattr(handler, "_running", False))


def close(handler: ServiceBusReceiver | ServiceBusSender) -> None:
    """Say goodbye, and close the connection whatever comes of that.

    The SDK leaves the socket to the garbage collector when the goodbye fails: ``Connection.close``
    then sets the state by which ``_disconnect`` takes it for closed. The service would see the
    connection, and hold what was received over it, for as long. Raises the SDK's errors.
    """
    sock = _wire_of(handler)
    try:
        handler.close()
    finally:
        if sock is not None:
            sock.close()


def disconnect(handler: ServiceBusReceiver | ServiceBusSender) -> None:
    """Close its connection, however broken it is."""
    link: Any = handler
    sock = _wire_of(handler)
    end(handler)  # so that the SDK's polite goodbyes fail at once instead of waiting
    with contextlib.suppress(Exception):  # it is given up: how it ends does not matter
        link._close_handler()
    link._running = False
    if sock is not None:
        sock.close()


def has_unread(handler: ServiceBusReceiver | ServiceBusSender) -> bool:
    """Whether an idle connection has something to read: its end, a detached link, a heartbeat."""
    sock = _socket_of(handler)
    return sock is None or _readable(sock, 0.0)


def _socket_of(handler: ServiceBusReceiver | ServiceBusSender) -> socket.socket | None:
    """The connection's socket, None where there is none (any more)."""
    inner = getattr(handler, "_handler", None)
    transport = getattr(getattr(inner, "_connection", None), "_transport", None)
    sock = getattr(transport, "sock", None)
    return sock if isinstance(sock, socket.socket) and sock.fileno() >= 0 else None


def _wire_of(handler: ServiceBusReceiver | ServiceBusSender) -> socket.socket | None:
    """The socket underneath, also of a WebSocket: good for ending it, not for asking it whether
    there is something to read, since a WebSocket reads ahead.
    """
    inner = getattr(handler, "_handler", None)
    transport = getattr(getattr(inner, "_connection", None), "_transport", None)
    sock = getattr(transport, "sock", None)
    sock = sock if isinstance(sock, socket.socket) else getattr(sock, "sock", None)
    return sock if isinstance(sock, socket.socket) and sock.fileno() >= 0 else None


def peek_over(
    sender: ServiceBusSender, receiver: ServiceBusReceiver, start: int, limit: int, timeout: float
) -> list[ServiceBusReceivedMessage]:
    """What `receiver`, which stays unconnected, would peek, asked for over the sender's connection.

    The management node is the queue's, whichever link it is opened beside.
    """
    lender: Any = sender
    borrower = decode_answers(receiver, lender._mgmt_request_response_with_retry)
    return borrower.peek_messages(max_message_count=limit, sequence_number=start, timeout=timeout)


def session_locked_until(receiver: ServiceBusReceiver) -> float | None:
    """When the lock of its session ends, UTC epoch seconds of the service's clock.

    The SDK forgets it here: it would compare it with this machine's clock, and with one that is
    ahead by more than the lock it would take every session for lost ([seen] 7.15).
    """
    session: Any = receiver.session
    locked_until = getattr(session, "_locked_until_utc", None)
    if locked_until is None:
        return None
    session._locked_until_utc = None
    return float(locked_until.timestamp())


def arrival(message: ServiceBusReceivedMessage | None) -> tuple[int, bytes] | None:
    """(delivery id, delivery tag) on the link that it came on; None for one that came otherwise."""
    number = getattr(message, "_delivery_id", None)
    tag = getattr(message, "_delivery_tag", None)
    return (number, tag) if isinstance(number, int) and isinstance(tag, bytes) else None


def forget(receiver: ServiceBusReceiver, deliveries: Sequence[tuple[int, bytes]]) -> None:
    """Tell the link, and the service's end of it, that these were settled over another one.

    deliveries: (delivery id, delivery tag); those of another link are left out. Without this both
    ends keep every delivery of a link for as long as it lives. It is a disposition that is settled
    and says no outcome (AMQP 1.0, 2.6.12): it changes nothing of the message, and gets no answer.
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
    """Give a message back, uncounted, by the link that it came on; False where it did not.

    The service sends no answer to it.
    """
    handler = getattr(receiver, "_handler", None)
    link = getattr(handler, "_link", None)
    tag = getattr(message, "_delivery_tag", None)
    if not is_open(receiver) or tag not in getattr(link, "_received_delivery_tags", ()):
        return False
    try:
        handler.settle_messages(message._delivery_id, tag, "released")  # type: ignore[union-attr]
    except Exception:  # noqa: BLE001  # the SDK raises errors of its AMQP layer: then it is abandoned
        return False
    return True


@cache
def keep_refusals() -> bool:
    """Make the SDK keep the status with which the service refuses a token.

    The service refuses a token for a queue that does not exist with status 404. The SDK raises the
    same error for it as for a wrong key, and drops the status ([seen] azure-servicebus 7.15).
    Returns False where the SDK has another shape: then a missing queue is reported as refused
    access.
    """
    original: Any = getattr(CBSAuthenticator, "_on_execute_operation_complete", None)
    if original is None or list(inspect.signature(original).parameters) != _TOLD:
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


_TOLD: Final = [
    *("self", "execute_operation_result", "status_code", "status_description", "_"),
    "error_condition",
]


def refused_status(error: ServiceBusError) -> int | None:
    """The status with which the service refused a token; None where it is not known."""
    status = getattr(getattr(error, "inner_exception", None), "status_code", None)
    return status if isinstance(status, int) else None
