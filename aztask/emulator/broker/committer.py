"""Group commit: all changes of one turn of the event loop share one transaction.

Rules
1. A `Change` is executed inside the transaction and answered after its commit, so a change that was
   confirmed is on disk. If the process dies before the commit, no client has got an answer.
2. If the transaction fails, each change is tried in a transaction of its own. One bad change (for a
   deleted queue, say) does not fail its neighbours.
3. Deliveries are collected last in the same transaction, so that a message that was just sent or
   given back is delivered at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from aztask.errors import AztaskError, BrokerUnavailable
from aztask.queues.engine import Database

log = logging.getLogger(__name__)


class Change:
    """One change of the store, and the answer to the client that asked for it.

    atomic: `execute` makes a single call of the engine, which is a transaction by itself.
    """

    __slots__ = ()
    atomic = False

    def execute(self) -> None:
        """Change the store. Called again if the first transaction was rolled back."""

    def succeed(self) -> None:
        """Called after the commit: answer that the change was made."""

    def fail(self, error: AztaskError) -> None:
        """Called if the change was not made: answer with the error."""


class Collector(Protocol):
    """Receives messages from the store for the waiting consumers."""

    def due(self) -> bool:
        """Return whether there may be messages to receive."""

    def collect(self) -> list[Callable[[], None]]:
        """Receive inside the transaction; return calls that deliver after the commit."""

    def rolled_back(self) -> None:
        """The transaction failed, and with it all receives: try again later."""


class Committer:
    """Collects changes until the loop's next turn, then commits them together.

    soon: calls a function in the loop's next turn. after_flush: called after each flush, to write
    to the sockets.
    """

    def __init__(self, database: Database, soon: Callable[[Callable[[], None]], object]) -> None:
        self._database = database
        self._soon = soon
        self._changes: list[Change] = []
        self._flush_planned = False
        self.reading = False  # no flush is planned between here and `finish_reading`
        self.flushing = False
        self.collector: Collector | None = None
        self.after_flush: Callable[[], None] = lambda: None

    def submit(self, change: Change) -> None:
        """Make this change at the end of the turn."""
        self._changes.append(change)
        if not self._flush_planned:
            self.plan_flush()

    def plan_flush(self) -> None:
        """Flush at the end of this turn. Called during a flush, it plans another one."""
        if not self._flush_planned:
            self._flush_planned = True
            if not self.flushing and not self.reading:
                self._soon(self.flush)

    def finish_reading(self, *, now: bool) -> None:
        """End the reading of one client's bytes.

        now: flush now, because no other client is active; else in the loop's next turn.
        """
        self.reading = False
        if self._flush_planned:
            if now:
                self.flush()
            else:
                self._soon(self.flush)

    def flush(self) -> None:
        """Commit the collected changes, answer, deliver, then write to the sockets."""
        self.flushing, self._flush_planned = True, False
        changes, self._changes = self._changes, []
        try:
            simple = not changes or (len(changes) == 1 and changes[0].atomic)
            if simple and not (self.collector and self.collector.due()):
                for change in changes:
                    self._alone(change)
            else:
                self._together(changes)
            self.after_flush()
        finally:
            self.flushing = False
            if self._flush_planned:
                self._soon(self.flush)

    def _together(self, changes: list[Change]) -> None:
        """Make all changes and collect deliveries in one transaction."""
        deliveries: list[Callable[[], None]] = []
        try:
            with self._database.transaction():
                for change in changes:
                    change.execute()
                if self.collector:
                    deliveries = self.collector.collect()
        except AztaskError as error:
            if self.collector:
                self.collector.rolled_back()
            self._one_by_one(changes, error)
        else:
            for change in changes:
                change.succeed()
            for deliver in deliveries:
                deliver()

    def _alone(self, change: Change) -> None:
        """Make a change that needs no transaction around it."""
        try:
            change.execute()
        except AztaskError as error:
            change.fail(error)
        else:
            change.succeed()

    def _one_by_one(self, changes: list[Change], error: AztaskError) -> None:
        if len(changes) == 1 or isinstance(error, BrokerUnavailable):
            for change in changes:
                change.fail(error)
            return
        for change in changes:
            try:
                with self._database.transaction():
                    change.execute()
            except AztaskError as failure:
                change.fail(failure)
            else:
                change.succeed()
