"""Frees the keys of unique tasks: at their start, or at their end before they are settled.

Rules
1. A worker none of whose tasks is unique does nothing here, not even a look at a message.
2. A key is freed after the outcome is recorded and before the message is settled. A worker that
   dies in between leaves the message: its redelivery finds the outcome, and frees the key again.
3. The tasks of workflows take their keys here, too: see `workflowkeys`.
"""

from __future__ import annotations

from collections.abc import Sequence

from aztask.app import App
from aztask.settlement import DeadLetter
from aztask.stores.records.uniques import uniques_of
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.uniqueness.engine import UniqueEngine
from aztask.uniqueness.rules import STARTED
from aztask.worker.pipeline.work import Stage, WorkItem, message_of
from aztask.worker.pipeline.workflowkeys import WorkflowKeys


class UniqueKeys:
    """The keys of one worker's tasks. Any thread may call."""

    def __init__(self, app: App, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = unique_engine(app)
        self._members = None if self._engine is None else WorkflowKeys(app, self._engine, clock)

    def prepare(self, items: Sequence[WorkItem]) -> None:
        """Take the keys of unique tasks of workflows. Raises BrokerUnavailable: call it again."""
        if self._members is not None:
            self._members.prepare(items)

    def started(self, items: Sequence[WorkItem]) -> None:
        """Free the keys of tasks that are about to start. Raises BrokerUnavailable."""
        if self._engine is not None:
            for item in items:
                if item.stage is not Stage.READY:
                    continue
                if item.unique and item.task is not None and item.task.unique is not None:
                    if item.task.unique.until == STARTED:
                        self._engine.free(item.unique, message_of(item))
                elif message_of(item).extra:
                    self._engine.started(message_of(item))

    def ended(self, items: Sequence[WorkItem]) -> None:
        """Free the keys of tasks that have ended for good, before they are settled.

        Raises BrokerUnavailable: nothing is settled, and it is tried again.
        """
        if self._engine is not None:
            for item in items:
                if not _has_ended(item):
                    continue
                if item.unique:
                    if item.task is not None and item.task.unique and item.task.unique.until:
                        self._engine.free(item.unique, message_of(item))
                elif message_of(item).extra:
                    self._engine.ended(message_of(item))


def _has_ended(item: WorkItem) -> bool:
    decided = item.decided
    if decided is None or item.opened is None:
        return False
    outcome = decided.outcome
    ended = outcome is not None and outcome.state.final
    return ended or isinstance(decided.settlement, DeadLetter)


def unique_engine(app: App) -> UniqueEngine | None:
    """The engine of an app that has unique tasks and a store for them; else None."""
    results = app.results
    store = uniques_of(results)
    if results is None or store is None or not any(task.unique for task in app.tasks.values()):
        return None
    return UniqueEngine(results, store, app.codec, lambda: app.broker, app.tasks)
