"""A delivery from Service Bus, and the verbs of its settlements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from azure.servicebus import ServiceBusReceivedMessage

from aztask.queues.base import Delivery
from aztask.queues.delivery import OwnDelivery, unsettled
from aztask.queues.servicebus.reading import damage_of
from aztask.queues.servicebus.wire import (
    ENQUEUED,
    LOCKED_UNTIL,
    dead_letter_texts,
    envelope_of,
    epoch_of,
    position_of,
)
from aztask.settlement import Abandon, Complete, DeadLetter, Defer, Release, Resubmit, Settlement


@dataclass(slots=True, eq=False)
class BusDelivery(OwnDelivery):
    """A delivery that knows its lock.

    lock: the lock token; None after receive-and-delete.
    message: the SDK's message.
    attempted: a settlement got no answer, so it may have taken effect.
    holder: the connection that held the session when the delivery came; None without sessions.
    """

    lock: UUID | None = None
    message: ServiceBusReceivedMessage | None = None
    attempted: bool = False
    holder: object = None


def delivery_of(
    message: ServiceBusReceivedMessage,
    queue: str,
    deadline: float,
    lease: float,
    *,
    dead_letter: bool,
    delete: bool,
) -> BusDelivery:
    """A received message as a delivery under a lease that ends at `deadline`."""
    lock: Any = message.lock_token
    reason, description = dead_letter_texts(message) if dead_letter else (None, None)
    envelope = envelope_of(message)
    return BusDelivery(
        queue,
        envelope,
        position_of(message),
        str(lock or ""),
        (message.delivery_count or 0) + 1,
        epoch_of(message, ENQUEUED) or 0.0,
        deadline,
        lease,
        envelope.session,
        reason,
        description,
        settled=delete,
        lock=lock,
        message=message,
    )


def ages(message: ServiceBusReceivedMessage) -> tuple[float, float] | None:
    """(enqueued time, end of the lock), by the service's clock.

    None if one is missing, and for a damaged message, whose times may be the sender's.
    """
    if damage_of(message) is not None:
        return None
    enqueued, locked = epoch_of(message, ENQUEUED), epoch_of(message, LOCKED_UNTIL)
    return None if enqueued is None or locked is None else (enqueued, locked)


def all_unsettled(deliveries: Sequence[Delivery]) -> list[BusDelivery]:
    """Check that all deliveries are ours and not settled.

    Raises AlreadySettled, ConfigurationError.
    """
    return [unsettled(BusDelivery, delivery) for delivery in deliveries]


def verb_of(settlement: Settlement) -> tuple[str, str, str]:
    """(verb, reason, description) for the service. Resubmit completes: its clone is sent first."""
    match settlement:
        case Complete() | Resubmit():
            return "complete", "", ""
        case Abandon() | Release():
            return "abandon", "", ""
        case Defer():
            return "defer", "", ""
        case DeadLetter(reason, description):
            return "dead-letter", reason, description
