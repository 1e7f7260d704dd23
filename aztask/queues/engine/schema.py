"""The tables of the engine.

Rules
1. A message is one row for its whole life, also as a dead letter. ``box`` is its queue's id; for a
   dead letter it is the negative id. ``seq`` is never used twice in a file (AUTOINCREMENT,
   sqlite.org/autoinc.html).
2. ``moment`` is the time when the state ends by itself: the end of a lease (lease clock) or the due
   time of a schedule (UTC). Otherwise it is NULL. So one index serves receiving, sweeping and
   counting, and a change of state writes one row and one index.
3. ``home`` is the state to which a message returns after its lease: ready or deferred.
4. Columns that change come before the payload and mostly keep their size, so SQLite does not write
   the pages of a large payload again.
"""

from __future__ import annotations

from typing import Final

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
