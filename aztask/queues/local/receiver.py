"""Receivers of the local broker: waiting for messages, holding their leases, settling them.

Rules
1. The engine alone decides whether a lease holds. It uses the same clock as our deadlines, and it
   serialises renewals and settlements of all threads and processes.
2. A delivery remembers that it was settled. If the transaction that settled it is rolled back, the
   delivery is unsettled again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from aztask.errors import ConfigurationError
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    Delivery,
    Lost,
    Position,
    ReceiverOptions,
    Renewed,
    Settled,
    Unknown,
)
from aztask.queues.delivery import OwnDelivery, unsettled
from aztask.queues.engine import Engine, Leased, NewMessage, Waiter, WakeUp
from aztask.queues.local.payload import envelope_of, new_message, payload_of
from aztask.settlement import (
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Release,
    Resubmit,
    Settlement,
)

REST_SECONDS: Final = 0.012
"""The shortest time between two checks for writes of other processes: 0.6 % of a core."""

RETRY_SECONDS: Final = 0.05
"""Pause before the next check if all messages belong to sessions that other receivers hold."""

GONE: Final = Lost("the lease has ended, or the message was settled before")


_T = TypeVar("_T")


class LocalDelivery(OwnDelivery):
    """A delivery of the local broker."""

    __slots__ = ()


class LocalReceiver:
    """Takes deliveries from one queue, or from its dead letters."""

    def __init__(self, engine: Engine, wakeup: WakeUp, options: ReceiverOptions) -> None:
        self._engine = engine
        self._clock = engine.clock
        self._wakeup = wakeup
        self._queue = options.queue
        self._lease = options.lease
        self._dead_letter = options.dead_letter
        self._delete = options.delete
        self._waiter = Waiter(wakeup.watch, rest=REST_SECONDS, blind=REST_SECONDS)
        self._closed = False
        self._looked: tuple[int, int] | None = None

    def set_lease(self, seconds: float) -> None:
        """Set the lease, in seconds, for the next receives."""
        self._lease = seconds

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Up to `limit` deliveries, as soon as there is one; [] after `wait` seconds."""
        deliveries = [] if self._ended else self._take(limit)
        return deliveries or self._once_there(partial(self._take, limit), wait) or []

    def await_message(self, seconds: float) -> bool:
        """True once there may be a message, which is left there; False after `seconds`."""
        return bool(self._once_there(lambda: True, seconds))

    def has_news(self) -> bool:
        """True if there may be a message that was not there at the last call."""
        looked = self._engine.database.others_changes(), self._wakeup.count
        if looked == self._looked:
            return False
        self._looked = looked  # before the look: what comes after it is news
        return self._engine.pending(self._queue, dead_letter=self._dead_letter) == 0.0

    def _once_there(self, take: Callable[[], _T], seconds: float) -> _T | None:
        """What `take` finds, as soon as there may be a message; None after `seconds`."""
        until = time.monotonic() + seconds
        known_changes, next_check = -1, 0.0
        while not self._ended:
            left = until - time.monotonic()
            if left <= 0:
                break
            count, now = self._wakeup.count, self._clock.monotonic()
            changes = self._engine.database.changes()
            if changes != known_changes or now >= next_check:
                if changes != known_changes:
                    self._waiter.found_change()
                known_changes = changes
                pending = self._engine.pending(self._queue, dead_letter=self._dead_letter)
                next_check = now + (pending or RETRY_SECONDS)
                if pending == 0.0 and (found := take()):
                    return found
            self._waiter.wait(min(left, max(0.0, next_check - now)), partial(self._notified, count))
        return None

    def _notified(self, count: int) -> bool:
        return self._wakeup.count != count

    @property
    def _ended(self) -> bool:
        return self._closed or self._wakeup.closed

    def _take(self, limit: int) -> list[Delivery]:
        lease = self._lease
        deadline = self._clock.monotonic() + lease
        return self._deliveries(
            self._engine.receive(
                self._queue,
                limit,
                lease,
                dead_letter=self._dead_letter,
                delete=self._delete,
            ),
            deadline,
            lease,
        )

    def _deliveries(
        self, messages: Sequence[Leased], deadline: float, lease: float
    ) -> list[Delivery]:
        queue, settled = self._queue, self._delete
        deliveries: list[Delivery] = []
        for seq, token, payload, _, session, count, enqueued_at, _, _, reason, text in messages:
            envelope = envelope_of(payload)
            deliveries.append(
                LocalDelivery(
                    queue,
                    envelope,
                    seq,
                    token,
                    count,
                    enqueued_at,
                    deadline,
                    lease,
                    session,
                    reason,
                    text,
                    settled,
                )
            )
        return deliveries

    def receive_deferred(self, positions: Sequence[Position]) -> list[Delivery]:
        """Lease deferred messages, or any dead letters; missing and leased ones are skipped."""
        lease = self._lease
        deadline = self._clock.monotonic() + lease
        messages = self._engine.receive_deferred(
            self._queue,
            [sequence_number(position) for position in positions],
            lease,
            dead_letter=self._dead_letter,
            delete=self._delete,
            waiting=self._dead_letter,
        )
        return self._deliveries(messages, deadline, lease)

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        """Extend each lease to `seconds` from now (the receiver's lease by default)."""
        lease = self._lease if seconds is None else seconds
        deadline = self._clock.monotonic() + lease
        ends = self._engine.renew(
            self._queue, leases(deliveries), lease, dead_letter=self._dead_letter
        )
        return renewed(deliveries, ends, deadline, lease)

    def update(self, delivery: Delivery, envelope: Envelope) -> Renewed | Lost | Unknown:
        """Replace the message's content in place, also in `delivery`, and renew its lease.

        If the task extended its lease beyond the receiver's, the longer duration is kept.
        """
        lease = max(self._lease, delivery.lease_seconds)
        deadline = self._clock.monotonic() + lease
        ((seq, token),) = leases([delivery])
        end = self._engine.update(
            self._queue,
            seq,
            token,
            payload_of(envelope),
            lease,
            dead_letter=self._dead_letter,
        )
        if end is not None:
            delivery.envelope = envelope
        return renewed([delivery], [end], deadline, lease)[0]

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        """Carry out each settlement, all in one transaction.

        If the process dies, either all settlements took effect, clones included, or none did.
        """
        ours = [unsettled(LocalDelivery, delivery) for delivery, _ in pairs]
        kinds = {type(settlement) for _, settlement in pairs}
        if kinds == {Complete}:
            answers = self._engine.complete(
                self._queue, leases(ours), dead_letter=self._dead_letter
            )
        else:
            with self._engine.database.transaction():
                answers = [self._settle(delivery, settlement) for delivery, settlement in pairs]
            self._engine.database.at_end(self._wakeup.notify)
        done = [delivery for delivery, held in zip(ours, answers, strict=True) if held]
        self._engine.database.at_end(partial(_mark, done))
        _mark(done, True)
        return [Settled() if held else GONE for held in answers]

    def _settle(self, delivery: Delivery, settlement: Settlement) -> bool:
        engine, queue, dead = self._engine, self._queue, self._dead_letter
        held = leases([delivery])
        match settlement:
            case Complete():
                answers = engine.complete(queue, held, dead_letter=dead)
            case Abandon():
                answers = engine.abandon(queue, held, dead_letter=dead)
            case Release():
                answers = engine.release(queue, held, dead_letter=dead)
            case Defer():
                answers = engine.defer(queue, held, dead_letter=dead)
            case DeadLetter(reason, description):
                answers = engine.dead_letter(queue, held, reason, description, dead_letter=dead)
            case Resubmit():
                clone = self._clone(settlement)
                answers = engine.replace(queue, [(*held[0], clone)], dead_letter=dead)
        return answers[0]

    def _clone(self, settlement: Resubmit) -> NewMessage:
        if settlement.envelope is None:
            raise ConfigurationError(
                "a resubmission needs its clone; give it with aztask.settlement.with_envelope"
            )
        return new_message(settlement.envelope, settlement.delay, self._clock.wall())

    def close(self) -> None:
        """Stop receiving. Leased messages stay leased until their leases end."""
        self._closed = True
        self._wakeup.notify()


def sequence_number(position: Position) -> int:
    """A position as the engine's number. Numbers beyond 64 bits become one that no message has."""
    try:
        number = int(position)
    except ValueError:
        raise ConfigurationError(
            f"{position!r} is not a position of the local broker; give a number that peek shows"
        ) from None
    return max(-1, min(number, 2**63 - 2))


def leases(deliveries: Sequence[Delivery]) -> list[tuple[int, str]]:
    return [(int(delivery.position), delivery.token) for delivery in deliveries]


def _mark(deliveries: Sequence[LocalDelivery], settled: bool) -> None:
    """Mark the deliveries as settled or not; also called when their transaction has ended."""
    for delivery in deliveries:
        delivery.settled = settled


def renewed(
    deliveries: Sequence[Delivery], ends: Sequence[float | None], deadline: float, lease: float
) -> list[Renewed | Lost | Unknown]:
    answers: list[Renewed | Lost | Unknown] = []
    for delivery, end in zip(deliveries, ends, strict=True):
        if end is None:
            answers.append(GONE)
        else:
            delivery.deadline, delivery.lease_seconds = deadline, lease
            answers.append(Renewed(deadline))
    return answers
