"""Watches for messages that the broker dead-lettered by itself, by its own count or time to live.

No worker sees that happen, so without this their results would wait for ever. Each look is one
page of each queue's dead letters, and the next look goes on where this one ended: what it costs
does not depend on how many there are, how soon each one is noticed does. Who notices first records
it, and alone tells of it. Without a result store there is nothing to record, and no watch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from aztask.app import App
from aztask.brokers.base import Peeked, Position
from aztask.errors import AztaskError, CodecError
from aztask.message.message import TaskMessage
from aztask.results.base import Outcome, RunKey, RunRecord, State
from aztask.settlement import DeadLetter
from aztask.support.clock import Clock

logger = logging.getLogger(__name__)

PAGE: Final = 100
COUNT_EXCEEDED: Final = "MaxDeliveryCountExceeded"
TIME_EXPIRED: Final = "TTLExpiredException"
REASONS: Final = {COUNT_EXCEEDED: State.FAILED, TIME_EXPIRED: State.EXPIRED}
"""The broker's own reasons, as Service Bus spells them (its documentation of dead-letter queues),
and the state that each one leaves."""

Tell = Callable[[TaskMessage, str, int, DeadLetter], None]


class DeadWatch:
    """Looks at the dead letters of some queues."""

    def __init__(self, app: App, queues: Sequence[str], clock: Clock, tell: Tell) -> None:
        """tell: gets the message, its queue, its delivery count and why it is dead; any thread."""
        self._app = app
        self._clock = clock
        self._tell = tell
        self._after: dict[str, Position | None] = dict.fromkeys(queues)

    @property
    def useful(self) -> bool:
        """Whether the broker dead-letters by itself, and there is a store to note it in."""
        return self._app.broker.capabilities.native_dead_letter and self._app.results is not None

    def look(self) -> None:
        """One page of each queue. A queue that cannot be looked at does not hinder the others."""
        for queue, after in self._after.items():
            try:
                page = self._app.broker.peek(queue, dead_letter=True, after=after, limit=PAGE)
                self._note(queue, page)
            except AztaskError as error:
                logger.info("the dead letters of %s cannot be looked at: %s", queue, error)
            else:
                self._after[queue] = page[-1].position if len(page) == PAGE else None

    def _note(self, queue: str, page: Sequence[Peeked]) -> None:
        """Record those that are new, then tell of them.

        Crash window: a process that dies in between has recorded them, so nobody tells of them any
        more. The results are right; the event and the line in the log are missing.
        """
        found = list(self._own(queue, page))
        results = self._app.results
        if results is None or not found:
            return
        news = results.bury([record for _, _, record in found])
        for (message, letter, record), new in zip(found, news, strict=True):
            if new and record.outcome is not None:
                dead = DeadLetter(record.outcome.error_type, record.outcome.error)
                logger.warning("task %s was dead-lettered by the broker: %s", message.id, dead)
                self._tell(message, queue, letter.delivery_count, dead)

    def _own(
        self, queue: str, page: Sequence[Peeked]
    ) -> Iterable[tuple[TaskMessage, Peeked, RunRecord]]:
        """Those that the broker itself dead-lettered, as runs that ended by it."""
        now = self._clock.wall()
        oldest = now - self._app.settings.result_retention_seconds
        for letter in page:
            state = REASONS.get(letter.dead_letter_reason or "")
            if state is None or letter.enqueued_at < oldest:
                continue  # ours, with an outcome; or one whose result is not kept any more
            try:
                message = self._app.codec.from_envelope(letter.envelope, queue)
            except CodecError:
                continue  # no task of ours
            dead = DeadLetter(letter.dead_letter_reason or "", letter.dead_letter_description or "")
            outcome = Outcome(state, dead, None, dead.reason, dead.description, at=now)
            key = RunKey(*message.key)
            yield message, letter, RunRecord(key, message.task, queue, state, outcome=outcome)
