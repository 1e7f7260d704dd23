"""Deliveries that fail alone: what they carry makes a stage raise an error that no outage explains.

Rules
1. A stage is tried `TRIES` times for such a delivery. Then it is dead-lettered with the error as
   the description, so that it neither blocks a queue nor is lost.
2. If not even the dead letter can be recorded or stored, the lease is left to end. The start
   counts, so the delivery limit applies.
3. A recorded outcome stays as it is. When the retry that it decided on cannot be sent, that retry
   is recorded as failed, and its message is the dead letter.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from aztask.errors import CodecError, MessageTooLarge
from aztask.results.base import Outcome, ResultStore, RunKey, RunRecord, State
from aztask.settlement import DeadLetter
from aztask.support.display import safe_str
from aztask.worker.pipeline.isolation import UNDONE
from aztask.worker.pipeline.redelivery import Redelivery
from aztask.worker.pipeline.settling import Settler
from aztask.worker.pipeline.work import WorkItem, message_of

logger = logging.getLogger(__name__)

UNPROCESSABLE = "unprocessable"
RETRY_TOO_LARGE = "retry-too-large"
TRIES = 3


class Refusals:
    """Decides what becomes of deliveries that fail alone. Any thread may call."""

    def __init__(
        self,
        redelivery: Redelivery,
        settling: Settler,
        results: ResultStore | None,
        *,
        name: str,
    ) -> None:
        """name: the worker's, in what is recorded."""
        self._redelivery = redelivery
        self._settling = settling
        self._results = results
        self._name = name

    def unclaimable(self, item: WorkItem, error: Exception) -> None:
        """Claiming `item` alone raised `error`."""
        text = text_of(error)
        item.tries += 1
        logger.warning("message %s could not be claimed: %s", item.delivery.position, text)
        if item.tries >= TRIES:
            item.decide(DeadLetter(UNPROCESSABLE, text))

    def unfinishable(self, item: WorkItem, error: Exception) -> None:
        """Recording or settling `item` alone raised `error`."""
        self._settling.undo([item])
        item.tries += 1
        text = text_of(error)
        name = item.delivery.position if item.opened is None else item.opened.message.id
        logger.warning("%s could not be recorded or settled: %s", name, text)
        if item.tries < TRIES:
            return
        if item.decided is not None and item.decided.refused:
            logger.error("%s is left to its lease: it cannot be dead-lettered either", name)
            item.note("settle_failed", text)
            item.end()
        elif self._dead_letter(item, DeadLetter(UNPROCESSABLE, text)):
            item.tries = 0

    def sendable(self, item: WorkItem) -> bool:
        """Whether `item` can be settled now. A retry that the broker would refuse becomes a dead
        letter, before anything is recorded.
        """
        try:
            self._redelivery.check(item)
        except CodecError as error:
            reason = RETRY_TOO_LARGE if isinstance(error, MessageTooLarge) else UNPROCESSABLE
            return self._dead_letter(item, DeadLetter(reason, f"the retry cannot be sent: {error}"))
        return True

    def _dead_letter(self, item: WorkItem, dead: DeadLetter) -> bool:
        """Decide so; False where the store cannot record it now, and it is tried again later."""
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
        """Whether the run that was to follow is recorded as failed (rule 3)."""
        if self._results is None:
            return True
        key = RunKey(item.key.task_id, item.key.generation, item.key.hop + 1)
        task = message_of(item).task
        try:
            run = RunRecord(key, task, item.queue, State.FAILED, self._name, outcome=failed)
            self._results.bury([run])
        except UNDONE as error:
            logger.warning("the failure of %s could not be recorded: %s", item.key.task_id, error)
            item.tries += 1
            return False
        return True


def text_of(error: Exception) -> str:
    """``Type: text`` on one line."""
    return f"{type(error).__name__}: {safe_str(error, 500)}"
