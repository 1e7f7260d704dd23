"""A broker that accepts everything and keeps nothing, and an app on it: what a submission costs
without its broker. For benchmarks only: it lives here, and no URL leads to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from aztask import App
from aztask.brokers.base import Capabilities, Peeked, QueueOptions, QueueStats, Receiver
from aztask.errors import CapabilityError
from aztask.message.envelope import Envelope


class NullBroker:
    """Counts what it is sent."""

    capabilities = Capabilities(name="null", remote=False)

    def __init__(self) -> None:
        self.sent = 0

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        self.sent += len(envelopes)

    def declare(self, queue: str, options: QueueOptions = QueueOptions()) -> None:
        """There is nothing to create."""

    def delete(self, queue: str) -> None:
        """There is nothing to delete."""

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
        """There is nothing to close."""


app = App("bench", broker=NullBroker())


@app.task
def resize(path: str, width: int, height: int) -> None:
    """What a row becomes."""
