"""Deliveries that fail alone: their content makes a stage raise an error that no outage explains.

Rules
1. Such a delivery's stage is tried `TRIES` times. Then it is dead-lettered with the error as the
   description, so that it neither blocks a queue nor is lost.
2. If the dead letter cannot be recorded or stored either, the lease is left to expire. The start
   counts, so the delivery limit applies.
3. A recorded outcome does not change. If the retry that it decided cannot be sent, that retry is
   recorded as failed, and its message becomes the dead letter.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from aztask.errors import CodecError, ForeignId, MessageTooLarge
from aztask.settlement import DeadLetter
from aztask.stores.records.base import Outcome, ResultStore, RunKey, RunRecord, State
from aztask.stores.records.owners import FOREIGN_ID
from aztask.support.display import safe_str
from aztask.support.floodlog import FloodLog
from aztask.worker.pipeline.isolation import UNDONE
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.settling import Settler
from aztask.worker.pipeline.work import WorkItem, message_of

logger = logging.getLogger(__name__)

UNPROCESSABLE = "unprocessable"
RETRY_TOO_LARGE = "retry-too-large"
TRIES = 3


class Refusals:
    """Retries or dead-letters deliveries that fail alone. Any thread may call."""

    def __init__(
        self,
        redelivery: Redelivery,
        settling: Settler,
        results: ResultStore | None,
        *,
        name: str,
        floods: FloodLog,
    ) -> None:
        """name: the worker's name, for the records."""
        self._floods = floods
        self._redelivery = redelivery
        self._settling = settling
        self._results = results
        self._name = name

    def unclaimable(self, item: WorkItem, error: Exception) -> None:
        """Handle `error`, which claiming `item` alone raised."""
        if isinstance(error, ForeignId):  # it will not change
            self._floods.warning(
                logger, FOREIGN_ID, "%s did not run, dead-lettered: %s", item.label, error
            )
            item.decide(DeadLetter(FOREIGN_ID, str(error)))
            return
        text = text_of(error)
        item.tries += 1
        last = item.tries >= TRIES
        then = "it is dead-lettered" if last else "it will be tried again"
        line = "%s could not be claimed, %s: %s"
        self._floods.warning(logger, "unclaimable", line, item.label, then, text)
        if last:
            item.decide(DeadLetter(UNPROCESSABLE, text))

    def unfinishable(self, item: WorkItem, error: Exception) -> None:
        """Handle `error`, which recording or settling `item` alone raised."""
        self._settling.undo([item])
        item.tries += 1
        text = text_of(error)
        self._floods.warning(
            logger,
            "unfinishable",
            "%s could not be recorded or settled (try %d of %d), %s: %s",
            item.label,
            item.tries,
            TRIES,
            "it will be tried again" if item.tries < TRIES else "it is dead-lettered",
            text,
        )
        if item.tries < TRIES:
            return
        if item.decided is not None and item.decided.refused:
            self._floods.warning(
                logger,
                "not dead-lettered",
                "%s cannot be dead-lettered either: it is redelivered when its lease expires",
                item.label,
            )
            item.note("settle_failed", text)
            item.end()
        elif self._dead_letter(item, DeadLetter(UNPROCESSABLE, text)):
            item.tries = 0

    def sendable(self, item: WorkItem) -> bool:
        """Whether `item` can be settled now.

        A retry that the broker would refuse becomes a dead letter before anything is recorded.
        """
        try:
            self._redelivery.check(item)
        except CodecError as error:
            reason = RETRY_TOO_LARGE if isinstance(error, MessageTooLarge) else UNPROCESSABLE
            line = "%s cannot be retried, dead-lettered: %s: %s"
            self._floods.warning(logger, reason, line, item.label, reason, error)
            return self._dead_letter(item, DeadLetter(reason, f"the retry cannot be sent: {error}"))
        return True

    def _dead_letter(self, item: WorkItem, dead: DeadLetter) -> bool:
        """Decide to dead-letter; False if the store cannot record that now: try again later."""
        decided = item.decided
        outcome = decided.outcome if decided is not None else None
        if decided is None or outcome is None:
            item.decide(dead, refused=True)
            return True
        failed = replace(
            outcome,
            state=State.FAILED,
            settlement=dead,
            value=None,
            error_type=outcome.error_type or dead.reason,
            error=outcome.error or dead.description,
        )
        if not decided.recorded:
            item.decide(dead, failed, refused=True)
            return True
        if not self._buried(item, failed):
            return False
        item.decide(dead, outcome, recorded=True, repeated=decided.repeated, refused=True)
        return True

    def _buried(self, item: WorkItem, failed: Outcome) -> bool:
        """Record the run that was to follow as failed (rule 3); whether that worked."""
        if self._results is None:
            return True
        key = RunKey(item.key.task_id, item.key.generation, item.key.hop + 1)
        task = message_of(item).task
        try:
            run = RunRecord(key, task, item.queue, State.FAILED, self._name, outcome=failed)
            self._results.bury([run])
        except UNDONE as error:
            logger.warning(
                "%s: its failure could not be recorded, it will be tried again: %s",
                item.label,
                error,
            )
            item.tries += 1
            return False
        return True


def text_of(error: Exception) -> str:
    """``Type: text`` on one line."""
    return f"{type(error).__name__}: {safe_str(error, 500)}"
