"""Renews the leases of messages, and settles the messages.

Rules
1. Only the holder of a lease changes its message; see `aztask.queues.engine.receiving`.
2. Every call takes a batch, answers for each message in order, and is one transaction. A batch is
   settled by one statement. If some of its leases are lost, the batch is rolled back and repeated
   one by one, inside the same transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from aztask.queues.engine.messages import DEFERRED, READY, SCHEDULED, NewMessage
from aztask.queues.engine.queues import (
    BURY,
    BURY_EXHAUSTED,
    EXHAUSTED,
    GIVE_BACK,
    BatchStatement,
    EngineSending,
    QueueTable,
    Row,
)

Lease: TypeAlias = tuple[int, str]
"""The proof of a lease: the message's sequence number and the token."""

_HELD: Final = "seq = ? AND token = ? AND moment > ? AND box = ?"
_LOOK: Final = f"SELECT moment FROM messages WHERE {_HELD}"
_REPLACE_PAYLOAD: Final = f"UPDATE messages SET payload = ?, moment = ? WHERE {_HELD}"
_DELAY: Final = (
    f"UPDATE messages SET state = {SCHEDULED}, home = {READY}, moment = ?, token = NULL "
    f"WHERE {_HELD}"
)
_HELD_AND_EXHAUSTED: Final = f"{BURY_EXHAUSTED} {_HELD}"
_GIVE_BACK_HELD: Final = f"{GIVE_BACK} {_HELD} AND ({EXHAUSTED}) IS NOT TRUE"

_ALL_HELD: Final = (
    "seq IN (SELECT m.seq FROM (VALUES {rows}) AS held CROSS JOIN messages AS m "
    "ON m.seq = held.column1 AND m.token = held.column2 WHERE m.moment > ? AND m.box = ?)"
)


def _for_held(action: str) -> BatchStatement:
    """The statement that does `action` to messages whose leases hold, one or many at once."""
    return BatchStatement(f"{action} WHERE {_HELD}", f"{action} WHERE {_ALL_HELD}", "(?, ?)")


_COMPLETE: Final = _for_held("DELETE FROM messages")
_RENEW: Final = _for_held("UPDATE messages SET moment = ?")
_RELEASE: Final = _for_held(
    "UPDATE messages SET state = home, moment = NULL, token = NULL, "
    "deliveries = max(deliveries - 1, 0)"
)
_DEFER: Final = _for_held(
    f"UPDATE messages SET state = {DEFERRED}, home = {DEFERRED}, moment = NULL, token = NULL"
)
_DEAD: Final = _for_held(f"{BURY} reason = ?, description = ?, payload = coalesce(?, payload)")


