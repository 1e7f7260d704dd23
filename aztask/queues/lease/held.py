"""One message under a lease, for code without tasks and without a worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from aztask.errors import BrokerUnavailable, CapabilityError, LeaseLost
from aztask.message.envelope import Envelope
from aztask.message.message import next_link
from aztask.queues.base import AnySession, Broker, Receiver
from aztask.queues.delivery import Delivery, Lost, Position, Unknown
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.queues.lease.state import Lease, LeaseState
from aztask.retry import EXPIRED, UNDECODABLE
from aztask.settlement import (
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Release,
    Resubmit,
    Settlement,
    moved_dead_letter,
    with_envelope,
)
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.display import safe_str
from aztask.support.durations import to_seconds

logger = logging.getLogger(__name__)

LONGEST_STEP = 1.0
CONFIRM_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How long a message is held.

    * `seconds`: the lease to request.
    * `max_seconds`: the limit of the lease with all its renewals.
    * `renew_at`: the share of the lease after which it is renewed.
    """

    seconds: float
    max_seconds: float
    renew_at: float


class HeldLease:
    """One message under a lease, received and held by a ``with`` block; see `App.receive`.

    ::

        with app.receive("orders") as lease:
            handle(lease.body)
            lease.complete()

    The lease is renewed inside the block, up to ``max_lease``. If you leave the block without
    settling, the message is abandoned: it is available again at once. An error in that clean-up is
    logged and never hides an error of the block.
    """

    def __init__(
        self,
        broker: Broker,
        queue: str,
        terms: LeaseTerms,
        *,
        wait: float,
        session: str | AnySession | None = None,
        deferred: Position | None = None,
        stop: threading.Event | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Called by `App.receive`, which describes the options.

        * `stop`: once it is set, the wait for a message ends within a second.
        """
        self._broker = broker
        self._queue = queue
        self._terms = terms
        self._wait = wait
        self._session = session
        self._deferred = deferred
        self._stop = stop or threading.Event()
        self._clock = clock
        self._keeper = LeaseKeeper(broker, clock=clock, renew_at=terms.renew_at)
        self._receiver: Receiver | None = None
        self._lease: Lease | None = None

    @property
    def delivery(self) -> Delivery:
        """The delivery: envelope, position, delivery count and deadline."""
        return self._held().delivery

    @property
    def body(self) -> bytes:
        """The message's body as bytes, not decoded; empty if it is stored apart."""
        return self.delivery.envelope.body

    @property
    def lost(self) -> bool:
        """True if the lease has ended, so that another receiver may have the message."""
        return not self._held().alive(self._clock.monotonic())

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the lease ends unless it is renewed; 0.0 once it has ended."""
        return max(0.0, self._held().deadline - self._clock.monotonic())

    def ensure(self) -> None:
        """Return while the lease is held; raise LeaseLost once it is not.

        This is a fence in time, not a transaction: see `TaskLease.ensure`.
        """
        if self.lost:
            raise LeaseLost(self._held().lost_reason or LeaseLost.__doc__)

    def extend(self, seconds: float) -> None:
        """Hold the lease for at least `seconds` from now; returns when the broker has agreed.

        ``max_lease`` caps it. Where the queue sets the duration (Service Bus), the lease is renewed
        at once and then as usual. Raises LeaseLost, also if ``max_lease`` allows no further
        renewal; AlreadySettled; BrokerUnavailable if no answer came in time; and ValueError if
        `seconds` is not above 0.
        """
        if not seconds > 0:
            raise ValueError(f"extend takes seconds above 0, not {seconds!r}")
        self.ensure()
        lease = self._held()
        patience = min(CONFIRM_SECONDS, self.remaining_seconds)
        if not self._keeper.extend_now(lease, max(seconds, lease.seconds), patience):
            self.ensure()
            raise BrokerUnavailable("the lease was not renewed yet; it is still held")

    def update(self, body: bytes, *, headers: Mapping[str, Any] | None = None) -> None:
        """Replace the message's content in place and renew the lease: a checkpoint.

        * `body`: the new body. If the process dies after this, the next delivery has it.
        * `headers`: the new headers; None keeps them.

        A task's signed message no longer fits its signature afterwards: workers refuse it.
        Storage queues and ``local://`` can do this. On Service Bus it raises CapabilityError; use
        `resubmit` with a body there. Raises MessageTooLarge or EncodeError if the content cannot
        be stored (the message stays as it is), LeaseLost, AlreadySettled, and BrokerUnavailable if
        the broker did not confirm it.
        """
        lease, receiver = self._held(), self._receiver
        assert receiver is not None  # noqa: S101  # set together with the lease
        can = self._broker.capabilities
        if not can.update:
            raise CapabilityError(
                f"{can.name} cannot change a message in place; resubmit it with the new body: "
                "lease.resubmit(body=...)"
            )
        envelope = self._changed(body, headers)
        self._broker.check(envelope)
        answer = self._keeper.update(lease, receiver, envelope)
        if isinstance(answer, Lost):
            raise LeaseLost(answer.reason or LeaseLost.__doc__)
        if isinstance(answer, Unknown):
            raise BrokerUnavailable(
                f"the update was not confirmed ({answer.reason}); it may have happened"
            )

    def complete(self) -> None:
        """Remove the message: its work is done.

        Raises AlreadySettled, LeaseLost, and BrokerUnavailable if the broker did not confirm it.
        """
        self._settle(Complete())

    def abandon(self) -> None:
        """Make the message available again at once. Raises what `complete` raises."""
        self._settle(Abandon())

    def release(self) -> None:
        """Give the message back without counting the delivery. Raises what `complete` raises."""
        self._settle(Release())

    def dead_letter(self, reason: str, description: str = "") -> None:
        """Move the message to the dead letters. Raises what `complete` raises."""
        self._settle(DeadLetter(reason, description))

    def resubmit(
        self,
        delay: float | timedelta = 0.0,
        *,
        body: bytes | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> None:
        """Send the message again, available after `delay` seconds, and remove this one.

        * `delay`: seconds or a ``timedelta``.
        * `body`, `headers`: the content of the message that is sent; None keeps the present one.

        A message that would expire before then is dead-lettered as ``expired``. In a session the
        message is sent to the session's end. On Service Bus the new message is sent before this
        one is completed: if the process dies in between, both exist, and this one sends the other
        again under the same id, which duplicate detection drops where the queue has it. Raises
        what `complete` raises, and MessageTooLarge or EncodeError if the content cannot be stored.
        """
        seconds = to_seconds(delay, "delay")
        present = self.delivery.envelope
        due = self._clock.wall() + seconds
        if present.expires_at is not None and due >= present.expires_at:
            self._settle(DeadLetter(EXPIRED, "it would expire before its next delivery"))
            return
        envelope = self._changed(present.body if body is None else body, headers)
        clone = replace(envelope, message_id=next_link(present), delay=seconds)
        self._broker.check(clone)
        self._settle(with_envelope(Resubmit(seconds, due), clone, seconds))

    def defer(self) -> Position:
        """Set the message aside and return its position, by which alone it is received again.

        ::

            position = lease.defer()
            ...
            with app.receive("orders", deferred=position) as lease:

        Keep the position: a message whose position is lost is never received again. Service Bus and
        ``local://`` can do this, outside of sessions; otherwise it raises CapabilityError. Raises
        what `complete` raises.
        """
        _check_defer(self._broker, self._session)
        position = self.delivery.position
        self._settle(Defer())
        return position

    def __enter__(self) -> Self:
        """Wait for a message. Raises LookupError if none came."""
        if self._deferred is not None:
            _check_defer(self._broker, self._session)
        receiver = self._broker.receiver(
            self._queue, lease=self._terms.seconds, session=self._session
        )
        try:
            delivery = self._first(receiver)
        except BaseException:
            receiver.close()
            raise
        self._receiver = receiver
        now = self._clock.monotonic()
        limit_at = now + self._terms.max_seconds
        self._lease = Lease.of(delivery, seconds=self._terms.seconds, limit_at=limit_at)
        self._keeper.start().hold(receiver, [self._lease])
        return self

    def _first(self, receiver: Receiver) -> Delivery:
        """The message to hold. Raises LookupError if none came in time."""
        if self._deferred is not None:
            delivery = self._readable(receiver, receiver.receive_deferred([self._deferred]))
            if delivery is None:
                raise LookupError(
                    f"{self._queue!r} has no deferred message at position {self._deferred!r} that "
                    "is free"
                )
            return delivery
        give_up_at = self._clock.monotonic() + self._wait
        step = min(LONGEST_STEP, self._wait)
        while (delivery := self._readable(receiver, receiver.receive(1, step))) is None:
            if self._stop.is_set() or self._clock.monotonic() >= give_up_at:
                raise LookupError(f"no message came on {self._queue!r} within {self._wait:g} s")
        return delivery

    def _readable(self, receiver: Receiver, deliveries: list[Delivery]) -> Delivery | None:
        """The received message, if there is one. An unreadable one is dead-lettered instead."""
        for delivery in deliveries:
            problem = delivery.envelope.problem
            dead = moved_dead_letter(delivery.envelope)
            if not problem and dead is None:
                return delivery
            if dead is not None:
                receiver.settle([(delivery, dead)])
                continue
            logger.warning(
                "message %s on %s cannot be read, it is dead-lettered: %s",
                delivery.position,
                self._queue,
                problem,
            )
            receiver.settle([(delivery, DeadLetter(UNDECODABLE, problem))])
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        steps = [self._abandon_unsettled, self._keeper.stop]
        if self._receiver is not None:
            steps.append(self._receiver.close)
        for step in steps:
            try:
                step()
            except Exception as problem:  # noqa: BLE001  # none may hide the block's own error
                logger.warning(
                    "could not clean up after a message of %s, it is available again when its "
                    "lease ends: %s: %s",
                    self._queue,
                    type(problem).__name__,
                    safe_str(problem),
                )

    def _abandon_unsettled(self) -> None:
        """Abandon the message if it is not settled; a renewal under way is waited for."""
        if self._held().state in (LeaseState.HELD, LeaseState.RENEWING):
            self.abandon()

    def _held(self) -> Lease:
        if self._lease is None:
            raise RuntimeError("use it as a context manager: with app.receive(...) as lease")
        return self._lease

    def _changed(self, body: bytes, headers: Mapping[str, Any] | None) -> Envelope:
        """The message with other content. Raises TypeError for a body that is not bytes."""
        if not isinstance(body, bytes):
            raise TypeError(f"body takes bytes, not {type(body).__name__}")
        envelope = self.delivery.envelope
        kept = envelope.headers if headers is None else dict(headers)
        return replace(envelope, body=body, headers=kept, delay=0.0)

    def _settle(self, settlement: Settlement) -> None:
        """Settle once. If the broker's answer is lost, it may or may not have happened."""
        lease, receiver = self._held(), self._receiver
        assert receiver is not None  # noqa: S101  # set together with the lease
        self._keeper.begin(lease)
        try:
            answer = receiver.settle([(lease.delivery, settlement)])[0]
        except BaseException:  # whatever it is, the lease is held until the block is left
            self._keeper.settlement_failed(lease)
            raise
        self._keeper.book([(lease, answer)])
        if isinstance(answer, Lost):
            raise LeaseLost(answer.reason or LeaseLost.__doc__)
        if isinstance(answer, Unknown):
            raise BrokerUnavailable(
                f"the settlement was not confirmed ({answer.reason}); it may have happened"
            )


def _check_defer(broker: Broker, session: str | AnySession | None) -> None:
    """Raise CapabilityError unless a message can be deferred and received again."""
    if not broker.capabilities.defer:
        raise CapabilityError(
            f"{broker.capabilities.name} cannot defer messages; resubmit them with a delay: "
            "lease.resubmit(delay=...)"
        )
    if session is not None:
        raise CapabilityError(
            "a message of a session cannot be deferred; resubmit it, or release it to keep its "
            "place"
        )
