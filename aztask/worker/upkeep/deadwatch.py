"""Finds messages that the broker itself dead-lettered, by its own count or time to live.

No worker sees that happen, so without this watch a caller would wait for their results forever.
Each look reads one page of each queue's dead letters, and the next look continues there. So its
cost does not depend on the number of dead letters, but the time until each one is found does. The
first worker to find a dead letter records it, and only that worker reports it. Without a result
store there is nothing to record, and no watch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from aztask.errors import AztaskError, CodecError
from aztask.message.message import TaskMessage
from aztask.queues.base import Peeked, Position
from aztask.settlement import DeadLetter
from aztask.stores.records.base import Outcome, RunKey, RunRecord, State
from aztask.worker.pipeline.workflowends import WorkflowEnds
from aztask.worker.runtime import WorkerRuntime
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import Place

logger = logging.getLogger(__name__)

PAGE: Final = 100
COUNT_EXCEEDED: Final = "MaxDeliveryCountExceeded"
TIME_EXPIRED: Final = "TTLExpiredException"
REASONS: Final = {COUNT_EXCEEDED: State.FAILED, TIME_EXPIRED: State.EXPIRED}
"""The broker's own reasons, as Service Bus spells them (its documentation of dead-letter queues),
and the state of a task after each."""


class DeadWatch:
    """Reads the dead letters of the worker's queues, a page at a time."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._app = runtime.app
        self._clock = runtime.clock
        self._mailbox = runtime.mailbox
        self._journal = runtime.journal
        self._after: dict[str, Position | None] = dict.fromkeys(runtime.options.queues)

    @property
    def useful(self) -> bool:
        """Whether the broker dead-letters by itself and there is a result store."""
        return self._app.broker.capabilities.native_dead_letter and self._app.results is not None

    def look(self) -> None:
        """Read one page of each queue. A queue that refuses does not stop the others."""
        for queue, after in self._after.items():
            try:
                page = self._app.broker.peek(queue, dead_letter=True, after=after, limit=PAGE)
                self._note(queue, page)
            except AztaskError as error:
                logger.info(
                    "queue %s: its dead letters cannot be read, retry later: %s", queue, error
                )
            else:
                self._after[queue] = page[-1].position if len(page) == PAGE else None

    def _note(self, queue: str, page: Sequence[Peeked]) -> None:
        """Record the new ones, then report them.

        Crash window: if the process dies in between, they are recorded but no worker reports them.
        The results are right; the event and the log line are missing.
        """
        found = list(self._own(queue, page))
        results = self._app.results
        if results is None or not found:
            return
        news = results.bury([record for _, _, record in found])
        found = [each for each, new in zip(found, news, strict=True) if new]
        for message, letter, record in found:
            if record.outcome is not None:
                dead = DeadLetter(record.outcome.error_type, record.outcome.error)
                logger.warning(
                    "task %s %s was dead-lettered by the broker: %s: %s",
                    message.task,
                    message.id,
                    dead.reason,
                    dead.description,
                )
                count = letter.delivery_count
                self._mailbox.post(partial(self._journal.buried, message, queue, count, dead))
        self._set_bits(found)

    def _set_bits(self, found: Sequence[tuple[TaskMessage, Peeked, RunRecord]]) -> None:
        """Set the bits of tasks of workflows; what fails here, housekeeping of workflows does."""
        ends = [
            TaskEnd(
                message.workflow,
                Place.read(message.node),
                message.generation,
                record.state,
                None,
                record.outcome.error_type if record.outcome else "",
                record.outcome.error if record.outcome else "",
                repeated=True,
            )
            for message, _, record in found
            if message.workflow is not None and message.node is not None
        ]
        if ends:
            WorkflowEnds(self._app.workflows.engine).ended(ends)

    def _own(
        self, queue: str, page: Sequence[Peeked]
    ) -> Iterable[tuple[TaskMessage, Peeked, RunRecord]]:
        """The letters that the broker itself made, each with the record of the run it ended."""
        now = self._clock.wall()
        oldest = now - self._app.settings.result_retention_seconds
        for letter in page:
            state = REASONS.get(letter.dead_letter_reason or "")
            if state is None or letter.enqueued_at < oldest:
                continue  # a worker's own, with an outcome; or older than the results that are kept
            try:
                message = self._app.message_in(
                    letter.envelope, queue, letter.position, any_age=True
                )
            except CodecError:
                continue  # not a message of aztask
            dead = DeadLetter(letter.dead_letter_reason or "", letter.dead_letter_description or "")
            outcome = Outcome(state, dead, None, dead.reason, dead.description, at=now)
            key = RunKey(*message.key)
            yield message, letter, RunRecord(key, message.task, queue, state, outcome=outcome)
