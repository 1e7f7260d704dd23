"""The messages in a queue, read without leasing them, for ``aztask queues peek`` and ``cancel``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from aztask.app import App
from aztask.brokers.base import Capabilities, Peeked
from aztask.errors import CodecError
from aztask.message.message import TaskMessage

PAGE: Final = 500
MOST_READ: Final = 100_000
"""Messages of one queue that are read at most: some seconds of reading."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message in a queue. message: None if it is not a task message; `problem` says why."""

    queue: str
    peeked: Peeked
    message: TaskMessage | None
    problem: str = ""

    @property
    def id(self) -> str:
        """The task id; without one the message id; without either ``@POSITION``."""
        known = self.message.id if self.message else self.peeked.envelope.message_id
        return known or f"@{self.peeked.position}"

    @property
    def due(self) -> float | None:
        """When it may start, UTC epoch seconds; None for now."""
        if self.peeked.due is not None:
            return self.peeked.due
        return self.message.eta if self.message else None


def waiting(app: App, queue: str, *, limit: int = MOST_READ) -> Iterator[Waiting]:
    """Up to `limit` messages of the queue, as far as its service shows them: see `hidden`.

    Raises QueueNotFound and the other errors of `Broker.peek`.
    """
    paged = app.broker.capabilities.paged_peek
    page = app.broker.peek(queue, limit=min(limit, PAGE))
    left = limit
    while page:
        for peeked in page[:left]:
            yield _read(app, queue, peeked)
        left -= len(page)
        if not paged or left <= 0:
            return
        page = app.broker.peek(queue, after=page[-1].position, limit=min(left, PAGE))


def hidden(capabilities: Capabilities) -> str:
    """What `waiting` does not show, as a sentence without its end; "" if it shows everything."""
    if not capabilities.paged_peek:
        return (
            "this service shows only the first 32 messages that could be received now: no "
            "scheduled and no leased ones"
        )
    if not capabilities.peeks_leases:
        return "this service shows leased messages as active"
    return ""


def _read(app: App, queue: str, peeked: Peeked) -> Waiting:
    try:
        message = app.codec.from_envelope(peeked.envelope, queue, any_age=True)
    except CodecError as error:
        return Waiting(queue, peeked, None, str(error))
    return Waiting(queue, peeked, message)
