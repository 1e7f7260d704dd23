"""Group commit: everything that one turn of the event loop brings is one transaction.

Rules
1. A `Change` is executed inside the transaction and answered after its commit: what a peer was
   told is on disk. If the process dies before the commit, nobody was told anything.
2. When the transaction fails, each change is tried alone, so that one bad change (a full disk, a queue
   deleted meanwhile) fails alone.
3. Deliveries are collected last in the same transaction, so that what was just sent or given back
   leaves at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from aztask.engine import Database
from aztask.errors import AztaskError, BrokerUnavailable

log = logging.getLogger(__name__)


class Change:
    """One change of the store and its answer.

    atomic: `execute` is a single call of the engine, a transaction of its own where it is alone.
    """

    __slots__ = ()
    atomic = False

    def execute(self) -> None:
        """Change the store. May be called again when the first transaction was taken back."""

    def succeed(self) -> None:
        """Answer: the change is committed."""

    def fail(self, error: AztaskError) -> None:
        """Answer: the change did not happen."""


class Collector(Protocol):
    """Takes messages out of the store for those who wait for them."""

    def due(self) -> bool:
        """Whether there is anything to take."""

    def collect(self) -> list[Callable[[], None]]:
        """Take them, inside the transaction; the calls deliver them after its commit."""

    def rolled_back(self) -> None:
        """The transaction failed: nothing that was collected counts. Try again later."""


class Committer:
    """Gathers changes until the loop's next turn, then commits them together."""

    def __init__(self, database: Database, soon: Callable[[Callable[[], None]], object]) -> None:
        self._database = database
        self._soon = soon
        self._changes: list[Change] = []
        self._flush_planned = False
        self.reading = False  # bytes are being read: nothing is planned before `finish_reading`
        self.flushing = False
        self.collector: Collector | None = None
        self.after_flush: Callable[[], None] = lambda: None

    def submit(self, change: Change) -> None:
        """Do this at the end of the turn."""
        self._changes.append(change)
        if not self._flush_planned:
            self.plan_flush()

    def plan_flush(self) -> None:
        """See to it that the turn ends with a flush; during one, that another follows."""
        if not self._flush_planned:
            self._flush_planned = True
            if not self.flushing and not self.reading:
                self._soon(self.flush)

    def finish_reading(self, *, now: bool) -> None:
        """The bytes are read: flush now when no others are to be waited for, else after them."""
        self.reading = False
        if self._flush_planned:
            if now:
                self.flush()
            else:
                self._soon(self.flush)

    def flush(self) -> None:
        """Commit what has gathered, deliver, answer, then write to the sockets."""
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
        """All changes, and what is delivered after them, in one transaction."""
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
        """A change that needs no transaction around it."""
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
