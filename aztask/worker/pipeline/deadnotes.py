"""Notes of dead letters, for services that show only the first few of them."""

from __future__ import annotations

from collections.abc import Sequence

from aztask.results.deadindex import DeadIndex, NotedDead
from aztask.settlement import DeadLetter
from aztask.support.failpoint import hit
from aztask.worker.pipeline.work import Job


def note_dead(index: DeadIndex | None, jobs: Sequence[Job], now: float) -> None:
    """Note those of `jobs` that are about to be dead-lettered. Raises BrokerUnavailable.

    Crash window: if the worker dies before the dead letter is stored, the note is there too early,
    or, if the next delivery ends otherwise, in vain; see `aztask.results.deadindex`.
    """
    if index is None:
        return
    letters = [
        NotedDead(
            job.queue,
            job.delivery.envelope,
            job.settlement.reason,
            job.settlement.description,
            now,
            job.delivery.delivery_count,
        )
        for job in jobs
        if isinstance(job.settlement, DeadLetter)
    ]
    if letters:
        index.note(letters)
        hit("noted", len(letters))
