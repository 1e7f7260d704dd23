"""Frees the keys of unique tasks: at their start, or at their end before they are settled.

Rules
1. A worker none of whose tasks is unique does nothing here, not even a look at a message.
2. A key is freed after the outcome is recorded and before the message is settled. A worker that
   dies in between leaves the message: its redelivery finds the outcome, and frees the key again.
"""

from __future__ import annotations

from collections.abc import Sequence

from aztask.app import App
from aztask.results.uniques import uniques_of
from aztask.settlement import DeadLetter
from aztask.uniqueness.engine import UniqueEngine
from aztask.worker.pipeline.work import Stage, WorkItem, message_of


class UniqueKeys:
    """The keys of one worker's tasks. Any thread may call."""

    def __init__(self, app: App) -> None:
        self._engine = unique_engine(app)

    def started(self, items: Sequence[WorkItem]) -> None:
        """Free the keys of tasks that are about to start. Raises BrokerUnavailable."""
        if self._engine is not None:
            for item in items:
                if item.stage is Stage.READY and message_of(item).extra:
                    self._engine.started(message_of(item))

    def ended(self, items: Sequence[WorkItem]) -> None:
        """Free the keys of tasks that have ended for good, before they are settled.

        Raises BrokerUnavailable: nothing is settled, and it is tried again.
        """
        if self._engine is not None:
            for item in items:
                if _has_ended(item) and message_of(item).extra:
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
    return UniqueEngine(results, store, app.codec, lambda: app.broker)
