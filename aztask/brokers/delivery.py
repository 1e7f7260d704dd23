"""A delivery, and what a service can answer to its renewal or settlement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from aztask.message.envelope import Envelope

Position: TypeAlias = int | str
"""Where a message lies: the sequence number, or the message id where a service has no numbers."""


@dataclass(slots=True, eq=False)
class Delivery:
    """One receipt of an envelope, held under a lease.

    delivery_count: how often it was delivered, this one included (1 at first), as far as the
    service counts. enqueued_at: UTC epoch seconds. deadline: see rule 2; renewals move it.
    lease_seconds: what was granted last. token: opaque to everybody but the adapter.
    dead_letter_reason, dead_letter_description: set on deliveries out of the dead letters.
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


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease lasts until `deadline` (clock of rule 2)."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Settled:
    """The settlement took effect, now or in an earlier try whose reply was lost."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease is not ours any more; nothing was changed."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer: it may or may not have happened.

    untouched: of a renewal, that the token still holds or will be known: ask again.
    """

    reason: str = ""
    untouched: bool = False
