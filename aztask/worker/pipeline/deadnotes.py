"""Notes of dead letters, for services that show only the first few of them."""

from __future__ import annotations

from collections.abc import Sequence

from aztask.results.deadindex import DeadIndex, IndexedDeadLetter
from aztask.settlement import DeadLetter
from aztask.support.failpoint import hit
from aztask.worker.pipeline.work import WorkItem


def note_dead(index: DeadIndex | None, items: Sequence[WorkItem], now: float) -> None:
    """Note those of `items` that are about to be dead-lettered. Raises BrokerUnavailable.

    Crash window: if the worker dies before the dead letter is stored, the note is there too early,
    or, if the next delivery ends otherwise, in vain; see `aztask.results.deadindex`.
    """
    if index is None:
        return
    letters = [
        IndexedDeadLetter(
            item.queue,
            item.delivery.envelope,
            item.settlement.reason,
            item.settlement.description,
            now,
            item.delivery.delivery_count,
        )
        for item in items
        if isinstance(item.settlement, DeadLetter)
    ]
    if letters:
        index.note(letters)
        hit("noted", len(letters))
