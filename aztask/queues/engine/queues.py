"""The queues of a file and their settings, which the engine's other parts ask for.

Rules
1. A queue's id is never used twice, and its revision rises with every change of its settings. This
   process caches queues, and its cache may be stale. So a write that depends on the settings names
   id and revision. If they have changed, it writes nothing, and the queue is read again.
2. Leases use ``clock.monotonic``, which all processes of the machine share; all other times use
   ``clock.wall``. Leases of an earlier boot are void, because their clock has restarted.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain, repeat
from typing import Final, TypeAlias

from aztask.errors import ConfigurationError, QueueNotFound
from aztask.queues.engine.database import Database
from aztask.queues.engine.filesystem import boot_id
from aztask.queues.engine.messages import (
    DEFERRED,
    DELIVERIES_EXCEEDED,
    DUPLICATE,
    LEASED,
    MAX_NUMBERED_ID,
    NUMBER_STEP,
    PARTITIONS,
    READY,
    SCHEDULED,
    NewMessage,
    StoredSettings,
    first_seq,
    seq_in,
)
from aztask.support.clock import SYSTEM_CLOCK, Clock

# -- The tables of the engine.
#
# Rules
# 1. A message is one row for its whole life, also as a dead letter. ``box`` is its queue's id; for
#    a dead letter it is the negative id. ``seq`` is never used twice in a file: SQLite chooses it
#    (AUTOINCREMENT, sqlite.org/autoinc.html), or it is made of the id of a numbered queue, which is
#    never used twice either, and of the queue's next number (`aztask.queues.engine.messages`).
# 2. ``moment`` is the time when the state ends by itself: the end of a lease (lease clock) or the
#    due time of a schedule (UTC). Otherwise it is NULL. So one index serves receiving, sweeping and
#    counting, and a change of state writes one row and one index.
# 3. ``home`` is the state to which a message returns after its lease: ready or deferred.
# 4. Columns that change come before the payload and mostly keep their size, so SQLite does not
#    write the pages of a large payload again.
# 5. ``numbered`` has a row for each numbered queue: the last number that it has given. The row
#    changes in the transaction that stores the message: one that is rolled back or lost leaves no
#    gap, and the number of a completed message is not given again. It is a component of its own,
#    so that an earlier release can open the file: it lets SQLite choose the numbers in any queue.
# 6. ``partitions`` has the same for each partition of a numbered queue, from its first message on.
#    Messages of a file in which all partitions were counted together keep their numbers; each
#    partition goes on behind them.

COMPONENT: Final = "engine"

STEPS: Final = (
    """
