"""The local broker: the broker protocol over the embedded engine, for one machine.

Rules
1. A queue is created by the first send to it or the first receiver of it. A name that is not
   allowed is refused, never rewritten.
2. Nothing waits for a network, but several processes may share the file. A waiting receiver is
   woken by every write to the file; then it checks the file's change counter.
3. An envelope's expiry travels in the envelope, and the worker checks it. Only a queue's own time
   to live makes the engine move messages to the dead letters.
4. The caller opened the database and closes it: closing the broker leaves it open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from aztask.address.owner import file_name
from aztask.errors import QueueNotFound
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    MessageState,
    Peeked,
    Position,
    QueueOptions,
    QueueStats,
    Receiver,
    ReceiverOptions,
)
from aztask.queues.engine import Database, Engine, PeekedMessage, QueueSettings
from aztask.queues.local.inspection import LocalInspector
from aztask.queues.local.kind import KIND
from aztask.queues.local.mailboxes import LocalMailboxes
from aztask.queues.local.payload import MESSAGE_LIMIT, envelope_of, new_message, payload_of
from aztask.queues.local.receiver import LocalReceiver, WakeUp, sequence_number
from aztask.queues.local.session import SessionReceiver
from aztask.queues.skeleton import BrokerSkeleton
from aztask.support.clock import SYSTEM_CLOCK, Clock

DEFAULTS: Final = QueueSettings(max_deliveries=1000, dead_letter_expired=True)
"""High limits: aztask has its own delivery limit, which is lower and gives a clearer reason."""

MAILBOX_LEASE: Final = 60.0


class LocalBroker(BrokerSkeleton):
    """Queues in `database`. Any thread may call; other processes may use the same file.

    clock: injected in tests. Raises the errors of the engine (`aztask.queues.engine.engine`, rule
    3).
    """

    title = "local queue"

    def __init__(self, database: Database, *, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(KIND)
        self.engine = Engine(database, clock=clock)
        self._database = database
        self._clock = clock
        self._wakeups: dict[str, WakeUp] = {}
        self._ensured: set[str] = set()
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """The broker's name for `aztask.address.owner`: the id that the file holds."""
        return file_name(self._database.file_id())

    def _declare(self, queue: str, options: QueueOptions) -> None:
        with self._database.transaction():
            if self.engine.create_queue(queue, replace(DEFAULTS, **_changes(options))):
                return
            if changes := _changes(options.explicit()):
                self.engine.update_queue(queue, replace(self.engine.queue(queue), **changes))

    def _delete(self, queue: str) -> None:
        self.engine.delete_queue(queue)
        self._ensured.discard(queue)

    def _names(self) -> list[str]:
        return self.engine.queues()  # an emulator may have created some of them

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Store all envelopes or none; when this returns, they are in the file."""
        self._usable()
        now = self._clock.wall()
        messages = [new_message(envelope, envelope.delay, now) for envelope in envelopes]
        if queue not in self._ensured:  # asked here too, because most queues are known
            self._ensure(queue, sessions=_in_sessions(envelopes))
        try:
            self.engine.send(queue, messages)
        except QueueNotFound:  # another process deleted it since
            self._ensured.discard(queue)
            self._ensure(queue, sessions=_in_sessions(envelopes))
            self.engine.send(queue, messages)
        self._database.at_end(self.wakeup(queue).notify)

    def check(self, envelope: Envelope, *, reserve: int = 0) -> None:
        """Refuse an envelope that could not be stored; see `Broker.check`."""
        payload_of(envelope, MESSAGE_LIMIT - reserve)

    def _cancel_scheduled(self, queue: str, message_ids: Sequence[str]) -> int:
        return len(self.engine.cancel_scheduled_ids(queue, message_ids))

    def _receiver(self, options: ReceiverOptions, poll_ceiling: float | None) -> Receiver:
        """A missing queue is created, with sessions if the options name one."""
        session, queue = options.session, options.queue
        self._ensure(queue, sessions=session is not None)
        kind = LocalReceiver if session is None or options.dead_letter else SessionReceiver
        return kind(self.engine, self.wakeup(queue), options)

    def _stats(self, queue: str) -> QueueStats:
        return QueueStats(queue, *self.engine.stats(queue))

    def _peek(
        self, queue: str, dead_letter: bool, after: Position | None, limit: int
    ) -> list[Peeked]:
        start = 0 if after is None else sequence_number(after) + 1
        return [
            _peeked(message)
            for message in self.engine.peek(queue, start, limit, dead_letter=dead_letter)
        ]

    def _purge(self, queue: str, dead_letter: bool) -> int:
        return self.engine.purge(queue, dead_letter=dead_letter)

    def inspector(self) -> LocalInspector:
        """The inspector that ``aztask doctor`` and a starting worker use."""
        self._usable()
        return LocalInspector(self.engine)

    def mailboxes(self) -> LocalMailboxes:
        """The mailboxes of this file."""
        self._usable()

        def receiver(queue: str, delete: bool) -> Receiver:
            return self.receiver(queue, lease=MAILBOX_LEASE, delete=delete)

        return LocalMailboxes(self._database, self.engine, self.send, receiver)

    def _close(self) -> None:
        for wakeup in list(self._wakeups.values()):
            wakeup.close()

    @property
    def transaction_key(self) -> str:
        """The same for all brokers and stores of one file."""
        return self._database.key

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything that this thread does inside is committed together or not at all. Nests."""
        with self._database.transaction():
            yield

    def wakeup(self, queue: str) -> WakeUp:
        """The object that wakes this process's receivers of the queue."""
        wakeup = self._wakeups.get(queue)
        if wakeup is None:
            # Outside the lock, because it may take the database's: a send inside a transaction
            # holds that one already.
            made = WakeUp(self._database.watch)
            with self._lock:
                wakeup = self._wakeups.setdefault(queue, made)
        return wakeup

    def _ensure(self, queue: str, *, sessions: bool = False) -> None:
        if queue not in self._ensured:
            self.check_name(queue)
            self.engine.create_queue(queue, replace(DEFAULTS, sessions=sessions))
            self._ensured.add(queue)


def _in_sessions(envelopes: Sequence[Envelope]) -> bool:
    """Whether a queue created by this send has sessions: only if all envelopes name one."""
    return all(envelope.session is not None for envelope in envelopes) and bool(envelopes)


def _changes(options: QueueOptions) -> dict[str, Any]:
    """The given options as fields of the engine's `QueueSettings`."""
    given = {
        "lease_seconds": options.lease,
        "duplicate_window": options.duplicate_window,
        "max_deliveries": options.max_deliveries,
        "time_to_live": options.time_to_live,
        "sessions": options.sessions,
    }
    return {name: value for name, value in given.items() if value is not None}


def _peeked(message: PeekedMessage) -> Peeked:
    return Peeked(
        envelope_of(message.payload),
        message.seq,
        MessageState(message.state),
        message.delivery_count,
        message.enqueued_at,
        message.due,
        message.reason,
        message.description,
    )
