"""A delivery, and what a service can answer to its renewal or settlement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from aztask.errors import AlreadySettled, ConfigurationError
from aztask.message.envelope import Envelope

Position: TypeAlias = int | str
"""A message's place in its queue: its sequence number, or its message id if there are none."""


@dataclass(slots=True, eq=False)
class Delivery:
    """One receipt of an envelope, held under a lease.

    token: proves the lease; only the adapter reads it.
    delivery_count: how often the service delivered the message, including this time (first: 1).
    enqueued_at: UTC epoch seconds.
    deadline: end of the lease, see rule 2 of `aztask.queues.base`; renewals move it.
    lease_seconds: the duration that was granted last.
    dead_letter_reason, dead_letter_description: set if the message is a dead letter.
    """

    queue: str
    envelope: Envelope
    position: Position
    token: str
    delivery_count: int
    enqueued_at: float
    deadline: float
    lease_seconds: float
    session: str | None = None
    dead_letter_reason: str | None = None
    dead_letter_description: str | None = None


@dataclass(slots=True, eq=False)
class OwnDelivery(Delivery):
    """A delivery as an adapter makes it: it knows whether it was settled."""

    settled: bool = False


D = TypeVar("D", bound=OwnDelivery)


def own(kind: type[D], delivery: Delivery) -> D:
    """The delivery, which an adapter made as one of `kind`. Raises ConfigurationError."""
    if not isinstance(delivery, kind):
        raise ConfigurationError("this delivery came from another broker; settle it there")
    return delivery


def unsettled(kind: type[D], delivery: Delivery) -> D:
    """As `own`, for a settlement. Raises AlreadySettled too."""
    ours = own(kind, delivery)
    if ours.settled:
        raise AlreadySettled(
            f"message {delivery.position} of queue {delivery.queue!r} was already settled, or was "
            "received and deleted; settle each delivery once"
        )
    return ours


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease lasts until `deadline`, on the clock of `aztask.support.clock`."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Settled:
    """The settlement took effect, now or in an earlier attempt whose reply was lost."""


@dataclass(frozen=True, slots=True)
class Lost:
    """We no longer hold the lease; nothing was changed."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer: it may or may not have happened.

    untouched: only for renewals: the token is still valid, or will become known; try again.
    """

    reason: str = ""
    untouched: bool = False
