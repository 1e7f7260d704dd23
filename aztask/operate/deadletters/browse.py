"""All dead letters of a queue, as the service shows them or from the index beside them.

If the service can list all dead letters page by page, its list is used. If it shows only the first
few, the others come from the result store's index, if there is one.

A service that has no dead letters of its own stores a copy and then deletes the original. If the
process dies in between, the next delivery stores a second copy: both are one dead letter, and are
listed and counted as one. Acting on a dead letter takes all of its copies, and counts one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from aztask.app import App
from aztask.operate.deadletters.letters import DeadLetterView
from aztask.queues.base import Delivery, MessageState, Peeked
from aztask.stores.records.deadindex import UNDER_WAY, IndexedDeadLetter, index_for, key_of
from aztask.support.clock import Clock

PAGE: Final = 100


class DeadLetterBrowser:
    """Lists the dead letters of one queue without taking them, and keeps the index up to date."""

    def __init__(
        self, app: App, queue: str, clock: Clock, damaged: dict[str, str] | None = None
    ) -> None:
        """`damaged`: receives the key and the reason of each damaged note."""
        self._damaged = {} if damaged is None else damaged
        self._app = app
        self._queue = queue
        self._clock = clock
        self._index = index_for(app.broker, app.results)
        self._met: set[str] = set()
        self._held = 0
        self._began = clock.wall()

    @property
    def whole(self) -> bool:
        """True if the list has no pages: the service shows its first ones, an index the others."""
        return self._index is not None or not self._app.broker.capabilities.paged_peek

    def all(self) -> Iterator[Peeked]:
        """Every known dead letter, from the service or from the index; its copies count as one."""
        if self._index is None:
            paged = self._app.broker.capabilities.paged_peek
            yield from self._shown() if paged else _distinct(self._peek())
            return
        shown = self._peek()
        yield from self._with_reasons(_distinct(shown))
        shown_keys = {key_of(each.envelope) for each in shown}
        if len(shown) >= (self._app.broker.stats(self._queue).dead or 0):
            # the service's count is never too low, so these were all
            self._index.keep_only(self._queue, shown_keys, self._clock.wall() - UNDER_WAY)
            return
        for each in self._index.notes(self._queue):
            if each.key in shown_keys:
                continue
            if each.damage:
                self._damaged[each.key] = each.damage
            else:
                yield _as_peeked(each)

    def copies(self) -> int:
        """How many of the messages that the service shows are further copies of dead letters."""
        if self._app.broker.capabilities.paged_peek:
            return 0
        shown = self._peek()
        return len(shown) - len(_distinct(shown))

    def _with_reasons(self, shown: Sequence[Peeked]) -> Sequence[Peeked]:
        """The same dead letters, with the reasons that did not fit into their messages.

        Another program's message may fill a Storage queue's message to the last byte. Its dead
        letter is the same text, and only the index has the reason.
        """
        bare = {key_of(each.envelope) for each in shown if not each.dead_letter_reason}
        found: dict[str, IndexedDeadLetter] = {}
        for note in self._index.notes(self._queue) if self._index and bare else ():
            if note.key in bare and not note.damage:
                found[note.key] = note
                if len(found) == len(bare):
                    break
        return [_explained(each, found.get(key_of(each.envelope))) for each in shown]

    def _shown(self) -> Iterator[Peeked]:
        page = self._peek()
        while page:
            yield from page
            position = page[-1].position
            page = self._app.broker.peek(self._queue, dead_letter=True, after=position, limit=PAGE)

    def _peek(self) -> list[Peeked]:
        return self._app.broker.peek(self._queue, dead_letter=True, limit=PAGE)

    # -- during a replay or a purge of all ---------------------------------------------------

    def met(self, deliveries: Sequence[Delivery]) -> None:
        """Add notes for dead letters that were received and have none."""
        if self._index is None:
            return
        self._met.update(key_of(each.envelope) for each in deliveries)
        self._held += len(deliveries)
        self._index.note([_as_noted(each, self._clock.wall()) for each in deliveries])

    def gone(self, letters: Sequence[DeadLetterView]) -> None:
        """Delete the notes of dead letters that were replayed or removed."""
        self._held -= len(letters)
        if self._index is not None and letters:
            self._index.drop(self._queue, {key_of(each.envelope) for each in letters})

    def met_all(self) -> None:
        """Delete the notes of dead letters that were not met, if no other ones exist.

        The service's count is never too low: if it is not above the number that we hold, these are
        all.
        """
        if self._index is None:
            return
        if (self._app.broker.stats(self._queue).dead or 0) <= self._held:
            self._index.keep_only(self._queue, self._met, self._began - UNDER_WAY)

    def emptied(self) -> None:
        """Delete all notes: every dead letter was deleted."""
        if self._index is not None:
            self._index.keep_only(self._queue, (), self._clock.wall())


def _distinct(shown: Sequence[Peeked]) -> list[Peeked]:
    """The first copy of each dead letter."""
    found: dict[str, Peeked] = {}
    for each in shown:
        found.setdefault(key_of(each.envelope), each)
    return list(found.values())


def _explained(peeked: Peeked, note: IndexedDeadLetter | None) -> Peeked:
    if note is None or peeked.dead_letter_reason:
        return peeked
    return replace(peeked, dead_letter_reason=note.reason, dead_letter_description=note.description)


def _as_noted(delivery: Delivery, now: float) -> IndexedDeadLetter:
    return IndexedDeadLetter(
        delivery.queue,
        delivery.envelope,
        delivery.dead_letter_reason or "",
        delivery.dead_letter_description or "",
        delivery.enqueued_at or now,
        delivery.delivery_count,
    )


def _as_peeked(noted: IndexedDeadLetter) -> Peeked:
    return Peeked(
        noted.envelope,
        noted.key,
        MessageState.ACTIVE,
        noted.delivery_count,
        noted.at,
        None,
        noted.reason,
        noted.description,
    )
