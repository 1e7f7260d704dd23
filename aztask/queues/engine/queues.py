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
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Final, TypeAlias

from aztask.errors import ConfigurationError, QueueNotFound
from aztask.queues.engine.database import Database
from aztask.queues.engine.filesystem import boot_id
from aztask.queues.engine.messages import DELIVERIES_EXCEEDED, READY, StoredSettings
from aztask.support.clock import SYSTEM_CLOCK, Clock

# -- The tables of the engine.
#
# Rules
# 1. A message is one row for its whole life, also as a dead letter. ``box`` is its queue's id; for
#    a dead letter it is the negative id. ``seq`` is never used twice in a file (AUTOINCREMENT,
#    sqlite.org/autoinc.html).
# 2. ``moment`` is the time when the state ends by itself: the end of a lease (lease clock) or the
#    due time of a schedule (UTC). Otherwise it is NULL. So one index serves receiving, sweeping and
#    counting, and a change of state writes one row and one index.
# 3. ``home`` is the state to which a message returns after its lease: ready or deferred.
# 4. Columns that change come before the payload and mostly keep their size, so SQLite does not
#    write the pages of a large payload again.

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


_SETTINGS = (
    "lease_seconds, max_deliveries, duplicate_window, time_to_live, dead_letter_expired, sessions"
)
_CREATE = (
    f"INSERT OR IGNORE INTO queues (name, revision, {_SETTINGS}) VALUES (?, 1, ?, ?, ?, ?, ?, ?)"
)
_LOAD = f"SELECT id, revision, {_SETTINGS} FROM queues WHERE name = ?"
_UPDATE = (
    f"UPDATE queues SET revision = revision + 1, ({_SETTINGS}) = (?, ?, ?, ?, ?, ?) WHERE id = ?"
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
    """A queue's settings when it was last read from the file."""

    name: str
    id: int
    revision: int
    settings: StoredSettings

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
        self._void_leases_of_earlier_boots()

    def create(self, name: str, settings: StoredSettings = StoredSettings()) -> bool:
        """Create the queue; returns False if it exists, and then keeps its settings."""
        if not name:
            raise ConfigurationError("a queue needs a name; give one with at least one character")
        with self.database.statement() as connection:
            created = connection.execute(_CREATE, (name, *astuple(settings))).rowcount == 1
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
        lease, deliveries, window, ttl, bury, sessions = row[2:]
        settings = StoredSettings(lease, deliveries, window, ttl, bool(bury), bool(sessions))
        queue = Queue(name, row[0], row[1], settings)
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
