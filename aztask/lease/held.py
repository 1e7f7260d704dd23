"""One message under a lease, for code without tasks and without a worker."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aztask.brokers.base import AnySession, Broker, Receiver
from aztask.brokers.delivery import Delivery, Lost, Unknown
from aztask.errors import BrokerUnavailable, LeaseLost
from aztask.lease.keeper import LeaseKeeper
from aztask.lease.state import Lease, LeaseState
from aztask.retry import UNDECODABLE
from aztask.settlement import Abandon, Complete, DeadLetter, Release, Settlement
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.support.display import safe_str

logger = logging.getLogger(__name__)

LONGEST_STEP = 1.0


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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._broker = broker
        self._queue = queue
        self._terms = terms
        self._wait = wait
        self._session = session
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
        """The message's body as bytes, not decoded."""
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

    def __enter__(self) -> Self:
        """Wait for a message. Raises LookupError if none came."""
        receiver = self._receiver = self._broker.receiver(
            self._queue, lease=self._terms.seconds, session=self._session
        )
        give_up_at = self._clock.monotonic() + self._wait
        while (delivery := self._received(receiver)) is None:
            if self._clock.monotonic() >= give_up_at:
                receiver.close()
                raise LookupError(f"no message came on {self._queue!r} within {self._wait:g} s")
        now = self._clock.monotonic()
        limit_at = now + self._terms.max_seconds
        self._lease = Lease.of(delivery, seconds=self._terms.seconds, limit_at=limit_at)
        self._keeper.start().hold(receiver, [self._lease])
        return self

    def _received(self, receiver: Receiver) -> Delivery | None:
        """One message, or None if none came. An unreadable message is dead-lettered instead."""
        deliveries = receiver.receive(1, min(LONGEST_STEP, self._wait))
        for delivery in deliveries:
            problem = delivery.envelope.problem
            if not problem:
                return delivery
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