class EngineSettling:
    """The part of the engine that renews leases, and ends them."""

    def __init__(self, queues: QueueTable, sending: EngineSending) -> None:
        self._queues = queues
        self._database = queues.database
        self._clock = queues.clock
        self._sending = sending

    def renew(
        self,
        queue: str,
        leases: Sequence[Lease],
        seconds: float | None = None,
        *,
        dead_letter: bool = False,
    ) -> list[float | None]:
        """Let each lease end `seconds` from now; returns the new ends, None for a lost lease.

        The leases of a session's messages are renewed with their session. For them, this only
        returns the ends.
        """
        found = self._queues.find(queue)
        box, now = found.box(dead_letter), self._clock.monotonic()
        if found.settings.sessions and not dead_letter:
            return self._ends(box, leases, now)
        until = self._queues.lease_end(found, seconds)
        held = self._settle(_RENEW, leases, (now, box), (until,))
        return [until if still else None for still in held]

    def _ends(self, box: int, leases: Sequence[Lease], now: float) -> list[float | None]:
        with self._database.transaction() as connection:
            rows = [connection.execute(_LOOK, (s, t, now, box)).fetchone() for s, t in leases]
        return [row[0] if row else None for row in rows]

    def update(
        self,
        queue: str,
        seq: int,
        token: str,
        payload: bytes,
        seconds: float | None = None,
        *,
        dead_letter: bool = False,
    ) -> float | None:
        """Replace the payload in place and renew the lease; returns its end, None if it is lost."""
        found = self._queues.find(queue)
        box, now = found.box(dead_letter), self._clock.monotonic()
        until = self._queues.lease_end(found, seconds)
        with self._database.transaction() as connection:
            if found.settings.sessions and not dead_letter:
                row = connection.execute(_LOOK, (seq, token, now, box)).fetchone()
                until = row[0] if row else until
            held = connection.execute(_REPLACE_PAYLOAD, (payload, until, seq, token, now, box))
            return until if held.rowcount else None

    def complete(
        self, queue: str, leases: Sequence[Lease], *, dead_letter: bool = False
    ) -> list[bool]:
        """Remove the messages; the answer is False for each lost lease."""
        box, now = self._queues.find(queue).box(dead_letter), self._clock.monotonic()
        if len(leases) == 1:  # the most frequent call: as `_settle`, without its overhead
            return [self._database.change(_COMPLETE.one, (*leases[0], now, box)) == 1]
        return self._settle(_COMPLETE, leases, (now, box))

    def abandon(
        self,
        queue: str,
        leases: Sequence[Lease],
        delay: float = 0.0,
        *,
        dead_letter: bool = False,
    ) -> list[bool]:
        """Give the messages back: at once and in their old place, or after `delay` seconds.

        A message that has reached the queue's delivery limit becomes a dead letter instead.
        """
        box, now = self._queues.find(queue).box(dead_letter), self._clock.monotonic()
        rows = [(seq, token, now, box) for seq, token in leases]
        due = (self._clock.wall() + delay,) if delay > 0 else ()
        answers = []
        with self._database.transaction() as connection:
            for row in rows:
                held = connection.execute(_HELD_AND_EXHAUSTED, row).rowcount
                if not held and due:
                    held = connection.execute(_DELAY, due + row).rowcount
                elif not held:
                    held = connection.execute(_GIVE_BACK_HELD, row).rowcount
                answers.append(held == 1)
        return answers

    def release(
        self, queue: str, leases: Sequence[Lease], *, dead_letter: bool = False
    ) -> list[bool]:
        """Give the messages back without counting this delivery."""
        box, now = self._queues.find(queue).box(dead_letter), self._clock.monotonic()
        return self._settle(_RELEASE, leases, (now, box))

    def defer(
        self, queue: str, leases: Sequence[Lease], *, dead_letter: bool = False
    ) -> list[bool]:
        """Defer the messages: only `receive_deferred` returns them."""
        box, now = self._queues.find(queue).box(dead_letter), self._clock.monotonic()
        return self._settle(_DEFER, leases, (now, box))

    def dead_letter(
        self,
        queue: str,
        leases: Sequence[Lease],
        reason: str,
        description: str = "",
        payload: bytes | None = None,
        *,
        dead_letter: bool = False,
    ) -> list[bool]:
        """Move the messages to the dead letters; they keep their numbers and never expire.

        payload: replaces the payload; None keeps it.
        """
        box, now = self._queues.find(queue).box(dead_letter), self._clock.monotonic()
        return self._settle(_DEAD, leases, (now, box), (reason, description, payload))

    def replace(
        self,
        queue: str,
        replacements: Sequence[tuple[int, str, NewMessage]],
        *,
        dead_letter: bool = False,
    ) -> list[bool]:
        """Remove each message and send its clone to the queue: both or neither.

        A clone that duplicate detection drops counts as sent. For a lost lease nothing is sent. For
        dead letters this is a replay.
        """
        box, now = self._queues.find(queue).box(dead_letter), self._clock.monotonic()
        with self._database.transaction() as connection:
            leases = [(seq, token) for seq, token, _ in replacements]
            answers = self._settle(_COMPLETE, leases, (now, box))
            clones = [
                clone for (_, _, clone), held in zip(replacements, answers, strict=True) if held
            ]
            if clones:
                self._sending.send_within(connection, queue, clones)
        return answers

    def _settle(
        self,
        action: BatchStatement,
        leases: Sequence[Lease],
        held: tuple[float, int],
        values: Row = (),
    ) -> list[bool]:
        """Do `action` to each lease's message; the answer is True if the lease holds (rule 2).

        held: the current time and the box, which decide whether a lease holds.
        values: the values that the action writes.
        """
        if len(leases) == 1:
            return [self._database.change(action.one, (*values, *leases[0], *held)) == 1]
        if not leases:
            return []
        with self._database.transaction() as connection:
            connection.execute("SAVEPOINT batch")
            if action.run(connection, leases, values, held) == len(leases):
                answers = [True] * len(leases)
            else:
                connection.execute("ROLLBACK TO batch")
                rows = [(*values, *lease, *held) for lease in leases]
                answers = [connection.execute(action.one, row).rowcount == 1 for row in rows]
            connection.execute("RELEASE batch")
        return answers
