"""What goes into a queue and what comes out: plain values without behaviour.

Rules: the payload is opaque to the engine. ``due``, ``expires_at`` and ``enqueued_at`` are UTC
epoch seconds; ``lease_until`` counts on the engine's lease clock
(`aztask.support.clock.Clock.monotonic`), which all processes of the machine share. They are tuples
because making one costs a third of what a frozen dataclass costs, and the engine makes one per
message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from aztask.errors import ConfigurationError

READY: Final = 0
LEASED: Final = 1
SCHEDULED: Final = 2
DEFERRED: Final = 3

STATES: Final = ("active", "leased", "scheduled", "deferred")
"""The words for the four numbers above, which are what the file holds."""

DELIVERIES_EXCEEDED: Final = "MaxDeliveryCountExceeded"
"""The dead-letter reason when the delivery count reached the queue's limit (Service Bus's word)."""

TIME_TO_LIVE_EXPIRED: Final = "TTLExpiredException"
"""The dead-letter reason when a message expired (Service Bus's word)."""

DUPLICATE: Final = 0
"""Stands in for the sequence number of a message that duplicate detection dropped."""


class NewMessage(NamedTuple):
    """A message to send. due: not received before this time; None or past: at once."""

    payload: bytes
    message_id: str = ""
    session: str | None = None
    due: float | None = None
    expires_at: float | None = None


class Leased(NamedTuple):
    """A received message.

    token: 32 hexadecimal digits that prove the lease; "" when it was received and deleted.
    delivery_count: 1 at first. reason, description: why it is a dead letter.
    """

    seq: int
    token: str
    payload: bytes
    message_id: str
    session: str | None
    delivery_count: int
    enqueued_at: float
    expires_at: float | None
    lease_until: float
    reason: str | None
    description: str | None


class PeekedMessage(NamedTuple):
    """A message looked at without taking it. state: one of `STATES`. due: when scheduled."""

    seq: int
    payload: bytes
    message_id: str
    session: str | None
    delivery_count: int
    enqueued_at: float
    expires_at: float | None
    state: str
    due: float | None
    lease_until: float | None
    reason: str | None
    description: str | None


class SessionLease(NamedTuple):
    """The exclusive right to a session's messages. until: on the lease clock."""

    session: str
    token: str
    until: float


class Counts(NamedTuple):
    """How many messages a queue holds, by state, and how many dead letters."""

    active: int
    leased: int
    scheduled: int
    deferred: int
    dead: int


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """How a queue behaves.

    lease_seconds: granted where a receive does not say. max_deliveries: a message given back or
    lapsed after that many deliveries becomes a dead letter. duplicate_window: seconds within which
    a message id is stored once; 0: no detection. time_to_live: seconds after which a message
    expires; None: never. dead_letter_expired: expired messages become dead letters instead of
    going away. sessions: every message belongs to a session and is received through it.
    """

    lease_seconds: float = 60.0
    max_deliveries: int = 100
    duplicate_window: float = 0.0
    time_to_live: float | None = None
    dead_letter_expired: bool = False
    sessions: bool = False

    def __post_init__(self) -> None:
        for name, value, low in (
            ("lease_seconds", self.lease_seconds, 0.0),
            ("max_deliveries", self.max_deliveries, 0.0),
            ("time_to_live", self.time_to_live, 0.0),
        ):
            if value is not None and not low < value < math.inf:
                raise ConfigurationError(f"{name} must be a number above 0, not {value!r}")
        if not 0 <= self.duplicate_window < math.inf:
            raise ConfigurationError(
                f"duplicate_window must be 0 or a number of seconds, not {self.duplicate_window!r}"
            )
