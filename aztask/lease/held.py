"""One message under a lease, for code that has no tasks and no worker."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

from aztask.brokers.base import AnySession, Broker, Receiver
from aztask.brokers.delivery import Delivery, Lost, Unknown
from aztask.errors import AztaskError, BrokerUnavailable, LeaseLost
from aztask.lease.keeper import LeaseKeeper
from aztask.lease.state import Lease, LeaseState
from aztask.retry import UNDECODABLE
from aztask.settlement import Abandon, Complete, DeadLetter, Release, Settlement
from aztask.support.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger(__name__)

LONGEST_STEP = 1.0


class HeldLease:
    """A context manager: receives one message, renews its lease inside the block.

    Leaving the block unsettled abandons the message. An error while cleaning up is logged and
    never hides the error of the block.
    """

    def __init__(
        self,
        broker: Broker,
        queue: str,
        *,
        lease: float,
        max_lease: float,
        renew_at: float,
        wait: float,
        session: str | AnySession | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._broker = broker
        self._queue = queue
        self._seconds = lease
        self._max_lease = max_lease
        self._wait = wait
        self._session = session
        self._clock = clock
        self._keeper = LeaseKeeper(broker, clock=clock, renew_at=renew_at)
        self._receiver: Receiver | None = None
        self._lease: Lease | None = None

    @property
    def delivery(self) -> Delivery:
        """The delivery that is held."""
        return self._held().delivery

    @property
    def body(self) -> bytes:
        """The message's body as it travelled."""
        return self.delivery.envelope.body

    @property
    def lost(self) -> bool:
        """Whether somebody else may have the message by now."""
        return not self._held().alive(self._clock.monotonic())

    @property
    def remaining_seconds(self) -> float:
        """Seconds until it ends unless renewed."""
        return max(0.0, self._held().deadline - self._clock.monotonic())

    def ensure(self) -> None:
        """Return while the lease is held, raise LeaseLost when it is not: a fence in time."""
        if self.lost:
            raise LeaseLost(self._held().lost_reason or LeaseLost.__doc__)

    def complete(self) -> None:
        """The work is done: remove the message. Raises AlreadySettled, LeaseLost."""
        self._settle(Complete())

    def abandon(self) -> None:
        """Make the message available again at once."""
        self._settle(Abandon())

    def release(self) -> None:
        """Give the message back without counting the delivery."""
        self._settle(Release())

    def dead_letter(self, reason: str, description: str = "") -> None:
        """Move the message to the dead letters."""
        self._settle(DeadLetter(reason, description))

    def __enter__(self) -> Self:
        """Wait for a message. Raises LookupError when none came."""
        receiver = self._receiver = self._broker.receiver(
            self._queue, lease=self._seconds, session=self._session
        )
        give_up_at = self._clock.monotonic() + self._wait
        while (delivery := self._received(receiver)) is None:
            if self._clock.monotonic() >= give_up_at:
                receiver.close()
                raise LookupError(f"no message came on {self._queue!r} within {self._wait:g} s")
        now = self._clock.monotonic()
        self._lease = Lease.of(delivery, seconds=self._seconds, limit_at=now + self._max_lease)
        self._keeper.start().hold(receiver, [self._lease])
        return self

    def _received(self, receiver: Receiver) -> Delivery | None:
        """One message, if one comes. A message that cannot be read is dead-lettered instead."""
        deliveries = receiver.receive(1, min(LONGEST_STEP, self._wait))
        for delivery in deliveries:
            problem = delivery.envelope.problem
            if not problem:
                return delivery
            logger.warning("message %s on %s: %s", delivery.position, self._queue, problem)
            receiver.settle([(delivery, DeadLetter(UNDECODABLE, problem))])
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._held().state in (LeaseState.HELD, LeaseState.RENEWING):
                self.abandon()
        except AztaskError as problem:
            logger.warning("could not abandon a message of %s: %s", self._queue, problem)
        finally:
            self._keeper.stop()
            if self._receiver is not None:
                self._receiver.close()

    def _held(self) -> Lease:
        if self._lease is None:
            raise RuntimeError("use it as a context manager: with app.receive(...) as lease")
        return self._lease

    def _settle(self, settlement: Settlement) -> None:
        """Settle once. If the broker's answer is lost, it may or may not have happened."""
        lease, receiver = self._held(), self._receiver
        assert receiver is not None  # set together with the lease
        self._keeper.begin(lease)
        try:
            answer = receiver.settle([(lease.delivery, settlement)])[0]
        except AztaskError:
            self._keeper.settlement_failed(lease)
            raise
        self._keeper.book([(lease, answer)])
        if isinstance(answer, Lost):
            raise LeaseLost(answer.reason or LeaseLost.__doc__)
        if isinstance(answer, Unknown):
            raise BrokerUnavailable(
                f"the settlement was not confirmed ({answer.reason}); it may have happened"
            )
