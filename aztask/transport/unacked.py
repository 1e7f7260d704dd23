"""Messages that a Kombu channel has delivered and that are not acknowledged yet.

Rules
1. From receipt to settlement a keeper renews all of them, started or not.
2. Any thread may settle; each message is settled once. A settlement waits for a renewal that is
   under way.
3. A lost lease is logged: once when it is lost, and once when its consumer acknowledges too late.
   Nothing is settled then, and the message is delivered again.
4. A message whose lease expired before it was delivered is dropped, and never delivered.
5. On a remote broker an acknowledgement is carried out in the background, so it raises nothing: see
   `aztask.transport.completions`. A message of a session is completed before the next one comes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from aztask.brokers.base import Receiver
from aztask.brokers.delivery import Delivery, Lost, Settled, Unknown
from aztask.errors import AlreadySettled, AztaskError, BrokerError, BrokerUnavailable
from aztask.lease.keeper import LeaseKeeper
from aztask.lease.state import Lease, LeaseState
from aztask.settlement import Complete, Settlement, name_of
from aztask.support.clock import boot_seconds
from aztask.transport.completions import Completions

logger = logging.getLogger(__name__)

SETTLE_TRIES = 4
FIRST_PAUSE = 0.1
CLOSE_SECONDS = 5.0
RENEWAL_PAUSE = 0.005


@dataclass(slots=True, eq=False)
class UnackedDelivery:
    """One unacknowledged message. `lease` is None if it was deleted at receipt."""

    tag: int
    receiver: Receiver
    delivery: Delivery
    consumer_tag: str = ""
    lease: Lease | None = None

    def lapsed(self) -> bool:
        """True if its lease has expired, so that no consumer may work on it."""
        return self.lease is not None and not self.lease.alive(boot_seconds())


class Unacked:
    """The unacknowledged messages of one channel."""

    def __init__(self, keeper: LeaseKeeper, *, remote: bool = False) -> None:
        """remote: whether a settlement waits for a network, so that acknowledgements do not."""
        self._keeper = keeper
        self._completions = Completions(self._complete) if remote else None
        self._holdings: dict[int, UnackedDelivery] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._holdings)

    def hold(self, receiver: Receiver, holdings: list[UnackedDelivery], seconds: float) -> None:
        """Renew these from now on, each time for `seconds`."""
        for holding in holdings:
            holding.lease = Lease.of(holding.delivery, seconds=seconds)
            self._holdings[holding.tag] = holding
        self._keeper.hold(receiver, [holding.lease for holding in holdings if holding.lease])

    def holds(self, receiver: Receiver) -> bool:
        """True if a message of this receiver is not settled yet."""
        return any(held.receiver is receiver for held in list(self._holdings.values()))

    def tags_up_to(self, tag: int) -> list[int]:
        """The tags of messages delivered up to and including `tag`, in order."""
        return sorted(held for held in list(self._holdings) if held <= tag)

    def settle(self, tag: int, settlement: Settlement) -> bool:
        """Carry out `settlement`; returns True if it took effect, or will in the background.

        False: the message is not held here, or its lease was lost. Raises BrokerUnavailable if the
        broker gave no answer within a few tries: the message may be delivered again then. If the
        process dies before the broker has answered, the lease expires and the message is delivered
        again.
        """
        holding = self._holdings.pop(tag, None)
        if holding is None or holding.lease is None:
            logger.warning(
                "message %s is not held here (already settled, or received before a fork):"
                " cannot %s it", tag, name_of(settlement),
            )  # fmt: skip
            return False
        completions = self._completions
        if (
            completions is not None
            and isinstance(settlement, Complete)
            and holding.delivery.session is None
        ):
            completions.add(holding)
            self.wake()
            return True
        try:
            return self._settle(holding, holding.lease, settlement)
        finally:
            self.wake()

    def give_back(self, tags: Sequence[int], settlement: Settlement) -> None:
        """Settle messages that will not be acknowledged; never raises.

        If the broker is unreachable, the leases of the rest expire by themselves.
        """
        for number, tag in enumerate(tags):
            try:
                self.settle(tag, settlement)
            except BrokerError as error:
                rest = [self._holdings.pop(left, None) for left in tags[number + 1 :]]
                self._keeper.drop([held.lease for held in rest if held and held.lease])
                logger.warning(
                    "could not give back %d messages; they come back when their leases end: %s",
                    len(tags) - number,
                    error,
                )
                return

    def drop(self, holding: UnackedDelivery) -> None:
        """Forget a message whose lease expired before it was delivered; it will be redelivered."""
        self._holdings.pop(holding.tag, None)
        if holding.lease is not None:
            self._keeper.drop([holding.lease])
        logger.warning(
            "message %s of queue %s waited here until its lease expired, it will be redelivered;"
            " lower the prefetch count or make the lease longer",
            holding.delivery.envelope.message_id,
            holding.delivery.queue,
        )

    def wake(self) -> None:
        """End the waits of `wait_for_change`."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_change(self, seconds: float) -> None:
        """Wait until a message is settled, at most `seconds`."""
        with self._changed:
            self._changed.wait(seconds)

    def close(self) -> None:
        """Wait until the acknowledged messages are completed."""
        if self._completions is not None and not self._completions.close(CLOSE_SECONDS):
            logger.warning(
                "acknowledged messages were not completed within %g s; they are delivered again"
                " when their leases end",
                CLOSE_SECONDS,
            )

    def _complete(self, holdings: Sequence[UnackedDelivery]) -> None:
        """Complete these in one request for each receiver; one that gets no answer is repeated."""
        ready: dict[Receiver, list[tuple[UnackedDelivery, Lease]]] = {}
        for holding in holdings:
            if holding.lease is not None and self._begin(holding.lease):
                ready.setdefault(holding.receiver, []).append((holding, holding.lease))
            elif holding.lease is not None:
                self._too_late(holding, holding.lease, Complete())
        for receiver, held in ready.items():
            answers: Sequence[Settled | Lost | Unknown]
            try:
                answers = receiver.settle([(holding.delivery, Complete()) for holding, _ in held])
            except AztaskError as error:
                answers = [Unknown(str(error))] * len(held)
            except Exception:  # an SDK may raise anything; other queues' messages go on
                logger.exception(
                    "could not complete %d messages; they are delivered again", len(held)
                )
                self._keeper.drop([lease for _, lease in held])
                continue
            self._keeper.book(list(zip([lease for _, lease in held], answers, strict=True)))
            for (holding, lease), answer in zip(held, answers, strict=True):
                if isinstance(answer, Lost):
                    self._too_late(holding, lease, Complete())
                elif isinstance(answer, Unknown):
                    self._complete_alone(holding, lease)

    def _complete_alone(self, holding: UnackedDelivery, lease: Lease) -> None:
        try:
            self._settle(holding, lease, Complete())
        except AztaskError as error:
            logger.warning("%s", error)
        except Exception:  # an SDK may raise anything; the messages beside it go on
            logger.exception("could not complete a message; it is delivered again")
            self._keeper.drop([lease])

    def _settle(self, holding: UnackedDelivery, lease: Lease, settlement: Settlement) -> bool:
        for attempt in range(SETTLE_TRIES):
            if not self._begin(lease):
                self._too_late(holding, lease, settlement)
                return False
            try:
                answer = self._answer(holding, settlement)
            except AztaskError:
                self._keeper.drop([lease])
                raise
            self._keeper.book([(lease, answer)])
            if isinstance(answer, Settled):
                return True
            if isinstance(answer, Lost):
                self._too_late(holding, lease, settlement)
                return False
            if attempt < SETTLE_TRIES - 1:
                time.sleep(FIRST_PAUSE * 2**attempt)
        self._keeper.drop([lease])
        raise BrokerUnavailable(
            f"the broker did not confirm to {name_of(settlement)} message"
            f" {holding.delivery.envelope.message_id}: it may be delivered again"
        )

    def _begin(self, lease: Lease) -> bool:
        """True if the lease may be settled now, after waiting for a renewal that is under way."""
        while not self._keeper.begin_settlement([lease])[0]:
            if lease.state is not LeaseState.RENEWING or boot_seconds() >= lease.deadline:
                return False
            time.sleep(RENEWAL_PAUSE)
        return True

    @staticmethod
    def _answer(holding: UnackedDelivery, settlement: Settlement) -> Settled | Lost | Unknown:
        try:
            answer = holding.receiver.settle([(holding.delivery, settlement)])[0]
        except BrokerUnavailable as error:
            logger.warning("could not %s a message: %s", name_of(settlement), error)
            return Unknown(str(error))
        except AlreadySettled:
            return Settled()
        return answer

    @staticmethod
    def _too_late(holding: UnackedDelivery, lease: Lease, settlement: Settlement) -> None:
        logger.warning(
            "too late to %s message %s of queue %s, whose lease was lost (%s):"
            " it is delivered again; make the lease longer or the task shorter",
            name_of(settlement),
            holding.delivery.envelope.message_id,
            holding.delivery.queue,
            lease.lost_reason or lease.state.value,
        )


def log_lost(lease: Lease) -> None:
    """Log once that a lease was lost while its message is being worked on; a keeper's callback."""
    logger.warning(
        "the lease of message %s of queue %s was lost (%s): another consumer may have it",
        lease.delivery.envelope.message_id,
        lease.delivery.queue,
        lease.lost_reason,
    )
