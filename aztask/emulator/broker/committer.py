"""Group commit: everything that one turn of the event loop brings is one transaction.

Rules
1. A `Change` is executed inside the transaction and answered after its commit: what a peer was
   told is on disk. If the process dies before the commit, nobody was told anything.
2. When the transaction fails, each work is tried alone, so that one bad work (a full disk, a queue
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

    def taken_back(self) -> None:
        """The transaction failed: nothing that was collected counts. Try again later."""


class Committer:
    """Gathers works until the loop's next turn, then commits them together."""

    def __init__(self, database: Database, soon: Callable[[Callable[[], None]], object]) -> None:
        self._database = database
        self._soon = soon
        self._works: list[Change] = []
        self._planned = False
        self.held = False  # bytes are being read: nothing is planned before `let_go`
        self.flushing = False
        self.collector: Collector | None = None
        self.after: Callable[[], None] = lambda: None

    def submit(self, work: Change) -> None:
        """Do this at the end of the turn."""
        self._works.append(work)
        if not self._planned:
            self.plan()

    def plan(self) -> None:
        """See to it that the turn ends with a flush; during one, that another follows."""
        if not self._planned:
            self._planned = True
            if not self.flushing and not self.held:
                self._soon(self.flush)

    def let_go(self, *, now: bool) -> None:
        """The bytes are read: flush now when no others are to be waited for, else after them."""
        self.held = False
        if self._planned:
            if now:
                self.flush()
            else:
                self._soon(self.flush)

    def flush(self) -> None:
        """Commit what has gathered, deliver, answer, then write to the sockets."""
        self.flushing, self._planned = True, False
        works, self._works = self._works, []
        try:
            simple = not works or (len(works) == 1 and works[0].atomic)
            if simple and not (self.collector and self.collector.due()):
                for work in works:
                    self._alone(work)
            else:
                self._together(works)
            self.after()
        finally:
            self.flushing = False
            if self._planned:
                self._soon(self.flush)

    def _together(self, works: list[Change]) -> None:
        """All works, and what is delivered after them, in one transaction."""
        deliveries: list[Callable[[], None]] = []
        try:
            with self._database.transaction():
                for work in works:
                    work.execute()
                if self.collector:
                    deliveries = self.collector.collect()
        except AztaskError as error:
            if self.collector:
                self.collector.taken_back()
            self._one_by_one(works, error)
        else:
            for work in works:
                work.succeed()
            for deliver in deliveries:
                deliver()

    def _alone(self, work: Change) -> None:
        """A work that needs no transaction around it."""
        try:
            work.execute()
        except AztaskError as error:
            work.fail(error)
        else:
            work.succeed()

    def _one_by_one(self, works: list[Change], error: AztaskError) -> None:
        if len(works) == 1 or isinstance(error, BrokerUnavailable):
            for work in works:
                work.fail(error)
            return
        for work in works:
            try:
                with self._database.transaction():
                    work.execute()
            except AztaskError as failure:
                work.fail(failure)
            else:
                work.succeed()
