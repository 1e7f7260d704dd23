"""A receiver with made-up answers, and leases of one of its messages."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from still import Still

from aztask.message.envelope import Envelope
from aztask.queues.base import Capabilities
from aztask.queues.delivery import Delivery, Settled
from aztask.queues.lease.held import HeldLease, LeaseTerms
from aztask.queues.lease.state import NO_RENEWAL
from aztask.settlement import Settlement

NOW = 1_000_000.0


class Receiver:
    """brings: what each receive finds. answers: what settlements are answered; by default yes."""

    def __init__(self, clock: Still) -> None:
        self.clock = clock
        self.brings: deque[list[Delivery]] = deque()
        self.answers: deque[Any] = deque()
        self.waits: list[tuple[int, float]] = []
        self.settled: list[tuple[Delivery, Settlement]] = []
        self.closed = 0

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        self.waits.append((limit, wait))
        found = self.brings.popleft() if self.brings else []
        if not found:
            self.clock.now += wait
        return found

    def settle(self, pairs: list[tuple[Delivery, Settlement]]) -> list[Any]:
        answer = self.answers.popleft() if self.answers else Settled()
        if isinstance(answer, Exception):
            raise answer
        self.settled += pairs
        return [answer] * len(pairs)

    def close(self) -> None:
        self.closed += 1


class Bench:
    def __init__(self) -> None:
        self.clock = Still(NOW)
        self.receiver = Receiver(self.clock)
        self.asked: list[Any] = []

    def delivery(self, body: bytes = b"order 1", problem: str = "") -> Delivery:
        envelope = Envelope(body, problem=problem)
        return Delivery("orders", envelope, 7, "t", 1, 0.0, self.clock.now + 60.0, 60.0)

    def lease(self, *, wait: float = 5.0, **options: Any) -> HeldLease:
        def receiver(queue: str, **asked: Any) -> Receiver:
            self.asked.append((queue, asked))
            return self.receiver

        broker: Any = SimpleNamespace(
            capabilities=Capabilities("made up", remote=False), receiver=receiver
        )
        return HeldLease(
            broker, "orders", LeaseTerms(60.0, 500.0, NO_RENEWAL), wait=wait, clock=self.clock,
            **options,
        )  # fmt: skip

    def held(self, **options: Any) -> HeldLease:
        self.receiver.brings.append([self.delivery()])
        return self.lease(**options)
