"""A connection that takes part in an event loop, as Celery's worker has one.

Kombu's connections to Redis and RabbitMQ give their sockets to the loop. The libraries for Service
Bus and Storage have no sockets to give, so threads receive, and ring a descriptor that the loop
waits for.

Rules
1. One thread receives for all consumers of queues, in the turns in which a blocking connection
   receives. Mailboxes have threads of their own (`aztask.celery.transport.boxes`). While more
   messages are known to be there, the loop's thread receives them itself: from a local broker for
   as long as something comes, from a remote one while each receive brings all that it asks for
   without waiting for the network, or with two milliseconds of it at most.
2. Only the loop's thread delivers. It goes on until all is delivered or the loop has something
   else to do: a loop that runs tasks itself (Celery's ``solo``) acknowledges between two of them.
3. The loop's thread waits for a network for one round trip at a time, and only for messages that
   are there; if another worker has taken them by then, it waits for the shortest receive once.
   Settlements of a remote broker are carried out in the background.
4. An error of a receive ends the thread. The loop's thread raises it, as the blocking connection
   does, and Celery connects again.
5. Receiving keeps no stock beside the prefetch count's: the thread receives when everything that it
   received was delivered. Room that comes bit by bit is gathered first, because one receive for
   each message would cost more than the messages (`aztask.celery.transport.connection`).
6. Nothing polls: with nothing to receive for, the thread waits until something changes. A message
   that is held until its time rings by a timer of the loop.
7. The thread and the descriptor belong to the process that registered. A forked child uses neither.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from time import monotonic
from typing import Any, Final, Protocol

from aztask.celery.transport.unacked import Changes

logger = logging.getLogger(__name__)

STOP_SECONDS: Final = 5.0
"""How long closing waits for a receive that is under way; most end within a second."""

MOST: Final = 32
"""Deliveries of one turn of the loop, each of one message of each channel."""

SOONER: Final = 0.001
"""Seconds by which a message must be due before the timer that is set, so that it is set anew."""


class ReceivingConnection(Protocol):
    """The connection that takes part; `aztask.celery.transport.connection.Transport`."""

    changes: Changes

    def receive_once(self) -> bool:
        """Receive for the consumers that may get a message, or wait.

        True if messages came or wait to be delivered. Waiting for a consumer ends when `changes` is
        ended.
        """
        ...

    def receive_now(self) -> bool:
        """Receive on the loop's thread what is known to be there; False if nothing came."""
        ...

    def deliver_round(self) -> bool:
        """Deliver at most one message of each channel; False if there was none."""
        ...

    def seconds_to_due(self) -> float | None:
        """Seconds until a held message is due; None without one."""
        ...


class Bell:
    """Becomes readable when any thread rings, and stays so until the loop's thread silences it.

    A forked child has a copy of the descriptor, through which it would wake its parent: there,
    ringing does nothing.
    """

    def __init__(self) -> None:
        # Sockets, not an eventfd: macOS has none, and the event loop may use `select`.
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._rung = self._closed = False
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._reader.fileno()

    def ring(self) -> None:
        """Make the descriptor readable. Ringing again before it was silenced costs no system call.

        Hand over what the loop shall find before you ring: `silence` comes before it looks.
        """
        # Without the lock in a child: another thread of the parent may have held it at the fork.
        if self._rung or self._pid != os.getpid():
            return
        with self._lock:
            if not self._rung and not self._closed:
                self._rung = True
                self._writer.send(b"\0")

    def silence(self) -> None:
        """Make it unreadable. Look for work after this, not only before: someone may have rung."""
        with self._lock:
            if self._rung:
                self._reader.recv(1)
                self._rung = False

    def wait(self, seconds: float) -> bool:
        """Wait until it rings, at most `seconds`; True if it did."""
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        return bool(poller.poll(max(0.0, seconds) * 1000))

    def close(self) -> None:
        """Close the descriptor; a thread that rings later rings nothing."""
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()


class LoopedConnection:
    """The part of one connection in an event loop of Kombu (`kombu.asynchronous.Hub`)."""

    def __init__(self, connection: ReceivingConnection, loop: Any) -> None:
        self._connection = connection
        self._changes = connection.changes
        self._loop = loop
        self._bell = Bell()
        self._error: BaseException | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._alarm: Any = None
        self._alarm_at = 0.0
        loop.add_reader(self._bell.fileno(), self._on_readable)

    def ring(self) -> None:
        """Have the loop deliver what was received; any thread may call this."""
        self._bell.ring()

    def start(self) -> None:
        """Receive from now on; called when there is a consumer. Idempotent."""
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="aztask-receiver", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for a message, outside of the loop; True if one may be there.

        Raises the error that ended the receiving thread.
        """
        rung = self._bell.wait(seconds)
        if rung:  # a ring that comes just after the wait is for the next one
            self._bell.silence()
        self._raise_error()
        return rung

    def close(self) -> None:
        """Leave the loop, and end the thread: when this returns, it takes no further message.

        If the service does not end a receive within `STOP_SECONDS`, the thread gives back what
        still comes.
        """
        self._stopping = True
        self._changes.end()
        # By its number only if it is still ours: a loop that was reset has forgotten it, and may
        # have given the number to another connection.
        descriptor = self._bell.fileno()
        registered, _ = self._loop.readers.get(descriptor) or (None, ())
        if registered == self._on_readable:
            self._loop.remove_reader(descriptor)
        self._bell.close()
        if self._alarm is not None:
            self._alarm.cancel()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive():
                logger.warning(
                    "a receive did not end within %g s; it is left behind, and gives back what"
                    " still comes",
                    STOP_SECONDS,
                )

    def _run(self) -> None:
        while not self._stopping:
            try:
                received = self._connection.receive_once()
            except BaseException as error:  # the loop's thread raises it
                if self._stopping:
                    logger.debug("a receive ended as the connection was closed", exc_info=True)
                    return
                self._error = error
                self._bell.ring()
                return
            if received:
                self._bell.ring()

    def _on_readable(self) -> None:
        """Called by the loop, again and again until the bell is silenced."""
        self._raise_error()
        for _ in range(MOST):
            if not (self._connection.deliver_round() or self._connection.receive_now()):
                self._bell.silence()
                # What was received between the round and the silence rings no more; and what is
                # left behind a message whose consumer raises has rung before.
                rest = True
                try:
                    rest = self._connection.deliver_round() or self._error is not None
                finally:
                    if rest:
                        self._bell.ring()
                break
            if self._loop_has_work():
                break
        self._set_alarm()

    def _loop_has_work(self) -> bool:
        """True if something waits for the loop: Celery acknowledges there, by ``call_soon``.

        Kombu has no public name for it. Without this one, each turn of the loop delivers once.
        """
        return bool(getattr(self._loop, "_ready", True))

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _set_alarm(self) -> None:
        seconds = self._connection.seconds_to_due()
        if seconds is None:
            return
        at = monotonic() + seconds
        if self._alarm is not None:
            if at > self._alarm_at - SOONER:
                return
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = self._loop.call_later(seconds, self._on_alarm)

    def _on_alarm(self) -> None:
        # A ring, not a delivery: Celery fires timers on another thread while its pool ends.
        self._alarm = None
        self._bell.ring()