CREATE TABLE queues (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    revision INTEGER NOT NULL,
    name TEXT NOT NULL UNIQUE,
    lease_seconds REAL NOT NULL,
    max_deliveries INTEGER NOT NULL,
    duplicate_window REAL NOT NULL,
    time_to_live REAL,
    dead_letter_expired INTEGER NOT NULL,
    sessions INTEGER NOT NULL
);
CREATE TABLE messages (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    box INTEGER NOT NULL,
    state INTEGER NOT NULL,
    moment REAL,
    home INTEGER NOT NULL DEFAULT 0,
    deliveries INTEGER NOT NULL DEFAULT 0,
    token TEXT,
    enqueued_at REAL NOT NULL,
    expires_at REAL,
    message_id TEXT NOT NULL,
    session TEXT,
    reason TEXT,
    description TEXT,
    payload BLOB NOT NULL
);
CREATE INDEX messages_line ON messages (box, state, moment);
CREATE INDEX messages_expiring ON messages (box, expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX messages_of_session ON messages (box, state, session) WHERE session IS NOT NULL;
CREATE INDEX messages_scheduled ON messages (box, message_id) WHERE state = 2;
CREATE TABLE seen (
    box INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    until REAL NOT NULL,
    PRIMARY KEY (box, message_id)
) WITHOUT ROWID;
CREATE INDEX seen_until ON seen (box, until);
CREATE TABLE sessions (
    box INTEGER NOT NULL,
    session TEXT NOT NULL,
    token TEXT,
    until REAL NOT NULL,
    state BLOB,
    PRIMARY KEY (box, session)
) WITHOUT ROWID;
CREATE TABLE boots (boot TEXT NOT NULL);
""",
)

_NUMBERED_STEPS: Final = ("CREATE TABLE numbered (id INTEGER PRIMARY KEY, last INTEGER NOT NULL)",)
_PARTITION_STEPS: Final = (
    f"""
CREATE TABLE partitions (
    id INTEGER NOT NULL,
    partition INTEGER NOT NULL,
    last INTEGER NOT NULL,
    PRIMARY KEY (id, partition)
) WITHOUT ROWID;
WITH RECURSIVE every (partition) AS
    (SELECT 1 UNION ALL SELECT partition + 1 FROM every WHERE partition < {PARTITIONS})
INSERT INTO partitions SELECT id, partition, last FROM numbered, every WHERE EXISTS
    (SELECT 1 FROM messages WHERE box IN (id, -id) AND seq < 0 AND seq & {PARTITIONS});
""",
)


_SETTINGS = (
    "lease_seconds, max_deliveries, duplicate_window, time_to_live, dead_letter_expired, sessions"
)
_CREATE = (
    f"INSERT OR IGNORE INTO queues (name, revision, {_SETTINGS}) VALUES (?, 1, ?, ?, ?, ?, ?, ?)"
)
_LOAD = (
    "SELECT id, revision, EXISTS (SELECT 1 FROM numbered WHERE numbered.id = queues.id), "
    f"{_SETTINGS} FROM queues WHERE name = ?"
)
_UPDATE = (
    f"UPDATE queues SET revision = revision + 1, ({_SETTINGS}) = (?, ?, ?, ?, ?, ?) WHERE id = ?"
)
# Within a box and a state, the index is in the order of moment and seq: few rows are read.
_STRAYS = (
    " UNION ALL ".join(
        f"SELECT seq FROM messages WHERE box = {its_box} AND state = {its_state} AND seq > 0"
        for its_box in ("?1", "?2")
        for its_state in (READY, SCHEDULED, LEASED, DEFERRED)
    )
    + " ORDER BY seq"
)
_IS_CURRENT = "SELECT count(*) FROM queues WHERE id = ? AND revision = ?"

EXHAUSTED = "deliveries >= (SELECT max_deliveries FROM queues WHERE id = box)"
"""True for a message that has reached the delivery limit. Never true for a dead letter, because its
box is negative and no queue has that id."""

BURY = (
    f"UPDATE messages SET box = -abs(box), state = {READY}, moment = NULL, home = {READY}, "
    "token = NULL, expires_at = NULL, "
)
"""Makes a message a dead letter. Append the assignments of reason and description."""

BURY_EXHAUSTED = (
    f"{BURY} reason = '{DELIVERIES_EXCEEDED}', "
    "description = 'delivered ' || deliveries || ' times without being settled' "
    f"WHERE {EXHAUSTED} AND "
)
GIVE_BACK = "UPDATE messages SET state = home, moment = NULL, token = NULL WHERE "


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue's settings when it was last read from the file.

    numbered: it counts its messages from 1; see `aztask.queues.engine.messages`.
    """

    name: str
    id: int
    revision: int
    settings: StoredSettings
    numbered: bool = False

    def box(self, dead_letter: bool) -> int:
        """The number of the box that holds the queue's messages or dead letters."""
        return -self.id if dead_letter else self.id


class QueueTable:
    """The part of the engine that creates, changes, finds and deletes queues."""

    def __init__(self, database: Database, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.database = database
        self.clock = clock
        self._known: dict[str, Queue] = {}
        database.migrate(COMPONENT, STEPS)
        database.migrate("numbered", _NUMBERED_STEPS)
        database.migrate("partitions", _PARTITION_STEPS)
        self._void_leases_of_earlier_boots()

    def create(
        self, name: str, settings: StoredSettings = StoredSettings(), *, numbered: bool = False
    ) -> bool:
        """Create the queue; returns False if it exists, and then keeps its settings.

        numbered: count its messages from 1, without gaps (`number_of`); costs a send about 2 µs.
        """
        if not name:
            raise ConfigurationError("a queue needs a name; give one with at least one character")
        with self.database.transaction() as connection:
            cursor = connection.execute(_CREATE, (name, *astuple(settings)))
            created = cursor.rowcount == 1
            if created and numbered:
                queue_id = cursor.lastrowid or 0
                if queue_id > MAX_NUMBERED_ID:
                    raise ConfigurationError(
                        f"{self.database.path} has had {MAX_NUMBERED_ID} queues; begin a new file"
                    )
                connection.execute("INSERT INTO numbered VALUES (?, 0)", (queue_id,))
        self._known.pop(name, None)
        return created

    def update(self, name: str, settings: StoredSettings) -> None:
        """Change the queue's settings, except `sessions`, which cannot be changed."""
        with self.database.transaction() as connection:
            queue = self.load(name)
            if queue.settings.sessions != settings.sessions:
                raise ConfigurationError(
                    f"queue {name!r} was created {'with' if queue.settings.sessions else 'without'}"
                    " sessions, which cannot be changed; delete it first, or use another queue"
                )
            connection.execute(_UPDATE, (*astuple(settings), queue.id))
        self._known.pop(name, None)

    def delete(self, name: str) -> None:
        """Delete the queue and everything in it. Raises QueueNotFound."""
        with self.database.transaction() as connection:
            queue = self.load(name)
            for box in (queue.id, -queue.id):
                connection.execute("DELETE FROM messages WHERE box = ?", (box,))
            connection.execute("DELETE FROM seen WHERE box = ?", (queue.id,))
            connection.execute("DELETE FROM sessions WHERE box = ?", (queue.id,))
            for table in ("numbered", "partitions"):
                connection.execute(f"DELETE FROM {table} WHERE id = ?", (queue.id,))
            connection.execute("DELETE FROM queues WHERE id = ?", (queue.id,))
        self._known.pop(name, None)

    def settings(self, name: str) -> StoredSettings:
        """The queue's current settings. Raises QueueNotFound."""
        return self.load(name).settings

    def names(self) -> list[str]:
        """The sorted names of all queues."""
        with self.database.read() as connection:
            return [name for (name,) in connection.execute("SELECT name FROM queues ORDER BY name")]

    def find(self, name: str) -> Queue:
        """The queue from the cache, or from the file. Raises QueueNotFound."""
        return self._known.get(name) or self.load(name)

    def current(self, connection: sqlite3.Connection, name: str) -> Queue:
        """The queue, with the settings that the transaction of `connection` sees."""
        queue = self.find(name)
        key = (queue.id, queue.revision)
        return queue if connection.execute(_IS_CURRENT, key).fetchone()[0] else self.load(name)

    def lease_end(self, queue: Queue, seconds: float | None) -> float:
        """When a lease of `seconds` that begins now ends, by default one of the queue's length."""
        seconds = queue.settings.lease_seconds if seconds is None else seconds
        if not 0 < seconds < math.inf:
            raise ConfigurationError(f"a lease lasts a number of seconds above 0, not {seconds!r}")
        return self.clock.monotonic() + seconds

    def seq_of(self, name: str, number: int) -> int:
        """The `seq` of a number that users of the queue see; the reverse of `number_of`."""
        queue = self.find(name)
        return seq_in(queue.id, number) if queue.numbered else number

    def adopt(self) -> None:
        """Give a number to messages that an earlier release has stored in numbered queues.

        They go behind the others. Call it before there are clients, who know the numbers.
        """
        with self.database.transaction() as connection:
            for queue_id, last in connection.execute("SELECT id, last FROM numbered").fetchall():
                boxes, start = (queue_id, -queue_id), first_seq(queue_id) + last * NUMBER_STEP
                strays = connection.execute(_STRAYS, boxes).fetchall()
                for number, (seq,) in enumerate(strays, 1):
                    row = (start + number * NUMBER_STEP, seq)
                    connection.execute("UPDATE messages SET seq = ? WHERE seq = ?", row)
                if strays:
                    connection.execute(_COUNT_ON, (len(strays), queue_id)).fetchall()

    def load(self, name: str) -> Queue:
        """The queue from the file. Raises QueueNotFound."""
        known = name.encode(errors="replace").decode()  # no queue name contains lone surrogates
        with self.database.read() as connection:
            row = connection.execute(_LOAD, (known,)).fetchone() if known == name else None
        if row is None:
            self._known.pop(name, None)
            raise QueueNotFound(
                f"queue {name!r} does not exist; create it with: aztask queues create {name!r}"
            )
        lease, deliveries, window, ttl, bury, sessions = row[3:]
        settings = StoredSettings(lease, deliveries, window, ttl, bool(bury), bool(sessions))
        queue = Queue(name, row[0], row[1], settings, bool(row[2]))
        if self._known.get(name) != queue:
            self._known[name] = queue
        return queue

    def _void_leases_of_earlier_boots(self) -> None:
        boot = boot_id()
        with self.database.read() as connection:
            if connection.execute("SELECT boot FROM boots").fetchone() == (boot,):
                return
        with self.database.transaction() as connection:
            void_leases(connection)
            connection.execute("DELETE FROM boots")
            connection.execute("INSERT INTO boots VALUES (?)", (boot,))


def void_leases(connection: sqlite3.Connection) -> None:
    """End all leases of the file. Messages at their delivery limit become dead letters."""
    connection.execute(f"{BURY_EXHAUSTED} state = 1")
    connection.execute(f"{GIVE_BACK} state = 1")
    connection.execute("UPDATE sessions SET token = NULL, until = 0")


# -- Statements for many rows ----------------------------------------------------------------------
#
# Runs one statement for many rows: most of a small statement's cost is starting it.

Row: TypeAlias = tuple[object, ...]

_SIZES: Final = (100, 20)
"""Rows per statement. There are only few sizes, so that all statements stay prepared."""


class BatchStatement:
    """A statement in two forms.

    one: the statement for a single row.
    many: the statement for several rows; ``{rows}`` is replaced by repetitions of `row`.

    Values are bound in the order head, rows, tail. Head and tail are the same for all rows.
    """

    def __init__(self, one: str, many: str, row: str) -> None:
        self.one = one
        self._many = [(size, many.format(rows=", ".join([row] * size))) for size in _SIZES]

    def run(
        self, connection: sqlite3.Connection, rows: Sequence[Row], head: Row = (), tail: Row = ()
    ) -> int:
        """Run the statement for all rows, in order; returns how many table rows it changed."""
        changed = done = 0
        for size, sql in self._many:
            while len(rows) - done >= size:
                values = [*head, *chain.from_iterable(rows[done : done + size]), *tail]
                changed += connection.execute(sql, values).rowcount
                done += size
        if done < len(rows):
            rest = [(*head, *row, *tail) for row in rows[done:]]
            changed += connection.executemany(self.one, rest).rowcount
        return changed


# -- sends messages to a queue, with duplicate detection, and cancels scheduled ones ---------------
#
# Rules
# 1. A send is one transaction: if it returns, all its messages are in the file; if it raises, none
#    of them is. Sequence numbers rise in the order of the messages, in each partition.
# 2. The duplicate window starts with the first send of an id, even if that message is already gone.
# 3. A row without a number gets one from SQLite. A numbered queue gives them itself, in the same
#    transaction, and a dropped duplicate gets none.

_COLUMNS = "seq, state, moment, enqueued_at, expires_at, message_id, session, payload, box"
_ROW = "(?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT = f"INSERT INTO messages ({_COLUMNS}) VALUES {_ROW}"
_INSERT_ALL = BatchStatement(_INSERT, f"INSERT INTO messages ({_COLUMNS}) VALUES {{rows}}", _ROW)
_INSERT_DEAD = (
    "INSERT INTO messages (seq, state, enqueued_at, message_id, session, payload, box, reason, "
    f"description) VALUES (?, {READY}, ?, ?, ?, ?, ?, ?, ?)"
)
# Without the column: a NULL for it would cost every send of one message a tenth of its time.
_INSERT_CHECKED = (
    f"INSERT INTO messages ({_COLUMNS.replace('seq, ', '')}) "
    "SELECT ?, ?, ?, ?, ?, ?, ?, id FROM queues WHERE id = ? AND revision = ?"
)
_COUNT_ON = "UPDATE numbered SET last = last + ? WHERE id = ? RETURNING last"
_COUNT_ON_IN = (
    "INSERT INTO partitions (last, id, partition) VALUES (?, ?, ?) ON CONFLICT (id, partition) "
    "DO UPDATE SET last = last + excluded.last RETURNING last"
)
# For one message this is faster than `_COUNT_ON`: what RETURNING gives is first stored.
_INSERT_NEXT = (
    f"INSERT INTO messages ({_COLUMNS}) SELECT ? + {NUMBER_STEP} * last, ?, ?, ?, ?, ?, ?, ?, "
    "queues.id FROM queues, numbered "
    "WHERE queues.id = ? AND revision = ? AND numbered.id = queues.id"
)
_COUNT_ONE = "UPDATE numbered SET last = last + 1 WHERE id = ?"
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

    def reserve(self, queue: str, messages: Sequence[NewMessage]) -> list[int]:
        """Take the next numbers for messages that are sent later, with `send(numbers=...)`.

        A number that is then not used stays a gap. Raises QueueNotFound, QueueFull.
        """
        found = self._queues.load(queue)
        with self._database.transaction() as connection:
            seqs = _next_seqs(connection, found, messages)
            if not found.numbered:  # SQLite gives no number without a row, and none twice
                row = (self._clock.wall(), "", None, b"", 0, None, None)
                for _ in messages:
                    seqs.append(connection.execute(_INSERT_DEAD, (None, *row)).lastrowid or 0)
                    connection.execute("DELETE FROM messages WHERE seq = ?", seqs[-1:])
        return seqs

    def send(
        self, queue: str, messages: Sequence[NewMessage], *, numbers: Sequence[int] = ()
    ) -> list[int]:
        """Store the messages; returns their sequence numbers, and `DUPLICATE` for dropped ones.

        numbers: from `reserve`, one for each message.

        Use a scheduled message's number only to cancel it: it gets a new one when it is due.
        Raises QueueNotFound, QueueFull, ConfigurationError (a message without a required session).
        """
        single = len(messages) == 1 and not numbers and not messages[0].partition
        if single and not self._queues.find(queue).settings.duplicate_window:
            return [self._send_one(queue, messages[0])]
        if not messages:
            self._queues.load(queue)
            return []
        with self._database.transaction() as connection:
            return self.send_within(connection, queue, messages, numbers)

    def _send_one(self, name: str, message: NewMessage) -> int:
        queue = self._queues.find(name)
        while True:
            (row,) = _rows(queue, [message], self._clock.wall(), (None,))
            if queue.numbered:
                seq = self._insert_numbered(queue, row)
                if seq is not None:
                    return seq
            else:
                with self._database.statement() as connection:
                    cursor = connection.execute(_INSERT_CHECKED, (*row[1:], queue.revision))
                    if cursor.rowcount == 1:
                        return cursor.lastrowid or 0
            queue = self._queues.load(name)
            if queue.settings.duplicate_window:
                return self.send(name, [message])[0]

    def _insert_numbered(self, queue: Queue, row: Row) -> int | None:
        """Store a row under the queue's next number; None if the queue's settings have changed."""
        seq = first_seq(queue.id) + NUMBER_STEP
        with self._database.joined() as connection:
            cursor = connection.execute(_INSERT_NEXT, (seq, *row[1:], queue.revision))
            if cursor.rowcount != 1:
                return None
            connection.execute(_COUNT_ONE, (queue.id,))
        return cursor.lastrowid

    def send_within(
        self,
        connection: sqlite3.Connection,
        name: str,
        messages: Sequence[NewMessage],
        numbers: Sequence[int] = (),
    ) -> list[int]:
        """Send as part of the current transaction of `connection`."""
        queue = self._queues.current(connection, name)
        now = self._clock.wall()
        if queue.settings.duplicate_window:
            return self._send_distinct(connection, queue, messages, now, numbers)
        seqs = list(numbers) or _next_seqs(connection, queue, messages)
        _INSERT_ALL.run(connection, _rows(queue, messages, now, seqs or repeat(None)))
        if seqs:
            return seqs
        (last,) = connection.execute("SELECT last_insert_rowid()").fetchone()
        return list(range(last - len(messages) + 1, last + 1))

    def _send_distinct(
        self,
        connection: sqlite3.Connection,
        queue: Queue,
        messages: Sequence[NewMessage],
        now: float,
        given: Sequence[int],
    ) -> list[int]:
        until = now + queue.settings.duplicate_window
        connection.execute(_FORGET, (queue.id, queue.id, now))
        numbers = []
        rows = _rows(queue, messages, now, given or repeat(None))
        for message, row in zip(messages, rows, strict=True):
            known = (queue.id, message.message_id, until, now)
            if message.message_id and connection.execute(_REMEMBER, known).rowcount == 0:
                numbers.append(DUPLICATE)
            else:
                seq = row[:1]
                if not given:
                    seq = tuple(_next_seqs(connection, queue, [message])) or seq
                numbers.append(connection.execute(_INSERT, (*seq, *row[1:])).lastrowid or 0)
        return numbers

    def send_dead(self, queue: str, message: NewMessage, reason: str, description: str) -> int:
        """Store a message as a dead letter of the queue; return its sequence number.

        For what the queue itself must refuse: neither its sessions nor its duplicate detection is
        asked. A dead letter never expires. Raises QueueNotFound, QueueFull.
        """
        payload, message_id, session = message[:3]
        found = self._queues.load(queue)
        box = found.box(dead_letter=True)
        row = (self._clock.wall(), message_id, session, payload, box, reason, description)
        with self._database.transaction() as connection:
            seq = _next_seqs(connection, found, [message]) or (None,)
            return connection.execute(_INSERT_DEAD, (*seq, *row)).lastrowid or 0

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


def _next_seqs(
    connection: sqlite3.Connection, queue: Queue, messages: Sequence[NewMessage]
) -> list[int]:
    """The `seq` of messages under the next numbers of the queue; none if it is not numbered."""
    if not queue.numbered or not messages:
        return []
    first = first_seq(queue.id)
    following: dict[int, Iterator[int]] = {}
    for partition, count in Counter(message.partition for message in messages).items():
        if partition:
            counted = connection.execute(_COUNT_ON_IN, (count, queue.id, partition))
        else:
            counted = connection.execute(_COUNT_ON, (count, queue.id))
        ((last,),) = counted.fetchall()
        own = range(last - count + 1, last + 1)
        following[partition] = iter([first + NUMBER_STEP * n + partition for n in own])
    return [next(following[message.partition]) for message in messages]


def _rows(
    queue: Queue, messages: Sequence[NewMessage], now: float, seqs: Iterable[int | None]
) -> list[Row]:
    """The rows of new messages. The time to live starts when a message becomes active."""
    box, settings = queue.id, queue.settings
    time_to_live, sessions = settings.time_to_live, settings.sessions
    rows: list[Row] = []
    for seq, (payload, message_id, session, due, expires_at, _) in zip(
        seqs, messages, strict=False
    ):
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
        rows.append((seq, state, start, now, end, message_id, session, payload, box))
    return rows
