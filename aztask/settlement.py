"""How a delivery ends: values that can be printed, compared and recorded. No I/O happens here.

A retry policy returns one, the executor records it, the broker carries it out. What is recorded is
enough to repeat it exactly: a redelivery of a recorded attempt settles the same way again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from aztask.message.envelope import Envelope
from aztask.support.display import storable
from aztask.support.durations import LONGEST_SECONDS

REASON_LIMIT = 1024
"""Characters that a reason or a description may have: Service Bus allows 1024 each [measured]."""

LATEST_DUE: Final = 250_000_000_000.0
"""UTC epoch seconds in the year 9892: dates after the year 9998 overflow some services."""


@dataclass(frozen=True, slots=True)
class Complete:
    """The work is done: remove the message."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Make the message available again at once; the delivery counts toward the delivery limit."""


@dataclass(frozen=True, slots=True)
class Release:
    """Give the message back as if it had not been delivered: the delivery does not count.

    Where the service has no such thing (``Capabilities.release``) the broker abandons instead.
    """


@dataclass(frozen=True, slots=True)
class Defer:
    """Set the message aside; from now on it is received only by its position.

    For a retry, delay, due and counted are as with `Resubmit`; the pointer that will call for it
    is sent by whoever defers, before; a broker only defers.
    """

    delay: float = 0.0
    due: float | None = None
    counted: bool = True


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Move the message to the dead letters.

    Both texts are cut, and escaped where needed, to what every service allows.
    """

    reason: str
    description: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", storable(self.reason, REASON_LIMIT))
        object.__setattr__(self, "description", storable(self.description, REASON_LIMIT))


@dataclass(frozen=True, slots=True)
class Resubmit:
    """Send a clone that becomes available after `delay` seconds, then remove the original.

    due: UTC epoch seconds at which the clone becomes available; set when the decision is recorded,
    so that a repeated settlement keeps the time. counted: whether this was a failure (a retry) or
    not (a snooze, an unknown task's grace). asked: whether the task itself named the delay.
    envelope: the clone; set before it goes to a broker.
    """

    delay: float = 0.0
    due: float | None = None
    counted: bool = True
    asked: bool = False
    envelope: Envelope | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the lease and run nothing under it for `delay` seconds, then abandon. due: as above."""

    delay: float = 0.0
    due: float | None = None


@dataclass(frozen=True, slots=True)
class Lapse:
    """Settle nothing and renew no more: the message is available again when its lease ends."""


Settlement: TypeAlias = Complete | Abandon | Release | Defer | DeadLetter | Resubmit
"""What a broker carries out."""

Decision: TypeAlias = Settlement | Hold | Lapse
"""What a worker may decide: it waits with the two that no broker is asked for."""

_NAMES: dict[str, type[Any]] = {
    "complete": Complete,
    "abandon": Abandon,
    "release": Release,
    "defer": Defer,
    "dead-letter": DeadLetter,
    "resubmit": Resubmit,
    "hold": Hold,
    "lapse": Lapse,
}
_KINDS = {kind: name for name, kind in _NAMES.items()}


def name_of(settlement: Decision) -> str:
    """The settlement's word, as events and tables show it: ``"dead-letter"`` and so on."""
    return _KINDS[type(settlement)]


def to_record(settlement: Decision) -> dict[str, Any]:
    """Plain data that `from_record` turns back into an equal settlement (without the envelope)."""
    record: dict[str, Any] = {"settle": name_of(settlement)}
    if isinstance(settlement, DeadLetter):
        record.update(reason=settlement.reason, description=settlement.description)
    elif isinstance(settlement, Resubmit):
        record.update(delay=settlement.delay, due=settlement.due, counted=settlement.counted)
        if settlement.asked:
            record.update(asked=True)
    elif isinstance(settlement, Defer):
        record.update(delay=settlement.delay, due=settlement.due, counted=settlement.counted)
    elif isinstance(settlement, Hold):
        record.update(delay=settlement.delay, due=settlement.due)
    return record


def from_record(record: dict[str, Any]) -> Decision:
    """The decision that `to_record` wrote.

    Raises KeyError, TypeError or ValueError on anything else: a record may be damaged or forged,
    and what is made of it is carried out.
    """
    fields = dict(record)
    kind = _NAMES[fields.pop("settle")]
    for name, value in fields.items():
        if name not in _CHECKS or not _CHECKS[name](value):
            raise TypeError(f"a settlement's {name!r} cannot be {type(value).__name__}")
    settlement: Decision = kind(**fields)
    return settlement


def _within(value: object, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0.0 <= value <= most


_CHECKS: Final[dict[str, Callable[[object], bool]]] = {
    "delay": lambda value: _within(value, LONGEST_SECONDS),
    "due": lambda value: value is None or _within(value, LATEST_DUE),
    "counted": lambda value: isinstance(value, bool),
    "asked": lambda value: isinstance(value, bool),
    "reason": lambda value: isinstance(value, str),
    "description": lambda value: isinstance(value, str),
}


def with_envelope(settlement: Resubmit, envelope: Envelope, delay: float) -> Resubmit:
    """The same decision, ready for a broker: with the clone and the delay that is left."""
    return replace(settlement, envelope=envelope, delay=delay)
