"""A broker that accepts all messages and keeps none, to measure a submission without its broker.

It is for benchmarks only, so no URL selects it.
"""

from __future__ import annotations

from collections.abc import Sequence

from aztask import App
from aztask.errors import CapabilityError
from aztask.message.envelope import Envelope
from aztask.queues.base import Capabilities, Peeked, QueueOptions, QueueStats, Receiver


class NullBroker:
    """A broker that only counts the messages it gets."""

    capabilities = Capabilities(name="null", remote=False)

    def __init__(self) -> None:
        self.sent = 0

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        self.sent += len(envelopes)

    def declare(self, queue: str, options: QueueOptions = QueueOptions()) -> None:
        """Do nothing: there is nothing to create."""

    def delete(self, queue: str) -> None:
        """Do nothing: there is nothing to delete."""

    def queues(self) -> list[str]:
        return []

    def cancel_scheduled(self, queue: str, message_ids: Sequence[str]) -> int:
        return 0

    def receiver(self, queue: str, **options: object) -> Receiver:
        raise CapabilityError("the null broker keeps nothing: there is nothing to receive")

    def stats(self, queue: str) -> QueueStats:
        return QueueStats(queue, 0, 0, 0, 0, 0)

    def peek(self, queue: str, **options: object) -> list[Peeked]:
        return []

    def purge(self, queue: str, *, dead_letter: bool = False) -> int:
        return 0

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


app = App("bench", broker=NullBroker())


@app.task
def resize(path: str, width: int, height: int) -> None:
    """The task that each row becomes."""
