"""Sends messages to a queue, with duplicate detection, and cancels scheduled ones.

Rules
1. A send is one transaction: if it returns, all its messages are in the file; if it raises, none of
   them is. Sequence numbers rise in the order of the messages.
2. The duplicate window starts with the first send of an id, even if that message is already gone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from aztask.errors import ConfigurationError
from aztask.queues.engine.messages import DUPLICATE, READY, SCHEDULED, NewMessage
from aztask.queues.engine.queues import BatchStatement, Queue, QueueTable, Row

_COLUMNS = "state, moment, enqueued_at, expires_at, message_id, session, payload, box"
_ROW = "(?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT = f"INSERT INTO messages ({_COLUMNS}) VALUES {_ROW}"
_INSERT_ALL = BatchStatement(_INSERT, f"INSERT INTO messages ({_COLUMNS}) VALUES {{rows}}", _ROW)
_INSERT_DEAD = (
    "INSERT INTO messages (state, enqueued_at, message_id, session, payload, box, reason, "
    f"description) VALUES ({READY}, ?, ?, ?, ?, ?, ?, ?)"
)
_INSERT_CHECKED = (
    f"INSERT INTO messages ({_COLUMNS}) "
    "SELECT ?, ?, ?, ?, ?, ?, ?, id FROM queues WHERE id = ? AND revision = ?"
)
_REMEMBER = (
    "INSERT INTO seen (box, message_id, until) VALUES (?, ?, ?) ON CONFLICT (box, message_id) "
    "DO UPDATE SET until = excluded.until WHERE until <= ?"
)
_FORGET_LIMIT: Final = 1000
_FORGET = (
    "DELETE FROM seen WHERE box = ? AND message_id IN (SELECT message_id FROM seen "
    f"WHERE box = ? AND until <= ? LIMIT {_FORGET_LIMIT})"
)
_CANCEL = f"WHERE box = ? AND state = {SCHEDULED} AND moment > ? AND"
# Without the name of its index, SQLite reads all that the queue has scheduled.
_CANCEL_ID = f"DELETE FROM messages INDEXED BY messages_scheduled {_CANCEL} message_id = ?"


class EngineSending:
    """The part of the engine that stores new messages, and cancels scheduled ones."""

    def __init__(self, queues: QueueTable) -> None:
        self._queues = queues
        self._database = queues.database
        self._clock = queues.clock

    def send(self, queue: str, messages: Sequence[NewMessage]) -> list[int]:
        """Store the messages; returns their sequence numbers, and `DUPLICATE` for dropped ones.

        Use a scheduled message's number only to cancel it: it gets a new one when it is due.
        Raises QueueNotFound, QueueFull, ConfigurationError (a message without a required session).
        """
        if len(messages) == 1 and not self._queues.find(queue).settings.duplicate_window:
            return [self._send_one(queue, messages[0])]
        if not messages:
            self._queues.load(queue)
            return []
        with self._database.transaction() as connection:
            return self.send_within(connection, queue, messages)

    def _send_one(self, name: str, message: NewMessage) -> int:
        queue = self._queues.find(name)
        while True:
            (row,) = _rows(queue, [message], self._clock.wall())
            with self._database.statement() as connection:
                cursor = connection.execute(_INSERT_CHECKED, (*row, queue.revision))
                if cursor.rowcount == 1:
                    return cursor.lastrowid or 0
            queue = self._queues.load(name)
            if queue.settings.duplicate_window:
                return self.send(name, [message])[0]

    def send_within(
        self, connection: sqlite3.Connection, name: str, messages: Sequence[NewMessage]
    ) -> list[int]:
        """Send as part of the current transaction of `connection`."""
        queue = self._queues.current(connection, name)
        now = self._clock.wall()
        if queue.settings.duplicate_window:
            return self._send_distinct(connection, queue, messages, now)
        _INSERT_ALL.run(connection, _rows(queue, messages, now))
        (last,) = connection.execute("SELECT last_insert_rowid()").fetchone()
        return list(range(last - len(messages) + 1, last + 1))

    def _send_distinct(
        self,
        connection: sqlite3.Connection,
        queue: Queue,
        messages: Sequence[NewMessage],
        now: float,
    ) -> list[int]:
        until = now + queue.settings.duplicate_window
        connection.execute(_FORGET, (queue.id, queue.id, now))
        numbers = []
        for message, row in zip(messages, _rows(queue, messages, now), strict=True):
            known = (queue.id, message.message_id, until, now)
            if message.message_id and connection.execute(_REMEMBER, known).rowcount == 0:
                numbers.append(DUPLICATE)
            else:
                numbers.append(connection.execute(_INSERT, row).lastrowid or 0)
        return numbers

    def send_dead(self, queue: str, message: NewMessage, reason: str, description: str) -> int:
        """Store a message as a dead letter of the queue; return its sequence number.

        For what the queue itself must refuse: neither its sessions nor its duplicate detection is
        asked. A dead letter never expires. Raises QueueNotFound, QueueFull.
        """
        payload, message_id, session, _due, _expires = message
        box = self._queues.load(queue).box(dead_letter=True)
        row = (self._clock.wall(), message_id, session, payload, box, reason, description)
        with self._database.statement() as connection:
            return connection.execute(_INSERT_DEAD, row).lastrowid or 0

    def cancel_scheduled(self, queue: str, seqs: Sequence[int]) -> list[int]:
        """Remove the given scheduled messages that are not due yet; returns their numbers."""
        box, now = self._queues.find(queue).id, self._clock.wall()
        with self._database.transaction() as connection:
            sql = f"DELETE FROM messages {_CANCEL} seq = ?"
            return [s for s in seqs if connection.execute(sql, (box, now, s)).rowcount]

    def cancel_scheduled_ids(self, queue: str, message_ids: Sequence[str]) -> list[str]:
        """Remove scheduled messages by message id; returns one id per removed message."""
        box, now = self._queues.find(queue).id, self._clock.wall()
        removed: list[str] = []
        with self._database.transaction() as connection:
            for message_id in message_ids:
                cursor = connection.execute(_CANCEL_ID, (box, now, message_id))
                removed.extend([message_id] * cursor.rowcount)
        return removed


def _rows(queue: Queue, messages: Sequence[NewMessage], now: float) -> list[Row]:
    """The rows of new messages. The time to live starts when a message becomes active."""
    box, settings = queue.id, queue.settings
    time_to_live, sessions = settings.time_to_live, settings.sessions
    rows: list[Row] = []
    for payload, message_id, session, due, expires_at in messages:
        if sessions and session is None:
            raise ConfigurationError(
                f"queue {queue.name!r} has sessions: give each message one, or use another queue"
            )
        start = None if due is None or due <= now else due
        end = expires_at
        if time_to_live is not None:
            limit = (now if start is None else start) + time_to_live
            end = limit if end is None else min(limit, end)
        state = READY if start is None else SCHEDULED
        rows.append((state, start, now, end, message_id, session, payload, box))
    return rows
