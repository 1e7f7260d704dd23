"""The messages and settings of the engine: plain values without behaviour.

Rules
1. The engine never reads a payload.
2. ``due``, ``expires_at`` and ``enqueued_at`` are UTC epoch seconds. ``lease_until`` is a time on
   the engine's lease clock (`aztask.support.clock.Clock.monotonic`), which all processes of the
   machine share.

Messages are named tuples, because the engine makes one per message, and a tuple costs a third of a
frozen dataclass.
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
"""The names of the four states above; the file holds their numbers."""

DELIVERIES_EXCEEDED: Final = "MaxDeliveryCountExceeded"
"""Dead-letter reason: the delivery count reached the queue's limit (Service Bus's word)."""

TIME_TO_LIVE_EXPIRED: Final = "TTLExpiredException"
"""Dead-letter reason: the message expired (Service Bus's word)."""

DUPLICATE: Final = 0
"""Returned instead of a sequence number if duplicate detection dropped the message."""


# -- The numbers of a numbered queue ---------------------------------------------------------------
#
# ``seq`` names a message in the whole file. A numbered queue also counts its own messages: 1, 2, 3
# and so on, without gaps. Its ``seq`` contains that number, so it costs no column and no index:
#
#     -2**63 + (id of the queue << 40) + (number << 5) + partition
#
# Each partition counts its own, as in Service Bus. A receive is in the order of ``seq``: it takes
# turns between the partitions and keeps the order in each. A peek is in the order of the numbers as
# users see them, which have the partition on top.
#
# It is negative, because SQLite chooses positive ones for the other queues (AUTOINCREMENT takes the
# largest ever used plus one): the two never meet, also not if a process of an earlier release,
# which lets SQLite choose, stores messages in a numbered queue.

FIRST_SEQ: Final = -(1 << 63)
"""Lower than the `seq` of every message."""

PARTITIONS: Final = 31
_QUEUE_SHIFT, _NUMBER_SHIFT, _VISIBLE_SHIFT = 40, 5, 48
_QUEUE_STEP: Final = 1 << _QUEUE_SHIFT
_MAX_NUMBER: Final = (1 << _QUEUE_SHIFT - _NUMBER_SHIFT) - 1
MAX_NUMBERED_ID: Final = (1 << 63 - _QUEUE_SHIFT) - 1
NUMBER_STEP: Final = 1 << _NUMBER_SHIFT
"""By how much `seq` grows from one number to the next."""


def first_seq(queue_id: int) -> int:
    """Where the `seq` of a numbered queue begin: add `NUMBER_STEP` times the number to it."""
    return FIRST_SEQ + queue_id * _QUEUE_STEP


def number_of(seq: int) -> int:
    """The number that a message has in its numbered queue; the `seq` itself in another queue.

    The partition is in the top 16 bits of 64, 0 if there is none, as in Service Bus.
    """
    if seq >= 0:
        return seq
    return (seq & PARTITIONS) << _VISIBLE_SHIFT | (seq >> _NUMBER_SHIFT) & _MAX_NUMBER


def seq_in(queue_id: int, number: int) -> int:
    """The `seq` of a number in a numbered queue.

    A number that no message can have becomes 0 or the last: a peek can begin there.
    """
    number = max(number, 0)
    partition = min(number >> _VISIBLE_SHIFT, PARTITIONS)
    own = min(number & (1 << _VISIBLE_SHIFT) - 1, _MAX_NUMBER)
    return first_seq(queue_id) + (own << _NUMBER_SHIFT) + partition


class NewMessage(NamedTuple):
    """A message to send. due: deliver it from this time on; None or a past time: at once.

    partition: 1 to `PARTITIONS`, becomes part of its number in a numbered queue; 0 for none.
    """

    payload: bytes
    message_id: str = ""
    session: str | None = None
    due: float | None = None
    expires_at: float | None = None
    partition: int = 0


class Leased(NamedTuple):
    """A received message.

    token: 32 hexadecimal digits that prove the lease; "" after receive-and-delete.
    delivery_count: 1 for the first delivery.
    reason, description: why the message is a dead letter.
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
    """A message that was read without leasing it.

    state: one of `STATES`. due: only for scheduled messages.
    """

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
    """The exclusive lease of a session's messages. until: its end, on the lease clock."""

    session: str
    token: str
    until: float


class Counts(NamedTuple):
    """The number of a queue's messages by state, and of its dead letters."""

    active: int
    leased: int
    scheduled: int
    deferred: int
    dead: int


@dataclass(frozen=True, slots=True)
class StoredSettings:
    """The settings of a queue.

    lease_seconds: the lease if a receive does not give one.
    max_deliveries: a message that is given back, or whose lease expires, after this many deliveries
    becomes a dead letter.
    duplicate_window: seconds within which a message id is stored once; 0: no detection.
    time_to_live: seconds after which a message expires; None: never.
    dead_letter_expired: expired messages become dead letters; False: they are deleted.
    sessions: every message belongs to a session and is received through it.
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
