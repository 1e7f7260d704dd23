"""Mailboxes of the local broker: queues of the file, and a table of what they are bound to.

Rules
1. A mailbox and its bindings are one row each; its messages are in an ordinary queue of the engine.
2. Publishing reads the bindings first, so it writes nothing while no process listens. It then reads
   them again and sends the copies in one transaction: no copy goes to a queue that another process
   has just removed.
3. Opening a mailbox removes those that have expired: their processes have died.
4. Notes that are kept together are a mailbox without a queue, each note the key of a binding. So
   they need no table that an earlier release would not know, and expire as mailboxes do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final
from uuid import uuid4

from aztask.message.envelope import Envelope
from aztask.queues.base import (
    KEPT_SECONDS,
    MESSAGE_SECONDS,
    MOST_KEPT,
    Binding,
    Receiver,
    queue_name,
)
from aztask.queues.engine import Database, Engine, StoredSettings

COMPONENT: Final = "mailboxes"

STEPS: Final = (
    """
CREATE TABLE mailboxes (
    name TEXT PRIMARY KEY,
    expires_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE mailbox_bindings (
    exchange TEXT NOT NULL,
    kind TEXT NOT NULL,
    binding_key TEXT NOT NULL,
    mailbox TEXT NOT NULL,
    PRIMARY KEY (exchange, kind, binding_key, mailbox)
) WITHOUT ROWID;
CREATE INDEX mailbox_bindings_of ON mailbox_bindings (mailbox);
""",
)

LIFETIME: Final = 90.0

NOTE: Final = "note"
"""The kind of a binding that is a note. Its exchange has a prefix, so that publishing, also by an
earlier release, reads no notes."""

SETTINGS: Final = StoredSettings(
    max_deliveries=1000, time_to_live=MESSAGE_SECONDS, dead_letter_expired=False
)


class LocalMailboxes:
    """The mailboxes of one file.

    * `send`: the broker's own, which wakes waiting receivers.
    * `receiver`: opens a receiver of a queue, with deleting at receipt or not.
    """

    def __init__(
        self,
        database: Database,
        engine: Engine,
        send: Callable[[str, Sequence[Envelope]], None],
        receiver: Callable[[str, bool], Receiver],
    ) -> None:
        self._database = database
        self._engine = engine
        self._send = send
        self._receiver = receiver
        database.migrate(COMPONENT, STEPS)

    @property
    def lifetime(self) -> float:
        """Seconds after which a mailbox is removed that was not opened again."""
        return LIFETIME

    @property
    def lag(self) -> float:
        """A wait at a mailbox ends when a message comes."""
        return 0.0

    def open(self, name: str, bindings: Sequence[Binding]) -> None:
        """Create the mailbox or keep it, with exactly these bindings."""
        now = self._engine.clock.wall()
        with self._database.transaction() as connection:
            expired = connection.execute("SELECT name FROM mailboxes WHERE expires_at < ?", (now,))
            for (old,) in expired.fetchall():
                if old != name:
                    self.delete(old)
            self._engine.create_queue(queue_name(name), SETTINGS)
            connection.execute("REPLACE INTO mailboxes VALUES (?, ?)", (name, now + LIFETIME))
            connection.execute("DELETE FROM mailbox_bindings WHERE mailbox = ?", (name,))
            connection.executemany(
                "INSERT OR IGNORE INTO mailbox_bindings VALUES (?, ?, ?, ?)",
                [(each.exchange, each.kind, each.key, name) for each in bindings],
            )

    def receiver(self, name: str, *, delete: bool) -> Receiver:
        """A receiver of the mailbox."""
        return self._receiver(queue_name(name), delete)

    def publish(self, exchange: str, key: str, envelope: Envelope, *, recent: bool = False) -> bool:
        """Send a copy to each mailbox that is bound for it; False if there is none."""
        if not self._bound(exchange, key):
            return False
        with self._database.transaction():
            mailboxes = self._bound(exchange, key)
            for mailbox in sorted(mailboxes):
                self._send(queue_name(mailbox), [envelope])
        return bool(mailboxes)

    def _bound(self, exchange: str, key: str) -> set[str]:
        now = self._engine.clock.wall()
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT kind, binding_key, mailbox FROM mailbox_bindings JOIN mailboxes"
                " ON mailboxes.name = mailbox WHERE exchange = ? AND expires_at >= ?",
                (exchange, now),
            ).fetchall()
        return {
            mailbox
            for kind, pattern, mailbox in rows
            if Binding(exchange, pattern, kind).matches(exchange, key)
        }

    def delete(self, name: str) -> None:
        """Remove the mailbox with its messages; nothing happens if there is none."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM mailboxes WHERE name = ?", (name,))
            connection.execute("DELETE FROM mailbox_bindings WHERE mailbox = ?", (name,))
            queue = queue_name(name)
            if connection.execute("SELECT 1 FROM queues WHERE name = ?", (queue,)).fetchone():
                self._engine.delete_queue(queue)

    def keep(self, exchange: str, notes: Sequence[str]) -> None:
        """Keep notes for mailboxes that are opened later; the oldest go if there are too many."""
        name, place = f"{NOTE} {uuid4()}", f"{NOTE} {exchange}"
        until = self._engine.clock.wall() + KEPT_SECONDS
        with self._database.transaction() as connection:
            connection.execute("INSERT INTO mailboxes VALUES (?, ?)", (name, until))
            connection.executemany(
                "INSERT OR IGNORE INTO mailbox_bindings VALUES (?, ?, ?, ?)",
                [(place, NOTE, note, name) for note in notes[-MOST_KEPT:]],
            )
            (count,) = connection.execute(
                "SELECT count(*) FROM mailbox_bindings WHERE exchange = ?", (place,)
            ).fetchone()
            if count <= MOST_KEPT:
                return
            connection.execute(
                "DELETE FROM mailbox_bindings WHERE (exchange, kind, binding_key, mailbox) IN ("
                " SELECT exchange, kind, binding_key, mailbox FROM mailbox_bindings"
                " JOIN mailboxes ON name = mailbox WHERE exchange = ?"
                " ORDER BY expires_at LIMIT ?)",
                (place, count - MOST_KEPT),
            )

    def kept(self, exchange: str) -> list[str]:
        """The notes of the exchange."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT DISTINCT binding_key FROM mailbox_bindings JOIN mailboxes"
                " ON name = mailbox WHERE exchange = ? AND expires_at >= ?",
                (f"{NOTE} {exchange}", self._engine.clock.wall()),
            ).fetchall()
        return [note for (note,) in rows]
